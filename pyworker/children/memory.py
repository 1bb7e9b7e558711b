"""A trainer's side of the memory scheduling: obtains device memory and keeps within it (docs/internals.md, "Memory").

Phases. Before training: the job's graphs, with predicted latencies, are sent as TRACE; the process waits for its first
PLAN, then executes each operator once to measure its workspace, and requests another plan (TRACE with a higher
revision) if the first does not fit with them. During training, `tick` and `receive` are called between steps: a newer
PLAN is compiled by a thread and used from a step on; once a second an iteration is measured (latency_reports.py); zeros
are counted once an epoch (compression.py). REFUSE ends the job, with the batch size that would fit (refusal.py).

A job without plans (policy none) claims its memory with a TRACE that has no graphs.
"""

from __future__ import annotations

import json
from collections import deque
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager
from dataclasses import asdict
from functools import partial
from typing import Any

from pg_tensile.errors import (
    BudgetError,
    DeviceError,
    MemoryRefusedError,
    OutOfDeviceMemoryError,
    PlanError,
    TensileError,
)
from pg_tensile.execution.measuring.workspaces import probe
from pg_tensile.execution.runtime.device import Device
from pg_tensile.execution.runtime.memory_flow import GroupSocket, claimed
from pg_tensile.execution.runtime.open_device import open_device
from pg_tensile.execution.training.graphs import Graphs, lasting_bytes, rows_of, state_bytes
from pg_tensile.execution.training.observer import StopTraining
from pg_tensile.execution.training.steps import DeviceGraphs, Grant, PlannedSteps, needed_bytes
from pg_tensile.planning.building_blocks.keep import least_bytes
from pg_tensile.planning.device.profile import DeviceProfile
from pg_tensile.planning.latency.load import LoadMeter
from pg_tensile.planning.memory_flow.groups import bytes_to_groups
from pg_tensile.planning.plan.allocator import plan_bytes
from pg_tensile.planning.plan.plan import Plan
from pg_tensile.planning.trace.trace import Trace
from pyworker.child import group_socket
from pyworker.children.channel import Channel, Stopped
from pyworker.children.compression import CompressionClient
from pyworker.children.job import Job, with_predicted_latencies
from pyworker.children.job_budget import claimed_bytes, limiting
from pyworker.children.latency_reports import LatencyReports
from pyworker.children.overhead import Overhead
from pyworker.children.refusal import refusal_error, refusal_while_choosing
from pyworker.children.trace_tables import trace_tables
from pyworker.wire import Frame, FrameType

MAX_REVISIONS = 8  # of the trace, after which a plan that cannot be used is an error


class MemoryClient:
    """One job's side of the memory scheduling.

    `load` reads how busy others keep the device; `name` is the device's for the scheduler, by default PyTorch's.
    `revision` is that of the last TRACE that the process has sent before."""

    def __init__(
        self,
        channel: Channel,
        job: Job,
        profile: DeviceProfile,
        load: LoadMeter,
        name: str | None = None,
        revision: int = 0,
    ) -> None:
        self.job = job
        self.profile = profile
        self.overhead = Overhead(channel, job.device, profile)
        self._name = name or str(job.device)
        self._channel = channel
        self._load = load
        self._described = False  # whether the tables of its trace have been sent
        self._device: Device | None = None
        self.choosing = False  # while batch sizes are tried: tick measures nothing, a refusal suggests no batch size
        self._revision = revision
        self._last_revision = revision + MAX_REVISIONS
        self._claimed_bytes = 0  # by a job without plans
        self._generation = 0  # of the newest plan that has come
        self._newest: Grant | None = None
        self._rows: dict[str, int] = {}  # of a batch, by graph
        self._sent: dict[str, Trace] = {}  # in the last TRACE, by graph
        self._steps: PlannedSteps | None = None
        self._compiling: deque[tuple[int, Future[None]]] = deque()  # plans that are being compiled
        self._predicted_load = 0.0  # of the device by others, that latencies were predicted for
        channel.load = load  # reported while the job waits for memory
        connection = group_socket()
        self._requests = None if connection is None else GroupSocket(connection, self._give_sign_of_life)
        self._compression = CompressionClient(channel, job.device, job.settings.compression)
        self._latencies = LatencyReports(channel, load)

    # ---- before training ----

    def claim(self) -> None:
        """Request the memory of a job without plans, and wait until it is granted.

        That is its `memory_budget` or, without one, what the model's state takes: until the first step, nothing else
        is known."""
        self._claim(claimed_bytes(self._channel.spec) or state_bytes(self.job.model, self.job.settings))
        self.overhead.begin()

    def claim_taken(self, taken_bytes: int) -> None:
        """Request the memory that the first step has taken, beyond what stays from step to step, if that is more.

        Raises StopTraining, and the error that a REFUSE frame means."""
        needed = lasting_bytes(self.job.model, self.job.settings) + taken_bytes
        self.overhead.measure(None)
        if needed <= self._claimed_bytes:
            self.overhead.report()
            return
        try:
            self._claim(needed)
        except Stopped as stop:
            raise StopTraining(stop.checkpoint) from None

    def _claim(self, needed: int) -> None:
        self._claimed_bytes = needed
        state = state_bytes(self.job.model, self.job.settings)
        sizes = {"persistent_bytes": state, "vanilla_bytes": None, "operator": None, "fingerprint": None}
        self._send_trace(sizes | {"load": None, "least_bytes": needed}, {})
        self._await_grant()

    def admit(self, graphs: Graphs) -> PlannedSteps:
        """Have the graphs planned, and return their steps under the first plan that they fit into."""
        self._rows = {name: rows_of(graph) for name, graph in graphs.named().items()}
        graphs = self._with_latencies(graphs)
        self._announce(graphs.traces(), self._predicted_load)
        grant = self._await_grant()
        device = self._make_device(grant)
        self._compression.learn_codecs(self.listen)
        with self._claimed(grant):
            graphs = self._with_workspaces(graphs, device, grant)
        probed_bytes = grant.granted_bytes
        # By now libraries have loaded the code of all operators.
        grown = self._measure_overhead(device)
        if self._newest is not None and self._newest is not grant:  # a newer one came meanwhile
            grant, device = self._newest, self._make_device(self._newest)
        while grown or (steps := self._begin_steps(graphs, device, grant)) is None:
            grown = False
            self._announce(graphs.traces(), self._predicted_load)
            grant = self._await_grant()
            device = self._make_device(grant)
            if grant.granted_bytes > probed_bytes:  # then operators may fit that did not
                probed_bytes = grant.granted_bytes
                with self._claimed(grant):
                    graphs = self._with_workspaces(graphs, device, grant)
        self._steps = steps
        self.overhead.report()
        self._compression.begin(steps)
        self._latencies.begin(steps, graphs.train.trace.latency_us, self._predicted_load)
        return steps

    def leave(self) -> dict[int, Trace]:
        """End what `admit` has begun, so that other graphs may be admitted: the model has its weights again.

        Returns the traces with what was measured, by rows of a batch.
        """
        steps = self._steps
        assert steps is not None
        wait([future for _, future in self._compiling])
        self._finish_compilations()
        traces = steps.traces()
        steps.close()
        self._steps = None
        self._latencies.end()
        self._described = False
        return {self._rows[name]: trace for name, trace in traces.items()}

    def device_graphs(self) -> DeviceGraphs:
        """Return how the iterations of the last steps were captured."""
        return DeviceGraphs(0, "the job has no plan") if self._steps is None else self._steps.device_graphs()

    def sent(self) -> dict[int, Trace]:
        """Return the training steps' traces in the last TRACE, by rows of a batch, with workspaces known then."""
        return {self._rows[name]: trace for name, trace in self._sent.items() if name.startswith("train")}

    def _begin_steps(self, graphs: Graphs, device: Device, grant: Grant) -> PlannedSteps | None:
        """Return steps under the plan, or None if it does not fit with known workspaces or cannot be used.

        From MAX_REVISIONS on, a plan that cannot be used is raised as an error.
        """
        try:
            if needed_bytes(graphs, grant.plan) > grant.granted_bytes:
                return None
            captures = self.job.settings.device_graphs
            with self._claimed(grant):
                return PlannedSteps(self.job.model, graphs, device, grant, self.renegotiate, captures, self._requests)
        except (PlanError, BudgetError, DeviceError) as error:
            self._reject(grant.plan.generation, error)
            if self._revision >= self._last_revision:
                raise
            return None

    def _with_latencies(self, graphs: Graphs) -> Graphs:
        """Return the graphs with latencies predicted for the load that the device has now."""
        self._predicted_load = load = self._load.read()
        return graphs.with_traces({name: self.predicted(trace, load) for name, trace in graphs.traces().items()})

    def predicted(self, trace: Trace, load: float = 0.0) -> Trace:
        """Return the trace with predicted latencies; `load` is that of the device by others."""
        models = self._channel.latency_models.get(str(self.job.device))
        return with_predicted_latencies(trace, self.profile, models, load)

    def _with_workspaces(self, graphs: Graphs, device: Device, grant: Grant) -> Graphs:
        traces = {}
        for name, graph in graphs.named().items():
            traces[name] = probe(graph, device, grant.granted_bytes).trace
            self.listen()
        return graphs.with_traces(traces)

    def listen(self, phase: str = "waiting") -> None:
        """Send a sign of life during lengthy work before training, and take a newer plan if one came.

        Raises the error that a REFUSE frame means.
        """
        frame = self._channel.poll_early(phase, {FrameType.PLAN, FrameType.REFUSE})
        if frame is not None:
            self._handle(frame)

    def _claimed(self, grant: Grant) -> AbstractContextManager[None]:
        """Return a context in which the granted memory is the job's, for work that is not an iteration."""
        return claimed(self._requests, grant.plan.generation, bool(grant.groups))

    def _make_device(self, grant: Grant) -> Device:
        """Return a device with the granted bytes, which replaces the one before."""
        if self._device is not None:
            self._device.close()
        self._device = open_device(self.job.device, self.profile, grant.granted_bytes)
        self._measure_overhead(self._device)
        return self._device

    def _measure_overhead(self, device: Device) -> bool:
        """Measure the device memory besides the job's tensors, if the driver tells it; return whether it has grown."""
        return self.overhead.measure(device)

    # ---- frames up ----

    def _announce(self, traces: dict[str, Trace], load: float) -> None:
        """Send the graphs as TRACE, to be planned; their latencies are those under `load`."""
        least = {name: least_bytes(trace) for name, trace in traces.items()}
        hungriest = traces[max(least, key=lambda name: least[name])]
        first = traces["train"]
        header = {
            "persistent_bytes": int(first.tensor_bytes[first.persistent].sum()),
            "vanilla_bytes": max(plan_bytes(trace) for trace in traces.values()),
            "least_bytes": max(least.values()),
            "operator": hungriest.operator_label(hungriest.largest_operator),
            "fingerprint": first.fingerprint,
            "load": round(load, 3),
        }
        self._send_trace(header, traces)

    def _send_trace(self, header: dict[str, Any], traces: dict[str, Trace]) -> None:
        self._revision += 1
        header |= {
            "device": self._name,
            "profile": asdict(self.profile),
            "revision": self._revision,
            "policy": self._channel.spec["policy"] or "none",
            **self.overhead.header(),
            "parameters": sum(parameter.numel() for parameter in self.job.model.parameters()),
            "graphs": [{"name": name, "rows": self._rows[name]} for name in traces],
        }
        buffers = [trace.to_bytes() for trace in traces.values()]
        if traces and not self._described:
            buffers.append(json.dumps(trace_tables(traces["train"])).encode())
            self._described = True
        self._sent = traces
        self._channel.send(FrameType.TRACE, header, buffers)
        self._channel.send(FrameType.PROGRESS, {"phase": "waiting"})

    def _reject(self, generation: int, error: TensileError) -> None:
        """Report that a plan cannot be used."""
        self._channel.send(FrameType.PROGRESS, {"plan_rejected": {"generation": generation, "reason": error.message}})

    def _give_sign_of_life(self) -> None:
        """Show the supervisor that the process waits for memory, and does not hang."""
        self._channel.send(FrameType.PROGRESS, {})

    def progress(self, step_s: float | None) -> dict[str, Any]:
        """Return the fields of PROGRESS about memory, besides bytes; `step_s`: mean duration of the last steps."""
        if step_s is not None:
            self._latencies.add_step(step_s)
        generation = self._generation if self._steps is None else self._steps.generation
        return {"plan_generation": generation, "utilisation": self._latencies.utilisation}

    # ---- frames down ----

    def _await_grant(self) -> Grant:
        """Return the next plan's grant. Raises Stopped, and the error that a REFUSE frame means."""
        while True:
            frame = self._channel.wait_for_frame("waiting", {FrameType.PLAN, FrameType.REFUSE})
            grant = self._handle(frame)
            if grant is not None:
                return grant

    def _handle(self, frame: Frame) -> Grant | None:
        """Return a PLAN frame's grant, or None if it is not new. Raises the error that a REFUSE frame means."""
        if frame.type == FrameType.REFUSE:
            raise self._refusal(frame.header)
        return self._grant(frame)

    def _refusal(self, refusal: dict[str, Any]) -> MemoryRefusedError:
        """Return the error that ends the job, or the choice of a batch size."""
        limit = limiting(self._channel.spec)
        if self.choosing:
            return refusal_while_choosing(refusal, limit)
        ignored = {FrameType.PLAN, FrameType.REFUSE}  # it is too late for either
        alive = partial(self._channel.poll_early, "waiting", ignored)
        return refusal_error(refusal, self.job, self._sent.values(), alive, limit)

    def _grant(self, frame: Frame) -> Grant | None:
        """Return the grant of a PLAN frame, or None if it is older than the newest one, or not a plan."""
        generation = frame.header["generation"]
        if generation <= self._generation:
            return None
        self._generation = generation
        try:
            rows, order, groups = (bytes(buffer) for buffer in frame.buffers)
            plan = Plan.from_rows(rows, generation, order)
            grant = Grant(plan, frame.header["granted_bytes"], frame.header["link_share"], bytes_to_groups(groups))
        except PlanError as error:
            self._reject(generation, error)
            return None
        self._newest = grant
        return grant

    def receive(self, frame: Frame) -> None:
        """Process a frame that came between two steps; a plan is compiled by a thread during training."""
        grant = self._handle(frame)
        if grant is not None and self._steps is not None:
            self._compiling.append((grant.plan.generation, self._steps.offer(grant)))

    def renegotiate(self, shortage: OutOfDeviceMemoryError) -> None:
        """Replace a plan that does not fit with the workspaces and sizes that are known now by one made with them.

        Raises `shortage` if they were sent already, StopTraining, and the error that a REFUSE frame means.
        """
        steps = self._steps
        assert steps is not None
        traces = steps.traces()
        if not any(_is_larger(trace, self._sent[name]) for name, trace in traces.items()):
            raise shortage
        self._announce(traces, self._latencies.average_load)
        while True:
            try:
                grant = self._await_grant()
            except Stopped as stop:
                raise StopTraining(stop.checkpoint) from None
            if plan_bytes(traces["train"], grant.plan) > grant.granted_bytes:
                continue  # made before the scheduler had these workspaces: another one will come
            self._compiling.append((grant.plan.generation, steps.offer(grant)))
            wait([future for _, future in self._compiling])
            if self._compiling[-1][1].exception() is None:
                self._finish_compilations()
                return
            self._finish_compilations()

    def _finish_compilations(self) -> None:
        """Process the plans whose compilation has ended.

        One that cannot be used is rejected, and the plan before stays in use; with any other, zeros are counted again.
        """
        while self._compiling and self._compiling[0][1].done():
            generation, future = self._compiling.popleft()
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
        if self._compiling and self._compiling[0][1].done():
            self._finish_compilations()
        self.overhead.tick(self._device)
        self._compression.tick()
        if not self.choosing:
            self._latencies.tick()

    def epoch_ended(self) -> None:
        self.overhead.epoch_ended(self._device)
        self._latencies.report()
        self._compression.count()


def _is_larger(trace: Trace, before: Trace) -> bool:
    """Return whether an operator or a tensor takes more memory than in the same trace before."""
    return bool(
        (trace.workspace_bytes > before.workspace_bytes).any() or (trace.tensor_bytes > before.tensor_bytes).any()
    )
