"""Plans on an accelerator change nothing but the memory.

Results are bit-identical to eager PyTorch's with deterministic algorithms, the footprint is the predicted one to the
byte, and the allocator's own record is within 3 % of it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import nn

from pg_tensile.errors import OutOfDeviceMemoryError
from pg_tensile.execution.capture import Captured, OptimizerSpec, StepSpec, capture
from pg_tensile.execution.capture.eager import EagerStep
from pg_tensile.execution.capture.recurrent import stacks_split
from pg_tensile.execution.measuring.device import measure
from pg_tensile.execution.runtime.accelerator import AcceleratorDevice, make_deterministic
from pg_tensile.execution.runtime.executor import Executor
from pg_tensile.execution.runtime.measure import StorageObserver, allocator_peak
from pg_tensile.execution.runtime.program import ALLOCATE
from pg_tensile.planning.plan.memory import footprint
from pg_tensile.planning.plan.plan import NO_EVENTS, Plan
from pg_tensile.planning.policies import POLICIES
from pg_tensile.planning.trace.trace import Trace
from tests.accelerator.target import DEVICE, TYPE, module
from tests.swaps import delayed_swaps

ITERATIONS = 5
POLICY_NAMES = ("none", "swap_all", "recompute_all")


class Convolutions(nn.Module):
    """Batch norm, in-place operators, views, dropout."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        )  # fmt: skip
        self.head = nn.Sequential(nn.Dropout(0.3), nn.Linear(width * 64, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(images).flatten(1))


class Attention(nn.Module):
    """A Transformer's encoder with tied embeddings and dropout."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.encoder(self.embedding(words)) @ self.embedding.weight.T


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 32, num_layers=2, dropout=0.25, batch_first=True)
        self.head = nn.Linear(32, 4)

    def forward(self, series: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(series)[0][:, -1])


def words_loss(outputs: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs.flatten(0, 1), words.flatten())


class Job(NamedTuple):
    build: Callable[[], nn.Module]
    batch: Callable[[], tuple[torch.Tensor, torch.Tensor]]  # on the CPU
    spec: StepSpec


def images(size: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(count, 3, size, size), torch.randint(0, 10, (count,))


def sentences(count: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    words = torch.randint(0, 100, (count, 12))
    return words, words.roll(-1, 1)


def series(length: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(8, length, 8), torch.randint(0, 4, (8,))


ADAMW, SGD = OptimizerSpec("adamw", 1e-2), OptimizerSpec("sgd", 1e-2, momentum=0.9)
CROSS_ENTROPY = nn.functional.cross_entropy
JOBS = {
    "convolutions": Job(Convolutions, lambda: images(16, 8), StepSpec(CROSS_ENTROPY, ADAMW)),
    "convolutions, sgd, clipped": Job(Convolutions, lambda: images(16, 8), StepSpec(CROSS_ENTROPY, SGD, clip=0.5)),
    "convolutions, bf16": Job(Convolutions, lambda: images(16, 8), StepSpec(CROSS_ENTROPY, ADAMW, autocast="bf16")),
    "attention": Job(partial(Attention, 1), sentences, StepSpec(words_loss, ADAMW)),
    "lstm": Job(Recurrent, series, StepSpec(CROSS_ENTROPY, ADAMW)),
}


class Prepared(NamedTuple):
    captured: Captured
    model: nn.Module  # on the device, never trained
    batches: list[tuple[torch.Tensor, torch.Tensor]]
    losses: list[torch.Tensor]  # of eager PyTorch
    weights: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def prepare():
    """Captures a job once and trains it eagerly, all from the same seeds."""
    make_deterministic(TYPE, strict=True)
    prepared_by_name: dict[str, Prepared] = {}

    def prepared(name: str) -> Prepared:
        if name not in prepared_by_name:
            job = JOBS[name]
            torch.manual_seed(0)
            model = job.build().to(DEVICE)
            batches = [job.batch() for _ in range(ITERATIONS)]
            captured = capture(model, batches[0][:1], batches[0][1:], job.spec)
            trained = copy.deepcopy(model)
            eager = EagerStep(trained, job.spec)
            torch.manual_seed(1)
            with stacks_split():  # as captures on an accelerator do
                losses = [eager.step([x.to(DEVICE)], [y.to(DEVICE)]).loss.clone() for x, y in batches]
            prepared_by_name[name] = Prepared(captured, model, batches, losses, copy.deepcopy(trained.state_dict()))
        return prepared_by_name[name]

    return prepared


def plan_of(policy: str, trace: Trace, device: AcceleratorDevice) -> Plan:
    return POLICIES[policy]({0: trace}, device.profile, None)[0]


def assert_same(prepared: Prepared, losses: list[torch.Tensor], weights: dict[str, torch.Tensor]) -> None:
    assert [loss.item() for loss in losses] == [loss.item() for loss in prepared.losses]
    for name, expected in prepared.weights.items():
        assert torch.equal(weights[name].to(DEVICE), expected), name


def train(executor: Executor, prepared: Prepared, plans: dict[int, Plan] | None = None) -> list[torch.Tensor]:
    """All iterations; `plans`: the changes, by iteration."""
    torch.manual_seed(1)
    losses = []
    for iteration, (x, y) in enumerate(prepared.batches):
        if plans and iteration in plans:
            executor.change_plan(plans[iteration])
        losses.append(executor.step([x], [y]).loss)
    return losses


@pytest.mark.parametrize("policy", POLICY_NAMES)
@pytest.mark.parametrize("name", JOBS)
def test_a_policy_changes_no_bit_and_takes_the_memory_that_was_predicted(device, prepare, name, policy):
    prepared = prepare(name)
    plan = plan_of(policy, prepared.captured.trace, device)
    model = copy.deepcopy(prepared.model)
    executor = Executor(prepared.captured, model, device, plan)
    losses = train(executor, prepared)
    assert_same(prepared, losses, executor.state_dict().model)
    executor.recording = True
    x, y = prepared.batches[0]
    executor.step([x], [y])
    record = executor.record
    assert record is not None
    expected = footprint(executor.trace, plan)
    assert record.footprint.tolist() == expected.bytes.tolist()
    assert record.passive_swap_ins == 0
    assert all(moved.end_us >= moved.start_us > 0 for moved in record.transfers)
    executor.close()


def test_a_capture_draws_the_dropout_inside_a_stack_itself(monkeypatch):
    """CUDA's own draws it from a state of its own; here, a stack that drops out cannot run at all."""
    run = torch._VF.lstm

    def without_dropout(*args):
        assert not (args[5] and args[6]), "dropout inside a stack"
        return run(*args)

    monkeypatch.setattr(torch._VF, "lstm", without_dropout, raising=False)
    model = Recurrent().to(DEVICE)
    x, y = series()
    trace = capture(model, [x], [y], JOBS["lstm"].spec).trace
    assert [operator.target for operator in trace.operators if operator.random] == ["aten.native_dropout.default"]
    with pytest.raises(AssertionError, match="dropout inside a stack"):
        model(x.to(DEVICE))


def test_weights_come_back_into_the_model(device, prepare):
    prepared = prepare("convolutions")
    model = copy.deepcopy(prepared.model)
    executor = Executor(prepared.captured, model, device, plan_of("swap_all", prepared.captured.trace, device))
    losses = train(executor, prepared)
    executor.close()
    assert_same(prepared, losses, model.state_dict())
    assert all(parameter.device == torch.device(DEVICE) for parameter in model.parameters())


def test_plans_may_change_between_any_two_iterations(device, prepare):
    prepared = prepare("convolutions")
    plans = {name: plan_of(name, prepared.captured.trace, device) for name in POLICY_NAMES}
    order = ["swap_all", "recompute_all", "none", "swap_all"]
    changes = {iteration: plans[name] for iteration, name in enumerate(order, 1)}
    executor = Executor(prepared.captured, copy.deepcopy(prepared.model), device, plans["none"])
    losses = train(executor, prepared, changes)
    assert_same(prepared, losses, executor.state_dict().model)
    executor.close()


def test_delays_change_no_bit(device, prepare):
    """Delayed copies are asked for later in the program; latencies are those that were measured."""
    prepared = prepare("convolutions")
    executor = Executor(prepared.captured, copy.deepcopy(prepared.model), device)
    executor.measure()
    for x, y in prepared.batches:
        executor.step([x], [y])
    trace = executor.trace
    executor.close()
    plan = delayed_swaps(trace, longest_delay_us=500)
    executor = Executor(prepared.captured, copy.deepcopy(prepared.model), device, plan)
    losses = train(executor, prepared)
    assert ALLOCATE in [instruction.code for instruction in executor.graphs[0].program.instructions]
    assert_same(prepared, losses, executor.state_dict().model)
    executor.close()


def test_a_checkpoint_goes_on_bit_by_bit(device, prepare):
    prepared = prepare("attention")
    plan = plan_of("swap_all", prepared.captured.trace, device)
    first = Executor(prepared.captured, copy.deepcopy(prepared.model), device, plan)
    torch.manual_seed(1)
    losses = [first.step([x], [y]).loss for x, y in prepared.batches[:2]]
    state, generator = first.state_dict(), module().get_rng_state(DEVICE)
    first.close()
    second = Executor(prepared.captured, copy.deepcopy(prepared.model), device, NO_EVENTS)
    second.load_state_dict(state)
    module().set_rng_state(generator, DEVICE)
    losses += [second.step([x], [y]).loss for x, y in prepared.batches[2:]]
    assert_same(prepared, losses, second.state_dict().model)
    second.close()


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def large():
    """Tensors of megabytes, so that rounding to 512 bytes does not show."""
    make_deterministic(TYPE, strict=True)
    torch.manual_seed(0)
    size, rows = (128, 32) if TYPE == "cuda" else (64, 8)
    model = Convolutions(64)
    model.features.append(nn.AvgPool2d(size // 16))
    x, y = images(size, rows)
    captured = capture(model, [x], [y], StepSpec(CROSS_ENTROPY, ADAMW), device=DEVICE)
    return captured, model, x, y


def measured_trace(executor: Executor, x: torch.Tensor, y: torch.Tensor) -> Trace:
    executor.measure()
    for _ in range(4):
        executor.step([x], [y])
    return executor.trace


@pytest.mark.long
@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_device_peak_is_the_allocators_within_three_percent(device, large, policy):
    captured, model, x, y = large
    plan = plan_of(policy, captured.trace, device)
    executors: list[Executor] = []

    def prepare_step() -> Callable[[], object]:
        executors.append(Executor(captured, copy.deepcopy(model), device, plan))
        return lambda: executors[0].step([x], [y])

    recorded = allocator_peak(prepare_step, DEVICE)
    trace = measured_trace(executors[0], x, y)
    predicted = footprint(trace, plan).device_peak_bytes
    executors[0].close()
    assert predicted == pytest.approx(recorded, rel=0.03)


def test_the_registry_is_what_an_independent_observer_sees(device, large):
    captured, model, x, y = large
    executor = Executor(captured, copy.deepcopy(model), device)
    executor.step([x], [y])
    executor.recording = True
    state = [value for value in executor.graphs[0].values if isinstance(value, torch.Tensor)]
    with StorageObserver(watch=[value for value in state if not value.is_cpu]) as observer:
        executor.step([x], [y])
    record = executor.record
    executor.close()
    assert record is not None
    seen = max(observed.bytes for observed in observer.seen)
    # On the host besides: the inputs as they were given, pinned, and the learning rate.
    assert record.peak_bytes <= seen <= record.peak_bytes + 2 * (x.nbytes + y.nbytes) + 64


@pytest.mark.long
def test_a_budget_below_the_peak_is_refused_and_a_plan_that_fits_runs(large):
    captured, model, x, y = large
    profile = measure(DEVICE)
    free = AcceleratorDevice(DEVICE, profile, strict=True)
    executor = Executor(captured, copy.deepcopy(model), free)
    trace = measured_trace(executor, x, y)
    executor.close()
    plan = plan_of("swap_all", trace, free)
    free.close()
    budget = footprint(trace, plan).device_peak_bytes
    vanilla = footprint(trace, NO_EVENTS)
    assert budget < vanilla.device_peak_bytes
    device = AcceleratorDevice(DEVICE, profile, budget, strict=True)
    executor = Executor(captured, copy.deepcopy(model), device)
    with pytest.raises(OutOfDeviceMemoryError) as caught:
        executor.step([x], [y])
    assert caught.value.budget == budget
    assert "aten." in str(caught.value.operator)
    executor.change_plan(plan)
    assert torch.isfinite(executor.step([x], [y]).loss)
    executor.close()
    device.close()


def test_exhausted_hardware_is_an_error_that_names_the_operator(device, large):
    """The allocator may take little more than is in use."""
    captured, model, x, y = large
    executor = Executor(captured, copy.deepcopy(model), device)
    torch.accelerator.synchronize()
    torch.accelerator.empty_cache()
    total = module().get_device_properties(DEVICE).total_memory
    module().set_per_process_memory_fraction((torch.accelerator.memory_reserved(DEVICE) + (32 << 20)) / total, DEVICE)
    try:
        with pytest.raises(OutOfDeviceMemoryError) as caught:
            executor.step([x], [y])
    finally:
        module().set_per_process_memory_fraction(1.0, DEVICE)
    assert caught.value.budget is None
    assert "aten." in str(caught.value.operator) or "placeholder" in str(caught.value.operator)
    executor.close()
    assert torch.ones(1 << 20, device=DEVICE).sum().item() == 1 << 20
