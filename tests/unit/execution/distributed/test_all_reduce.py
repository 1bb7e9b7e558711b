"""Steps of several ranks: the bits of DistributedDataParallel, whatever the plans of the ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pg_tensile.execution.capture import OptimizerSpec
from tests.unit import ranked
from tests.unit.ranked import Job, Ranks

SGD = OptimizerSpec("sgd", 0.1, momentum=0.9)
JOBS = {
    "adamw": Job(),
    "sgd": Job(SGD),
    "clipped": Job(SGD, clip=0.5),
    "dropout": Job(dropout=0.5),
    "a bucket each": Job(bucket_bytes=1),
}


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(value, second[name]) for name, value in first.items())


def moved(result: dict[str, Tensor]) -> bool:
    """Return whether training has changed every weight that it may change."""
    initial = ranked.weights(ranked.net())
    return all(not torch.equal(value, initial[name]) for name, value in result.items() if name != "frozen")


@pytest.mark.parametrize("name", JOBS)
def test_two_ranks_have_the_bits_of_distributed_data_parallel(ranks: Ranks, name: str) -> None:
    job = JOBS[name]
    (ours, other), (theirs, _), (eager, _) = (
        ranks.call(2, function, job) for function in (ranked.planned, ranked.parallel, ranked.eager)
    )
    assert moved(ours) and same(ours, other)
    assert same(ours, theirs) and same(eager, theirs)
