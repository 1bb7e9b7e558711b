"""Training with a few batch sizes to measure their speed (AccUDNN, section 3.2, dynamic information).

The iterations count as training: all sizes are graphs of one executor, so weights, optimizer state and generators carry
over from one to the next and no work is lost. Sizes ascend, so the needs of a size, workspaces included, are predicted
from measurements of smaller ones before it is tried. A size that does not fit, or would exceed the time limit, is left
out.
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
STEPS = 6  # of each size: one measures latencies, one workspaces, the others are timed
SETTLING = 3  # most chosen sizes that are trained with before the choice is final

Rows = tuple[Sequence[Tensor], Sequence[Tensor]]  # inputs and targets of one batch, on the device


class Probe(NamedTuple):
    """Batch size that was trained with, and the median µs of its steps without measurements inside."""

    batch_size: int
    step_us: float

    @property
    def samples_per_s(self) -> float:
        return self.batch_size / self.step_us * 1e6


def probe_sizes(largest: int, parts: Iterable[float] = PARTS, least: int = 1) -> tuple[int, ...]:
    """Return the sizes to train with, ascending, without duplicates, none below `least`."""
    return tuple(sorted({max(least, round(part * largest)) for part in parts if round(part * largest) <= largest}))


class Probing:
    """Training of `model` on `device` with several batch sizes.

    `capture(size)` returns the captured step. `predictor` predicts with `traces` and `curves`, to which measurements
    are added. A context manager: `close` moves everything back into the model, unless the caller continues with
    `executor` (None before the first probe).
    """

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
        """Train with each size in turn, on the batches of `rows(size)`.

        Stops before a size that does not fit or needs more than the remaining time; the time limit does not apply to
        the first size. Afterwards the predictor corrects simulated iterations by the measured ones.
        """
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
        """Return the choice once the chosen size has been trained with, since its measurement may change the choice.

        Trains with at most SETTLING sizes, and starts none after `limit_s` seconds.
        """
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
        """Train STEPS steps of that size under its predicted plan.

        Raises BudgetError if the size does not fit, CaptureError, DeviceError or ExecutorError.
        """
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
        """Move all learned state back into the model.

        The optimizer's state has to be taken from `executor.state_dict()` before.
        """
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
