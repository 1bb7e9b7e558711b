"""The runtime against independent witnesses, and against what goes wrong elsewhere."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from pg_tensile.errors import DeviceError
from pg_tensile.execution.capture import OptimizerSpec, StepSpec, capture
from pg_tensile.execution.capture.eager import EagerStep
from pg_tensile.execution.runtime.executor import Executor
from pg_tensile.execution.runtime.host import HostDevice
from pg_tensile.execution.runtime.measure import Meter, StorageObserver, allocator_peak
from pg_tensile.execution.runtime.program import ALLOCATE
from pg_tensile.planning.device.profile import A100_40GB
from pg_tensile.planning.plan.memory import footprint, host_arena
from pg_tensile.planning.plan.plan import NO_EVENTS, Event, EventKind, Plan
from pg_tensile.planning.plan.validation import validate
from pg_tensile.planning.policies import POLICIES
from pg_tensile.planning.trace.trace import Trace
from tests.swaps import delayed_swaps

POLICY_NAMES = ("none", "swap_all", "recompute_all")
CROSS_ENTROPY = StepSpec(nn.functional.cross_entropy)


def plan_of(policy: str, trace: Trace) -> Plan:
    return POLICIES[policy]({0: trace}, A100_40GB, None)[0]


@pytest.fixture(scope="module")
def convolutions():
    """In-place operators, batch norm's statistics, and convolutions whose workspaces count."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(inplace=True),
        nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.AvgPool2d(4), nn.Flatten(), nn.Linear(2048, 10),
    )  # fmt: skip
    x, y = torch.randn(8, 3, 32, 32), torch.randint(0, 10, (8,))
    return capture(model, [x], [y], CROSS_ENTROPY), model, x, y


# ---- memory: three books that must agree -----------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_the_registry_is_what_an_independent_observer_sees_at_every_operator(convolutions, policy):
    captured, model, x, y = convolutions
    executor = Executor(captured, copy.deepcopy(model), HostDevice(A100_40GB), plan_of(policy, captured.trace))
    executor.step([x], [y])
    executor.recording = True
    state = [value for value in executor.graphs[0].values if isinstance(value, torch.Tensor)]
    state += [value for shell in executor.inspect().shells.values() for value in shell.values]
    with StorageObserver(watch=state, ignore=[x, y, *executor.inspect().host_memory]) as observer:
        executor.step([x], [y])
    record = executor.record
    executor.close()
    assert record is not None
    seen = iter(observer.seen)
    for operator, registered in zip(record.steps.tolist(), record.footprint.tolist(), strict=True):
        target = captured.trace.operators[operator].target
        if target in ("placeholder", "output"):
            continue
        observed = next(one for one in seen if one.target == target)
        assert observed.bytes == registered, captured.trace.operator_label(operator)


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_device_peak_is_the_allocators_own_record(convolutions, policy):
    captured, model, x, y = convolutions
    plan = plan_of(policy, captured.trace)
    executors: list[Executor] = []

    def prepare() -> Callable[[], object]:
        executors.append(Executor(captured, copy.deepcopy(model), HostDevice(A100_40GB), plan))
        return lambda: executors[0].step([x], [y])

    recorded = allocator_peak(prepare)
    executors[0].measure()
    for _ in range(2):
        executors[0].step([x], [y])
    trace = executors[0].trace
    executors[0].close()
    assert footprint(trace, plan).device_peak_bytes == pytest.approx(recorded, rel=0.03)
    assert footprint(captured.trace, plan).device_peak_bytes < 0.97 * recorded, "workspaces matter here"


# ---- measuring while training ----------------------------------------------------------------------------------------


class CountingDevice(HostDevice):
    """Counts the meters that are handed out."""

    def __init__(self) -> None:
        super().__init__(A100_40GB)
        self.clocks = self.allocators = 0

    def clock(self) -> Meter:
        self.clocks += 1
        return super().clock()

    def allocator(self) -> Meter:
        self.allocators += 1
        return super().allocator()


def small_job():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
    x, y = torch.randn(8, 16), torch.randint(0, 4, (8,))
    return capture(model, [x], [y], CROSS_ENTROPY), model, x, y


def test_measuring_again_and_again_watches_the_allocator_once():
    captured, model, x, y = small_job()
    device = CountingDevice()
    executor = Executor(captured, model, device, measure_every=3)
    for _ in range(20):
        executor.step([x], [y])
    assert (device.clocks, device.allocators) == (6, 1)
    assert executor.measurement().samples == 6
    executor.measure()
    for _ in range(2):
        executor.step([x], [y])
    assert (device.clocks, device.allocators) == (7, 2)


# ---- copies ----------------------------------------------------------------------------------------------------------


class Refused(Exception):
    pass


class FailingDevice(HostDevice):
    """Refuses the copy of that number, counted from `fail_at = …` on."""

    def __init__(self) -> None:
        super().__init__(A100_40GB)
        self.fail_at = 0

    def copy_in(self, *args, **options):
        self._count()
        return super().copy_in(*args, **options)

    def copy_out(self, *args, **options):
        self._count()
        return super().copy_out(*args, **options)

    def _count(self) -> None:
        self.fail_at -= 1
        if self.fail_at == 0:
            raise Refused


@pytest.mark.parametrize("copy_that_fails", [1, 2, 3])
def test_after_a_failure_host_copies_that_share_a_place_are_not_mixed_up(copy_that_fails):
    """The first weight is away between two iterations, the third in the middle of one; their host copies never exist at
    the same time, so they have one place. After a failure in the middle the first is swapped out, while the third is
    still there."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(4)))
    inputs, y = [torch.randn(8, 16) for _ in range(3)], torch.randint(0, 16, (8,))
    captured = capture(model, inputs[:1], [y], StepSpec(nn.functional.cross_entropy, OptimizerSpec("sgd")))
    trace = captured.trace
    first, third = (one.tensor for one in captured.persistents if one.name in ("0.weight", "2.weight"))
    uses = {
        tensor: [n for n, operator in enumerate(trace.operators) if tensor in {a.tensor for a in operator.accesses}]
        for tensor in (first, third)
    }
    last = trace.operator_count - 1
    middle = uses[third][0]
    events = [
        Event(EventKind.SWAP_IN, first, 0, uses[first][0]),
        Event(EventKind.SWAP_OUT, first, uses[first][-1], last),
        Event(EventKind.SWAP_OUT, third, middle, middle + 1),
        Event(EventKind.SWAP_IN, third, middle + 1, uses[third][1]),
    ]
    plan = Plan.build(events)
    validate(trace, plan)
    assert host_arena(trace, plan).bytes == 16 * 16 * 4, "one place for both"

    def losses(fail_at: int) -> list[float]:
        device = FailingDevice()
        executor = Executor(captured, copy.deepcopy(model), device, plan)
        found = [executor.step([inputs[0]], [y]).loss.item()]
        device.fail_at = fail_at
        if fail_at:
            with pytest.raises(Refused):
                executor.step([inputs[1]], [y])
        found += [executor.step([x], [y]).loss.item() for x in inputs[1:]]
        executor.close()
        return found

    assert losses(copy_that_fails) == losses(0)


class AheadDevice(HostDevice):
    """A host device that leaves delays to the program, as CUDA does; fails if it is given one."""

    @property
    def runs_ahead(self) -> bool:
        return True

    def copy_in(self, source, target, delay_us=0, *coded):
        assert delay_us == 0
        return super().copy_in(source, target, 0, *coded)

    def copy_out(self, source, target, delay_us=0, *coded):
        assert delay_us == 0
        return super().copy_out(source, target, 0, *coded)


def test_delays_in_the_program_change_no_bit(convolutions):
    """Once with measured latencies; the first program is compiled with those of the roofline."""
    captured, model, x, y = convolutions
    delayed = delayed_swaps(captured.trace, longest_delay_us=2000)

    def train(device: HostDevice, plan: Plan) -> tuple[list[float], dict[str, torch.Tensor], list[int]]:
        executor = Executor(captured, copy.deepcopy(model), device, plan)
        executor.measure()
        losses = [executor.step([x], [y]).loss.item() for _ in range(3)]
        executor.change_plan(plan)
        losses += [executor.step([x], [y]).loss.item() for _ in range(2)]
        codes = [instruction.code for instruction in executor.graphs[0].program.instructions]
        weights = executor.state_dict().model
        executor.close()
        return losses, weights, codes

    losses, weights, codes = train(AheadDevice(A100_40GB), delayed)
    expected_losses, expected_weights, _ = train(HostDevice(A100_40GB), NO_EVENTS)
    assert ALLOCATE in codes, "no copy was asked for later"
    assert losses == expected_losses
    assert all(torch.equal(weights[name], expected) for name, expected in expected_weights.items())


# ---- what the trace cannot know --------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    """On the CPU its kernel returns a workspace that fake tensors say has no bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 32, num_layers=2, dropout=0.25, batch_first=True)
        self.head = nn.Linear(32, 4)

    def forward(self, series: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(series)[0][:, -1])


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_sizes_that_show_in_execution_correct_the_trace(policy):
    torch.manual_seed(0)
    model = Recurrent()
    x, y = torch.randn(8, 10, 8), torch.randint(0, 4, (8,))
    captured = capture(model, [x], [y], CROSS_ENTROPY)
    eager = EagerStep(copy.deepcopy(model), CROSS_ENTROPY)
    plan = plan_of(policy, captured.trace)
    executor = Executor(captured, model, HostDevice(A100_40GB), plan)
    torch.manual_seed(1)
    expected = [eager.step([x], [y]).loss.item() for _ in range(4)]
    torch.manual_seed(1)
    executor.recording = True
    assert [executor.step([x], [y]).loss.item() for _ in range(4)] == expected
    trace, record = executor.trace, executor.record
    executor.close()
    assert trace.tensor_bytes.sum() > captured.trace.tensor_bytes.sum()
    assert record is not None
    assert record.footprint.tolist() == footprint(trace, plan).bytes.tolist()


def test_capturing_for_a_device_that_is_not_there_is_refused():
    """A PyTorch without CUDA would end the process."""
    x, y = torch.randn(2, 16), torch.randint(0, 4, (2,))
    with pytest.raises(DeviceError, match="is not there"):
        capture(nn.Linear(16, 4), [x], [y], CROSS_ENTROPY, device="cuda:99")


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_batch_norm_under_autocast_has_the_types_that_it_has_in_reality(policy):
    """Its saved statistics are float32; fake tensors have them in bfloat16."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 5))
    x, y = torch.randn(4, 3, 8, 8), torch.randint(0, 5, (4,))
    spec = StepSpec(nn.functional.cross_entropy, autocast="bf16")
    captured = capture(model, [x], [y], spec)
    eager = EagerStep(copy.deepcopy(model), spec)
    expected = [eager.step([x], [y]).loss.item() for _ in range(3)]
    executor = Executor(captured, model, HostDevice(A100_40GB), plan_of(policy, captured.trace))
    assert [executor.step([x], [y]).loss.item() for _ in range(3)] == expected
    executor.close()
