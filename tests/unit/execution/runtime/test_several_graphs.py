"""Several graphs on one model: the last, smaller batch of an epoch and validation, in turns with the training step."""

from __future__ import annotations

import contextlib
import gc
from dataclasses import replace
from functools import cache
from random import Random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from pg_tensile.errors import ExecutorError, InvalidPlanError, OutOfDeviceMemoryError
from pg_tensile.execution.capture import Captured, OptimizerSpec, StepSpec, capture, capture_evaluation
from pg_tensile.execution.capture.eager import EagerStep
from pg_tensile.execution.runtime.executor import Executor
from pg_tensile.execution.runtime.loaded_graph import Graph
from pg_tensile.execution.runtime.measure import StorageObserver
from pg_tensile.execution.runtime.state import counterparts
from pg_tensile.planning.plan.execution import AccessSequence
from pg_tensile.planning.plan.following import following_plan, host_bytes, plan_around, reuse_plan
from pg_tensile.planning.plan.memory import footprint
from pg_tensile.planning.plan.plan import NO_EVENTS, Event, EventKind, Plan, boundary, validate
from pg_tensile.planning.trace.trace import Access, Kind, Mode, Trace
from tests.unit.executing import SIMPLE, SPEC, batch, captured_net, net, opened, plan_of, recorded, same
from tests.unit.graphs import random_plan, random_trace
from tests.unit.interrupts import Interrupts
from tests.unit.realised import Realised, Seen, Stops, _evaluate, _start, realise, with_learning_rate

RANDOM = tuple(f"random {seed}" for seed in range(6))
randoms = st.integers(0, 1 << 40).map(Random)


@cache
def validation_net(size: int = 5) -> Captured:
    return capture_evaluation(net(), *batch(size=size), SPEC)


def plan_for(policy: str, trace: Trace) -> Plan:
    if policy.startswith("random"):
        return random_plan(Random(policy), trace)
    return plan_of(policy, trace)


def peak_of(captured: Captured, plan: Plan) -> int:
    return footprint(captured.trace, plan).device_peak_bytes


def following(plan: Plan, captured: Captured) -> Plan:
    """The plan that a graph gets that is added without one."""
    first = captured_net()
    return following_plan(AccessSequence(first.trace, plan), captured.trace, counterparts(first, captured))


class EagerJob:
    """What an executor with these graphs must compute."""

    def __init__(self) -> None:
        self.training = EagerStep(net(), SPEC)

    def step(self, x: list[Tensor], y: list[Tensor]) -> Tensor:
        self.training.model.train()
        return self.training.step(x, y).loss

    def evaluate(self, x: list[Tensor], y: list[Tensor]) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            output = self.training.model.eval()(*x)
            return SPEC.loss(output, *y), output

    def state(self) -> dict[str, Tensor]:
        return self.training.model.state_dict()


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
            found, (loss, output) = executor.evaluate(*batch(number, 5)), reference.evaluate(*batch(number, 5))
            assert found.loss is not None and torch.equal(found.loss, loss)
            assert torch.equal(found.outputs[0], output)
        state = executor.state_dict()
        assert same(state.model, reference.state())
        optimizer = reference.training.optimizer.state
        for name, parameter in reference.training.model.named_parameters():
            assert same(state.optimizer.get(name, {}), optimizer[parameter]) or name == "unused"
        assert executor._registry.in_use == sum(executor._registry.resident.values())


# ---- an epoch ----


@pytest.mark.parametrize("policy", [*SIMPLE, *RANDOM])
def test_epochs_with_a_smaller_batch_and_validation_are_those_of_pytorch(start, policy):
    plan = plan_for(policy, captured_net().trace)
    graphs = (captured_net(), captured_net(3), validation_net())
    budget = max(peak_of(each, following(plan, each)) for each in graphs)
    executor = start(plan, budget=budget)
    smaller, validation = (executor.add(each) for each in graphs[1:])
    assert smaller.plan == plan
    assert validation.program.device <= executor.graphs[0].program.device
    assert executor.host_bytes == host_bytes([(each.captured.trace, each.plan) for each in executor.graphs])
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
        found = executor.evaluate(*batch(9, 5))
        torch.manual_seed(3)
        loss = executor.step(*batch(0)).loss
    assert found.loss is not None and loss.isfinite()
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
        parameters = {each.tensor: each.key for each in graphs[2].captured.persistents}
        assert {transfer.tensor for transfer in record.transfers} <= parameters.keys()
        assert not executor._registry.resident, "what was brought in has gone again"


def test_nothing_is_moved_for_an_evaluation_where_everything_is_there(start):
    executor = start("none")
    executor.add(validation_net())
    executor.recording = True
    for _ in range(2):
        executor.step(*batch(0))
        executor.evaluate(*batch(0, 5))
        assert not recorded(executor).transfers and not recorded(executor).transition


# ---- the budget ----


@cache
def large_validation() -> tuple[Captured, int]:
    """An evaluation that needs more memory than training, and how many bytes of what it does not use are there."""
    captured = validation_net(200)
    persistent = captured_net().trace.persistent
    here = int(captured_net().trace.tensor_bytes[persistent].sum())
    used = int(captured.trace.tensor_bytes[captured.trace.persistent].sum())
    return captured, here - used


def test_what_a_graph_does_not_use_makes_room(start):
    captured, unused = large_validation()
    needed = peak_of(captured, NO_EVENTS)
    assert needed > peak_of(captured_net(), NO_EVENTS) and unused > 0
    reference = EagerJob()
    for spare, goes in ((unused, 0), (unused - 1, 1), (0, unused)):
        executor = start("none", budget=needed + spare)
        executor.add(captured)
        executor.recording = True
        torch.manual_seed(1)
        executor.step(*batch(0))
        executor.evaluate(*batch(0, 200))
        record = recorded(executor)
        assert record.bytes_out >= goes and (goes or not record.bytes_out)
        assert {transfer.tensor for transfer in record.transfers} <= {-1}
        assert record.device_peak_bytes <= needed + spare
        executor.step(*batch(1))
        assert recorded(executor).bytes_in == record.bytes_out, "what went comes back, and nothing else"
        assert executor._swapper.copies == {}
    torch.manual_seed(1)
    reference.step(*batch(0)), reference.step(*batch(1))
    assert same(executor.state_dict().model, reference.state())


def test_one_byte_less_than_the_peak_is_refused_and_nothing_has_happened(start):
    captured, _ = large_validation()
    expected = footprint(captured.trace)
    executor = start("none", budget=expected.device_peak_bytes - 1)
    executor.add(captured)
    torch.manual_seed(1)
    executor.step(*batch(0))
    with pytest.raises(OutOfDeviceMemoryError) as info:
        executor.evaluate(*batch(0, 200))
    error = info.value
    assert error.operator == captured.trace.operator_label(int(expected.steps[expected.peak_step]))
    assert (error.in_use + error.requested, error.budget) == (
        expected.device_peak_bytes,
        error.in_use + error.requested - 1,
    )
    executor.step(*batch(1))
    reference = EagerJob()
    torch.manual_seed(1)
    reference.step(*batch(0)), reference.step(*batch(1))
    assert same(executor.state_dict().model, reference.state())


def test_an_evaluation_fits_where_the_model_does_not():
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))

    spec, x, model = (
        StepSpec(lambda output: output.square().sum(), OptimizerSpec("sgd", 0.1)),
        torch.randn(1, 64),
        make(),
    )
    captured = capture(model, [x], [], spec)
    plan, reference = plan_of("swap_all", captured.trace), EagerStep(make(), spec)
    budget = peak_of(captured, plan)
    assert budget < sum(parameter.nbytes for parameter in model.parameters()) // 2
    with opened(budget) as device, Executor(captured, model, device, plan) as executor:
        executor.add(capture_evaluation(make(), [x], (), spec))
        for _ in range(3):
            assert torch.equal(executor.step([x]).loss, reference.step([x], []).loss)
            found = executor.evaluate([x])
            with torch.no_grad():
                assert torch.equal(found.outputs[0], reference.model(x))
        assert executor.counters.peak_bytes <= budget
    assert same(model.state_dict(), reference.model.state_dict())


def test_an_observer_sees_the_same_memory(start):
    captured, unused = large_validation()
    executor = start("none", budget=peak_of(captured, NO_EVENTS))
    executor.add(captured)
    executor.recording = True
    inputs, targets = batch(0, 200)
    executor.step(*batch(0))
    executor.evaluate(inputs, targets)
    assert recorded(executor).bytes_out == unused
    watched = [executor._swapper.value(key) for key in executor._state.sizes]
    copies = [copy.memory for copy in executor._swapper.copies.values()]
    with StorageObserver(watch=watched, ignore=[*inputs, *targets, *copies]) as observer:
        result = executor.evaluate(inputs, targets)
    assert not recorded(executor).transfers
    seen = {observed.target: observed.bytes for observed in observer.seen}
    for operator, registered in enumerate(recorded(executor).footprint.tolist()):
        target = captured.trace.target[operator]
        assert seen.get(target, registered) == registered, target
    del result
    assert observer.live_bytes() == executor._registry.in_use


def test_all_memory_goes_with_the_executor():
    model = net()
    with opened() as device:
        executor = Executor(captured_net(), model, device, plan_of("swap_all", captured_net().trace))
        executor.add(captured_net(3)), executor.add(validation_net())
        executor.step(*batch(0)), executor.evaluate(*batch(0, 5)), executor.step(*batch(0, 3))
        keys = executor._state.sizes
        tensors = [executor._swapper.value(key) for key in keys] + executor._host.memory
        refs = [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors if tensor.numel()]
        del tensors
        executor.close()
        gc.collect()
        assert len(refs) > len(keys) and all(ref.expired() for ref in refs)
        assert executor._registry.in_use == 0
    assert [type(each) for each in model.parameters()] == [nn.Parameter] * 7


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
    found = executor.evaluate(*batch(0, 5), graph=swapping)
    assert swapping.iterations == 1 and torch.equal(found.outputs[0], executor.evaluate(*batch(0, 5)).outputs[0])
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
    """What it uses in an evaluation is not what it uses in training: a parameter, a buffer, and constants."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(6, 6), nn.Parameter(torch.full((6,), 2.0))
        self.shift: Tensor
        self.register_buffer("shift", torch.arange(6.0))
        self.table, self.other = torch.arange(6.0) / 7, torch.arange(6.0) / 9

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x) + self.table
        return x if self.training else x.T.T * self.scale + self.shift + self.other


@pytest.mark.parametrize("policy", SIMPLE)
def test_an_evaluation_may_use_what_training_does_not(policy):
    torch.manual_seed(0)
    model, x, spec = Unlike(), torch.randn(3, 6), StepSpec(lambda output: output.square().mean(), OptimizerSpec("adam"))
    reference = EagerStep(Unlike(), spec)
    reference.model.load_state_dict(model.state_dict())
    captured = capture(model, [x], [], spec)
    with opened() as device, Executor(captured, model, device, plan_of(policy, captured.trace)) as executor:
        executor.step([x])
        graph = executor.add(capture_evaluation(reference.model, [x], (), spec))
        constants = [each for each in graph.captured.persistents if each.kind == Kind.CONSTANT]
        new = [each for each in constants if graph.keys[each.tensor] >= captured.trace.tensor_count]
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


def fail(graph: Graph, share: float) -> None:
    """An operator of the graph's next iteration raises, once."""
    program = graph.program
    places = [place for place, each in enumerate(program.instructions) if each.work is not None]
    place = places[int(share * (len(places) - 1))]
    instruction, original = program.instructions[place], program.instructions

    def stop(values: list[Tensor]) -> None:
        object.__setattr__(program, "instructions", original)
        raise Stops

    assert instruction.work is not None
    broken = instruction._replace(work=instruction.work._replace(function=stop))
    object.__setattr__(program, "instructions", (*original[:place], broken, *original[place + 1 :]))


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
        fail(validation, share)
        with pytest.raises(Stops):
            executor.evaluate(*batch(0, 5))
        assert executor._registry.in_use == sum(executor._registry.resident.values())
        if number % 2:
            assert same(executor.state_dict().model, reference.state())
            assert torch.equal(executor.evaluate(*batch(0, 5)).outputs[0], reference.evaluate(*batch(0, 5))[1])


@pytest.mark.parametrize("policy", SIMPLE)
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
            after, found = reference.state(), None
            while found is None:
                generator.set_state(random_state)
                with contextlib.suppress(KeyboardInterrupt):
                    interrupts.wanted = interrupted < 100
                    found = (executor.evaluate if size == 5 else executor.step)(*data).loss
                    interrupts.wanted = False
                assert executor._registry.in_use == sum(executor._registry.resident.values())
                if found is None:
                    interrupted += 1
                    with contextlib.suppress(ExecutorError):  # it says that the weights are a mixture
                        state = executor.state_dict().model
                        assert same(state, after) or same(state, before.model)
                    executor.load_state_dict(before)
            assert torch.equal(found, expected) and same(executor.state_dict().model, after)
    assert interrupted >= 10


# ---- random graphs ----


def part_of(realised: Realised, random: Random) -> tuple[Realised, dict[int, int]]:
    """The beginning of an iteration as another graph, with only the tensors that it uses, and their numbers in the
    whole one → here."""
    trace = realised.trace
    operators = list(trace.operators)[: random.randint(1, trace.operator_count - 1)]
    used = sorted({access.tensor for operator in operators for access in operator.accesses})
    numbers = {tensor: number for number, tensor in enumerate(used)}
    returned = Access(random.choice(used), Mode.READ)
    operators.append(trace.operators[-1]._replace(accesses=(returned,)))
    rate = trace.tensor_count - 1
    order = [tensor for tensor in used if tensor != rate] + [rate]
    numbers = {tensor: number for number, tensor in enumerate(order)}
    rows = [
        each._replace(accesses=tuple(Access(numbers[tensor], mode) for tensor, mode in each.accesses))
        for each in operators
    ]
    part = realise(Trace.build(rows, [trace.tensors[tensor] for tensor in order], trace.device), random)
    whole = {numbers[each.tensor]: each for each in realised.captured.persistents if each.tensor in numbers}
    persistents = tuple(
        whole[each.tensor]._replace(tensor=each.tensor, slot=each.slot) for each in part.captured.persistents
    )
    return Realised(replace(part.captured, persistents=persistents), part.log), numbers


def as_evaluation(captured: Captured) -> Captured:
    """The learning rate is one input more."""
    return replace(captured, learning_rate=None, inputs=captured.given)


class Plainly:
    """Graphs on the same persistent tensors, with all the memory there is."""

    def __init__(self, whole: Realised, parts: list[tuple[Realised, dict[int, int]]]) -> None:
        model, captured = whole.model(), whole.captured
        self.graphs = [whole, *(part for part, _ in parts)]
        self.values: list[list[Tensor]] = [[torch.empty(0)] * len(each.captured.values) for each in self.graphs]
        self.finals = {each.tensor: _start(each, captured, model) for each in captured.persistents}
        for values, graph, numbers in zip(self.values, self.graphs, [None, *(n for _, n in parts)], strict=True):
            own = {here: there for there, here in numbers.items()} if numbers else range(captured.trace.tensor_count)
            for persistent in graph.captured.persistents:
                values[persistent.slot] = self.finals[own[persistent.tensor]]
            _evaluate(graph.captured.persistent_views, values)

    def run(self, place: int, iteration: int) -> Seen:
        graph, values = self.graphs[place], self.values[place]
        captured = graph.captured
        assert captured.learning_rate is not None
        for slot, given_ in zip(captured.inputs, graph.inputs(iteration), strict=True):
            values[slot] = given_.clone()
        values[captured.learning_rate] = torch.tensor(0.1, dtype=torch.float64)
        for operator in captured.operators:
            _evaluate([operator.call] if operator.call else [], values)
            _evaluate(operator.views, values)
        return Seen(graph.log.take(), [values[slot].clone() for slot in captured.returned])


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(randoms)
def test_random_graphs_in_random_turns_under_random_plans(random):
    whole = realise(with_learning_rate(random_trace(random)), random)
    parts = [part_of(whole, random) for _ in range(2)]
    graphs = [whole, *(part for part, _ in parts)]
    plans = [random_plan(random, each.trace) for each in graphs]
    turns = random.choices(range(3), k=7)
    reference = Plainly(whole, parts)
    torch.manual_seed(3)
    expected = [reference.run(place, turn) for turn, place in enumerate(turns)]
    generator = torch.manual_seed(3)
    budget = max(peak_of(each.captured, plan) for each, plan in zip(graphs, plans, strict=True))
    with opened(budget) as device, Executor(whole.captured, whole.model(), device, plans[0]) as executor:
        evaluates = [False, *(random.random() < 0.5 for _ in parts)]
        handles = [executor.graphs[0]]
        for graph, plan, each in zip(graphs[1:], plans[1:], evaluates[1:], strict=True):
            captured = as_evaluation(graph.captured) if each else graph.captured
            handles.append(executor.add(captured, plan))
        executor.recording = True
        for turn, place in enumerate(turns):
            inputs, graph, fails = graphs[place].inputs(turn), graphs[place], random.random() < 0.2
            before, state = generator.get_state(), executor.state_dict()
            graph.log.fails_after = random.randint(0, graph.trace.operator_count) if fails else None
            for _ in range(2):  # a second time if it fails
                with contextlib.suppress(Stops):
                    if evaluates[place]:
                        rate = torch.tensor(0.1, dtype=torch.float64)
                        loss, outputs = executor.evaluate([*inputs, rate], graph=handles[place])
                    else:
                        loss, outputs = executor.step(inputs, graph=handles[place])
                    break
                if executor._poison:
                    constants = whole.trace.tensor_kind == Kind.CONSTANT
                    if whole.trace.tensor_writes[constants].any():
                        return  # they are in no state to go back to
                    executor.load_state_dict(state)
                graph.log.take()
                generator.set_state(before)
            graph.log.fails_after = None
            record = recorded(executor)
            assert record.device_peak_bytes <= budget
            if not record.transition:
                others = record.footprint - AccessSequence(handles[place].captured.trace, handles[place].plan).footprint
                assert len(set(others.tolist())) == 1 and others[0] >= 0, "tensors that it does not use"
            assert graph.log.take() == expected[turn].digests
            assert loss is not None and all(map(torch.equal, (loss, *outputs), expected[turn].results))
        for each in whole.captured.persistents:
            assert torch.equal(executor._state._read(each), reference.finals[each.tensor])


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
