"""Idle intervals: where they are, and how a further use divides them."""

from __future__ import annotations

from hypothesis import given

from pg_tensile.planning.building_blocks.idle import IdleInterval, IdleIntervals, idle_intervals
from pg_tensile.planning.trace.lists import Columns
from pg_tensile.planning.trace.trace import Trace
from tests.unit.graphs import A, F, chain, dice, random_trace

END = 2 * 10  # position of the end of an iteration of `chain`


def test_a_persistent_tensor_is_also_idle_across_the_end_of_the_iteration() -> None:
    idle = IdleIntervals(Columns(chain()))
    assert list(idle.of(A)) == [IdleInterval(A, 2 * 1, 2 * 2), IdleInterval(A, 2 * 2, 2 * 6)]
    assert list(idle.of(F)) == [IdleInterval(F, 2 * 4, 2 * 8), IdleInterval(F, 2 * 8, END + 2 * 4)]
    assert idle.crosses_end(IdleInterval(F, 2 * 8, END + 2 * 4)) and idle.across_end(A) is None


def test_a_recomputation_right_before_an_operator_uses_its_inputs() -> None:
    interval = IdleInterval(A, 2 * 3 - 1, 2 * 6 - 1)
    assert (interval.last_user, interval.next_user, interval.deadline) == (3, 6, 5)
    assert interval.away_if_recomputed == (4, 5)


def test_a_further_use_divides_an_interval() -> None:
    columns = Columns(chain())
    idle = IdleIntervals(columns)
    whole = idle.around(F, 2 * 2 - 1)
    assert whole == IdleInterval(F, 2 * 8, END + 2 * 4)
    assert idle.split(whole, 2 * 2 - 1) == (IdleInterval(F, 2 * 8, END + 2 * 2 - 1), IdleInterval(F, 2 * 2 - 1, 2 * 4))
    assert idle.is_used(F, 2 * 2 - 1) and idle.next_use(F, 2 * 8) == END + 2 * 2 - 1
    assert not IdleIntervals(columns).is_used(F, 2 * 2 - 1)  # which another planner still sees without it


@given(dice().map(random_trace))
def test_all_intervals_of_a_trace_are_those_of_its_tensors(trace: Trace) -> None:
    idle = IdleIntervals(Columns(trace))
    sizes = trace.tensor_bytes.tolist()
    intervals = [interval for tensor, size in enumerate(sizes) if size for interval in idle.of(tensor)]
    assert [IdleInterval(*row) for row in idle_intervals(trace).tolist()] == intervals
