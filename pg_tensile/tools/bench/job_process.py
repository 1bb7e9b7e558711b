"""Training jobs in processes of their own, measured beside each other: what each does, and how it is told to.

A command is a name and its arguments; the answer is a result, or one line that says why there is none. So a job that
fails at one thing can be asked for the next. Only a turn is a conversation, because nobody may stop before all have
taken the steps that count: each job says that it has taken them and goes on, until it hears that it may stop; then it
answers with its `Turn`. A job that fails before it says so has answered, and hears nothing; one that fails later waits
until it may stop. A process that dies is the end of all (MeasurementError).
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, NamedTuple

import torch

from pg_tensile.errors import MeasurementError
from pg_tensile.execution.runtime.device import Device
from pg_tensile.execution.runtime.record import Counters
from pg_tensile.planning.device.profile import DeviceProfile
from pg_tensile.planning.plan.plan import Plan
from pg_tensile.planning.trace.trace import Floats, Int64s, Trace
from pg_tensile.tools.bench import contenders
from pg_tensile.tools.bench.contenders import EagerStepper, PlanStepper, Stepper, take_turn
from pg_tensile.tools.bench.measured import Session
from pg_tensile.tools.bench.options import BenchOptions, PolicyChoice
from pg_tensile.tools.bench.peers import gradient_difference, measure_peaks, start_peer
from pg_tensile.tools.bench.progress import Progress
from pg_tensile.tools.bench.report import message_of
from pg_tensile.tools.bench.run import default_threads
from pg_tensile.tools.bench.workload import seed_everything

PATIENCE_S = 5.0  # with a process that should end


class Measured(NamedTuple):
    """What a job is planned with. Milliseconds of a vanilla step alone on the device."""

    vanilla: Trace
    early: Trace
    step_ms: float
    profile: DeviceProfile


class Inspection(NamedTuple):
    """Of a peer's step, alone on the device: bytes at most, and how far the gradients are from eager PyTorch's
    (peers.gradient_difference)."""

    peak_bytes: int
    device_peak_bytes: int
    gradient_difference: float


class Turn(NamedTuple):
    """What one job did in one round: its first step, then those that count. `totals` of these (None: nobody counts);
    `digest` of all losses and of the state after them."""

    first_ms: float
    step_ms: tuple[float, ...]
    totals: Counters | None
    digest: str


class Answer(NamedTuple):
    """`result`: of a command that failed, one line for people."""

    good: bool
    result: Any


class JobError(MeasurementError):
    """A job could not do what it was asked for. All processes can be asked for the next thing."""


# ---- a job's process ------------------------------------------------------------------------------------------------


def serve(connection: Connection, options: BenchOptions) -> None:
    """What a job's process does until nobody asks any more."""
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
    """Its methods are the commands. `capture` comes first, then `measure` or `take_over`, then `inspect`, then
    `share_link`."""

    def __init__(self, connection: Connection, options: BenchOptions) -> None:
        self._connection, self._options = connection, options
        self._held = contextlib.ExitStack()  # the stepper and its device
        self._stepper: Stepper | None = None
        self._share = 1.0

    def capture(self) -> tuple[str, str]:
        """The fingerprints of the traces of vanilla and of early updates."""
        self._session = Session(self._options, _Silent())
        return self._session.workload.vanilla.trace.fingerprint, self._session.workload.early.trace.fingerprint

    def measure(self) -> tuple[bytes, bytes, float, DeviceProfile]:
        """The fields of `Measured`."""
        step_ms = self._session.calibrate()
        if step_ms is None:
            raise MeasurementError("the device has not enough memory for a step without a plan")
        workload = self._session.workload
        return workload.vanilla.trace.to_bytes(), workload.early.trace.to_bytes(), step_ms, self._session.profile

    def take_over(self, vanilla: tuple[Floats, Int64s], early: tuple[Floats, Int64s]) -> None:
        """Latencies (µs) and workspaces (bytes) of the operators, measured in the process of a job that is the same."""
        workload = self._session.workload
        self._session.workload = replace(
            workload,
            vanilla=replace(workload.vanilla, trace=workload.vanilla.trace.with_latencies(*vanilla)),
            early=replace(workload.early, trace=workload.early.trace.with_latencies(*early)),
        )

    def share_link(self, profile: DeviceProfile, share: float) -> None:
        """The device from here on, and this job's share of its link."""
        self._session.profile, self._share = profile, share

    def inspect(self, choice: PolicyChoice) -> Inspection:
        """What a peer takes in its second step, and its gradients of the first."""
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

    def load(self, choice: PolicyChoice, plan: bytes | None, settle: bool) -> None:
        """Gets ready for a turn. `plan`: None for a peer; `settle`: takes a step that leaves nothing but code."""
        self._start(choice, plan)
        if settle:
            assert self._stepper is not None
            initial = self._stepper.state()
            self._first_step(self._stepper)
            self._stepper.restore(initial)

    def turn(self, steps: int, limit_s: float | None) -> Turn:
        """From the state that `load` has left; the first step does not count, and ends the turn if it takes longer than
        the limit."""
        stepper, batches = self._stepper, self._session.workload.batches(steps + 1)
        assert stepper is not None
        try:
            taken = take_turn(stepper, batches, 1, self._options.seed, limit_s=limit_s)
            totals = None if taken.totals is None else replace(taken.totals)  # before it goes on
            self._connection.send(Answer(True, None))
            try:
                while not self._connection.poll():
                    stepper.step(batches[-1])
                    stepper.synchronize()
            finally:
                self._connection.recv()  # that it may stop
        finally:
            self.drop()
        return Turn(taken.first_ms, taken.step_ms, totals, digest_of(taken))

    def drop(self) -> None:
        """Gives back what a turn needed, whatever has become of it."""
        self._stepper = None
        self._held.close()

    def _start(self, choice: PolicyChoice, plan: bytes | None) -> Device:
        workload, device = self._session.workload, self._session.open_device(None)
        self._held.callback(device.close)
        self._held.callback(gc.collect)  # before the device gives back what nobody uses
        device.share_link(self._share)
        if plan is None:
            self._stepper = start_peer(choice, workload, device)
        else:
            captured = workload.early if choice.early_update else workload.vanilla
            self._stepper = PlanStepper(workload, captured, device, Plan.from_bytes(plan))
        self._held.callback(self._stepper.close)
        return device

    def _first_step(self, stepper: Stepper) -> dict[str, torch.Tensor]:
        """Returns the gradients, where somebody keeps them."""
        (batch,) = self._session.workload.batches(1)
        seed_everything(self._options.seed)
        stepper.step(batch)
        stepper.synchronize()
        return stepper.gradients()


def digest_of(turn: contenders.Turn) -> str:
    """Of everything that a turn's steps have computed, to the last bit and by name."""
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


class Jobs:
    """The processes, numbered from 0; they end with the `with` block. Every method but `share_link` raises JobError."""

    def __init__(self, options: Sequence[BenchOptions]) -> None:
        context = get_context("forkserver")
        context.set_forkserver_preload([__name__])  # PyTorch is imported once for all of them
        pairs = [context.Pipe() for _ in options]
        self._options = options
        self._alike = list(range(len(options)))  # the first job that is the same
        self._pipes = [mine for mine, _ in pairs]
        self._processes = [
            context.Process(target=serve, args=(theirs, each), daemon=True)
            for (_, theirs), each in zip(pairs, options, strict=True)
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
            pipe.close()  # who waits for a command ends
        for process in self._processes:
            process.join(PATIENCE_S if error is None else 0)
            process.kill()
            process.join()

    def measure(self) -> list[Measured]:
        """One after another: each alone on the device. A job with the same options and the same graphs as one before it
        takes over what was measured there."""
        found: list[Measured] = []
        for job, options in enumerate(self._options):
            graphs = self._call(job, "capture")
            for before, known in enumerate(found):
                same = (known.vanilla.fingerprint, known.early.fingerprint) == graphs
                if same and self._options[before] == options:
                    traces = (known.vanilla, known.early)
                    self._call(job, "take_over", *((each.latency_us, each.workspace_bytes) for each in traces))
                    self._alike[job] = before
                    found.append(known)
                    break
            else:
                vanilla, early, step_ms, profile = self._call(job, "measure")
                found.append(Measured(Trace.from_bytes(vanilla), Trace.from_bytes(early), step_ms, profile))
        return found

    def share_link(self, profile: DeviceProfile) -> None:
        """From now on each has an equal share of that device's link."""
        for job in range(len(self._options)):
            self._call(job, "share_link", profile, 1 / len(self._options))

    def inspect(self, choice: PolicyChoice) -> list[Inspection]:
        """A peer in each job, one after another; of jobs that are the same, in the first."""
        found: list[Inspection] = []
        for job, alike in enumerate(self._alike):
            found.append(found[alike] if alike < job else self._call(job, "inspect", choice))
        return found

    def turn(
        self,
        choice: PolicyChoice,
        plans: Mapping[int, Plan],
        steps: int,
        order: Sequence[int],
        gap_s: float = 0.0,
        settle: bool = False,
        limits_s: Sequence[float] = (),
    ) -> list[Turn]:
        """One of each job: started in that order, so many seconds after each other. `plans`: empty for a peer;
        `limits_s`: of each job's first step, after which no others are worth their time."""
        for job in order:
            self._ask(job, "load", choice, plans[job].to_bytes() if plans else None, settle)
        try:
            results({job: self._answer(job) for job in order})
        except JobError:
            for job in order:
                self._ask(job, "drop")
                self._answer(job)
            raise
        for job in order:
            self._ask(job, "turn", steps, limits_s[job] if limits_s else None)
            time.sleep(gap_s)
        answers = {job: self._answer(job) for job in order}  # has taken the steps that count, or failed
        going_on = [job for job, answer in answers.items() if answer.good]
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
    """By job, ascending. Raises JobError that names all that failed, and why."""
    ordered = sorted(answers.items())
    failed = [f"job {job + 1} failed: {answer.result}" for job, answer in ordered if not answer.good]
    if failed:
        raise JobError("; ".join(failed))
    return [answer.result for _, answer in ordered]
