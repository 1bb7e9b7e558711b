"""An executor's side of the memory scheduling: obtains device memory and keeps within it (docs/internals.md, "Memory").

Phases. Before training: the job's graphs, with predicted latencies, are sent as TRACE; the process waits for its first
PLAN, then executes each operator once to measure its workspace, and requests another plan (TRACE with a higher
revision) if the first does not fit with them. During training, `tick` and `receive` are called between steps: a newer
PLAN is compiled by a thread and used from a step on; once a second an iteration is measured, and changes are sent as
LATENCY; zeros are counted once an epoch (compression.py). REFUSE ends the job, with the batch size that would fit.

A job without plans (policy none) claims its memory with a TRACE that has no graphs.
"""

from __future__ import annotations

import json
import math
import time
from collections import deque
from concurrent.futures import Future, wait
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import nn

from pg_tensile.errors import (
    BudgetError,
    CaptureError,
    DeviceError,
    MemoryRefusedError,
    OutOfDeviceMemoryError,
    PlanError,
    TensileError,
    TrainingError,
)
from pg_tensile.execution.data.preprocessing import Task
from pg_tensile.execution.measuring.workspaces import probe
from pg_tensile.execution.runtime.device import Device
from pg_tensile.execution.runtime.host import HostDevice
from pg_tensile.execution.training.graphs import Graphs, Sizes, capture_step, rows_of, state_bytes
from pg_tensile.execution.training.observer import StopTraining
from pg_tensile.execution.training.settings import Settings
from pg_tensile.execution.training.steps import Grant, PlannedSteps, needed_bytes
from pg_tensile.planning.device.profile import DeviceProfile
from pg_tensile.planning.latency import model_bytes, roofline
from pg_tensile.planning.latency.averages import LatencyAverages
from pg_tensile.planning.latency.load import LoadMeter
from pg_tensile.planning.latency.mlp import LatencyModels
from pg_tensile.planning.plan.memory import footprint
from pg_tensile.planning.plan.plan import Plan
from pg_tensile.planning.policies.building_blocks.keep import least_bytes
from pg_tensile.planning.policies.joint.planner import JobPlanner
from pg_tensile.planning.trace.trace import Trace
from pyworker.children.compression import CompressionClient
from pyworker.children.executor import Stopped
from pyworker.wire import Frame, FrameType

if TYPE_CHECKING:
    from pyworker.children.executor import Executor

MEASURE_INTERVAL_S = 1.0
MAX_REVISIONS = 8  # of the trace, after which a plan that cannot be used is an error
SEARCH_S = 20.0  # limit of the search for a batch size that fits
CONTEXT_BYTES = 512 << 20  # of a process on a CUDA device besides its tensors, until it can be measured


class Job(NamedTuple):
    """Job to be trained: everything that its graphs depend on."""

    model: nn.Module
    settings: Settings
    task: Task
    sizes: Sizes
    device: torch.device

    def with_batch_size(self, batch_size: int) -> Job:
        return self._replace(settings=replace(self.settings, batch_size=batch_size))


class MemoryClient:
    """One job's side of the memory scheduling; `load` reads how busy others keep the device."""

    def __init__(self, executor: Executor, job: Job, profile: DeviceProfile, load: LoadMeter) -> None:
        self.job = job
        self.profile = profile
        self.overhead_bytes = CONTEXT_BYTES if job.device.type == "cuda" else 0  # on the device, besides its tensors
        self._executor = executor
        self._load = load
        self._described = False  # whether the tables of its trace have been sent
        self._device: Device | None = None
        self.choosing = False  # while batch sizes are tried: tick measures nothing, a refusal suggests no batch size
        self._revision = 0
        self._generation = 0  # of the newest plan that has come
        self._newest: Grant | None = None
        self._rows: dict[str, int] = {}  # of a batch, by graph
        self._sent: dict[str, Trace] = {}  # in the last TRACE, by graph
        self._steps: PlannedSteps | None = None
        self._taking: deque[tuple[int, Future[None]]] = deque()  # plans that are being compiled
        self._compression = CompressionClient(executor, job.device, job.settings.compression)
        self._averages: LatencyAverages | None = None
        self._predicted = self._measured = np.zeros(0)  # µs, of the training step's operators
        self._measure_at = 0.0
        self._utilisation: float | None = None

    # ---- before training ----

    def claim(self) -> None:
        """Request the memory of a job without plans, and wait until it is granted."""
        needed = state_bytes(self.job.model, self.job.settings)
        sizes = {"persistent_bytes": needed, "vanilla_bytes": None, "operator": None, "fingerprint": None}
        self._send_trace(sizes | {"least_bytes": self._executor._spec["memory_budget"] or needed}, {})
        self._await_grant()

    def admit(self, graphs: Graphs) -> PlannedSteps:
        """Have the graphs planned, and return their steps under the first plan that they fit into."""
        self._rows = {name: rows_of(graph) for name, graph in graphs.named().items()}
        graphs = self._with_latencies(graphs)
        self._announce(graphs.traces())
        grant = self._await_grant()
        device = self._make_device(grant)
        self._compression.learn_codecs(self.listen)
        graphs = self._with_workspaces(graphs, device, grant)
        if self._newest is not None and self._newest is not grant:  # a newer one came meanwhile
            grant, device = self._newest, self._make_device(self._newest)
        while (steps := self._try(graphs, device, grant)) is None:
            self._announce(graphs.traces())
            grant = self._await_grant()
            device = self._make_device(grant)
        self._steps = steps
        self._compression.begin(steps)
        weight = self._executor._spec["latency_weight"]
        self._predicted = graphs.train.trace.latency_us
        self._averages = LatencyAverages(self._predicted, weight)
        return steps

    def leave(self) -> dict[int, Trace]:
        """End what `admit` has begun, so that other graphs may be admitted: the model has its weights again.

        Returns the traces with what was measured, by rows of a batch.
        """
        steps = self._steps
        assert steps is not None
        wait([future for _, future in self._taking])
        self._settle()
        traces = steps.traces()
        steps.close()
        self._steps = self._averages = None
        self._described = False
        return {self._rows[name]: trace for name, trace in traces.items()}

    def sent(self) -> dict[int, Trace]:
        """Return the training steps' traces in the last TRACE, by rows of a batch, with workspaces known then."""
        return {self._rows[name]: trace for name, trace in self._sent.items() if name.startswith("train")}

    def _try(self, graphs: Graphs, device: Device, grant: Grant) -> PlannedSteps | None:
        """Return steps under the plan, or None if it does not fit with known workspaces or cannot be used.

        From MAX_REVISIONS on, a plan that cannot be used is raised as an error.
        """
        if needed_bytes(graphs, grant.plan) > grant.granted_bytes:
            return None
        try:
            return PlannedSteps(self.job.model, graphs, device, grant, self.renegotiate)
        except (PlanError, BudgetError, DeviceError) as error:
            self._reject(grant.plan.generation, error)
            if self._revision >= MAX_REVISIONS:
                raise
            return None

    def _with_latencies(self, graphs: Graphs) -> Graphs:
        """Return the graphs with latencies predicted for the load that the device has now."""
        load = self._load.read()
        return graphs.with_traces({name: self.predicted(trace, load) for name, trace in graphs.traces().items()})

    def predicted(self, trace: Trace, load: float = 0.0) -> Trace:
        """Return the trace with latencies predicted by the device's models or, without models, by the roofline.

        `load` is that of the device by others.
        """
        models = self._latency_models()
        if models is None:
            return trace.with_latencies(roofline.estimate(trace, self.profile))
        return trace.with_latencies(models.predict(trace, self.profile, load))

    def _latency_models(self) -> LatencyModels | None:
        data = self._executor._latency_models.get(str(self.job.device))
        return None if data is None else model_bytes.decode(bytes(data))

    def _with_workspaces(self, graphs: Graphs, device: Device, grant: Grant) -> Graphs:
        traces = {}
        for name, graph in graphs.named().items():
            workspace = probe(graph, device, grant.granted_bytes)
            traces[name] = graph.trace.with_latencies(graph.trace.latency_us, workspace)
            self.listen()
        return graphs.with_traces(traces)

    def listen(self, phase: str = "waiting") -> None:
        """Send a sign of life during lengthy work before training, and take a newer plan if one came.

        Raises the error that a REFUSE frame means.
        """
        frame = self._executor.poll_early(phase, {FrameType.PLAN, FrameType.REFUSE})
        if frame is not None:
            self._heed(frame)

    def _make_device(self, grant: Grant) -> Device:
        """Return a device with the granted bytes, which replaces the one before."""
        if self._device is not None:
            self._device.close()
        index = self.job.device.index or 0
        if self.job.device.type != "cuda":
            self._device = HostDevice(self.profile, grant.granted_bytes)
            return self._device
        from pg_tensile.execution.runtime.cuda import CudaDevice

        device = self._device = CudaDevice(index, grant.granted_bytes, self.profile)
        self.overhead_bytes = device.overhead_bytes() + device.library_bytes
        return device

    # ---- frames up ----

    def _announce(self, traces: dict[str, Trace]) -> None:
        """Send the graphs as TRACE, to be planned."""
        least = {name: least_bytes(trace) for name, trace in traces.items()}
        hungriest = traces[max(least, key=lambda name: least[name])]
        first = traces["train"]
        header = {
            "persistent_bytes": int(first.tensor_bytes[first.persistent].sum()),
            "vanilla_bytes": max(footprint(trace).device_peak_bytes for trace in traces.values()),
            "least_bytes": max(least.values()),
            "operator": JobPlanner(hungriest, self.profile).largest_operator(),
            "fingerprint": first.fingerprint,
        }
        self._send_trace(header, traces)

    def _send_trace(self, header: dict[str, Any], traces: dict[str, Trace]) -> None:
        self._revision += 1
        header |= {
            "device": str(self.job.device),
            "profile": asdict(self.profile),
            "revision": self._revision,
            "policy": self._executor._spec["policy"] or "none",
            "overhead_bytes": self.overhead_bytes,
            "parameters": sum(parameter.numel() for parameter in self.job.model.parameters()),
            "graphs": [{"name": name, "rows": self._rows[name]} for name in traces],
        }
        buffers = [trace.to_bytes() for trace in traces.values()]
        if traces and not self._described:
            buffers.append(json.dumps(_tables(traces["train"])).encode())
            self._described = True
        self._sent = traces
        self._executor._send(FrameType.TRACE, header, buffers)
        self._executor._send(FrameType.PROGRESS, {"phase": "waiting"})

    def _reject(self, generation: int, error: TensileError) -> None:
        """Report that a plan cannot be used."""
        self._executor._send(FrameType.PROGRESS, {"plan_rejected": {"generation": generation, "reason": error.message}})

    def progress(self) -> dict[str, Any]:
        """Return the fields of PROGRESS about memory, besides bytes."""
        generation = self._generation if self._steps is None else self._steps.generation
        return {"plan_generation": generation, "utilisation": self._utilisation}

    # ---- frames down ----

    def _await_grant(self) -> Grant:
        """Return the next plan's grant. Raises Stopped, and the error that a REFUSE frame means."""
        while True:
            frame = self._executor.wait_for_frame("waiting", {FrameType.PLAN, FrameType.REFUSE})
            grant = self._heed(frame)
            if grant is not None:
                return grant

    def _heed(self, frame: Frame) -> Grant | None:
        """Return a PLAN frame's grant, or None if it is not new. Raises the error that a REFUSE frame means."""
        if frame.type == FrameType.REFUSE:
            raise self._refusal(frame.header)
        return self._grant(frame)

    def _grant(self, frame: Frame) -> Grant | None:
        """Return the grant of a PLAN frame, or None if it is older than the newest one, or not a plan."""
        generation = frame.header["generation"]
        if generation <= self._generation:
            return None
        self._generation = generation
        try:
            plan = Plan.from_rows(bytes(frame.buffers[0]), generation, bytes(frame.buffers[1]))
        except PlanError as error:
            self._reject(generation, error)
            return None
        self._newest = Grant(plan, frame.header["granted_bytes"], frame.header["link_share"])
        return self._newest

    def receive(self, frame: Frame) -> None:
        """Process a frame that came between two steps; a plan is compiled by a thread during training."""
        grant = self._heed(frame)
        if grant is not None and self._steps is not None:
            self._taking.append((grant.plan.generation, self._steps.offer(grant)))

    def renegotiate(self, shortage: OutOfDeviceMemoryError) -> None:
        """Replace a plan that does not fit with the workspaces that are known now by one made with them.

        Raises `shortage` if they were sent already, StopTraining, and the error that a REFUSE frame means.
        """
        steps = self._steps
        assert steps is not None
        traces = steps.traces()
        if not any((trace.workspace_bytes > self._sent[name].workspace_bytes).any() for name, trace in traces.items()):
            raise shortage
        self._announce(traces)
        while True:
            try:
                grant = self._await_grant()
            except Stopped as stop:
                raise StopTraining(stop.checkpoint) from None
            if footprint(traces["train"], grant.plan).device_peak_bytes > grant.granted_bytes:
                continue  # made before the scheduler had these workspaces: another one will come
            self._taking.append((grant.plan.generation, steps.offer(grant)))
            wait([future for _, future in self._taking])
            if self._taking[-1][1].exception() is None:
                self._settle()
                return
            self._settle()

    def _settle(self) -> None:
        """Process the plans whose compilation has ended.

        One that cannot be used is rejected, and the plan before stays in use; with any other, zeros are counted anew.
        """
        while self._taking and self._taking[0][1].done():
            generation, future = self._taking.popleft()
            error = future.exception()
            if isinstance(error, TensileError):
                self._reject(generation, error)
            elif error is not None:
                raise error
            else:
                self._compression.count()

    # ---- while it trains ----

    def tick(self) -> None:
        """Do the periodic work between two steps; costs nothing most of the time."""
        if self._taking and self._taking[0][1].done():
            self._settle()
        self._compression.tick()
        now = time.monotonic()
        if now >= self._measure_at and not self.choosing:
            self._utilisation = round(self._load.read(), 3) if self._measure_at else None
            self._measure_at = now + MEASURE_INTERVAL_S
            if self._steps is not None:
                self.report_latency()
                self._steps.measure()

    def epoch_ended(self) -> None:
        self.report_latency()
        self._compression.count()

    def report_latency(self) -> None:
        """Add what was measured since the last report to the averages, and send them as LATENCY."""
        steps, averages = self._steps, self._averages
        if steps is None or averages is None:
            return
        measured = steps.measurement().latency_us
        if not measured.any() or np.array_equal(measured, self._measured):
            return
        self._measured = measured
        averages.add(measured)
        header = {"samples": averages.measurements, "total_us": averages.total_us, "load": self._utilisation}
        columns = (self._predicted, np.where(measured > 0, measured, np.nan), averages.latency_us)
        buffers = [column.astype("<f4").tobytes() for column in columns]
        self._executor._send(FrameType.LATENCY, header, buffers)

    # ---- refused ----

    def _refusal(self, refusal: dict[str, Any]) -> MemoryRefusedError:
        """Return the error that ends the job, with the batch size that would fit as its hint."""
        least, budget = refusal["least_bytes"], refusal["budget_bytes"]
        error = MemoryRefusedError(least, budget, refusal["operator"])
        if self.choosing:
            error.hint = "Give a batch_size, or use a larger memory_budget."
            return error
        if not self._sent:
            error.hint = "Use a larger memory_budget, or a policy that saves memory: policy => 'joint'."
            return error
        known = max(least_bytes(trace) for trace in self._sent.values())
        fitting = self._largest_batch(budget, least / known)
        if fitting:
            error.hint = f"Use batch_size => {fitting}, or a larger memory_budget."
        else:
            error.hint = "No batch size would fit: use a smaller model, or a larger memory_budget or device_memory."
        return error

    def _largest_batch(self, budget_bytes: int, factor: float) -> int:
        """Return the largest batch size found in SEARCH_S whose least memory, times `factor`, is within the budget.

        0 means that none was found. Halves until one fits, then bisects between that and the last one that did not.
        """
        deadline = time.monotonic() + SEARCH_S
        fits, exceeds = 0, self.job.settings.batch_size
        while exceeds - fits > 1 and time.monotonic() < deadline:
            self._executor.poll_early("waiting", {FrameType.PLAN, FrameType.REFUSE})  # it is too late for either
            size = exceeds // 2 if not fits else (fits + exceeds) // 2
            try:
                least = factor * least_bytes(capture_step(*self.job.with_batch_size(size)).trace)
            except (CaptureError, TrainingError):  # such as batch normalisation of one row
                least = math.inf
            if least <= budget_bytes:
                fits = size
            else:
                exceeds = size
        return fits


def _tables(trace: Trace) -> dict[str, Any]:
    """Return the trace as rows of the catalogue's tables operators and tensors, for people."""
    start = trace.access_start.tolist()
    operators = [
        {
            "operator": number,
            "target": operator.target,
            "phase": operator.phase.name.lower(),
            "module": operator.module,
            "source": operator.source,
            "signature": operator.signature,
            "flops": operator.flops,
            "bytes": operator.bytes,
            "random": operator.random,
            "tensors": trace.access_tensor[start[number] : start[number + 1]].tolist(),
        }
        for number, operator in enumerate(trace.operators)
    ]
    tensors = [
        {
            "tensor": number,
            "name": tensor.name,
            "kind": tensor.kind.name.lower(),
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "bytes": tensor.bytes,
            "first_operator": int(trace.tensor_first[number]),
            "last_operator": int(trace.tensor_last[number]),
        }
        for number, tensor in enumerate(trace.tensors)
    ]
    return {"operators": operators, "tensors": tensors}
