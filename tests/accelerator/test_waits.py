"""Waits of the host, seen without a clock: the emulated device runs kernels or copies only when something waits.

So what is still pending has not been waited for; test_times.py shows the same on a GPU, by times.
"""

from __future__ import annotations

import copy

import pytest
import torch

from pg_tensile.execution.runtime.executor import Executor
from tests.accelerator.target import DEVICE
from tests.accelerator.test_device import MIB, all_equal, onboard, pinned
from tests.accelerator.test_executor import large, plan_of  # noqa: F401


def iteration(device, host, given) -> torch.Tensor:
    """Swap in, upload, swap out and free, as a step does."""
    with device.iteration():
        target = torch.empty(MIB, dtype=torch.uint8, device=DEVICE)
        transfer = device.copy_in(host, target)
        inputs = torch.empty_like(given, device=DEVICE)
        device.upload(given, inputs)
        device.wait(transfer)
        target.add_(1)
        device.wait(device.copy_out(target, host))
        target.untyped_storage().resize_(0)
        return inputs


@pytest.mark.parametrize("kind", ["late_compute", "late_copies"])
def test_nothing_in_an_iteration_makes_the_host_wait(device, control, kind):
    host, given = pinned(device, MIB, 5), torch.full((MIB,), 3, dtype=torch.uint8)
    iteration(device, host, given)
    device.synchronize()
    control.schedule(kind, 0)
    before = control.pending()
    inputs = iteration(device, host, given)
    assert control.pending() > before == 0
    given.fill_(4)
    device.synchronize()
    assert control.pending() == 0
    assert all_equal(inputs, 3) and all_equal(host, 7)


def test_the_host_is_at_most_one_iteration_ahead(device, control):
    """Where the third iteration begins, the first one has been waited for, and the second one has not."""
    control.schedule("late_compute", 0)
    counters = [onboard(1000, 0) for _ in range(3)]
    torch.accelerator.synchronize()
    before, after = [], []
    for counter in counters:
        before.append(control.pending())
        with device.iteration():
            after.append(control.pending())
            for _ in range(20):
                counter.add_(1)
    assert before[0] == 0 and before[1] >= 20
    assert after[1] >= before[1]
    assert 20 <= after[2] <= before[2] - 20 + 5  # waits and events are pending work, too
    device.synchronize()
    assert all(all_equal(counter, 20) for counter in counters)


def test_the_lanes_do_not_wait_for_each_other_nor_for_later_kernels(device, control):
    """A copy that is waited for is made, and the other lane's and the compute's work is still to come."""
    out, into = pinned(device, MIB, 0), pinned(device, MIB, 5)
    control.schedule("late_compute", 0)
    with device.iteration():
        source, target = onboard(MIB, 1), onboard(MIB, 0)
        device.synchronize()
        sent, fetched = device.copy_out(source, out), device.copy_in(into, target)
        busy = onboard(1000, 1)
        busy.add_(1)
        sent.ended.synchronize()
        fetched.ended.synchronize()
        assert control.pending() > 0
        device.wait(sent)
        device.wait(fetched)
    device.synchronize()
    assert all_equal(out, 1) and all_equal(target, 5) and all_equal(busy, 2)


def test_the_loop_of_an_executor_does_not_wait_for_the_device(device, control, large):  # noqa: F811
    captured, model, x, y = large
    executor = Executor(captured, copy.deepcopy(model), device, plan_of("swap_all", captured.trace, device))
    executor.step([x], [y])  # verified against the trace, which waits
    executor.step([x], [y])
    device.synchronize()
    control.schedule("late_compute", 0)
    loss = executor.step([x], [y]).loss
    assert control.pending() > 0
    assert torch.isfinite(loss)
    executor.close()
