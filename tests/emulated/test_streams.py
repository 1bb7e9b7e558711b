"""Streams, events, copies and faults of the emulated device."""

from __future__ import annotations

import mmap
import threading

import pytest
import torch

SIZE = 1 << 20
MS = 2_000_000  # cycles


def sleep_ms(milliseconds: int) -> None:
    torch.get_device_module("emulated")._sleep(milliseconds * MS)


def test_the_device_is_pytorchs_accelerator():
    module = torch.get_device_module("emulated")
    assert torch.accelerator.current_accelerator() == torch.device("emulated")
    assert torch.accelerator.is_available() and torch.accelerator.device_count() == 2
    assert module.get_device_properties(1).uuid != module.get_device_properties(0).uuid
    with torch.accelerator.device_index(1):
        assert torch.ones(1, device="emulated").device == torch.device("emulated", 1)
        assert module.current_device() == 1
    assert torch.ones(1, device="emulated").device.index == 0
    with pytest.raises(RuntimeError):
        torch.ones(1, device="emulated:2")
    tensor = torch.ones(1, device="emulated")
    assert not tensor.is_cpu and not tensor.is_cuda and not tensor.is_pinned()


def test_work_is_late_and_in_order():
    stream = torch.Stream("emulated:0")
    with stream:
        sleep_ms(50)
        tensor = torch.ones(SIZE, device="emulated")
        for _ in range(10):
            tensor.mul_(2).sub_(1).add_(1)
        assert not stream.query()
        assert tensor[0].item() == 1024  # waits
        assert stream.query()


def test_the_pool_has_32_streams_of_each_priority():
    ids = [torch.Stream("emulated:0").stream_id for _ in range(64)]
    assert ids[:32] == ids[32:] and len(set(ids)) == 32 and 0 not in ids
    assert torch.Stream("emulated:0", priority=-1).stream_id not in ids
    assert torch.Stream("emulated:0").native_handle != 0  # type: ignore[attr-defined]


def test_the_current_stream_belongs_to_the_thread():
    stream = torch.Stream("emulated:0")
    seen = []
    with stream:
        thread = threading.Thread(target=lambda: seen.append(torch.accelerator.current_stream(0)))
        thread.start()
        thread.join()
        assert torch.accelerator.current_stream(0) == stream
    assert seen == [torch.get_device_module("emulated").default_stream(0)] == [torch.accelerator.current_stream(0)]


def test_events():
    never = torch.Event("emulated")
    assert never.query()
    never.synchronize()
    torch.accelerator.current_stream().wait_event(never)
    event = torch.Event("emulated")
    sleep_ms(50)
    event.record()
    assert not event.query()
    event.synchronize()
    assert event.query()
    sleep_ms(50)
    event.record()  # a new version
    assert not event.query()
    torch.accelerator.synchronize()
    assert event.query()


def test_a_wait_is_for_the_record_at_its_time():
    side, event = torch.Stream("emulated:0"), torch.Event("emulated")
    event.record()
    side.wait_event(event)
    sleep_ms(100)
    event.record()
    with side:
        done = side.record_event()
    done.synchronize()
    assert not event.query()


def test_times_are_those_of_the_stream():
    begin, end = (torch.Event("emulated", enable_timing=True) for _ in range(2))
    begin.record()
    sleep_ms(30)
    end.record()
    end.synchronize()
    assert begin.elapsed_time(end) >= 30
    with pytest.raises(ValueError, match="enable_timing"):
        torch.Event("emulated").elapsed_time(end)


@pytest.mark.parametrize("kind, copies", [("late_copies", True), ("late_compute", False)])
def test_extreme_schedules_hold_one_kind_back_until_the_host_waits(control, kind, copies):
    """The other kind, on another stream, is done first, although it was given last."""
    control.schedule(kind)
    link, compute = torch.Stream("emulated:0"), torch.Stream("emulated:0")
    host, target = torch.zeros(SIZE, pin_memory=True), torch.empty(SIZE, device="emulated")
    other = torch.empty(SIZE, device="emulated")
    torch.accelerator.synchronize()
    ends = [torch.Event("emulated", enable_timing=True) for _ in range(2)]
    order = [0, 1] if copies else [1, 0]
    for index in order:
        with (link, compute)[index] as stream:
            if index == 0:
                target.copy_(host, non_blocking=True)
            else:
                other.fill_(1)
            ends[index].record(stream)
    ends[order[1]].synchronize()
    assert control.pending() == 1
    ends[order[0]].synchronize()
    assert ends[order[1]].elapsed_time(ends[order[0]]) > 0
    with pytest.raises(ValueError, match="late_copies"):
        control.schedule("tomorrow")


# ---- copies ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("out", [True, False])
def test_only_copies_of_pinned_memory_are_asynchronous(pinned, out):
    host, device = torch.full((SIZE,), 3.0, pin_memory=pinned), torch.full((SIZE,), 4.0, device="emulated")
    torch.accelerator.synchronize()
    sleep_ms(50)
    target, source = (host, device) if out else (device, host)
    target.copy_(source, non_blocking=True)
    assert torch.accelerator.current_stream().query() != pinned
    torch.accelerator.synchronize()
    assert bool((target == (4 if out else 3)).all())
    sleep_ms(20)
    target.copy_(source)
    assert torch.accelerator.current_stream().query()


def test_copies_convert_and_arrange():
    plain = torch.arange(24).reshape(2, 3, 4)
    device = plain.to("emulated")
    assert torch.equal(device.cpu(), plain)
    assert torch.equal(device.transpose(0, 2).to("cpu", torch.float64), plain.transpose(0, 2).double())
    target = torch.zeros(4, 3, 2, device="emulated")
    target.transpose(0, 2).copy_(plain)
    assert torch.equal(target.cpu(), plain.transpose(0, 2).float())
    expanded = torch.zeros(5, 4, device="emulated").copy_(torch.arange(4))
    assert expanded.sum().item() == 30
    other = device.to("emulated:1")
    assert other.device.index == 1 and torch.equal(other.cpu(), plain)


def test_pinned_memory_is_known(control):
    assert torch.empty(10, pin_memory=True).is_pinned()
    assert torch.zeros(10).pin_memory().is_pinned()
    assert not torch.empty(10).is_pinned()
    assert torch.zeros(10, device="emulated").to("cpu", non_blocking=True).is_pinned()
    pages = mmap.mmap(-1, 8192)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    assert not memory.is_pinned()
    control.host_register(memory.data_ptr(), 8192)
    assert memory.is_pinned() and memory[4096:].is_pinned() and control.registered_bytes() == 8192
    for address, size in [(memory.data_ptr(), 8192), (memory.data_ptr() + 4096, 100)]:
        with pytest.raises(RuntimeError, match="that is registered"):
            control.host_register(address, size)
    control.host_unregister(memory.data_ptr())
    assert not memory.is_pinned() and control.registered_bytes() == 0
    with pytest.raises(RuntimeError, match="not registered"):
        control.host_unregister(memory.data_ptr())
    with pytest.raises(RuntimeError, match="not mapped"):
        control.host_register(4096, 4096)


def test_a_pinned_block_is_reused_when_its_copies_have_ended():
    device = torch.empty(SIZE, device="emulated")
    torch.accelerator.empty_host_cache()
    host = torch.zeros(SIZE, pin_memory=True)
    address = host.data_ptr()
    sleep_ms(50)
    device.copy_(host, non_blocking=True)
    del host
    other = torch.zeros(SIZE, pin_memory=True)
    assert other.data_ptr() != address
    torch.accelerator.synchronize()
    assert torch.zeros(SIZE, pin_memory=True).data_ptr() == address


def test_data_of_a_parameter_moves_between_cpu_and_device():
    parameter = torch.nn.Parameter(torch.arange(4.0))
    parameter.data = parameter.data.to("emulated")
    assert parameter.device.type == "emulated" and isinstance(parameter, torch.nn.Parameter)
    (parameter * 2).sum().backward()
    assert parameter.grad is not None and parameter.grad.tolist() == [2.0] * 4
    parameter.grad = None
    parameter.data = parameter.data.cpu()
    parameter.sum().backward()
    assert (
        parameter.grad is not None
        and parameter.grad.device.type == "cpu"
        and parameter.tolist() == [0.0, 1.0, 2.0, 3.0]
    )


# ---- faults ----------------------------------------------------------------------------------------------------------


def test_a_failed_kernel_is_an_error_of_the_device_until_reset(control):
    tensor = torch.zeros(10, device="emulated")
    control.fail_kernel(2)
    tensor.add_(1)
    tensor.add_(1)
    with pytest.raises(torch.AcceleratorError, match=r"injected failure of aten::add"):
        torch.accelerator.synchronize()
    with pytest.raises(torch.AcceleratorError):
        tensor.add_(1)
    with pytest.raises(torch.AcceleratorError):
        tensor.cpu()
    control.reset()
    assert torch.ones(3, device="emulated").sum().item() == 3


def test_what_a_kernel_finds_wrong_comes_later(control):
    weight = torch.zeros(4, 2, device="emulated")
    index = torch.tensor([0, 9], device="emulated")
    sleep_ms(20)
    weight[index]
    with pytest.raises(torch.AcceleratorError, match="out of"):
        torch.accelerator.synchronize()


def test_what_a_shape_says_is_wrong_comes_at_once():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        torch.zeros(2, 3, device="emulated") @ torch.zeros(2, 3, device="emulated")
    with pytest.raises(RuntimeError, match="same device"):
        torch.zeros(3, device="emulated") + torch.zeros(3)
    with pytest.raises(RuntimeError, match="same device"):
        torch.zeros(3, device="emulated:0") + torch.zeros(3, device="emulated:1")
    assert (torch.zeros(3, device="emulated") + torch.tensor(2.0)).tolist() == [2.0] * 3


def test_the_value_of_a_host_tensor_is_taken_when_work_is_given():
    number, tensor = torch.tensor(2.0), torch.ones(3, device="emulated")
    sleep_ms(30)
    result = tensor * number
    number.fill_(5)
    assert result.tolist() == [2.0] * 3
