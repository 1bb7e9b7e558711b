"""The caching allocator: the rules of PyTorch's for CUDA, by its statistics and addresses."""

from __future__ import annotations

import gc

import pytest
import torch

MIB = 1 << 20


def block(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device="emulated")


def stat(name: str, which: str = "current") -> int:
    return torch.accelerator.memory_stats(0)[f"{name}.all.{which}"]


@pytest.fixture(autouse=True)
def empty(control):
    gc.collect()
    torch.accelerator.empty_cache()
    assert stat("reserved_bytes") == 0, control.blocks_alive()
    torch.accelerator.reset_peak_memory_stats(0)
    torch.accelerator.reset_accumulated_memory_stats(0)


@pytest.mark.parametrize(
    "size, rounded, reserved",
    [
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB - 5, 11 * MIB, 12 * MIB),  # the rest of the segment is too small to be split off
    ],
)
def test_sizes_are_rounded_and_segments_have_theirs(size, rounded, reserved):
    tensor = block(size)
    assert stat("requested_bytes") == size
    assert torch.accelerator.memory_reserved(0) == reserved
    remaining = reserved - rounded
    whole = size > MIB and remaining <= MIB
    assert torch.accelerator.memory_allocated(0) == (reserved if whole else rounded)
    assert stat("inactive_split_bytes") == (0 if whole else remaining)
    del tensor
    assert stat("requested_bytes") == stat("allocated_bytes") == stat("active_bytes") == 0
    assert stat("inactive_split_bytes") == stat("inactive_split") == 0
    assert torch.accelerator.memory_reserved(0) == reserved
    assert stat("requested_bytes", "peak") == size


def test_small_tensors_share_a_segment_and_large_ones_have_another_pool():
    small, other, large = block(1000), block(2000), block(2 * MIB)
    assert other.data_ptr() == small.data_ptr() + 1024
    assert stat("segment") == 2
    stats = torch.accelerator.memory_stats(0)
    assert stats["allocated_bytes.small_pool.current"] == 1024 + 2048
    assert stats["allocated_bytes.large_pool.current"] == large.nbytes


def test_the_smallest_block_that_fits_is_taken_and_neighbours_are_merged():
    tensors = [block(size * MIB) for size in (3, 2, 4, 2, 2, 2)]
    addresses = [tensor.data_ptr() for tensor in tensors]

    del tensors[2], tensors[0]
    gc.collect()
    again = block(3 * MIB)
    assert again.data_ptr() == addresses[0]
    del again
    tensors.pop(0)  # the 2 MiB between: 9 MiB in one piece
    merged = block(9 * MIB)
    assert merged.data_ptr() == addresses[0]
    assert stat("segment") == 1


def test_each_stream_has_its_own_blocks():
    first = block(5 * MIB)
    address = first.data_ptr()
    del first
    with torch.Stream("emulated:0"):
        other = block(5 * MIB)
    assert other.data_ptr() != address
    assert block(5 * MIB).data_ptr() == address
    assert stat("segment") == 2


def test_cached_memory_is_given_back_before_an_allocation_fails(control):
    control.set_memory(64 * MIB)
    kept, cached = block(20 * MIB), block(30 * MIB)
    del cached
    assert torch.accelerator.memory_reserved(0) == 50 * MIB
    new = block(40 * MIB)
    assert torch.accelerator.memory_reserved(0) == 60 * MIB
    stats = torch.accelerator.memory_stats(0)
    assert (stats["num_alloc_retries"], stats["num_ooms"]) == (1, 0)
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        block(10 * MIB)
    assert torch.accelerator.memory_stats(0)["num_ooms"] == 1
    assert torch.accelerator.get_memory_info(0) == (4 * MIB, 64 * MIB)
    del kept, new
    assert block(60 * MIB).numel() == 60 * MIB


def test_a_split_segment_cannot_be_given_back(control):
    """Fragmentation: 1 MiB alive keeps 20 MiB."""
    control.set_memory(40 * MIB)
    first, second = block(2 * MIB), block(16 * MIB)
    del second
    with pytest.raises(torch.OutOfMemoryError):
        block(30 * MIB)
    del first
    block(30 * MIB)


def test_the_fraction_limits_what_is_reserved():
    module = torch.get_device_module("emulated")
    total = module.get_device_properties(0).total_memory
    module.set_per_process_memory_fraction(30 * MIB / total)
    tensor = block(20 * MIB)
    with pytest.raises(torch.OutOfMemoryError):
        block(12 * MIB)
    module.set_per_process_memory_fraction(1.0)
    block(12 * MIB)
    del tensor


def test_impossible_sizes_are_out_of_memory():
    for size in (1 << 46, (1 << 63) - 1):
        with pytest.raises(torch.OutOfMemoryError):
            block(size)


def test_recorded_streams_defer_the_free():
    side = torch.Stream("emulated:0")
    tensor = block(20 * MIB)
    with side:
        torch.get_device_module("emulated")._sleep(40_000_000)
    tensor.record_stream(side)
    del tensor
    assert stat("allocated_bytes") == 0
    assert stat("active_bytes") == 20 * MIB
    side.synchronize()
    block(1)
    assert stat("active_bytes") == 0


def test_expandable_segments_grow_in_place_and_shrink(control):
    control.expandable_segments(True)
    control.set_memory(200 * MIB)
    first = block(15 * MIB)
    assert torch.accelerator.memory_reserved(0) == 20 * MIB
    second = block(30 * MIB)
    assert second.data_ptr() == first.data_ptr() + 15 * MIB
    assert torch.accelerator.memory_reserved(0) == 60 * MIB
    last = block(MIB + 512)  # the rest is split however small
    assert last.data_ptr() == second.data_ptr() + 30 * MIB
    del second, first
    torch.accelerator.empty_cache()
    assert torch.accelerator.memory_reserved(0) == 20 * MIB  # the page that `last` lies in
    again = block(40 * MIB)
    assert again.data_ptr() + 40 * MIB <= last.data_ptr()
    assert float(again.fill_(3).sum()) == 3 * 40 * MIB
    del again, last
    torch.accelerator.empty_cache()
    assert torch.accelerator.memory_reserved(0) == 0


def test_expandable_segments_avoid_the_fragmentation_of_others(control):
    control.set_memory(60 * MIB)
    sizes = [12, 14, 13, 9]

    def steps() -> None:
        for size in sizes:
            tensors = [block(size * MIB) for _ in range(3)]
            del tensors

    steps()
    retries = torch.accelerator.memory_stats(0)["num_alloc_retries"]
    assert retries > 0
    torch.accelerator.empty_cache()
    control.expandable_segments(True)
    steps()
    assert torch.accelerator.memory_stats(0)["num_alloc_retries"] == retries


def test_a_storage_can_be_emptied_and_filled_again():
    tensor = torch.arange(10, dtype=torch.float32, device="emulated")
    storage = tensor.untyped_storage()
    storage.resize_(0)
    assert stat("requested_bytes") == 0 and storage.data_ptr() == 0
    storage.resize_(40)
    tensor.copy_(torch.arange(10, dtype=torch.float32))
    storage.resize_(80)  # keeps what it holds
    assert tensor.tolist() == list(range(10))
    assert stat("requested_bytes") == 80


def test_the_trace_names_allocations_in_order(control):
    control.trace_allocations(True)
    tensor = block(1000)
    address = tensor.data_ptr()
    assert control.blocks_alive() == [(address, 1000, 0)]
    del tensor
    torch.accelerator.empty_cache()
    assert control.allocation_trace() == [
        ("segment_alloc", address, 2 * MIB, 0),
        ("alloc", address, 1000, 0),
        ("free", address, 1000, 0),
        ("segment_free", address, 2 * MIB, 0),
    ]


def test_an_allocation_can_be_made_to_fail(control):
    control.fail_allocation(2)
    block(1)
    with pytest.raises(torch.OutOfMemoryError, match="injected"):
        block(1)
    block(1)


def test_the_process_has_a_context_besides(control):
    before = control.process_bytes()
    assert before > 100 * MIB
    tensor = block(30 * MIB)
    assert control.process_bytes() == before + tensor.nbytes


def test_devices_have_their_own_memory():
    other = torch.empty(3 * MIB, dtype=torch.uint8, device="emulated:1")
    assert torch.accelerator.memory_allocated(0) == 0
    assert torch.accelerator.memory_allocated(1) == other.nbytes
