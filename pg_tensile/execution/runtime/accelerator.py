"""The accelerator: a compute stream, a stream for each direction of the link, and events that order them.

It is written against PyTorch's device-neutral interface, and `backends` for what that lacks; CUDA is the type that the
project is made for. The host only gives work to the streams and does not wait, so it runs ahead of the device. An event
at the end of each iteration bounds the distance: at most one more iteration is submitted while one is executed.

- A copy's stream first waits for an event of the compute stream: by then, operators before a swap-out have written its
  source, and operators before a swap-in have stopped reading the block that its target was allocated in.
- The compute stream waits for the copy's own event. Only after that does the executor free the source. Every block
  belongs to the compute stream, so it is reused later in that stream; `record_stream` is needed for the caller's only.
- Large copies are split into pieces, because the copy engines serve the requests of all processes one after the other.
- The caller's stream and the compute stream wait for each other where an iteration begins and ends: the caller may pass
  tensors that are still being computed, and read results without synchronising streams.

After a fault of the device (a failed kernel) nothing works on it in this process any more: the first call that learns
of it raises DeviceFaultError with the cause, and so do all later ones.

The allocator does not count the context and the libraries' code (some 750 MB per process on CUDA); see
`AcceleratorDevice.overhead_bytes`.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch

from pg_tensile.errors import DeviceError, DeviceFaultError, LinkError
from pg_tensile.execution.backends import (
    Backend,
    Streams,
    backend_of,
    module_of,
    outside_bytes,
    streams_of,
    use_deterministic_algorithms,
)
from pg_tensile.execution.device_choice import choose_device
from pg_tensile.execution.runtime.allocator_limit import AllocatorLimit, allocator_limit
from pg_tensile.execution.runtime.coded_link import Asked, CodedLink
from pg_tensile.execution.runtime.device import (
    Transfer,
    check_budget,
    check_copy,
    check_share,
    copy_failure,
    unusable_link,
)
from pg_tensile.execution.runtime.measure import CachingAllocator, EventClock, Meter
from pg_tensile.execution.runtime.registered_memory import registered_memory
from pg_tensile.planning.device.profile import Direction

if TYPE_CHECKING:
    from pg_tensile.execution.runtime.compressed_copies import Chunks, Look
    from pg_tensile.planning.device.profile import DeviceProfile

_PIECE = 32 << 20
_ITERATIONS_AHEAD = 1
_LIBRARIES_OUT_OF_MEMORY = (
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED",  # it could not allocate its handle
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
)


def _begin_capture(pool: tuple[int, int] | None) -> torch.accelerator.Graph | torch.cuda.CUDAGraph:
    """Begin to capture a graph with memory from `pool`; before 2.12, PyTorch has graphs of CUDA only."""
    if hasattr(torch.accelerator, "Graph"):
        graph = torch.accelerator.Graph(pool=pool, capture_error_mode="thread_local")
        graph.capture_begin()
        return graph
    cuda_graph = torch.cuda.CUDAGraph()
    cuda_graph.capture_begin(pool, capture_error_mode="thread_local")  # type: ignore[arg-type] # a name for the pair
    return cuda_graph


class AcceleratorTransfer:
    """A `device.Transfer` on an accelerator. It refers to source and target until the compute stream waits for it."""

    __slots__ = (
        "asked", "begun", "bytes", "direction", "end_us", "ended", "raw_bytes", "source", "stall_us", "start_us",
        "target", "waited",
    )  # fmt: skip

    def __init__(
        self, direction: Direction, source: torch.Tensor, target: torch.Tensor, device: torch.device, timed: bool
    ) -> None:
        self.direction = direction
        self.raw_bytes = self.bytes = source.numel()
        self.asked: Asked | None = None  # submission by a thread; None if submitted directly
        self.source: torch.Tensor | None = source
        self.target: torch.Tensor | None = target
        self.start_us = self.end_us = self.stall_us = 0.0
        self.begun = torch.Event(device, enable_timing=True) if timed else None
        self.ended = torch.Event(device, enable_timing=timed)
        self.waited: torch.Event | None = None  # where the compute stream began to wait

    def has_ended(self) -> bool:
        return (self.asked is None or self.asked.ended) and self.ended.query()

    def take_times(self, zero: torch.Event) -> None:
        """Fill in the times, once all events have completed."""
        if self.begun is None:
            return
        self.start_us = zero.elapsed_time(self.begun) * 1e3
        self.end_us = zero.elapsed_time(self.ended) * 1e3
        if self.waited is not None:
            self.stall_us = max(0.0, self.end_us - zero.elapsed_time(self.waited) * 1e3)


class _Work:
    """Streams of a device with the copies given to them, all of which have to end before the device may go."""

    def __init__(self, streams: Streams, limit: AllocatorLimit) -> None:
        self.streams = streams
        self.limit = limit
        self.in_flight: tuple[deque[AcceleratorTransfer], deque[AcceleratorTransfer]] = (deque(), deque())
        self.coded: CodedLink | None = None  # created at the first compressed copy

    def give_back(self) -> None:
        """Wait for the streams, so that nothing being copied is freed; then return cached memory to the driver."""
        with contextlib.suppress(RuntimeError):  # after a fault of the device every call raises
            if self.coded is not None:
                self.coded.close()
                self.coded = None
            self.streams.synchronize()
        for held in self.in_flight:
            held.clear()
        with contextlib.suppress(RuntimeError):
            self.limit.drop(id(self))
            torch.accelerator.empty_cache()


class AcceleratorDevice:
    """A `device.Device` on an accelerator, such as `cuda:1`; the index is 0 if it is left out.

    `budget_bytes` limits registry and workspace together; None means only the hardware's limit.

    Makes PyTorch's algorithms deterministic for the process, so that a plan changes no bit of the results. An operator
    without a deterministic algorithm warns, and fused attention uses its default one; with `strict`, the operator
    raises RuntimeError and attention is deterministic, too. Raises DeviceError if the device does not exist, or its
    allocator is not PyTorch's own."""

    def __init__(
        self,
        device: torch.device | str,
        profile: DeviceProfile,
        budget_bytes: int | None = None,
        strict: bool = False,
    ) -> None:
        check_budget(budget_bytes)
        self.torch_device = choose_device(str(device))
        self.profile = profile
        self.budget_bytes = budget_bytes
        self._margin_bytes = profile.allocator.margin_bytes
        self._backend: Backend = backend_of(self.torch_device.type)
        self._module = module_of(self.torch_device)
        self._backend.create_context(self.torch_device)
        self._failure: DeviceFaultError | None = None  # of the device itself
        self._capturing = False
        make_deterministic(self.torch_device.type, strict)
        limit = allocator_limit(self.torch_device)
        streams = streams_of(self.torch_device)
        self._streams, self._compute, self._lanes = streams, streams.compute, streams.lanes
        self._iterations: deque[torch.Event] = deque()
        self._zero: torch.Event | None = None  # start of the current iteration, if timed
        self._timed: tuple[torch.Event, list[AcceleratorTransfer]] | None = None
        self._work = _Work(streams, limit)
        try:
            self.library_bytes = self._warm_up()  # kept by libraries for the compute stream, in no operator's workspace
        except BaseException:
            self._work.give_back()
            raise
        self.limit_memory(budget_bytes)
        # Runs once: at close, when the device is collected, or when the interpreter ends.
        self._close = weakref.finalize(self, self._work.give_back)

    def overhead_bytes(self) -> int | None:
        """Return this process's device memory that is in no book: the context, the libraries' code and workspaces, and
        the margin of the allocator.

        The libraries load code at the first call of each kernel, so it grows in the first iterations. None where the
        driver does not tell it."""
        outside = outside_bytes(self.torch_device)
        return None if outside is None else outside + self.library_bytes + self._margin_bytes

    def limit_memory(self, budget_bytes: int | None) -> None:
        limit = None if budget_bytes is None else budget_bytes + self.library_bytes
        self._work.limit.set(id(self._work), limit, self._margin_bytes)

    @property
    def runs_ahead(self) -> bool:
        return True

    def share_link(self, share: float) -> None:
        """Only check `share`: the copy engines serve all processes in turn, so there is nothing to set."""
        check_share(share)

    def upload(self, source: torch.Tensor, target: torch.Tensor) -> None:
        if not source.is_cpu:
            source.record_stream(self._compute)  # the caller's block, which the caller may free at once
        elif not target.is_cpu:
            # A copy from pageable memory would make the host wait for the stream, and the caller may change the source
            # at once. PyTorch's pinned allocator reuses a block only when the copy has ended.
            staged = torch.empty_like(source, pin_memory=True)
            source = staged.copy_(source)
        target.copy_(source, non_blocking=True)

    def host_memory(self, size: int) -> torch.Tensor:
        return registered_memory(size, self.torch_device, self._streams)

    # ---- order -------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def iteration(self, timed: bool = False) -> Iterator[None]:
        with self._faults():
            self._check()
            self._drop_staging()
            while len(self._iterations) > _ITERATIONS_AHEAD:
                self._iterations.popleft().synchronize()
            caller = torch.accelerator.current_stream(self.torch_device)
            self._compute.wait_stream(caller)
            with self._compute:
                if timed:
                    self._zero = torch.Event(self.torch_device, enable_timing=True)
                    self._zero.record(self._compute)
                    self._timed = (self._zero, [])
                try:
                    yield
                finally:
                    self._zero = None
                    end = torch.Event(self.torch_device, blocking=True)
                    end.record(self._compute)
                    self._iterations.append(end)
                    caller.wait_event(end)

    @contextlib.contextmanager
    def capturing(self) -> Iterator[torch.accelerator.Graph | torch.cuda.CUDAGraph]:
        """Capture the work given to the device inside, within `iteration`, as a graph instead of executing it.

        The graph has memory of its own, for which cached memory is given back first. Raises RuntimeError if some of the
        work cannot be captured."""
        torch.accelerator.empty_cache()
        self._capturing = True
        try:
            pool = self._backend.graph_pool()
            graph = _begin_capture(pool)
            try:
                yield graph
                graph.capture_end()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # what could not be captured has made it invalid
                    graph.capture_end()
                graph.reset()
                self._backend.abandon_capture(self.torch_device, graph, pool)
                raise
        finally:
            self._capturing = False

    @contextlib.contextmanager
    def _faults(self) -> Iterator[None]:
        """Turn a fault of the device into DeviceFaultError with the first cause."""
        try:
            yield
        except torch.AcceleratorError as error:
            raise self._fault(error) from error

    def _fault(self, error: BaseException) -> DeviceFaultError:
        if self._failure is None:
            while isinstance(error.__context__, torch.AcceleratorError):  # the calls on the way out fail, too
                error = error.__context__
            hint = "What this process had on the device is lost; a job continues from its last checkpoint."
            self._failure = DeviceFaultError(f"the device {self.torch_device} has failed", hint, detail=str(error))
        return self._failure

    def copy_out(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        delay_us: int = 0,
        chunks: Chunks | None = None,
        look: Look | None = None,
    ) -> AcceleratorTransfer:
        return self._copy(Direction.OUT, source, target, chunks, look)

    def copy_in(
        self, source: torch.Tensor, target: torch.Tensor, delay_us: int = 0, chunks: Chunks | None = None
    ) -> AcceleratorTransfer:
        return self._copy(Direction.IN, source, target, chunks, None)

    def _copy(
        self,
        direction: Direction,
        source: torch.Tensor,
        target: torch.Tensor,
        chunks: Chunks | None,
        look: Look | None,
    ) -> AcceleratorTransfer:
        self._check()
        check_copy(source, target)
        if source.is_cpu and target.is_cpu:
            # Tensors that operators keep on the host (the random seeds of attention) are copied by the host
            # immediately, so everything that used their host memory before has to have ended.
            self._compute.synchronize()
        coded = self._work.coded
        if chunks is not None:
            if coded is None:
                coded = self._work.coded = CodedLink(self.torch_device, self._streams, self._backend)
            coded.used = True
        transfer = AcceleratorTransfer(direction, source, target, self.torch_device, timed=self._zero is not None)
        give = partial(self._give, transfer, source, target, self._compute.record_event(), chunks, look)
        if direction == Direction.OUT and coded is not None:  # plain ones too, to keep the lane's order
            transfer.asked = coded.ask(give)
        else:
            give()
        if self._zero is not None and self._timed is not None:
            self._timed[1].append(transfer)
        if not self._capturing:  # the events of a capture cannot be asked, and its tensors stay for its replays
            self._hold(transfer)
        return transfer

    def _give(
        self,
        transfer: AcceleratorTransfer,
        source: torch.Tensor,
        target: torch.Tensor,
        ready: torch.Event,
        chunks: Chunks | None,
        look: Look | None,
    ) -> None:
        """Submit a transfer to its lane, where it starts after `ready`."""
        lane = self._lanes[transfer.direction]
        lane.wait_event(ready)
        with lane:
            if transfer.begun is not None:
                transfer.begun.record(lane)
            if look is not None:
                look.take(source)
            if chunks is None:
                for begin in range(0, transfer.bytes, _PIECE):
                    end = begin + _PIECE
                    target[begin:end].copy_(source[begin:end], non_blocking=True)
        if chunks is not None:
            coded = self._work.coded
            assert coded is not None
            if transfer.direction == Direction.OUT:
                coded.encode(chunks, source, target, ready)
            else:
                coded.decode(chunks, source, target)
            transfer.bytes = chunks.moved_bytes
        transfer.ended.record(lane)

    def _drop_staging(self) -> None:
        """Free the staging if the last iteration had no compressed copies: its plan does not count the staging.

        A failed copy was reported by `wait` or `synchronize`, or its iteration was given up."""
        coded = self._work.coded
        if coded is None or coded.used:
            if coded is not None:
                coded.used = False
            return
        coded.close()
        for lane in self._lanes:
            lane.synchronize()
        self._work.coded = None

    def _hold(self, transfer: AcceleratorTransfer) -> None:
        """Keep source and target of a copy alive until it is waited for or has ended (its iteration may be aborted)."""
        held = self._work.in_flight[transfer.direction]
        while held and (held[0].source is None or held[0].has_ended()):
            held.popleft()
        held.append(transfer)

    def wait(self, transfer: Transfer) -> None:
        assert isinstance(transfer, AcceleratorTransfer)
        self._check()
        if transfer.asked is not None:
            error = transfer.asked.join()  # the event `ended` is not recorded before
            if error is not None:
                raise copy_failure(transfer, error) from error
        if transfer.begun is not None:
            transfer.waited = torch.Event(self.torch_device, enable_timing=True)
            transfer.waited.record(self._compute)
        self._compute.wait_event(transfer.ended)
        transfer.source = transfer.target = None

    def synchronize(self) -> None:
        self._check()
        coded = self._work.coded
        with self._faults():
            error = None if coded is None else coded.idle()
            self._streams.synchronize()
            self._iterations.clear()
        if error is not None:
            raise LinkError(f"a compressed copy failed: {error}") from error

    def finish_times(self) -> None:
        if self._timed is not None:
            zero, transfers = self._timed
            for transfer in transfers:
                transfer.take_times(zero)
            self._timed = None

    # ---- what is measured, random numbers, errors, the end -----------------------------------------------------------

    def clock(self) -> Meter:
        return EventClock(self._compute)

    def allocator(self) -> Meter:
        return CachingAllocator(self.torch_device)

    def generator_state(self) -> torch.Tensor:
        state: torch.Tensor = self._module.get_rng_state(self.torch_device)
        return state

    def set_generator_state(self, state: torch.Tensor) -> None:
        self._module.set_rng_state(state, self.torch_device)

    def is_out_of_memory(self, error: BaseException) -> bool:
        return isinstance(error, torch.OutOfMemoryError) or (
            isinstance(error, RuntimeError) and any(sign in str(error) for sign in _LIBRARIES_OUT_OF_MEMORY)
        )

    def close(self) -> None:
        self._close()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
        if not self._close.alive:
            raise unusable_link("it was closed")

    def _warm_up(self) -> int:
        """Make the libraries allocate the memory that they keep, so that no operator's workspace contains it.

        Returns its bytes. Raises DeviceError if there is not enough, or the allocator keeps no record of it."""
        device = self.torch_device
        torch.empty(1, device=device)  # PyTorch's allocator keeps no record before its first use
        if "requested_bytes.all.current" not in torch.accelerator.memory_stats(device):
            hint = "Leave `backend:cudaMallocAsync` out of PYTORCH_CUDA_ALLOC_CONF."
            raise DeviceError(f"PyTorch's own allocator is not in use on {device}", hint)
        dtypes = [torch.float32, torch.bfloat16] if self._module.is_bf16_supported() else [torch.float32]
        try:
            with self._faults():
                self._backend.release_library_memory()
                before = torch.accelerator.memory_allocated(device)
                with self._compute:
                    for dtype in dtypes:
                        square = torch.zeros(64, 64, dtype=dtype, device=device)
                        torch.addmm(square[0], square, square)
                        torch.mm(square, square)
                        del square
                self._compute.synchronize()
                return torch.accelerator.memory_allocated(device) - before
        except RuntimeError as error:
            if not self.is_out_of_memory(error):
                raise
            hint = "Wait until other jobs have ended, or free memory on it."
            raise DeviceError(f"there is no memory left on {device}", hint, detail=str(error)) from None


def make_deterministic(device_type: str, strict: bool = False) -> None:
    """Make PyTorch deterministic as `AcceleratorDevice` does, for code that captures or executes before creating one.

    Raises DeviceError if there is no such type of devices."""
    backend_of(device_type).use_deterministic_libraries()
    use_deterministic_algorithms()
    torch.use_deterministic_algorithms(True, warn_only=not strict)
    # Otherwise torch.empty fills the tensors that it returns.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
