"""The trainer's end of the connection to its supervisor: its job's frames, and signs of life during lengthy work.

A STOP is honoured wherever a frame is awaited or polled for: it raises `Stopped`. Only the main thread reads and writes
the socket. While rows arrive, sending must never block: the feed on the other side writes and does not read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

from pg_tensile.execution.data.columns import columns_from_header
from pg_tensile.execution.data.dataset import RowStore
from pg_tensile.planning.latency.load import LoadMeter
from pyworker.children.rows_file import RowsWriter, read_frames
from pyworker.connection import FrameStream
from pyworker.state_frames import StateCollector, send_state
from pyworker.wire import Buffer, Frame, FrameType, ProtocolError

REPORT_INTERVAL_S = 0.5
ROWS_WRITTEN = "preparing"  # phase that is reported when the rows are in the file of a tuning
SILENCE_S = 1.0  # at most, while it waits for a frame

Result = TypeVar("Result")


class Stopped(Exception):
    """STOP came where ending at once loses nothing; `checkpoint` says whether it requests one."""

    def __init__(self, checkpoint: bool) -> None:
        super().__init__("the job was told to stop")
        self.checkpoint = checkpoint


class Channel:
    """One job's frames, and the thread `background` for work during which the main thread gives signs of life."""

    def __init__(self, connection: FrameStream, background: ThreadPoolExecutor) -> None:
        self._connection = connection
        self._reported_at = 0.0
        self._job = 0
        self.background = background
        self.spec: dict[str, Any] = {}  # the JOB frame's header
        self.threads = 1
        self.latency_models: dict[str, memoryview] = {}  # by device, as planning/latency/model_bytes.py encodes them
        self.running_buffers: Sequence[Buffer] = ()  # of the running jobs, of which explain_training is told
        self.load: LoadMeter | None = None  # of the device by others, reported while the job waits for memory
        self.checkpoint_stored: Callable[[float], None] | None = None  # called with the time of the commit

    # ---- receiving ----

    def receive_job(self) -> None:
        frame = self._next({FrameType.JOB})
        self.begin(frame.job, frame.header)
        models = self.spec["latency_models"]
        self.latency_models = dict(zip(models, frame.buffers, strict=False))
        self.running_buffers = frame.buffers[len(models) :]

    def begin(self, job: int, spec: dict[str, Any]) -> None:
        """Take over the job with this number and spec."""
        self._job, self.spec = job, spec
        resume = self.spec["resume"] or {}
        self.threads = resume.get("threads") or self.spec["threads"]  # another number would change sums' last bits

    def receive_checkpoint(self) -> tuple[bytes, dict[str, Any]] | None:
        """Return the checkpoint to resume from (safetensors file and meta), or None."""
        if self.spec["resume"] is None:
            return None
        return self.receive_state(), self.spec["resume"]

    def receive_state(self) -> bytes:
        """Return the state that comes next, a safetensors file."""
        collector = StateCollector()
        while (state := collector.add(self._next({FrameType.STATE}))) is None:
            pass
        return state.data

    def receive_rows(self) -> RowStore:
        """Return the rows of the job: those that its supervisor sends, or those in the file of its tuning."""
        shared = self.spec.get("rows_file")
        frames = self._sent_rows(shared) if shared is None or not shared["written"] else self._read_rows(shared["path"])
        columns = columns_from_header(next(frames).header["columns"])
        cache_bytes, folder = self.spec["dataset_cache_bytes"], self.spec["spool_directory"]
        store = RowStore(columns, cache_bytes, folder, poll=self._poll_between_blocks)
        for frame in frames:
            if frame.type == FrameType.ROWS:
                store.add(frame.header["rows"], frame.buffers)
                self._report_phase("loading")
            else:
                store.finish(frame.header["rows"], frame.header["fingerprint"], frame.buffers)
        return store

    def _sent_rows(self, shared: dict[str, Any] | None) -> Iterator[Frame]:
        """Yield COLUMNS, ROWS … ROWS_END as they come, and write them to the file of the tuning, if the job has one."""
        writer = None if shared is None else RowsWriter(shared["path"])
        expected = {FrameType.COLUMNS}
        while True:
            frame = self._next(expected)
            if writer is not None:
                writer.add(frame)
            if writer is not None and frame.type == FrameType.ROWS_END:
                writer.finish()
                self.send(FrameType.PROGRESS, {"phase": ROWS_WRITTEN})
            yield frame
            if frame.type == FrameType.ROWS_END:
                return
            expected = {FrameType.ROWS, FrameType.ROWS_END}

    def _read_rows(self, path: str) -> Iterator[Frame]:
        for frame in read_frames(path):
            self.poll_early("loading")
            yield frame

    def _poll_between_blocks(self) -> None:
        self.poll_early("preparing")

    def _next(self, expected: Collection[FrameType]) -> Frame:
        frame = self._connection.recv()
        assert frame is not None  # no time-out
        return _checked(frame, expected)

    def wait_for_frame(self, phase: str, expected: Collection[FrameType]) -> Frame:
        """Return the next frame, sending signs of life until it comes. Raises Stopped.

        SAVED, which confirms that a checkpoint is stored, is handled here."""
        while True:
            self._report_phase(phase)
            frame = self._connection.recv(SILENCE_S)
            if frame is not None and not self._takes_note(frame):
                return _checked(frame, expected)

    def poll_early(self, phase: str, expected: Collection[FrameType] = ()) -> Frame | None:
        """Send a sign of life, and return a frame of the types `expected` if one came, else None.

        For lengthy work before training, between two parts of it. Raises Stopped.
        """
        self._report_phase(phase)
        return self.poll(expected)

    def poll(self, expected: Collection[FrameType]) -> Frame | None:
        """Return a frame of the types `expected` if one came, else None; never block. Raises Stopped.

        SAVED, which confirms that a checkpoint is stored, is handled here.
        """
        while (frame := self._connection.poll()) is not None and self._takes_note(frame):
            pass
        if frame is None and self._connection.closed:
            raise EOFError("the supervisor closed the connection")
        return None if frame is None else _checked(frame, expected)

    def _takes_note(self, frame: Frame) -> bool:
        """Process a SAVED frame; return whether the frame is one."""
        if frame.type != FrameType.SAVED:
            return False
        if self.checkpoint_stored is None:
            raise ProtocolError("a SAVED frame came without a checkpoint")
        self.checkpoint_stored(frame.header["at"])
        return True

    def poll_any(self) -> Frame | None:
        """Return the next frame of any type if one came, else None; never block. Raises Stopped."""
        frame = self._connection.poll()
        if frame is None and self._connection.closed:
            raise EOFError("the supervisor closed the connection")
        return None if frame is None else _checked(frame, {frame.type})

    def wait_for(self, future: Future[Result], phase: str, expected: Collection[FrameType] = ()) -> Result:
        """Return the result of a thread's work, sending signs of life until it is done.

        Frames of the types `expected` are ignored meanwhile. Raises Stopped.
        """
        while not wait([future], timeout=0.1).done:
            self.poll_early(phase, expected)
        return future.result()

    # ---- sending ----

    @property
    def job(self) -> int:
        """Number of the job."""
        return self._job

    def send(self, type: FrameType, header: dict[str, Any], buffers: Sequence[bytes] = ()) -> None:
        self._connection.send(type, self._job, header=header, buffers=buffers)

    def send_state(self, kind: str, data: Buffer, meta: dict[str, Any] | None = None) -> None:
        send_state(self._connection, self._job, 0, kind, data, meta)

    def _report_phase(self, phase: str) -> None:
        """Report the phase, at most every REPORT_INTERVAL_S and not while earlier frames wait to be sent."""
        now = time.monotonic()
        if now - self._reported_at >= REPORT_INTERVAL_S and self._connection.flush():
            header: dict[str, Any] = {"phase": phase}
            if phase == "waiting" and self.load is not None:
                header["utilisation"] = round(self.load.read(), 3)
            self._connection.queue(FrameType.PROGRESS, self._job, header=header)
            self._connection.flush()
            self._reported_at = now


def _checked(frame: Frame, expected: Collection[FrameType]) -> Frame:
    """Return the frame if it is of the types `expected`. Raises Stopped at STOP, ProtocolError at any other."""
    if frame.type == FrameType.STOP:
        raise Stopped(bool(frame.header.get("checkpoint")))
    if frame.type not in expected:
        raise ProtocolError(f"unexpected {frame.type.name} frame")
    return frame
