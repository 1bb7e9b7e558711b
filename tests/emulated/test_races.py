"""The race detector: a correct program on two streams has no race under any schedule, each missing order is reported.

What is reported is decided when work is given, so every case has the same reports under every schedule.
"""

from __future__ import annotations

import mmap
import queue
import threading
from types import ModuleType

import pytest
import torch

SIZE = 1 << 20
SCHEDULES = [("eager", 0), ("random", 1), ("random", 2), ("late_copies", 0), ("late_compute", 0)]


@pytest.fixture(params=SCHEDULES, ids=lambda schedule: f"{schedule[0]} {schedule[1]}")
def schedule(request, control):
    control.schedule(*request.param)


def swap_out(control: ModuleType, missing: str = "") -> tuple[torch.Tensor, torch.Tensor]:
    """Copy a tensor out on another stream, free it, use the memory again; `missing` names the order that is left out.

    Returns the copy and the sum of the tensor that comes after."""
    compute, lane = torch.Stream("emulated:0"), torch.Stream("emulated:0")
    host = torch.empty(SIZE, dtype=torch.uint8, pin_memory=True)
    with compute:
        tensor = torch.full((SIZE,), 3, dtype=torch.uint8, device="emulated")
    ready = compute.record_event()
    if missing != "copy waits for the writer":
        lane.wait_event(ready)
    with lane:
        host.copy_(tensor, non_blocking=True)
    if missing == "hold":
        del tensor
    done = lane.record_event()
    with compute:
        if missing == "writer waits for the copy":
            tensor.fill_(4)
        if missing not in ("compute waits for the copy", "host waits for the copy"):
            compute.wait_event(done)
        if missing not in ("hold", "host waits for the copy"):
            del tensor
        total = torch.full((SIZE,), 7, dtype=torch.uint8, device="emulated").sum()
    compute.synchronize()
    if missing != "host waits for the copy":
        done.synchronize()
    with control.HostAccesses():
        copy = host.clone()
    return copy, total


def test_an_ordered_program_has_no_race_and_the_right_values(control, schedule):
    for _ in range(3):
        copy, total = swap_out(control)
        assert bool((copy == 3).all())
        assert total.item() == 7 * SIZE
    assert control.races() == []


@pytest.mark.parametrize(
    "missing, report",
    [
        ("copy waits for the writer", "read after write: copy from the device on stream"),
        ("compute waits for the copy", "freed while in use: free of"),
        ("writer waits for the copy", "write after read: aten::fill_"),
        ("host waits for the copy", "read after write: aten.clone.default on"),
    ],
)
def test_an_order_that_is_missing_is_reported(control, schedule, missing, report):
    swap_out(control, missing)
    torch.accelerator.synchronize()
    assert control.races()[0].startswith(report), control.races()
    assert "test_races.py" in control.races()[0]


def test_memory_freed_too_early_is_no_race_if_its_stream_waits_before_it_goes_on(control, schedule):
    """PyTorch's rule: a freed block goes to later work of its stream."""
    copy, total = swap_out(control, "hold")
    assert bool((copy == 3).all()) and total.item() == 7 * SIZE
    assert control.races() == []


def test_a_wait_for_an_older_record_does_not_order_newer_work(control, schedule):
    first, second = torch.Stream("emulated:0"), torch.Stream("emulated:0")
    tensor = torch.zeros(SIZE, device="emulated")
    first.wait_stream(torch.accelerator.current_stream())
    event = torch.Event("emulated")
    with first:
        event.record()
        tensor.add_(1)
    second.wait_event(event)
    with second:
        tensor.sum()
    assert len(control.races()) == 1 and "aten::sum" in control.races()[0]


def test_a_wait_through_a_third_stream_is_an_order(control, schedule):
    streams = [torch.Stream("emulated:0") for _ in range(3)]
    with streams[0]:
        tensor = torch.ones(SIZE, device="emulated")
    streams[1].wait_stream(streams[0])
    streams[2].wait_stream(streams[1])
    with streams[2]:
        total = tensor.sum()
    streams[2].synchronize()
    assert total.item() == SIZE
    assert control.races() == []


def test_memory_next_to_each_other_is_not_the_same(control):
    first, second = torch.Stream("emulated:0"), torch.Stream("emulated:0")
    tensor = torch.zeros(100, device="emulated")
    torch.accelerator.synchronize()
    with first:
        tensor[:51].add_(1)
    with second:
        tensor[51:].add_(1)
    assert control.races() == []
    with second:
        tensor[50:60].add_(1)
    assert len(control.races()) == 1


def test_record_stream_defers_and_its_absence_is_a_race(control, schedule):
    main, side = torch.accelerator.current_stream(), torch.Stream("emulated:0")
    for recorded in (True, False):
        control.clear()
        tensor = torch.ones(SIZE, device="emulated")
        side.wait_stream(main)
        with side:
            torch.get_device_module("emulated")._sleep(20_000_000)
            total = tensor.sum()
        if recorded:
            tensor.record_stream(side)
        address = tensor.data_ptr()
        del tensor
        other = torch.full((SIZE,), 5.0, device="emulated")
        assert (other.data_ptr() == address) != recorded
        side.synchronize()
        if recorded:
            assert total.item() == SIZE
            assert control.races() == []
        else:
            assert control.races()[0].startswith("freed while in use")
        del other


def test_garbage_in_freed_memory_spares_its_next_owner_on_another_stream(control):
    """The block is over when the host frees it; its next owner need not wait for the stream that it came from."""
    side = torch.Stream("emulated:0")
    tensor = torch.ones(SIZE, device="emulated")
    torch.accelerator.synchronize()
    address = tensor.data_ptr()
    torch.get_device_module("emulated")._sleep(20_000_000)
    del tensor
    other = torch.empty(SIZE, device="emulated")
    assert other.data_ptr() == address
    torch.zeros(1, device="emulated")  # the old stream goes on
    with side:
        other.fill_(2)
        total = other.sum()
    torch.accelerator.synchronize()
    assert total.item() == 2 * SIZE and bool((other == 2).all())
    assert control.races() == []


def test_the_next_owner_of_a_freed_block_may_use_it_elsewhere_before_the_stream_goes_on(control):
    side = torch.Stream("emulated:0")
    tensor = torch.ones(SIZE, device="emulated")
    address = tensor.data_ptr()
    del tensor
    other = torch.empty(SIZE, device="emulated")
    assert other.data_ptr() == address
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        other.fill_(2)
    torch.zeros(1, device="emulated")
    torch.accelerator.synchronize()
    assert bool((other == 2).all())
    assert control.races() == []


def test_freed_memory_is_garbage(control):
    tensor = torch.ones(SIZE, device="emulated")
    del tensor
    torch.zeros(1, device="emulated")
    assert bool(torch.empty(SIZE, device="emulated").isnan().all())


# ---- the host --------------------------------------------------------------------------------------------------------


def test_the_host_may_not_write_what_is_still_copied_from(control):
    host = torch.zeros(SIZE, pin_memory=True)
    target = torch.empty(SIZE, device="emulated")
    with control.HostAccesses():
        target.copy_(host, non_blocking=True)
        host.add_(1)
    assert len(control.races()) == 1 and control.races()[0].startswith("write after read: aten.add_.Tensor on the host")


def test_views_and_numpy_of_pinned_memory(control):
    host = torch.zeros(SIZE, pin_memory=True)
    target = torch.empty(SIZE, device="emulated")
    target[: SIZE // 2].copy_(host[: SIZE // 2], non_blocking=True)
    control.host_access(host[SIZE // 2 :], write=True, name="numpy")
    assert control.races() == []
    control.host_access(host, write=True, name="numpy")
    assert len(control.races()) == 1 and "numpy on the host" in control.races()[0]


@pytest.mark.parametrize("waits", [True, False])
def test_threads_are_told_apart_and_ordered_by_locks(control, waits):
    """A thread waits for the copy and, in the one case, tells the thread that reads."""
    host, source = torch.zeros(SIZE, pin_memory=True), torch.ones(SIZE, device="emulated")
    torch.accelerator.synchronize()
    with control.watch_threads():
        copied, seen = threading.Event(), queue.SimpleQueue[float]()

        def wait() -> None:
            event.synchronize()
            copied.set()

        def read() -> None:
            if waits:
                copied.wait()
            with control.HostAccesses():
                seen.put(float(host.sum()))

        host.copy_(source, non_blocking=True)
        event = torch.accelerator.current_stream().record_event()
        threads = [threading.Thread(target=wait), threading.Thread(target=read)]
        for thread in threads:
            thread.start()
            if not waits:
                thread.join()  # so the value is right; but nothing that the reader does says so
        for thread in threads:
            thread.join()
        assert seen.get() == SIZE
    # The main thread joined the waiting thread before it started the other: an order again, by start and join
    assert control.races() == []


def test_a_thread_that_nobody_tells_is_a_race(control):
    host, source = torch.zeros(SIZE, pin_memory=True), torch.ones(SIZE, device="emulated")
    torch.accelerator.synchronize()
    with control.watch_threads():
        go = threading.Semaphore(0)

        def read() -> None:
            go.acquire()
            with control.HostAccesses():
                host.sum()

        reader = threading.Thread(target=read)
        reader.start()
        host.copy_(source, non_blocking=True)
        go.release()
        torch.accelerator.synchronize()
        reader.join()
    assert len(control.races()) == 1 and "host thread" in control.races()[0]


def test_checked_fails_with_the_reports(control):
    with control.checked():
        swap_out(control)
    with pytest.raises(AssertionError, match="freed while in use"), control.checked():
        swap_out(control, "compute waits for the copy")


def test_unregistering_memory_under_a_copy_or_without_pages_is_an_error(control):
    pages = mmap.mmap(-1, SIZE)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    address = memory.data_ptr()
    control.host_register(address, SIZE)
    target = torch.empty(SIZE, dtype=torch.uint8, device="emulated")
    target.copy_(memory, non_blocking=True)
    with pytest.raises(RuntimeError, match="in use by copy to the device"):
        control.host_unregister(address)
    torch.accelerator.synchronize()
    control.host_register(address, SIZE)
    control.host_unregister(address)
    control.host_register(address, SIZE)
    del memory
    pages.close()
    with pytest.raises(RuntimeError, match="not mapped any more"):
        control.host_unregister(address)
    assert len(control.races()) == 2
