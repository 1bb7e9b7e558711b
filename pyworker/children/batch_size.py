"""The choice of the batch size for a job that was submitted with batch_size => 0 (AccUDNN, sections 4 and 6.1).

Planning the step at a batch size shows whether it fits and how fast it trains. Phases:

- the step is captured at a few sizes, the traces of all others follow from them (planning/batchsize/traces.py); with
  predicted latencies a first size is chosen;
- the *lead*: the first steps of the first epoch are taken for real, with the job's own learning rate, in batches of a
  few sizes up to that one. Their operators and workspaces are measured;
- the size is chosen again, from the measurements. The CHOICE frame reports it, with the learning rate that goes with it
  and the sizes that it was compared with; the job's graphs are captured and admitted, and training continues after the
  lead.

If memory is refused meanwhile, because workspaces or other jobs take more than expected, the next choice is smaller. A
checkpoint records the choice: a job that is resumed does not choose again.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from pg_tensile.errors import BatchSizeError, MemoryRefusedError, TensileError
from pg_tensile.execution.training.graphs import Graphs, capture_graphs, capture_lead, capture_step
from pg_tensile.planning.batchsize.choose import Choice, choose, most_rows
from pg_tensile.planning.batchsize.learning_rate import BASE_BATCH, RateLaw, scaled_learning_rate
from pg_tensile.planning.batchsize.predict import Correction, Predictor
from pg_tensile.planning.batchsize.throughput import Curves
from pg_tensile.planning.batchsize.traces import BatchTraces
from pg_tensile.planning.device.profile import DeviceProfile
from pg_tensile.planning.trace.trace import Floats, Trace
from pg_tensile.text import size as size_text
from pyworker.children.channel import Channel, Stopped
from pyworker.children.job import Job
from pyworker.children.job_budget import most_bytes
from pyworker.wire import FrameType

if TYPE_CHECKING:
    from pg_tensile.execution.data.batches import Batch
    from pg_tensile.execution.training.checkpoint import Checkpoint
    from pg_tensile.execution.training.run_steps import StepResult, Steps
    from pg_tensile.execution.training.steps import PlannedSteps
    from pg_tensile.execution.training.trainer import Trainer
    from pyworker.children.memory import MemoryClient

LEAST = 8  # rows, if no range is given and they fit
LEAD_SIZES = 3  # each is half of the next
LEAD_STEPS = 5  # of each size: one checks, one measures latencies, one workspaces, two are timed
LATENCIES = 1  # number (from 0) of the step that measures latencies
TIMED = 2
LEAD_PART = 0.55  # share of the first epoch's rows, at most: enough for a lead with a sixteenth of them as a batch


class SizePredictions:
    """Measurements and predictions of a job at every batch size.

    `latencies` returns those of a trace's operators, in µs, until some have been measured; `most_events` limits a plan;
    `alive` is called repeatedly.
    """

    def __init__(
        self,
        job: Job,
        profile: DeviceProfile,
        budget_bytes: int,
        most_events: int,
        latencies: Callable[[Trace], Floats],
        alive: Callable[[], object],
    ) -> None:
        """Capture the step at a few sizes. Raises CaptureError."""
        self.job = job
        self.measured_us: dict[int, float] = {}
        self._expected = latencies
        self._alive = alive
        self._curves = Curves(profile.launch_us)
        self._traces = BatchTraces(self._capture)
        self.predict = Predictor(self._traces.trace_at, profile, budget_bytes, self._latencies, most_events=most_events)

    def _capture(self, size: int) -> Trace:
        self._alive()
        return capture_step(*self.job.with_batch_size(size)).trace

    def _latencies(self, trace: Trace) -> Floats:
        self._alive()
        return self._curves.predict(trace) if self.measured_us else self._expected(trace)

    def learn(self, traces: Mapping[int, Trace], step_us: Mapping[int, float]) -> None:
        """Take over what was measured, by batch size: operators' latencies and workspaces, whole steps in µs."""
        for size, trace in traces.items():
            self.add_workspaces(size, trace)
            self._curves.add(trace)
        self.measured_us.update(step_us)
        self.predict.correction = Correction()
        simulated = {size: self.predict(size) for size in sorted(self.measured_us)}
        feasible = [candidate for candidate in simulated.values() if candidate.feasible]
        self.predict.correction = Correction(
            tuple(candidate.batch_size for candidate in feasible),
            tuple(candidate.iteration_us for candidate in feasible),
            tuple(self.measured_us[candidate.batch_size] for candidate in feasible),
        )

    def add_workspaces(self, size: int, trace: Trace) -> None:
        self._traces.add_workspaces(size, trace.workspace_bytes)

    def limit(self, budget_bytes: int) -> None:
        """Lower the budget to `budget_bytes`, if it is larger."""
        self.predict.budget_bytes = min(self.predict.budget_bytes, budget_bytes)


class Terms(NamedTuple):
    """Constraints of a choice.

    `least` and `most` are rows (None if not given), `learning_rate` is that of batches of 64 rows, and `law` how it
    follows the batch size.
    """

    least: int | None
    most: int | None
    learning_rate: float
    law: RateLaw

    @staticmethod
    def of(spec: dict[str, Any]) -> Terms:
        """Return the terms of a job's spec."""
        options = spec["options"]
        least, most = options.get("batch_size_range") or (None, None)
        return Terms(least, most, spec["learning_rate"], options.get("learning_rate_scaling", "accudnn"))

    def rate(self, batch_size: int) -> float:
        """Return the learning rate that goes with a batch size."""
        return scaled_learning_rate(self.learning_rate, BASE_BATCH, batch_size, self.law)


def choose_within(predictions: SizePredictions, terms: Terms) -> Choice:
    """Return the best batch size as far as is known now. Raises BatchSizeError if none fits."""
    if terms.least is None:
        try:
            return _choose_from(LEAST, predictions, terms)
        except BatchSizeError:
            pass  # a smaller one may fit
    return _choose_from(terms.least or 1, predictions, terms)


def _choose_from(least: int, predictions: SizePredictions, terms: Terms) -> Choice:
    rows = predictions.job.sizes.training_rows
    most = min(rows, most_rows(rows) if terms.most is None else terms.most)
    try:
        unstalled = predictions.predict.largest_without_stall(min(least, most), most)
    except TensileError:  # the step cannot be traced
        unstalled = None
    return choose(
        predictions.predict,
        rows,
        least,
        most,
        budget_bytes=predictions.predict.budget_bytes,
        learning_rate=terms.learning_rate,
        law=terms.law,
        first=[*sorted(predictions.measured_us), *([unstalled.batch_size] if unstalled else [])],
    )


def lead_of(largest: int, least: int, rows: int) -> tuple[int, ...]:
    """Return the rows of a job's first batches: steps of `largest` rows and of halves of it, ascending.

    All are smaller if the steps would take more than LEAD_PART of the epoch; sizes below `least` are left out. Empty if
    the epoch is too short.
    """
    parts = sum(2.0**-halvings for halvings in range(LEAD_SIZES))
    top = min(largest, int(rows * LEAD_PART / (LEAD_STEPS * parts)))
    sizes = {top >> halvings for halvings in range(LEAD_SIZES)}
    return tuple(size for size in sorted(sizes) if size >= max(least, 2) for _ in range(LEAD_STEPS))


class TimedSteps:
    """The steps of a lead, measured and timed (run_steps.Steps)."""

    def __init__(self, steps: PlannedSteps) -> None:
        self.model = steps.model
        self.batch_device, self.device = steps.batch_device, steps.device
        self.evaluation_rows = steps.evaluation_rows
        self.evaluate, self.state, self.load = steps.evaluate, steps.state, steps.load
        self.memory, self.close = steps.memory, steps.close
        self._steps = steps
        self._times_us: defaultdict[int, list[float]] = defaultdict(list)

    def train(self, batch: Batch, learning_rate: float | None = None) -> StepResult:
        times = self._times_us[batch.rows]
        if len(times) == LATENCIES:
            self._steps.measure_step(batch.rows)
        began = time.perf_counter()
        result = self._steps.train(batch, learning_rate)  # returns the loss, so the device has ended the step
        times.append((time.perf_counter() - began) * 1e6)
        return result

    def step_us(self) -> dict[int, float]:
        """Return the median time of a step of each size, in µs."""
        return {size: statistics.median(times[-TIMED:]) for size, times in self._times_us.items()}


class ChosenJob(NamedTuple):
    """Admitted job whose batch size is chosen.

    `choice` is what a checkpoint records of it; `state` is that after its lead, or None without one.
    """

    job: Job
    steps: PlannedSteps
    choice: dict[str, Any]
    state: Checkpoint | None


class Chooser:
    """Chooses one job's batch size; `trainer` makes the run of a job with given steps."""

    def __init__(self, channel: Channel, memory: MemoryClient, trainer: Callable[[Job, Steps], Trainer]) -> None:
        self._channel = channel
        self._memory = memory
        self._trainer = trainer
        self._job = memory.job
        self._terms = Terms.of(channel.spec)

    def run(self) -> ChosenJob:
        """Choose the batch size, and return the admitted job.

        Raises BatchSizeError, MemoryRefusedError, CaptureError, Stopped, TrainingError.
        """
        self._memory.choosing = True
        self._report_phase("choosing")
        memory = self._memory
        predictions = SizePredictions(
            self._job,
            memory.profile,
            budget_bytes(self._channel.spec, memory.profile, memory.overhead.bytes),
            self._channel.spec["plan_events"],
            lambda trace: memory.predicted(trace).latency_us,
            lambda: memory.listen("choosing"),
        )
        state, lead = self._lead(predictions)
        while True:
            self._report_phase("choosing")
            choice = choose_within(predictions, self._terms)
            job = self._chosen(choice, lead)
            report = described(choice, self._terms, predictions.measured_us)
            self._channel.send(FrameType.CHOICE, report | {"lead": lead, "device": str(self._job.device)})
            try:
                steps = self._admit(job, capture_graphs(*job))
            except MemoryRefusedError as refusal:
                self._lower_limits(refusal, choice.batch_size, predictions)
                continue
            self._memory.choosing = False
            recorded = {"batch_size": choice.batch_size, "learning_rate": choice.learning_rate, "lead": lead}
            return ChosenJob(job, steps, recorded, state)

    # ---- the lead ----

    def _lead(self, predictions: SizePredictions) -> tuple[Checkpoint | None, tuple[int, ...]]:
        """Take the first steps and learn from them; return the state after them, and their rows.

        (None, ()) if the epoch is too short for a lead.
        """
        while True:
            choice = choose_within(predictions, self._terms)
            lead = lead_of(choice.batch_size, self._terms.least or 1, self._job.sizes.training_rows)
            if not lead:
                return None, ()
            job = self._chosen(choice, lead, self._terms.learning_rate)
            try:
                steps = self._admit(job, capture_lead(*job))
            except MemoryRefusedError as refusal:
                self._lower_limits(refusal, max(lead), predictions)
                continue
            timed = TimedSteps(steps)
            state = self._take_lead(job, timed)
            predictions.learn(self._memory.leave(), timed.step_us())
            return state, lead

    def _take_lead(self, job: Job, steps: Steps) -> Checkpoint:
        trainer = self._trainer(job, steps)
        if not trainer.run_lead():
            raise Stopped(checkpoint=False)  # nothing is lost that a checkpoint would save
        return trainer.state()

    # ---- choosing ----

    def _chosen(self, choice: Choice, lead: tuple[int, ...], learning_rate: float | None = None) -> Job:
        rate = choice.learning_rate if learning_rate is None else learning_rate
        settings = replace(self._job.settings, batch_size=choice.batch_size, learning_rate=rate, lead=lead)
        return self._job._replace(settings=settings)

    def _admit(self, job: Job, graphs: Graphs) -> PlannedSteps:
        self._memory.job = job
        return self._memory.admit(graphs)

    def _lower_limits(self, refusal: MemoryRefusedError, size: int, predictions: SizePredictions) -> None:
        """Exclude the size that was refused; use the limit and the workspaces that are known now.

        Raises `refusal` if no smaller size is left.
        """
        if size <= (self._terms.least or 1):
            raise refusal
        self._terms = self._terms._replace(most=size - 1)
        predictions.limit(refusal.budget_bytes)
        for rows, trace in self._memory.sent().items():
            predictions.add_workspaces(rows, trace)

    def _report_phase(self, phase: str) -> None:
        self._channel.send(FrameType.PROGRESS, {"phase": phase})


def budget_bytes(spec: dict[str, Any], profile: DeviceProfile, overhead_bytes: int) -> int:
    """Return the device memory that the job's tensors may take if no other job uses the device."""
    room = min(profile.memory_bytes, spec["device_memory_bytes"] or profile.memory_bytes) - overhead_bytes
    return min(room, most_bytes(spec) or room)


def resumed(job: Job, chosen: dict[str, Any]) -> Job:
    """Return the job with the choice that its checkpoint records."""
    settings = replace(
        job.settings,
        batch_size=chosen["batch_size"],
        learning_rate=chosen["learning_rate"],
        lead=tuple(chosen["lead"]),
    )
    return job._replace(settings=settings)


def described(choice: Choice, terms: Terms, measured_us: Mapping[int, float]) -> dict[str, Any]:
    """Return a choice as a JSON object."""
    candidates = [
        candidate._asdict()
        | {
            "learning_rate": terms.rate(candidate.batch_size),
            "measured_us": measured_us.get(candidate.batch_size),
        }
        for candidate in choice.candidates
    ]
    best = choice.candidates[0]
    reason = (
        f"{choice.batch_size} rows, of {len(candidates)} sizes: {best.samples_per_s:,.0f} rows/s with"
        f" {size_text(best.device_bytes)}, learning rate {choice.learning_rate:g}"
    )
    return {
        "batch_size": choice.batch_size,
        "learning_rate": choice.learning_rate,
        "law": choice.law,
        "reason": reason,
        "candidates": candidates,
    }
