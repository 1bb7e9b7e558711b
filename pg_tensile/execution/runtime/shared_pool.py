"""One pool of device memory for the executors of one process, each with a compute stream of its own.

What is allocated while one of these streams is current is taken from the pool: tensors and the workspaces of operators.
planning/waterwave/stream_allocator.py decides where, and which streams wait for each other before memory passes from
one to another one. The host never waits for that.

An executor's results are in the pool, too, and are read on its caller's stream. So a stream that waits for another one
waits for what the caller of that one has given to its own stream as well.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import ClassVar

import torch

from pg_tensile.errors import DeviceError
from pg_tensile.execution.backends import Streams, backend_of, streams_of
from pg_tensile.execution.measuring.device import choose_device
from pg_tensile.execution.runtime.allocator_limit import allocator_limit
from pg_tensile.planning.waterwave.stream_allocator import ALIGNMENT_BYTES, PoolMemoryError, StreamAllocator


class SharedPool:
    """A pool of `capacity_bytes` on a device for the `AcceleratorDevice`s of at most `seats` executors.

    The executors may run in threads of their own. A device has one pool at a time, until it is closed. Raises
    DeviceError if there is no memory for it; the first AcceleratorDevice does if the backend has no such pools."""

    _devices: ClassVar[set[torch.device]] = set()  # those that have a pool

    def __init__(self, device: torch.device | str, capacity_bytes: int, seats: int = 2) -> None:
        self.torch_device = choose_device(str(device))
        if self.torch_device in self._devices:
            raise DeviceError(f"{self.torch_device} has a shared pool already", hint="Close that one first.")
        self._lock = threading.Lock()
        self._freed: deque[int] = deque()  # addresses that `_allocator` does not know to be free yet
        self._vacant = deque(range(seats))  # changed without the lock, as the end of a device may come at any time, too
        self._streams = [streams_of(self.torch_device, 1 + seat) for seat in range(seats)]
        self._callers: list[torch.Stream | None] = [None] * seats
        order = partial(_order, self._streams, self._callers)  # refers to no pool, so that its memory is freed at once
        self._allocator = StreamAllocator(capacity_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES, seats, order)
        self._limit = allocator_limit(self.torch_device)
        try:
            with self._limit.lifted():
                self._memory = torch.empty(self.capacity_bytes, dtype=torch.uint8, device=self.torch_device)
        except torch.OutOfMemoryError as error:
            message = f"{self.torch_device} has no {capacity_bytes:,} bytes for a shared pool"
            raise DeviceError(message, detail=str(error)) from None
        self._limit.set(id(self), self.capacity_bytes)
        self._base = self._memory.data_ptr()
        current = torch.accelerator.current_stream(self.torch_device)
        for streams in self._streams:
            streams.compute.wait_stream(current)  # which has used this memory before, maybe
        self._devices.add(self.torch_device)

    @property
    def capacity_bytes(self) -> int:
        return self._allocator.capacity_bytes

    @property
    def free_bytes(self) -> int:
        """Free memory of the pool, in however many pieces."""
        with self._lock:
            self._collect()
            return self._allocator.free_bytes

    @property
    def synchronizations(self) -> int:
        """How often an allocation made all streams wait for each other."""
        return self._allocator.synchronizations

    def take_seat(self) -> Seat:
        """Return a vacant seat. Raises DeviceError if there is none."""
        try:
            return Seat(self, self._vacant.popleft())
        except IndexError:
            hint = "Close the device of another executor first."
            raise DeviceError("all seats of the shared pool are taken", hint=hint) from None

    def close(self) -> None:
        """End the pool, once all seats are vacant; its memory is freed with the last tensor in it.

        Raises DeviceError if a seat is taken."""
        if len(self._vacant) < len(self._streams):
            raise DeviceError("the shared pool is in use", hint="Close the devices of all executors first.")
        self._devices.discard(self.torch_device)
        self._limit.drop(id(self))

    # ---- called by the backend, in any thread ------------------------------------------------------------------------

    def _allocate(self, seat: int, size: int) -> int:
        """Return the address of a new block for the seat's compute stream, 0 if there is no memory for it."""
        with self._lock:
            self._collect()
            try:
                return self._base + self._allocator.allocate(size, seat)
            except PoolMemoryError:
                return 0

    def _free(self, address: int) -> None:
        """Free a block: later, as Python may drop a tensor at any time, even while the lock is held by this thread."""
        self._freed.append(address)

    def _collect(self) -> None:
        while self._freed:
            self._allocator.free(self._freed.popleft() - self._base)


def _order(streams: Sequence[Streams], callers: Sequence[torch.Stream | None], waiting: int, awaited: int) -> None:
    """Make a compute stream wait for another one and for what that one's caller has done with its results."""
    compute, caller = streams[waiting].compute, callers[awaited]
    compute.wait_stream(streams[awaited].compute)
    if caller is not None:
        compute.wait_stream(caller)


class Seat:
    """The place of one device in a pool. `streams`: the device's streams, of which the compute's is the pool's."""

    def __init__(self, pool: SharedPool, number: int) -> None:
        self.streams = pool._streams[number]
        self._pool = pool
        self._number = number
        self._backend = backend_of(pool.torch_device.type)
        self._entered = False

    def enter(self) -> None:
        """Take the memory of the compute stream from the pool from now on. Raises DeviceError if that is impossible."""
        pool, number = self._pool, self._number
        self._backend.plug_allocator(self.streams.compute, partial(pool._allocate, number), pool._free)
        self._entered = True

    def leave(self) -> None:
        """Take no more memory from the pool, and vacate the seat. What was taken stays until it is freed."""
        if self._entered:
            self._backend.unplug_allocator(self.streams.compute)
        self._pool._vacant.append(self._number)

    def begin_iteration(self, caller: torch.Stream) -> None:
        """Tell on which stream the results of the iteration will be read."""
        self._pool._callers[self._number] = caller

    def end_iteration(self) -> None:
        """Let the other streams wait for this one, and have all that it has freed."""
        with self._pool._lock:
            self._pool._collect()
            self._pool._allocator.end_iteration(self._number)
