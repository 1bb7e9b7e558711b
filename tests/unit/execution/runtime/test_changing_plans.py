"""Plans and budgets change while a job runs: nothing is computed differently, nothing exceeds the larger budget."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from pg_tensile.errors import DeviceError, ExecutorError, InvalidPlanError, LinkError, OutOfDeviceMemoryError
from pg_tensile.execution.runtime import host
from pg_tensile.execution.runtime import loaded_graph as graph_module
from pg_tensile.execution.runtime.executor import Executor
from pg_tensile.execution.runtime.host import HostDevice
from pg_tensile.execution.runtime.measure import Meter
from pg_tensile.planning.plan.execution import AccessSequence
from pg_tensile.planning.plan.following import host_bytes
from pg_tensile.planning.plan.memory import footprint
from pg_tensile.planning.plan.plan import NO_EVENTS, Boundary, Event, EventKind, Plan, boundary
from pg_tensile.planning.trace.trace import Kind
from tests.unit.executing import FAST, SIMPLE, batch, captured_net, eager, net, opened, plan_of, recorded, run, same
from tests.unit.execution.runtime.test_several_graphs import EagerJob, validation_net
from tests.unit.graphs import random_plan, random_trace
from tests.unit.interrupts import Interrupts
from tests.unit.realised import execute_plainly, realise, with_learning_rate

randoms = st.integers(0, 1 << 40).map(Random)


def peak(policy: str) -> int:
    trace = captured_net().trace
    return footprint(trace, plan_of(policy, trace)).device_peak_bytes


def change(executor: Executor, policy: str, budget: int | None = None) -> None:
    executor.change_plan(plan_of(policy, captured_net().trace), budget_bytes=budget)


# ---- budgets ----


def test_until_an_iteration_under_the_new_plan_has_ended_the_larger_budget_counts(start):
    large, small = peak("none"), peak("swap_all")
    budgets: list[int | None] = []

    class Notes(HostDevice):
        def upload(self, source: Tensor, target: Tensor) -> None:
            super().upload(source, target)
            budgets.append(executor.budget_bytes)

    device = Notes(FAST, large)
    executor = start("none", device=device)
    run(executor, 1)
    change(executor, "swap_all", small)
    assert executor.budget_bytes == large, "it has not been taken over yet"
    run(executor, 1)
    assert set(budgets) == {large} and executor.budget_bytes == small
    change(executor, "none", large)
    budgets.clear()
    run(executor, 1)
    assert set(budgets) == {large} and executor.budget_bytes == large
    change(executor, "swap_all")
    run(executor, 1)
    assert executor.budget_bytes == large, "None is no change"
    assert executor.counters.device_peak_bytes == executor.counters.peak_bytes == large
    device.close()


def test_device_bytes_are_those_of_the_registry_and_a_graph_knows_its_peak(start):
    executor = start("none")
    assert executor.budget_bytes is None
    weights = sum(parameter.nbytes for parameter in net().parameters()) - 3 * 4  # one is not used
    assert executor.device_bytes > 3 * weights
    assert executor.graphs[0].device_peak_bytes == peak("none")
    change(executor, "swap_all", peak("swap_all"))
    run(executor, 1)
    assert executor.graphs[0].device_peak_bytes == executor.budget_bytes == peak("swap_all")
    assert executor.device_bytes < weights


def test_a_plan_that_exceeds_its_budget_is_refused_before_it_runs_and_a_better_one_goes_on(start):
    expected = eager(4)[1]
    executor = start("none", budget=peak("none"))
    torch.manual_seed(1)
    assert torch.equal(executor.step(*batch(0)).loss, expected[0])
    for _ in range(2):
        change(executor, "recompute_all", peak("swap_all"))
        with pytest.raises(OutOfDeviceMemoryError) as info:
            executor.step(*batch(1))
        assert info.value.budget == peak("swap_all") and executor.budget_bytes == peak("none")
    change(executor, "swap_all", peak("swap_all"))
    assert torch.equal(executor.step(*batch(1)).loss, expected[1])
    assert executor.budget_bytes == peak("swap_all")
    change(executor, "none", peak("none"))
    assert torch.equal(executor.step(*batch(2)).loss, expected[2])
    assert torch.equal(executor.step(*batch(3)).loss, expected[3])


class Hungry(HostDevice):
    """Its operators turn out to take more memory than anybody knew."""

    class Allocator(Meter):
        def __init__(self) -> None:
            self.steps = 0

        def start(self) -> None:
            self.steps += 1

        def stop(self) -> None:
            return None

        def read(self) -> np.ndarray:
            return np.full(self.steps, 30_000)

    def allocator(self) -> Meter:
        return self.Allocator()


def test_workspaces_measured_later_may_exceed_the_budget_and_nothing_is_lost(start):
    reference, losses = eager(5)
    device = Hungry(FAST, peak("none"))
    executor = start("none", device=device)
    executor.measure()
    torch.manual_seed(1)
    for number in range(3):  # the first is held against the trace, the others are measured
        assert torch.equal(executor.step(*batch(number)).loss, losses[number])
    needed = executor.graphs[0].device_peak_bytes
    assert needed > peak("none")
    for _ in range(2):
        with pytest.raises(OutOfDeviceMemoryError) as info:
            executor.step(*batch(3))
        assert info.value.in_use + info.value.requested > peak("none")
    change(executor, "none", needed)
    assert torch.equal(executor.step(*batch(3)).loss, losses[3])
    assert executor.counters.device_peak_bytes == needed > executor.counters.peak_bytes
    smaller = footprint(executor.trace, plan_of("swap_all", executor.trace)).device_peak_bytes
    assert peak("swap_all") < smaller < needed
    change(executor, "swap_all", smaller)
    assert executor.budget_bytes == needed
    assert torch.equal(executor.step(*batch(4)).loss, losses[4])
    assert executor.budget_bytes == executor.graphs[0].device_peak_bytes == smaller
    assert same(executor.state_dict().model, reference.model.state_dict())
    device.close()


@pytest.mark.parametrize("policy", SIMPLE)
def test_what_validation_leaves_on_the_device_goes_when_the_budget_shrinks_during_it(start, policy):
    """The optimizer's state, of no use in an evaluation, must not be there when the new budget counts."""
    captured, reference = validation_net(), EagerJob()
    executor = start(policy)
    executor.add(captured)
    torch.manual_seed(1)
    assert torch.equal(executor.step(*batch(0)).loss, reference_step(reference, 0))
    small = max(peak("swap_all"), footprint(captured.trace).device_peak_bytes)
    change(executor, "swap_all", small)
    executor.recording = True
    for number in (7, 8):
        found = executor.evaluate(*batch(number, 5))
        assert torch.equal(found.outputs[0], reference.evaluate(*batch(number, 5))[1])
        assert executor.plan == plan_of("swap_all", captured_net().trace)
        assert recorded(executor).device_peak_bytes <= small
    assert executor.budget_bytes == small >= executor.device_bytes
    state = torch.get_rng_state()
    expected = reference_step(reference, 1)
    torch.set_rng_state(state)
    assert torch.equal(executor.step(*batch(1)).loss, expected)
    assert same(executor.state_dict().model, reference.state())


def reference_step(reference: EagerJob, number: int) -> Tensor:
    if number == 0:
        torch.manual_seed(1)
    loss = reference.step(*batch(number)).clone()
    if number == 0:
        torch.manual_seed(1)
    return loss


def test_a_negative_budget_is_refused(start):
    executor = start("none")
    with pytest.raises(DeviceError, match="a budget of -1 bytes is not possible"):
        change(executor, "none", -1)
    assert executor.inspect().changes.asked is None


# ---- what is made ready by whom ----


@contextlib.contextmanager
def watched_compiling():
    """The names of the threads that compile inside."""
    threads: list[str] = []
    real = graph_module.compile_program

    def compile_program(*arguments):
        threads.append(threading.current_thread().name)
        return real(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph_module, "compile_program", compile_program)
        yield threads


def in_thread(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, name="asking")
    thread.start()
    return thread


def train(executor: Executor) -> object:
    return executor.step(*batch(0))


def evaluate(executor: Executor) -> object:
    return executor.evaluate(*batch(0, 5))


@pytest.mark.parametrize("before", [train, evaluate])
@pytest.mark.parametrize("turns", [(train, evaluate), (evaluate, train), (evaluate, evaluate, train)])
def test_the_executing_thread_compiles_nothing(start, before, turns):
    executor = start("swap_all")
    executor.add(captured_net(3)), executor.add(validation_net())
    for turn in (*turns, before):
        turn(executor)
    executor.step(*batch(0, 3))
    for policy in ("recompute_all", "swap_all", "none", "swap_all"):
        before(executor)
        with watched_compiling() as threads:
            in_thread(partial(change, executor, policy)).join()
            assert set(threads) == {"asking"}
            threads.clear()
            for turn in turns:
                turn(executor)
            executor.step(*batch(0, 3))
            assert not threads
        assert executor.plan == plan_of(policy, executor.trace)


def test_taking_over_a_plan_of_a_large_trace_takes_less_than_a_millisecond():
    random = Random(1)
    realised = realise(with_learning_rate(random_trace(random, 12_000, 10_000)), random, view_share=0.0)
    assert realised.trace.operator_count > 5000
    plans = [plan_of("swap_all", realised.trace), NO_EVENTS]
    taken = []
    with opened() as device, Executor(realised.captured, realised.model(), device) as executor:
        changes = executor.inspect().changes
        for number in range(9):
            executor.change_plan(plans[number % 2], budget_bytes=1 << 40)
            begin = time.thread_time()
            changes.take_over()
            taken.append(time.thread_time() - begin)
        assert len(executor.plan) > 4000
    assert sorted(taken)[4] < 1e-3


def test_the_last_of_several_changes_wins_graph_by_graph(start):
    executor = start("none", budget=1 << 30)
    smaller, validation = executor.add(captured_net(3)), executor.add(validation_net())
    executor.change_plan(plan_of("recompute_all", validation_net().trace), validation, budget_bytes=1 << 28)
    change(executor, "recompute_all", 1 << 29)
    change(executor, "swap_all")
    executor.change_plan(NO_EVENTS, smaller)
    train(executor)
    assert executor.budget_bytes == 1 << 29
    assert executor.plan == plan_of("swap_all", captured_net().trace)
    assert validation.plan == plan_of("recompute_all", validation_net().trace)
    assert smaller.plan == NO_EVENTS and not smaller.compiled.follows and not validation.compiled.follows
    with pytest.raises(ExecutorError, match="not one of this executor"):
        executor.change_plan(NO_EVENTS, start("none").graphs[0])


def test_a_graph_that_is_added_follows_the_plan_that_is_asked_for(start):
    executor = start("none")
    change(executor, "swap_all", 1 << 29)
    smaller = executor.add(captured_net(3))
    assert smaller.plan == executor.plan == plan_of("swap_all", captured_net().trace)
    run(executor, 2)


@pytest.mark.parametrize("asked_for", ["first", "smaller"])
@pytest.mark.parametrize("corrected", ["first", "smaller"])
def test_a_change_from_before_sizes_were_corrected_is_made_right(corrected, asked_for):
    """It is asked for in the middle of the iteration that shows the sizes of one of two graphs."""
    graphs = {"first": captured_net(), "smaller": captured_net(3)}
    true = graphs[corrected].trace
    convolution = next(o for o in range(true.operator_count) if "convolution" in true.target[o])
    made = next(access.tensor for access in true.operators[convolution].accesses if access.mode == 3)
    sizes = true.tensor_bytes.copy()
    sizes[made] = 0
    graphs[corrected] = replace(
        graphs[corrected], trace=replace(true, tensor_bytes=sizes), unknown_sizes=frozenset({made})
    )

    class Asks(HostDevice):
        def upload(self, source: Tensor, target: Tensor) -> None:
            super().upload(source, target)
            handle = handles[asked_for]
            if executor.counters.iterations == (corrected == "smaller") and len(source.shape) > 1:
                executor.change_plan(plan_of("recompute_all", true), handle)
                executor.change_plan(plan_of("swap_all", true), handle)

    plan = plan_of("swap_all", captured_net().trace)
    with contextlib.closing(Asks(FAST)) as device, Executor(graphs["first"], net(), device, plan) as executor:
        handles = {"first": executor.graphs[0]}
        handles["smaller"] = executor.add(graphs["smaller"], plan_of("swap_all", captured_net(3).trace))
        reference = EagerJob()
        for turn, size in enumerate((4, 3, 4, 3)):
            torch.manual_seed(turn)
            expected = reference.step(*batch(turn, size))
            torch.manual_seed(turn)
            assert torch.equal(executor.step(*batch(turn, size)).loss, expected)
        assert handles[asked_for].plan == plan_of("swap_all", true)
        for handle, captured in zip(handles.values(), (captured_net(), captured_net(3)), strict=True):
            assert handle.program.sequence.trace.tensor_bytes.tolist() == captured.trace.tensor_bytes.tolist()
        assert executor.host_bytes == host_bytes([(each.trace, each.plan) for each in executor.graphs])
        assert same(executor.state_dict().model, reference.state())


# ---- faults ----


class Poor(HostDevice):
    """Has no more host memory when told so."""

    poor = False

    def host_memory(self, size: int) -> Tensor:
        if self.poor and size:
            raise DeviceError("no host memory")
        return super().host_memory(size)


def wrong_plans() -> list[Plan]:
    trace = captured_net().trace
    return [
        Plan.build([Event(EventKind.SWAP_IN, 0, 1, 2)]),
        plan_of("swap_all", validation_net().trace),  # of another trace
        Plan.build([Event(EventKind.RELEASE, trace.tensor_count + 5, 1, 1)], generation=3),
    ]


@pytest.mark.parametrize("policy", SIMPLE)
def test_a_change_that_cannot_be_made_ready_leaves_everything_as_it_is(start, policy):
    expected = eager(3)[1]
    device = Poor(FAST, 1 << 30)
    executor = start(policy, device=device)
    executor.add(validation_net())
    torch.manual_seed(1)
    assert torch.equal(executor.step(*batch(0)).loss, expected[0])
    plan, memory = executor.plan, executor.host_bytes
    for wrong in wrong_plans():
        with pytest.raises(InvalidPlanError):
            executor.change_plan(wrong, budget_bytes=1)
    device.poor = True
    if policy != "swap_all":
        with pytest.raises(DeviceError, match="no host memory"):
            change(executor, "swap_all", 1)
    assert torch.equal(executor.step(*batch(1)).loss, expected[1])
    assert (executor.plan, executor.host_bytes, executor.budget_bytes) == (plan, memory, 1 << 30)
    device.poor = False
    change(executor, "swap_all", peak("swap_all"))
    assert torch.equal(executor.step(*batch(2)).loss, expected[2])
    assert executor.budget_bytes == peak("swap_all")
    device.close()


def test_a_change_that_cannot_be_made_ready_leaves_the_one_asked_for_before(start):
    device = Poor(FAST)
    executor = start("none", device=device)
    executor.add(validation_net())
    run(executor, 1)
    change(executor, "recompute_all", 1 << 29)
    device.poor = True
    for plan, error in ((wrong_plans()[0], InvalidPlanError), (plan_of("swap_all", executor.trace), DeviceError)):
        with pytest.raises(error):
            executor.change_plan(plan, budget_bytes=5)
    run(executor, 1)
    assert executor.plan == plan_of("recompute_all", executor.trace) and executor.budget_bytes == 1 << 29
    device.close()


@pytest.mark.parametrize("fails_in", [0, 3, 20])
@pytest.mark.parametrize(("old", "new"), [("none", "swap_all"), ("swap_all", "none")])
def test_a_link_that_breaks_in_a_transition_loses_nothing(start, monkeypatch, old, new, fails_in):
    executor = start(old, budget=1 << 30)
    torch.manual_seed(1)
    executor.step(*batch(0))
    before, count, real = executor.state_dict(), 0, host._move

    def fail(*arguments):
        nonlocal count
        count += 1
        if count > fails_in:
            raise OSError("the link is down")
        return real(*arguments)

    monkeypatch.setattr(host, "_move", fail)
    change(executor, new, 1 << 29)
    with pytest.raises(LinkError, match="the link is down"):
        executor.step(*batch(1))
    monkeypatch.undo()
    assert executor.budget_bytes == 1 << 30, "no iteration has ended under the new plan"
    try:
        after = executor.state_dict()
    except ExecutorError as error:
        assert "mixture" in str(error)
        executor.load_state_dict(before)
        after = executor.state_dict()
    assert same(after.model, before.model)
    assert all(same(after.optimizer[name], before.optimizer[name]) for name in before.optimizer)
    assert executor.device_bytes == sum(executor.inspect().resident.values())


def test_an_executor_that_is_closed_while_a_change_is_made_ready_keeps_no_memory():
    asked, closed, memory = threading.Event(), threading.Event(), []

    class Slow(HostDevice):
        def host_memory(self, size: int) -> Tensor:
            found = super().host_memory(size)
            if threading.current_thread().name == "asking":
                memory.append(StorageWeakRef(found.untyped_storage()))
                asked.set()
                assert closed.wait(60)
            return found

    errors: list[str] = []

    def ask() -> None:
        try:
            change(executor, "swap_all", 1 << 30)
        except ExecutorError as error:
            errors.append(str(error))

    model = net()
    with contextlib.closing(Slow(FAST)) as device:
        executor = Executor(captured_net(), model, device)
        executor.step(*batch(0))
        thread = in_thread(ask)
        assert asked.wait(60)
        executor.step(*batch(1))
        executor.close()
        closed.set()
        thread.join()
        assert errors == ["the executor is closed"] and executor.inspect().changes.asked is None
        assert memory and all(each.expired() for each in memory)
        with pytest.raises(ExecutorError, match="the executor is closed"):
            change(executor, "none")
    model(*batch(0)[0])


def test_steps_go_on_while_a_change_is_made_ready(start):
    """The change waits for memory; the job does not wait for the change."""
    asked, stepped = threading.Event(), threading.Event()

    class Slow(HostDevice):
        def host_memory(self, size: int) -> Tensor:
            if threading.current_thread().name == "asking" and not asked.is_set():
                asked.set()
                assert stepped.wait(60)
            return super().host_memory(size)

    device = Slow(FAST)
    executor = start("recompute_all", device=device)
    losses = run(executor, 1)
    thread = in_thread(lambda: change(executor, "swap_all"))
    assert asked.wait(60)
    losses += [executor.step(*batch(number)).loss for number in (1, 2)]
    assert executor.plan == plan_of("recompute_all", executor.trace)
    stepped.set()
    thread.join()
    losses.append(executor.step(*batch(3)).loss)
    assert executor.plan == plan_of("swap_all", executor.trace)
    assert all(map(torch.equal, losses, eager(4)[1]))
    device.close()


def test_interrupts_in_a_change_leave_the_old_plan_or_the_new_one(start):
    executor = start("none", budget=1 << 30)
    executor.add(validation_net())
    reference, interrupted, generator = EagerJob(), 0, torch.manual_seed(1)
    with Interrupts() as interrupts:
        for turn in range(400):
            if turn >= 30 and interrupted >= 10:
                break
            before, random_state, found = executor.state_dict(), generator.get_state(), None
            expected = reference.step(*batch(turn))
            policy = SIMPLE[turn % 3]
            while found is None:
                generator.set_state(random_state)
                with contextlib.suppress(KeyboardInterrupt):
                    interrupts.wanted = interrupted < 200
                    change(executor, policy, (1 << 29) + turn)
                    found = executor.step(*batch(turn)).loss
                    interrupts.wanted = False
                if found is None:
                    interrupted += 1
                    executor.load_state_dict(before)
            assert torch.equal(found, expected) and same(executor.state_dict().model, reference.state())
            assert executor.budget_bytes == (1 << 29) + turn
            assert executor.plan == plan_of(policy, captured_net().trace)
    assert interrupted >= 10


# ---- random changes ----


@settings(max_examples=500, deadline=None)
@given(randoms)
def test_no_transition_takes_more_than_the_plan_itself_at_any_step(random):
    """So a transition fits whenever the plan does, wherever the tensors are before it."""
    trace = random_trace(random)
    plan = random_plan(random, trace)
    steady, state = AccessSequence(trace, plan), boundary(trace, plan)
    device = frozenset(tensor for tensor in state.device if random.random() < 0.5)
    away = frozenset(np.flatnonzero(trace.persistent).tolist()) - device
    transition = AccessSequence(trace, plan, Boundary(device, state.host | away), passive=True)
    transition.check()
    assert transition.steps.tolist() == steady.steps.tolist()
    assert np.all(transition.footprint <= steady.footprint)


class Sampling:
    """Looks at an executor's memory from another thread."""

    def __init__(self, executor: Executor) -> None:
        self.highest: dict[int | None, int] = {}  # by the budget at that moment
        self._executor = executor
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def _look(self) -> None:
        while not self._ended.wait(1e-3):
            budget = self._executor.budget_bytes
            used = self._executor.device_bytes
            if self._executor.budget_bytes == budget:  # it did not change in between
                self.highest[budget] = max(self.highest.get(budget, 0), used)

    def __enter__(self) -> Sampling:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._thread.join()


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(randoms)
def test_random_changes_of_plan_and_budget_change_no_bit_and_keep_to_the_larger_budget(random):
    realised = realise(with_learning_rate(random_trace(random)), random)
    trace, turns = realised.trace, 6
    plans = [random_plan(random, trace) for _ in range(3)] + [NO_EVENTS]
    peaks = [footprint(trace, plan).device_peak_bytes for plan in plans]
    torch.manual_seed(3)
    expected, ends = execute_plainly(realised, turns)
    torch.manual_seed(3)
    device = HostDevice(FAST, peaks[0])
    with Executor(realised.captured, realised.model(), device, plans[0]) as executor, Sampling(executor) as sampling:
        executor.recording = True
        wanted = peaks[0]
        for turn in range(turns):
            allowed = executor.budget_bytes
            assert allowed is not None
            for which in random.choices(range(4), k=random.choice((0, 1, 1, 2))):
                wanted = peaks[which] + random.choice((0, 0, 64, 5000)) - (random.random() < 0.2)
                executor.change_plan(plans[which], budget_bytes=wanted)
            allowed = max(allowed, wanted)
            inputs = realised.inputs(turn)
            while True:
                try:
                    loss, outputs = executor.step(inputs)
                    break
                except OutOfDeviceMemoryError as error:
                    assert error.budget == wanted < executor.graphs[0].device_peak_bytes
                    assert executor.device_bytes <= allowed
                    which = random.randrange(4)
                    wanted = peaks[which]
                    executor.change_plan(plans[which], budget_bytes=wanted)
                    allowed = max(allowed, wanted)
            assert recorded(executor).device_peak_bytes <= allowed
            assert executor.budget_bytes == wanted >= executor.device_bytes
            assert realised.log.take() == expected[turn].digests
            assert all(map(torch.equal, (loss, *outputs), expected[turn].results))
        for each in realised.captured.persistents:
            assert torch.equal(executor.inspect().read(each.tensor), ends[each.tensor])
            assert Kind(trace.tensor_kind[each.tensor]) <= Kind.CONSTANT
    assert all(budget is not None and used <= budget for budget, used in sampling.highest.items())
    device.close()
