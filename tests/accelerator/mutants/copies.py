"""Scenarios of copies: order, times, and what is held until they have ended."""

from __future__ import annotations

import gc
import threading
from contextlib import suppress
from pathlib import Path

import torch

from pg_tensile.errors import DeviceError
from pg_tensile.execution.backends import streams_of
from pg_tensile.execution.runtime import registered_memory
from pg_tensile.execution.runtime.accelerator import AcceleratorDevice
from pg_tensile.planning.device.profile import A100_40GB
from tests.accelerator.mutants.harness import (
    CHUNK,
    DEVICE,
    SIZE,
    abandon,
    all_equal,
    encoding,
    onboard,
    opened,
    pinned,
    scenario,
    sparse,
)
from tests.accelerator.mutants.job import Prepared
from tests.emulated.emulated import control

# ---- copies ----------------------------------------------------------------------------------------------------------


@scenario
def copies(prepared: Prepared) -> None:
    """A copy into a block that was just read, and one out of a tensor that is written, then freed."""
    with opened() as device:
        out, into = pinned(device, 0), pinned(device, 5)
        control.schedule("random", 1)
        for _ in range(2):
            with device.iteration():
                old = onboard(1)
                address, total = old.data_ptr(), old.sum(dtype=torch.int64)
                del old
                target = torch.empty(SIZE, dtype=torch.uint8, device=DEVICE)
                assert target.data_ptr() == address
                device.wait(device.copy_in(into, target))
                arrived = target.sum(dtype=torch.int64)
                source = onboard(3)
                source.add_(1)
                sent = device.copy_out(source, out)
                device.wait(sent)
                alive = len(control.blocks_alive())
                source.fill_(9)
                del source
                assert len(control.blocks_alive()) == alive - 1, "what was waited for is still held"
                reused = onboard(7)
        device.synchronize()
        assert all_equal(out, 4) and all_equal(reused, 7)
        assert (total.item(), arrived.item()) == (SIZE, 5 * SIZE)


@scenario
def caller(prepared: Prepared) -> None:
    """The caller gives a tensor that is still computed, frees it, and reads the result without synchronising."""
    with opened() as device:
        given = onboard(1).add_(1)
        with device.iteration():
            inputs = torch.empty_like(given)
            device.upload(given, inputs)
            result = inputs + 1
        del given
        again = onboard(77)
        assert all_equal(result, 3) and all_equal(again, 77)


@scenario
def caller_beside(prepared: Prepared) -> None:
    """The caller frees what it gave, and gives other work to its stream, before the iteration ends."""
    with opened() as device:
        given, stream = onboard(1), torch.accelerator.current_stream()
        with device.iteration():
            inputs = torch.empty_like(given)
            device.upload(given, inputs)
            del given
            with stream:
                other = onboard(77)
        assert all_equal(inputs, 1) and all_equal(other, 77)


@scenario
def host_to_host(prepared: Prepared) -> None:
    """Seeds that are on the host anyway go where a copy is still read from."""
    with opened() as device:
        memory, seeds = pinned(device, 5), torch.full((8,), 9, dtype=torch.uint8)
        control.schedule("late_copies", 0)
        with device.iteration():
            target = onboard(1)
            device.wait(device.copy_in(memory, target))
            device.wait(device.copy_out(seeds, memory[:8]))
            total = target.sum(dtype=torch.int64)
        assert total.item() == 5 * SIZE and all_equal(memory[:8], 9)


@scenario
def times(prepared: Prepared) -> None:
    """A copy that begins when it is waited for, so that each event's place among the others is known."""
    with opened() as device:
        host = pinned(device, 5)
        control.schedule("late_copies", 0)
        with device.iteration(timed=True):
            transfer = device.copy_in(host, onboard(1))
            device.wait(transfer)
            assert transfer.begun is not None and transfer.waited is not None
            transfer.begun.synchronize()
            transfer.waited.synchronize()
            assert control.pending() > 0, "an event before the copy has waited for it"
        device.synchronize()
        device.finish_times()
        assert 0 < transfer.start_us <= transfer.end_us and 0 < transfer.stall_us < transfer.end_us


@scenario
def times_on_a_busy_lane(prepared: Prepared) -> None:
    """A copy begins when its lane comes to it."""
    with opened() as device:
        host, target, busy = pinned(device, 5), onboard(1), onboard(1)
        streams = streams_of(device.torch_device)
        torch.accelerator.synchronize()
        control.schedule("late_compute", 0)
        with device.iteration(timed=True):
            with streams.lanes[1]:
                busy.add_(1)
            transfer = device.copy_in(host, target)
            streams.compute.record_event().synchronize()
            assert transfer.begun is not None and not transfer.begun.query(), (
                "it has begun before the lane's work ended"
            )
            device.wait(transfer)
        device.synchronize()


@scenario
def ahead(prepared: Prepared) -> None:
    """At most one more iteration is submitted while one is executed."""
    with opened() as device:
        counters = [onboard(0, 1000) for _ in range(3)]
        torch.accelerator.synchronize()
        control.schedule("late_compute", 0)
        before, after = [], []
        for counter in counters:
            before.append(control.pending())
            with device.iteration():
                after.append(control.pending())
                for _ in range(20):
                    counter.add_(1)
        assert before[0] == 0 and before[1] >= 20 and after[1] >= before[1], (before, after)
        assert after[2] <= before[2] - 15, (before, after)
        device.synchronize()
        assert control.pending() == 0


@scenario
def nothing_waits(prepared: Prepared) -> None:
    """Copies, their waits, and the meter of an iteration leave the host running ahead."""
    with opened() as device:
        host, given = pinned(device, 5), torch.full((SIZE,), 3, dtype=torch.uint8)
        control.schedule("late_compute", 0)
        with device.iteration(), device.clock() as clock:
            target = torch.empty(SIZE, dtype=torch.uint8, device=DEVICE)
            inputs = torch.empty_like(target)
            transfer = device.copy_in(host, target)
            device.upload(given, inputs)
            device.wait(transfer)
            clock.start()
            target.add_(1)
            clock.stop()
            device.wait(device.copy_out(target, host))
            assert control.pending() > 0, "something has waited"
        given.fill_(4)
        reading = clock.read()
        with device.iteration(), device.clock() as other:
            other.start()
            target.add_(1)
            other.stop()
            assert not other.ready(), "the meter says that it would not wait"
        device.synchronize()
        assert reading.shape == (1,) and reading[0] > 0
        assert all_equal(inputs, 3) and all_equal(host, 6)


# ---- what is held ----------------------------------------------------------------------------------------------------


@scenario
def abandoned(prepared: Prepared) -> None:
    """Copies of iterations that were given up keep their ends, and not for ever."""
    with opened() as device:
        outs, into = [pinned(device, 0) for _ in range(3)], pinned(device, 5)

        def work() -> None:
            for number, out in enumerate(outs):
                device.copy_out(onboard(4 + number), out)
                device.copy_in(into, torch.empty(SIZE, dtype=torch.uint8, device=DEVICE))
                kept.append(onboard(7))

        alive = []
        for _ in range(3):
            kept: list[torch.Tensor] = []
            control.schedule("late_copies", 0)
            abandon(device, work)
            device.synchronize()
            with device.iteration():  # which lets the ones before go
                device.wait(device.copy_out(kept[0], outs[2]))
                device.wait(device.copy_in(into, kept[0]))
                kept[0].fill_(7)
                device.wait(device.copy_out(kept[0].clone().fill_(6), outs[2]))
            alive.append(len(control.blocks_alive()))
            assert all(all_equal(tensor, 7) for tensor in kept)
            assert [all_equal(out, 4 + number) for number, out in enumerate(outs)] == [True] * 3
        assert alive[0] == alive[1] == alive[2], f"blocks after each iteration: {alive}"


@scenario
def closed(prepared: Prepared) -> None:
    """A device is closed under copies; it is kept, so what it holds would stay."""
    device = AcceleratorDevice(DEVICE, profile=A100_40GB, strict=True)
    out = pinned(device, 0, 3 * CHUNK)
    with device.iteration():
        device.wait(device.copy_out(sparse(1), device.host_memory(CHUNK), 0, encoding()))
    control.schedule("late_copies", 0)
    abandon(device, lambda: device.copy_out(sparse(3), out))
    device.close()
    assert not control.blocks_alive() and torch.accelerator.memory_reserved() == 0
    assert not [thread for thread in threading.enumerate() if "pg_tensile" in thread.name]


@scenario
def closed_beside_others(prepared: Prepared) -> None:
    """A device is closed under copies of blocks in a segment that others use, so that the driver frees nothing."""
    device = AcceleratorDevice(DEVICE, profile=A100_40GB, strict=True)
    host, kept = pinned(device, 5), []
    control.schedule("late_copies", 0)
    with device.iteration():
        kept.append(onboard(1))
    abandon(device, lambda: device.copy_in(host, torch.empty(SIZE, dtype=torch.uint8, device=DEVICE)))
    device.close()
    assert control.pending() == 0, "closed before the copies have ended"
    with streams_of(device.torch_device).compute:
        assert all_equal(onboard(7), 7)


@scenario
def collected(prepared: Prepared) -> None:
    """A device that nothing refers to ends its thread."""
    device = AcceleratorDevice(DEVICE, profile=A100_40GB, strict=True)
    with device.iteration():
        device.wait(device.copy_out(sparse(1), device.host_memory(CHUNK), 0, encoding()))
    del device
    gc.collect()
    assert not [thread for thread in threading.enumerate() if "pg_tensile" in thread.name]


@scenario
def host_memory_given_back(prepared: Prepared) -> None:
    """Registered memory goes under the copies of both lanes."""
    with opened() as device:
        for way in ("in", "out"):
            host = pinned(device, 6)
            control.schedule("late_copies", 0)
            with device.iteration():
                tensor = onboard(1)
                device.wait(device.copy_in(host, tensor) if way == "in" else device.copy_out(tensor, host))
            del host
            gc.collect()
            assert control.registered_bytes() == 0, "memory that a copy uses stays registered"
            assert all_equal(tensor, 6 if way == "in" else 1)


@scenario
def fault(prepared: Prepared) -> None:
    """After a fault of the device registered pages stay mapped; a device does not open on one that fails."""
    with opened() as device:
        host, tensor = pinned(device, 5), onboard(1)
        control.fail_kernel(1)
        with suppress(DeviceError), device.iteration():
            tensor.add_(1)
            device.synchronize()
        address = host.data_ptr()
        del host
        gc.collect()
        control.reset()
        mapped = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
        assert any(int(begin, 16) <= address < int(end, 16) for begin, end in mapped), "unmapped while registered"
        control.host_unregister(address)
        registered_memory._kept.clear()
    control.schedule("late_compute", 0)
    control.fail_kernel(1)
    try:
        AcceleratorDevice(DEVICE, profile=A100_40GB, strict=True).close()
    except DeviceError as error:
        assert "has failed" in str(error)
    else:
        raise AssertionError("the device opens though its first kernels fail")
    finally:
        control.reset()
