"""The executor process: receives one job and its rows, trains, and sends back what comes of it.

Phases: JOB (and the checkpoint to continue from), COLUMNS, ROWS … ROWS_END, while a thread imports torch; then
preprocessing, training, and at the end the weights and DONE. A STOP is honoured in every phase: between frames, between
blocks of rows, between steps. The main thread alone reads and writes the socket.

While rows arrive nothing may block in sending: the feed on the other side writes and does not read.
"""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

from pg_tensile.columns import columns_from_header
from pg_tensile.dataset import Dataset, RowStore, prepare
from pg_tensile.errors import DataError
from pg_tensile.fitting import FittedPreprocessing, Split, fit
from pyworker.wire import Connection, Frame, FrameType, ProtocolError, StateCollector, send_state

if TYPE_CHECKING:
    import torch

    from pg_tensile.checkpoint import Checkpoint
    from pg_tensile.models.registry import Architecture
    from pg_tensile.training import EpochMetrics, Outcome, Progress

REPORT_INTERVAL_S = 0.5
MAX_PREPROCESSING = 12 << 20  # bytes of JSON: it travels in a frame's header


def run(connection: Connection, hello: dict[str, Any]) -> None:
    """The body of the process: one job."""
    importer = ThreadPoolExecutor(1)
    libraries = importer.submit(_import_libraries)
    importer.submit(__import__, "torch._dynamo")  # the first optimizer step would: most of a second
    importer.shutdown(wait=False)
    Executor(connection, libraries).run()


def _import_libraries() -> None:
    import pg_tensile.models
    import pg_tensile.training  # noqa: F401


class Stopped(Exception):
    """STOP came before training began."""


class Executor:
    """One job's life. It is also the run's observer (`pg_tensile.training.Observer`)."""

    def __init__(self, connection: Connection, libraries: Future[None]) -> None:
        self._connection = connection
        self._libraries = libraries
        self._job = 0
        self._spec: dict[str, Any] = {}
        self._reported = 0.0
        self._warnings: list[str] = []
        self._threads = 1

    def run(self) -> None:
        try:
            self._receive_job()
            checkpoint = self._receive_checkpoint()
            store = self._receive_rows()
            self._wait_for_libraries()
            fitted, dataset, architecture = self._prepare(store)
        except Stopped:
            self._send(FrameType.DONE, {"stopped": True})
            return
        del store
        self._train(checkpoint, fitted, dataset, architecture)

    # ---- receiving ----

    def _receive_job(self) -> None:
        frame = self._next({FrameType.JOB})
        self._job, self._spec = frame.job, frame.header
        resume = self._spec["resume"] or {}
        self._threads = resume.get("threads") or self._spec["threads"]  # other threads, other sums: not to the bit

    def _receive_checkpoint(self) -> tuple[bytes, dict[str, Any]] | None:
        """The checkpoint to continue from: safetensors file and meta."""
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
        if frame.type == FrameType.STOP:
            raise Stopped
        if frame.type not in expected:
            raise ProtocolError(f"unexpected {frame.type.name} frame")
        return frame

    def _stop_frame(self) -> Frame | None:
        """A STOP frame if one came; never blocks."""
        frame = self._connection.poll()
        if frame is None:
            if self._connection.closed:
                raise EOFError("the supervisor closed the connection")
            return None
        if frame.type == FrameType.STOP:
            return frame
        if frame.type == FrameType.PLAN:
            return None  # for the runtime of plans
        raise ProtocolError(f"unexpected {frame.type.name} frame")

    def _poll_data(self) -> None:
        """Between blocks of rows."""
        self._report_phase("preparing")
        if self._stop_frame() is not None:
            raise Stopped

    def _wait_for_libraries(self) -> None:
        while not wait([self._libraries], timeout=0.1).done:
            self._poll_data()
        self._libraries.result()

    # ---- preparing ----

    def _prepare(self, store: RowStore) -> tuple[FittedPreprocessing, Dataset, Architecture]:
        from pg_tensile import models
        from pg_tensile.training import check_batch_size

        spec = self._spec
        split = Split(spec["seed"], spec["validation"])
        architecture = models.parse(spec["architecture"])
        fitted = fit(store, split, spec["options"].get("task"), models.token_limits(architecture))
        check_batch_size(spec["batch_size"], fitted)
        size = len(json.dumps(fitted.preprocessing.to_json()))
        if size > MAX_PREPROCESSING:
            hint = "Leave out text columns that are nearly unique, or shorten their strings."
            message = f"the distinct strings of all features take {size} bytes, more than {MAX_PREPROCESSING}"
            raise DataError(message, hint=hint)
        self._warn(store, fitted)
        dataset = prepare(store, fitted, split, spec["dataset_cache_bytes"], spec["spool_directory"])
        return fitted, dataset, architecture

    def _warn(self, store: RowStore, fitted: FittedPreprocessing) -> None:
        if fitted.skipped_rows:
            target = fitted.preprocessing.target.name
            self._warnings.append(f'{fitted.skipped_rows} of {store.rows} rows were skipped: their "{target}" is null')
        if self._spec["validation"] > 0 and fitted.validation_rows == 0:
            self._warnings.append("no row fell into the validation part, so there are no validation metrics")

    # ---- training ----

    def _train(
        self,
        checkpoint: tuple[bytes, dict[str, Any]] | None,
        fitted: FittedPreprocessing,
        dataset: Dataset,
        architecture: Architecture,
    ) -> None:
        import torch

        from pg_tensile import checkpoint as ckpt
        from pg_tensile import models
        from pg_tensile.device import choose_device, use_deterministic_algorithms
        from pg_tensile.training import Trainer

        torch.set_num_threads(self._threads)
        use_deterministic_algorithms()
        device = choose_device(self._spec["device"])
        self._report_device(device)
        settings = _settings(self._spec)
        ckpt.seed_generators(settings.seed)
        preprocessing = fitted.preprocessing
        model = models.build(architecture, preprocessing.model_inputs, preprocessing.outputs)
        identity = {key: self._spec[key] for key in ("architecture", "target", "validation", *_IDENTITY)}
        trainer = Trainer(settings, model, dataset, preprocessing, device, self, identity)
        if checkpoint is not None:
            reason = trainer.resume(ckpt.Checkpoint.from_bytes(*checkpoint))
            if reason is not None:
                self._warnings.append(reason)
        outcome = trainer.run()
        if outcome.stopped:
            self._send(FrameType.DONE, {"stopped": True})
            return
        send_state(self._connection, self._job, 0, "weights", ckpt.to_bytes(ckpt.model_tensors(model)))
        self._send_done(outcome, fitted)

    def _send_done(self, outcome: Outcome, fitted: FittedPreprocessing) -> None:
        preprocessing = fitted.preprocessing.to_json()
        rows = {"training": fitted.training_rows, "validation": fitted.validation_rows, "skipped": fitted.skipped_rows}
        done = {"stopped": False, "task": preprocessing["task"], "preprocessing": preprocessing | {"rows": rows}}
        self._send(FrameType.DONE, done | {"metrics": outcome.metrics, "warnings": self._warnings})

    def _report_device(self, device: torch.device) -> None:
        import torch

        if device.type == "cuda":
            total = torch.cuda.get_device_properties(device).total_memory
        else:
            total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        self._send(FrameType.PROGRESS, {"phase": "building", "device": {"name": str(device), "total_bytes": total}})

    # ---- observing ----

    def progress(self, progress: Progress) -> None:
        self._send(FrameType.PROGRESS, progress._asdict())

    def metrics(self, metrics: EpochMetrics) -> None:
        header = {"epoch": metrics.epoch, "split": metrics.split, "seconds": metrics.seconds}
        self._send(FrameType.METRICS, header | metrics.metrics.to_json())

    def checkpoint(self, checkpoint: Checkpoint) -> None:
        meta = checkpoint.meta | {"threads": self._threads}
        send_state(self._connection, self._job, 0, "checkpoint", checkpoint.to_bytes(), meta)

    def poll(self) -> None:
        frame = self._stop_frame()
        if frame is not None:
            from pg_tensile.training import StopTraining

            raise StopTraining(bool(frame.header.get("checkpoint")))

    # ---- sending ----

    def _send(self, type: FrameType, header: dict[str, Any]) -> None:
        self._connection.send(type, self._job, header=header)

    def _report_phase(self, phase: str) -> None:
        """Says what goes on, unless what was said before still waits to be read."""
        now = time.monotonic()
        if now - self._reported >= REPORT_INTERVAL_S and self._connection.flush():
            self._connection.queue(FrameType.PROGRESS, self._job, header={"phase": phase})
            self._connection.flush()
            self._reported = now


_IDENTITY = ("batch_size", "optimizer", "learning_rate", "seed")


def _settings(spec: dict[str, Any]) -> Any:
    """The job's spec as the library's settings."""
    from pg_tensile.training import EarlyStopping, Settings

    options = spec["options"]
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
    )
