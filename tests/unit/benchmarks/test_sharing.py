"""Measurement of jobs that share an accelerator: what is kept of the samples, and what samples may raise."""

from __future__ import annotations

import threading

import pytest

from benchmarks.server.sampling import sampled
from benchmarks.server.sharing import Processes


def test_the_moment_of_the_largest_excess_over_the_ledger_is_kept() -> None:
    processes = Processes(None, None, "cuda")  # type: ignore[arg-type]
    for found, allowed in ((50, 100), (120, 130), (90, 80), (200, 195)):
        processes.keep(1, found, allowed)
    processes.keep(2, 10, 20)
    assert processes.most == {1: (90, 80), 2: (10, 20)}


def test_a_sample_that_fails_is_an_error_at_the_end() -> None:
    called = threading.Event()

    def look() -> None:
        called.set()
        raise ValueError("no such view")

    with pytest.raises(ValueError, match="no such view"), sampled(look, 0.001):
        assert called.wait(60)
