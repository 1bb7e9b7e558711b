"""Measurement of operators on a device, to train the latency models (TENSILE, section IV-A).

Captured iterations, ideally of one model at several batch and input sizes, are executed call by call on random numbers,
alone on the device and while other processes keep it busy. What was measured beside somebody else's work, but was to be
alone, is measured again, and replaced if the device is quiet then. Iterations are executed as a whole and in order,
because an operator whose operands are in the cache can be twice as fast. An operator is executed by itself, on operands
made for it, only if the whole iteration does not fit into the allowed memory or cannot be executed on random numbers.
"""

from __future__ import annotations

import contextlib
import math
import random
import time
from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from pg_tensile.errors import MeasurementError
from pg_tensile.execution.backends import device_load
from pg_tensile.execution.capture.captured import Captured, Persistent, Value, copy_into, empty_like_value
from pg_tensile.execution.measuring.busy_processes import BusyProcesses
from pg_tensile.execution.measuring.single_operators import Alone, executing, randomised
from pg_tensile.execution.runtime.device import Device
from pg_tensile.execution.runtime.functions import Functions, Values
from pg_tensile.execution.runtime.measure import Meter
from pg_tensile.planning.latency.features import Sample, caches_of
from pg_tensile.planning.latency.load import BUSY, LoadMeter
from pg_tensile.planning.plan.memory import footprint
from pg_tensile.planning.trace.trace import Kind, Trace

LOADS = (0, 1, 2)  # numbers of other busy processes
ROUNDS = 3  # over all graphs, because disturbances are temporary, and the machine's speed drifts
ITERATIONS = 1  # least number timed in each: those of one visit share what disturbs them
AGAIN = 2  # most further visits to a graph that was to be alone, but was not
_SETTLE_S = 0.25  # the load is measured over a pause of this length, in which this process is idle
_WARM_S, _TIMED_S = 0.1, 0.2  # least time of iterations before and during timing: processors slow down in a pause
_SHARE = 0.5  # of the remaining time, for each load but the last


class Progress(NamedTuple):
    """Progress of a calibration: `done` of `total` visits to graphs, `samples` so far, and what comes next."""

    done: int
    total: int
    samples: int
    what: str


class Calibration:
    """Calibration of a device. `run` performs it; `samples` holds the results, also if it is stopped early."""

    def __init__(
        self,
        captured: Sequence[Captured],
        device: Device,
        limit_bytes: int,
        limit_s: float = 150.0,
        loads: Sequence[int] = LOADS,
        seed: int = 0,
    ) -> None:
        """Prepare the calibration.

        `captured` are iterations captured for this type of device, `limit_bytes` limits the device memory, and
        `limit_s` the time from the start of `run`. `loads` are numbers of busy processes, each of which gets a part of
        the time. Raises MeasurementError if `captured` is empty, or has a step of several ranks.
        """
        if not captured:
            raise MeasurementError("there is nothing to calibrate with", hint="Give at least one captured iteration.")
        if any(graph.spec.ranks is not None for graph in captured):
            hint = "Capture the step without ranks."
            raise MeasurementError("a step that waits for other ranks cannot be measured by itself", hint=hint)
        self.skipped: set[str] = set()  # targets of calls that did not fit into memory, or failed, by themselves
        # One list of visits, (load, µs), for each index into `loads`, graph and call.
        self._visits: dict[tuple[int, int, _Call], list[tuple[float, float]]] = {}
        self._captured, self._device = captured, device
        self._calls = [_calls(graph.trace) for graph in captured]
        self._limit_bytes, self._limit_s = limit_bytes, limit_s
        self._loads = loads
        self._random = random.Random(seed)
        self._meter = LoadMeter(device_load(device.torch_device))

    def run(self) -> Generator[Progress, None, None]:
        """Measure, yielding before each graph and at the end. Visits to graphs that are measured again are not counted.

        Stops at the time limit, after the graph in progress. Closing the generator, or an exception in it, ends the
        busy processes.
        """
        start = time.monotonic()
        total = len(self._loads) * len(self._captured) * ROUNDS
        done = 0
        for index, load in enumerate(self._loads):
            remaining = self._limit_s - (time.monotonic() - start)
            share = remaining * (1.0 if index == len(self._loads) - 1 else _SHARE)
            deadline = time.monotonic() + share
            graphs = range(len(self._captured))
            order = [graph for _ in range(ROUNDS) for graph in self._random.sample(graphs, len(graphs))]
            what = f"{load} other processes" if load else "nothing else"
            if share <= 0:
                break
            with BusyProcesses(load, str(self._device.torch_device), torch.get_num_threads()):
                alone: set[int] = set()
                visits = order
                for attempt in range(1 if load else 1 + AGAIN):
                    for graph in visits:
                        if time.monotonic() < deadline:
                            yield Progress(done, total, len(self._visits), f"the device has {what} to do")
                            if self._measure(index, graph, deadline) < BUSY:
                                alone.add(graph)
                        done += not attempt
                    visits = [graph for graph in graphs if graph not in alone]
        yield Progress(total, total, len(self._visits), "")

    @property
    def samples(self) -> list[Sample]:
        """One sample for each call of each graph at each number of busy processes: the median of the visits.

        Without busy processes, only visits to a quiet device count, if there are any.
        """
        samples = []
        for (index, graph, call), visits in self._visits.items():
            if not self._loads[index]:
                visits = [visit for visit in visits if visit[0] < BUSY] or visits
            trace, operator = self._captured[graph].trace, self._calls[graph][call][0]
            work = int(trace.flops[operator]), int(trace.operator_bytes[operator])
            load, latency_us = map(float, np.median(visits, axis=0))
            samples.append(Sample(call.target, call.signature, *work, load, latency_us, call.reuse, call.before))
        return samples

    def _measure(self, busy: int, graph: int, deadline: float) -> float:
        """Visit a graph, and return the load that was measured before."""
        captured = self._captured[graph]
        self._meter.read()
        time.sleep(_SETTLE_S)
        load = self._meter.read()
        readings = None
        if footprint(captured.trace).device_peak_bytes <= self._limit_bytes:
            with contextlib.suppress(RuntimeError):  # random numbers do not suit the model, or memory is exhausted
                readings = self._execute(lambda: _Replay(captured, self._device), deadline)
        if readings is None:
            alone = Alone(captured, self._device, self._limit_bytes)
            readings = self._execute(lambda: alone, deadline)
            self.skipped |= alone.failed
        self._collect(busy, graph, readings, load)
        return load

    def _execute(self, make: Callable[[], _Replay | Alone], deadline: float) -> np.ndarray:
        """Return the latencies, float64[iterations, operators], µs."""
        readings: list[np.ndarray] = []
        with executing(self._device), self._device.iteration():
            replay = make()
            warm = time.monotonic() + _WARM_S
            replay.iteration(self._device.clock())
            while time.monotonic() < min(warm, deadline):
                replay.iteration(self._device.clock())
            timed = time.monotonic() + _TIMED_S
            while not readings or (
                (len(readings) < ITERATIONS or time.monotonic() < timed) and time.monotonic() < deadline
            ):
                readings.append(replay.iteration(self._device.clock()))
        return np.array(readings)

    def _collect(self, busy: int, graph: int, readings: np.ndarray, load: float) -> None:
        """Add the medians of `readings`, float64[iterations, operators], NaN where an operator was not executed."""
        for call, operators in self._calls[graph].items():
            measured = readings[:, operators]
            measured = measured[np.isfinite(measured) & (measured > 0)]
            if measured.size:
                self._visits.setdefault((busy, graph, call), []).append((load, float(np.median(measured))))


class _Call(NamedTuple):
    """Properties shared by the operators that are combined into one sample."""

    target: str
    signature: str
    reuse: float  # rounded to a factor of 2
    before: float  # rounded to a factor of 4


def _calls(trace: Trace) -> dict[_Call, list[int]]:
    """Return the operators of each call."""
    calls: dict[_Call, list[int]] = {}
    reuse, before = np.asarray(caches_of(trace))
    reuse, before = reuse.round(), 2 * (before / 2).round()
    for operator in range(1, trace.operator_count - 1):
        call = _Call(trace.target[operator], trace.signature[operator], float(reuse[operator]), float(before[operator]))
        calls.setdefault(call, []).append(operator)
    return calls


class _Replay:
    """Execution of a whole iteration in order.

    Weights have the usual magnitude, so that no number grows without bound or vanishes.
    """

    def __init__(self, captured: Captured, device: Device) -> None:
        self.failed: set[str] = set()
        self._captured = captured
        self._functions = Functions(captured, device)
        self._values: Values = [None] * self._functions.size
        self._feed = [_input(captured.values[slot], slot == captured.learning_rate) for slot in captured.given]
        for persistent in captured.persistents:
            self._values[persistent.slot] = _initial(persistent, captured)
            self._functions.make_persistent_views(persistent.tensor, self._values)
        self._dying = _dying_slots(captured, self._functions)

    def iteration(self, clock: Meter) -> np.ndarray:
        """Execute the iteration; return float64[operators], µs."""
        values, functions = self._values, self._functions
        values[functions.feed : functions.returned] = self._feed
        with clock:
            for operator, dying in enumerate(self._dying):
                function = functions.plain(operator)
                clock.start()
                function(values)
                clock.stop()
                for slot in dying:
                    values[slot] = None
        return clock.read()


def _dying_slots(captured: Captured, functions: Functions) -> list[list[int]]:
    """Return for each operator the slots of the tensors that it is the last to access."""
    trace = captured.trace
    dying: list[list[int]] = [[] for _ in range(trace.operator_count)]
    for tensor in np.flatnonzero(~trace.persistent).tolist():
        if trace.tensor_last[tensor] < trace.operator_count:
            dying[trace.tensor_last[tensor]].extend(functions.slots[tensor])
    dying[-1].extend(range(functions.returned, functions.size))
    return dying


# ---- numbers to compute with -----------------------------------------------------------------------------------------


def _input(value: Value, is_rate: bool) -> torch.Tensor:
    """Return an input; a learning rate is 0, so that nothing is learned and all iterations are alike."""
    tensor = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    return tensor.zero_() if is_rate else randomised(tensor)


def _initial(persistent: Persistent, captured: Captured) -> torch.Tensor:
    """Return an initial value as a network would have it."""
    tensor = empty_like_value(captured.values[persistent.slot])
    if persistent.constant is not None:
        copy_into(tensor, persistent.constant.detach())
    elif persistent.kind == Kind.OPTIMIZER_STATE:
        tensor.fill_(persistent.initial)
    elif tensor.dim() > 1 and tensor.is_floating_point():
        deviation = math.sqrt(2 * tensor.shape[0] / max(1, tensor.numel()))
        tensor.uniform_(-deviation * math.sqrt(3), deviation * math.sqrt(3))
    else:
        tensor.fill_(1 if tensor.is_floating_point() else 0)
    return tensor
