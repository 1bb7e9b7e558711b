"""Other orders of the operators: which there are, and that nothing but time and memory depends on them."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given

from pg_tensile.errors import InvalidPlanError, TraceError
from pg_tensile.execution.capture import capture
from pg_tensile.execution.capture.captured import Captured
from pg_tensile.execution.runtime.executor import Executor
from pg_tensile.execution.runtime.host import HostDevice
from pg_tensile.planning.device.profile import RTX_A6000
from pg_tensile.planning.explain.numbers import recomputed_tensors, swapped_tensors
from pg_tensile.planning.plan.access_sequence import AccessSequence, boundary
from pg_tensile.planning.plan.following import host_bytes, reuse_plan
from pg_tensile.planning.plan.memory import footprint, host_arena, transient_arena
from pg_tensile.planning.plan.order import as_executed, check_order, dependencies, in_order
from pg_tensile.planning.plan.plan import NO_EVENTS, Event, EventKind, Plan
from pg_tensile.planning.plan.validation import validate
from pg_tensile.planning.policies import POLICIES
from pg_tensile.planning.simulator.simulator import PlanChange, SimulatedJob, simulate
from pg_tensile.planning.trace.trace import Access, Kind, Mode, Operator, Phase, Tensor, Trace
from pg_tensile.tools.bench.timeline import levels
from pg_tensile.tools.report.facts import _absences
from tests.examples import examples
from tests.unit.executing import FAST, batch, starting
from tests.unit.execution.runtime.test_runtime_plans import AheadDevice, assert_same, finals_of, iterate, recorded
from tests.unit.graphs import chain, dice, live_tensors, random_order, random_plan, random_trace, traces
from tests.unit.realised import execute_plainly, realise, with_learning_rate
from tests.unit.zoo import NAMED


def ordered_plan(random: Random, trace: Trace) -> Plan:
    """A random plan of a random order."""
    order = random_order(random, trace)
    return Plan.build(random_plan(random, in_order(trace, order)).events, random.randrange(9), order)


# ---- dependencies ----


def reachable(trace: Trace) -> np.ndarray:
    """bool[n, n]: [i, j]: j comes after i, directly or not."""
    needs, count = dependencies(trace), trace.operator_count
    found = np.zeros((count, count), np.bool_)
    for operator in range(count):
        for before in needs.predecessors[slice(*needs.predecessor_start[operator : operator + 2])].tolist():
            found[:, operator] |= found[:, before]
            found[before, operator] = True
    return found


@examples(25, suppress=[HealthCheck.filter_too_much])
@given(traces())
def test_operators_depend_on_what_they_must_not_pass_and_on_nothing_else(trace):
    operators, last = list(trace.operators), trace.operator_count - 1
    expected = np.zeros((last + 1, last + 1), np.bool_)
    for later, one in enumerate(operators):
        for earlier in range(later):
            other = dict(operators[earlier].accesses)
            meet = any(tensor in other and (mode or other[tensor]) for tensor, mode in one.accesses)
            ends = earlier == 0 or later == last
            if meet or ends or (one.random and operators[earlier].random):
                expected[:, later] |= expected[:, earlier]
                expected[earlier, later] = True
    assert np.array_equal(reachable(trace), expected)
    needs = dependencies(trace)
    pairs = {(int(b), a) for a in range(last + 1) for b in needs.predecessors[slice(*needs.predecessor_start[a:][:2])]}
    mirror = {(b, int(a)) for b in range(last + 1) for a in needs.successors[slice(*needs.successor_start[b:][:2])]}
    assert pairs == mirror and len(pairs) == len(needs.predecessors) == len(needs.successors)


def long_trace(operators: int) -> Trace:
    """A chain with a few reads further back."""
    tensors = [Tensor(64, Kind.PARAMETER), Tensor(64, Kind.INPUT), *[Tensor(64, Kind.ACTIVATION)] * (operators - 2)]
    rows = [Operator("placeholder", Phase.FORWARD, (Access(1, Mode.CREATE),))]
    for made in range(2, operators):
        reads = {max(1, made - back) for back in (1, 2, 7)} | {0}
        accesses = (*(Access(tensor, Mode.READ) for tensor in sorted(reads)), Access(made, Mode.CREATE))
        rows.append(Operator(f"op{made % 50}", Phase.FORWARD, accesses))
    return Trace.build([*rows, Operator("output", Phase.OPTIMIZER, (Access(operators - 1, Mode.READ),))], tensors)


def test_13_000_operators_are_put_in_order():
    trace = long_trace(13_000)
    order = random_order(Random(3), trace)
    dependencies(trace)
    assert (in_order(trace, order).captured_operator == order).all()


# ---- orders ----


def test_a_bad_order_is_refused_with_what_is_wrong_with_it():
    trace = chain()
    count = trace.operator_count
    good = list(range(count))
    swapped = [0, 2, 1, *good[3:]]
    earlier_log = [0, 8, *(each for each in good[1:] if each != 8)]
    for bad, message in (
        (swapped[:-1], "the order has 9 operators, but the trace has 10"),
        ([*swapped, 3], "the order has 11 operators"),
        ([*good[:-1], 10], "names operator 10, but the trace has 10"),
        ([0, 1, 2, 2, *good[4:]], r"has operator 2 \(norm\) twice, and operator 3 \(relu_\) not at all"),
        (swapped, r"has operator 2 \(norm\) before operator 1 \(f\): both access tensor 4 \(a\)"),
        ([1, 0, *good[2:]], r"has operator 1 \(f\) before operator 0 \(placeholder\): the placeholder comes first"),
        ([*good[:-2], 9, 8], r"has operator 9 \(output\) before operator 8 \(log\): the output comes last"),
        (earlier_log, r"has operator 8 \(log\) before operator 7 \(sgd\): both access tensor 0 \(fc.weight\)"),
    ):
        with pytest.raises(InvalidPlanError, match=message) as caught:
            check_order(trace, bad)
        assert caught.value.hint == "The order does not fit the trace: make the plan again."
        with pytest.raises(InvalidPlanError, match=message):
            in_order(trace, bad)
        with pytest.raises(InvalidPlanError, match=message):
            validate(trace, Plan.build([], 0, bad))
    check_order(trace, good)
    dice = two_dice()
    with pytest.raises(InvalidPlanError, match=r"operator 2 \(b\) before operator 1 \(a\): random operators keep"):
        check_order(dice, [0, 2, 1, 3])


def two_dice() -> Trace:
    rows = [
        Operator("placeholder", Phase.FORWARD, (Access(0, Mode.CREATE),)),
        Operator("a", Phase.FORWARD, (Access(1, Mode.CREATE),), random=True),
        Operator("b", Phase.FORWARD, (Access(2, Mode.CREATE),), random=True),
        Operator("output", Phase.OPTIMIZER, (Access(1, Mode.READ), Access(2, Mode.READ))),
    ]
    return Trace.build(rows, [Tensor(8, Kind.INPUT), *[Tensor(8, Kind.ACTIVATION)] * 2])


@examples(15, suppress=[HealthCheck.filter_too_much])
@given(traces(), dice())
def test_an_ordered_trace_has_the_operators_of_the_captured_one(trace, random):
    order = random_order(random, trace)
    ordered = in_order(trace, order)
    assert list(ordered.operators) == [trace.operator(operator) for operator in order]
    assert list(ordered.tensors) == list(trace.tensors)
    assert ordered.captured_operator.tolist() == order
    rebuilt = Trace.build(list(ordered.operators), list(ordered.tensors), ordered.device)
    assert ordered.fingerprint == rebuilt.fingerprint
    assert in_order(ordered, np.argsort(order)).fingerprint == trace.fingerprint
    for operator, captured in enumerate(order):
        assert ordered.operator_label(operator) == trace.operator_label(captured)
    if order != sorted(order):
        with pytest.raises(TraceError, match="only a captured trace has bytes"):
            ordered.to_bytes()
    assert trace.captured_operator.tolist() == list(range(trace.operator_count))
    assert Trace.from_bytes(trace.to_bytes()).captured_operator.tolist() == trace.captured_operator.tolist()


# ---- plans of an order ----


@examples(10, long=60, suppress=[HealthCheck.filter_too_much])
@given(traces(), dice())
def test_an_ordered_plan_means_what_it_means_on_the_ordered_trace(trace, random):
    plan = ordered_plan(random, trace)
    plain, ordered = Plan.build(plan.events, plan.generation), as_executed(trace, plan)
    if random.random() < 0.3:  # and so does a wrong one
        plain = Plan.build(plain.events[1:])
        plan = Plan.build(plan.events[1:], order=plan.order)
    one, other = AccessSequence(trace, plan), AccessSequence(ordered, plain)
    assert one.problem == other.problem and one.boundary == other.boundary == boundary(trace, plan)
    if one.problem is not None:
        with pytest.raises(InvalidPlanError) as caught:
            validate(trace, plan)
        assert caught.value.operator in (-1, *ordered.captured_operator[one.problem.operator :][:1])
        return
    assert one.actions() == other.actions()
    assert one.operators.tolist() == ordered.captured_operator[other.steps].tolist()
    analysed, directly = footprint(trace, plan), footprint(ordered, plain)
    assert analysed.bytes.tolist() == directly.bytes.tolist()
    assert analysed.steps.tolist() == one.operators.tolist()
    assert analysed[2:] == directly[2:]
    assert host_arena(trace, plan) == host_arena(ordered, plain)
    assert host_bytes([(trace, plan)]) == host_bytes([(ordered, plain)])
    assert live_tensors(one, 1) == live_tensors(other, 1)
    transient = (plan.rows["kind"] == EventKind.RECOMPUTE.value) | ~trace.persistent[plan.rows["tensor"]]
    assert transient_arena(one) == host_arena(trace, Plan(plan.rows[transient], plan.generation, plan.order))
    assert reuse_plan(plan, trace, trace) is plan
    (simulated,), (expected,) = (
        simulate([SimulatedJob(*pair)], RTX_A6000) for pair in ((trace, plan), (ordered, plain))
    )
    assert simulated.steps.tolist() == one.operators.tolist()
    assert simulated.transfers == expected.transfers and simulated.stalls == expected.stalls
    assert simulated.host_arena_bytes == expected.host_arena_bytes
    assert simulated.device_peak_bytes == expected.device_peak_bytes == analysed.device_peak_bytes
    assert simulated.iteration_us == expected.iteration_us
    assert levels(trace, plan, RTX_A6000) == levels(ordered, plain, RTX_A6000)


@examples(10, suppress=[HealthCheck.filter_too_much])
@given(traces(), dice())
def test_plans_of_other_orders_follow_each_other(trace, random):
    plans = [ordered_plan(random, trace) for _ in range(2)]
    (simulated,) = simulate([SimulatedJob(trace, plans[0], changes=(PlanChange(2, plans[1]),))], RTX_A6000)
    (alone,) = simulate([SimulatedJob(trace, plans[1])], RTX_A6000)
    assert simulated.steps.tolist() == alone.steps.tolist()
    assert simulated.device_peak_bytes == alone.device_peak_bytes


def test_people_see_the_captured_numbers_in_the_order_of_execution():
    two = parallel()
    plan = Plan.build([Event(EventKind.SWAP_OUT, 1, 1, 2), Event(EventKind.SWAP_IN, 1, 2, 3)], order=[0, 2, 1, 3, 4])
    with pytest.raises(InvalidPlanError, match=r"event 0 \(swap_out\) after operator 2 \(b\) is about tensor 1"):
        validate(two, plan)
    plan = Plan.build([Event(EventKind.SWAP_OUT, 2, 1, 2), Event(EventKind.SWAP_IN, 2, 2, 3)], order=[0, 2, 1, 3, 4])
    validate(two, plan)
    (swapped,) = swapped_tensors(as_executed(two, plan), plan).largest
    assert [(operator.operator, operator.target) for operator in swapped.away[0]] == [(2, "b"), (3, "c")]
    assert swapped.made_by.operator == 2
    assert _absences(plan) == {2: (2, 3)}
    again = Plan.build([Event(EventKind.RELEASE, 2, 1, 1), Event(EventKind.RECOMPUTE, 2, 2, 3)], order=[0, 2, 1, 3, 4])
    (recomputed,) = recomputed_tensors(as_executed(two, again), again).largest
    assert [operator.operator for operator in (*recomputed.by, *recomputed.needed_by)] == [2, 3]
    assert footprint(two, again).steps.tolist() == [0, 2, 1, 2, 3, 4]


def parallel() -> Trace:
    """a and b do not depend on each other; c reads what both make."""
    read, create = Mode.READ, Mode.CREATE
    rows = [
        ("placeholder", [(0, create)]),
        ("a", [(0, read), (1, create)]),
        ("b", [(0, read), (2, create)]),
        ("c", [(1, read), (2, read), (3, create)]),
        ("output", [(3, read)]),
    ]
    operators = [Operator(name, Phase.FORWARD, tuple(Access(*each) for each in accesses)) for name, accesses in rows]
    return Trace.build(
        operators, [Tensor(8, Kind.INPUT), *(Tensor(8 + n, Kind.ACTIVATION, "xyz"[n]) for n in range(3))]
    )


# ---- execution ----


@examples(10, long=60, suppress=[HealthCheck.filter_too_much])
@given(dice())
def test_whatever_order_and_plan_every_operator_sees_what_it_sees_without(random):
    realised = realise(with_learning_rate(random_trace(random)), random)
    plans = [ordered_plan(random, realised.trace), random.choice((NO_EVENTS, ordered_plan(random, realised.trace)))]
    torch.manual_seed(3)
    expected = execute_plainly(realised, 4)
    torch.manual_seed(3)
    device = random.choice((HostDevice, AheadDevice))(FAST)
    with Executor(realised.captured, realised.model(), device, plans[0]) as executor:
        executor.recording, seen = True, []
        for iteration in range(4):
            if iteration == 2:
                executor.change_plan(plans[1])
            plan = plans[iteration // 2]
            seen.append(iterate(executor, realised, iteration))
            sequence = AccessSequence(realised.trace, plan)
            if not recorded(executor).transition:
                assert recorded(executor).footprint.tolist() == sequence.footprint.tolist()
                assert recorded(executor).steps.tolist() == sequence.operators.tolist()
        assert_same(seen, finals_of(executor, realised), *expected)
    device.close()


def swapping(random: Random, trace: Trace) -> Plan:
    """All that can be swapped is, in a random order."""
    order = random_order(random, trace)
    return Plan.build(POLICIES["swap_all"]({0: in_order(trace, order)}, FAST, None)[0].events, 1, order)


@pytest.mark.parametrize("name", ["gpt2", "batch_norm", "views", "in_place", "lstm"])
def test_networks_learn_the_same_in_every_order(name):
    model, inputs, targets, spec = NAMED[name].make()
    captured = capture(model, inputs, targets, spec)
    plans = [NO_EVENTS, *(swapping(Random(seed), captured.trace) for seed in range(2))]
    plans.append(Plan.build([], 2, random_order(Random(9), captured.trace)))
    losses, states = zip(*(trained(name, captured, plan) for plan in plans), strict=True)
    for other in losses[1:]:
        assert all(torch.equal(*pair) for pair in zip(losses[0], other, strict=True))
    for other in states[1:]:
        assert all(torch.equal(states[0].model[key], other.model[key]) for key in states[0].model)


def trained(name: str, captured: Captured, plan: Plan):
    model, inputs, targets, _ = NAMED[name].make()
    torch.manual_seed(5)
    device = HostDevice(FAST)
    with Executor(captured, model, device, plan, measure_every=1) as executor:
        losses = [executor.step(inputs, targets).loss for _ in range(2)]
        assert executor.trace.captured_operator.tolist() == list(range(captured.trace.operator_count))
        return losses, executor.state_dict()


def test_what_is_measured_belongs_to_the_captured_operators():
    with starting() as start:
        executor = start()
        trace = executor.graphs[0].captured.trace
        plan = swapping(Random(4), trace)
        assert plan.order is not None
        executor.change_plan(plan)
        graph = executor.graphs[0]
        workspaces = np.arange(trace.operator_count) * 1000
        executor.step(*batch())
        peak = AccessSequence(trace, plan)
        expected = int(np.max(peak.footprint + workspaces[peak.operators]))
        assert graph.program.device_peak_bytes(workspaces) == expected
        asked = [graph.program.work(step) for step in range(len(peak.steps))]
        assert [work.operator for work in asked] == peak.operators.tolist()
        executor.measure()
        for number in range(3):
            executor.step(*batch(number))
        measured = executor.measurement()
        slow = trace.target.codes == trace.target.values.index("aten.convolution.default")
        assert (measured.latency_us[slow] > np.median(measured.latency_us)).all()


def test_an_executor_refuses_a_bad_order_and_keeps_its_plan():
    with starting() as start:
        executor = start()
        before = executor.plan
        count = executor.graphs[0].captured.trace.operator_count
        with pytest.raises(InvalidPlanError, match="the placeholder comes first"):
            executor.change_plan(Plan.build([], order=[1, 0, *range(2, count)]))
        executor.step(*batch())
        assert executor.plan == before
