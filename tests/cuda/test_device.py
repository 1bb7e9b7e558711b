"""The CUDA device by itself: order between streams, pinned memory, times, errors.

Delays are made by `torch.cuda._sleep`, a kernel that spins for a number of cycles: what a test wants to be late is late
for certain, and what must not wait is seen not to.
"""

from __future__ import annotations

import gc
import resource
import time

import pytest
import torch

from pg_tensile.errors import DeviceError, LinkError
from pg_tensile.execution.runtime.cuda import CudaDevice, CudaTransfer

CUDA = torch.device("cuda", 0)
MIB = 1 << 20
CYCLES_PER_MS = 2_000_000  # at 2 GHz; slower clocks only sleep longer


def sleep_ms(milliseconds: int) -> None:
    """Keeps the current stream busy for at least that long."""
    torch.cuda._sleep(milliseconds * CYCLES_PER_MS)


def onboard(size: int, value: int) -> torch.Tensor:
    return torch.full((size,), value, dtype=torch.uint8, device=CUDA)


def pinned(device: CudaDevice, size: int, value: int) -> torch.Tensor:
    return device.host_memory(size).fill_(value)


def all_equal(tensor: torch.Tensor, value: int) -> bool:
    return bool((tensor == value).all())


# ---- order -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 4097, 32 * MIB, 70 * MIB + 3], ids=lambda size: f"{size} bytes")
def test_a_copy_out_and_in_keeps_every_byte(device, size):
    host = device.host_memory(size)
    with device.iteration():
        source = (torch.arange(size, device=CUDA) % 251).to(torch.uint8)
        expected = source.clone()
        device.wait(device.copy_out(source, host))
        source.zero_()
        target = torch.empty_like(source)
        device.wait(device.copy_in(host, target))
        same = torch.equal(target, expected)
    assert same
    assert torch.equal(host, expected.cpu())


def test_a_copy_out_takes_what_operators_before_it_write_and_nothing_later(device):
    host = pinned(device, 64 * MIB, 9)
    with device.iteration():
        tensor = onboard(64 * MIB, 1)
        sleep_ms(50)
        tensor.fill_(2)
        transfer = device.copy_out(tensor, host)
        device.wait(transfer)
        tensor.fill_(3)
    device.synchronize()
    assert all_equal(host, 2)


def test_memory_freed_after_the_wait_is_not_written_under_the_copy(device):
    """The allocator gives the freed block to the next tensor at once; its kernel must not run before the copy ended."""
    host = pinned(device, 256 * MIB, 9)
    with device.iteration():
        tensor = onboard(256 * MIB, 1)
        address = tensor.data_ptr()
        transfer = device.copy_out(tensor, host)
        device.wait(transfer)
        tensor.untyped_storage().resize_(0)
        reused = onboard(256 * MIB, 7)
        assert reused.data_ptr() == address
    device.synchronize()
    assert all_equal(host, 1)


def test_a_copy_in_does_not_overwrite_a_block_that_is_still_read(device):
    """The target gets the block of a tensor that an operator, still waiting its turn, reads."""
    host = pinned(device, 64 * MIB, 5)
    with device.iteration():
        old = onboard(64 * MIB, 1)
        address = old.data_ptr()
        sleep_ms(50)
        total = old.sum(dtype=torch.int64)
        del old
        target = torch.empty(64 * MIB, dtype=torch.uint8, device=CUDA)
        assert target.data_ptr() == address
        device.wait(device.copy_in(host, target))
        arrived = target.sum(dtype=torch.int64)
    assert total.item() == 64 * MIB
    assert arrived.item() == 5 * 64 * MIB


def test_what_is_on_the_host_anyway_does_not_overtake_a_copy_from_the_same_place(device):
    memory = pinned(device, 64 * MIB, 5)
    seeds = torch.full((8,), 9, dtype=torch.uint8)
    with device.iteration():
        target = onboard(64 * MIB, 1)
        sleep_ms(50)
        device.wait(device.copy_in(memory, target))
        device.wait(device.copy_out(seeds, memory[:8]))
        total = target.sum(dtype=torch.int64)
    assert total.item() == 5 * 64 * MIB
    assert all_equal(memory[:8], 9)


def test_an_operator_after_the_wait_sees_what_was_copied_in(device):
    host = pinned(device, 256 * MIB, 5)
    with device.iteration():
        target = onboard(256 * MIB, 1)
        device.wait(device.copy_in(host, target))
        total = target.sum(dtype=torch.int64)
    assert total.item() == 5 * 256 * MIB


def test_the_lanes_do_not_wait_for_each_other_nor_the_compute_for_them(device):
    """Both copies end while the compute stream, which was asked for them before, still sleeps."""
    out, into = pinned(device, 64 * MIB, 0), pinned(device, 64 * MIB, 5)
    with device.iteration():
        source, target = onboard(64 * MIB, 1), onboard(64 * MIB, 0)
        device.synchronize()
        sent, fetched = device.copy_out(source, out), device.copy_in(into, target)
        sleep_ms(300)
        busy = torch.cuda.Event()
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
            target = torch.empty(64 * MIB, dtype=torch.uint8, device=CUDA)
            transfer = device.copy_in(host, target)
            inputs = torch.empty(8 * MIB, dtype=torch.uint8, device=CUDA)
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
    def iteration() -> torch.cuda.Event:
        with device.iteration():
            sleep_ms(100)
            end = torch.cuda.Event()
            end.record()
        return end

    device.synchronize()
    first, second = iteration(), iteration()
    assert not first.query()
    with device.iteration():
        assert first.query()
        assert not second.query()
    device.synchronize()


def test_the_callers_stream_and_the_compute_stream_wait_for_each_other(device):
    sleep_ms(50)
    given = torch.full((MIB,), 2, dtype=torch.uint8, device=CUDA)
    with device.iteration():
        inputs = torch.empty_like(given)
        device.upload(given, inputs)
        sleep_ms(50)
        result = inputs + 1
    # Freed on the caller's stream, where the next tensor may take the block at once.
    del given
    again = torch.full((MIB,), 77, dtype=torch.uint8, device=CUDA)
    assert all_equal(result, 3)
    assert all_equal(again, 77)


def test_the_current_stream_is_restored(device):
    before = torch.cuda.current_stream()
    with device.iteration():
        assert torch.cuda.current_stream() != before
    assert torch.cuda.current_stream() == before
    with pytest.raises(ZeroDivisionError), device.iteration():
        raise ZeroDivisionError
    assert torch.cuda.current_stream() == before


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
    host = pinned(device, 256 * MIB, 6)
    with device.iteration():
        target = onboard(256 * MIB, 1)
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


def timed(device: CudaDevice, before_wait_ms: int) -> tuple[CudaTransfer, CudaTransfer]:
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


def test_an_iteration_that_is_not_timed_has_no_times(device):
    host, target = pinned(device, MIB, 5), onboard(MIB, 1)
    with device.iteration():
        transfer = device.copy_in(host, target)
        device.wait(transfer)
    device.synchronize()
    device.finish_times()
    assert (transfer.start_us, transfer.end_us, transfer.stall_us) == (0.0, 0.0, 0.0)


def test_the_clock_times_operators_without_making_the_host_wait(device):
    sleep_ms(200)  # the device's own clock speeds up under load
    torch.cuda.synchronize()
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
        factor = torch.ones(256, 256, device=CUDA)
        before = torch.cuda.memory_allocated()
        product = factor @ factor
        assert all_equal(product, 256)
        del product
        assert torch.cuda.memory_allocated() == before
    assert 0 <= device.library_bytes < 256 * MIB


# ---- the rest --------------------------------------------------------------------------------------------------------


def test_generator_states_replay_random_operators(device):
    with device.iteration():
        ones = torch.ones(4096, device=CUDA)
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
            torch.empty(1 << 46, dtype=torch.uint8, device=CUDA)
        except RuntimeError as error:
            caught = device.is_out_of_memory(error)
    assert caught is True
    assert not device.is_out_of_memory(RuntimeError("shapes do not fit"))
    assert all_equal(onboard(MIB, 3), 3)


def test_copies_of_an_iteration_that_was_given_up_keep_their_ends(device):
    host = pinned(device, 256 * MIB, 6)
    with pytest.raises(ZeroDivisionError), device.iteration():
        device.copy_out(onboard(256 * MIB, 4), host)
        reused = onboard(256 * MIB, 7)
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
        CudaDevice(torch.cuda.device_count())
    with pytest.raises(DeviceError, match="budget"):
        CudaDevice(0, budget_bytes=-1)


def test_the_context_is_measured(device):
    assert 50 * MIB < device.overhead_bytes() < torch.cuda.get_device_properties(0).total_memory


def test_the_device_measures_its_own_profile():
    device = CudaDevice(0)
    profile = device.profile
    assert profile.kind == "cuda"
    assert profile is device.profile
    assert 1e9 < profile.out_bytes_per_s < 1e12
    device.close()
