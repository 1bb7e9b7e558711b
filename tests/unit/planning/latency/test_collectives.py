"""The cost model of an all-reduce on a ring."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from pg_tensile.planning.latency.collectives import BYTES_PER_S, LATENCY_US, ring_us


@given(nbytes=st.floats(0, 1e11), ranks=st.integers(1, 4096))
def test_a_ring_takes_the_bound_and_a_latency_for_each_message(nbytes: float, ranks: int) -> None:
    """Whatever the algorithm, 2 (N − 1) / N times the bytes pass each rank's link."""
    bound_us = 2 * (ranks - 1) / ranks * nbytes / BYTES_PER_S * 1e6
    assert math.isclose(ring_us(nbytes, ranks), bound_us + 2 * (ranks - 1) * LATENCY_US, rel_tol=1e-9)
