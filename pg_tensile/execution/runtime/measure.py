"""Measuring operators on both devices: latencies, workspaces, and the allocator's own record of memory.

The planner needs what each operator takes (TENSILE, section III): its latency, and its
workspace, which is the allocator's high water inside it minus its outputs. A *meter* is started and stopped around
every RUN of one iteration; a device has two, for different iterations: watching the allocator slows the host down.

| | latencies | workspaces |
| --- | --- | --- |
| host | `HostClock`: `perf_counter_ns` | `HostAllocator`: the CPU allocator's events, from PyTorch's profiler |
| CUDA | `CudaClock`: a pair of timing events around it | `CudaAllocator`: the caching allocator's statistics |

What does not pass through PyTorch's allocator is in neither record: oneDNN's scratchpads on the host; on CUDA the
context and what libraries take with cudaMalloc. `Measurements` keeps the last samples; their medians become the trace's
columns.

`allocator_peak` and `StorageObserver` are two witnesses that know nothing of the runtime: the allocator's high water of
a whole step, and the storages that a dispatch mode sees alive after each operator.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from pg_tensile.planning.trace.trace import Mode, Trace

_WINDOW = 7


class Meter(ABC):
    """Measures every RUN of one iteration. The executor enters it at the iteration's start, calls `start` right before
    and `stop` right after each RUN (its outputs still alive, nothing freed in between), and leaves it at the end."""

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
        """Whether `read` has its numbers without waiting for the device."""
        return True

    @abstractmethod
    def read(self) -> np.ndarray:
        """One number a RUN, in order: a clock's are µs (float64), an allocator's are the high water in bytes above what
        was allocated at the start (int64). May wait for the device. After the iteration, once."""


class HostClock(Meter):
    """Time on the CPU. Costs about 0.1 µs an operator."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []

    def start(self) -> None:
        self._starts.append(time.perf_counter_ns())

    def stop(self) -> None:
        self._stops.append(time.perf_counter_ns())

    def read(self) -> np.ndarray:
        return (np.array(self._stops, np.int64) - np.array(self._starts, np.int64)) / 1e3


class CudaClock(Meter):
    """Time on the compute stream, between two events around each operator: where the host is slower than the device,
    that is the launch. The host does not wait; `read` does, for the last event."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def start(self) -> None:
        pair = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
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
    """High water of PyTorch's CPU allocator inside each operator. Costs about 1 µs an operator and 10 µs to read it.
    Raises MeasurementError when this thread is being profiled already."""

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


class CudaAllocator(Meter):
    """High water of the caching allocator inside each operator, in bytes as they were asked for (blocks are rounded to
    512). The allocator's books are kept by the host, so nothing waits. It resets the device's peak statistics."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before: list[int] = []
        self._peaks: list[int] = []

    def start(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)
        self._before.append(_requested_bytes(self._device)["current"])

    def stop(self) -> None:
        self._peaks.append(_requested_bytes(self._device)["peak"])

    def read(self) -> np.ndarray:
        return np.array(self._peaks, np.int64) - np.array(self._before, np.int64)


def _requested_bytes(device: torch.device) -> Mapping[str, int]:
    return torch.cuda.memory_stats_as_nested_dict(device)["requested_bytes"]["all"]


class Measurement(NamedTuple):
    """What an iteration's operators take, in the trace's order."""

    latency_us: np.ndarray  # float64[n], median of the samples; 0 where there is none
    workspace_bytes: np.ndarray  # int64[n], the largest of the samples; 0 where there is none
    samples: int  # iterations that latency_us is made of

    def apply(self, trace: Trace) -> Trace:
        """The trace with these columns in place of its own; a column that was not measured stays."""
        latency = self.latency_us if self.samples else trace.latency_us
        return trace.with_latencies(latency, np.maximum(self.workspace_bytes, trace.workspace_bytes))


class Measurements:
    """Collects the meters' readings of one trace. An operator that a plan executes several times an iteration has the
    mean of its times; over iterations the median of the last seven: one disturbed iteration does not move it."""

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
        """`steps`: the operator of each step, `reading`: a clock's, one number a step."""
        count = np.bincount(steps, minlength=len(self._created_bytes))
        total = np.bincount(steps, weights=_one_a_step(steps, reading), minlength=len(self._created_bytes))
        self._latencies = [*self._latencies[1 - _WINDOW :], total / np.maximum(count, 1)]

    def add_workspaces(self, steps: np.ndarray, reading: np.ndarray) -> None:
        """`steps`: the operator of each step, `reading`: an allocator's, one number a step."""
        workspace = _one_a_step(steps, reading) - self._created_bytes[steps]
        np.maximum.at(self._workspace_bytes, steps, workspace)

    def result(self) -> Measurement:
        latency = np.median(self._latencies, axis=0) if self._latencies else np.zeros(len(self._created_bytes))
        return Measurement(latency, self._workspace_bytes.copy(), len(self._latencies))


def _one_a_step(steps: np.ndarray, reading: np.ndarray) -> np.ndarray:
    if len(steps) != len(reading):
        raise MeasurementError(f"{len(reading)} operators were measured in an iteration of {len(steps)} steps")
    return reading


# ---- the allocators' own records -------------------------------------------------------------------------------------

_MARK = "pg_tensile"


class _Marked(NamedTuple):
    begin: int  # bytes allocated when the mark began
    peak: int  # the most inside it


class _AllocatorRecord:
    """The events of PyTorch's CPU allocator in this thread while it is entered. Blocks that were there before are not
    known, and their release is ignored."""

    def __init__(self) -> None:
        # Kineto prints two lines a use otherwise; it reads this once, at its first.
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
        """The outermost marks, in order."""
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
    """(what, bytes, address) of the events in the order of time: "begin" and "end" of outermost marks, and "memory"."""
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
    """The high water in bytes of a step by the allocator's own record, counted from before `prepare`.

    `prepare` makes everything that the step needs (the model, its optimizer, the executor) and returns the step; it is
    run once to warm up (optimizer state appears) and once for the number. On CUDA blocks are rounded to 512 bytes;
    libraries' workspaces that stay (cuBLAS) count unless they were there before. Raises MeasurementError on the host
    when this thread is being profiled already."""
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        step = prepare()
        step()
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    record = _AllocatorRecord()
    with record:
        step = prepare()
        step()
        with _RecordFunctionFast(_MARK):
            step()
    (measured,) = record.replay()
    return measured.peak


class Observed(NamedTuple):
    """What `StorageObserver` saw when an operator had returned."""

    target: str  # "aten.mm.default"
    bytes: int  # of all storages alive


class StorageObserver(TorchDispatchMode):
    """Counts the bytes of live storages after each operator that PyTorch executes while it is entered, inputs and
    outputs included. Operators that only make a view are left out. Storages are known from being an operand or from
    `watch`; those of the tensors in `ignore` (a host arena) never count.

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
        """Counts these tensors' storages from now on, without keeping them alive."""
        for ref in map(_weak, tensors):
            if ref.cdata not in self._ignored:
                self._alive.setdefault(ref.cdata, ref)

    def live_bytes(self) -> int:
        """Bytes of the storages that are alive now."""
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
        made = {_weak(tensor).cdata for tensor in outputs} - {_weak(tensor).cdata for tensor in operands}
        if made or func._schema.is_mutable or not outputs:
            self.seen.append(Observed(str(func), self.live_bytes()))
        return result


def _tensors(tree: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _weak(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def _storage_bytes(ref: StorageWeakRef) -> int:
    storage = torch.UntypedStorage._new_with_weak_ptr(ref.cdata)
    return 0 if storage is None else storage.nbytes()
