"""The host device: the CPU acts as the device, a part of its memory as device memory, and threads as the link.

Only the speed of the link is simulated: a swap really copies into other memory and frees its source. Each direction has
a thread that copies piece by piece and keeps to the profile's bandwidth by sleeping until the next piece is due. A lane
has a clock of its own, so that oversleeping by some 0.1 ms does not add up over many copies.

The random number generator is PyTorch's for the CPU, shared by the whole process: two executors on host devices in one
process compute the same as alone only if their operators are not random, or their steps do not overlap in time.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
import weakref
from collections.abc import Iterator
from functools import cache
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

import numpy as np
import torch

from pg_tensile.errors import DeviceError, LinkError
from pg_tensile.execution.runtime.device import (
    Transfer,
    check_budget,
    check_copy,
    check_share,
    copy_failure,
    unusable_link,
)
from pg_tensile.execution.runtime.measure import HostAllocator, HostClock, Meter
from pg_tensile.planning.compression.codec import Codec
from pg_tensile.planning.device.profile import Direction

if TYPE_CHECKING:
    from pg_tensile.execution.runtime.compressed_copies import Chunks, Look
    from pg_tensile.planning.device.profile import DeviceProfile

_PIECE_S = 2e-3  # a lane copies as much as the link moves in this time, then sleeps
_SHORT_S = 2e-4  # shorter sleeps are skipped until they have added up
_ALIGNMENT = 512
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_move = ctypes.memmove  # releases the interpreter's lock while it copies


class HostTransfer:
    """A `device.Transfer` on the host device."""

    __slots__ = (
        "bytes", "chunks", "direction", "due", "end_us", "ended", "error", "held", "look", "raw_bytes", "source",
        "stall_us", "start_us", "target",
    )  # fmt: skip

    def __init__(
        self,
        direction: Direction,
        source: torch.Tensor,
        target: torch.Tensor,
        due: float,
        chunks: Chunks | None,
        look: Look | None,
    ) -> None:
        self.direction = direction
        self.raw_bytes = self.bytes = source.numel()
        self.chunks = chunks
        self.look = look
        self.source: torch.Tensor | None = source
        self.target: torch.Tensor | None = target
        self.due = due
        self.start_us = self.end_us = self.stall_us = 0.0
        self.error: BaseException | None = None
        self.ended = False
        self.held = threading.Lock()  # locked until the copy has ended
        self.held.acquire()

    def end(self) -> None:
        self.source = self.target = None
        self.ended = True
        self.held.release()

    def join(self) -> None:
        """Wait until the copy has ended. An interrupt may leave the lock taken, but only after the end."""
        if not self.ended:
            self.held.acquire()
            self.held.release()


class _Lane:
    """One direction of the link, with a thread that ends at `close` or at the first failure.

    The executing thread only uses locks implemented in C: an interrupt (Ctrl-C) inside a Condition may leave it locked
    for ever."""

    def __init__(self, direction: Direction, profile: DeviceProfile) -> None:
        self._direction = direction
        self._rate = profile.out_bytes_per_s if direction == Direction.OUT else profile.in_bytes_per_s
        self._latency_s = profile.transfer_latency_us / 1e6
        self._duplex = profile.duplex_factor
        self._queue: SimpleQueue[HostTransfer | None] = SimpleQueue()
        self._last: HostTransfer | None = None
        self._lock = threading.Lock()  # guards `_error` and the end of the queue
        self._error: BaseException | None = None  # why the lane is broken or closed
        self._closed = False
        self._open = threading.Lock()  # held until the lane is closed
        self._open.acquire()
        self._free_at = 0.0
        self.other: _Lane | None = None
        self.busy = False
        self.share = 1.0  # of the rate
        self.time_zero = 0.0
        name = f"pg_tensile link {direction.name.lower()}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        delay_us: int,
        chunks: Chunks | None = None,
        look: Look | None = None,
    ) -> HostTransfer:
        check_copy(source, target)
        due = time.perf_counter() + delay_us / 1e6
        transfer = HostTransfer(self._direction, source, target, due, chunks, look)
        with self._lock:
            self.check()
            self._last = transfer
            self._queue.put(transfer)
        return transfer

    def check(self) -> None:
        if self._error is not None:
            raise unusable_link(self._error) from self._error

    def idle(self) -> None:
        """Wait until all copies given to the lane have ended."""
        if self._last is not None:
            self._last.join()
        self.check()

    def close(self) -> None:
        """End the thread; copies that have not ended fail, and so do later calls."""
        with self._lock:
            self._error = self._error or LinkError("it was closed")
            if not self._closed:
                self._closed = True
                self._open.release()
        self._queue.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        transfer = None
        try:
            while (transfer := self._queue.get()) is not None:
                self._copy(transfer)
                transfer.end()
        except BaseException as error:
            with self._lock:
                self._error = self._error or error
        while True:  # fail the remaining copies; `submit` adds none once `_error` is set
            if transfer is not None:
                transfer.error = self._error
                transfer.end()
            try:
                transfer = self._queue.get_nowait()
            except Empty:
                return

    def _copy(self, transfer: HostTransfer) -> None:
        assert transfer.source is not None and transfer.target is not None
        self._sleep_until(transfer.due)
        start = max(transfer.due, self._free_at)
        self.busy = True
        if transfer.look is not None:
            transfer.look.take(transfer.source)
        try:
            if transfer.chunks is None:
                clock = self._move_paced(transfer.source.data_ptr(), transfer.target.data_ptr(), transfer.bytes, start)
            elif self._direction == Direction.OUT:
                clock = self._encode_paced(transfer.chunks, transfer.source, transfer.target, start)
            else:
                clock = self._decode_paced(transfer.chunks, transfer.source, transfer.target, start)
        finally:
            self.busy = False
        self._free_at = clock
        if transfer.chunks is not None:
            transfer.bytes = transfer.chunks.moved_bytes
        transfer.start_us = (start - self.time_zero) * 1e6
        transfer.end_us = (clock - self.time_zero) * 1e6

    def _move_paced(self, source: int, target: int, size: int, start: float) -> float:
        """Copy `size` bytes at the speed of the link and return the end of the copy by the lane's clock.

        The end is later than the link requires if the memory is slower than the link."""
        clock = start + self._latency_s
        piece = max(4096, int(self._rate * self.share * _PIECE_S) & ~4095)
        for offset in range(0, size, piece):
            part = min(piece, size - offset)
            _move(target + offset, source + offset, part)
            clock = max(clock + self._link_s(part), time.perf_counter() - _SHORT_S)
            self._sleep_until(clock, _SHORT_S)
        self._sleep_until(clock)
        return clock

    def _link_s(self, size: int) -> float:
        """Return the seconds that the link takes for `size` bytes at its present load."""
        shared = self.other is not None and self.other.busy
        return size / (self._rate * self.share * (self._duplex if shared else 1.0))

    def _encode_paced(self, chunks: Chunks, source: torch.Tensor, target: torch.Tensor, start: float) -> float:
        """Encode and copy a tensor out: one chunk is encoded while the previous one is on the link.

        Returns the end of the copy by the lane's clock."""
        clock, coded = start + self._latency_s, start
        sent: list[float] = []  # time at which each chunk has left the link
        for part in chunks.ranges(source.numel()):
            begin = coded if len(sent) < 2 else max(coded, sent[-2])
            self._sleep_until(begin, _SHORT_S)
            woken = time.perf_counter()
            chunk = chunks.encode(source[part], target[part])
            coded = _ended(begin, woken)
            clock = max(clock, coded) + self._link_s(chunk.coded_bytes)
            if chunk.codec == Codec.NONE:
                target[part] = source[part]
                clock = max(clock, time.perf_counter() - _SHORT_S)
            sent.append(clock)
        self._sleep_until(clock)
        return clock

    def _decode_paced(self, chunks: Chunks, source: torch.Tensor, target: torch.Tensor, start: float) -> float:
        """Copy a tensor in and decode it: one chunk is on the link while the previous one is decoded.

        Returns the end of the copy by the lane's clock."""
        clock = start + self._latency_s
        decoded: list[float] = []  # time at which each chunk was decoded
        for part, chunk in zip(chunks.ranges(target.numel()), chunks.coded, strict=True):
            begin = clock if len(decoded) < 2 else max(clock, decoded[-2])
            clock = begin + self._link_s(chunk.coded_bytes)
            self._sleep_until(clock, _SHORT_S)
            woken = time.perf_counter()
            chunks.decode(chunk, source[part], target[part])
            decoded.append(_ended(max([clock, *decoded[-1:]]), woken))
        clock = max([clock, *decoded[-1:]])
        self._sleep_until(clock)
        return clock

    def _sleep_until(self, deadline: float, at_least: float = 0.0) -> None:
        """Sleep until `deadline` if it is more than `at_least` seconds away. Raises the error that ended the lane."""
        remaining = deadline - time.perf_counter()
        if remaining > at_least and self._open.acquire(timeout=min(remaining, threading.TIMEOUT_MAX)):
            self._open.release()
        if self._error is not None:
            raise self._error


def _ended(begin: float, woken: float) -> float:
    """Return, by a lane's clock, the end of work that should have begun at `begin` and began at `woken`.

    A start late by up to _SHORT_S counts as oversleeping and is not charged to the lane; the excess is."""
    now = time.perf_counter()
    return max(begin + now - woken, now - _SHORT_S)


@cache
def _keep_freed_memory() -> None:
    """Make the GNU C library keep freed memory in the process, instead of returning it to the kernel.

    Whether it returns a block depends on the neighbouring blocks; faulting the pages in again cost up to a fifth of a
    step. Storages are freed all the same. No effect with other C libraries."""
    with contextlib.suppress(AttributeError, OSError):
        allocator = ctypes.CDLL(None)
        allocator.mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        allocator.mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)


def _close_lanes(lanes: tuple[_Lane, _Lane]) -> None:
    for lane in lanes:
        lane.close()


class HostDevice:
    """A `device.Device` on the CPU. `budget_bytes` limits registry and workspace together; None means no limit."""

    def __init__(self, profile: DeviceProfile, budget_bytes: int | None = None) -> None:
        check_budget(budget_bytes)
        _keep_freed_memory()
        self.profile = profile
        self.budget_bytes = budget_bytes
        self.torch_device = torch.device("cpu")
        self._lanes = (_Lane(Direction.OUT, profile), _Lane(Direction.IN, profile))
        self._lanes[0].other, self._lanes[1].other = self._lanes[1], self._lanes[0]
        # Runs once: at close, when the device is collected, or when the interpreter ends (threads are alive then).
        self._close = weakref.finalize(self, _close_lanes, self._lanes)

    @property
    def runs_ahead(self) -> bool:
        return False

    def limit_memory(self, budget_bytes: int | None) -> None:
        return None

    def share_link(self, share: float) -> None:
        check_share(share)
        for lane in self._lanes:
            lane.share = share

    def upload(self, source: torch.Tensor, target: torch.Tensor) -> None:
        target.copy_(source)

    def host_memory(self, size: int) -> torch.Tensor:
        try:
            # Not from PyTorch's allocator, so that its record only contains the device's memory.
            memory = torch.from_numpy(np.empty(size + _ALIGNMENT, np.uint8))
            offset = -memory.data_ptr() % _ALIGNMENT
            return memory[offset : offset + size]
        except (ValueError, MemoryError) as error:
            hint = "Use a plan that keeps less on the host, or a machine with more memory."
            raise DeviceError(f"{size:,} bytes of host memory for swapped tensors are not to be had", hint) from error

    @contextlib.contextmanager
    def iteration(self, timed: bool = False) -> Iterator[None]:
        for lane in self._lanes:
            lane.time_zero = time.perf_counter()
        yield

    def copy_out(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        delay_us: int = 0,
        chunks: Chunks | None = None,
        look: Look | None = None,
    ) -> HostTransfer:
        return self._lanes[Direction.OUT].submit(source, target, delay_us, chunks, look)

    def copy_in(
        self, source: torch.Tensor, target: torch.Tensor, delay_us: int = 0, chunks: Chunks | None = None
    ) -> HostTransfer:
        return self._lanes[Direction.IN].submit(source, target, delay_us, chunks)

    def wait(self, transfer: Transfer) -> None:
        assert isinstance(transfer, HostTransfer)
        if not transfer.ended:
            begin = time.perf_counter()
            transfer.join()
            transfer.stall_us = (time.perf_counter() - begin) * 1e6
        if transfer.error is not None:
            raise copy_failure(transfer, transfer.error) from transfer.error

    def synchronize(self) -> None:
        for lane in self._lanes:
            lane.idle()

    def finish_times(self) -> None:
        return None

    def overhead_bytes(self) -> int:
        return 0

    def clock(self) -> Meter:
        return HostClock()

    def allocator(self) -> Meter:
        return HostAllocator()

    def generator_state(self) -> torch.Tensor:
        return torch.default_generator.get_state()

    def set_generator_state(self, state: torch.Tensor) -> None:
        torch.default_generator.set_state(state)

    def is_out_of_memory(self, error: BaseException) -> bool:
        return isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error)

    def close(self) -> None:
        self._close()
