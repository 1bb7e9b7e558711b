"""Measurement of operators on both devices: latencies, workspaces, and the allocator's own record of memory.

The planner needs the cost of each operator (TENSILE, section III): its latency, and its workspace, which is the
allocator's high-water mark inside it minus its outputs. A *meter* is started and stopped around every RUN of one
iteration; a device has two, for different iterations, because watching the allocator slows the host down.

| | latencies | workspaces |
| --- | --- | --- |
| host | `HostClock`: `perf_counter_ns` | `HostAllocator`: the CPU allocator's events, from PyTorch's profiler |
| accelerators | `EventClock`: a pair of timing events | `CachingAllocator`: the caching allocator's statistics |

Memory outside PyTorch's allocator is in neither record: oneDNN's scratchpads on the host; on accelerators the
context and memory that libraries allocate by themselves. `Measurements` keeps the last latency samples, and what is
typical of an operator's and its twins' samples (planning/latency/twins.py) becomes a column of the trace; so do the
largest workspaces.

`allocator_peak` and `StorageObserver` check the runtime independently of it: the allocator's high-water mark of a whole
step, and the storages that a dispatch mode finds alive after each operator.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch._C._profiler import _RecordFunctionFast
from torch.autograd import profiler
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pg_tensile.errors import MeasurementError
from pg_tensile.planning.latency.twins import twins_of, typical_us
from pg_tensile.planning.trace.trace import Mode, Trace

_WINDOW = 7


class Meter(ABC):
    """Meter of every RUN of one iteration.

    The executor enters it at the iteration's start, calls `start` right before and `stop` right after each RUN (with
    its outputs still alive, nothing freed in between), and leaves it at the end."""

    def __enter__(self) -> Meter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        return None

    @abstractmethod
    def start(self) -> None: ...

    @abstractmethod
    def stop(self) -> None: ...

    def ready(self) -> bool:
        """Return whether `read` would return without waiting for the device."""
        return True

    @abstractmethod
    def read(self) -> np.ndarray:
        """Return one number per RUN, in order.

        A clock returns µs (float64); an allocator returns the high-water mark in bytes above the bytes allocated at
        `start` (int64). Called once, after the iteration; may wait for the device."""


class HostClock(Meter):
    """Meter of the time on the CPU. Costs about 0.1 µs per operator."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []

    def start(self) -> None:
        self._starts.append(time.perf_counter_ns())

    def stop(self) -> None:
        self._stops.append(time.perf_counter_ns())

    def read(self) -> np.ndarray:
        return (np.array(self._stops, np.int64) - np.array(self._starts, np.int64)) / 1e3


class EventClock(Meter):
    """Meter of the time on the compute stream between two events around each operator.

    Where the host is slower than the device, that is the time of the launch. The host does not wait until `read`, which
    waits for the last event."""

    def __init__(self, stream: torch.Stream) -> None:
        self._stream = stream
        self._pairs: list[tuple[torch.Event, torch.Event]] = []

    def start(self) -> None:
        device = self._stream.device
        pair = (torch.Event(device, enable_timing=True), torch.Event(device, enable_timing=True))
        self._pairs.append(pair)
        pair[0].record(self._stream)

    def stop(self) -> None:
        self._pairs[-1][1].record(self._stream)

    def ready(self) -> bool:
        return not self._pairs or self._pairs[-1][1].query()

    def read(self) -> np.ndarray:
        if self._pairs:
            self._pairs[-1][1].synchronize()
        return np.array([begin.elapsed_time(end) * 1e3 for begin, end in self._pairs], np.float64)


class HostAllocator(Meter):
    """Meter of the high-water mark of PyTorch's CPU allocator inside each operator.

    Costs about 1 µs per operator, and 10 µs to read. Raises MeasurementError if this thread is already being profiled.
    """

    def __init__(self) -> None:
        self._record = _AllocatorRecord()
        self._mark = _RecordFunctionFast(_MARK)

    def __enter__(self) -> HostAllocator:
        self._record.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._record.__exit__(kind, error, traceback)

    def start(self) -> None:
        self._mark.__enter__()

    def stop(self) -> None:
        self._mark.__exit__(None, None, None)

    def read(self) -> np.ndarray:
        return np.array([marked.peak - marked.begin for marked in self._record.replay()], np.int64)


class CachingAllocator(Meter):
    """Meter of the high-water mark of the caching allocator inside each operator.

    It is in requested bytes (blocks are rounded to 512). The allocator's statistics are kept by the host, so nothing
    waits. Resets the device's peak statistics."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before: list[int] = []
        self._peaks: list[int] = []

    def start(self) -> None:
        torch.accelerator.reset_peak_memory_stats(self._device)
        self._before.append(_requested_bytes(self._device, "current"))

    def stop(self) -> None:
        self._peaks.append(_requested_bytes(self._device, "peak"))

    def read(self) -> np.ndarray:
        return np.array(self._peaks, np.int64) - np.array(self._before, np.int64)


def _requested_bytes(device: torch.device, which: str) -> int:
    return int(torch.accelerator.memory_stats(device)[f"requested_bytes.all.{which}"])


class Measurement(NamedTuple):
    """Measured costs of the operators, in the trace's order."""

    latency_us: np.ndarray  # float64[n], median of the samples; 0 if there are none
    workspace_bytes: np.ndarray  # int64[n], the largest sample; 0 if there are none
    readings_us: np.ndarray  # float64[samples, n], the samples, oldest first; 0 where an operator was not executed

    @property
    def samples(self) -> int:
        """Number of iterations in the medians of `latency_us`."""
        return len(self.readings_us)

    def apply(self, trace: Trace) -> Trace:
        """Return the trace with latencies to plan with, and the larger of both workspaces.

        The latencies are typical of an operator's and its twins' samples; an operator without any keeps the trace's.
        """
        latency = trace.latency_us
        if self.samples:
            typical = typical_us(self.readings_us, twins_of(trace))
            latency = np.where(np.isfinite(typical), typical, latency)
        return trace.with_latencies(latency, np.maximum(self.workspace_bytes, trace.workspace_bytes))


class Measurements:
    """Collection of the meters' readings for one trace.

    An operator that a plan executes several times per iteration has the mean of its times. Over iterations, latencies
    are the medians of the last seven, so that a single disturbed iteration has little effect."""

    def __init__(self, trace: Trace) -> None:
        created = np.bincount(
            trace.access_operator,
            weights=np.where(trace.access_mode == Mode.CREATE, trace.tensor_bytes[trace.access_tensor], 0),
            minlength=trace.operator_count,
        )
        self._created_bytes = created.astype(np.int64)
        self._latencies: list[np.ndarray] = []
        self._workspace_bytes = np.zeros(trace.operator_count, np.int64)

    def add_latencies(self, steps: np.ndarray, reading: np.ndarray) -> None:
        """Add an iteration: `steps` is the operator of each step, `reading` a clock's reading, one number per step."""
        count = np.bincount(steps, minlength=len(self._created_bytes))
        total = np.bincount(steps, weights=_one_a_step(steps, reading), minlength=len(self._created_bytes))
        self._latencies = [*self._latencies[1 - _WINDOW :], total / np.maximum(count, 1)]

    def add_workspaces(self, steps: np.ndarray, reading: np.ndarray) -> None:
        """Add an iteration: `steps` is the operator of each step, `reading` an allocator's, one number per step."""
        workspace = _one_a_step(steps, reading) - self._created_bytes[steps]
        np.maximum.at(self._workspace_bytes, steps, workspace)

    def result(self) -> Measurement:
        operators = len(self._created_bytes)
        readings = np.array(self._latencies).reshape(-1, operators)
        latency = np.median(readings, axis=0) if self._latencies else np.zeros(operators)
        return Measurement(latency, self._workspace_bytes.copy(), readings)


def _one_a_step(steps: np.ndarray, reading: np.ndarray) -> np.ndarray:
    if len(steps) != len(reading):
        raise MeasurementError(f"{len(reading)} operators were measured in an iteration of {len(steps)} steps")
    return reading


# ---- the allocators' own records -------------------------------------------------------------------------------------

_MARK = "pg_tensile"


class _Marked(NamedTuple):
    begin: int  # bytes allocated when the mark began
    peak: int  # the most bytes allocated inside it


class _AllocatorRecord:
    """Record of the events of PyTorch's CPU allocator in this thread while it is entered.

    Blocks allocated before are unknown, and their release is ignored."""

    def __init__(self) -> None:
        # Kineto prints two lines per use otherwise; it reads this variable once, at its first use.
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
        self._profile = profiler.profile(use_kineto=True, use_cpu=True, profile_memory=True)

    def __enter__(self) -> _AllocatorRecord:
        if torch.autograd._profiler_enabled():
            hint = "Leave PyTorch's profiler before workspaces are measured; latencies do not need it."
            raise MeasurementError("the allocator cannot be watched: this thread is being profiled already", hint=hint)
        self._profile.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._profile.__exit__(kind, error, traceback)

    def replay(self) -> list[_Marked]:
        """Return the outermost marks, in order."""
        results = self._profile.kineto_results
        assert results is not None, "replayed before it was left"
        marks: list[_Marked] = []
        blocks: dict[int, int] = {}
        total = begin = peak = 0
        for event, size, address in _walk(results.experimental_event_tree()):
            if event == "begin":
                begin = peak = total
            elif event == "end":
                marks.append(_Marked(begin, peak))
            elif size > 0:
                blocks[address] = size
                total += size
                peak = max(peak, total)
            else:
                total -= blocks.pop(address, 0)
        return marks


def _walk(nodes: Sequence[Any], marked: bool = False) -> Iterator[tuple[str, int, int]]:
    """Yield (kind, bytes, address) of the events by time: "begin" and "end" of outermost marks, and "memory"."""
    for node in nodes:
        if node.name == "[memory]":
            if node.extra_fields.device.type == "cpu":
                yield "memory", node.extra_fields.alloc_size, node.extra_fields.ptr
        elif node.name == _MARK and not marked:
            yield "begin", 0, 0
            yield from _walk(node.children, True)
            yield "end", 0, 0
        else:
            yield from _walk(node.children, marked)


def allocator_peak(prepare: Callable[[], Callable[[], object]], device: torch.device | str = "cpu") -> int:
    """Return the high-water mark in bytes of a step by the allocator's own record, counted from before `prepare`.

    `prepare` creates everything that the step needs (the model, its optimizer, the executor) and returns the step,
    which is run once to warm up (optimizer state is created) and once to be measured. On accelerators, blocks are
    rounded to 512 bytes; library workspaces that stay allocated (cuBLAS) count unless they existed before. Raises
    MeasurementError on the host if this thread is already being profiled."""
    device = torch.device(device)
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
        before = torch.accelerator.memory_allocated(device)
        step = prepare()
        step()
        torch.accelerator.synchronize(device)
        torch.accelerator.reset_peak_memory_stats(device)
        step()
        torch.accelerator.synchronize(device)
        return torch.accelerator.max_memory_allocated(device) - before
    record = _AllocatorRecord()
    with record:
        step = prepare()
        step()
        with _RecordFunctionFast(_MARK):
            step()
    (measured,) = record.replay()
    return measured.peak


class Observed(NamedTuple):
    """Observation of `StorageObserver` after an operator."""

    target: str  # "aten.mm.default"
    bytes: int  # of all live storages


class StorageObserver(TorchDispatchMode):
    """Counter of the bytes of live storages, inputs and outputs included, after each operator that PyTorch executes.

    It counts while it is entered. Operators that only make a view are left out. A storage is counted once it was an
    operand or was given to `watch`; those of the tensors in `ignore` (a host arena) never count.

    >>> with StorageObserver() as observer:
    ...     twice = torch.ones(256) * 2
    >>> [(seen.target, seen.bytes) for seen in observer.seen]
    [('aten.ones.default', 1024), ('aten.mul.Tensor', 2048)]
    """

    def __init__(self, watch: Iterable[torch.Tensor] = (), ignore: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.seen: list[Observed] = []
        self._alive: dict[int, StorageWeakRef] = {}
        self._ignored = {ref.cdata: ref for ref in map(_weak, ignore)}
        self.watch(watch)

    def watch(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count these tensors' storages from now on, without keeping them alive."""
        for ref in map(_weak, tensors):
            if ref.cdata not in self._ignored:
                self._alive.setdefault(ref.cdata, ref)

    def live_bytes(self) -> int:
        """Return the bytes of the storages that are alive now."""
        self._alive = {cdata: ref for cdata, ref in self._alive.items() if not ref.expired()}
        return sum(_storage_bytes(ref) for ref in self._alive.values())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        operands = _tensors((args, kwargs))
        outputs = _tensors(result)
        self.watch(operands)
        self.watch(outputs)
        created = {_weak(tensor).cdata for tensor in outputs} - {_weak(tensor).cdata for tensor in operands}
        if created or func._schema.is_mutable or not outputs:
            self.seen.append(Observed(str(func), self.live_bytes()))
        return result


def _tensors(tree: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _weak(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def _storage_bytes(ref: StorageWeakRef) -> int:
    storage = torch.UntypedStorage._new_with_weak_ptr(ref.cdata)
    return 0 if storage is None else storage.nbytes()
