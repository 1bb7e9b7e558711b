"""The CUDA device: a compute stream, a stream for each direction of the link, and events that order them.

The host only gives work to the streams and does not wait, so it runs ahead of the device. An event at the end of each
iteration bounds the distance: at most one more iteration is submitted while one is executed.

- A copy's stream first waits for an event of the compute stream: by then, operators before a swap-out have written its
  source, and operators before a swap-in have stopped reading the block that its target was allocated in.
- The compute stream waits for the copy's own event. Only after that does the executor free the source. Every block
  belongs to the compute stream, so it is reused later in that stream; `record_stream` is never needed.
- Large copies are split into pieces, because the copy engines serve the requests of all processes one after the other.
- The caller's stream and the compute stream wait for each other where an iteration begins and ends: the caller may pass
  tensors that are still being computed, and read results without synchronising streams.

The allocator does not count the context (300 to 500 MB per process); see `CudaDevice.overhead_bytes`.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch

from pg_tensile.errors import LinkError
from pg_tensile.execution.measuring.device import choose_device, measure, use_deterministic_algorithms
from pg_tensile.execution.runtime.cuda_compressed_copies import Asked, CodedLink
from pg_tensile.execution.runtime.device import (
    Transfer,
    check_budget,
    check_copy,
    check_share,
    copy_failure,
    unusable_link,
)
from pg_tensile.execution.runtime.measure import CudaAllocator, CudaClock, Meter
from pg_tensile.execution.runtime.pinned_memory import pinned_memory
from pg_tensile.planning.device.profile import Direction

if TYPE_CHECKING:
    from pg_tensile.execution.runtime.compressed_copies import Chunks, Look
    from pg_tensile.planning.device.profile import DeviceProfile

_PIECE = 32 << 20
_ITERATIONS_AHEAD = 1


class CudaTransfer:
    """A `device.Transfer` on CUDA. It refers to source and target until the compute stream waits for the copy."""

    __slots__ = (
        "asked", "begun", "bytes", "direction", "end_us", "ended", "raw_bytes", "source", "stall_us", "start_us",
        "target", "waited",
    )  # fmt: skip

    def __init__(self, direction: Direction, source: torch.Tensor, target: torch.Tensor, timed: bool) -> None:
        self.direction = direction
        self.raw_bytes = self.bytes = source.numel()
        self.asked: Asked | None = None  # submission by a thread; None if submitted directly
        self.source: torch.Tensor | None = source
        self.target: torch.Tensor | None = target
        self.start_us = self.end_us = self.stall_us = 0.0
        self.begun = torch.cuda.Event(enable_timing=True) if timed else None
        self.ended = torch.cuda.Event(enable_timing=timed)
        self.waited: torch.cuda.Event | None = None  # where the compute stream began to wait

    def has_ended(self) -> bool:
        return (self.asked is None or not self.asked.lock.locked()) and self.ended.query()

    def take_times(self, zero: torch.cuda.Event) -> None:
        """Fill in the times, once all events have completed."""
        if self.begun is None:
            return
        self.start_us = zero.elapsed_time(self.begun) * 1e3
        self.end_us = zero.elapsed_time(self.ended) * 1e3
        if self.waited is not None:
            self.stall_us = max(0.0, self.end_us - zero.elapsed_time(self.waited) * 1e3)


class CudaDevice:
    """A `device.Device` on a CUDA device.

    `budget_bytes` limits registry and workspace together; None means only the hardware's limit. With `profile` None
    the device is measured at the first use of the property.

    Makes PyTorch's algorithms deterministic for the process, so that a plan changes no bit of the results. An operator
    without a deterministic algorithm warns, and fused attention uses its default one; with `strict`, the operator
    raises RuntimeError and attention is deterministic, too. Raises DeviceError if the device does not exist."""

    def __init__(
        self,
        index: int = 0,
        budget_bytes: int | None = None,
        profile: DeviceProfile | None = None,
        strict: bool = False,
    ) -> None:
        check_budget(budget_bytes)
        self.torch_device = choose_device(f"cuda:{index}")
        self.budget_bytes = budget_bytes
        self._profile = profile
        make_deterministic(strict)
        self._compute = torch.cuda.Stream(self.torch_device)
        self._lanes = (torch.cuda.Stream(self.torch_device), torch.cuda.Stream(self.torch_device))
        self._in_flight: tuple[deque[CudaTransfer], deque[CudaTransfer]] = (deque(), deque())
        self._iterations: deque[torch.cuda.Event] = deque()
        self._coded: CodedLink | None = None  # created at the first compressed copy
        self._zero: torch.cuda.Event | None = None  # start of the current iteration, if timed
        self._timed: tuple[torch.cuda.Event, list[CudaTransfer]] | None = None
        self.library_bytes = self._warm_up()  # allocated by cuBLAS for the compute stream, in no operator's workspace
        streams = (self._compute, *self._lanes)
        # Runs once: at close, when the device is collected, or when the interpreter ends.
        self._close = weakref.finalize(self, _give_back, streams, self._in_flight)

    @property
    def profile(self) -> DeviceProfile:
        if self._profile is None:
            self._profile = measure(self.torch_device)
        return self._profile

    def overhead_bytes(self) -> int:
        """Return this process's device memory outside PyTorch's allocator: the context and the libraries' code.

        Where the driver does not report the memory of a process (in a container), all memory in use on the device
        counts, that of other processes included."""
        used = _process_bytes(self.torch_device)
        if used is None:
            free, total = torch.cuda.mem_get_info(self.torch_device)
            used = total - free
        return max(0, used - torch.cuda.memory_reserved(self.torch_device))

    @property
    def runs_ahead(self) -> bool:
        return True

    def share_link(self, share: float) -> None:
        """Only check `share`: the copy engines serve all processes in turn, so there is nothing to set."""
        check_share(share)

    def upload(self, source: torch.Tensor, target: torch.Tensor) -> None:
        if source.is_cpu and target.is_cuda:
            # A copy from pageable memory would make the host wait for the stream, and the caller may change the source
            # at once. PyTorch's pinned allocator reuses a block only when the copy has ended.
            staged = torch.empty_like(source, pin_memory=True)
            source = staged.copy_(source)
        target.copy_(source, non_blocking=True)

    def host_memory(self, size: int) -> torch.Tensor:
        return pinned_memory(size, self.torch_device)

    # ---- order -------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def iteration(self, timed: bool = False) -> Iterator[None]:
        self._check()
        self._drop_staging()
        while len(self._iterations) > _ITERATIONS_AHEAD:
            self._iterations.popleft().synchronize()
        caller = torch.cuda.current_stream(self.torch_device)
        self._compute.wait_stream(caller)
        with torch.cuda.stream(self._compute):
            if timed:
                self._zero = torch.cuda.Event(enable_timing=True)
                self._zero.record(self._compute)
                self._timed = (self._zero, [])
            try:
                yield
            finally:
                self._zero = None
                end = torch.cuda.Event(blocking=True)
                end.record(self._compute)
                self._iterations.append(end)
                caller.wait_event(end)

    def copy_out(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        delay_us: int = 0,
        chunks: Chunks | None = None,
        look: Look | None = None,
    ) -> CudaTransfer:
        return self._copy(Direction.OUT, source, target, chunks, look)

    def copy_in(
        self, source: torch.Tensor, target: torch.Tensor, delay_us: int = 0, chunks: Chunks | None = None
    ) -> CudaTransfer:
        return self._copy(Direction.IN, source, target, chunks, None)

    def _copy(
        self,
        direction: Direction,
        source: torch.Tensor,
        target: torch.Tensor,
        chunks: Chunks | None,
        look: Look | None,
    ) -> CudaTransfer:
        self._check()
        check_copy(source, target)
        if source.is_cpu and target.is_cpu:
            # Tensors that operators keep on the host (the random seeds of attention) are copied by the host
            # immediately, so everything that used their host memory before has to have ended.
            self._compute.synchronize()
        if chunks is not None:
            if self._coded is None:
                self._coded = CodedLink(self.torch_device, self._lanes)
            self._coded.used = True
        transfer = CudaTransfer(direction, source, target, timed=self._zero is not None)
        give = partial(self._give, transfer, source, target, self._compute.record_event(), chunks, look)
        if direction == Direction.OUT and self._coded is not None:  # plain ones too, to keep the lane's order
            transfer.asked = self._coded.ask(give)
        else:
            give()
        if self._zero is not None and self._timed is not None:
            self._timed[1].append(transfer)
        self._hold(transfer)
        return transfer

    def _give(
        self,
        transfer: CudaTransfer,
        source: torch.Tensor,
        target: torch.Tensor,
        ready: torch.cuda.Event,
        chunks: Chunks | None,
        look: Look | None,
    ) -> None:
        """Submit a transfer to its lane, where it starts after `ready`."""
        lane = self._lanes[transfer.direction]
        lane.wait_event(ready)
        with torch.cuda.stream(lane):
            if transfer.begun is not None:
                transfer.begun.record(lane)
            if look is not None:
                look.take(source)
            if chunks is None:
                for begin in range(0, transfer.bytes, _PIECE):
                    end = begin + _PIECE
                    target[begin:end].copy_(source[begin:end], non_blocking=True)
        if chunks is not None:
            assert self._coded is not None
            code = self._coded.encode if transfer.direction == Direction.OUT else self._coded.decode
            code(chunks, source, target, ready)
            transfer.bytes = chunks.moved_bytes
        transfer.ended.record(lane)

    def _drop_staging(self) -> None:
        """Free the staging if the last iteration had no compressed copies: its plan does not count the staging."""
        coded = self._coded
        if coded is None or coded.used:
            if coded is not None:
                coded.used = False
            return
        coded.idle()
        coded.close()
        for lane in self._lanes:
            lane.synchronize()
        self._coded = None

    def _hold(self, transfer: CudaTransfer) -> None:
        """Keep source and target of a copy alive until it is waited for or has ended (its iteration may be aborted)."""
        held = self._in_flight[transfer.direction]
        while held and (held[0].source is None or held[0].has_ended()):
            held.popleft()
        held.append(transfer)

    def wait(self, transfer: Transfer) -> None:
        assert isinstance(transfer, CudaTransfer)
        self._check()
        self._join(transfer)
        if transfer.begun is not None:
            transfer.waited = torch.cuda.Event(enable_timing=True)
            transfer.waited.record(self._compute)
        self._compute.wait_event(transfer.ended)
        transfer.source = transfer.target = None

    def _join(self, transfer: CudaTransfer) -> None:
        """Wait until the transfer is submitted: its event `ended` is not recorded before. Raises LinkError."""
        if transfer.asked is not None:
            try:
                transfer.asked.join()
            except Exception as error:
                raise copy_failure(transfer, error) from error

    def synchronize(self) -> None:
        self._check()
        if self._coded is not None:
            try:
                self._coded.idle()
            except Exception as error:
                raise LinkError(f"a coded copy failed: {error}") from error
        for stream in (self._compute, *self._lanes):
            stream.synchronize()
        self._iterations.clear()

    def finish_times(self) -> None:
        if self._timed is not None:
            zero, transfers = self._timed
            for transfer in transfers:
                transfer.take_times(zero)
            self._timed = None

    # ---- what is measured, random numbers, errors, the end -----------------------------------------------------------

    def clock(self) -> Meter:
        return CudaClock(self._compute)

    def allocator(self) -> Meter:
        return CudaAllocator(self.torch_device)

    def generator_state(self) -> torch.Tensor:
        return torch.cuda.get_rng_state(self.torch_device)

    def set_generator_state(self, state: torch.Tensor) -> None:
        torch.cuda.set_rng_state(state, self.torch_device)

    def is_out_of_memory(self, error: BaseException) -> bool:
        signs = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
        return isinstance(error, torch.OutOfMemoryError) or (
            isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)
        )

    def close(self) -> None:
        if self._coded is not None and self._close.alive:
            self._coded.close()
        self._close()

    def _check(self) -> None:
        if not self._close.alive:
            raise unusable_link("it was closed")

    def _warm_up(self) -> int:
        """Make the libraries allocate the memory that they keep, so that no operator's workspace contains it.

        Returns its bytes."""
        before = torch.cuda.memory_allocated(self.torch_device)
        with torch.cuda.stream(self._compute):
            for dtype in (torch.float32, torch.bfloat16):
                square = torch.zeros(64, 64, dtype=dtype, device=self.torch_device)
                torch.addmm(square[0], square, square)
                torch.mm(square, square)
                del square
        self._compute.synchronize()
        return torch.cuda.memory_allocated(self.torch_device) - before


def make_deterministic(strict: bool = False) -> None:
    """Make PyTorch deterministic as `CudaDevice` does, for code that captures or executes before creating one."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    use_deterministic_algorithms()
    torch.use_deterministic_algorithms(True, warn_only=not strict)
    # Otherwise torch.empty fills the tensors that it returns.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _give_back(streams: tuple[torch.cuda.Stream, ...], in_flight: tuple[deque[CudaTransfer], ...]) -> None:
    """Wait for the streams, so that nothing being copied is freed; then return cached memory to the driver."""
    with contextlib.suppress(RuntimeError):  # after a fault of the device every call raises
        for stream in streams:
            stream.synchronize()
        torch.cuda.empty_cache()
    for held in in_flight:
        held.clear()


def _process_bytes(device: torch.device) -> int | None:
    """Return the device memory of this process by the driver's count, or None if it does not report it."""
    import pynvml

    try:
        pynvml.nvmlInit()
        try:
            uuid = torch.cuda.get_device_properties(device).uuid
            handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
            return next((process.usedGpuMemory for process in processes if process.pid == os.getpid()), None)
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return None
