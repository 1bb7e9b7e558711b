"""Several graphs on one model: the last, smaller batch of an epoch and validation, in turns with the training step."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from pg_tensile.errors import ExecutorError, InvalidPlanError
from pg_tensile.execution.capture import Captured, OptimizerSpec, StepSpec, capture, capture_evaluation
from pg_tensile.execution.capture.eager import EagerStep
from pg_tensile.execution.runtime.executor import Executor
from pg_tensile.execution.runtime.state import counterparts
from pg_tensile.planning.plan.access_sequence import AccessSequence, boundary
from pg_tensile.planning.plan.following import following_plan, host_bytes, plan_around, reuse_plan
from pg_tensile.planning.plan.plan import NO_EVENTS, Event, EventKind, Plan
from pg_tensile.planning.plan.validation import validate
from pg_tensile.planning.trace.trace import Kind, Trace
from tests.unit.executing import (
    SIMPLE,
    SPEC,
    EagerJob,
    batch,
    captured_net,
    fail_at,
    net,
    opened,
    peak_of,
    plan_of,
    recorded,
    same,
    validation_net,
)
from tests.unit.graphs import random_plan, random_trace
from tests.unit.interrupts import Interrupts
from tests.unit.realised import Stops

RANDOM = tuple(f"random {seed}" for seed in range(6))
randoms = st.integers(0, 1 << 40).map(Random)


def plan_for(policy: str, trace: Trace) -> Plan:
    if policy.startswith("random"):
        return random_plan(Random(policy), trace)
    return plan_of(policy, trace)


def following(plan: Plan, captured: Captured) -> Plan:
    """Return the plan of a graph that is added without one."""
    first = captured_net()
    return following_plan(AccessSequence(first.trace, plan), captured.trace, counterparts(first, captured))


def epochs(executor: Executor, count: int = 2) -> None:
    """Two full batches, a smaller one, two of validation, over and over; everything held against eager PyTorch."""
    reference = EagerJob()
    for epoch in range(count):
        for number, size in enumerate((4, 4, 3)):
            torch.manual_seed(10 * epoch + number)
            expected = reference.step(*batch(number, size))
            torch.manual_seed(10 * epoch + number)
            assert torch.equal(executor.step(*batch(number, size)).loss, expected)
        assert same(executor.state_dict().model, reference.state())
        for number in (7, 8):
            result, (loss, output) = executor.evaluate(*batch(number, 5)), reference.evaluate(*batch(number, 5))
            assert result.loss is not None and torch.equal(result.loss, loss)
            assert torch.equal(result.outputs[0], output)
        state = executor.state_dict()
        assert same(state.model, reference.state())
        optimizer = reference.training.optimizer.state
        for name, parameter in reference.training.model.named_parameters():
            assert same(state.optimizer.get(name, {}), optimizer[parameter]) or name == "unused"
        assert executor.device_bytes == sum(executor.inspect().resident.values())


# ---- an epoch ----


@pytest.mark.parametrize("policy", [*SIMPLE, *RANDOM])
def test_epochs_with_a_smaller_batch_and_validation_are_those_of_pytorch(start, policy):
    plan = plan_for(policy, captured_net().trace)
    graphs = (captured_net(), captured_net(3), validation_net())
    budget = max(peak_of(graph, following(plan, graph)) for graph in graphs)
    executor = start(plan, budget=budget)
    smaller, validation = (executor.add(graph) for graph in graphs[1:])
    assert smaller.plan == plan
    assert validation.program.device <= executor.graphs[0].program.device
    assert executor.host_bytes == host_bytes([(graph.captured.trace, graph.plan) for graph in executor.graphs])
    epochs(executor)
    assert executor.counters.peak_bytes <= budget
    assert executor.counters.iterations == 10


@pytest.mark.parametrize("policy", [*SIMPLE, *RANDOM[:3]])
def test_every_graph_may_have_a_plan_of_its_own(start, policy):
    executor = start(policy if policy in SIMPLE else plan_for(policy, captured_net().trace))
    for captured, plans in ((captured_net(3), RANDOM), (validation_net(), [*SIMPLE, *RANDOM])):
        graph = executor.add(captured, plan_for(plans[len(policy) % len(plans)], captured.trace))
    epochs(executor)
    for other in SIMPLE:
        executor.change_plan(plan_of(other, graph.captured.trace), graph)
        executor.change_plan(plan_of(SIMPLE[len(other) % 3], captured_net().trace))
        result = executor.evaluate(*batch(9, 5))
        torch.manual_seed(3)
        loss = executor.step(*batch(0)).loss
    assert result.loss is not None and loss.isfinite()
    assert (graph.plan, executor.plan) == (plan_of("recompute_all", graph.captured.trace), executor.graphs[0].plan)


def test_plans_that_follow_change_with_the_first_graphs_plan(start):
    executor = start("none")
    smaller, validation = executor.add(captured_net(3)), executor.add(validation_net())
    assert not len(smaller.plan) and not len(validation.plan)
    executor.change_plan(plan_of("swap_all", executor.trace))
    executor.step(*batch(0))
    executor.step(*batch(0, 3))
    executor.evaluate(*batch(0, 5))
    assert smaller.plan == executor.plan and len(validation.plan)
    assert validation.program.device <= executor.graphs[0].program.device
    executor.change_plan(NO_EVENTS, smaller)
    executor.step(*batch(0, 3))
    executor.change_plan(plan_of("recompute_all", executor.trace))
    executor.step(*batch(0))
    executor.step(*batch(0, 3))
    assert smaller.plan == NO_EVENTS, "it has a plan of its own now"


def test_turns_without_a_transition_move_nothing_more(start):
    executor = start("swap_all")
    graphs = executor.graphs[0], executor.add(captured_net(3)), executor.add(validation_net())
    executor.recording = True
    for _ in range(2):
        for graph, size in zip(graphs[:2], (4, 3), strict=True):
            executor.step(*batch(0, size))
            assert not recorded(executor).transition and not recorded(executor).passive_swap_ins
            expected = AccessSequence(graph.captured.trace, graph.plan)
            assert recorded(executor).bytes_out + recorded(executor).bytes_in == expected.copies.bytes.sum()
        executor.evaluate(*batch(0, 5))
        record = recorded(executor)
        assert not record.transition and record.bytes_out == 0, "nothing is written, so nothing is copied out"
        parameters = {persistent.tensor: persistent.key for persistent in graphs[2].captured.persistents}
        assert {transfer.tensor for transfer in record.transfers} <= parameters.keys()
        assert not executor.inspect().resident, "what was brought in has gone again"


def test_nothing_is_moved_for_an_evaluation_where_everything_is_there(start):
    executor = start("none")
    executor.add(validation_net())
    executor.recording = True
    for _ in range(2):
        executor.step(*batch(0))
        executor.evaluate(*batch(0, 5))
        assert not recorded(executor).transfers and not recorded(executor).transition


# ---- choosing, adding, measuring ----


def test_graphs_are_chosen_by_shape_or_by_name(start):
    executor = start("none")
    with pytest.raises(ExecutorError, match="has no evaluation"):
        executor.evaluate(*batch(0, 5))
    five, without_loss = (
        executor.add(validation_net()),
        executor.add(capture_evaluation(net(), batch(0, 5)[0], (), SPEC)),
    )
    swapping = executor.add(validation_net(), plan_of("swap_all", validation_net().trace))
    assert executor.graphs[1:] == (five, without_loss, swapping)
    assert executor.evaluate(batch(0, 5)[0]).loss is None
    assert executor.evaluate(*batch(0, 5)).loss is not None
    assert (five.iterations, without_loss.iterations, swapping.iterations) == (1, 1, 0)
    result = executor.evaluate(*batch(0, 5), graph=swapping)
    assert swapping.iterations == 1 and torch.equal(result.outputs[0], executor.evaluate(*batch(0, 5)).outputs[0])
    with pytest.raises(ExecutorError, match=r"but was captured as torch.float32 \[5, 3, 8, 8\]"):
        executor.evaluate(*batch(0, 6))
    with pytest.raises(ExecutorError, match=r"but was captured as torch.float32 \[4, 3, 8, 8\]"):
        executor.step(*batch(0, 3))
    with pytest.raises(ExecutorError, match="not a training step of this executor"):
        executor.step(*batch(0, 5), graph=five)
    with pytest.raises(ExecutorError, match="not an evaluation of this executor"):
        executor.evaluate(*batch(0, 5), graph=start("none").add(validation_net()))


def test_an_executor_may_only_evaluate():
    model, reference = net(), EagerJob()
    with opened() as device, Executor(validation_net(), model, device) as executor:
        assert torch.equal(executor.evaluate(*batch(0, 5)).outputs[0], reference.evaluate(*batch(0, 5))[1])
        with pytest.raises(ExecutorError, match="has no training step"):
            executor.step(*batch())


def test_what_does_not_belong_to_the_model_is_not_added(start):
    executor = start("swap_all")
    wider = net()
    wider.conv = nn.Conv2d(3, 6, 5, padding=1)
    with pytest.raises(ExecutorError, match=r'"conv\.weight" was captured in another layout'):
        executor.add(capture_evaluation(wider, batch(0, 5)[0], (), SPEC))
    more = net()
    extra = more.extra = nn.Linear(10, 10)
    more.forward = lambda x: extra(type(more).forward(more, x))  # type: ignore[method-assign]
    with pytest.raises(ExecutorError, match=r'the model has no parameter "extra\.weight"'):
        executor.add(capture_evaluation(more, batch(0, 5)[0], (), SPEC))
    with pytest.raises(InvalidPlanError):
        executor.add(validation_net(), Plan.build([Event(EventKind.SWAP_IN, 0, 1, 1)]))
    assert len(executor.graphs) == 1
    executor.add(captured_net(3)), executor.add(validation_net())
    epochs(executor, 1)


class Unlike(nn.Module):
    """A model that uses other tensors in an evaluation than in training: a parameter, a buffer, and constants."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(6, 6), nn.Parameter(torch.full((6,), 2.0))
        self.shift: Tensor
        self.register_buffer("shift", torch.arange(6.0))
        self.table, self.other = torch.arange(6.0) / 7, torch.arange(6.0) / 9

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x) + self.table
        return x if self.training else x.T.T * self.scale + self.shift + self.other


def test_an_evaluation_may_use_what_training_does_not(policy):
    torch.manual_seed(0)
    model, x, spec = Unlike(), torch.randn(3, 6), StepSpec(lambda output: output.square().mean(), OptimizerSpec("adam"))
    reference = EagerStep(Unlike(), spec)
    reference.model.load_state_dict(model.state_dict())
    captured = capture(model, [x], [], spec)
    with opened() as device, Executor(captured, model, device, plan_of(policy, captured.trace)) as executor:
        executor.step([x])
        graph = executor.add(capture_evaluation(reference.model, [x], (), spec))
        constants = [persistent for persistent in graph.captured.persistents if persistent.kind == Kind.CONSTANT]
        new = [persistent for persistent in constants if graph.keys[persistent.tensor] >= captured.trace.tensor_count]
        assert (len(constants), len(new)) == (2, 1), "a constant of both is one tensor"
        with pytest.raises(ExecutorError, match="held by an executor"):
            model.shift.sum()
        reference.model.train(), reference.step([x], [])
        for _ in range(2):
            with torch.no_grad():
                assert torch.equal(executor.evaluate([x]).outputs[0], reference.model.eval()(x))
            reference.model.train()
            assert torch.equal(executor.step([x]).loss, reference.step([x], []).loss)
            assert same(executor.state_dict().model, reference.model.state_dict())
    assert same(model.state_dict(), reference.model.state_dict())


def test_graphs_are_measured_each_for_itself(start):
    executor = start("swap_all", measure_every=2)
    validation = executor.add(validation_net())
    for _ in range(2):
        executor.step(*batch(0))
    assert (executor.measurement().samples, validation.measurement().samples) == (0, 0)
    executor.step(*batch(0))
    executor.measure(validation)
    executor.evaluate(*batch(0, 5))  # is held against the trace first
    for _ in range(2):
        executor.evaluate(*batch(0, 5))
    assert (executor.measurement().samples, executor.measurement(validation).samples) == (1, 1)
    assert validation.trace.latency_us[1:-1].all() and len(validation.trace.latency_us) != len(
        executor.trace.latency_us
    )


# ---- failures ----


@pytest.mark.parametrize("policy", [*SIMPLE, *RANDOM[:3]])
def test_an_evaluation_that_fails_anywhere_leaves_the_weights(start, policy):
    plan = plan_for(policy, captured_net().trace)
    executor, reference = start(plan), EagerJob()
    validation = executor.add(validation_net())
    for number, share in enumerate((0.0, 0.4, 0.7, 1.0)):
        torch.manual_seed(number)
        loss = reference.step(*batch(number))
        torch.manual_seed(number)
        assert torch.equal(executor.step(*batch(number)).loss, loss)
        fail_at(validation, int(share * (len(validation.program.sequence.steps) - 1)), Stops())
        with pytest.raises(Stops):
            executor.evaluate(*batch(0, 5))
        assert executor.device_bytes == sum(executor.inspect().resident.values())
        if number % 2:
            assert same(executor.state_dict().model, reference.state())
            assert torch.equal(executor.evaluate(*batch(0, 5)).outputs[0], reference.evaluate(*batch(0, 5))[1])


def test_interrupts_at_any_moment_of_any_graph_leave_a_defined_state(start, policy):
    reference, executor, interrupted = EagerJob(), start(policy), 0
    executor.add(captured_net(3)), executor.add(validation_net(), plan_of("swap_all", validation_net().trace))
    generator = torch.manual_seed(1)
    with Interrupts() as interrupts:
        for turn in range(300):
            if turn >= 30 and interrupted >= 10:
                break
            size = (4, 5, 3)[turn % 3]
            data, before, random_state = batch(turn, size), executor.state_dict(), generator.get_state()
            expected = reference.evaluate(*data)[0] if size == 5 else reference.step(*data)
            after, loss = reference.state(), None
            while loss is None:
                generator.set_state(random_state)
                with contextlib.suppress(KeyboardInterrupt):
                    interrupts.wanted = interrupted < 100
                    loss = (executor.evaluate if size == 5 else executor.step)(*data).loss
                    interrupts.wanted = False
                assert executor.device_bytes == sum(executor.inspect().resident.values())
                if loss is None:
                    interrupted += 1
                    with contextlib.suppress(ExecutorError):  # it says that the weights are a mixture
                        state = executor.state_dict().model
                        assert same(state, after) or same(state, before.model)
                    executor.load_state_dict(before)
            assert torch.equal(loss, expected) and same(executor.state_dict().model, after)
    assert interrupted >= 10


# ---- plans for further graphs ----


def test_a_plan_is_reused_for_the_same_structure_only():
    plan = plan_of("swap_all", captured_net().trace)
    assert reuse_plan(plan, captured_net().trace, captured_net(3).trace) is plan
    assert boundary(captured_net().trace, plan) == boundary(captured_net(3).trace, plan)
    assert reuse_plan(plan, captured_net().trace, validation_net().trace) is None
    kinds = captured_net(3).trace.tensor_kind.copy()
    kinds[-1] = Kind.TEMPORARY
    assert reuse_plan(plan, captured_net().trace, replace(captured_net(3).trace, tensor_kind=kinds)) is None
    wrong = Plan.build([Event(EventKind.SWAP_IN, 0, 1, 2)])
    assert reuse_plan(wrong, captured_net().trace, captured_net(3).trace) is None


@given(randoms)
def test_a_plan_around_a_boundary_state_starts_and_ends_in_it(random):
    trace = random_trace(random)
    away = {tensor for tensor in range(trace.tensor_count) if trace.persistent[tensor] and random.random() < 0.5}
    plan = plan_around(trace, away, generation=4)
    validate(trace, plan)
    used = {tensor for tensor in away if trace.tensor_first[tensor] < trace.operator_count}
    state = boundary(trace, plan)
    assert plan.generation == 4 and state.host == used
    assert state.device == {tensor for tensor in range(trace.tensor_count) if trace.persistent[tensor]} - used
    sequence = AccessSequence(trace, plan)
    written = trace.tensor_writes[sequence.copies.tensor] > 0
    outs = plan.rows["kind"][sequence.copies.event] == EventKind.SWAP_OUT
    assert written[outs].all(), "what nobody wrote is not copied out"
