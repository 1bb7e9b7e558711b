"""Two executors in one process, whose memory passes from one's stream to the other's: bits, races, and the budget.

Both run in threads of their own and take turns from operator to operator, at random; groups of operators begin as
`Grants` lets them. So each job takes what the other has given back, within an iteration, while the device still works
on both.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from contextlib import ExitStack, closing
from itertools import product
from random import Random
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from pg_tensile.errors import DeviceError
from pg_tensile.execution.capture import Captured, StepSpec, capture
from pg_tensile.execution.runtime import shared_pool
from pg_tensile.execution.runtime.accelerator import AcceleratorDevice, make_deterministic
from pg_tensile.execution.runtime.executor import Executor
from pg_tensile.execution.runtime.shared_pool import SharedPool
from pg_tensile.planning.device.profile import A100_40GB
from pg_tensile.planning.waterwave.grants import Grants
from pg_tensile.planning.waterwave.groups import groups_of
from tests.accelerator.target import DEVICE, TYPE, module
from tests.accelerator.test_executor import ADAMW, plan_of

STEPS = 4
# Of the least budget: blocks are multiples of 512 bytes, which is much for such small jobs, with gaps between them.
CAPACITY = 1.35
SCHEDULES = [("eager", 0), ("late_compute", 0), ("late_copies", 0), ("random", 1), ("random", 2)]
POLICIES = ["none", "swap_all", "recompute_all"]
# Each schedule once, and each policy; the other pairs are in the long tests.
SHORT = {(schedule, "none") for schedule in SCHEDULES[:2]} | set(zip(SCHEDULES[2:], POLICIES, strict=True))
MIB = 1 << 20


class Layers(nn.Module):
    """Larger feature maps than weights; no random numbers, which all executors of a process draw from one generator.

    And no indices, neither in its operators nor in the loss: garbage in those, of a race, would end the process."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layers = [
            nn.Sequential(nn.Conv2d(inputs, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
            for inputs in (3, *[width] * 7)
        ]
        self.features = nn.Sequential(*layers, nn.AvgPool2d(8))
        self.head = nn.Linear(width * 9, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(images).flatten(1))


class Subject(NamedTuple):
    captured: Captured
    model: nn.Module  # on the device, never trained
    batches: list[tuple[torch.Tensor, torch.Tensor]]
    losses: list[float]  # of an executor alone
    weights: dict[str, torch.Tensor]
    peak_bytes: int
    kept_bytes: int  # between two iterations


@pytest.fixture(scope="module")
def subjects(emulator: None) -> list[Subject]:
    make_deterministic(TYPE, strict=True)
    return [subject(width, count) for width, count in ((6, 8), (8, 5))]


def subject(width: int, count: int) -> Subject:
    torch.manual_seed(width)
    model = Layers(width).to(DEVICE)
    batches = [(torch.randn(count, 3, 24, 24), torch.randn(count, 10)) for _ in range(STEPS)]
    captured = capture(model, batches[0][:1], batches[0][1:], StepSpec(nn.functional.mse_loss, ADAMW))
    with (
        closing(AcceleratorDevice(DEVICE, profile=A100_40GB, strict=True)) as device,
        closing(Executor(captured, copy.deepcopy(model), device)) as executor,
    ):
        losses = [executor.step([x], [y]).loss.item() for x, y in batches]
        peak = executor.graphs[0].device_peak_bytes
        return Subject(captured, model, batches, losses, executor.state_dict().model, peak, executor.device_bytes)


def budget_of(subjects: list[Subject]) -> int:
    """Return the least budget in which the jobs can run at once: a peak beside what the others always keep."""
    kept = sum(each.kept_bytes for each in subjects)
    return max(each.peak_bytes + kept - each.kept_bytes for each in subjects)


class Turns:
    """Turns of jobs that run in threads: one at a time, another one at any operator, within the grants of memory."""

    def __init__(self, executors: list[Executor], budget_bytes: int, random: Random) -> None:
        self.grants = Grants(budget_bytes)
        self.executors = executors
        self.random = random
        self.running = list(range(len(executors)))
        self.turn = 0
        self.shared = 0  # operators that were given while both jobs were within an iteration
        self.changed = threading.Condition()
        for number, executor in enumerate(executors):
            sequence = executor.graphs[0].program.sequence
            groups = groups_of(sequence, int(sequence.footprint.max()) // 8)
            assert self.grants.join(number, groups)
            self._watch(number, executor, {group.first for group in groups})

    def _watch(self, number: int, executor: Executor, firsts: set[int]) -> None:
        """Let each operator of an executor's program wait for its turn."""
        program = executor.graphs[0].program

        def watched(function: Callable[[Any], None], step: int, size: int) -> Callable[[Any], None]:
            def run(values: Any) -> None:
                self.pass_on(number, step in firsts)
                in_use = sum(each.device_bytes for each in self.executors)
                assert max(in_use + size, self.grants.held_bytes()) <= self.grants.budget_bytes
                function(values)

            return run

        program.instructions = tuple(
            each if each.work is None else each._replace(
                work=each.work._replace(function=watched(each.work.function, each.step, each.work.bytes))
            )
            for each in program.instructions
        )  # fmt: skip

    def pass_on(self, number: int, begins_group: bool) -> None:
        """Let anyone go on; return when it is the job's turn again, and it may begin a group if it is to begin one."""
        with self.changed:
            if begins_group and self.grants.jobs[number].running:
                self.grants.end(number)
            self._let(self.running, number)
            while begins_group and not self.grants.begin(number):
                self._let([other for other in self.running if other != number], number)
            self.shared += all(job.begun for job in self.grants.jobs.values()) and len(self.running) > 1

    def end_iteration(self, number: int) -> None:
        with self.changed:
            self.grants.end(number)

    def leave(self, number: int) -> None:
        with self.changed:
            self.running.remove(number)
            if self.grants.jobs[number].running:  # it has failed; else it keeps what it has between two iterations
                self.grants.leave(number)
            if self.running:
                self.turn = self.running[0]
                self.changed.notify_all()

    def _let(self, others: list[int], number: int) -> None:
        self.turn = self.random.choice(others)
        self.changed.notify_all()
        assert self.changed.wait_for(lambda: self.turn == number, timeout=60)


class Trained(NamedTuple):
    losses: list[list[float]]  # by job
    weights: list[dict[str, torch.Tensor]]
    shared: int
    synchronizations: int


def train_together(
    subjects: list[Subject], control: Any, schedule: tuple[str, int] = ("eager", 0), policy: str = "none"
) -> Trained:
    """Train all jobs in one pool, the first one under a policy. The first steps are taken alone: they are verified."""
    budget = budget_of(subjects)
    pool = SharedPool(DEVICE, int(budget * CAPACITY), len(subjects))
    with ExitStack() as stack:
        stack.callback(pool.close)
        executors: list[Executor] = []
        for each in subjects:
            device = AcceleratorDevice(DEVICE, profile=A100_40GB, strict=True, pool=pool)
            stack.callback(device.close)
            plan = plan_of("none" if executors else policy, each.captured.trace, device)
            executors.append(Executor(each.captured, copy.deepcopy(each.model), device, plan))
            stack.callback(executors[-1].close)
        losses = [[executor.step(*batch(each, 0)).loss] for each, executor in zip(subjects, executors, strict=True)]
        control.schedule(*schedule)
        turns = Turns(executors, budget, Random(schedule[1]))
        failures: list[BaseException] = []

        def train(number: int) -> None:
            try:
                for step in range(1, STEPS):
                    losses[number].append(executors[number].step(*batch(subjects[number], step)).loss)
                    turns.end_iteration(number)
            except BaseException as error:
                failures.append(error)
            finally:
                turns.leave(number)

        threads = [threading.Thread(target=train, args=(number,)) for number in range(len(subjects))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        weights = [executor.state_dict().model for executor in executors]
        values = [[loss.item() for loss in own] for own in losses]
        return Trained(values, weights, turns.shared, pool.synchronizations)


def batch(subject: Subject, step: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    x, y = subject.batches[step]
    return [x], [y]


@pytest.mark.parametrize(
    ("schedule", "policy"),
    [
        pytest.param(
            schedule,
            policy,
            id=f"{schedule[0]} {schedule[1]}-{policy}",
            marks=[] if (schedule, policy) in SHORT else pytest.mark.long,
        )
        for schedule, policy in product(SCHEDULES, POLICIES)
    ],
)
def test_jobs_that_share_memory_compute_what_they_compute_alone(control, subjects, schedule, policy):
    """The fixture `checked` finds races, `Turns` checks at every operator that the registries fit the budget."""
    from tests.accelerator.leftovers import leftovers

    before = leftovers()
    trained = train_together(subjects, control, schedule, policy)
    for each, losses, weights in zip(subjects, trained.losses, trained.weights, strict=True):
        assert losses == each.losses
        assert all(torch.equal(weights[name], expected) for name, expected in each.weights.items())
    assert trained.shared > 100
    assert policy != "none" or trained.synchronizations > 0
    assert int(budget_of(subjects) * CAPACITY) < 0.8 * sum(each.peak_bytes for each in subjects)
    assert leftovers() == before


def test_without_its_synchronisations_there_are_races(control, subjects, monkeypatch):
    """So the tests above see what they are to see."""
    monkeypatch.setattr(shared_pool, "_order", lambda streams, callers, waiting, awaited: None)
    train_together(subjects, control)
    assert any("write after" in race for race in control.races())
    control.clear()


# ---- the devices of a pool, without executors ----


@pytest.fixture
def pool(emulator):
    with closing(SharedPool(DEVICE, MIB)) as pool:
        yield pool


@pytest.fixture
def devices(pool):
    with ExitStack() as stack:
        yield [stack.enter_context(closing(AcceleratorDevice(DEVICE, profile=A100_40GB, pool=pool))) for _ in range(2)]


def half(value: int) -> torch.Tensor:
    """Return a tensor that two of do not fit the pool beside another byte."""
    return torch.full((MIB // 2,), value, dtype=torch.uint8, device=DEVICE)


def test_the_caller_may_still_be_reading_a_result_when_another_device_takes_its_memory(control, pool, devices):
    """So that one waits for the stream on which the results of the first one are read."""
    one, other = devices
    with torch.Stream(torch.device(DEVICE)):
        with one.iteration():
            results = [half(1), half(2)]
        control.schedule("late_compute", 0)
        read = [result.add(1) for result in results]
        del results
    assert pool.free_bytes == MIB
    with other.iteration():
        taken = [half(5), half(6)]
    assert pool.free_bytes == 0 and pool.synchronizations == 1
    torch.accelerator.synchronize()
    assert [int(each.max()) for each in read] == [2, 3]
    del taken


def test_at_the_end_of_an_iteration_its_memory_is_everybodys(pool, devices):
    for device in (*devices, devices[0]):
        with device.iteration():
            taken = [half(1), half(2)]
            del taken
    assert pool.synchronizations == 0


def test_the_pool_waits_for_those_who_had_its_memory_before(control):
    with torch.Stream(torch.device(DEVICE)):
        before = torch.zeros(8 * MIB, dtype=torch.uint8, device=DEVICE)
        address = before.data_ptr()
        del before
        pool = SharedPool(DEVICE, 8 * MIB)
    with closing(pool), closing(AcceleratorDevice(DEVICE, profile=A100_40GB, pool=pool)) as device:
        with device.iteration():
            first = half(1)
        assert first.data_ptr() == address


def test_the_budgets_of_devices_in_a_pool_are_no_memory_besides_it(control):
    """Otherwise PyTorch's allocator could take as much for tensors that are not in the pool."""
    with closing(SharedPool(DEVICE, MIB)) as pool:
        before = module().get_per_process_memory_fraction(0)
        with closing(AcceleratorDevice(DEVICE, 2048 * MIB, profile=A100_40GB, pool=pool)) as device:
            fraction = module().get_per_process_memory_fraction(0)
            assert (fraction - before) * control.DEFAULT_MEMORY == pytest.approx(device.library_bytes, abs=1)


def test_a_full_pool_is_an_error_of_the_allocation_only(pool, devices):
    with devices[0].iteration():
        first, _ = half(1), half(2)
        with pytest.raises(torch.OutOfMemoryError) as raised:
            half(3)
        assert devices[0].is_out_of_memory(raised.value)
        del first
        assert half(3).numel() == MIB // 2


def test_memory_of_the_caller_is_not_taken_from_the_pool(pool, devices):
    half(1)
    assert pool.free_bytes == MIB


def test_a_pool_has_so_many_seats_and_a_device_one_pool(pool, devices):
    with pytest.raises(DeviceError, match="all seats"):
        AcceleratorDevice(DEVICE, profile=A100_40GB, pool=pool)
    with pytest.raises(DeviceError, match="in use"):
        pool.close()
    with pytest.raises(DeviceError, match="already"):
        SharedPool(DEVICE, MIB)
    devices[0].close()
    again = AcceleratorDevice(DEVICE, profile=A100_40GB, pool=pool)
    with again.iteration():
        half(1)
    again.close()


def test_what_is_left_of_a_closed_device_stays(pool, devices):
    with devices[0].iteration():
        kept = half(7)
    devices[0].close()
    assert pool.free_bytes == MIB // 2
    assert int(kept.min()) == 7
    del kept
    assert pool.free_bytes == MIB


def test_the_device_has_no_memory_for_a_pool(control):
    control.set_memory(32 * MIB)
    with pytest.raises(DeviceError, match="no 67,108,864 bytes for a shared pool"):
        SharedPool(DEVICE, 64 * MIB)


def test_iterations_in_a_pool_are_not_captured_as_device_graphs(subjects):
    each = subjects[0]
    with (
        closing(SharedPool(DEVICE, 2 * each.peak_bytes, 1)) as pool,
        closing(AcceleratorDevice(DEVICE, profile=A100_40GB, strict=True, pool=pool)) as device,
        closing(Executor(each.captured, copy.deepcopy(each.model), device, device_graphs=True)) as executor,
    ):
        assert [executor.step(*batch(each, step)).loss.item() for step in range(STEPS)] == each.losses
        assert executor.replays == 0
        assert "shared pool" in str(executor.obstacle)
