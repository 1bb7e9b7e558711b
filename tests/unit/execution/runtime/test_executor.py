"""The executor: every plan computes what eager PyTorch computes, whatever the input, several at a time."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pg_tensile.errors import ExecutorError, OutOfDeviceMemoryError
from pg_tensile.execution.capture import OptimizerSpec, StepSpec, capture
from pg_tensile.execution.capture.eager import EagerStep
from pg_tensile.execution.runtime.executor import Executor
from pg_tensile.execution.runtime.host import HostDevice
from pg_tensile.execution.runtime.measure import Meter, StorageObserver
from pg_tensile.execution.runtime.state import training_state
from pg_tensile.planning.plan.access_sequence import AccessSequence, boundary
from pg_tensile.planning.plan.memory import footprint
from pg_tensile.planning.plan.plan import NO_EVENTS
from tests.unit.executing import (
    FAST,
    SIMPLE,
    SPEC,
    batch,
    captured_net,
    eager,
    net,
    opened,
    plan_of,
    recorded,
    run,
    same,
)
from tests.unit.zoo import NAMED, names

# ---- the same bits ----


@pytest.mark.parametrize("name", names(NAMED))
def test_models_train_to_the_same_bits_under_every_simple_policy(name):
    """Long for deep networks, which train fifteen steps."""
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

    host_memory: list[Tensor] = []

    class Watched(HostDevice):
        def host_memory(self, size: int) -> Tensor:
            host_memory.append(super().host_memory(size))
            return host_memory[-1]

        def clock(self) -> Meter:
            return watcher

    captured, device = captured_net(), Watched(FAST)
    plan = plan_of(policy, captured.trace)
    with Executor(captured, net(), device, plan) as executor:
        executor.step(*batch())
        watcher = Watcher()
        inputs, targets = batch(1)
        held = [value for value in executor.graphs[0].values if value is not None]
        held += [value for shell in executor.inspect().shells.values() for value in shell.values]
        observer = StorageObserver(watch=held, ignore=[*host_memory, *inputs, *targets])
        executor.measure()
        executor.recording = True
        with observer:
            loss, outputs = executor.step(inputs, targets)
        expected = recorded(executor).footprint - AccessSequence(captured.trace, plan).scratch_bytes
        # The output operator makes copies for the caller.
        expected[-1] += sum(tensor.untyped_storage().nbytes() for tensor in (loss, *outputs))
        assert watcher.seen == expected.tolist()
        del loss, outputs, held
        assert observer.live_bytes() == sum(executor.inspect().resident.values())
    device.close()


def test_outputs_are_the_callers_own(start, policy):
    executor = start(policy)
    first = executor.step(*batch())
    kept = first.loss.clone(), first.outputs[0].clone()
    executor.step(*batch(1))
    assert torch.equal(first.loss, kept[0])
    assert torch.equal(first.outputs[0], kept[1])
    assert first.outputs[0].shape == (4, 10)
    storages = {tensor.untyped_storage().data_ptr() for tensor in (first.loss, first.outputs[0])}
    persistents = executor.inspect().persistents.values()
    assert not storages & {tensor.untyped_storage().data_ptr() for tensor in persistents}


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
    losses = [float(loss) for loss in expected]
    assert {policy: [float(loss) for loss in losses] for policy, losses in seen.items()} == {
        "swap_all": losses,
        "recompute_all": losses,
    }


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
    assert sorted(transfer.event for transfer in record.transfers) == sorted(moved.event.tolist())
    assert record.bytes_out + record.bytes_in == moved.bytes.sum()
    assert record.passive_swap_ins == record.recomputes == 0
    assert record.stall_us == pytest.approx(sum(stall.us for stall in record.stalls))
    assert 0 < record.stall_us < record.step_us
    assert all(0 <= transfer.start_us <= transfer.end_us <= record.step_us for transfer in record.transfers)
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
    before = {transfer.tensor: transfer.bytes for transfer in recorded(executor).transfers if transfer.step == -1}
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
    with_workspaces = replace(captured, trace=captured.trace.with_latencies(captured.trace.latency_us, workspace))
    with opened(peak.peak_bytes + 999) as device, Executor(with_workspaces, net(), device) as executor:
        with pytest.raises(OutOfDeviceMemoryError) as info:
            run(executor, 1)
        assert info.value.in_use + info.value.requested == peak.peak_bytes + 1000
    with opened(peak.peak_bytes + 1000) as device, Executor(with_workspaces, net(), device) as executor:
        run(executor, 1)
