"""When counted zeros are news to the scheduler, and which compressions a job may ask for."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pg_tensile.errors import TrainingError
from pg_tensile.execution.training.settings import COMPRESSIONS, Settings
from pg_tensile.planning.compression.sparsity import Statistics
from pyworker.children.compression import CompressionClient, is_news

BYTES = np.array([1000, 1000, 98_000])


def zeros(*shares: float) -> dict[int, Statistics]:
    return {tensor: Statistics(share, 0.1) for tensor, share in enumerate(shares)}


def test_more_tensors_or_other_zeros_are_news_and_what_is_small_is_not():
    told = zeros(0.5, 0.5, 0.5)
    assert is_news(zeros(0.5), {}, BYTES)
    assert not is_news(told, told, BYTES)
    assert not is_news(zeros(0.0, 1.0, 0.5), told, BYTES)  # of little
    assert not is_news(zeros(0.5, 0.5, 0.51), told, BYTES)
    assert is_news(zeros(0.5, 0.5, 0.55), told, BYTES)
    assert not is_news(zeros(0.5, 0.5), told, BYTES)


def test_an_unknown_compression_is_refused_with_the_known_ones():
    assert [Settings(1, 8, compression=name).compression for name in COMPRESSIONS] == list(COMPRESSIONS)
    with pytest.raises(TrainingError, match='no compression "zip"') as refused:
        Settings(1, 8, compression="zip")
    assert all(name in str(refused.value.hint) for name in ("auto", "zvc", "rle", "csr", "lz4"))


class Steps:
    """Counts how often it is asked to count zeros; it is never done with it."""

    asked = 0

    def measure_sparsity(self) -> None:
        self.asked += 1

    def sparsity(self) -> None:
        return None


@pytest.mark.parametrize(("compression", "asked"), [("auto", [1, 2, 3]), ("none", [0, 0, 0])])
def test_zeros_are_counted_again_soon_after_the_first_step(compression, asked):
    steps, counts = Steps(), []
    client = CompressionClient(None, torch.device("cpu"), compression)  # type: ignore[arg-type]  # nothing is sent
    client.begin(steps)  # type: ignore[arg-type]
    for until in (5, 50, 500):
        while client._ticks < until:
            client.tick()
        counts.append(steps.asked)
    assert counts == asked
