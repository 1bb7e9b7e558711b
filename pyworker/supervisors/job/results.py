"""Results that a job's trainer sends: checkpoints, weights, measurements, a calibration. Standard library only."""

from __future__ import annotations

import time
from typing import Any

from pyworker.state_frames import StateChunk, StateReader
from pyworker.supervisors.child_process import Child
from pyworker.supervisors.failures import Failure
from pyworker.supervisors.job.prediction_query import Judge
from pyworker.supervisors.job.progress import report_progress
from pyworker.supervisors.server import Server
from pyworker.wire import Frame, FrameType, ProtocolError

MOST_LATENCY_BYTES = 64 << 20  # of a calibration's result, which is held in memory


class JobResults:
    """Results of one attempt at a job; `row` is what `_job_begin` returned."""

    def __init__(self, server: Server, child: Child, job: int, row: dict[str, Any]) -> None:
        self._server = server
        self._child = child
        self._job = job
        self._row = row
        self._calibrates = row["kind"] == "calibrate"
        checkpoint = row["checkpoint"] or {}
        self._generation = int(checkpoint.get("generation", 0)) + 1  # of the next checkpoint
        self._states = StateReader()
        self._most_bytes = server.number("pg_tensile.max_state_size") << 20
        self._version: int | None = None  # id of the model's version
        self.sources: list[dict[str, Any]] = []  # relations and columns that the rows were read from
        self.derived: dict[str, Any] | None = None  # header of QUERY
        self._is_first = False  # another version will follow
        self._complete = False  # the version has all of its weights
        self._latency_models: list[memoryview] = []
        self._calibration: dict[str, Any] = {}  # meta of the latency models

    # -- states -------------------------------------------------------------------------------------------------------

    def keep_chunk(self, frame: Frame) -> None:
        """Keep a chunk of a checkpoint, of weights or of latency models."""
        chunk = self._states.chunk(frame)
        most = MOST_LATENCY_BYTES if self._calibrates else self._most_bytes
        if self._states.bytes > most:
            message = f"the trainer sent more than {most >> 20} MB of {chunk.kind}"
            hint = "Raise pg_tensile.max_state_size, or train a smaller model."
            raise Failure("54000", message, hint=None if self._calibrates else hint)
        if chunk.kind == "latency_models" and self._calibrates:
            self._latency_models.append(chunk.data)
            self._calibration = chunk.meta
        elif chunk.kind == "weights" and self._version is not None and not self._complete:
            self._keep_weights(chunk)
        elif chunk.kind == "checkpoint" and not self._calibrates:
            self._keep_checkpoint(chunk)
        else:
            raise ProtocolError(f"unexpected STATE frame of kind {chunk.kind!r}")

    def _keep_checkpoint(self, chunk: StateChunk) -> None:
        """Store a chunk of a checkpoint in the catalogue; the checkpoint before is valid until this one is complete.

        SAVED gives the trainer the time of the commit, by the monotonic clock that the machine's processes share, so
        that it can determine the cost of its checkpoints.
        """
        generation = self._generation
        self._server.call("tensile_worker._job_checkpoint(int4,int4,bytea)", generation, chunk.seq, bytes(chunk.data))
        if chunk.last:
            meta = chunk.meta | {"generation": generation}
            self._server.call("tensile_worker._job_checkpoint_done(int4,jsonb)", generation, meta)
            self._generation += 1
        self._server.commit()
        if chunk.last:
            self._child.queue(FrameType.SAVED, self._job, header={"at": time.monotonic()})

    def begin_version(self, header: dict[str, Any]) -> None:
        """Create the version that the weights belong to.

        It is invisible before DONE, unless it is a first one, which another version will replace."""
        if self._version is not None:
            raise ProtocolError("a second VERSION frame")
        self._is_first = header.get("first", False)
        self._report_saving()
        keys = ("task", "preprocessing", "metrics", "fingerprint", "training", "reference", "architecture")
        values = (header.get(key) for key in keys)
        self._version = self._server.call(
            "tensile_worker._job_version(text,jsonb,jsonb,text,jsonb,jsonb,jsonb)", *values
        )
        self._server.call("tensile_worker._job_sources(int8,jsonb)", self._version, self.sources)
        self._server.commit()
        if self.derived is not None:
            judge = Judge(self._server, self._version, self._row, self.sources)
            kept = judge.chosen(self.derived)
            self._server.call("tensile_worker._job_prediction_query(int8,jsonb)", self._version, kept)
            self._server.commit()

    def _keep_weights(self, chunk: StateChunk) -> None:
        """Store a chunk of weights in the version.

        Chunks are stored as they come, because a model may be larger than what a process of the server should hold.
        """
        self._server.call("tensile_worker._job_weights(int8,int4,bytea)", self._version, chunk.seq, bytes(chunk.data))
        self._complete = chunk.last
        if chunk.last and self._is_first:
            self._server.call("tensile_worker._job_first_version()")
            self._version, self._complete = None, False
        self._server.commit()

    # -- measurements -------------------------------------------------------------------------------------------------

    def keep_metrics(self, frame: Frame) -> None:
        self._server.call("tensile_worker._job_metric(jsonb)", frame.header)
        self._server.commit()

    def keep_architecture(self, frame: Frame) -> None:
        """Store the architecture that the trainer has chosen."""
        choice = frame.header
        self._server.call("tensile_worker._job_architecture(jsonb,text)", choice["architecture"], choice["reason"])
        self._server.commit()

    def keep_settings(self, frame: Frame) -> None:
        """Store the settings that the job left open."""
        self._server.call("tensile_worker._job_settings(jsonb)", frame.header)
        self._server.commit()

    def keep_choice(self, frame: Frame) -> None:
        """Store the batch size that the trainer has chosen."""
        self._server.call("tensile_worker._job_choice(jsonb)", frame.header)
        self._server.commit()

    def keep_latency(self, frame: Frame) -> None:
        columns = [list(memoryview(buffer).cast("f")) for buffer in frame.buffers]
        self._server.call("tensile_worker._job_latency(jsonb,float4[],float4[],float4[])", frame.header, *columns)
        self._server.commit()

    def keep_sparsity(self, frame: Frame) -> None:
        """Store the statistics of the swapped tensors, and the times of the codecs if the frame has them."""
        if frame.header["codecs"] is not None:
            self._keep_codecs(frame.header["codecs"])
        tensors, *shares, moved = frame.buffers
        share_columns = [buffer.cast("f").tolist() for buffer in shares]
        columns = (tensors.cast("i").tolist(), *share_columns, moved.cast("q").tolist())
        signature = "tensile_worker._job_sparsity(int4,int4[],float4[],float4[],float4[],int8[])"
        self._server.call(signature, frame.header["revision"], *columns)
        self._server.commit()

    def _keep_codecs(self, measured: dict[str, Any]) -> None:
        fields = [measured[name] for name in ("device", "times", "relative_error")]
        self._server.call("tensile_worker._job_codec_times(text,jsonb,float8)", *fields)

    # -- the end ------------------------------------------------------------------------------------------------------

    def complete(self) -> None:
        """Check that the version has its weights, or store the calibration; the transaction is the caller's to end."""
        if self._version is not None and not self._complete:
            raise ProtocolError("DONE came before the end of the weights")
        if not self._calibrates:
            return
        self._report_saving()
        meta = self._calibration
        self._server.call(
            "tensile_worker._calibrate_done(text,jsonb,bytea,int4,int4,float8,text[],text)",
            meta["device"],
            meta["profile"],
            b"".join(self._latency_models),
            meta["kinds"],
            meta["samples"],
            meta["error"],
            meta["known_kinds"],
            self._child.torch,
        )
        if meta["codecs"] is not None:
            self._keep_codecs(meta["codecs"])

    def _report_saving(self) -> None:
        report_progress(self._server, {"phase": "saving"})
        self._server.commit()
