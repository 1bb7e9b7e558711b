"""The executor: every plan computes what eager PyTorch computes, memory is what the plan says, failures are clean."""

from __future__ import annotations

import contextlib
import copy
import gc
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import cache
from random import Random

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from pg_tensile.capture import Captured, OptimizerSpec, StepSpec, capture
from pg_tensile.eager import EagerStep
from pg_tensile.errors import (
    CaptureError,
    CheckpointError,
    DeviceError,
    ExecutorError,
    InvalidPlanError,
    LinkError,
    OutOfDeviceMemoryError,
)
from pg_tensile.peak import footprint
from pg_tensile.plan import NO_EVENTS, Event, EventKind, Plan, boundary
from pg_tensile.policies import POLICIES
from pg_tensile.profile import RTX_A6000
from pg_tensile.runtime import host
from pg_tensile.runtime.executor import Executor
from pg_tensile.runtime.host import HostDevice
from pg_tensile.runtime.measure import Meter, StorageObserver
from pg_tensile.runtime.record import IterationRecord
from pg_tensile.runtime.state import TrainingState, optimizer_state_dict, training_state
from pg_tensile.sequence import AccessSequence
from pg_tensile.trace import Trace
from tests.unit.zoo import NAMED

FAST = replace(RTX_A6000, kind="host", transfer_latency_us=0.0)
SIMPLE = ("none", "swap_all", "recompute_all")


def plan_of(policy: str, trace: Trace) -> Plan:
    return POLICIES[policy]({0: trace}, FAST, None)[0]


class Net(nn.Module):
    """Convolution, batch norm, an operator in place, dropout, a linear layer; a parameter that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6)
        self.dropout, self.head = nn.Dropout(0.5), nn.Linear(6 * 9, 10)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.conv(x)), inplace=True), 2)
        return self.head(self.dropout(x.flatten(1)))


SPEC = StepSpec(F.cross_entropy, OptimizerSpec("adamw", 1e-2), returns_outputs=True)


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return Net()


def batch(number: int = 0, size: int = 4) -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(size, 3, 8, 8, generator=generator)
    return [x], [torch.randint(0, 10, (size,), generator=generator)]


@cache
def captured_net(size: int = 4) -> Captured:
    return capture(net(), *batch(size=size), SPEC)


@pytest.fixture
def start():
    """Makes executors of Net that are closed afterwards."""
    made: list[Executor | HostDevice] = []

    def make(policy: str | Plan = "none", budget: int | None = None, model=None, device=None, **options) -> Executor:
        captured = captured_net()
        plan = plan_of(policy, captured.trace) if isinstance(policy, str) else policy
        device = device or HostDevice(FAST, budget)
        executor = Executor(captured, model or net(), device, plan, **options)
        made.extend((device, executor))
        return executor

    yield make
    for each in reversed(made):
        each.close()


def eager(steps: int, seed: int = 1) -> tuple[EagerStep, list[Tensor]]:
    reference = EagerStep(net(), SPEC)
    torch.manual_seed(seed)
    return reference, [reference.step(*batch(number)).loss.clone() for number in range(steps)]


@contextmanager
def opened(budget: int | None = None) -> Iterator[HostDevice]:
    with closing(HostDevice(FAST, budget)) as device:
        yield device


def run(executor: Executor, steps: int, seed: int = 1, first: int = 0) -> list[Tensor]:
    torch.manual_seed(seed)
    return [executor.step(*batch(number)).loss for number in range(first, first + steps)]


def recorded(executor: Executor) -> IterationRecord:
    assert executor.record is not None
    return executor.record


def same(state: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return state.keys() == other.keys() and all(torch.equal(state[name], other[name]) for name in state)


# ---- the same bits ----


@pytest.mark.parametrize("name", NAMED)
def test_models_train_to_the_same_bits_under_every_simple_policy(name):
    case = NAMED[name]
    model, inputs, targets, spec = case.make()
    captured = capture(model, inputs, targets, spec)
    reference = EagerStep(model, spec)
    torch.manual_seed(1)
    losses = [reference.step(inputs, targets).loss.clone() for _ in range(5)]
    for policy in SIMPLE:
        plan, device = plan_of(policy, captured.trace), HostDevice(FAST)
        trained = case.make()[0]
        with Executor(captured, trained, device, plan) as executor:
            torch.manual_seed(1)
            for number, loss in enumerate(losses):
                executor.recording = number > 0
                assert torch.equal(executor.step(inputs, targets).loss, loss), f"{policy}, step {number}"
            expected = footprint(executor.trace, plan)
            assert recorded(executor).footprint.tolist() == expected.bytes.tolist()
            assert recorded(executor).peak_bytes == expected.peak_bytes
            state = executor.state_dict()
        device.close()
        assert same(trained.state_dict(), model.state_dict()), policy
        assert same(state.model, model.state_dict()), policy
        kept = training_state(model, reference.optimizer).optimizer
        assert kept.keys() == state.optimizer.keys()
        assert all(same(kept[parameter], state.optimizer[parameter]) for parameter in kept)


@pytest.mark.parametrize("policy", SIMPLE)
def test_the_registry_is_what_an_independent_observer_sees(policy):
    """After each step: the registry, less what a recomputation discards, which has gone by then."""

    class Watcher(Meter):
        def __init__(self) -> None:
            self.seen: list[int] = []

        def start(self) -> None:
            return None

        def stop(self) -> None:
            self.seen.append(observer.live_bytes())

        def read(self) -> np.ndarray:
            return np.zeros(len(self.seen))

    class Watched(HostDevice):
        def host_memory(self, size: int) -> Tensor:
            self.arena = super().host_memory(size)
            return self.arena

        def clock(self) -> Meter:
            return watcher

    captured, device = captured_net(), Watched(FAST)
    plan = plan_of(policy, captured.trace)
    with Executor(captured, net(), device, plan) as executor:
        executor.step(*batch())
        watcher = Watcher()
        inputs, targets = batch(1)
        held = [value for value in executor._values if value is not None]
        held += [value for shell in executor._swapper.shells.values() for value in shell.values]
        observer = StorageObserver(watch=held, ignore=[device.arena, *inputs, *targets])
        executor.measure()
        executor.recording = True
        with observer:
            loss, outputs = executor.step(inputs, targets)
        expected = recorded(executor).footprint - AccessSequence(captured.trace, plan).scratch_bytes
        # The output operator makes copies for the caller.
        expected[-1] += sum(tensor.untyped_storage().nbytes() for tensor in (loss, *outputs))
        assert watcher.seen == expected.tolist()
        del loss, outputs, held
        assert observer.live_bytes() == sum(executor._registry.resident.values())
    device.close()


@pytest.mark.parametrize("policy", SIMPLE)
def test_outputs_are_the_callers_own(start, policy):
    executor = start(policy)
    first = executor.step(*batch())
    kept = first.loss.clone(), first.outputs[0].clone()
    executor.step(*batch(1))
    assert torch.equal(first.loss, kept[0])
    assert torch.equal(first.outputs[0], kept[1])
    assert first.outputs[0].shape == (4, 10)
    storages = {tensor.untyped_storage().data_ptr() for tensor in (first.loss, first.outputs[0])}
    assert not storages & {executor._swapper.storage(each.tensor).data_ptr() for each in executor._captured.persistents}


def test_inputs_stay_the_callers():
    captured = captured_net()
    (x,), (y,) = batch()
    before = x.clone(), y.clone()
    plan = plan_of("swap_all", captured.trace)
    with opened() as device, Executor(captured, net(), device, plan) as executor:
        executor.step([x], [y])
        assert torch.equal(x, before[0]) and torch.equal(y, before[1])


def test_the_learning_rate_may_change_every_step(start):
    executor = start("swap_all")
    reference = EagerStep(net(), SPEC)
    for step, rate in enumerate((1e-2, 1e-3, 0.0)):
        torch.manual_seed(step)
        expected = reference.step(*batch(step), rate).loss
        torch.manual_seed(step)
        assert torch.equal(executor.step(*batch(step), rate).loss, expected)
    executor.close()


def test_dropout_with_recomputation_has_the_gradients_of_the_first_mask():
    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 32)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(F.dropout(torch.sigmoid(self.first(x)), 0.5)).sin()

    def make() -> nn.Module:
        torch.manual_seed(0)
        return Dropped()

    spec = StepSpec(lambda output: output.square().mean(), OptimizerSpec("sgd", 0.1))
    x = torch.randn(16, 32)
    captured = capture(make(), [x], [], spec)
    plan = plan_of("recompute_all", captured.trace)
    random = {o for o in range(captured.trace.operator_count) if captured.trace.random[o]}
    sequence = AccessSequence(captured.trace, plan)
    again = set(sequence.steps[sequence.step_event >= 0].tolist())
    assert random & again, "the plan recomputes no random operator"
    weights = []
    for used in (NO_EVENTS, plan):
        model = make()
        with opened() as device, Executor(captured, model, device, used) as executor:
            torch.manual_seed(5)
            for _ in range(3):
                executor.step([x])
            drawn = torch.rand(1)
        weights.append((model.state_dict(), drawn))
    assert same(weights[0][0], weights[1][0])
    assert torch.equal(weights[0][1], weights[1][1])  # the generator goes on where it would be


def test_modes_of_the_caller_do_not_count(start):
    expected = run(start("none"), 2)
    executor = start("recompute_all")
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        first = run(executor, 1)
    with torch.inference_mode():
        torch.manual_seed(1)
        run(start("none"), 1)
    executor = start("swap_all")
    with torch.inference_mode():
        seen = run(executor, 2)
    assert torch.equal(first[0], expected[0])
    assert all(map(torch.equal, seen, expected))
    assert not seen[0].is_inference()


# ---- odd inputs ----


def test_values_that_are_not_numbers_pass_through(start):
    reference = EagerStep(net(), SPEC)
    x, y = batch()
    x[0][0, 0, 0, 0] = float("nan")
    torch.manual_seed(1)
    reference.step(x, y)
    executor = start("swap_all")
    torch.manual_seed(1)
    assert torch.isnan(executor.step(x, y).loss)
    state = executor.state_dict().model
    for name, value in reference.model.state_dict().items():
        assert torch.equal(state[name].isnan(), value.isnan())


@pytest.mark.parametrize("policy", SIMPLE)
def test_a_batch_of_one_and_a_tensor_of_nothing(policy):
    class Narrow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)
            self.nothing = nn.Buffer(torch.empty(0, 3))

        def forward(self, x: Tensor, none: Tensor) -> Tensor:
            return torch.cat([self.linear(x), self.nothing * 2, self.linear(none)])

    def make() -> nn.Module:
        torch.manual_seed(0)
        return Narrow()

    spec = StepSpec(lambda output: output.sum(), OptimizerSpec("sgd", 0.1, momentum=0.9))
    inputs = [torch.randn(1, 4), torch.empty(0, 4)]
    captured, model = capture(make(), inputs, [], spec), make()
    reference = EagerStep(make(), spec)
    with opened() as device, Executor(captured, model, device, plan_of(policy, captured.trace)) as executor:
        for _ in range(2):
            assert torch.equal(executor.step(inputs).loss, reference.step(inputs, []).loss)
    assert same(model.state_dict(), reference.model.state_dict())


def test_inputs_are_copied_whatever_their_strides(start):
    executor, other = start("none"), start("none")
    (x,), (y,) = batch()
    strided = x.permute(0, 3, 2, 1).contiguous().permute(0, 3, 2, 1)
    assert strided.stride() != x.stride()
    torch.manual_seed(1)
    expected = executor.step([x], [y]).loss
    torch.manual_seed(1)
    assert torch.equal(other.step([strided], [y]).loss, expected)


def test_inputs_that_were_not_captured_are_refused(start):
    executor = start("none")
    (x,), (y,) = batch()
    for inputs, targets, message in (
        ([x], [], "takes 2 inputs and targets, but 1 are given"),
        ([x[:2]], [y], r"input 0 is torch.float32 \[2, 3, 8, 8\], but was captured as torch.float32 \[4, 3, 8, 8\]"),
        ([x.double()], [y], "input 0 is torch.float64"),
        ([x], [[1, 2]], "input 1 is of type list, not a tensor"),
        (x, y, "inputs and targets are sequences of tensors"),
    ):
        with pytest.raises(ExecutorError, match=message):
            executor.step(inputs, targets)
    assert executor.step([x], [y]).loss.isfinite()


# ---- memory ----


@pytest.mark.parametrize("policy", SIMPLE)
def test_one_byte_less_than_the_peak_is_too_little(start, policy):
    captured = captured_net()
    expected = footprint(captured.trace, plan_of(policy, captured.trace))
    assert run(start(policy, budget=expected.device_peak_bytes), 2)
    executor = start(policy, budget=expected.device_peak_bytes - 1)
    with pytest.raises(OutOfDeviceMemoryError) as info:
        run(executor, 1)
    error = info.value
    peak_operator = int(expected.steps[int(np.argmax(expected.bytes))])
    assert error.operator == captured.trace.operator_label(peak_operator)
    assert error.in_use + error.requested == expected.device_peak_bytes
    assert error.budget == expected.device_peak_bytes - 1
    # Nothing has happened: a plan that fits goes on from the same weights.
    assert same(executor.state_dict().model, net().state_dict())


def test_after_out_of_memory_a_plan_that_fits_goes_on(start):
    captured = captured_net()
    fits = footprint(captured.trace, plan_of("swap_all", captured.trace)).device_peak_bytes
    start_plan = plan_of("swap_all", captured.trace)
    executor = start(start_plan, budget=fits)
    expected = eager(3)[1]
    torch.manual_seed(1)
    assert torch.equal(executor.step(*batch(0)).loss, expected[0])
    executor.change_plan(NO_EVENTS)
    with pytest.raises(OutOfDeviceMemoryError):
        executor.step(*batch(1))
    executor.change_plan(start_plan)
    assert torch.equal(executor.step(*batch(1)).loss, expected[1])
    assert torch.equal(executor.step(*batch(2)).loss, expected[2])


def test_weights_alone_may_be_too_large():
    captured, model = captured_net(), net()
    with opened(1000) as device, pytest.raises(OutOfDeviceMemoryError, match="loading"):
        Executor(captured, model, device)
    assert same(model.state_dict(), net().state_dict())
    model(*batch()[0])  # is the caller's again


def test_what_is_swapped_out_is_really_freed(start):
    executor = start("swap_all")
    run(executor, 1)
    shells = executor._swapper.shells
    assert len(shells) > 10
    assert all(shell.storage.nbytes() == 0 for shell in shells.values())
    assert executor._registry.in_use == sum(executor._registry.resident.values())


@pytest.mark.parametrize("policy", SIMPLE)
def test_nothing_of_an_iteration_is_left_behind(start, policy):
    executor = start(policy)
    run(executor, 1)
    persistent = executor.trace.persistent
    for slot, value in enumerate(executor._captured.values):
        assert persistent[value.tensor] or executor._values[slot] is None
    assert all(value is None for value in executor._values[executor._functions.feed :])


# ---- plans ----


def test_a_plan_that_is_not_valid_is_refused_and_the_old_one_stays(start):
    executor = start("swap_all")
    old = executor.plan
    wrong = Plan.build([Event(EventKind.SWAP_IN, 0, 1, 2)], generation=7)
    with pytest.raises(InvalidPlanError):
        executor.change_plan(wrong)
    expected = eager(2)[1]
    assert all(map(torch.equal, run(executor, 2), expected))
    assert executor.plan == old
    with pytest.raises(InvalidPlanError):
        start(wrong)


def test_plans_change_from_another_thread_while_steps_are_taken(start):
    executor = start("none")
    plans = [plan_of(policy, executor.trace) for policy in SIMPLE]
    ended = threading.Event()

    def change() -> None:
        number = 0
        while not ended.is_set():
            executor.change_plan(plans[number % 3])
            number += 1

    thread = threading.Thread(target=change)
    thread.start()
    try:
        losses = run(executor, 20)
    finally:
        ended.set()
        thread.join()
    assert all(map(torch.equal, losses, eager(20)[1]))


def test_a_change_of_plan_without_host_memory_leaves_the_old_plan():
    class Poor(HostDevice):
        poor = False

        def host_memory(self, size: int) -> Tensor:
            if self.poor:
                raise DeviceError("no host memory")
            return super().host_memory(size)

    captured, device = captured_net(), Poor(FAST)
    with Executor(captured, net(), device, plan_of("recompute_all", captured.trace)) as executor:
        old = executor.plan
        expected = eager(2)[1]
        torch.manual_seed(1)
        assert torch.equal(executor.step(*batch(0)).loss, expected[0])
        executor.change_plan(plan_of("swap_all", captured.trace))
        device.poor = True
        with pytest.raises(DeviceError, match="no host memory"):
            executor.step(*batch(1))
        device.poor = False
        assert torch.equal(executor.step(*batch(1)).loss, expected[1])
        assert executor.plan == old
    device.close()


def test_host_memory_of_an_old_plan_goes_after_the_first_iteration(start):
    executor = start("swap_all")
    for number in range(3):
        run(executor, 1, first=number)
        old = StorageWeakRef(executor._active.memory.untyped_storage())
        executor.change_plan(plan_of(SIMPLE[number % 3], executor.trace))
        run(executor, 1, first=number)
        gc.collect()
        assert old.expired()
        places = {copy.untyped_storage().data_ptr() for copy in executor._swapper.copies.values()}
        assert places <= {executor._active.memory.untyped_storage().data_ptr()}


# ---- state ----


@pytest.mark.parametrize("policy", SIMPLE)
def test_a_job_goes_on_from_its_state_here_and_in_eager(start, policy):
    reference, losses = eager(4)
    executor = start(policy)
    first = run(executor, 2)
    random_state = torch.get_rng_state()
    state = executor.state_dict()

    resumed = start("swap_all", model=net(seed=9))
    resumed.load_state_dict(state)
    continued = EagerStep(net(seed=8), SPEC)
    continued.model.load_state_dict(state.model)
    continued.optimizer.load_state_dict(optimizer_state_dict(state, continued.model, SPEC))
    for job in (executor.step, resumed.step, continued.step):
        torch.set_rng_state(random_state)
        later = [job(*batch(number)).loss.clone() for number in (2, 3)]
        assert all(map(torch.equal, [*first, *later], losses))
    assert same(executor.state_dict().model, reference.model.state_dict())
    assert same(resumed.state_dict().model, reference.model.state_dict())


def test_an_eager_job_goes_on_under_a_plan(start):
    losses = eager(4)[1]
    reference = eager(2)[0]
    random_state = torch.get_rng_state()
    executor = start("recompute_all", model=net(seed=5))
    executor.load_state_dict(training_state(reference.model, reference.optimizer))
    torch.set_rng_state(random_state)
    assert all(map(torch.equal, [executor.step(*batch(number)).loss for number in (2, 3)], losses[2:]))


def test_state_is_the_callers_own(start):
    executor = start("swap_all")
    state = executor.state_dict()
    kept = copy.deepcopy(state)
    run(executor, 2)
    assert same(state.model, kept.model)
    for tensor in state.model.values():
        tensor.zero_()
    assert not executor.state_dict().model["conv.weight"].eq(0).all()


def test_a_state_that_does_not_fit_changes_nothing(start):
    executor = start("swap_all")
    run(executor, 1)
    good = executor.state_dict()
    lacking = {name: value for name, value in good.model.items() if name != "conv.bias"}
    reshaped = {**good.model, "conv.bias": torch.zeros(3)}
    for state, message in (
        (TrainingState(lacking, good.optimizer), "conv.bias"),
        (TrainingState(reshaped, good.optimizer), "conv.bias"),
        (TrainingState(good.model, {"conv.bias": {"momentum": torch.zeros(6)}}), 'keeps no "momentum"'),
        (TrainingState(good.model, {"conv.bias": {"exp_avg": torch.zeros(6)}}), 'lacks "exp_avg_sq" of "conv.bias"'),
        (TrainingState(good.model, {"conv.bias": {"exp_avg": torch.zeros(2)}}), r"has shape \[2\], not \[6\]"),
    ):
        with pytest.raises(CheckpointError, match=message):
            executor.load_state_dict(state)
        now = executor.state_dict()
        assert same(now.model, good.model)
        assert all(same(now.optimizer[name], good.optimizer[name]) for name in good.optimizer)


# ---- whose model it is ----


@pytest.mark.parametrize("policy", SIMPLE)
def test_a_held_model_cannot_be_used_by_accident(start, policy):
    model = net()
    executor = start(policy, model=model)
    run(executor, 1)
    weight = model.get_parameter("conv.weight")
    for use in (
        lambda: model(*batch()[0]),
        model.state_dict,
        lambda: copy.deepcopy(model),
        lambda: weight + 1,
        lambda: weight.data,
        lambda: weight[0],
        lambda: weight.detach().numpy(),
        lambda: repr(weight),
        lambda: torch.ops.aten.neg.default(weight),
        lambda: model.double(),
        lambda: model.load_state_dict(net().state_dict()),
        lambda: Executor(captured_net(), model, HostDevice(FAST)),
    ):
        with pytest.raises(ExecutorError, match=r"another executor holds|held by an executor"):
            use()
    assert (weight.shape, weight.dtype, weight.device.type) == ((6, 3, 3, 3), torch.float32, "cpu")
    assert isinstance(weight, nn.Parameter)
    assert len(list(model.parameters())) == 7
    assert same(executor.state_dict().model, eager(1)[0].model.state_dict())


@pytest.mark.parametrize("policy", SIMPLE)
def test_a_model_is_lent_for_validation(start, policy):
    model = net()
    executor = start(policy, model=model)
    reference = EagerStep(net(), SPEC)
    for step in range(3):
        torch.manual_seed(step)
        expected = reference.step(*batch(step)).loss
        torch.manual_seed(step)
        assert torch.equal(executor.step(*batch(step)).loss, expected)
        with executor.resident(), torch.no_grad():
            seen = model.eval()(*batch(9)[0])
            with pytest.raises(ExecutorError, match="lent out"):
                executor.step(*batch(0))
        assert torch.equal(seen, reference.model.eval()(*batch(9)[0]))
        model.train(), reference.model.train()
        with pytest.raises(ExecutorError):
            model(*batch()[0])


@pytest.mark.parametrize("policy", SIMPLE)
def test_what_is_changed_in_a_lent_model_counts(start, policy):
    model = net()
    executor = start(policy, model=model)
    reference = EagerStep(net(), SPEC)
    run(executor, 1)
    torch.manual_seed(1)
    reference.step(*batch(0))
    for changed, lent in ((reference.model, False), (model, True)):
        with executor.resident() if lent else torch.no_grad(), torch.no_grad():
            changed.get_parameter("conv.weight").mul_(2)
            changed.get_parameter("head.bias").data = torch.ones(10)
            changed.get_buffer("norm.running_mean").zero_()
    torch.manual_seed(2)
    expected = reference.step(*batch(1)).loss
    torch.manual_seed(2)
    assert torch.equal(executor.step(*batch(1)).loss, expected)
    assert same(executor.state_dict().model, reference.model.state_dict())


def test_a_model_that_does_not_fit_is_not_lent():
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))

    spec = StepSpec(lambda output: output.square().sum(), OptimizerSpec("sgd", 0.1))
    x, model = torch.randn(1, 64), make()
    captured, reference = capture(make(), [x], [], spec), EagerStep(make(), spec)
    plan = plan_of("swap_all", captured.trace)
    budget = footprint(captured.trace, plan).device_peak_bytes
    assert budget < sum(parameter.nbytes for parameter in model.parameters())
    with opened(budget) as device, Executor(captured, model, device, plan) as executor:
        for _ in range(3):
            assert torch.equal(executor.step([x]).loss, reference.step([x], []).loss)
            with pytest.raises(OutOfDeviceMemoryError, match="resident"), executor.resident():
                pytest.fail("the model was lent")
            with pytest.raises(ExecutorError, match="held by an executor"):
                model(x)
    assert same(model.state_dict(), reference.model.state_dict())


@pytest.mark.parametrize("policy", SIMPLE)
def test_a_closed_executor_leaves_an_ordinary_model(policy):
    model, captured = net(), captured_net()
    device = HostDevice(FAST)
    executor = Executor(captured, model, device, plan_of(policy, captured.trace))
    run(executor, 2)
    executor.close()
    executor.close()
    device.close()
    reference = eager(2)[0]
    assert same(model.state_dict(), reference.model.state_dict())
    assert [type(each) for each in model.parameters()] == [nn.Parameter] * 7
    assert [type(each) for each in model.buffers()] == [Tensor] * 3
    follow = EagerStep(model, SPEC)
    assert follow.step(*batch(3)).loss.isfinite()
    copy.deepcopy(model)
    for use in (lambda: executor.step(*batch()), executor.state_dict, lambda: executor.resident().__enter__()):
        with pytest.raises(ExecutorError, match="closed"):
            use()


def test_a_forgotten_executor_gives_its_model_back():
    model, captured = net(), captured_net()
    executor = Executor(captured, model, HostDevice(FAST), plan_of("swap_all", captured.trace))
    run(executor, 1)
    del executor
    gc.collect()
    assert same(model.state_dict(), eager(1)[0].model.state_dict())


def test_the_interpreter_ends_with_an_open_executor():
    program = """
from tests.unit.test_executor import FAST, HostDevice, Executor, batch, captured_net, net, plan_of
captured = captured_net()
executor = Executor(captured, net(), HostDevice(FAST), plan_of("swap_all", captured.trace))
print(executor.step(*batch()).loss.isfinite().item())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


def test_defaults_of_the_caller_do_not_count(start):
    executor = start("swap_all")
    expected = eager(2)[1]
    data = [batch(step) for step in range(2)]
    torch.manual_seed(1)
    with torch.device("meta"):
        losses = [executor.step(*each).loss for each in data]
        state = executor.state_dict()
        executor.load_state_dict(state)
    assert all(map(torch.equal, losses, expected))
    assert {value.device.type for value in state.model.values()} == {"cpu"}


def test_tied_parameters_are_one_tensor_and_stay_tied():
    model, inputs, targets, spec = NAMED["shared"].make()
    captured = capture(model, inputs, targets, spec)
    of = model.get_parameter
    with opened() as device:
        executor = Executor(captured, model, device, plan_of("swap_all", captured.trace))
        executor.step(inputs, targets)
        with executor.resident():
            assert of("again.weight") is of("first.weight")
        executor.close()
    assert of("again.weight") is of("first.weight")
    assert not of("frozen.weight").requires_grad
    assert of("first.weight").requires_grad


def test_another_model_is_refused():
    captured = captured_net()
    with opened() as device:
        with pytest.raises(ExecutorError, match=r'the model has no parameter "conv\.weight"'):
            Executor(captured, nn.Linear(3, 3), device)
        wider = net()
        wider.conv = nn.Conv2d(3, 6, 5)
        with pytest.raises(ExecutorError, match=r'"conv\.weight" is torch.float32 \[6, 3, 5, 5\], but was captured as'):
            Executor(captured, wider, device)
        wider(torch.randn(2, 3, 10, 10))


# ---- failures ----


class Stops(Exception):
    """Raised in the middle of an iteration."""


def failing_at(executor: Executor, step: int, error: BaseException) -> None:
    """The work of a step raises, once."""
    program = executor._active.program
    place = next(i for i, each in enumerate(program.instructions) if each.work is not None and each.step == step)
    instruction, work = program.instructions[place], program.work(step)

    def fail(values):
        object.__setattr__(program, "instructions", original)
        raise error

    original = program.instructions
    broken = instruction._replace(work=work._replace(function=fail))
    object.__setattr__(program, "instructions", (*original[:place], broken, *original[place + 1 :]))


@pytest.mark.parametrize("policy", SIMPLE)
@pytest.mark.parametrize("error", [Stops("no"), KeyboardInterrupt()], ids=["exception", "interrupt"])
def test_a_failure_before_anything_has_changed_leaves_the_last_state(start, policy, error):
    executor = start(policy)
    expected = eager(3)[1]
    torch.manual_seed(1)
    assert torch.equal(executor.step(*batch(0)).loss, expected[0])
    random_state = torch.get_rng_state()
    failing_at(executor, executor._active.program.first_change - 1, error)
    with pytest.raises(type(error)) as info:
        executor.step(*batch(1))
    assert "in operator" in info.value.__notes__[-1]
    assert executor._registry.in_use == sum(executor._registry.resident.values())
    torch.set_rng_state(random_state)
    assert torch.equal(executor.step(*batch(1)).loss, expected[1])
    assert torch.equal(executor.step(*batch(2)).loss, expected[2])


@pytest.mark.parametrize("policy", SIMPLE)
def test_a_failure_after_that_is_told_until_a_state_is_loaded(start, policy):
    executor = start(policy)
    reference, expected = eager(2)
    torch.manual_seed(1)
    executor.step(*batch(0))
    random_state, state = torch.get_rng_state(), executor.state_dict()
    failing_at(executor, len(executor._active.program.sequence.steps) - 2, Stops("no"))
    with pytest.raises(Stops):
        executor.step(*batch(1))
    for use in (lambda: executor.step(*batch(1)), executor.state_dict, lambda: executor.resident().__enter__()):
        with pytest.raises(ExecutorError, match="the weights are a mixture of two steps: an iteration stopped at oper"):
            use()
    executor.load_state_dict(state)
    torch.set_rng_state(random_state)
    assert torch.equal(executor.step(*batch(1)).loss, expected[1])
    assert same(executor.state_dict().model, reference.model.state_dict())


@pytest.mark.parametrize("policy", SIMPLE)
def test_interrupts_at_any_moment_leave_a_defined_state(start, policy):
    """Ctrl-C wherever it hits: the state is that before the step or that after it, or the executor says that it is
    neither; and nothing hangs."""
    reference = EagerStep(net(), SPEC)
    executor = start(policy)
    interrupted, generator = 0, torch.manual_seed(1)
    with Interrupts() as interrupts:
        for step in range(500):
            if step >= 30 and interrupted >= 10:
                break
            x, y = batch(step)
            before, random_state = executor.state_dict(), generator.get_state()
            expected = reference.step(x, y).loss
            after, state = reference.model.state_dict(), None
            while state is None or not same(state.model, after):
                executor.load_state_dict(before)
                generator.set_state(random_state)
                try:
                    interrupts.wanted = interrupted < 100
                    loss = executor.step(x, y).loss
                    interrupts.wanted = False
                    assert torch.equal(loss, expected)
                except KeyboardInterrupt:
                    interrupted += 1
                assert executor._registry.in_use == sum(executor._registry.resident.values())
                with contextlib.suppress(ExecutorError):  # it says that the weights are a mixture
                    state = executor.state_dict()
                    assert same(state.model, after) or same(state.model, before.model)
    assert interrupted >= 10


class Interrupts:
    """Sends this thread KeyboardInterrupt at random moments, once each time that one is wanted."""

    wanted = False

    def __enter__(self) -> Interrupts:
        self.before = signal.signal(signal.SIGUSR1, self.strike)
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.send, args=(threading.get_ident(),))
        self.thread.start()
        return self

    def strike(self, *arguments: object) -> None:
        if self.wanted:
            self.wanted = False
            raise KeyboardInterrupt

    def send(self, target: int) -> None:
        random = Random(0)
        while not self.ended.wait(random.random() * 0.005):
            signal.pthread_kill(target, signal.SIGUSR1)

    def __exit__(self, *exception: object) -> None:
        self.wanted = False
        self.ended.set()
        self.thread.join()
        signal.signal(signal.SIGUSR1, self.before)


def test_a_failure_holds_no_memory(start):
    executor = start("none")
    run(executor, 1)
    held = [value for value in executor._values if value is not None]
    inputs, targets = batch(1)
    observer = StorageObserver(watch=held, ignore=[*inputs, *targets])
    failing_at(executor, executor._active.program.first_change - 1, Stops("no"))
    with observer, pytest.raises(Stops) as info:
        executor.step(inputs, targets)
    assert info.value.__traceback__ is not None
    assert observer.live_bytes() == sum(executor._registry.resident.values())


def test_memory_that_the_hardware_has_not_is_out_of_memory(start):
    executor = start("none")
    run(executor, 1)
    failing_at(executor, 1, MemoryError())
    with pytest.raises(OutOfDeviceMemoryError) as info:
        run(executor, 1)
    assert info.value.budget is None
    assert info.value.operator == executor.trace.operator_label(1)
    assert isinstance(info.value.__cause__, MemoryError)


@pytest.mark.parametrize("fails_in", [0, 5, 60])
def test_a_broken_link_is_an_error_and_loses_nothing(start, monkeypatch, fails_in):
    executor = start("swap_all")
    torch.manual_seed(1)
    executor.step(*batch(0))
    before = executor.state_dict()
    count, real = 0, host._move

    def fail(*arguments):
        nonlocal count
        count += 1
        if count > fails_in:
            raise OSError("the link is down")
        return real(*arguments)

    monkeypatch.setattr(host, "_move", fail)
    with pytest.raises(LinkError, match="the link is down"):
        executor.step(*batch(1))
    monkeypatch.undo()
    try:
        after = executor.state_dict()
    except ExecutorError as error:
        assert "mixture" in str(error)
        executor.load_state_dict(before)
        after = executor.state_dict()
    assert same(after.model, before.model)
    assert all(same(after.optimizer[name], before.optimizer[name]) for name in before.optimizer)
    with pytest.raises(LinkError):  # the lane stays broken
        executor.step(*batch(1))


def test_a_trace_that_is_not_true_fails_with_the_operators_name():
    captured = captured_net()
    trace = captured.trace
    relu = next(o for o in range(trace.operator_count) if "max_pool2d" in trace.target[o])
    made = next(a.tensor for a in trace.operators[relu].accesses if a.mode == 3)
    sizes = trace.tensor_bytes.copy()
    sizes[made] += 64
    wrong = replace(captured, trace=replace(trace, tensor_bytes=sizes))
    model = net()
    with opened() as device, Executor(wrong, model, device) as executor, pytest.raises(CaptureError) as info:
        run(executor, 1)
    assert re.match(r"operator \d+ \(aten.max_pool2d.* does not make what its captured trace says", str(info.value))
    assert "bytes, not" in (info.value.detail or "")
    model(*batch()[0])


def test_sizes_that_show_when_executed_are_corrected():
    captured = captured_net()
    trace = captured.trace
    pool = next(o for o in range(trace.operator_count) if "max_pool2d" in trace.target[o])
    made = next(a.tensor for a in trace.operators[pool].accesses if a.mode == 3)
    sizes = trace.tensor_bytes.copy()
    sizes[made] = 0
    unknown = replace(captured, trace=replace(trace, tensor_bytes=sizes), unknown_sizes=frozenset({made}))
    for policy in SIMPLE:
        model = net()
        with opened() as device, Executor(unknown, model, device, plan_of(policy, trace)) as executor:
            losses = run(executor, 3)
            assert executor.trace.tensor_bytes.tolist() == trace.tensor_bytes.tolist()
            executor.recording = True
            run(executor, 1)
            assert recorded(executor).peak_bytes == footprint(trace, plan_of(policy, trace)).peak_bytes
        assert all(map(torch.equal, losses, eager(3)[1]))


# ---- several at a time, records, measuring ----


def test_two_executors_in_two_threads_do_not_disturb_each_other():
    model, inputs, targets, spec = NAMED["batch_norm"].make()
    captured = capture(model, inputs, targets, spec)
    reference = EagerStep(NAMED["batch_norm"].make()[0], spec)
    expected = [reference.step(inputs, targets).loss.clone() for _ in range(10)]
    seen: dict[str, list[Tensor]] = {}

    def work(policy: str, model: nn.Module) -> None:
        with opened() as device:
            plan = plan_of(policy, captured.trace)
            with Executor(captured, model, device, plan) as executor:
                seen[policy] = [executor.step(inputs, targets).loss for _ in range(10)]

    # the models are made here: the generator that initialises them is everybody's
    pairs = [(policy, NAMED["batch_norm"].make()[0]) for policy in ("swap_all", "recompute_all")]
    threads = [threading.Thread(target=work, args=pair) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 2
    assert all(all(map(torch.equal, losses, expected)) for losses in seen.values())


def test_one_device_serves_two_executors_in_turn(start):
    device = HostDevice(FAST)
    first, second = start("swap_all", device=device), start("swap_all", device=device)
    expected = eager(2)[1]
    for step in range(2):
        state = torch.get_rng_state() if step else torch.manual_seed(1).get_state()
        for executor in (first, second):
            torch.set_rng_state(state)
            assert torch.equal(executor.step(*batch(step)).loss, expected[step])


def test_a_record_tells_everything_of_an_iteration(start):
    executor = start("swap_all")
    run(executor, 1)
    assert executor.record is None
    executor.recording = True
    run(executor, 1)
    record, trace = recorded(executor), executor.trace
    sequence = AccessSequence(trace, executor.plan)
    moved = sequence.copies
    assert record.generation == executor.plan.generation and not record.transition
    assert record.steps.tolist() == sequence.steps.tolist()
    assert sorted(each.event for each in record.transfers) == sorted(moved.event.tolist())
    assert record.bytes_out + record.bytes_in == moved.bytes.sum()
    assert record.passive_swap_ins == record.recomputes == 0
    assert record.stall_us == pytest.approx(sum(stall.us for stall in record.stalls))
    assert 0 < record.stall_us < record.step_us
    assert all(0 <= each.start_us <= each.end_us <= record.step_us for each in record.transfers)
    assert record.device_peak_bytes >= record.peak_bytes == footprint(trace, executor.plan).peak_bytes
    executor.recording = False
    run(executor, 1)
    assert executor.record is record
    assert executor.counters.iterations == 3
    assert executor.counters.bytes_out == 3 * record.bytes_out
    executor.change_plan(plan_of("recompute_all", trace))
    executor.recording = True
    run(executor, 1)
    assert recorded(executor).transition and recorded(executor).passive_swap_ins > 0
    run(executor, 1)
    assert not recorded(executor).transition
    assert recorded(executor).recomputes > 0 and recorded(executor).passive_swap_ins == 0
    executor.change_plan(plan_of("swap_all", trace))
    run(executor, 1)
    before = {each.tensor: each.bytes for each in recorded(executor).transfers if each.step == -1}
    wanted = boundary(trace, executor.plan).host  # all of it was on the device only
    assert before == {tensor: int(trace.tensor_bytes[tensor]) for tensor in wanted}
    assert recorded(executor).bytes_out > sum(before.values())


def test_measuring_fills_latencies_and_workspaces_and_changes_no_bit(start):
    executor = start("recompute_all", measure_every=2)
    losses = run(executor, 5)
    assert all(map(torch.equal, losses, eager(5)[1]))
    measured = executor.measurement()
    trace = executor.trace
    assert measured.samples >= 1
    assert (measured.latency_us > 0).all()
    convolution = next(o for o in range(trace.operator_count) if "convolution_backward" in trace.target[o])
    assert trace.latency_us[convolution] > 0
    assert (trace.workspace_bytes >= 0).all()
    assert trace.fingerprint == captured_net().trace.fingerprint


def test_workspaces_count_in_the_budget_once_they_are_known(start):
    captured = captured_net()
    workspace = np.zeros(captured.trace.operator_count, np.int64)
    peak = footprint(captured.trace)
    workspace[peak.steps[peak.peak_step]] = 1000
    known = replace(captured, trace=captured.trace.with_latencies(captured.trace.latency_us, workspace))
    with opened(peak.peak_bytes + 999) as device, Executor(known, net(), device) as executor:
        with pytest.raises(OutOfDeviceMemoryError) as info:
            run(executor, 1)
        assert info.value.in_use + info.value.requested == peak.peak_bytes + 1000
    with opened(peak.peak_bytes + 1000) as device, Executor(known, net(), device) as executor:
        run(executor, 1)


def test_going_through_a_program_costs_less_than_eager_pytorch():
    """A model of many small operators, so that next to nothing but the way to call them takes time."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(layer for _ in range(40) for layer in (nn.Linear(8, 8), nn.Tanh())))

    spec, x = StepSpec(lambda output: output.square().sum(), OptimizerSpec("adamw")), torch.randn(2, 8)
    reference = EagerStep(make(), spec)
    times: tuple[list[float], list[float]] = ([], [])
    with opened() as device, Executor(capture(make(), [x], [], spec), make(), device) as executor:
        for _ in range(30):
            for step, taken in zip((lambda: reference.step([x], []), lambda: executor.step([x])), times, strict=True):
                begin = time.perf_counter()
                step()
                taken.append(time.perf_counter() - begin)
    assert statistics.median(times[1]) <= 1.02 * statistics.median(times[0])
