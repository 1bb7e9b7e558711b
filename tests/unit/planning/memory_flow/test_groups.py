"""Groups of steps: they cover an iteration, bound what it takes, and are as many as the sizes ask for."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pg_tensile.errors import PlanError
from pg_tensile.planning.device.profile import RTX_A6000
from pg_tensile.planning.memory_flow.groups import (
    GROUP_ROW,
    bytes_to_groups,
    counted_groups,
    cut_alike,
    groups_of,
    groups_to_bytes,
    resting_bytes,
    step_bytes,
)
from pg_tensile.planning.plan.access_sequence import AccessSequence
from pg_tensile.planning.plan.plan import NO_EVENTS
from pg_tensile.planning.simulator.alone import evaluate
from tests.examples import examples
from tests.unit.graphs import MIXED, RECOMPUTE_ALL, SWAP_ALL, Style, dice, random_plan, random_trace

STYLES = st.sampled_from((None, MIXED, SWAP_ALL, RECOMPUTE_ALL))


def sequence_of(random: Random, style: Style | None) -> AccessSequence:
    trace = random_trace(random, 16, 20)
    return AccessSequence(trace, random_plan(random, trace, style) if style else NO_EVENTS)


@given(random=dice(), style=STYLES, parts=st.integers(1, 30), split_us=st.none() | st.floats(0.1, 100))
@examples(40)
def test_groups_cover_an_iteration(random: Random, style: Style | None, parts: int, split_us: float | None) -> None:
    sequence = sequence_of(random, style)
    footprint, us = step_bytes(sequence), sequence.trace.latency_us[sequence.steps]
    groups = groups_of(sequence, max(1, int(footprint.max()) // parts), split_us)
    assert [step for group in groups for step in range(group.first, group.last + 1)] == list(range(len(footprint)))
    assert [group.most_bytes for group in groups] == [int(footprint[g.first : g.last + 1].max()) for g in groups]
    assert np.isclose(sum(group.us for group in groups), us.sum())
    assert all(group.us <= split_us * (1 + 1e-9) or group.first == group.last for group in groups if split_us)
    # What is kept between two groups was there during the one before.
    assert all(group.rest_bytes <= group.most_bytes for group in groups)


@given(random=dice(), style=STYLES, parts=st.integers(1, 30))
@examples(20)
def test_a_job_takes_as_long_as_all_of_its_groups(random: Random, style: Style | None, parts: int) -> None:
    sequence = sequence_of(random, style)
    evaluation = evaluate(sequence, RTX_A6000)
    groups = groups_of(sequence, max(1, int(step_bytes(sequence).max()) // parts), None, evaluation.stalled_us)
    assert np.isclose(sum(group.us for group in groups), evaluation.iteration_us)


@given(random=dice(), style=STYLES, parts=st.integers(1, 30))
@examples(40)
def test_a_group_gains_or_gives_back_no_more_than_the_size(random: Random, style: Style | None, parts: int) -> None:
    """Before the peak, the most of a group is less than the size above what was reached before it, unless a single
    step takes that; after the peak likewise in reverse."""
    sequence = sequence_of(random, style)
    footprint = step_bytes(sequence)
    size = max(1, int(footprint.max()) // parts)
    groups = groups_of(sequence, size)
    peak = int(np.argmax(footprint))
    rising = [group for group in groups if group.last <= peak]
    falling = [group for group in groups if group.first > peak]
    assert len(rising) + len(falling) == len(groups)
    for group in rising:
        assert group.most_bytes < footprint[group.first] + size
    for group in falling:
        assert group.most_bytes < footprint[group.last] + size


@given(random=dice(), style=STYLES)
def test_what_rests_is_what_both_steps_have(random: Random, style: Style | None) -> None:
    sequence = sequence_of(random, style)
    resting, trace = resting_bytes(sequence), sequence.trace
    spans = list(zip(sequence.interval_tensor, sequence.interval_first, sequence.interval_last, strict=True))
    for step in range(len(resting) - 1):
        assert resting[step] == sum(trace.tensor_bytes[t] for t, first, last in spans if first <= step < last)
    assert resting[-1] == sum(trace.tensor_bytes[list(sequence.boundary.device)])


@given(random=dice(), style=STYLES, parts=st.integers(1, 30))
@examples(20)
def test_encoded_groups_are_the_same_without_times(random: Random, style: Style | None, parts: int) -> None:
    sequence = sequence_of(random, style)
    groups = groups_of(sequence, max(1, int(step_bytes(sequence).max()) // parts))
    data = groups_to_bytes(groups, sequence)
    assert bytes_to_groups(data) == tuple(group._replace(us=0.0) for group in groups)
    rows = np.frombuffer(data, GROUP_ROW)
    assert rows["first_operator"].tolist() == sequence.operators[[group.first for group in groups]].tolist()
    assert rows["last_operator"].tolist() == sequence.operators[[group.last for group in groups]].tolist()


@pytest.mark.parametrize(
    "rows",
    [
        [(1, 2, 0, 0, 5, 5)],  # begins late
        [(0, 2, 0, 0, 5, 5), (4, 5, 0, 0, 5, 5)],  # a gap
        [(0, -1, 0, 0, 5, 5)],
        [(0, 2, 0, 0, 5, 6)],  # keeps more than it takes
        [(0, 2, 0, 0, 5, -1)],
    ],
)
def test_impossible_groups_are_refused(rows: list[tuple[int, ...]]) -> None:
    with pytest.raises(PlanError):
        bytes_to_groups(np.array(rows, GROUP_ROW).tobytes())


def test_half_a_row_is_refused() -> None:
    with pytest.raises(PlanError, match="rows of 32 bytes"):
        bytes_to_groups(bytes(33))


@given(random=dice(), style=STYLES, count=st.integers(1, 20))
@examples(20)
def test_groups_are_as_many_as_asked_for_and_are_cut_alike_again(
    random: Random, style: Style | None, count: int
) -> None:
    sequence = sequence_of(random, style)
    stalled_us = evaluate(sequence, RTX_A6000).stalled_us
    groups = counted_groups(sequence, count, stalled_us)
    assert len(groups) <= 2 * count + 2
    rows = bytes_to_groups(groups_to_bytes(groups, sequence))
    assert cut_alike(rows, sequence, stalled_us) == groups
    for wrong in (rows[:-1], [*rows[:-1], rows[-1]._replace(last=rows[-1].last + 1)]):
        with pytest.raises(PlanError, match="last"):
            cut_alike(wrong, sequence)
