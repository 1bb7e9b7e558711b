"""The accelerator by itself: order between streams, registered memory, times, errors.

Delays are made by `target.sleep_ms`, a kernel that spins for a number of cycles: what a test wants to be late is late
for certain, and what must not wait is seen not to.
"""

from __future__ import annotations

import gc
import resource

import pytest
import torch

from pg_tensile.errors import DeviceError, LinkError
from pg_tensile.execution.runtime.accelerator import AcceleratorDevice
from pg_tensile.planning.device.profile import A100_40GB
from tests.accelerator.target import DEVICE, TYPE, module, sleep_ms

MIB = 1 << 20
# bytes whose copy takes a while: the emulated device's copies are late whatever their size
LARGE, MEDIUM = (256 * MIB, 64 * MIB) if TYPE == "cuda" else (8 * MIB, 4 * MIB)


def onboard(size: int, value: int) -> torch.Tensor:
    return torch.full((size,), value, dtype=torch.uint8, device=DEVICE)


def pinned(device: AcceleratorDevice, size: int, value: int) -> torch.Tensor:
    return device.host_memory(size).fill_(value)


def all_equal(tensor: torch.Tensor, value: int) -> bool:
    return bool((tensor == value).all())


# ---- order -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 4097, 32 * MIB, 70 * MIB + 3], ids=lambda size: f"{size} bytes")
def test_a_copy_out_and_in_keeps_every_byte(device, size):
    host = device.host_memory(size)
    with device.iteration():
        source = (torch.arange(size, device=DEVICE) % 251).to(torch.uint8)
        expected = source.clone()
        device.wait(device.copy_out(source, host))
        source.zero_()
        target = torch.empty_like(source)
        device.wait(device.copy_in(host, target))
        same = torch.equal(target, expected)
    assert same
    assert torch.equal(host, expected.cpu())


def test_a_copy_out_takes_what_operators_before_it_write_and_nothing_later(device):
    host = pinned(device, MEDIUM, 9)
    with device.iteration():
        tensor = onboard(MEDIUM, 1)
        sleep_ms(50)
        tensor.fill_(2)
        transfer = device.copy_out(tensor, host)
        device.wait(transfer)
        tensor.fill_(3)
    device.synchronize()
    assert all_equal(host, 2)


def test_memory_freed_after_the_wait_is_not_written_under_the_copy(device):
    """The allocator gives the freed block to the next tensor at once; its kernel must not run before the copy ended."""
    host = pinned(device, LARGE, 9)
    with device.iteration():
        tensor = onboard(LARGE, 1)
        address = tensor.data_ptr()
        transfer = device.copy_out(tensor, host)
        device.wait(transfer)
        tensor.untyped_storage().resize_(0)
        reused = onboard(LARGE, 7)
        assert reused.data_ptr() == address
    device.synchronize()
    assert all_equal(host, 1)


def test_a_copy_in_does_not_overwrite_a_block_that_is_still_read(device):
    """The target gets the block of a tensor that an operator, still waiting its turn, reads."""
    host = pinned(device, MEDIUM, 5)
    with device.iteration():
        old = onboard(MEDIUM, 1)
        address = old.data_ptr()
        sleep_ms(50)
        total = old.sum(dtype=torch.int64)
        del old
        target = torch.empty(MEDIUM, dtype=torch.uint8, device=DEVICE)
        assert target.data_ptr() == address
        device.wait(device.copy_in(host, target))
        arrived = target.sum(dtype=torch.int64)
    assert total.item() == MEDIUM
    assert arrived.item() == 5 * MEDIUM


def test_what_is_on_the_host_anyway_does_not_overtake_a_copy_from_the_same_place(device):
    memory = pinned(device, MEDIUM, 5)
    seeds = torch.full((8,), 9, dtype=torch.uint8)
    with device.iteration():
        target = onboard(MEDIUM, 1)
        sleep_ms(50)
        device.wait(device.copy_in(memory, target))
        device.wait(device.copy_out(seeds, memory[:8]))
        total = target.sum(dtype=torch.int64)
    assert total.item() == 5 * MEDIUM
    assert all_equal(memory[:8], 9)


def test_an_operator_after_the_wait_sees_what_was_copied_in(device):
    host = pinned(device, LARGE, 5)
    with device.iteration():
        target = onboard(LARGE, 1)
        device.wait(device.copy_in(host, target))
        total = target.sum(dtype=torch.int64)
    assert total.item() == 5 * LARGE


def test_the_callers_stream_and_the_compute_stream_wait_for_each_other(device):
    sleep_ms(50)
    given = torch.full((MIB,), 2, dtype=torch.uint8, device=DEVICE)
    with device.iteration():
        inputs = torch.empty_like(given)
        device.upload(given, inputs)
        sleep_ms(50)
        result = inputs + 1
    # Freed on the caller's stream, where the next tensor may take the block at once.
    del given
    again = torch.full((MIB,), 77, dtype=torch.uint8, device=DEVICE)
    assert all_equal(result, 3)
    assert all_equal(again, 77)


def test_the_current_stream_is_restored(device):
    before = torch.accelerator.current_stream()
    with device.iteration():
        assert torch.accelerator.current_stream() != before
    assert torch.accelerator.current_stream() == before
    with pytest.raises(ZeroDivisionError), device.iteration():
        raise ZeroDivisionError
    assert torch.accelerator.current_stream() == before


# ---- host memory -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 4096, 5 * MIB + 1])
def test_host_memory_is_pinned_and_aligned(device, size):
    memory = device.host_memory(size)
    assert (memory.numel(), memory.dtype, memory.device.type) == (size, torch.uint8, "cpu")
    assert memory.is_pinned()
    assert memory.data_ptr() % 512 == 0


def test_host_memory_is_not_rounded_to_a_power_of_two_and_is_given_back(device):
    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()

    size = 520 * MIB
    before = resident()
    memory = device.host_memory(size).fill_(1)
    assert size <= resident() - before < size + 100 * MIB
    del memory
    gc.collect()
    assert resident() - before < 100 * MIB


def test_host_memory_given_back_under_a_copy_lets_the_copy_end(device):
    host = pinned(device, LARGE, 6)
    with device.iteration():
        target = onboard(LARGE, 1)
        transfer = device.copy_in(host, target)
        device.wait(transfer)
    del host, transfer
    gc.collect()
    assert all_equal(target, 6)


def test_too_much_host_memory_is_refused_and_the_device_works_on(device):
    for size in (1 << 47, 1 << 62):
        with pytest.raises(DeviceError, match="pinned host memory"):
            device.host_memory(size)
    assert all_equal(onboard(MIB, 3), 3)


# ---- times -----------------------------------------------------------------------------------------------------------


def test_an_iteration_that_is_not_timed_has_no_times(device):
    host, target = pinned(device, MIB, 5), onboard(MIB, 1)
    with device.iteration():
        transfer = device.copy_in(host, target)
        device.wait(transfer)
    device.synchronize()
    device.finish_times()
    assert (transfer.start_us, transfer.end_us, transfer.stall_us) == (0.0, 0.0, 0.0)


def test_the_allocator_sees_the_high_water_in_bytes_asked_for(device):
    with device.iteration(), device.allocator() as allocator:
        allocator.start()
        temporary = onboard(3 * MIB + 1, 1)
        result = onboard(1000, 1)
        del temporary
        allocator.stop()
        allocator.start()
        result.zero_()
        allocator.stop()
    assert allocator.read().tolist() == [3 * MIB + 1 + 1000, 0]


def test_a_matrix_product_has_no_workspace_that_stays(device):
    """The memory that cuBLAS takes at its first call is taken when the device is created."""
    with device.iteration():
        factor = torch.ones(256, 256, device=DEVICE)
        before = torch.accelerator.memory_allocated()
        product = factor @ factor
        assert all_equal(product, 256)
        del product
        assert torch.accelerator.memory_allocated() == before
    assert 0 <= device.library_bytes < 256 * MIB


# ---- the rest --------------------------------------------------------------------------------------------------------


def test_generator_states_replay_random_operators(device):
    with device.iteration():
        ones = torch.ones(4096, device=DEVICE)
        state = device.generator_state()
        first = torch.dropout(ones, 0.5, True)
        second = torch.dropout(ones, 0.5, True)
        device.set_generator_state(state)
        again = torch.dropout(ones, 0.5, True)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


def test_exhausted_memory_is_recognised_and_survived(device):
    caught = None
    with device.iteration():
        try:
            torch.empty(1 << 46, dtype=torch.uint8, device=DEVICE)
        except RuntimeError as error:
            caught = device.is_out_of_memory(error)
    assert caught is True
    assert not device.is_out_of_memory(RuntimeError("shapes do not fit"))
    assert all_equal(onboard(MIB, 3), 3)


def test_copies_of_an_iteration_that_was_given_up_keep_their_ends(device):
    host = pinned(device, LARGE, 6)
    with pytest.raises(ZeroDivisionError), device.iteration():
        device.copy_out(onboard(LARGE, 4), host)
        reused = onboard(LARGE, 7)
        raise ZeroDivisionError
    device.synchronize()
    assert all_equal(host, 4)
    assert all_equal(reused, 7)


def test_a_closed_device_copies_nothing(device):
    host, target = pinned(device, MIB, 5), onboard(MIB, 1)
    device.close()
    device.close()
    with pytest.raises(LinkError, match="closed"), device.iteration():
        pass
    with pytest.raises(LinkError, match="closed"):
        device.copy_in(host, target)


def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(DeviceError, match="not there"):
        AcceleratorDevice(f"{TYPE}:{module().device_count()}", A100_40GB)
    with pytest.raises(DeviceError, match="budget"):
        AcceleratorDevice(DEVICE, A100_40GB, budget_bytes=-1)


def test_the_context_is_measured(device):
    assert 50 * MIB < device.overhead_bytes() < module().get_device_properties(0).total_memory
