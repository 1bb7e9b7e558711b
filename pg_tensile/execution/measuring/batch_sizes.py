"""Training with a few batch sizes, to see how fast each is (AccUDNN, section 3.2, dynamic information).

The iterations count as training: all sizes are graphs of one executor, so that weights, optimizer state and generators
go on from one to the next, and nothing that was computed is thrown away. Sizes ascend. So what a size takes, workspaces
included, is predicted from smaller ones that were measured before it is tried, and whatever would take longer than the
time allowed, or does not fit, is left out.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import NamedTuple

from torch import Tensor, nn

from pg_tensile.execution.capture import Captured
from pg_tensile.execution.runtime.device import Device
from pg_tensile.execution.runtime.executor import Executor
from pg_tensile.execution.runtime.loaded_graph import Graph
from pg_tensile.planning.batchsize.choose import Choice
from pg_tensile.planning.batchsize.predict import Correction, Predictor
from pg_tensile.planning.batchsize.throughput import Curves
from pg_tensile.planning.batchsize.traces import BatchTraces

PARTS = (1 / 8, 1 / 4, 1 / 2, 2 / 3, 1.0)  # of the largest trainable batch
STEPS = 6  # of each size: one for latencies, one for workspaces, and those that are timed
SETTLING = 3  # sizes that are chosen and then trained with, at most, before the choice is final

Rows = tuple[Sequence[Tensor], Sequence[Tensor]]  # inputs and targets of one batch, on the device


class Probe(NamedTuple):
    """A batch size that was trained with: the median µs of the steps that nothing was measured in."""

    batch_size: int
    step_us: float

    @property
    def samples_per_s(self) -> float:
        return self.batch_size / self.step_us * 1e6


def probe_sizes(largest: int, parts: Iterable[float] = PARTS, least: int = 1) -> tuple[int, ...]:
    """The sizes to train with, ascending; none twice, none below `least`."""
    return tuple(sorted({max(least, round(part * largest)) for part in parts if round(part * largest) <= largest}))


class Probing:
    """Trains `model` on `device`. `capture(size)`: the captured step; `traces` and `curves`, which `predictor` predicts
    with, learn what is measured. A context manager; `close` puts everything back into the model, unless the caller goes
    on with `executor` (None before the first probe)."""

    def __init__(
        self,
        capture: Callable[[int], Captured],
        model: nn.Module,
        device: Device,
        predictor: Predictor,
        traces: BatchTraces,
        curves: Curves,
    ) -> None:
        self.capture = capture
        self.model = model
        self.device = device
        self.predictor = predictor
        self.traces = traces
        self.curves = curves
        self.executor: Executor | None = None
        self.probes: dict[int, Probe] = {}
        self._graphs: dict[int, Graph] = {}

    def run(self, sizes: Iterable[int], rows: Callable[[int], Iterator[Rows]], limit_s: float) -> list[Probe]:
        """Trains with each size in turn; `rows(size)` gives its batches. Ends before a size that does not fit, or for
        which the time that is left does not suffice; the first one is not held against the time. Afterwards the
        predictor knows what iterations really take."""
        ends = time.monotonic() + limit_s
        probes: list[Probe] = []
        for size in sizes:
            candidate = self.predictor(size)
            left_us = (ends - time.monotonic()) * 1e6
            if not candidate.feasible or (probes and STEPS * candidate.iteration_us > left_us):
                break
            probes.append(self.measure(size, rows(size)))
        self._correct()
        return probes

    def settle(self, choose: Callable[[], Choice], rows: Callable[[int], Iterator[Rows]], limit_s: float) -> Choice:
        """What is chosen once the size that is chosen has been trained with: its measurement may change the choice. At
        most SETTLING sizes and about so much time."""
        ends = time.monotonic() + limit_s
        choice = choose()
        for _ in range(SETTLING):
            if choice.batch_size in self.probes or time.monotonic() > ends:
                break
            self.run([choice.batch_size], rows, 0.0)
            choice = choose()
        return choice

    def _correct(self) -> None:
        probes = [self.probes[size] for size in sorted(self.probes)]
        self.predictor.correction = Correction()
        simulated = tuple(self.predictor(probe.batch_size).iteration_us for probe in probes)
        measured = tuple(probe.step_us for probe in probes)
        self.predictor.correction = Correction(tuple(probe.batch_size for probe in probes), simulated, measured)

    def measure(self, size: int, rows: Iterator[Rows]) -> Probe:
        """STEPS steps of that size, under the plan that it would have. Raises BudgetError where it does not fit,
        CaptureError, DeviceError, ExecutorError."""
        graph = self._graph(size)
        executor = self.executor
        assert executor is not None
        executor.measure(graph)
        times = []
        for _ in range(STEPS):
            inputs, targets = next(rows)
            began = time.perf_counter()
            executor.step(inputs, targets, graph=graph)
            self.device.synchronize()
            times.append((time.perf_counter() - began) * 1e6)
        trace = graph.trace
        self.traces.add_workspaces(size, trace.workspace_bytes)
        self.curves.add(trace)
        self.probes[size] = Probe(size, statistics.median(times[2:]))
        return self.probes[size]

    def _graph(self, size: int) -> Graph:
        if size not in self._graphs:
            captured = self.capture(size)
            plan = self.predictor.plan(size)
            if self.executor is None:
                self.executor = Executor(captured, self.model, self.device, plan)
                self._graphs[size] = self.executor.graphs[0]
            else:
                self._graphs[size] = self.executor.add(captured, plan)
        return self._graphs[size]

    def close(self) -> None:
        """The model has all that was learnt; the optimizer's state is `executor.state_dict()`'s, taken before."""
        if self.executor is not None:
            self.executor.close()
            self.executor = None
            self._graphs.clear()

    def __enter__(self) -> Probing:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()
