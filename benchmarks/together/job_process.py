"""Training jobs in processes of their own, measured beside each other, and the commands that control them.

A command is a name and its arguments; the answer is a result, or one line that explains the failure, so a job that
fails at one command can execute the next. Only a turn needs more messages, because no job may stop before all have
taken the steps that count: each job reports that it has taken them and continues until it is told to stop; then it
answers with its `Turn`. A job that fails before its report has answered, and is sent nothing; one that fails later
waits until it is told to stop. A process that dies ends the measurement (MeasurementError).
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from multiprocessing import forkserver, get_context
from multiprocessing.connection import Connection
from types import MappingProxyType, TracebackType
from typing import Any, NamedTuple

import torch

from pg_tensile.errors import MeasurementError
from pg_tensile.execution.runtime.device import Device
from pg_tensile.execution.runtime.memory_flow import GroupSocket
from pg_tensile.planning.device.profile import DeviceProfile
from pg_tensile.planning.memory_flow.groups import Group
from pg_tensile.planning.plan.plan import Plan
from pg_tensile.planning.trace.trace import Floats, Int64s, Trace
from pg_tensile.tools.bench.contenders import EagerStepper, PlanStepper, Stepper, Turn, take_turn
from pg_tensile.tools.bench.measured import MeasuredBench
from pg_tensile.tools.bench.options import BenchOptions, PolicyChoice
from pg_tensile.tools.bench.peers import gradient_difference, measure_peaks, start_peer
from pg_tensile.tools.bench.progress import Progress
from pg_tensile.tools.bench.report import message_of
from pg_tensile.tools.bench.run import default_threads
from pg_tensile.tools.bench.workload import Batch, seed_everything

PATIENCE_S = 5.0  # time for a process to end


class Measured(NamedTuple):
    """Measurements that a job is planned with. `step_ms`: of a vanilla step alone on the device."""

    vanilla: Trace
    early: Trace
    step_ms: float
    profile: DeviceProfile


class Inspection(NamedTuple):
    """Results of a peer's step alone on the device: peaks in bytes, and the distance of its gradients from eager
    PyTorch's (peers.gradient_difference)."""

    peak_bytes: int
    device_peak_bytes: int
    gradient_difference: float


class Answer(NamedTuple):
    """Answer to a command. `result`: of a command that failed, one line that explains the failure."""

    good: bool
    result: Any


class JobError(MeasurementError):
    """A job could not execute a command. All processes can be given the next one."""


# ---- a job's process ------------------------------------------------------------------------------------------------


def serve(connection: Connection, options: BenchOptions) -> None:
    """Execute commands in a job's process until the connection is closed."""
    torch.set_num_threads(options.threads or default_threads(options.device.kind))
    job = _Job(connection, options)
    while True:
        try:
            name, arguments = connection.recv()
        except EOFError:
            return
        try:
            answer = Answer(True, getattr(job, name)(*arguments))
        except Exception as error:
            answer = Answer(False, message_of(error))
        connection.send(answer)


class _Silent(Progress):
    def say(self, text: str) -> None: ...


class _Job:
    """A job in its process; its methods are the commands.

    `capture` comes first, then `measure` or `take_over`, then `inspect`, then `share_link`.
    """

    def __init__(self, connection: Connection, options: BenchOptions) -> None:
        self._connection, self._options = connection, options
        self._held = contextlib.ExitStack()  # the stepper and its device
        self._stepper: Stepper | None = None
        self._share = 1.0

    def capture(self) -> tuple[str, str]:
        """Capture the step and return the fingerprints of the traces of vanilla and of early updates."""
        self._session = MeasuredBench(self._options, _Silent())
        return self._session.workload.vanilla.trace.fingerprint, self._session.workload.early.trace.fingerprint

    def measure(self) -> tuple[bytes, bytes, float, DeviceProfile]:
        """Measure the step alone on the device and return the fields of `Measured`, the traces as bytes."""
        step_ms = self._session.calibrate()
        if step_ms is None:
            raise MeasurementError("the device has not enough memory for a step without a plan")
        workload = self._session.workload
        return workload.vanilla.trace.to_bytes(), workload.early.trace.to_bytes(), step_ms, self._session.profile

    def take_over(self, vanilla: tuple[Floats, Int64s], early: tuple[Floats, Int64s]) -> None:
        """Adopt the latencies (µs) and workspaces (bytes) of the operators from the process of an identical job."""
        workload = self._session.workload
        self._session.workload = replace(
            workload,
            vanilla=replace(workload.vanilla, trace=workload.vanilla.trace.with_latencies(*vanilla)),
            early=replace(workload.early, trace=workload.early.trace.with_latencies(*early)),
        )

    def share_link(self, profile: DeviceProfile, share: float) -> None:
        """Set the device profile from here on, and this job's share of its link."""
        self._session.profile, self._share = profile, share

    def inspect(self, choice: PolicyChoice) -> Inspection:
        """Measure a peer's peaks in its second step, and compare the gradients of its first with eager PyTorch's."""
        (batch,) = self._session.workload.batches(1)
        try:
            device = self._start(choice, None)
            stepper = self._stepper
            assert isinstance(stepper, EagerStepper)
            gradients = self._first_step(stepper)
            peaks = measure_peaks(stepper, batch, device)
        finally:
            self.drop()
        eager = EagerStepper(self._session.workload, self._session.torch_device)
        try:
            return Inspection(*peaks, gradient_difference(gradients, self._first_step(eager)))
        finally:
            eager.close()

    def load(
        self,
        choice: PolicyChoice,
        plan: bytes | None,
        settle: bool,
        groups: Sequence[Group] = (),
        granting: socket.socket | None = None,
    ) -> None:
        """Prepare a turn.

        `plan`: None for a peer; `settle`: take a step first, of which only loaded or compiled code remains. With
        `groups`, the plan's memory flows, and is requested on the socket `granting`.
        """
        self._start(choice, plan, groups, granting)
        if settle:
            assert self._stepper is not None
            initial = self._stepper.state()
            self._first_step(self._stepper)
            self._stepper.restore(initial)

    def turn(self, steps: int, limit_s: float | None, stay: bool) -> Turn:
        """Take a turn from the state that `load` has left, and return its results; the first step does not count.

        `stay`: report it and continue until told to stop. Raises MeasurementError if the first step takes longer than
        `limit_s`; None means no limit.
        """
        stepper, batches = self._stepper, self._session.workload.batches(steps + 1)
        assert stepper is not None
        try:
            turn = take_turn(stepper, batches, 1, self._options.seed, limit_s=limit_s)
            totals = None if turn.totals is None else replace(turn.totals)  # before it goes on
            if stay:
                self._continue(stepper, batches[-1])
        finally:
            self.drop()
        return turn.without_state()._replace(losses=(), totals=totals, digest=digest_of(turn))

    def _continue(self, stepper: Stepper, batch: Batch) -> None:
        """Report that the steps that count are taken, and take more until told to stop."""
        self._connection.send(Answer(True, None))
        try:
            while not self._connection.poll():
                stepper.step(batch)
                stepper.synchronize()
        finally:
            self._connection.recv()  # the message to stop

    def drop(self) -> None:
        """Release what a turn needed, whatever its state."""
        self._stepper = None
        self._held.close()

    def _start(
        self,
        choice: PolicyChoice,
        plan: bytes | None,
        groups: Sequence[Group] = (),
        granting: socket.socket | None = None,
    ) -> Device:
        workload, device = self._session.workload, self._session.open_device(None)
        if granting is not None:
            self._held.enter_context(granting)
        self._held.callback(device.close)
        self._held.callback(gc.collect)  # before the device releases unused memory
        device.share_link(self._share)
        if plan is None:
            self._stepper = start_peer(choice, workload, device)
        else:
            captured = workload.early if choice.early_update else workload.vanilla
            requests = None if granting is None else GroupSocket(granting)
            self._stepper = PlanStepper(
                workload, captured, device, Plan.from_bytes(plan), groups=groups, requests=requests
            )
        self._held.callback(self._stepper.close)
        return device

    def _first_step(self, stepper: Stepper) -> dict[str, torch.Tensor]:
        """Take the first step and return its gradients, if they are kept."""
        (batch,) = self._session.workload.batches(1)
        seed_everything(self._options.seed)
        stepper.step(batch)
        stepper.synchronize()
        return stepper.gradients()


def digest_of(turn: Turn) -> str:
    """Return the digest of everything that a turn's steps have computed, to the last bit and by name."""
    named = dict(turn.state.model)
    for name, kept in turn.state.optimizer.items():
        named |= {f"{key} of {name}": tensor for key, tensor in kept.items()}
    named |= {f"loss of step {step}": loss.reshape(-1) for step, loss in enumerate(turn.losses, 1)}
    digest = hashlib.sha256()
    for name, tensor in sorted(named.items()):
        if isinstance(tensor, torch.Tensor):
            digest.update(name.encode())
            digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


# ---- all of them ----------------------------------------------------------------------------------------------------


def start_server() -> None:
    """Start the process that jobs are forked from, unless it runs. It imports from the working directory."""
    forkserver.set_forkserver_preload(["benchmarks.together.preload"])  # PyTorch is imported once for all of them
    forkserver.ensure_running()


class Jobs:
    """The processes, numbered from 0; they end with the `with` block. Every method but `share_link` raises JobError."""

    def __init__(self, options: Sequence[BenchOptions]) -> None:
        start_server()
        context = get_context("forkserver")
        pairs = [context.Pipe() for _ in options]
        self._options = options
        self._alike = list(range(len(options)))  # index of the first identical job
        self._pipes = [mine for mine, _ in pairs]
        self._processes = [
            context.Process(target=serve, args=(theirs, own_options), daemon=True)
            for (_, theirs), own_options in zip(pairs, options, strict=True)
        ]
        self._theirs = [theirs for _, theirs in pairs]

    def __enter__(self) -> Jobs:
        for process, theirs in zip(self._processes, self._theirs, strict=True):
            process.start()
            theirs.close()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for pipe in self._pipes:
            pipe.close()  # ends processes that wait for a command
        for process in self._processes:
            process.join(PATIENCE_S if error is None else 0)
            process.kill()
            process.join()

    def measure(self) -> list[Measured]:
        """Measure each job alone on the device, one after another.

        A job with the same options and the same graphs as an earlier one takes over its measurements.
        """
        measured: list[Measured] = []
        for job, options in enumerate(self._options):
            graphs = self._call(job, "capture")
            for before, earlier in enumerate(measured):
                same = (earlier.vanilla.fingerprint, earlier.early.fingerprint) == graphs
                if same and self._options[before] == options:
                    traces = (earlier.vanilla, earlier.early)
                    self._call(job, "take_over", *((trace.latency_us, trace.workspace_bytes) for trace in traces))
                    self._alike[job] = before
                    measured.append(earlier)
                    break
            else:
                vanilla, early, step_ms, profile = self._call(job, "measure")
                measured.append(Measured(Trace.from_bytes(vanilla), Trace.from_bytes(early), step_ms, profile))
        return measured

    def share_link(self, profile: DeviceProfile) -> None:
        """Give each job an equal share of the link of `profile` from now on."""
        for job in range(len(self._options)):
            self._call(job, "share_link", profile, 1 / len(self._options))

    def inspect(self, choice: PolicyChoice) -> list[Inspection]:
        """Inspect a peer in each job, one after another; identical jobs share the result of the first."""
        inspections: list[Inspection] = []
        for job, alike in enumerate(self._alike):
            inspections.append(inspections[alike] if alike < job else self._call(job, "inspect", choice))
        return inspections

    def turn(
        self,
        choice: PolicyChoice,
        plans: Mapping[int, Plan],
        steps: int,
        order: Sequence[int],
        gap_s: float = 0.0,
        settle: bool = False,
        limits_s: Sequence[float] = (),
        groups: Mapping[int, Sequence[Group]] = MappingProxyType({}),
        granting: Mapping[int, socket.socket] = MappingProxyType({}),
        stay: bool = True,
    ) -> list[Turn]:
        """Let each job take one turn, and return the results by job.

        The jobs start in `order`, `gap_s` seconds after each other. `plans`: empty for a peer; `limits_s`: limits of
        the jobs' first steps, beyond which further steps are not worth their time; empty means none. `groups`: of jobs
        whose memory flows, which they request on their sockets `granting`. `stay`: no job stops before all have taken
        their steps; without, each one leaves after its own.
        """
        for job in order:
            plan = plans[job].to_bytes() if plans else None
            self._ask(job, "load", choice, plan, settle, groups.get(job, ()), granting.get(job))
        try:
            results({job: self._answer(job) for job in order})
        except JobError:
            for job in order:
                self._ask(job, "drop")
                self._answer(job)
            raise
        for connection in granting.values():
            connection.close()  # the jobs have their own, and the other ends see when those are closed
        for job in order:
            self._ask(job, "turn", steps, limits_s[job] if limits_s else None, stay)
            time.sleep(gap_s)
        answers = {job: self._answer(job) for job in order}  # has taken the steps that count, or failed
        going_on = [job for job, answer in answers.items() if answer.good and stay]
        for job in going_on:
            self._send(job, None)
        answers |= {job: self._answer(job) for job in going_on}
        return results(answers)

    def _call(self, job: int, name: str, *arguments: Any) -> Any:
        self._ask(job, name, *arguments)
        return results({job: self._answer(job)})[0]

    def _ask(self, job: int, name: str, *arguments: Any) -> None:
        self._send(job, (name, arguments))

    def _send(self, job: int, message: object) -> None:
        with self._alive(job):
            self._pipes[job].send(message)

    def _answer(self, job: int) -> Answer:
        with self._alive(job):
            answer: Answer = self._pipes[job].recv()
        return answer

    @contextlib.contextmanager
    def _alive(self, job: int) -> Iterator[None]:
        try:
            yield
        except (EOFError, ConnectionError):
            raise MeasurementError(f"the process of job {job + 1} ended unexpectedly") from None


def results(answers: Mapping[int, Answer]) -> list[Any]:
    """Return the results by job, ascending. Raises JobError that names all jobs that failed, and why."""
    ordered = sorted(answers.items())
    failed = [f"job {job + 1} failed: {answer.result}" for job, answer in ordered if not answer.good]
    if failed:
        raise JobError("; ".join(failed))
    return [answer.result for _, answer in ordered]
