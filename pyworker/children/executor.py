"""The executor process: receives one job and its rows, trains, and sends back the results.

Phases: JOB (and the checkpoint to resume from), COLUMNS, ROWS … ROWS_END, while a thread imports torch; then
preprocessing, capturing and waiting for memory (memory.py), training, and at the end the weights and DONE. A STOP is
honoured in every phase: between frames, between blocks of rows, between steps. Only the main thread reads and writes
the socket.

A job of another kind is handed on: calibrations to calibrate.py, those of explain_training to explain.py.

While rows arrive, sending must never block: the feed on the other side writes and does not read.
"""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, NamedTuple

from pg_tensile.errors import CaptureError, DataError
from pg_tensile.execution.data.columns import columns_from_header
from pg_tensile.execution.data.dataset import Dataset, RowStore, prepare
from pg_tensile.execution.data.fitting import FittedPreprocessing, Split, fit
from pg_tensile.planning.device.profile import DeviceProfile
from pg_tensile.planning.latency.load import LoadMeter
from pyworker.wire import Connection, Frame, FrameType, ProtocolError, StateCollector, send_state

if TYPE_CHECKING:
    from pg_tensile.execution.training.checkpoint import Checkpoint
    from pg_tensile.execution.training.observer import EpochMetrics, Outcome, Progress
    from pg_tensile.execution.training.settings import Settings
    from pg_tensile.execution.training.trainer import Steps, Trainer
    from pyworker.children.memory import Job, MemoryClient

REPORT_INTERVAL_S = 0.5
SILENCE_S = 1.0  # at most, while it waits for a frame
OTHER_KINDS = {"calibrate": "pyworker.children.calibrate", "explain": "pyworker.children.explain"}
MAX_PREPROCESSING = 12 << 20  # bytes of JSON, which has to fit into a frame's header


def run(connection: Connection, hello: dict[str, Any]) -> None:
    """Run the process: one job."""
    importer = ThreadPoolExecutor(1)
    libraries = importer.submit(_import_libraries)
    # Otherwise capturing, or the first step, would import it, which takes most of a second.
    importer.submit(importlib.import_module, "torch._dynamo")
    Executor(connection, importer, libraries).run()


def _import_libraries() -> None:
    import pyworker.children.memory  # noqa: F401


class Stopped(Exception):
    """STOP came where ending at once loses nothing; `checkpoint` says whether it requests one."""

    def __init__(self, checkpoint: bool) -> None:
        super().__init__("the job was told to stop")
        self.checkpoint = checkpoint


class Prepared(NamedTuple):
    """The data as the model takes it."""

    fitted: FittedPreprocessing
    dataset: Dataset


class Executor:
    """One job's process; also the run's observer (`pg_tensile.execution.training.observer.Observer`)."""

    def __init__(self, connection: Connection, background: ThreadPoolExecutor, libraries: Future[None]) -> None:
        self._connection = connection
        self._background = background
        self._libraries = libraries
        self._load = LoadMeter()
        self._profile: Future[DeviceProfile] | None = None
        self._memory: MemoryClient | None = None
        self._job = 0
        self._spec: dict[str, Any] = {}
        self._latency_models: dict[str, memoryview] = {}  # by device, as planning/latency/model_bytes.py encodes them
        self._reported = 0.0
        self._written: Callable[[float], None] | None = None  # called when the checkpoint is stored
        self._warnings: list[str] = []
        self._threads = 1
        self.choice: dict[str, Any] | None = None  # of the batch size, if the job leaves it open (batch_size.py)

    def run(self) -> None:
        try:
            self._receive_job()
            kind = self._spec["kind"]
            if kind in OTHER_KINDS:
                importlib.import_module(OTHER_KINDS[kind]).run(self)
            else:
                self._train()
        except Stopped:
            self._send(FrameType.DONE, {"stopped": True})

    # ---- receiving ----

    def _receive_job(self) -> None:
        frame = self._next({FrameType.JOB})
        self._job, self._spec = frame.job, frame.header
        self._latency_models = dict(zip(self._spec["latency_models"], frame.buffers, strict=True))
        resume = self._spec["resume"] or {}
        self._threads = resume.get("threads") or self._spec["threads"]  # another number would change sums' last bits

    def _receive_checkpoint(self) -> tuple[bytes, dict[str, Any]] | None:
        """Return the checkpoint to resume from (safetensors file and meta), or None."""
        if self._spec["resume"] is None:
            return None
        collector = StateCollector()
        while (state := collector.add(self._next({FrameType.STATE}))) is None:
            pass
        return state.data, self._spec["resume"]

    def _receive_rows(self) -> RowStore:
        columns = columns_from_header(self._next({FrameType.COLUMNS}).header["columns"])
        spec = self._spec
        store = RowStore(columns, spec["dataset_cache_bytes"], spec["spool_directory"], poll=self._poll_data)
        while True:
            frame = self._next({FrameType.ROWS, FrameType.ROWS_END})
            if frame.type == FrameType.ROWS_END:
                store.finish(frame.header["rows"], frame.header["fingerprint"], frame.buffers)
                return store
            store.add(frame.header["rows"], frame.buffers)
            self._report_phase("loading")

    def _next(self, expected: set[FrameType]) -> Frame:
        frame = self._connection.recv()
        assert frame is not None  # no time-out
        return self._expected(frame, expected)

    def _expected(self, frame: Frame, expected: Collection[FrameType]) -> Frame:
        if frame.type == FrameType.STOP:
            raise Stopped(bool(frame.header.get("checkpoint")))
        if frame.type not in expected:
            raise ProtocolError(f"unexpected {frame.type.name} frame")
        return frame

    def wait_for_frame(self, phase: str, expected: set[FrameType]) -> Frame:
        """Return the next frame, sending signs of life until it comes. Raises Stopped."""
        while True:
            self._report_phase(phase)
            frame = self._connection.recv(SILENCE_S)
            if frame is not None:
                return self._expected(frame, expected)

    def poll_early(self, phase: str, expected: Collection[FrameType] = ()) -> Frame | None:
        """Send a sign of life, and return a frame of the types `expected` if one came, else None.

        For lengthy work before training, between two parts of it. Raises Stopped.
        """
        self._report_phase(phase)
        frame = self._poll()
        return None if frame is None else self._expected(frame, expected)

    def _poll(self) -> Frame | None:
        """Return a frame if one came, else None; never block.

        SAVED, which confirms that a checkpoint is stored, is handled here.
        """
        while (frame := self._connection.poll()) is not None and frame.type == FrameType.SAVED:
            if self._written is None:
                raise ProtocolError("a SAVED frame came without a checkpoint")
            self._written(frame.header["at"])
        if frame is None and self._connection.closed:
            raise EOFError("the supervisor closed the connection")
        return frame

    def _poll_data(self) -> None:
        """Poll between blocks of rows."""
        self.poll_early("preparing")

    def _wait_for(self, future: Future[Any], phase: str) -> Any:
        """Return the result of a thread's work, sending signs of life until it is done."""
        while not wait([future], timeout=0.1).done:
            self.poll_early(phase)
        return future.result()

    def _wait_for_libraries(self) -> None:
        self._wait_for(self._libraries, "preparing")

    # ---- preparing ----

    def _prepare(self, store: RowStore) -> Prepared:
        from pg_tensile.execution import models
        from pg_tensile.execution.training.settings import check_batch_size

        spec = self._spec
        split = Split(spec["seed"], spec["validation"])
        fitted = fit(store, split, spec["options"].get("task"), models.token_limits(models.parse(spec["architecture"])))
        check_batch_size(least_batch_size(spec), fitted)
        size = len(json.dumps(fitted.preprocessing.to_json()))
        if size > MAX_PREPROCESSING:
            hint = "Leave out text columns that are nearly unique, or shorten their strings."
            message = f"the distinct strings of all features take {size} bytes, more than {MAX_PREPROCESSING}"
            raise DataError(message, hint=hint)
        self._warn(store, fitted)
        return Prepared(fitted, prepare(store, fitted, split, spec["dataset_cache_bytes"], spec["spool_directory"]))

    def _build(self, prepared: Prepared) -> Job:
        """Return the job with its model, built on the CPU from generators seeded with the job's seed."""
        import torch

        from pg_tensile.execution import models
        from pg_tensile.execution.measuring.device import choose_device, use_deterministic_algorithms
        from pg_tensile.execution.training import checkpoint as ckpt
        from pg_tensile.execution.training.graphs import Sizes
        from pg_tensile.execution.training.settings import check_model
        from pyworker.children.memory import Job

        torch.set_num_threads(self._threads)
        device = choose_device(self._spec["device"])
        use_deterministic_algorithms()
        settings, preprocessing = _settings(self._spec), prepared.fitted.preprocessing
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
        known = self._spec["profiles"].get(str(device))
        return measure(device) if known is None else DeviceProfile(**known)

    def _warn(self, store: RowStore, fitted: FittedPreprocessing) -> None:
        if fitted.skipped_rows:
            target = fitted.preprocessing.target.name
            self._warnings.append(f'{fitted.skipped_rows} of {store.rows} rows were skipped: their "{target}" is null')
        if self._spec["validation"] > 0 and fitted.validation_rows == 0:
            self._warnings.append("no row fell into the validation part, so there are no validation metrics")

    # ---- training ----

    def _train(self) -> None:
        """Train, from the rows to the weights."""
        profile = self._background.submit(self._measure_device)
        checkpoint = self._receive_checkpoint()
        store = self._receive_rows()
        self._wait_for_libraries()
        prepared = self._prepare(store)
        del store
        from pg_tensile.execution.training import checkpoint as ckpt

        self._send(FrameType.PROGRESS, {"phase": "building"})
        job = self._build(prepared)
        self._memory = self._make_memory(job, self._wait_for(profile, "building"))
        trainer = self._begin(job, prepared, checkpoint)
        outcome = trainer.run()
        if outcome.stopped:
            self._send(FrameType.DONE, {"stopped": True})
            return
        self._send_version(outcome, prepared)
        send_state(self._connection, self._job, 0, "weights", ckpt.to_bytes(ckpt.model_tensors(job.model)))
        self._send(FrameType.DONE, {"stopped": False, "warnings": self._warnings})

    def _make_memory(self, job: Job, profile: DeviceProfile) -> MemoryClient:
        from pyworker.children.memory import MemoryClient

        load = self._load if job.device.type == "cpu" else LoadMeter("cuda", job.device.index or 0)
        return MemoryClient(self, job, profile, load)

    def _begin(self, job: Job, prepared: Prepared, checkpoint: tuple[bytes, dict[str, Any]] | None) -> Trainer:
        """Return the run, at its beginning or in the checkpoint's state."""
        from pg_tensile.execution.training import checkpoint as ckpt
        from pg_tensile.execution.training.trainer import Trainer, disagreement

        dataset, preprocessing = prepared.dataset, prepared.fitted.preprocessing
        identity = {key: self._spec[key] for key in ("architecture", "target", "validation", *_IDENTITY)}

        def trainer(job: Job, steps: Steps) -> Trainer:
            return Trainer(job.settings, steps, dataset, preprocessing, self, identity)

        if checkpoint is not None:
            reason = disagreement(checkpoint[1], dataset, identity)
            if reason is not None:
                self._warnings.append(reason)
                checkpoint = None
        state = None if checkpoint is None else ckpt.Checkpoint.from_bytes(*checkpoint)
        if self._spec["batch_size"]:
            run = trainer(job, self._plan(job))
        elif state is None:
            return self._choose(trainer)
        else:
            from pyworker.children.batch_size import resumed

            self.choice = state.meta["choice"]
            job = resumed(job, self.choice)
            run = trainer(job, self._plan(job))
        if state is not None:
            run.resume(state)
        return run

    def _choose(self, trainer: Callable[[Job, Steps], Trainer]) -> Trainer:
        """Return the run of a job whose batch size is chosen, after its first steps."""
        from pyworker.children.batch_size import Chooser

        assert self._memory is not None
        try:
            begun = Chooser(self, self._memory, trainer).run()
        except CaptureError as error:
            raise _with_way_out(error, chosen=True) from error
        run = trainer(begun.job, begun.steps)
        if begun.state is not None:
            run.resume(begun.state)
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
            return EagerSteps(job.model, job.settings, job.task, job.device, rows)
        self._send(FrameType.PROGRESS, {"phase": "capturing"})
        try:
            graphs = capture_graphs(*job)
        except CaptureError as error:
            raise _with_way_out(error) from error
        return self._memory.admit(graphs)

    def _send_version(self, outcome: Outcome, prepared: Prepared) -> None:
        """Describe the version that the weights belong to, which are sent next."""
        fitted = prepared.fitted
        preprocessing = fitted.preprocessing.to_json()
        rows = {"training": fitted.training_rows, "validation": fitted.validation_rows, "skipped": fitted.skipped_rows}
        version = {"task": preprocessing["task"], "preprocessing": preprocessing | {"rows": rows}}
        self._send(
            FrameType.VERSION, version | {"metrics": outcome.metrics, "fingerprint": prepared.dataset.fingerprint}
        )

    # ---- observing ----

    def progress(self, progress: Progress) -> None:
        header = progress._asdict()
        memory = header.pop("memory")._asdict()
        assert self._memory is not None
        self._send(FrameType.PROGRESS, header | memory | self._memory.progress())

    def metrics(self, metrics: EpochMetrics) -> None:
        header = {"epoch": metrics.epoch, "split": metrics.split, "seconds": metrics.seconds}
        self._send(FrameType.METRICS, header | metrics.metrics.to_json())
        assert self._memory is not None
        self._memory.epoch_ended()

    def checkpoint(self, checkpoint: Checkpoint, written: Callable[[float], None]) -> None:
        meta = checkpoint.meta | {"threads": self._threads} | ({"choice": self.choice} if self.choice else {})
        self._written = written
        send_state(self._connection, self._job, 0, "checkpoint", checkpoint.to_bytes(), meta)

    def poll(self) -> None:
        memory = self._memory
        assert memory is not None
        frame = self._poll()
        if frame is not None:
            try:
                memory.receive(self._expected(frame, {FrameType.PLAN, FrameType.REFUSE}))
            except Stopped as stop:
                from pg_tensile.execution.training.observer import StopTraining

                raise StopTraining(stop.checkpoint) from None
        memory.tick()

    # ---- sending ----

    def _send(self, type: FrameType, header: dict[str, Any], buffers: Sequence[bytes] = ()) -> None:
        self._connection.send(type, self._job, header=header, buffers=buffers)

    def _report_phase(self, phase: str) -> None:
        """Report the phase, at most every REPORT_INTERVAL_S and not while earlier frames wait to be sent."""
        now = time.monotonic()
        if now - self._reported >= REPORT_INTERVAL_S and self._connection.flush():
            self._connection.queue(FrameType.PROGRESS, self._job, header={"phase": phase})
            self._connection.flush()
            self._reported = now


def _with_way_out(error: CaptureError, chosen: bool = False) -> CaptureError:
    """Return the error with a hint at how such a model can be trained.

    `chosen`: the batch size was to be chosen.
    """
    hint = (error.hint or "").replace("the policy none", "policy => 'none'")
    if "policy => 'none'" not in hint:
        hint = f"{hint} Or train it with policy => 'none', which runs the model as it is.".strip()
    if chosen:
        hint = hint.replace("policy => 'none'", "policy => 'none' and a batch_size")
    return CaptureError(error.message, hint, error.detail)


def least_batch_size(spec: dict[str, Any]) -> int:
    """Return the batch size or, if it is to be chosen, the smallest one allowed."""
    least, _ = spec["options"].get("batch_size_range", (1, 1))
    return int(spec["batch_size"] or least)


_IDENTITY = ("batch_size", "optimizer", "learning_rate", "seed")


def _settings(spec: dict[str, Any]) -> Settings:
    """Return the library's settings for the job's spec."""
    from pg_tensile.execution.training.settings import EarlyStopping, Settings
    from pg_tensile.rules import check_options

    options = spec["options"]
    check_options(options)
    stopping = options.get("early_stopping")
    return Settings(
        epochs=spec["epochs"],
        batch_size=spec["batch_size"],
        optimizer=spec["optimizer"],
        learning_rate=spec["learning_rate"],
        seed=spec["seed"],
        weight_decay=options.get("weight_decay"),
        momentum=options.get("momentum"),
        clip=options.get("clip"),
        early_stopping=None if stopping is None else EarlyStopping(**stopping),
        checkpoint_interval_s=spec["checkpoint_interval_s"],
        compression=options.get("compression", "none"),
    )
