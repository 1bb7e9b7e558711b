"""Training of a model on a dataset: the loop, its metrics, checkpoints and resuming.

A run is a pure function of dataset, architecture and settings: generators are seeded, the batches' order follows from
(seed, epoch), and a checkpoint holds everything on which the next step depends. So a run that is resumed at any step
ends with the same bits as one that was not interrupted (on the CPU, with the same number of threads).

Which epoch's model is kept and when a run ends is decided in course.py. Where weights are averaged
(weight_averages.py), validation and the model that is kept have the averages, and the steps continue with the weights
themselves.

The loop executes its steps through `Steps` (steps.py): eagerly, or by an executor under a plan. It reports to an
`Observer` and polls it between steps for a request to stop. A loss that is not finite stops the run, and neither the
state after such a step nor weights that are not finite are saved: the last checkpoint is always valid.

Several ranks train one model: each takes its part of every batch, and they agree on all that steers the run
(agreement.py). They start from rank 0's weights, and draw random numbers of their own. Statistics of batch
normalisation are each rank's; at the end of an epoch all take over rank 0's, as in DistributedDataParallel. Rank 0's
checkpoint is that of the run: any number of ranks can resume it, and as many as made it continue with the same bits
(rank_state.py).
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pg_tensile.errors import NotFiniteError
from pg_tensile.execution.data.batches import Batch, Batches
from pg_tensile.execution.data.calibration import least_log_loss
from pg_tensile.execution.data.dataset import Dataset
from pg_tensile.execution.data.metrics import Metrics, MetricSums
from pg_tensile.execution.data.preprocessing import Preprocessing, Task
from pg_tensile.execution.distributed.group import Group
from pg_tensile.execution.training import checkpoint as ckpt
from pg_tensile.execution.training.agreement import Agreement
from pg_tensile.execution.training.checkpoint import Checkpoint
from pg_tensile.execution.training.checkpoint_schedule import CheckpointSchedule
from pg_tensile.execution.training.course import Course
from pg_tensile.execution.training.epoch_sums import EpochSums
from pg_tensile.execution.training.observer import EpochMetrics, Observer, Outcome, Progress, StopTraining
from pg_tensile.execution.training.rank_state import add_ranks, ranks_of
from pg_tensile.execution.training.refit import Refit
from pg_tensile.execution.training.run_steps import Steps, StepsState
from pg_tensile.execution.training.schedule import scheduled
from pg_tensile.execution.training.settings import Settings
from pg_tensile.execution.training.shared_weights import take_over_buffers, take_over_model
from pg_tensile.execution.training.time_left import FORWARD, Pace, Position, time_left
from pg_tensile.execution.training.validation_sample import ValidationSample
from pg_tensile.execution.training.weight_averages import WeightAverages

REPORT_INTERVAL_S = 0.2
NOT_REFITTED = (
    "training again on all rows made the model worse, so the validated model is kept, which has not seen the rows for "
    "validation (option refit)"
)


class Trainer:
    """One run. A checkpoint can be resumed only if its `identity` (JSON) and its data's fingerprint are the same."""

    def __init__(
        self,
        settings: Settings,
        steps: Steps,
        dataset: Dataset,
        preprocessing: Preprocessing,
        observer: Observer,
        identity: dict[str, Any] | None = None,
    ) -> None:
        """Prepare the run; all ranks do so at the same time. Raises ExecutorError, TrainingError if they disagree."""
        self._group = Group(settings.ranks)
        self._settings = settings
        self._steps = steps
        self._dataset = dataset
        self._preprocessing = preprocessing
        self._observer = observer
        self._identity = identity or {}
        self._parameters = [name for name, _ in steps.model.named_parameters()]
        self._averages = WeightAverages(steps, settings)
        batch_size, seed, device = settings.batch_size, settings.seed, steps.batch_device
        ranks = self._group.size
        self._batches = Batches(
            *(dataset.training, batch_size, seed, device, dataset.spooled, settings.lead), ranks=ranks
        )
        self._validation = Batches(dataset.validation, batch_size, seed, device, False, ranks=ranks)
        self._epoch = 0  # epochs done
        self._step = 0  # steps done in the current epoch
        self._seconds = 0.0  # spent in the current epoch, including the time before a resume
        self._sums = self._new_sums()
        self._schedule = CheckpointSchedule(settings.checkpoint_interval_s)
        self._agreement = Agreement(self._group, observer, self._schedule)
        self._course = Course(settings, self._agreement.clock)
        self._last_metrics: dict[str, Any] = {}
        self._evaluated = ValidationSample()  # of the last validation
        self._sample = ValidationSample()  # of the epoch whose weights the model will have
        self._report_at = 0.0
        self._reported_at = time.monotonic()
        self._trained = self._stepped = 0  # rows and steps, since the last report
        self._pace = Pace()
        self._stepped_at: float | None = None  # end of the last step of the first training
        if ranks > 1:
            self._group.check_alike("data and settings", (dataset.fingerprint, settings, self._identity))
            take_over_model(steps, self._group)
            ckpt.seed_generators(self._group.seed(seed))
        refits = settings.refit and settings.keep == "best" and dataset.validation.rows and not dataset.spooled
        self._refit = Refit(settings, preprocessing.task, dataset, steps) if refits else None
        self._crossed: NDArray[np.float32] | None = None  # outputs of the cross-validation
        self._warnings: list[str] = []

    # ---- running ----

    def run(self) -> Outcome:
        """Train until the last epoch, early stopping, the end of the time or a stop request.

        Unless it was stopped, the run closes its steps, and the model has its final weights: those of the best epoch,
        of the last one, or of the training on all rows. Raises TrainingError."""
        self._schedule.start()
        course = self._course
        self._agreement.exchange()
        course.begin()
        try:
            while (reason := course.end(self._epoch)) is None:
                self._run_epoch()
                if self._agreement.due and course.end(self._epoch) is None:
                    self.save()
            if self._refit is not None and self._refit.epoch is None:
                self._crossed = self._cross_validate(self._refit)
            refitted = self._refit is not None and self._train_on_all_rows(self._refit)
        except StopTraining as stop:
            if stop.checkpoint:
                self.save()
            return Outcome(True, self._last_metrics, self._epoch)
        model, kept = self._steps.model, course.kept
        if kept is None or refitted:
            self._averages.exchange()
        self._steps.close()
        if kept is not None and not refitted:
            ckpt.load_model(model, kept.tensors)
        self._check_weights(dict(model.named_parameters()))
        metrics = self._last_metrics if kept is None else kept.metrics
        rows = self._refit.rows if self._refit is not None and refitted else None
        sample, warnings = self._sample.tensors(), tuple(self._warnings)
        return Outcome(False, metrics, self._epoch, reason, sample, rows, warnings, self._crossed)

    def run_lead(self) -> bool:
        """Execute only the steps of `settings.lead`, without checkpoints; return False if a stop was requested.

        The lead is executed as a whole, even if the time is up. A run with the same lead and any batch size can then
        continue from `state`. Raises TrainingError."""
        self._agreement.exchange()
        self._course.begin()
        try:
            self._take(itertools.islice(self._batches.epoch(0), len(self._settings.lead)))
        except StopTraining:
            return False
        return True

    def _run_epoch(self) -> None:
        """Run the rest of the epoch. One that the end of the time cuts short counts only if it is the first."""
        self._take(self._in_time(self._batches.epoch(self._epoch, self._step)))
        if self._epoch == 0 or self._step == self._batches.steps(self._epoch):
            take_over_buffers(self._steps, self._group)
            with self._averages.in_use():
                self._finish_epoch(self._sums.result(self._group), self._evaluate())

    def _take(self, batches: Iterable[Batch]) -> None:
        now = time.monotonic()
        started = now - self._seconds
        if self._stepped_at is not None:
            self._pace.add_pause(now - self._stepped_at)
        self._stepped_at = now
        self._report("training", now)
        for batch in batches:
            self._train_step(batch)
            now = time.monotonic()
            self._pace.add_step(now - self._stepped_at)
            self._stepped_at = now
            self._seconds = now - started
            if now >= self._report_at:
                self._report("training", now)
            if self._settings.checkpoint_interval_s > 0 and self._agreement.due:
                self.save()
            self._agreement.poll()

    def _train_on_all_rows(self, refit: Refit) -> bool:
        """Train again as `refit` says, and return True; False if the time is up before, or the model is not as good.

        The model of the best epoch is the final one then. All ranks return the same."""
        kept = self._course.kept
        if kept is None or self._course.time_is_up:
            return False
        if refit.epoch is None:
            refit.begin(kept.tensors)
        is_trained = self._retrain(refit, kept.epoch, "refitting")
        if is_trained is None:
            self._warnings.append(NOT_REFITTED)
        if not is_trained:
            return False
        take_over_buffers(self._steps, self._group)
        with self._averages.in_use():
            state = self._steps.state().model
            is_finite = all(torch.isfinite(state[name]).all() for name in self._parameters if name in state)
            is_good = self._group.of_first(is_finite and not refit.is_worse())
        if not is_good:
            self._warnings.append(NOT_REFITTED)
        return is_good

    def _retrain(self, refit: Refit, epochs: int, phase: str) -> bool | None:
        """Train on the rows of `refit` up to this number of epochs, and return True.

        False if the time is up before, None if the loss is not finite. Of folds, no checkpoint is made."""
        while (epoch := refit.epoch or 0) < epochs:
            before = time.monotonic()
            self._report(phase, before)
            for batch in refit.batches.epoch(epoch, refit.step):
                loss = self._steps.train(batch, refit.learning_rate).loss
                if not math.isfinite(self._agreement.exchange(loss, batch.share)):
                    return None
                refit.step += 1
                self._trained, self._stepped = self._trained + batch.rows, self._stepped + 1
                now = time.monotonic()
                self._pace.add_step(now - before)
                before = now
                if now >= self._report_at:
                    self._report(phase, now)
                if phase == "refitting" and self._agreement.due and self._settings.checkpoint_interval_s > 0:
                    self.save()
                self._agreement.poll()
                if self._course.time_is_up:
                    return False
            refit.end_epoch()
        return True

    def _cross_validate(self, refit: Refit) -> NDArray[np.float32] | None:
        """Return the outputs of `Refit.cross_validate`; None as well without folds and for several ranks."""
        kept = self._course.kept
        if kept is None or not self._settings.repeats or self._group.size > 1:
            return None
        epochs = kept.epoch
        return refit.cross_validate(lambda: self._retrain(refit, epochs, "cross-validating"), self._averages.in_use)

    def _in_time(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches until the time is up, one at least."""
        for batch in batches:
            yield batch
            if self._course.time_is_up:
                return

    def _train_step(self, batch: Batch) -> None:
        done = (self._step + 0.5) / self._batches.steps(self._epoch)
        rate = scheduled(self._settings, self._epoch + done, self._course.reduced_rate)
        outputs, own_loss = self._steps.train(batch, rate)
        loss = self._agreement.exchange(own_loss, batch.share)
        if not math.isfinite(loss):
            raise _not_finite(f"the loss became {loss}", self._total_steps() + 1)
        self._sums.add(outputs, batch.target, loss, batch.weight)
        self._step += 1
        self._trained, self._stepped = self._trained + batch.rows, self._stepped + 1

    def _evaluate(self) -> EpochMetrics | None:
        """Return the metrics on the validation rows, or None if there are no such rows."""
        if self._dataset.validation.rows == 0:
            return None
        started = time.monotonic()
        self._report("validating", started)
        sums, self._evaluated = self._new_sums(ranks=True), ValidationSample()
        for batch in self._validation.in_order(self._steps.evaluation_rows):
            outputs, loss = self._steps.evaluate(batch)
            sums.add(outputs, batch.target, loss, batch.weight)
            self._evaluated.add(outputs, batch.target, batch.weight)
            now = time.monotonic()
            if now >= self._report_at:
                self._report("validating", now)
            self._agreement.hear()
        self._agreement.exchange()
        if self._group.size > 1:
            self._agreement.poll()
            self._evaluated = self._evaluated.over_ranks(self._group)
        metrics = replace(sums.result(self._group), calibrated_log_loss=self._calibrated_log_loss())
        metrics = self._group.of_first(metrics)
        return EpochMetrics(self._epoch + 1, "validation", metrics, time.monotonic() - started)

    def _calibrated_log_loss(self) -> float | None:
        """Return the log loss of the last validation after a calibration, if there will be one."""
        if not self._settings.calibrate or self._preprocessing.task == Task.REGRESSION:
            return None
        sample = {name: tensor.numpy() for name, tensor in self._evaluated.tensors().items()}
        return least_log_loss(sample["outputs"].astype(np.float64), sample["target"], sample.get("weight"))

    def _finish_epoch(self, training: Metrics, validation: EpochMetrics | None) -> None:
        decisive = training if validation is None else validation.metrics
        loss = decisive.loss
        if loss is None or not math.isfinite(loss):
            what = "infinite" if loss in (math.inf, -math.inf) else "not a number"
            raise _not_finite(f"the loss after epoch {self._epoch + 1} is {what}", self._total_steps())
        loss = loss if decisive.calibrated_log_loss is None else decisive.calibrated_log_loss
        self._observer.metrics(EpochMetrics(self._epoch + 1, "training", training, self._seconds))
        if validation is not None:
            self._observer.metrics(validation)
        self._last_metrics = {
            "epoch": self._epoch + 1,
            "training": training.to_json(),
            "validation": None if validation is None else validation.metrics.to_json(),
        }
        if self._refit is not None:
            self._refit.reduced_rates.append(self._course.reduced_rate)
        self._course.epoch_ended(self._epoch + 1, loss, self._last_metrics, lambda: self._steps.state().model)
        if self._course.kept is None or self._course.kept.epoch == self._epoch + 1:
            self._sample = self._evaluated
        self._epoch, self._step, self._seconds = self._epoch + 1, 0, 0.0
        self._sums = self._new_sums()

    def _new_sums(self, ranks: bool = False) -> EpochSums:
        return EpochSums(MetricSums(self._preprocessing, ranks))

    def _total_steps(self) -> int:
        before = self._batches.steps(0) + (self._epoch - 1) * self._batches.steps(1) if self._epoch else 0
        return before + self._step

    def _report(self, phase: str, now: float) -> None:
        rate = self._trained / (now - self._reported_at) if self._trained else None
        step_s = (now - self._reported_at) / self._stepped if self._stepped else None
        position = (self._epoch, self._step, self._batches.steps(self._epoch), self._sums.mean_loss())
        if self._refit is not None and self._refit.epoch is not None:
            position = (self._refit.epoch, self._refit.step, self._refit.batches.steps(self._refit.epoch), None)
        epoch, step, steps, loss = position
        validation_steps = FORWARD * self._dataset.validation.rows / self._settings.batch_size
        place = Position(self._epoch, steps - step, self._batches.steps(1), validation_steps)
        left = time_left(self._pace, place, self._settings, self._course, self._refit) or (None, None)
        epochs, memory = self._settings.epochs, self._steps.memory()
        self._observer.progress(Progress(phase, epoch + 1, epochs, step, steps, loss, rate, memory, step_s, *left))
        self._reported_at, self._trained, self._stepped = now, 0, 0
        self._report_at = now + REPORT_INTERVAL_S

    # ---- checkpoints ----

    def save(self) -> None:
        """Pass a checkpoint to the observer. Raises NotFiniteError if a weight is not finite."""
        self._schedule.begin()
        checkpoint = self.state()
        state = checkpoint.get("model")
        self._check_weights({name: state[name] for name in self._parameters if name in state})
        self._observer.checkpoint(checkpoint, self._schedule.written)

    def _check_weights(self, parameters: Mapping[str, Tensor]) -> None:
        for name, parameter in parameters.items():
            if not torch.isfinite(parameter).all():
                raise _not_finite(f'the weights "{name}" became infinite or not a number', self._total_steps())

    def state(self) -> Checkpoint:
        """Return everything on which the rest of the run depends.

        Its tensors may be those in use, so it has to be stored before the next step."""
        kept, steps = self._course.kept, self._steps.state()
        checkpoint = Checkpoint(
            {
                "fingerprint": self._dataset.fingerprint,
                "identity": self._identity,
                "epoch": self._epoch,
                "step": self._step,
                "seconds": self._seconds,
                "metrics": self._last_metrics,
                **self._course.to_json(),
            }
        )
        checkpoint.put("model", steps.model)
        checkpoint.put("optimizer", steps.optimizer)
        checkpoint.put("validation", self._sample.tensors())
        if kept is not None:
            checkpoint.put("best", kept.tensors)
        if self._refit is not None:
            checkpoint.put("first", self._refit.tensors)
            checkpoint.meta["refit"] = self._refit.to_json()
        if self._crossed is not None:
            checkpoint.put("crossed", {"outputs": torch.from_numpy(self._crossed)})
        own = Checkpoint(self._sums.numbers())
        own.put("sums", self._sums.tensors())
        ckpt.generator_states(own, self._steps.device)
        add_ranks(checkpoint, own, self._group)
        return checkpoint

    def resume(self, checkpoint: Checkpoint) -> str | None:
        """Continue from a checkpoint; if it does not belong to this run, change nothing and return the reason.

        Returns None if it was resumed. Raises CheckpointError if it is damaged."""
        meta = checkpoint.meta
        reason = disagreement(meta, self._dataset.fingerprint, self._identity)
        if reason is not None:
            return reason
        self._steps.load(StepsState(checkpoint.get("model"), checkpoint.get("optimizer")))
        device = self._steps.batch_device
        self._epoch, self._step, self._seconds = meta["epoch"], meta["step"], meta["seconds"]
        self._resume_rank(ranks_of(checkpoint), device)
        self._sample = ValidationSample(checkpoint.get("validation"))
        self._last_metrics = meta["metrics"]
        self._course.restore(meta, checkpoint.get("best"), device)
        if self._refit is not None and "refit" in meta:
            self._refit.restore(meta["refit"], checkpoint.get("first"))
            crossed = checkpoint.get("crossed")
            self._crossed = crossed["outputs"].numpy() if crossed else None
        else:  # the learning rates of its epochs are not known
            self._refit = None
        return None

    def _resume_rank(self, ranks: Sequence[Checkpoint], device: torch.device) -> None:
        """Continue what this rank has for itself. If there were as many ranks, each continues its own.

        Otherwise rank 0 has the sums of all, and every rank draws other random numbers than before."""
        if len(ranks) == self._group.size:
            own = ranks[self._group.rank]
            self._sums.restore([own], device)
            ckpt.restore_generators(own, self._steps.device)
            return
        if self._group.rank == 0:
            self._sums.restore(ranks, device)
        ckpt.seed_generators(self._group.seed(self._settings.seed) + self._total_steps())


def disagreement(meta: dict[str, Any], fingerprint: str, identity: dict[str, Any]) -> str | None:
    """Return the reason why a checkpoint does not belong to such a run, or None if it does."""
    if meta["fingerprint"] != fingerprint:
        rows = meta["fingerprint"].partition(":")[0]
        return f"the data changed since the checkpoint of {rows} rows was made, so training started over"
    if meta["identity"] != identity:
        return "the architecture or the settings changed since the checkpoint was made, so training started over"
    return None


def _not_finite(what: str, step: int) -> NotFiniteError:
    hint = "Lower the learning rate, clip gradients with the option clip, or look for extreme values in the data."
    return NotFiniteError(f"{what} at step {step}", hint=hint, step=step)
