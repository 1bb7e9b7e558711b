"""Plans change while a job runs: another thread prepares them, and nothing is computed differently."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import replace
from functools import partial
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pg_tensile.errors import ExecutorError, OutOfDeviceMemoryError
from pg_tensile.execution.runtime import loaded_graph as graph_module
from pg_tensile.execution.runtime.executor import Executor
from pg_tensile.execution.runtime.host import HostDevice
from pg_tensile.planning.plan.access_sequence import AccessSequence, boundary
from pg_tensile.planning.plan.following import host_bytes
from pg_tensile.planning.plan.memory import footprint
from pg_tensile.planning.plan.plan import NO_EVENTS, Boundary
from pg_tensile.planning.trace.trace import Kind
from tests.examples import examples
from tests.unit.executing import (
    FAST,
    EagerJob,
    batch,
    captured_net,
    change,
    in_thread,
    net,
    plan_of,
    recorded,
    run,
    same,
    validation_net,
)
from tests.unit.graphs import random_plan, random_trace
from tests.unit.realised import execute_plainly, realise, with_learning_rate

randoms = st.integers(0, 1 << 40).map(Random)


# ---- what is prepared by which thread ----


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
    output = next(access.tensor for access in true.operators[convolution].accesses if access.mode == 3)
    sizes = true.tensor_bytes.copy()
    sizes[output] = 0
    graphs[corrected] = replace(
        graphs[corrected], trace=replace(true, tensor_bytes=sizes), unknown_sizes=frozenset({output})
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
        assert executor.host_bytes == host_bytes([(handle_.trace, handle_.plan) for handle_ in executor.graphs])
        assert same(executor.state_dict().model, reference.state())


# ---- random changes ----


@examples(60, long=500)
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
    """Samples of an executor's memory, taken by another thread."""

    def __init__(self, executor: Executor) -> None:
        self.highest: dict[int | None, int] = {}  # by the budget at that moment
        self._executor = executor
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def _sample(self) -> None:
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


@pytest.mark.long
@examples(100)
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
        for persistent in realised.captured.persistents:
            assert torch.equal(executor.inspect().read(persistent.tensor), ends[persistent.tensor])
            assert Kind(trace.tensor_kind[persistent.tensor]) <= Kind.CONSTANT
    assert all(budget is not None and used <= budget for budget, used in sampling.highest.items())
    device.close()
