"""Failures on an accelerator: of compressed copies, of kernels, in a wait; and that nothing is left behind."""

from __future__ import annotations

import gc
import math
import threading
from functools import partial
from typing import Any

import pytest
import torch

from pg_tensile.errors import DeviceError, LinkError
from pg_tensile.execution.backends import backend_of, streams_of
from pg_tensile.execution.runtime.accelerator import AcceleratorDevice
from pg_tensile.execution.runtime.coded_link import Asked
from pg_tensile.execution.runtime.compressed_copies import Chunks
from pg_tensile.execution.training import checkpoint
from pg_tensile.execution.training.checkpoint import Checkpoint
from pg_tensile.planning.compression.codec import Codec
from pg_tensile.planning.compression.coding import CHUNK_BYTES
from pg_tensile.planning.device.profile import A100_40GB
from tests.accelerator.target import DEVICE, TYPE, module
from tests.accelerator.test_coded import sparse
from tests.accelerator.test_device import MIB, all_equal, onboard, pinned

CHUNK = CHUNK_BYTES[TYPE]


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Make the coder fail at the chunk with the number in the list, from 1 after it has warmed up; nothing fails while
    the list is empty."""
    backend = backend_of(TYPE)
    make, chunks = backend.coder, [-math.inf]
    number: list[int] = []

    def coder(device: torch.device) -> Any:
        wrapped = make(device)
        encode, warm_up = wrapped.encode, wrapped.warm_up

        def counted(*arguments: Any) -> Any:
            chunks[0] += 1
            if chunks[0] in number:
                raise RuntimeError("this chunk cannot be coded")
            return encode(*arguments)

        def warmed_up() -> None:
            warm_up()
            chunks[0] = 0

        monkeypatch.setattr(wrapped, "encode", counted, raising=False)
        monkeypatch.setattr(wrapped, "warm_up", warmed_up, raising=False)
        return wrapped

    monkeypatch.setattr(backend, "coder", coder)
    return number


def copy_out(device: AcceleratorDevice, source: torch.Tensor, memory: torch.Tensor) -> Any:
    return device.copy_out(source, memory, 0, Chunks.of(Codec.ZVC, torch.empty(0, device=DEVICE)))


@pytest.mark.parametrize("chunk", [1, 2, 3])
def test_a_compressed_copy_that_failed_is_reported_once_and_the_next_ones_work(device, failing, chunk):
    memories = [device.host_memory(3 * CHUNK) for _ in range(2)]
    failing.append(chunk)
    with device.iteration():
        source = sparse(3 * CHUNK)
        transfer = copy_out(device, source, memories[0])
        with pytest.raises(LinkError, match="this chunk cannot be coded"):
            device.wait(transfer)
    device.synchronize()
    with device.iteration():
        transfer = copy_out(device, source, memories[1])
        device.wait(transfer)
    device.synchronize()
    assert transfer.bytes < transfer.raw_bytes
    for _ in range(3):  # the staging goes in one of them
        with device.iteration():
            device.wait(device.copy_out(source, memories[0]))
    device.synchronize()
    assert torch.equal(memories[0], source.cpu())


def test_whoever_synchronises_learns_of_a_copy_that_nothing_waited_for(device, failing):
    """Only after everything that was given to the device has ended."""
    memory = device.host_memory(2 * CHUNK)
    failing.append(2)
    with device.iteration():
        copy_out(device, sparse(2 * CHUNK), memory)
        slow = onboard(MIB, 1)
        for _ in range(50):
            slow.add_(1)
    with pytest.raises(LinkError, match="this chunk cannot be coded"):
        device.synchronize()
    assert all(stream.query() for stream in streams_of(device.torch_device).all)
    device.synchronize()
    assert all_equal(slow, 51)


@pytest.mark.skipif(TYPE != "emulated", reason="a fault of a GPU would end the tests' process")
def test_a_fault_of_the_device_ends_its_use_with_the_first_cause(device, control):
    host = pinned(device, MIB, 5)
    tensor = onboard(MIB, 1)
    control.fail_kernel(3)
    with pytest.raises(DeviceError, match="has failed") as first:  # noqa: SIM117
        with device.iteration():
            for _ in range(5):
                tensor.add_(1)
            device.wait(device.copy_out(tensor, host))
            device.synchronize()
    assert first.value.detail and "checkpoint" in (first.value.hint or "")
    for call in (device.synchronize, partial(device.copy_in, host, tensor)):
        with pytest.raises(DeviceError) as again:
            call()
        assert again.value.detail == first.value.detail
    device.close()
    del tensor, host
    gc.collect()
    control.reset()


def test_an_interrupted_wait_for_a_submission_does_not_block_the_next():
    asked = Asked()
    asked.end(ValueError("lost"))
    asked._lock.acquire()  # as an interrupt between taking and giving back leaves it
    assert isinstance(asked.join(), ValueError)
    assert asked.join() is None


def test_a_device_that_is_collected_leaves_no_thread_and_no_memory(device):
    def threads() -> int:
        return sum(thread.name == "pg_tensile coded link out" for thread in threading.enumerate())

    before, other = threads(), AcceleratorDevice(DEVICE, profile=A100_40GB, strict=True)
    memory = other.host_memory(CHUNK)
    with other.iteration():
        other.wait(copy_out(other, sparse(CHUNK), memory))
    assert threads() == before + 1
    del other
    gc.collect()
    assert threads() == before
    torch.accelerator.synchronize()
    backend_of(TYPE).release_library_memory()
    assert torch.accelerator.memory_allocated(DEVICE) == 0


def test_devices_have_the_same_streams_for_the_life_of_the_process():
    """However often a device and its coder are made anew, within PyTorch's pool of 32."""
    used = set()
    for _ in range(12):
        device = AcceleratorDevice(DEVICE, profile=A100_40GB)
        memory = device.host_memory(CHUNK)
        with device.iteration():
            device.wait(copy_out(device, sparse(CHUNK), memory))
        device.close()
        used |= {stream.stream_id for stream in streams_of(device.torch_device).all}
    assert len(used) == 5


def test_a_checkpoint_has_the_random_numbers_of_the_jobs_device():
    device = torch.device(TYPE, min(1, module().device_count() - 1))

    def draw() -> list[float]:
        return [torch.rand(3, device=device).sum().item() for _ in range(2)]

    torch.manual_seed(1)
    draw()
    state = Checkpoint({})
    checkpoint.generator_states(state, device)
    expected = draw()
    torch.manual_seed(2)
    checkpoint.restore_generators(state, device)
    assert draw() == expected


def test_memory_that_the_driver_does_not_tell_is_unknown_and_not_everything(device, monkeypatch):
    assert device.overhead_bytes() is not None
    monkeypatch.setattr(backend_of(TYPE), "process_bytes", lambda device: None)
    assert device.overhead_bytes() is None
