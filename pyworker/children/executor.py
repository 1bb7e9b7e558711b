"""The executor process: receives one job and its rows, trains, and sends back the results.

Phases: JOB (and the checkpoint to resume from), COLUMNS, ROWS … ROWS_END, while a thread imports torch; then
preprocessing, capturing and waiting for memory (memory.py), training, and at the end the weights and DONE. A STOP is
honoured in every phase: between frames, between blocks of rows, between steps (channel.py).

A job of another kind is handed on: calibrations to calibrate.py, those of explain_training to explain.py, and those of
evaluate_model and feature_importance to evaluate.py.
"""

from __future__ import annotations

import gc
import importlib
import json
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from pg_tensile.errors import CaptureError, DataError
from pg_tensile.execution.data.cautions import cautions
from pg_tensile.execution.data.dataset import RowStore, prepare
from pg_tensile.execution.data.fitting import FittedPreprocessing
from pg_tensile.execution.data.splits import Split, described
from pg_tensile.planning.device.profile import DeviceProfile
from pg_tensile.planning.latency.load import LoadMeter
from pyworker.children.channel import Channel, Stopped
from pyworker.children.job import Job, fit_rows, job_recipe, job_settings, least_batch_size, with_hint
from pyworker.children.prepared import Begun, Prepared, State
from pyworker.connection import Connection
from pyworker.wire import FrameType

if TYPE_CHECKING:
    from pg_tensile.execution.training.checkpoint import Checkpoint
    from pg_tensile.execution.training.observer import EpochMetrics, Outcome, Progress
    from pg_tensile.execution.training.run_steps import Steps
    from pg_tensile.execution.training.trainer import Trainer
    from pyworker.children.memory import MemoryClient

OTHER_KINDS = {kind: f"pyworker.children.{kind}" for kind in ("calibrate", "explain", "evaluate")}
MAX_PREPROCESSING = 12 << 20  # bytes of JSON, which has to fit into a frame's header
IDENTITY = ("architecture", "target", "validation", "batch_size", "optimizer", "learning_rate", "seed")


def run(connection: Connection, hello: dict[str, Any]) -> None:
    """Run the process: one job."""
    importer = ThreadPoolExecutor(1)
    gc.disable()  # collections take a fifth of the time of these imports, which make no garbage
    libraries = importer.submit(import_libraries)
    importer.submit(_enable_garbage_collection)
    channel = Channel(connection, importer)
    try:
        channel.receive_job()
        kind = channel.spec["kind"]
        if kind in OTHER_KINDS:
            importlib.import_module(OTHER_KINDS[kind]).run(channel, libraries)
        else:
            Executor(channel, libraries).train()
    except Stopped:
        channel.send(FrameType.DONE, {"stopped": True})


def import_libraries() -> None:
    """Import what every kind of job needs: PyTorch and what uses it."""
    from pg_tensile.execution.capture import compiler

    compiler.defer()
    import pyworker.children.memory  # noqa: F401


def _enable_garbage_collection() -> None:
    gc.freeze()  # the modules stay
    gc.enable()


class Executor:
    """One job that is trained; also the run's observer (`pg_tensile.execution.training.observer.Observer`)."""

    def __init__(self, channel: Channel, libraries: Future[None]) -> None:
        self._channel = channel
        self._spec = channel.spec
        self._identity = {key: self._spec[key] for key in IDENTITY}  # with what the job leaves open, as None
        self._recipe: dict[str, Any] = {}
        self._libraries = libraries
        self._load = LoadMeter()
        self._memory: MemoryClient | None = None
        self._warnings: list[str] = []
        self._choice: dict[str, Any] | None = None  # of the batch size, if the job leaves it open (batch_size.py)

    def train(self) -> None:
        """Train, from the rows to the weights."""
        channel = self._channel
        profile = channel.background.submit(self._measure_device)
        imports: Future[Any] = self._libraries
        if self._spec["architecture"]["type"] == "pretrained":
            imports = channel.background.submit(importlib.import_module, "peft")  # seconds, while the rows arrive
        checkpoint = channel.receive_checkpoint()
        store = channel.receive_rows()
        channel.wait_for(self._libraries, "preparing")
        channel.wait_for(imports, "preparing")  # of two threads that import transformers, one sees a part of it
        checkpoint = self._own_checkpoint(checkpoint, store.fingerprint)
        prepared = self._prepare(store, None if checkpoint is None else checkpoint[1].get("recipe"))
        del store
        if self._spec["ranks"] is None:
            self.fit(prepared, checkpoint, profile)
            return
        from pyworker.ranks.driver import Driver

        job, spec, warnings = channel.job, self._spec, self._warnings
        Driver(channel, Begun(job, spec, self._identity, self._recipe, warnings, prepared, checkpoint)).run()

    def fit(self, prepared: Prepared, checkpoint: State | None, profile: Future[DeviceProfile]) -> None:
        """Train, from the preprocessed rows to the weights; `profile` is the device's."""
        channel = self._channel
        channel.send(FrameType.PROGRESS, {"phase": "building"})
        job = self._build(prepared)
        self._memory = self._make_memory(job, channel.wait_for(profile, "building"))
        trainer = self._begin(job, prepared, checkpoint)
        outcome = trainer.run()
        if outcome.stopped:
            channel.send(FrameType.DONE, {"stopped": True})
            return
        if job.settings.device_graphs:
            graphs = self._memory.device_graphs()
            if graphs.obstacle is not None:
                self._warnings.append(f"iterations were not captured as device graphs: {graphs.obstacle}")
        self._send_results(job, outcome, prepared)
        channel.send(FrameType.DONE, {"stopped": False, "warnings": self._warnings})

    # ---- preparing ----

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
        self._recipe = recorded or job_recipe(spec, fitted)
        spec.update(self._recipe)
        check_batch_size(least_batch_size(spec), fitted)
        size = len(json.dumps(fitted.preprocessing.to_json()))
        if size > MAX_PREPROCESSING:
            hint = "Leave out text columns that are nearly unique, or shorten their strings."
            message = f"the distinct strings of all features take {size} bytes, more than {MAX_PREPROCESSING}"
            raise DataError(message, hint=hint)
        self._warn(store, fitted)
        if spec["batch_size"]:  # otherwise CHOICE has the settings
            chosen = {key: self._recipe[key] for key in ("batch_size", "learning_rate")}
            self._channel.send(FrameType.SETTINGS, chosen)
        return Prepared(fitted, prepare(store, fitted, spec["dataset_cache_bytes"], spec["spool_directory"]))

    def _build(self, prepared: Prepared) -> Job:
        """Return the job with its model, built on the CPU from generators seeded with the job's seed."""
        import torch

        from pg_tensile.execution import models
        from pg_tensile.execution.measuring.device import choose_device, use_deterministic_algorithms
        from pg_tensile.execution.training import checkpoint as ckpt
        from pg_tensile.execution.training.graphs import Sizes
        from pg_tensile.execution.training.settings import check_model

        torch.set_num_threads(self._channel.threads)
        device = choose_device(self._spec["device"])
        use_deterministic_algorithms()
        settings, preprocessing = job_settings(self._spec), prepared.fitted.preprocessing
        ckpt.seed_generators(settings.seed)
        architecture = models.parse(self._spec["architecture"])
        model = models.build(architecture, preprocessing.model_inputs, preprocessing.outputs)
        check_model(model, min(settings.batch_size, prepared.fitted.training_rows))
        sizes = Sizes.of(prepared.dataset, preprocessing)
        return Job(model, settings, preprocessing.task, sizes, device)

    def _measure_device(self) -> DeviceProfile:
        """Return the profile of the job's device: the known one, or one that is measured now.

        Runs in the background, after the libraries have been imported.
        """
        from pg_tensile.execution.measuring.device import choose_device, measure

        device = choose_device(self._spec["device"])
        fields = self._spec["profiles"].get(str(device))
        return measure(device) if fields is None else DeviceProfile(**fields)

    def _warn(self, store: RowStore, fitted: FittedPreprocessing) -> None:
        if fitted.skipped_rows:
            target = fitted.preprocessing.target.name
            self._warnings.append(f'{fitted.skipped_rows} of {store.rows} rows were skipped: their "{target}" is null')
        self._warnings += cautions(store, fitted, Split.of(self._spec))

    # ---- training ----

    def _make_memory(self, job: Job, profile: DeviceProfile) -> MemoryClient:
        from pg_tensile.execution.backends import device_load
        from pyworker.children.memory import MemoryClient

        load = self._load if job.device.type == "cpu" else LoadMeter(device_load(job.device))
        return MemoryClient(self._channel, job, profile, load)

    def _begin(self, job: Job, prepared: Prepared, checkpoint: State | None) -> Trainer:
        """Return the run, at its beginning or in the checkpoint's state."""
        from pg_tensile.execution.training import checkpoint as ckpt
        from pg_tensile.execution.training.trainer import Trainer

        dataset, preprocessing = prepared.dataset, prepared.fitted.preprocessing

        def trainer(job: Job, steps: Steps) -> Trainer:
            return Trainer(job.settings, steps, dataset, preprocessing, self, self._identity)

        state = None if checkpoint is None else ckpt.Checkpoint.from_bytes(*checkpoint)
        if self._spec["batch_size"]:
            run = trainer(job, self._plan(job))
        elif state is None:
            return self._choose(trainer)
        else:
            from pyworker.children.batch_size import resumed

            self._choice = state.meta["choice"]
            job = resumed(job, self._choice)
            run = trainer(job, self._plan(job))
        if state is not None:
            run.resume(state)
        return run

    def _choose(self, trainer: Callable[[Job, Steps], Trainer]) -> Trainer:
        """Return the run of a job whose batch size is chosen, after its first steps."""
        from pyworker.children.batch_size import Chooser

        assert self._memory is not None
        try:
            chosen = Chooser(self._channel, self._memory, trainer).run()
        except CaptureError as error:
            raise with_hint(error, chosen=True) from error
        self._choice = chosen.choice
        run = trainer(chosen.job, chosen.steps)
        if chosen.state is not None:
            run.resume(chosen.state)
        return run

    def _plan(self, job: Job) -> Steps:
        """Return the `Steps` of the run, once its memory has been granted."""
        from pg_tensile.execution.training.graphs import capture_graphs, evaluation_rows
        from pg_tensile.execution.training.steps import EagerSteps

        assert self._memory is not None
        self._memory.job = job
        if self._spec["policy"] == "none":
            rows = evaluation_rows(*job)
            self._memory.claim()
            return EagerSteps(job.model, job.settings, job.task, job.device, rows, self._spec["memory_budget"])
        self._channel.send(FrameType.PROGRESS, {"phase": "capturing"})
        try:
            graphs = capture_graphs(*job)
        except CaptureError as error:
            raise with_hint(error) from error
        return self._memory.admit(graphs)

    def _send_results(self, job: Job, outcome: Outcome, prepared: Prepared) -> None:
        """Send the version and its weights."""
        from pg_tensile.execution.training import checkpoint as ckpt

        self._send_version(outcome, prepared)
        self._channel.send_state("weights", ckpt.to_bytes(ckpt.model_tensors(job.model)))

    def _send_version(self, outcome: Outcome, prepared: Prepared) -> None:
        """Describe the version that the weights belong to, which are sent next."""
        from pg_tensile.execution.training.uncertainty import derive

        assert self._memory is not None
        fitted = prepared.fitted
        derived = derive(fitted.preprocessing, outcome.validation, self._memory.job.settings.calibrate)
        preprocessing = derived.preprocessing.to_json()
        rows = {"training": fitted.training_rows, "validation": fitted.validation_rows, "skipped": fitted.skipped_rows}
        split = described(fitted.division, fitted.training_rows, fitted.validation_rows)
        version = {
            "task": preprocessing["task"],
            "preprocessing": preprocessing | {"rows": rows},
            "metrics": outcome.metrics,
            "fingerprint": prepared.dataset.fingerprint,
            "training": derived.notes | self._training(outcome) | {"split": split},
        }
        self._channel.send(FrameType.VERSION, version)

    def _training(self, outcome: Outcome) -> dict[str, Any]:
        """Return the settings and the course of the training, for `model_versions.training`."""
        assert self._memory is not None
        settings = self._memory.job.settings
        chosen = {"batch_size": settings.batch_size, "learning_rate": settings.learning_rate}
        schedule = {"learning_rate_schedule": settings.learning_rate_schedule}
        course = {"epochs": outcome.epochs, "stopped": outcome.reason, "refitted_rows": outcome.refitted_rows}
        captured = {"replays": self._memory.device_graphs().replays} if settings.device_graphs else {}
        return (
            captured | chosen | schedule | {"average_weights": settings.average_weights, "keep": settings.keep} | course
        )

    # ---- observing ----

    def progress(self, progress: Progress) -> None:
        header = progress._asdict()
        memory = header.pop("memory")._asdict()
        assert self._memory is not None
        self._channel.send(FrameType.PROGRESS, header | memory | self._memory.progress())

    def metrics(self, metrics: EpochMetrics) -> None:
        header = {"epoch": metrics.epoch, "split": metrics.split, "seconds": metrics.seconds}
        self._channel.send(FrameType.METRICS, header | metrics.metrics.to_json())
        assert self._memory is not None
        self._memory.epoch_ended()

    def checkpoint(self, checkpoint: Checkpoint, written: Callable[[float], None]) -> None:
        choice = {"choice": self._choice} if self._choice else {}
        choice["recipe"] = self._recipe
        self._channel.checkpoint_stored = written
        meta = checkpoint.meta | {"threads": self._channel.threads} | choice
        self._channel.send_state("checkpoint", checkpoint.to_bytes(), meta)

    def poll(self) -> None:
        memory = self._memory
        assert memory is not None
        try:
            frame = self._channel.poll({FrameType.PLAN, FrameType.REFUSE})
            if frame is not None:
                memory.receive(frame)
        except Stopped as stop:
            from pg_tensile.execution.training.observer import StopTraining

            raise StopTraining(stop.checkpoint) from None
        memory.tick()
