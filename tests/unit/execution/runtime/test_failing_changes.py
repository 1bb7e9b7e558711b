"""Changes of plan that fail, or are interrupted: they leave the old plan or the new one, and all tensors."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from pg_tensile.errors import DeviceError, ExecutorError, InvalidPlanError, LinkError
from pg_tensile.execution.runtime import host
from pg_tensile.execution.runtime.executor import Executor
from pg_tensile.execution.runtime.host import HostDevice
from pg_tensile.planning.plan.plan import Event, EventKind, Plan
from tests.unit.executing import (
    FAST,
    SIMPLE,
    EagerJob,
    batch,
    captured_net,
    change,
    eager,
    in_thread,
    net,
    peak,
    plan_of,
    run,
    same,
    validation_net,
)
from tests.unit.interrupts import Interrupts


class Poor(HostDevice):
    """A device without more host memory while it is `poor`."""

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
            block = super().host_memory(size)
            if threading.current_thread().name == "asking":
                memory.append(StorageWeakRef(block.untyped_storage()))
                asked.set()
                assert closed.wait(60)
            return block

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
        assert memory and all(block.expired() for block in memory)
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
            before, random_state, loss = executor.state_dict(), generator.get_state(), None
            expected = reference.step(*batch(turn))
            policy = SIMPLE[turn % 3]
            while loss is None:
                generator.set_state(random_state)
                with contextlib.suppress(KeyboardInterrupt):
                    interrupts.wanted = interrupted < 200
                    change(executor, policy, (1 << 29) + turn)
                    loss = executor.step(*batch(turn)).loss
                    interrupts.wanted = False
                if loss is None:
                    interrupted += 1
                    executor.load_state_dict(before)
            assert torch.equal(loss, expected) and same(executor.state_dict().model, reference.state())
            assert executor.budget_bytes == (1 << 29) + turn
            assert executor.plan == plan_of(policy, captured_net().trace)
    assert interrupted >= 10
