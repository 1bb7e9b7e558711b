"""Times of the accelerator, and what takes none: only on a GPU, because the emulated device's times say nothing.

test_waits.py has what these show without a clock.
"""

from __future__ import annotations

import copy
import time

import numpy as np
import torch

from pg_tensile.execution.runtime.accelerator import AcceleratorDevice, AcceleratorTransfer
from pg_tensile.execution.runtime.executor import Executor
from tests.accelerator.target import DEVICE, sleep_ms
from tests.accelerator.test_device import MIB, all_equal, onboard, pinned
from tests.accelerator.test_executor import large, measured_trace, plan_of  # noqa: F401


def timed(device: AcceleratorDevice, before_wait_ms: int) -> tuple[AcceleratorTransfer, AcceleratorTransfer]:
    host = pinned(device, 256 * MIB, 5)
    target = onboard(256 * MIB, 1)
    device.synchronize()
    with device.iteration(timed=True):
        first = device.copy_in(host, target)
        if before_wait_ms:
            sleep_ms(before_wait_ms)
        device.wait(first)
        second = device.copy_out(target, host)
        device.wait(second)
    device.synchronize()
    device.finish_times()
    return first, second


def test_the_lanes_do_not_wait_for_each_other_nor_the_compute_for_them(device):
    """Both copies end while the compute stream, which was asked for them before, still sleeps."""
    out, into = pinned(device, 64 * MIB, 0), pinned(device, 64 * MIB, 5)
    with device.iteration():
        source, target = onboard(64 * MIB, 1), onboard(64 * MIB, 0)
        device.synchronize()
        sent, fetched = device.copy_out(source, out), device.copy_in(into, target)
        sleep_ms(300)
        busy = torch.Event(DEVICE)
        busy.record()
        deadline = time.perf_counter() + 0.2
        while not (sent.ended.query() and fetched.ended.query()):
            assert time.perf_counter() < deadline
        assert not busy.query()
        device.wait(sent)
        device.wait(fetched)


def test_nothing_in_an_iteration_makes_the_host_wait(device):
    host = pinned(device, 64 * MIB, 5)
    given = torch.full((8 * MIB,), 3, dtype=torch.uint8)

    def iteration() -> torch.Tensor:
        with device.iteration():
            sleep_ms(200)
            target = torch.empty(64 * MIB, dtype=torch.uint8, device=DEVICE)
            transfer = device.copy_in(host, target)
            inputs = torch.empty(8 * MIB, dtype=torch.uint8, device=DEVICE)
            device.upload(given, inputs)
            device.wait(transfer)
            device.wait(device.copy_out(target, host))
            target.untyped_storage().resize_(0)
            return inputs

    iteration()
    device.synchronize()
    begin = time.perf_counter()
    inputs = iteration()
    given.fill_(4)
    assert time.perf_counter() - begin < 0.1
    assert all_equal(inputs, 3)
    device.synchronize()


def test_the_host_is_at_most_one_iteration_ahead(device):
    def iteration() -> torch.Event:
        with device.iteration():
            sleep_ms(100)
            end = torch.Event(DEVICE)
            end.record()
        return end

    device.synchronize()
    first, second = iteration(), iteration()
    assert not first.query()
    with device.iteration():
        assert first.query()
        assert not second.query()
    device.synchronize()


def test_the_clock_times_operators_without_making_the_host_wait(device):
    sleep_ms(200)  # the device's own clock speeds up under load
    torch.accelerator.synchronize()
    begin = time.perf_counter()
    with device.iteration(), device.clock() as clock:
        for milliseconds in (50, 200):
            clock.start()
            sleep_ms(milliseconds)
            clock.stop()
    assert time.perf_counter() - begin < 0.1
    assert not clock.ready()
    short, long = clock.read()
    assert clock.ready()
    assert short > 25_000
    assert 2 < long / short < 8


def test_transfers_have_times_and_a_wait_that_comes_too_early_a_stall(device):
    first, second = timed(device, before_wait_ms=0)
    assert 0 <= first.start_us < first.end_us <= second.start_us < second.end_us
    duration_us = first.end_us - first.start_us
    assert 256 * MIB / duration_us < 1e6, "faster than 1 TB/s: not the copy's time"
    assert duration_us * 0.5 < first.stall_us <= first.end_us


def test_a_copy_that_ended_before_the_wait_stalls_nothing(device):
    first, _ = timed(device, before_wait_ms=300)
    assert first.stall_us == 0.0
    assert first.end_us < 300_000


def test_latencies_add_up_to_the_step(device, large):  # noqa: F811
    captured, model, x, y = large
    executor = Executor(captured, copy.deepcopy(model), device)
    trace = measured_trace(executor, x, y)
    executor.recording = True
    times = []
    for _ in range(5):
        executor.step([x], [y])
        assert executor.record is not None
        times.append(executor.record.step_us)
    executor.close()
    assert (trace.latency_us >= 0).all()
    assert 0.5 * float(np.median(times)) < trace.latency_us.sum() < 1.5 * float(np.median(times))


def test_the_loop_does_not_wait_for_the_device(device, large):  # noqa: F811
    """Two iterations are given to a device that sleeps; the third waits for the first."""
    captured, model, x, y = large
    executor = Executor(captured, copy.deepcopy(model), device, plan_of("swap_all", captured.trace, device))
    executor.step([x], [y])
    device.synchronize()
    with device.iteration():
        sleep_ms(1000)
        asleep = torch.Event(DEVICE)
        asleep.record()
    loss = executor.step([x], [y]).loss
    assert not asleep.query()
    assert torch.isfinite(loss)
    assert asleep.query()
    executor.close()
