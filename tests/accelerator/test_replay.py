"""Iterations that are captured as device graphs and replayed: the bits, the memory and the order of those that are not.

On the emulated device the detector of races looks at each replay.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from itertools import product

import pytest
import torch

from pg_tensile.execution.capture import capture, capture_evaluation
from pg_tensile.execution.runtime.accelerator import AcceleratorDevice, make_deterministic
from pg_tensile.execution.runtime.executor import Executor
from pg_tensile.execution.runtime.replay import PLAIN_ITERATIONS, moved_within
from pg_tensile.planning.plan.plan import NO_EVENTS, Plan
from pg_tensile.planning.policies import POLICIES
from tests.accelerator.mutants.job import coded_plan
from tests.accelerator.target import DEVICE, TYPE, module
from tests.accelerator.test_executor import JOBS, Convolutions
from tests.accelerator.test_schedules import BATCH, BUILD, planned

FIRST = 1 + PLAIN_ITERATIONS  # iterations without a replay: the first one is verified against the trace
STEPS = FIRST + 3
Batch = tuple[torch.Tensor, torch.Tensor]
NAMES = ("convolutions", "attention", "lstm")
# Every policy on one network, and one that swaps and one that recomputes on the others; the other pairs are long.
SHORT = ("joint", "recompute_all")


class Subject:
    """A small job, captured once."""

    def __init__(self, name: str) -> None:
        job = JOBS[name]
        torch.manual_seed(0)
        self.model = BUILD.get(name, lambda: Convolutions(2))().to(DEVICE)
        self.batches = [BATCH.get(name, job.batch)() for _ in range(STEPS + 3)]
        self.spec = job.spec
        self.captured = capture(self.model, self.batches[0][:1], self.batches[0][1:], job.spec)


@pytest.fixture(scope="module")
def subject() -> Callable[[str], Subject]:
    make_deterministic(TYPE, strict=True)
    subjects: dict[str, Subject] = {}

    def made(name: str) -> Subject:
        if name not in subjects:
            subjects[name] = Subject(name)
        return subjects[name]

    return made


@pytest.fixture
def open_executor(device: AcceleratorDevice) -> Iterator[Callable[..., Executor]]:
    """Open executors of fresh copies of a subject's model; they are closed at the end of the test."""
    with ExitStack() as stack:

        def opened(subject: Subject, plan: Plan = NO_EVENTS, device_graphs: bool = False) -> Executor:
            model = copy.deepcopy(subject.model)
            torch.manual_seed(1)
            return stack.enter_context(closing(Executor(subject.captured, model, device, plan, None, device_graphs)))

        yield opened


def state_of(executor: Executor) -> dict[str, torch.Tensor]:
    state = executor.state_dict()
    return state.model | {f"{name}, {key}": own[key] for name, own in state.optimizer.items() for key in own}


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def train(executor: Executor, batches: list[Batch], learning_rate: float | None = None) -> list[float]:
    return [executor.step([x], [y], learning_rate).loss.item() for x, y in batches]


# ---- every plan ----


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        pytest.param(name, policy, marks=[] if name == NAMES[0] or policy in SHORT else pytest.mark.long)
        for name, policy in product(NAMES, POLICIES)
    ],
)
def test_replays_change_no_bit(subject, open_executor, name, policy):
    job = subject(name)
    plan = planned(policy, job.captured.trace) if policy != "none" else NO_EVENTS
    plain = open_executor(job, plan)
    expected = train(plain, job.batches[:STEPS])
    weights = state_of(plain)
    replayed = open_executor(job, plan, device_graphs=True)
    assert train(replayed, job.batches[:STEPS]) == expected
    assert_equal(state_of(replayed), weights)
    recomputes = policy in ("recompute_all", "capuchin")
    assert replayed.replays == STEPS - FIRST or (recomputes and "random" in str(replayed.obstacle))
    assert replayed.counters == plain.counters


def test_tensors_that_are_swapped_between_their_uses_are_moved_back(subject, open_executor):
    """All of those plans together have some, or the test above would not try it."""
    for policy in ("joint", "tensile", "lru"):
        for name in NAMES:
            job = subject(name)
            executor = open_executor(job, planned(policy, job.captured.trace), device_graphs=True)
            if moved_within(executor.graphs[0].program):
                train(executor, job.batches[:STEPS])
                assert executor.replays
                break
        else:
            raise AssertionError(f"{policy} has none")


# ---- what replaces a graph ----


def test_a_new_plan_replaces_the_graph(subject, open_executor):
    job = subject("convolutions")
    plans = [NO_EVENTS, planned("joint", job.captured.trace), planned("swap_all", job.captured.trace)]
    found = []
    for graphs in (False, True):
        executor = open_executor(job, plans[0], device_graphs=graphs)
        losses, replays = [], []
        for plan in (*plans, plans[0]):
            executor.change_plan(plan)
            losses += train(executor, job.batches[:STEPS])
            replays.append(executor.replays)
        found.append((losses, state_of(executor)))
    assert found[0][0] == found[1][0]
    assert_equal(found[0][1], found[1][1])
    assert all(later > earlier for earlier, later in zip([0, *replays], replays, strict=False))


def test_another_learning_rate_replaces_the_graph(subject, open_executor):
    job = subject("lstm")
    found = []
    for graphs in (False, True):
        executor = open_executor(job, device_graphs=graphs)
        losses = [loss for rate in (1e-2, 1e-4, 3e-3) for loss in train(executor, job.batches[:STEPS], rate)]
        found.append((losses, state_of(executor)))
    assert executor.replays == 3 * (STEPS - PLAIN_ITERATIONS) - 1
    assert found[0][0] == found[1][0]
    assert_equal(found[0][1], found[1][1])


def test_a_learning_rate_that_always_changes_is_never_captured(subject, open_executor):
    job = subject("lstm")
    executor = open_executor(job, device_graphs=True)
    for number, batch in enumerate(job.batches):
        train(executor, [batch], 1e-2 / (1 + number))
    assert executor.replays == 0


@pytest.mark.parametrize("policy", ["none", "joint"])
def test_other_work_between_replays(subject, open_executor, policy):
    """Evaluations, measurements, a record, the model lent out and a checkpoint; then replays go on."""
    job = subject("convolutions")
    plan = planned(policy, job.captured.trace) if policy != "none" else NO_EVENTS
    x, y = job.batches[0]
    evaluated = capture_evaluation(copy.deepcopy(job.model), [x], [y], job.spec)
    found = []
    for graphs in (False, True):
        executor = open_executor(job, plan, device_graphs=graphs)
        losses = train(executor, job.batches[:STEPS])
        evaluation = executor.add(evaluated)
        losses += [float(executor.evaluate([x], [y], evaluation).loss) for _ in range(PLAIN_ITERATIONS + 2)]
        losses += train(executor, job.batches[:STEPS])
        executor.measure()
        losses += train(executor, job.batches[:STEPS])
        executor.recording = True
        losses += train(executor, job.batches[:1])
        executor.recording = False
        assert executor.record is not None
        with executor.resident():
            pass
        state = executor.state_dict()
        losses += train(executor, job.batches[:STEPS])
        executor.load_state_dict(state)
        losses += train(executor, job.batches[:STEPS])
        found.append((losses, state_of(executor)))
    assert executor.replays > 2 * STEPS
    assert found[0][0] == found[1][0]
    assert_equal(found[0][1], found[1][1])


def test_random_numbers_go_on_after_replays(subject, open_executor):
    """A checkpoint's state of the generator is that of an executor without graphs."""
    job = subject("attention")
    states = []
    for graphs in (False, True):
        executor = open_executor(job, device_graphs=graphs)
        train(executor, job.batches[:STEPS])
        states.append(module().get_rng_state(DEVICE))
    assert torch.equal(*states)


# ---- what is not captured ----


def test_compressed_copies_are_not_captured(subject, open_executor):
    job = subject("convolutions")
    executor = open_executor(job, coded_plan(job.captured.trace), device_graphs=True)
    train(executor, job.batches[:STEPS])
    assert executor.replays == 0 and "compressed" in executor.obstacle


def test_a_budget_without_room_for_the_fixed_memory(subject, open_executor):
    job = subject("convolutions")
    plan = planned("swap_all", job.captured.trace)
    executor = open_executor(job, plan, device_graphs=True)
    train(executor, job.batches[:1])
    needed = executor.graphs[0].device_peak_bytes
    executor.change_plan(plan, budget_bytes=needed)
    train(executor, job.batches[:STEPS])
    assert executor.replays == 0 and "granted" in executor.obstacle
    executor.change_plan(plan, budget_bytes=needed + 10_000_000)
    train(executor, job.batches[:STEPS])
    assert executor.replays and executor.obstacle is None


def waiting_executor(job: Subject, device: AcceleratorDevice) -> Executor:
    """Return an executor with an operator in the last third of the step that waits for the device."""
    executor = Executor(
        job.captured, copy.deepcopy(job.model), device, planned("lru", job.captured.trace), device_graphs=True
    )
    functions = executor.graphs[0].functions
    number = len(functions._plain) * 2 // 3
    plain = functions._plain[number]

    def waiting(values: list[object]) -> None:
        device._compute.synchronize()
        plain(values)

    functions._plain[number] = waiting
    executor.change_plan(executor.plan)  # which compiles it
    return executor


def test_an_operator_that_waits_for_the_device_leaves_everything_as_it_was(subject, device, open_executor):
    """It is found during the capture, when tensors have been swapped and moved."""
    job = subject("convolutions")
    plain = open_executor(job, planned("lru", job.captured.trace))
    expected = train(plain, job.batches)
    torch.manual_seed(1)
    with closing(waiting_executor(job, device)) as executor:
        assert train(executor, job.batches) == expected
        assert executor.replays == 0 and "not permitted" in str(executor.obstacle)
        assert_equal(state_of(executor), state_of(plain))


def test_random_numbers_and_graphs_survive_a_capture_that_fails(subject, device, open_executor, monkeypatch):
    """Those of another executor go on as they were, and so does the memory of a graph captured after it."""
    job = subject("convolutions")
    backend = type(device._backend)
    abandon, abandoned, found = backend.abandon_capture, [], []

    def counting(*args: object) -> None:
        abandoned.append(args)
        abandon(*args)

    monkeypatch.setattr(backend, "abandon_capture", counting)
    for graphs in (False, True):
        executor = open_executor(job, device_graphs=graphs)
        losses = train(executor, job.batches[:STEPS])
        with closing(waiting_executor(job, device)) as failing:
            losses += train(failing, job.batches)
            assert failing.replays == 0 and failing.obstacle
        replays = executor.replays
        losses += train(executor, job.batches)
        assert not graphs or executor.replays == replays + len(job.batches)
        losses += torch.rand(3, device=DEVICE).tolist()
        losses += train(open_executor(job, device_graphs=graphs), job.batches)
        found.append((losses, state_of(executor)))
    assert found[0][0] == found[1][0]
    assert_equal(found[0][1], found[1][1])
    assert len(abandoned) == 2  # one a failure, none for the captures that succeed


def test_memory_is_given_back(subject, device):
    """Nothing of a graph is left when its executor is closed."""
    job = subject("convolutions")

    def reserved() -> int:
        torch.accelerator.synchronize()
        torch.accelerator.empty_cache()
        return torch.accelerator.memory_reserved(DEVICE)

    before = reserved()
    for policy in ("none", "lru", "swap_all"):
        plan = planned(policy, job.captured.trace) if policy != "none" else NO_EVENTS
        with closing(Executor(job.captured, copy.deepcopy(job.model), device, plan, device_graphs=True)) as executor:
            train(executor, job.batches[:STEPS])
            assert executor.replays
        del executor
    assert reserved() <= before
