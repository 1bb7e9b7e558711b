"""What a contender's turns add to its row."""

from __future__ import annotations

from pg_tensile.execution.backends.conditions import Conditions
from pg_tensile.execution.runtime.record import Counters
from pg_tensile.tools.bench.conditions import AllocatorUse, TurnConditions
from pg_tensile.tools.bench.contender import Contender, measured_row
from pg_tensile.tools.bench.contenders import Stepper, Turn
from pg_tensile.tools.bench.row import Row

EMPTY = Row("net", "joint", "cuda:0", 8, vanilla_peak_bytes=200)


def turn(step_ms: tuple[float, ...], use: AllocatorUse | None = None, passive: int = 0) -> Turn:
    totals = Counters(iterations=len(step_ms), passive_swap_ins=passive, peak_bytes=100)
    conditions = TurnConditions(end=Conditions(sm_clock_mhz=round(100 * step_ms[0])))
    return Turn(9.0, step_ms, totals=totals, allocator=use, conditions=conditions)


def not_started() -> Stepper:
    raise AssertionError("its turns are given")


def row_of(*turns: Turn) -> Row:
    return measured_row(EMPTY, Contender("joint", not_started, turns=list(turns), context_bytes=5), 10.0, True)


def test_the_row_of_several_rounds():
    row = row_of(turn((10.0, 12.0), AllocatorUse(70, 60, 1)), turn((11.0, 13.0), AllocatorUse(80, 50, 2)))
    assert row.step_ms == [[10.0, 12.0], [11.0, 13.0]] and row.round_ms == [11.0, 12.0] and row.rounds_taken == 2
    assert (row.step_ms_min, row.step_ms_median, row.step_ms_max, row.eor) == (10.0, 11.5, 13.0, 1.15)
    assert (row.reserved_peak_bytes, row.allocated_peak_bytes, row.allocator_retries) == (80, 60, 3)
    assert row.conditions is not None and [turn.end for turn in row.conditions] == [
        *(Conditions(sm_clock_mhz=1000), Conditions(sm_clock_mhz=1100)),
    ]
    assert row.context_bytes == 5 and row.scatter is not None and row.scatter > 0.05
    assert row.scatter_causes is not None and row.scatter_causes[0] == "the SM clock was 1,000 to 1,100 MHz"


def test_one_passive_swap_in_is_not_lost_among_many_steps():
    row = row_of(turn((10.0, 10.0, 30.0, 10.0)), turn((10.0, 30.0, 30.0), passive=1))
    assert row.passive_swap_ins == 1
    assert row.scatter_causes == ["tensors were swapped in passively, on average up to 1 a step"]


def test_the_host_has_no_allocator():
    row = row_of(turn((10.0, 10.0)))
    assert row.reserved_peak_bytes is row.allocated_peak_bytes is row.allocator_retries is None
    assert row.out_gbps is row.in_gbps is row.overlap is row.transfer_ms is None
    assert row.scatter == 0 and row.scatter_causes == []
