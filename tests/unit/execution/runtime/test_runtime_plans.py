"""Random iterations under random plans, executed: whatever the plan, every operator sees what it sees without one."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import HealthCheck, assume, given
from hypothesis import strategies as st

from pg_tensile.errors import CaptureError, ExecutorError, InvalidPlanError
from pg_tensile.execution.runtime import loaded_graph as graph_module
from pg_tensile.execution.runtime.executor import Executor
from pg_tensile.execution.runtime.host import HostDevice
from pg_tensile.execution.runtime.record import IterationRecord
from pg_tensile.execution.runtime.state import TrainingState
from pg_tensile.planning.device.profile import RTX_A6000
from pg_tensile.planning.plan.access_sequence import AccessSequence, boundary
from pg_tensile.planning.plan.actions import ActionKind
from pg_tensile.planning.plan.memory import footprint
from pg_tensile.planning.plan.plan import NO_EVENTS, Boundary, Plan
from pg_tensile.planning.plan.validation import validate
from pg_tensile.planning.trace.trace import Kind, Trace
from tests.examples import examples
from tests.unit.graphs import mutate, random_plan, random_trace
from tests.unit.oracle import Broken, perform
from tests.unit.realised import Realised, Seen, Stops, execute_plainly, observable, realise, with_learning_rate

FAST = replace(RTX_A6000, kind="host", transfer_latency_us=0.0)
randoms = st.integers(0, 1 << 40).map(Random)  # much faster than st.randoms


class PromptDevice(HostDevice):
    """Copies have ended when they are asked for: what is read too early or freed too late is the same each time."""

    def copy_out(self, source, target, delay_us=0, *coded):
        transfer = super().copy_out(source, target, 0, *coded)
        transfer.join()
        return transfer

    def copy_in(self, source, target, delay_us=0, *coded):
        transfer = super().copy_in(source, target, 0, *coded)
        transfer.join()
        return transfer


class AheadDevice(HostDevice):
    """A device that leaves delays to the program, as one that runs ahead."""

    @property
    def runs_ahead(self) -> bool:
        return True


def draw(random: Random) -> Realised:
    return realise(with_learning_rate(random_trace(random)), random)


def iterate(executor: Executor, realised: Realised, iteration: int) -> Seen:
    loss, outputs = executor.step(realised.inputs(iteration))
    return Seen(realised.log.take(), [loss, *outputs])


def recorded(executor: Executor) -> IterationRecord:
    assert executor.record is not None
    return executor.record


def finals_of(executor: Executor, realised: Realised) -> dict[int, torch.Tensor]:
    """Persistent tensors, by number."""
    state = executor.state_dict()
    finals = {}
    for persistent in realised.captured.persistents:
        if persistent.key:
            finals[persistent.tensor] = state.optimizer[persistent.name][persistent.key]
        elif persistent.name:
            finals[persistent.tensor] = state.model[persistent.name]
        else:  # constants are in no state
            finals[persistent.tensor] = executor.inspect().read(persistent.tensor)
    return finals


def assert_same(seen: list[Seen], finals: dict[int, torch.Tensor], expected: list[Seen], ends: dict) -> None:
    for iteration, (one, other) in enumerate(zip(seen, expected, strict=True)):
        assert one.digests == other.digests, f"an operator of iteration {iteration} saw something else"
        assert all(torch.equal(*pair) for pair in zip(one.results, other.results, strict=True))
    for tensor, value in finals.items():
        assert torch.equal(value, ends[tensor]), f"tensor {tensor} is another at the end"


@pytest.mark.long
@examples(150, suppress=[HealthCheck.filter_too_much])
@given(randoms)
def test_every_valid_plan_computes_what_no_plan_computes(random):
    realised = draw(random)
    plan = random_plan(random, realised.trace)
    torch.manual_seed(3)
    expected = execute_plainly(realised, 3)
    torch.manual_seed(3)
    kind = random.choice((HostDevice, HostDevice, AheadDevice))
    device = kind(FAST, footprint(realised.trace, plan).device_peak_bytes)
    with Executor(realised.captured, realised.model(), device, plan) as executor:
        executor.recording = True
        seen = []
        for iteration in range(3):
            seen.append(iterate(executor, realised, iteration))
            assert recorded(executor).footprint.tolist() == AccessSequence(realised.trace, plan).footprint.tolist()
        assert_same(seen, finals_of(executor, realised), *expected)
    device.close()


@examples(40, long=150, suppress=[HealthCheck.filter_too_much])
@given(randoms)
def test_plans_change_between_iterations_without_changing_results(random):
    realised = draw(random)
    plans = [random_plan(random, realised.trace) for _ in range(3)] + [NO_EVENTS]
    random.shuffle(plans)
    lengths = [random.choice((0, 1, 2)) for _ in plans[1:]] + [1]
    torch.manual_seed(3)
    expected = execute_plainly(realised, sum(lengths))
    torch.manual_seed(3)
    device = HostDevice(FAST)
    with Executor(realised.captured, realised.model(), device, plans[0]) as executor:
        executor.recording = True
        seen: list[Seen] = []
        state = boundary(realised.trace, plans[0])
        for plan, length in zip(plans, lengths, strict=True):
            executor.change_plan(plan)
            for _ in range(length):
                expect = sequence_from(realised.trace, plan, state)
                seen.append(iterate(executor, realised, len(seen)))
                assert recorded(executor).footprint.tolist() == expect.footprint.tolist()
                assert recorded(executor).passive_swap_ins == passive_swap_ins(expect)
                state = boundary(realised.trace, plan)
        assert_same(seen, finals_of(executor, realised), *expected)
        assert executor.plan == plans[-1]
    device.close()


@pytest.mark.long
@examples(150, suppress=[HealthCheck.filter_too_much])
@given(randoms)
def test_failures_anywhere_leave_the_state_of_before_or_say_so(random):
    realised = draw(random)
    trace = realised.trace
    constants = trace.tensor_kind == Kind.CONSTANT
    assume(not trace.tensor_writes[constants].any())  # they are in no state to go back to
    plans = [random_plan(random, trace) for _ in range(2)]
    torch.manual_seed(3)
    expected = execute_plainly(realised, 3)
    generator = torch.manual_seed(3)
    device = HostDevice(FAST)
    with Executor(realised.captured, realised.model(), device, plans[0]) as executor:
        seen: list[Seen] = []
        for iteration in range(3):
            before, random_state = executor.state_dict(), generator.get_state()
            realised.log.fails_after = random.randint(0, 2 * trace.operator_count)
            executor.change_plan(plans[random.randrange(2)])
            try:
                seen.append(iterate(executor, realised, iteration))
            except Stops:
                try:
                    assert_equal_states(executor.state_dict(), before)
                except ExecutorError:
                    executor.load_state_dict(before)
                realised.log.take()
                generator.set_state(random_state)
                seen.append(iterate(executor, realised, iteration))
            realised.log.fails_after = None
        assert_same(seen, finals_of(executor, realised), *expected)
    device.close()


def assert_equal_states(state: TrainingState, other: TrainingState) -> None:
    for name, value in state.model.items():
        assert torch.equal(value, other.model[name])
    for name, values in state.optimizer.items():
        assert all(torch.equal(value, other.optimizer[name][key]) for key, value in values.items())


def sequence_from(trace: Trace, plan: Plan, state: Boundary) -> AccessSequence:
    """An iteration of `plan` from `state`: what it wants on the host is copied there before, the rest comes in
    passively."""
    wanted = boundary(trace, plan)
    reached = Boundary(state.device & wanted.device, state.host | wanted.host)
    return AccessSequence(trace, plan) if reached == wanted else AccessSequence(trace, plan, reached, passive=True)


def passive_swap_ins(sequence: AccessSequence) -> int:
    return sum(action.kind is ActionKind.PASSIVE_IN for action in sequence.actions())


class Unchecked(AccessSequence):
    """The sequence of any plan, however wrong it is."""

    def check(self) -> None:
        return None


@pytest.mark.long
@examples(100, suppress=[HealthCheck.filter_too_much])
@given(randoms)
def test_what_a_plan_loses_is_refused_and_shows_when_it_is_executed_all_the_same(random):
    """Takes seconds: many plans are executed."""
    realised = realise(with_learning_rate(observable(random_trace(random))), random, view_share=0.0)
    trace = realised.trace
    plan = mutate(random, trace, random_plan(random, trace))
    sequence = Unchecked(trace, plan)
    assume(sequence.problem is not None and sequence._fault is None)
    with pytest.raises(InvalidPlanError):
        validate(trace, plan)
    with pytest.raises(InvalidPlanError):
        Executor(realised.captured, realised.model(), HostDevice(FAST), plan)
    assume(is_wrong(realised, sequence))
    torch.manual_seed(3)
    expected = execute_plainly(realised, 1)
    torch.manual_seed(3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph_module, "AccessSequence", Unchecked)
        patch.setattr("pg_tensile.planning.plan.memory.AccessSequence", Unchecked)
        with pytest.raises((AssertionError, KeyError, AttributeError, TypeError, RuntimeError, CaptureError)):
            execute_forced(realised, plan, expected)


def is_wrong(realised: Realised, sequence: AccessSequence) -> bool:
    """Return whether the actions, executed literally, show an operator another value."""
    try:
        perform(realised.trace, sequence.plan, sequence.actions(), sequence.steps.tolist(), sequence.boundary)
    except Broken:
        return True
    except (AssertionError, KeyError, TypeError):
        return False  # not even an interpreter can execute them
    return False


def execute_forced(realised: Realised, plan: Plan, expected) -> None:
    device = PromptDevice(FAST)
    executor = Executor(realised.captured, realised.model(), device, plan)
    try:
        seen = [iterate(executor, realised, 0)]
        assert_same(seen, finals_of(executor, realised), *expected)
    finally:
        executor.close()
        device.close()
