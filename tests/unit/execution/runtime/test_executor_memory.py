"""The executor: memory is what the plan says, plans change between steps, and failures are clean."""

from __future__ import annotations

import contextlib
import gc
import re
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from pg_tensile.errors import (
    CaptureError,
    DeviceError,
    ExecutorError,
    InvalidPlanError,
    LinkError,
    OutOfDeviceMemoryError,
)
from pg_tensile.execution.capture.eager import EagerStep
from pg_tensile.execution.runtime import host
from pg_tensile.execution.runtime.executor import Executor
from pg_tensile.execution.runtime.host import HostDevice
from pg_tensile.execution.runtime.measure import StorageObserver
from pg_tensile.planning.plan.memory import footprint
from pg_tensile.planning.plan.plan import NO_EVENTS, Event, EventKind, Plan
from tests.unit.executing import (
    FAST,
    SIMPLE,
    SPEC,
    batch,
    captured_net,
    eager,
    fail_at,
    net,
    opened,
    plan_of,
    recorded,
    run,
    same,
)
from tests.unit.interrupts import Interrupts
from tests.unit.realised import Stops

# ---- memory ----


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
    shells = executor.inspect().shells
    assert len(shells) > 10
    assert all(shell.storage.nbytes() == 0 for shell in shells.values())
    assert executor.device_bytes == sum(executor.inspect().resident.values())


def test_nothing_of_an_iteration_is_left_behind(start, policy):
    executor = start(policy)
    run(executor, 1)
    persistent = executor.trace.persistent
    for slot, value in enumerate(executor.graphs[0].captured.values):
        assert persistent[value.tensor] or executor.graphs[0].values[slot] is None
    assert all(value is None for value in executor.graphs[0].values[executor.graphs[0].functions.feed :])


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
        device.poor = True
        with pytest.raises(DeviceError, match="no host memory"):
            executor.change_plan(plan_of("swap_all", captured.trace))
        assert torch.equal(executor.step(*batch(1)).loss, expected[1])
        assert executor.plan == old
    device.close()


def test_host_memory_goes_when_no_plan_needs_it_any_more(start):
    executor = start("swap_all")
    for policy in ("recompute_all", "swap_all", "none", "swap_all"):
        run(executor, 1)
        old = [StorageWeakRef(memory.untyped_storage()) for memory in executor.inspect().host_memory if memory.numel()]
        executor.change_plan(plan_of(policy, executor.trace))
        run(executor, 1)
        gc.collect()
        assert all(ref.expired() == (policy != "swap_all") for ref in old)
        assert executor.inspect().homes.keys() == executor.graphs[0].program.homes.keys()
        places = {copy.memory.data_ptr() for copy in executor.inspect().copies.values()}
        assert places <= {home.data_ptr() for home in executor.inspect().homes.values()}


# ---- failures ----


@pytest.mark.parametrize("error", [Stops("no"), KeyboardInterrupt()], ids=["exception", "interrupt"])
def test_a_failure_before_anything_has_changed_leaves_the_last_state(start, policy, error):
    executor = start(policy)
    expected = eager(3)[1]
    torch.manual_seed(1)
    assert torch.equal(executor.step(*batch(0)).loss, expected[0])
    random_state = torch.get_rng_state()
    fail_at(executor.graphs[0], executor.graphs[0].program.first_change - 1, error)
    with pytest.raises(type(error)) as info:
        executor.step(*batch(1))
    assert "in operator" in info.value.__notes__[-1]
    assert executor.device_bytes == sum(executor.inspect().resident.values())
    torch.set_rng_state(random_state)
    assert torch.equal(executor.step(*batch(1)).loss, expected[1])
    assert torch.equal(executor.step(*batch(2)).loss, expected[2])


def test_a_failure_after_that_is_told_until_a_state_is_loaded(start, policy):
    executor = start(policy)
    reference, expected = eager(2)
    torch.manual_seed(1)
    executor.step(*batch(0))
    random_state, state = torch.get_rng_state(), executor.state_dict()
    fail_at(executor.graphs[0], len(executor.graphs[0].program.sequence.steps) - 2, Stops("no"))
    with pytest.raises(Stops):
        executor.step(*batch(1))
    for use in (lambda: executor.step(*batch(1)), executor.state_dict, lambda: executor.resident().__enter__()):
        with pytest.raises(ExecutorError, match="the weights are a mixture of two steps: an iteration stopped at oper"):
            use()
    executor.load_state_dict(state)
    torch.set_rng_state(random_state)
    assert torch.equal(executor.step(*batch(1)).loss, expected[1])
    assert same(executor.state_dict().model, reference.model.state_dict())


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
                assert executor.device_bytes == sum(executor.inspect().resident.values())
                with contextlib.suppress(ExecutorError):  # it says that the weights are a mixture
                    state = executor.state_dict()
                    assert same(state.model, after) or same(state.model, before.model)
    assert interrupted >= 10


def test_a_failure_holds_no_memory(start):
    executor = start("none")
    run(executor, 1)
    held = [value for value in executor.graphs[0].values if value is not None]
    inputs, targets = batch(1)
    observer = StorageObserver(watch=held, ignore=[*inputs, *targets])
    fail_at(executor.graphs[0], executor.graphs[0].program.first_change - 1, Stops("no"))
    with observer, pytest.raises(Stops) as info:
        executor.step(inputs, targets)
    assert info.value.__traceback__ is not None
    assert observer.live_bytes() == sum(executor.inspect().resident.values())


def test_memory_that_the_hardware_has_not_is_out_of_memory(start):
    executor = start("none")
    run(executor, 1)
    fail_at(executor.graphs[0], 1, MemoryError())
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
    output = next(a.tensor for a in trace.operators[relu].accesses if a.mode == 3)
    sizes = trace.tensor_bytes.copy()
    sizes[output] += 64
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
    output = next(a.tensor for a in trace.operators[pool].accesses if a.mode == 3)
    sizes = trace.tensor_bytes.copy()
    sizes[output] = 0
    unknown = replace(captured, trace=replace(trace, tensor_bytes=sizes), unknown_sizes=frozenset({output}))
    for policy in SIMPLE:
        model = net()
        with opened() as device, Executor(unknown, model, device, plan_of(policy, trace)) as executor:
            losses = run(executor, 3)
            assert executor.trace.tensor_bytes.tolist() == trace.tensor_bytes.tolist()
            executor.recording = True
            run(executor, 1)
            assert recorded(executor).peak_bytes == footprint(trace, plan_of(policy, trace)).peak_bytes
        assert all(map(torch.equal, losses, eager(3)[1]))
