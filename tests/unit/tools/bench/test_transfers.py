"""Rates of transfers, and the share of their time in which the compute did not wait."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pg_tensile.planning.device.profile import Direction
from pg_tensile.tools.bench.transfers import overlap, rate_gbps, transfer_ms

OUT, IN = Direction.OUT, Direction.IN


class Copied(NamedTuple):
    direction: Direction
    bytes: int
    start_us: float
    end_us: float


COPIES = st.lists(
    st.builds(
        lambda direction, nbytes, start, length: Copied(direction, nbytes, start, start + length),
        st.sampled_from(Direction),
        st.integers(0, 1000),
        st.integers(0, 30),
        st.integers(0, 10),
    ),
    max_size=8,
)


def test_a_rate_is_the_bytes_over_the_durations_of_its_direction():
    copies = [Copied(OUT, 3_000_000, 0, 100), Copied(IN, 500_000, 50, 150), Copied(OUT, 1_000_000, 100, 200)]
    assert transfer_ms(copies) == pytest.approx(0.3)
    assert rate_gbps(copies, OUT) == pytest.approx(20) and rate_gbps(copies, IN) == pytest.approx(5)
    assert rate_gbps(copies[:1], IN) is None


def test_the_overlap_is_of_the_time_in_which_the_link_is_busy():
    """Both lanes are busy from 50 to 100 µs, which counts once; nothing moves from 150 to 200 µs."""
    copies = [Copied(IN, 1, 200, 250), Copied(OUT, 1, 0, 100), Copied(IN, 1, 50, 150)]
    assert overlap(copies, 0.0) == 1
    assert overlap(copies, 50.0) == pytest.approx(0.75)
    assert overlap(copies, 500.0) == 0
    assert overlap([], 0.0) is None


@given(COPIES, st.integers(0, 400))
def test_the_busy_time_is_that_of_any_copy(copies: list[Copied], stall: int):
    busy = sum(any(copy.start_us <= us < copy.end_us for copy in copies) for us in range(50))
    found = overlap(copies, stall)
    assert found is None if busy == 0 else found == pytest.approx(max(0.0, 1 - stall / busy))
