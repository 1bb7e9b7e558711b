"""The trainer process: receives one job and its rows, trains, and sends back the results.

Phases: JOB (and the checkpoint to resume from), then COLUMNS, ROWS … ROWS_END, while a thread imports torch; then
preprocessing, capturing and waiting for memory (memory.py), training, and at the end the weights and DONE. A STOP is
honoured in every phase: between frames, between blocks of rows, between steps (channel.py).

A job of another kind is handed on: calibrations to calibrate.py, those of explain_training to explain.py, those of
evaluate_model and feature_importance to evaluate.py, and those of import_model and export_model to modules of
those names.
"""

from __future__ import annotations

import gc
import importlib
import json
import time
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from pg_tensile.errors import DataError
from pg_tensile.execution.data.baseline_metrics import with_baseline
from pg_tensile.execution.data.cautions import cautions
from pg_tensile.execution.data.dataset import RowStore, prepare
from pg_tensile.execution.data.drift import reference_of
from pg_tensile.execution.data.fitting import FittedPreprocessing, with_preprocessing
from pg_tensile.execution.data.preprocessing import Preprocessing
from pg_tensile.execution.data.roles import without_value
from pg_tensile.execution.data.splits import DIVISION, Split
from pg_tensile.execution.data.warm_start import begun_with, difference
from pyworker.children import evaluate
from pyworker.children.channel import Channel, Stopped
from pyworker.children.job import (
    choose_members,
    choose_open_architecture,
    fit_rows,
    job_recipe,
    least_batch_size,
    network_of,
)
from pyworker.children.libraries import import_libraries
from pyworker.children.prepared import Begun, Prepared, State
from pyworker.children.training_run import TrainingRun
from pyworker.connection import Connection
from pyworker.wire import FrameType

if TYPE_CHECKING:
    from pg_tensile.execution.training.observer import Outcome
    from pyworker.children.job import Job
    from pyworker.children.members import FittedMembers, Made

KINDS = ("calibrate", "explain", "import_model", "export_model")
OTHER_KINDS = {kind: f"pyworker.children.{kind}" for kind in KINDS}
# Modules that take seconds to import, by type of architecture
IMPORTS = {"linear": ("sklearn.linear_model",), "pretrained": ("peft",)}
MAX_PREPROCESSING = 12 << 20  # bytes of JSON, which has to fit into a frame's header
IDENTITY = ("architecture", "target", "validation", "batch_size", "optimizer", "learning_rate", "seed")


def run(connection: Connection, hello: dict[str, Any]) -> None:
    """Run the process: one job."""
    channel = Channel(connection, ThreadPoolExecutor(1))
    try:
        channel.receive_job()
        kind = channel.spec["kind"]
        libraries = partial(_begin_imports, channel.background)
        if kind == "evaluate":
            evaluate.run(channel, libraries)
        elif kind in OTHER_KINDS:
            importlib.import_module(OTHER_KINDS[kind]).run(channel, libraries())
        else:
            TrainerProcess(channel, libraries()).train()
    except Stopped:
        channel.send(FrameType.DONE, {"stopped": True})


def _begin_imports(importer: ThreadPoolExecutor) -> Future[None]:
    gc.disable()  # collections take a fifth of the time of these imports, which make no garbage
    libraries = importer.submit(import_libraries)
    importer.submit(_enable_garbage_collection)
    return libraries


def _enable_garbage_collection() -> None:
    gc.freeze()  # the modules stay
    gc.enable()


class TrainerProcess(TrainingRun):
    """One job, from its rows to its weights."""

    def __init__(self, channel: Channel, libraries: Future[None]) -> None:
        identity = {key: channel.spec[key] for key in IDENTITY}  # with what the job leaves open, as None
        identity["division"] = DIVISION
        super().__init__(channel, identity, {})
        self._libraries = libraries
        self._members: FittedMembers | None = None

    def train(self) -> None:
        """Train, from the rows to the weights."""
        channel = self._channel
        trains_here = self._spec["ranks"] is None
        profile = channel.background.submit(self._measure_device) if trains_here else None
        modules = IMPORTS.get((self._spec["architecture"] or {}).get("type", "ensemble"), ())
        imports = channel.background.submit(list, map(importlib.import_module, modules))  # while the rows arrive
        checkpoint = channel.receive_checkpoint()
        if self._spec.get("start") is not None:
            self._start = channel.receive_state()
            self._identity["start"] = self._spec["start"]["id"]
        store = channel.receive_rows()
        channel.wait_for(self._libraries, "preparing")
        channel.wait_for(imports, "preparing")  # of two threads that import transformers, one sees a part of it
        self._choose_architecture(store)
        checkpoint = self._own_checkpoint(checkpoint, store.fingerprint)
        prepared = self._prepare(store, None if checkpoint is None else checkpoint[1].get("recipe"))
        del store
        self._derive_query(prepared)
        if self._spec["fitted"]:
            self._fit_members(prepared)
        if self._spec["network"] is None:
            return
        if profile is not None:
            self.fit(prepared, checkpoint, profile)
            return
        from pyworker.ranks.driver import Driver

        job, spec, warnings = channel.job, self._spec, self._warnings
        Driver(channel, Begun(job, spec, self._identity, self._recipe, warnings, prepared, checkpoint)).run()

    # ---- members that a library fits ----

    def _fit_members(self, prepared: Prepared) -> None:
        """Fit them, and send a first version of them unless there is one; the last one if there is no network."""
        members = self._members = self._make_members(prepared)
        began, spec = time.monotonic(), self._spec
        makes_first = (
            spec["network"] is not None and spec["options"].get("stages") != "best" and not spec["has_version"]
        )
        if makes_first and members.take_long:
            members.fit(is_quick=True)
            if members.members:
                self._send_made(members.average([]), prepared, last=False)
                makes_first = False
        if not members.is_out_of_time:
            members.fit()
        self._revision = members.revision
        self._warnings += members.warnings
        if spec["max_time_s"] is not None:
            spec["max_time_s"] -= time.monotonic() - began
            if spec["max_time_s"] <= 0 and members.members:
                spec["network"], members.is_out_of_time = None, True
        if not members.members:
            self._members = None
        elif spec["network"] is None:
            if not members.is_out_of_time:
                members.cross_validate()
                members.refit()
            self._send_made(members.average([]), prepared, last=True)
            self._channel.send(FrameType.DONE, {"stopped": False, "warnings": self._warnings})
        elif makes_first:
            self._send_made(members.average([]), prepared, last=False)

    def _make_members(self, prepared: Prepared) -> FittedMembers:
        from pyworker.children.members import FittedMembers

        return FittedMembers(self._channel, prepared)

    def _send_results(self, job: Job, outcome: Outcome, prepared: Prepared) -> None:
        if self._members is None and outcome.crossed is None:
            super()._send_results(job, outcome, prepared)
            return
        members = self._members or self._make_members(prepared)
        if outcome.reason != "max_time":
            members.cross_validate()
            members.refit()
        network = members.network(job.model, outcome, self._training(outcome))
        self._send_made(members.average([network]), prepared, last=True)

    def _send_made(self, made: Made, prepared: Prepared, last: bool) -> None:
        """Send a version of one or more members and its weights; `last`: it is the job's result."""
        from pg_tensile.execution.training import checkpoint as ckpt

        for header in made.curve:
            self._channel.send(FrameType.METRICS, header)
        self._send_version(made.outcome, prepared, made.notes, architecture=made.architecture, first=not last)
        self._channel.send_state("weights", ckpt.to_bytes(ckpt.model_tensors(made.model)))

    # ---- preparing ----

    def _choose_architecture(self, store: RowStore) -> None:
        """Choose the architecture if the job leaves it open."""
        choice = choose_open_architecture(store, self._spec)
        if choice is not None:
            self._identity["architecture"] = choice.architecture
            self._channel.send(FrameType.ARCHITECTURE, choice._asdict())

    def _own_checkpoint(self, checkpoint: State | None, fingerprint: str) -> State | None:
        """Return the checkpoint, or None, with a warning, if it belongs to other data or settings."""
        from pg_tensile.execution import models
        from pg_tensile.execution.training.trainer import disagreement

        texts = models.text_columns(models.parse(self._spec["architecture"]))
        if texts is not None:
            self._identity["folder"] = texts.source.sha256
        reason = None if checkpoint is None else disagreement(checkpoint[1], fingerprint, self._identity)
        if reason is None:
            return checkpoint
        self._warnings.append(reason)
        return None

    def _prepare(self, store: RowStore, recorded: dict[str, Any] | None) -> Prepared:
        """Fit and apply the preprocessing; complete the spec by the recipe, or by the one that a checkpoint records."""
        from pg_tensile.execution.training.settings import check_batch_size

        spec = self._spec
        fitted = fit_rows(store, spec)
        choose_members(spec, fitted)
        fitted = self._adopt(fitted, store)
        self._recipe = recorded or job_recipe(spec, fitted)
        spec.update(self._recipe)
        if spec["network"] is not None:
            check_batch_size(least_batch_size(spec), fitted)
        size = len(json.dumps(fitted.preprocessing.to_json()))
        if size > MAX_PREPROCESSING:
            hint = "Leave out text columns that are nearly unique, or shorten their strings."
            message = f"the distinct strings of all features take {size} bytes, more than {MAX_PREPROCESSING}"
            raise DataError(message, hint=hint)
        self._warn(store, fitted)
        if spec["batch_size"] and spec["network"] is not None:  # otherwise CHOICE has the settings
            chosen = {key: self._recipe[key] for key in ("batch_size", "learning_rate")}
            self._channel.send(FrameType.SETTINGS, chosen)
        dataset = prepare(store, fitted, spec["dataset_cache_bytes"], spec["spool_directory"])
        fitted = with_baseline(fitted, store.blocks(), dataset)
        return Prepared(fitted, dataset, reference_of(fitted, store.blocks()))

    def _derive_query(self, prepared: Prepared) -> None:
        """Send the query for predictions that follows from the training query, which no rank has to know."""
        query = self._spec.pop("query", None)
        if query is None:
            return
        from pg_tensile.queries.prediction import derive

        features = [feature.name for feature in prepared.fitted.preprocessing.features]
        self._channel.send(FrameType.QUERY, derive(query, self._spec["target"], features).to_json())

    def _adopt(self, fitted: FittedPreprocessing, store: RowStore) -> FittedPreprocessing:
        """Return what was fitted, with the preprocessing of the version that training begins with, if there is one.

        If its weights cannot be used, a warning says why."""
        start = self._spec.get("start")
        if start is None:
            return fitted
        earlier = Preprocessing.from_json(start["preprocessing"])
        reason = "the architecture is different"
        network, prefix = network_of(start["architecture"])
        if network == self._spec["network"]:
            self._start_prefix = prefix
            reason = difference(earlier, fitted.preprocessing) or ""
        if not reason:
            return with_preprocessing(fitted, store, begun_with(earlier, fitted.preprocessing))
        self._start = None
        self._warnings.append(f"training did not begin with the weights of version {start['version']}: {reason}")
        return fitted

    def _warn(self, store: RowStore, fitted: FittedPreprocessing) -> None:
        if fitted.skipped_rows:
            target, not_finite = fitted.preprocessing.target.name, fitted.not_finite_rows
            what = without_value(fitted.skipped_rows - not_finite, not_finite)
            self._warnings.append(
                f'{fitted.skipped_rows} of {store.rows} rows were skipped: their "{target}" is {what}'
            )
        self._warnings += cautions(store, fitted, Split.of(self._spec), self._spec["options"].get("task"))
