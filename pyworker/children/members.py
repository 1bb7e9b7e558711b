"""Members of a job's model that a library fits, trees and lines, and their average with a network.

Before they are fitted, their memory is claimed like that of a job without plans. Each has outputs for the validation
rows; the average of several has the weights with the least loss on these.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pg_tensile.execution.data.dataset import Table, head, taken, together
from pg_tensile.execution.data.folds import FOLDS, Fold, folds_of
from pg_tensile.planning.device.profile import DeviceProfile
from pyworker.children.channel import Channel
from pyworker.children.claim import Claims
from pyworker.children.job import job_settings
from pyworker.children.job_budget import limiting
from pyworker.children.prepared import Prepared
from pyworker.wire import FrameType

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import nn

    from pg_tensile.execution.training.fitted import Fitted, Fitting, Step
    from pg_tensile.execution.training.observer import Outcome

REPORT_INTERVAL_S = 0.2
MOST_REFITTED = 1 << 20  # rows: trees and lines are fitted again to all rows, those for validation included
QUICK_BEYOND = 10_000  # training rows
CURVE = 20  # rounds whose loss becomes a metric


class Member(NamedTuple):
    """A trained member: its architecture, its model, and notes for the version.

    `validation`: its outputs [rows, outputs] for the validation rows; `crossed`: those of a cross-validation [repeats,
    rows, outputs] for all rows, or None."""

    architecture: dict[str, Any]
    model: nn.Module
    validation: NDArray[np.float32]
    notes: dict[str, Any]
    crossed: NDArray[np.float32] | None = None


class Made(NamedTuple):
    """A model that can become a version, and its METRICS frames; `outcome` is like that of a network's training."""

    architecture: dict[str, Any]
    model: nn.Module
    outcome: Outcome
    notes: dict[str, Any]
    curve: list[dict[str, Any]]


class FittedMembers:
    """The members of one job that are fitted, in their order."""

    def __init__(self, channel: Channel, prepared: Prepared) -> None:
        self.members: list[Member] = []
        self.warnings: list[str] = []
        self.revision = 0  # of the claim of memory
        self.is_out_of_time = False  # the job's time was up while they were fitted
        self._is_claimed: bool | None = None  # False: refused; None: not yet requested
        self._channel = channel
        self._spec = channel.spec
        self._prepared = prepared
        self._phase = "fitting"
        self._reported_at = 0.0
        self._began = time.monotonic()
        self._fitted: list[Fitted] = []
        self._losses: list[float | None] = []  # of the steps of the last member

    # ---- fitting ----

    @property
    def take_long(self) -> bool:
        """Whether trees for a first look are worth their time: those of few rows take hardly longer."""
        types = {architecture["type"] for architecture in self._spec["fitted"]}
        return "boosted" in types and self._prepared.dataset.training.rows > QUICK_BEYOND

    def fit(self, is_quick: bool = False) -> None:
        """Fit the members, unless there is no memory for them; `is_quick`: for a first look.

        If the time is up before they are as good as those of a first look, these remain. Raises Stopped, and
        MemoryRefusedError if there is no other member."""
        from pg_tensile.execution.training.fitted import outputs_of

        if self._is_claimed is None:
            self._is_claimed = self._claim()
        if not self._is_claimed:
            return
        fitting, prepared = self._fitting()._replace(is_quick=is_quick), self._prepared
        quick, self.members, self._fitted = (self.members, self._fitted), [], []
        for architecture in self._spec["fitted"]:
            self._phase = "boosting" if architecture["type"] == "boosted" else "fitting"
            began, self._losses = time.monotonic(), []
            fitted = fitting.fit(_parsed(architecture))
            validation = outputs_of(fitted.model, prepared.dataset.validation, prepared.fitted.preprocessing)
            notes = fitted.notes | {"seconds": round(time.monotonic() - began, 2)}
            self.members.append(Member(architecture, fitted.model, validation, notes))
            self._fitted.append(fitted)
        if self.is_out_of_time and quick[0] and self._loss(quick[0]) <= self._loss(self.members):
            self.members, self._fitted = quick

    def _loss(self, members: Sequence[Member]) -> float:
        """Return the mean loss of members on the validation rows, 0 without such rows."""
        from pg_tensile.execution.training.fitted import measured

        table, settings = self._prepared.dataset.validation, job_settings(self._spec)
        preprocessing = self._prepared.fitted.preprocessing
        losses = [measured(member.validation, table, preprocessing, settings).loss for member in members]
        return sum(loss or 0.0 for loss in losses) / len(losses) if table.rows else 0.0

    def _claim(self) -> bool:
        """Claim the memory of the largest member; return False, with a warning, if it is refused."""
        from pg_tensile.errors import MemoryRefusedError
        from pg_tensile.execution.training.fitted import fitting_bytes

        needed = fitting_bytes(self._prepared.dataset, self._prepared.fitted.preprocessing)
        claims = Claims(self._channel, "cpu", self._processor(), 0)
        answer = claims.request(needed)
        self.revision = claims.revision
        if answer.type == FrameType.PLAN:
            return True
        hint = f"Raise {limiting(self._channel.spec)} or pg_tensile.device_memory, or select fewer rows or columns."
        refused = MemoryRefusedError(needed, answer.header["budget_bytes"], None, hint)
        if self._spec["network"] is None:
            raise refused
        self.warnings.append(f"the model consists of the network alone, without trees or lines: {refused.message}")
        return False

    def _processor(self) -> DeviceProfile:
        """Return the profile of the CPU, on which members are fitted."""
        from pg_tensile.execution.measuring.device import measure

        fields = self._spec["profiles"].get("cpu")
        if fields is not None:
            return DeviceProfile.from_json(fields)
        return self._channel.wait_for(self._channel.background.submit(measure, "cpu"), "preparing")

    def cross_validate(self) -> None:
        """Cross-validate the members, if the rows are few. Raises Stopped."""
        if not self._spec["repeats"]:
            return
        fitting, self._phase = self._fitting(), "cross-validating"
        for number, (member, fitted) in enumerate(zip(self.members, self._fitted, strict=True)):
            crossed = fitting.cross_validate(_parsed(member.architecture), fitted, self._folds)
            self.members[number] = member._replace(crossed=crossed)

    @cached_property
    def _folds(self) -> list[Fold]:
        return folds_of(self._all.target, self._spec["repeats"], self._spec["seed"])

    @cached_property
    def _all(self) -> Table:
        """All rows, those for validation last."""
        return together(self._prepared.dataset.training, self._prepared.dataset.validation)

    def refit(self) -> None:
        """Fit the members again, to all rows, unless there are too many or the job wants none. Raises Stopped."""
        dataset = self._prepared.dataset
        rows = dataset.training.rows + dataset.validation.rows
        wanted = self._spec["options"].get("refit", True) and not self._spec.get("validation_query")
        if not wanted or not dataset.validation.rows or dataset.spooled or rows > MOST_REFITTED:
            return
        fitting, self._phase = self._fitting(), "refitting"
        for number, (member, fitted) in enumerate(zip(self.members, self._fitted, strict=True)):
            model = fitting.refit(_parsed(member.architecture), fitted)
            self.members[number] = member._replace(model=model, notes=member.notes | {"refitted_rows": rows})

    def _fitting(self) -> Fitting:
        from pg_tensile.execution.training.fitted import Fitting

        preprocessing, dataset = self._prepared.fitted.preprocessing, self._prepared.dataset
        rate = self._spec["learning_rate"] if self._spec["network"] is None else None
        return Fitting(
            preprocessing, dataset, job_settings(self._spec), self._spec["most_threads"], self._observe, rate
        )

    def _observe(self, step: Step) -> bool:
        """Report a step; return whether the time is up. Raises Stopped."""
        now = time.monotonic()
        self._losses.append(step.loss)
        if now - self._reported_at >= REPORT_INTERVAL_S:
            self._reported_at = now
            header = {"phase": self._phase, "step": step.done, "steps": step.steps, "loss": step.loss}
            self._channel.send(FrameType.PROGRESS, header)
        self._channel.poll({FrameType.PLAN, FrameType.REFUSE})
        most_s = self._spec["max_time_s"]
        if self._phase in ("fitting", "boosting") and most_s is not None and now - self._began >= most_s:
            self.is_out_of_time = True
            return True
        return False

    # ---- versions ----

    def network(self, model: nn.Module, outcome: Outcome, notes: dict[str, Any]) -> Member:
        """Return the network as a member, after its training."""
        validation = outcome.validation["outputs"].numpy() if outcome.validation else None
        if validation is None:
            validation = self.members[0].validation
        notes = {"type": self._spec["network"]["type"], "epoch": outcome.metrics["epoch"], **notes}
        return Member(self._spec["network"], model.cpu(), validation, notes, outcome.crossed)

    def average(self, networks: Sequence[Member]) -> Made:
        """Return the average of the members and of the network, if there is one, or the best of them alone.

        Without a network, the metrics are those of epoch 0 or, of a job that trains none, those of the last round."""
        from pg_tensile.execution.models.ensemble import Ensemble
        from pg_tensile.execution.training.averaging import weights_of
        from pg_tensile.execution.training.fitted import metrics_of, sample_of
        from pg_tensile.execution.training.observer import Outcome

        members = [*self.members, *networks]
        preprocessing, settings = self._prepared.fitted.preprocessing, job_settings(self._spec)
        crossed = [member.crossed for member in members if member.crossed is not None]
        if len(crossed) == len(members):
            held = taken(self._all, np.tile(np.arange(self._all.rows), len(crossed[0])))
            outputs = [found.reshape(held.rows, -1) for found in crossed]
        else:
            crossed = []
            held = head(self._prepared.dataset.validation, min(len(member.validation) for member in members))
            outputs = [member.validation[: held.rows] for member in members]
        weights = weights_of(outputs, held, preprocessing.task)
        chosen = [number for number, weight in enumerate(weights) if weight]
        kept = [weights[number] for number in chosen]
        architecture, model = members[chosen[0]].architecture, members[chosen[0]].model
        if len(chosen) > 1:
            types = [members[number].architecture["type"] for number in chosen]
            architecture = {"type": "ensemble", "members": types, "weights": kept}
            model = Ensemble([members[number].model for number in chosen], kept)
        mean = np.tensordot(kept, [outputs[number] for number in chosen], axes=1).astype(np.float32)
        alone = self._spec["network"] is None
        epoch = networks[0].notes["epoch"] if networks else 0
        if alone:
            epoch = max(fitted.kept for fitted in self._fitted)
        metrics = metrics_of(model.eval(), mean, self._prepared.dataset.training, held, preprocessing, settings, epoch)
        if crossed:
            mean = mean.reshape(crossed[0].shape)
            held, metrics = self._all, metrics | self._cross_validated(mean)
            mean = mean[0]
        notes = [member.notes | {"weight": weight} for member, weight in zip(members, weights, strict=True)]
        training = {"members": notes} if self.members else {}
        for network in networks:
            training |= {key: value for key, value in network.notes.items() if key not in ("type", "epoch")}
        reason = "early_stopping" if alone and max(fitted.done for fitted in self._fitted) > epoch else "epochs"
        reason = "max_time" if alone and self.is_out_of_time else reason
        outcome = Outcome(False, metrics, epoch, reason, sample_of(mean, held))
        return Made(architecture, model, outcome, {"stopped": reason} | training, self._curve(metrics, alone))

    def _cross_validated(self, outputs: NDArray[np.float32]) -> dict[str, Any]:
        """Return the metrics of outputs [repeats, rows, outputs], and their spread, for the metrics of a version."""
        from pg_tensile.execution.training.fitted import cross_validated

        preprocessing, settings = self._prepared.fitted.preprocessing, job_settings(self._spec)
        validation, spread = cross_validated(outputs, self._all, self._folds, preprocessing, settings)
        repeats = self._spec["repeats"]
        return {"validation": validation, "cross_validation": {"folds": FOLDS, "repeats": repeats, "spread": spread}}

    def _curve(self, metrics: Mapping[str, Any], alone: bool) -> list[dict[str, Any]]:
        """Return the METRICS frames: of the version or, of a job that trains no network, of its rounds as well."""
        epoch, seconds = metrics["epoch"], time.monotonic() - self._began
        frames = []
        if not alone:
            found = metrics["validation"] or metrics["training"]
            return [{"epoch": epoch, "split": "version", "seconds": seconds} | found]
        rounds = [*range(len(self._losses), 0, -max(1, len(self._losses) // CURVE))]
        for done in sorted(rounds):
            loss = self._losses[done - 1]
            if loss is not None and done != epoch:
                frames.append({"epoch": done, "split": "validation", "samples": None, "seconds": None, "loss": loss})
        for split in ("training", "validation"):
            if metrics[split] is not None:
                frames.append({"epoch": epoch, "split": split, "seconds": seconds} | metrics[split])
        return frames


def _parsed(architecture: dict[str, Any]) -> Any:
    from pg_tensile.execution import models

    return models.parse(architecture)
