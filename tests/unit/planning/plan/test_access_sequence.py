"""Meaning of a plan: steps, residency and actions, worked out by hand on a small chain and compared with the oracle on
random graphs."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from benchmarks import planning_speed
from pg_tensile.errors import InvalidPlanError
from pg_tensile.planning.plan.access_sequence import AccessSequence, boundary
from pg_tensile.planning.plan.actions import REQUESTING, WAITING, ActionKind
from pg_tensile.planning.plan.plan import NO_EVENTS, Boundary, Event, EventKind, Plan
from pg_tensile.planning.trace.trace import Access, Kind, Mode, Operator, Phase, Tensor, Trace
from tests.examples import examples
from tests.repository import REPOSITORY
from tests.unit import graphs, oracle
from tests.unit.graphs import A, B, C, F, S, W, chain

OUT, IN, RECOMPUTE, RELEASE = EventKind


def told(plan: Plan, begin: Boundary | None = None, passive: bool = False) -> list[str]:
    """The actions on the chain, a line a step: what happens before it, the operator, what happens in its gap."""
    sequence = AccessSequence(chain(), plan, begin, passive)
    lines = [""] * len(sequence.steps)
    for kind, step, tensor, _ in sequence.actions():
        what = f"{sequence.steps[step]}" if kind is ActionKind.RUN else f"{kind.name.lower()}:{'wfsxabcde'[tensor]}"
        lines[step] += f" {what}" if lines[step] else what
    return lines


def residency(sequence: AccessSequence, tensor: int) -> list[tuple[int, int]]:
    chosen = sequence.interval_tensor == tensor
    return list(zip(sequence.interval_first[chosen].tolist(), sequence.interval_last[chosen].tolist(), strict=True))


def test_without_events_what_is_dead_goes():
    assert told(NO_EVENTS) == [
        "0", "1 free:x", "2", "3", "4", "5 free:b", "6 free:a free:d", "7 free:e", "8", "9 free:c",
    ]  # fmt: skip
    sequence = AccessSequence(chain(), NO_EVENTS)
    assert residency(sequence, A) == [(1, 6)]
    assert residency(sequence, W) == residency(sequence, F) == residency(sequence, S) == [(0, 9)]
    state = 10 + 11 + 12
    a, b, c, d, e = range(20, 25)
    assert sequence.footprint.tolist() == [
        state + 13, state + 13 + a, state + a + b, state + a + b, state + a + b + c, state + a + b + c + d,
        state + a + c + d + e, state + c + e, state + c, state + c,
    ]  # fmt: skip
    assert sequence.boundary == Boundary(frozenset({W, F, S}), frozenset())


def test_a_swap_out_frees_at_its_deadline_and_a_swap_in_counts_from_its_trigger():
    plan = Plan.build([Event(OUT, A, 2, 3), Event(IN, A, 4, 6)])
    assert told(plan)[2:7] == [
        "2 copy_out:a", "3 wait_out:a", "4 copy_in:a", "5 free:b", "wait_in:a 6 free:a free:d",
    ]  # fmt: skip
    sequence = AccessSequence(chain(), plan)
    assert residency(sequence, A) == [(1, 3), (5, 6)]
    assert [column.tolist() for column in sequence.copies] == [[0, 1], [A, A], [20, 20]]


def test_a_swap_out_on_the_spot_is_gone_before_what_comes_in_the_same_gap():
    plan = Plan.build([Event(IN, A, 4, 6), Event(OUT, A, 4, 4)])
    assert told(plan)[4] == "4 copy_out:a wait_out:a copy_in:a"
    assert residency(AccessSequence(chain(), plan), A) == [(1, 4), (5, 6)]


def test_a_second_swap_out_copies_only_what_has_changed():
    plan = Plan.build([Event(OUT, B, 2, 2), Event(IN, B, 2, 3), Event(OUT, B, 3, 3), Event(IN, B, 3, 4),
                       Event(OUT, B, 4, 4), Event(IN, B, 4, 5)])  # fmt: skip
    sequence = AccessSequence(chain(), plan)
    assert sequence.copies.event.tolist() == [0, 1, 2, 3, 5]  # relu_ changed it before the second, nothing did after
    assert told(plan)[4] == "wait_in:b 4 free:b copy_in:b"
    later = Plan.build([Event(OUT, A, 1, 1), Event(IN, A, 1, 2), Event(OUT, A, 2, 4), Event(IN, A, 4, 6)])
    assert told(later)[2:5] == ["wait_in:a 2", "3", "4 free:a copy_in:a"]  # freed at its deadline all the same


def test_a_recompute_event_repeats_all_writers_of_the_version():
    plan = Plan.build([Event(RECOMPUTE, B, 4, 5, version=1)])
    assert told(plan)[4:8] == ["4 free:b", "2", "3", "5 free:b"]
    sequence = AccessSequence(chain(), plan)
    assert sequence.steps.tolist() == [0, 1, 2, 3, 4, 2, 3, 5, 6, 7, 8, 9]
    assert sequence.step_event.tolist() == [-1] * 5 + [0, 0] + [-1] * 5
    assert sequence.operator_step.tolist() == [0, 1, 2, 3, 4, 7, 8, 9, 10, 11]
    assert sequence.scratch_bytes.tolist() == [0] * 5 + [12] + [0] * 6  # the statistics' copy
    assert residency(sequence, B) == [(2, 4), (5, 7)]


def test_what_is_made_again_in_vain_goes_when_it_is_made():
    plan = Plan.build([Event(RECOMPUTE, B, 6, 7, version=1)])
    assert told(plan)[5:10] == ["5 free:b", "6 free:d", "2 free:a", "3 free:b", "7 free:e"]
    assert residency(AccessSequence(chain(), plan), B) == [(2, 5), (7, 8)]  # while its second writer runs as well


def test_recompute_events_nest_and_keep_what_they_need_alive():
    plan = Plan.build([Event(RECOMPUTE, A, 4, 5), Event(RECOMPUTE, B, 4, 5, version=1), Event(RECOMPUTE, A, 5, 6)])
    # x lives until the last repetition of f; a goes after b is made again and comes back for g's backward
    assert told(plan)[2:] == [
        "2 free:a", "3", "4 free:b", "1", "2 free:a", "3", "5 free:b", "1 free:x", "6 free:a free:d", "7 free:e", "8",
        "9 free:c",
    ]  # fmt: skip


def test_events_after_a_recompute_event_of_the_same_trigger_wait_for_it():
    events = [
        Event(RECOMPUTE, A, 4, 6),
        Event(OUT, A, 4, 4),
        Event(IN, A, 4, 6),
        Event(OUT, C, 4, 4),
        Event(IN, C, 4, 5),
    ]
    plan = Plan.build([events[3], *events[:3], events[4]])
    assert told(plan)[4:6] == [
        "4 copy_out:c wait_out:c", "1 free:x copy_out:a wait_out:a copy_in:a copy_in:c",
    ]  # fmt: skip


def test_outputs_that_are_not_wanted_count_in_their_step_only():
    trace = Trace.build(
        [
            Operator("placeholder", Phase.FORWARD, (Access(0, Mode.CREATE),)),
            Operator("split", Phase.FORWARD, (Access(0, Mode.READ), Access(1, Mode.CREATE), Access(2, Mode.CREATE))),
            Operator("use", Phase.FORWARD, (Access(2, Mode.READ),)),
            Operator("use", Phase.FORWARD, (Access(1, Mode.READ),)),
            Operator("output", Phase.OPTIMIZER, (Access(2, Mode.READ),)),
        ],
        [Tensor(1, Kind.INPUT), Tensor(10, Kind.ACTIVATION), Tensor(100, Kind.ACTIVATION)],
    )
    sequence = AccessSequence(trace, Plan.build([Event(RECOMPUTE, 1, 2, 3)]))
    assert sequence.footprint.tolist() == [1, 111, 101, 211, 110, 100]  # 100 is there already and made once more


def test_a_tensor_off_the_device_between_iterations_comes_before_its_first_use():
    plan = Plan.build([Event(IN, W, 0, 1), Event(OUT, W, 1, 2), Event(IN, W, 5, 7), Event(OUT, W, 8, 8)])
    sequence = AccessSequence(chain(), plan)
    assert sequence.boundary == Boundary(frozenset({F, S}), frozenset({W}))
    assert residency(sequence, W) == [(1, 2), (6, 8)]
    assert sequence.copies.event.tolist() == [0, 2, 3]  # nothing has written it before the first swap-out


def test_what_only_the_host_has_comes_in_passively():
    begin = Boundary(frozenset({F}), frozenset({W, S}))
    lines = told(NO_EVENTS, begin, passive=True)
    assert (lines[1], lines[2]) == ("passive_in:w 1 free:x", "passive_in:s 2")
    sequence = AccessSequence(chain(), NO_EVENTS, begin, passive=True)
    assert residency(sequence, W) == [(1, 9)]
    # a swap-out of what is not there has nothing to do; a read in between brings it in, the deadline frees it
    plan = Plan.build([Event(OUT, W, 0, 2), Event(IN, W, 3, 7)])
    assert told(plan, begin, passive=True)[:4] == ["0", "passive_in:w 1 free:x", "passive_in:s 2 free:w", "3 copy_in:w"]
    plan = Plan.build([Event(OUT, F, 1, 2), Event(IN, F, 2, 4)])
    assert told(plan, Boundary(frozenset({W, S}), frozenset({F})), passive=True)[1:4] == [
        "1 free:x",
        "2 copy_in:f",
        "3",
    ]


def test_what_must_be_there_at_the_end_comes_in_passively():
    plan = Plan.build([Event(RELEASE, F, 8, 8), Event(OUT, F, 4, 4), Event(IN, F, 4, 5)])
    assert AccessSequence(chain(), plan).problem
    assert told(plan, passive=True)[-1] == "9 free:c passive_in:f"


def test_a_sequence_with_a_problem_tells_nothing_else():
    sequence = AccessSequence(chain(), Plan.build([Event(RELEASE, A, 3, 3)]))
    assert sequence.problem and sequence.problem.operator == 6
    for name in ("steps", "footprint", "interval_first", "copies", "scratch_bytes", "host_copies"):
        with pytest.raises(InvalidPlanError):
            getattr(sequence, name)
    with pytest.raises(InvalidPlanError):
        sequence.actions()


# ---- against the oracle ----


def check(trace: Trace, plan: Plan, begin: Boundary | None = None, passive: bool = False) -> bool:
    """The sequence and the oracle agree; returns whether the plan is valid."""
    sequence = AccessSequence(trace, plan, begin, passive)
    try:
        expected = oracle.run(trace, plan, begin, passive)
    except oracle.Broken as broken:
        assert sequence.problem, f"accepted, but {broken}"
        assert broken.operator in (-1, sequence.problem.operator), (broken, sequence.problem)
        return False
    assert sequence.problem is None
    assert sequence.steps.tolist() == expected.steps
    assert sequence.footprint.tolist() == expected.footprint
    assert sequence.copies.event.tolist() == sorted(expected.copies)
    done = oracle.perform(trace, plan, sequence.actions(), sequence.steps.tolist(), begin or sequence.boundary)
    assert done.footprint == expected.footprint
    assert done.final == expected.final
    assert sorted(done.copies) == sorted(expected.copies)
    assert sorted(done.passive) == sorted(expected.passive)
    check_transfers(sequence)
    return True


def check_transfers(sequence: AccessSequence) -> None:
    """Each transfer belongs to a request and to the next wait for its tensor."""
    transfers, steps, waits = sequence.transfers, 0, {}
    requested = []  # (event, tensor, inward, action, steps executed before)
    for index, (kind, step, tensor, number) in enumerate(sequence.actions()):
        steps += kind is ActionKind.RUN
        if kind in REQUESTING:
            requested.append((number, tensor, kind is not ActionKind.COPY_OUT, index, steps))
        if kind in WAITING:
            waits[len(requested) - 1 - [tensor for _, tensor, *_ in reversed(requested)].index(tensor)] = (
                index, step, steps,
            )  # fmt: skip
    columns = [column.tolist() for column in transfers]
    assert list(zip(*columns[:4], columns[6], strict=True)) == requested
    assert list(zip(columns[4], columns[5], columns[7], strict=True)) == [waits[row] for row in range(len(requested))]
    executed, transfer, waiting = (column.tolist() for column in transfers.meetings)
    assert executed == sorted(executed) and len(executed) == 2 * len(requested)
    assert [row for row, waits_for in zip(transfer, waiting, strict=True) if not waits_for] == [*range(len(requested))]


@given(graphs.planned())
@examples(50, long=400)
def test_a_valid_plan_changes_no_value(planned):
    trace, plan = planned
    for kind in {each.kind for each in plan.events}:
        event(kind.name)
    assert check(trace, plan)


@given(graphs.planned(), st.data())
@examples(50, long=400)
def test_a_broken_plan_is_refused_exactly_if_it_breaks_something(planned, data):
    trace, plan = planned
    event(f"valid: {check(trace, data.draw(graphs.broken(trace, plan)))}")


@given(graphs.traces(), st.data())
@examples(25, long=200)
def test_a_change_of_plan_keeps_the_values(trace, data):
    """Between any two valid plans: what the new one expects on the host is copied there, the rest comes passively."""
    old = boundary(trace, data.draw(graphs.valid_plans(trace)))
    plan = data.draw(graphs.valid_plans(trace))
    new = boundary(trace, plan)
    begin = Boundary(old.device & new.device, old.host | new.host)
    assert check(trace, plan, begin, passive=True)
    assert check(trace, plan)
    everything = Boundary(old.device | new.device, old.host | new.host)  # nothing freed: it goes by itself
    assert check(trace, plan, everything, passive=True)
    check(trace, data.draw(graphs.broken(trace, plan)), begin, passive=True)


@given(graphs.planned())
def test_a_plan_that_loses_the_only_copy_is_refused(planned):
    """Without the event that brings it back, whoever reads a tensor that has left is refused by name."""
    trace, plan = planned
    events = list(plan.events)
    for place, (kind, tensor, trigger, *_) in enumerate(events):
        before = [each.kind for each in events[:place] if each.tensor == tensor]
        after = [each.kind for each in events[place + 1 :] if each.tensor == tensor]
        gone = kind in (IN, RECOMPUTE) and before[-1:] in ([OUT], [RELEASE])
        if gone and not after and trigger < trace.tensor_last[tensor] and not trace.persistent[tensor]:
            problem = AccessSequence(trace, Plan.build(events[:place] + events[place + 1 :])).problem
            assert problem and problem.tensor == tensor


def test_planning_needs_no_torch():
    """Nor does whoever draws graphs for tests."""
    planning = ", ".join(f"pg_tensile.planning.{name}" for name in ("plan.validation", "plan.memory", "trace.format"))
    modules = f"{planning}, tests.unit.graphs"
    program = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=REPOSITORY)


def test_a_small_trace_of_the_benchmark_agrees_with_the_oracle():
    """Layers, batch norm, in-place operators, Adam; swaps, recomputations and cyclic swaps."""
    trace, layers = planning_speed.build(60)
    plan = planning_speed.plan(layers)
    assert check(trace, plan)
    assert {event.kind for event in plan.events} == {OUT, IN, RECOMPUTE}
