"""The predictor process: keeps models loaded and answers every session's predictions.

One thread, one epoll loop over the supervisor's socket, the listening socket `pg_tensile/predict.sock` (in the data
directory, for its owner only) and the sessions'. A session's requests are answered in order. A version that is not
loaded is asked for once (LOAD) while the requests for it wait; MODEL and the weights make it a `LoadedModel`. Models
are dropped, the one unused for longest first, when together they exceed the cache.

A session cannot disturb others: a request that is wrong gets an ERROR, a stream that is not frames is closed, and a
session that does not read its answers is not read from. Whatever a row does not need is done when a model is loaded.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import operator
import os
import resource
import select
import socket
import struct
import sys
import time
from collections import OrderedDict, deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pg_tensile.preprocessing import ArraysInput, CategoryInput, Features, Inputs, Preprocessing, Task
from pyworker import child
from pyworker.version import VERSION
from pyworker.wire import Connection, Frame, FrameType, ProtocolError, StateCollector

if TYPE_CHECKING:
    from torch import nn

SOCKET = Path("pg_tensile/predict.sock")
BACKLOG = 128
FEW_ROWS = 16
SPIN_NS = 50_000  # see Predictor._events
CACHE_VARIABLE = "PG_TENSILE_MODEL_CACHE"
DEFAULT_CACHE = 1 << 30
_INT64 = struct.Struct("<q")


class Malformed(Exception):
    """A request that does not fit the model's features."""

    hint = "The server's library and the predictor disagree; run make install and restart the server."


class Answer(NamedTuple):
    """What a PREDICTION frame carries; docs/internals.md, "Features (PREDICT)"."""

    unknown: int
    prediction: NDArray[np.float64]  # [rows]
    probability: NDArray[np.float64]  # [rows]
    label: NDArray[np.int32]  # [rows]


class LoadedModel:
    """A version ready to predict."""

    def __init__(self, preprocessing: Preprocessing, module: nn.Module, nbytes: int) -> None:
        import torch

        from pg_tensile.models import few_rows

        self.nbytes = nbytes
        self._preprocessing = preprocessing
        self._module = module.eval()
        self._few_rows = few_rows(module)
        self._from_numpy = torch.from_numpy
        self._numbers = len(preprocessing.numbers)
        self._categories = len(preprocessing.categories)
        self._arrays = len(preprocessing.arrays)
        values = preprocessing.label_values
        self._label_values = np.array(values, np.float64) if values is not None else None

    @staticmethod
    def load(header: dict[str, Any], weights: bytes) -> LoadedModel:
        """Builds the version in a MODEL frame's header. Raises TensileError."""
        from pg_tensile import checkpoint, models

        preprocessing = Preprocessing.from_json(header["preprocessing"])
        module = models.build(models.parse(header["architecture"]), preprocessing.model_inputs, preprocessing.outputs)
        checkpoint.load_model(module, checkpoint.from_bytes(weights))
        strings = sum(len(text) + 100 for f in preprocessing.categories for text in f.categories or ())
        return LoadedModel(preprocessing, module, len(weights) + strings)

    def predict(self, frame: Frame) -> Answer:
        """Answers a PREDICT frame. Raises Malformed, or DataError for arrays of a wrong length."""
        inputs, unknown = self._inputs(frame)
        features = self._preprocessing.apply(inputs)
        if inputs.rows <= FEW_ROWS and self._few_rows is not None:
            outputs = self._few_rows(features)
        else:
            tensors = [self._from_numpy(array) for array in features.flat()]
            outputs = self._module(Features.from_flat(tensors)).numpy()
        return self._answer(outputs.astype(np.float64), unknown)

    def _inputs(self, frame: Frame) -> tuple[Inputs, int]:
        rows, buffers = frame.header.get("rows"), frame.buffers
        if not isinstance(rows, int) or rows < 0 or len(buffers) != 2 + 2 * self._arrays:
            raise Malformed(f"a request has {len(buffers)} buffers and {rows} rows")
        try:
            numeric = np.frombuffer(buffers[0], np.float64).reshape(self._numbers, rows)
            codes = np.frombuffer(buffers[1], np.int32).reshape(self._categories, rows)
        except ValueError:
            raise Malformed(f"a request's buffers do not fit {rows} rows") from None
        categories, unknown = self._category_inputs(codes, frame.header.get("dict") or [])
        arrays = [self._array_input(rows, *buffers[2 + 2 * i : 4 + 2 * i]) for i in range(self._arrays)]
        return Inputs(rows, numeric, categories, arrays), unknown

    def _category_inputs(self, codes: NDArray[np.int32], dictionaries: list[Any]) -> tuple[list[CategoryInput], int]:
        """Categories, and how many of their strings are not null but were never seen in training."""
        if len(dictionaries) != self._categories:
            raise Malformed(f"a request has {len(dictionaries)} dictionaries for {self._categories} categories")
        if not self._categories:
            return [], 0
        limits = [len(strings) for strings in dictionaries]
        lowest, highest = codes.min(initial=0), codes.max(axis=1, initial=-1).tolist()
        if lowest < -1 or any(map(operator.ge, highest, limits)):
            raise Malformed("a request's category codes exceed their dictionary")
        codes_of_strings = [self._preprocessing.codes(number, strings) for number, strings in enumerate(dictionaries)]
        tables = np.array([code for known in codes_of_strings for code in (*known, 0)], np.int64)
        categories: list[CategoryInput] = []
        unknown = end = 0
        for places, limit, known in zip(codes, limits, codes_of_strings, strict=True):
            start, end = end, end + limit + 1
            category = CategoryInput(places, tables[start:end])
            if 0 in known:
                unknown += int(((places >= 0) & (category.table[places] == 0)).sum())
            categories.append(category)
        return categories, unknown

    @staticmethod
    def _array_input(rows: int, lengths: memoryview, elements: memoryview) -> ArraysInput:
        try:
            array = ArraysInput(np.frombuffer(lengths, np.int32), np.frombuffer(elements, np.float64))
        except ValueError as error:
            raise Malformed(str(error)) from None
        if len(array.lengths) != rows or array.lengths.clip(min=0).sum(dtype=np.int64) != len(array.elements):
            raise Malformed(f"a request's array elements do not fit {rows} rows")
        return array

    def _answer(self, outputs: NDArray[np.float64], unknown: int) -> Answer:
        """From the model's outputs [rows, outputs]."""
        rows = len(outputs)
        task = self._preprocessing.task
        if task == Task.REGRESSION:
            target = self._preprocessing.target
            prediction = outputs[:, 0] * target.std + target.mean
            return Answer(unknown, prediction, np.full(rows, np.nan), np.full(rows, -1, np.int32))
        if task == Task.BINARY:
            positive = _sigmoid(outputs[:, 0])
            label = positive > 0.5
            return Answer(unknown, positive, np.where(label, positive, 1.0 - positive), label.astype(np.int32))
        odds = np.exp(outputs - outputs.max(axis=1, keepdims=True))
        label = outputs.argmax(axis=1)
        values = self._label_values
        prediction = values[label] if values is not None else np.full(rows, np.nan)
        return Answer(unknown, prediction, odds.max(axis=1) / odds.sum(axis=1), label.astype(np.int32))


def _sigmoid(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """1 / (1 + e^−x); beyond ±700 it is 0 or 1 to the last bit anyway."""
    return 1.0 / (1.0 + np.exp(np.minimum(np.maximum(-x, -700.0), 700.0)))


class ModelCache:
    """Loaded models by version, the least recently used first."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._models: OrderedDict[int, LoadedModel] = OrderedDict()
        self.nbytes = 0

    def get(self, version: int) -> LoadedModel | None:
        model = self._models.get(version)
        if model is not None:
            self._models.move_to_end(version)
        return model

    def add(self, version: int, model: LoadedModel) -> None:
        """Keeps the model, and drops others to make room for it."""
        self._models[version] = model
        self.nbytes += model.nbytes
        self.shrink(self._limit, 1)

    def shrink(self, limit_bytes: int, least: int = 0) -> None:
        """Drops models, the one unused for longest first, but not the last `least`, until they fit the limit."""
        while self.nbytes > limit_bytes and len(self._models) > least:
            _, dropped = self._models.popitem(last=False)
            self.nbytes -= dropped.nbytes


class Session:
    """One session's connection and the requests it waits for."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.greeted = False
        self.requests: deque[Frame] = deque()
        self.blocked = False  # it does not read its answers: not read from until it does


class Predictor:
    """The epoll loop."""

    def __init__(self, supervisor: Connection, cache_bytes: int, listener: socket.socket) -> None:
        self._supervisor = supervisor
        self._models = ModelCache(cache_bytes)
        self._listener = listener
        self._sessions: dict[int, Session] = {}
        self._waiting: dict[int, list[Session]] = {}  # by the version they wait for
        self._arriving: tuple[int, dict[str, Any], StateCollector] | None = None
        self._soon = False  # the last request came soon after the one before
        self._epoll = select.epoll()
        self._epoll.register(supervisor.fileno(), select.EPOLLIN)
        self._epoll.register(listener.fileno(), select.EPOLLIN)

    def run(self) -> None:
        """Until the supervisor says STOP or goes away."""
        while True:
            for fd, _ in self._events():
                session = self._sessions.get(fd)
                if session is not None:
                    self._serve(session)
                elif fd == self._listener.fileno():
                    self._accept()
                elif fd == self._supervisor.fileno() and self._hear_supervisor():
                    return

    def _events(self) -> list[tuple[int, int]]:
        """What to do next. A session often asks for one row after the other, and waking a core that went to sleep takes
        longer than an answer: so the next request is watched for during a moment, if the last one came that soon."""
        started = time.perf_counter_ns()
        while self._soon and time.perf_counter_ns() - started < SPIN_NS:
            events = self._epoll.poll(0)
            if events:
                return events
            os.sched_yield()  # the session may be waiting for this very core
        events = self._epoll.poll()
        self._soon = time.perf_counter_ns() - started < SPIN_NS
        return events

    # ---- sessions ----

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._close_idle_session()
            return  # else: it gave up already
        sock.setblocking(False)
        self._sessions[sock.fileno()] = Session(Connection(sock))
        self._epoll.register(sock.fileno(), select.EPOLLIN)

    def _close_idle_session(self) -> None:
        """Makes room for another one: a session whose idle connection ends opens a new one without a word."""
        for session in self._sessions.values():
            if session.greeted and not session.requests and not session.blocked:
                self._close(session)
                return

    def _close(self, session: Session) -> None:
        fd = session.connection.fileno()
        with contextlib.suppress(OSError):
            self._epoll.unregister(fd)
        del self._sessions[fd]
        session.requests.clear()
        session.connection.close()

    def _serve(self, session: Session) -> None:
        """Takes what the session sent, answers what can be answered."""
        connection = session.connection
        try:
            if session.blocked and not self._unblock(session):
                return
            frame = connection.poll()  # one, then the next session's turn
            if frame is not None:
                session.requests.append(frame)
                self._answer_requests(session)
        except (ProtocolError, OSError):
            self._close(session)
            return
        if connection.closed:
            self._close(session)

    def _unblock(self, session: Session) -> bool:
        if not session.connection.flush():
            return False
        session.blocked = False
        self._epoll.modify(session.connection.fileno(), select.EPOLLIN)
        self._answer_requests(session)
        return True

    def _answer_requests(self, session: Session) -> None:
        """In order, until one must wait for its model or the session for its answers."""
        while session.requests and not session.blocked:
            frame = session.requests[0]
            if frame.type == FrameType.HELLO and not session.greeted:
                self._greet(session, frame)
            elif frame.type != FrameType.PREDICT or not session.greeted:
                raise ProtocolError(f"unexpected {frame.type.name} frame")
            elif (model := self._models.get(frame.job)) is not None:
                self._predict(session, frame, model)
            else:
                self._wait_for_model(session, frame.job)
                return
            session.requests.popleft()

    def _greet(self, session: Session, frame: Frame) -> None:
        if frame.header.get("version") != VERSION:
            error = child.VersionMismatch(f"the predictor's version is {VERSION}, not {frame.header.get('version')}")
            self._send(session, FrameType.ERROR, frame.job, child.error_header(error))
            return
        session.greeted = True
        self._send(session, FrameType.HELLO, 0, {"version": VERSION, "python": sys.version, "pid": os.getpid()})

    def _predict(self, session: Session, frame: Frame, model: LoadedModel) -> None:
        try:
            answer = model.predict(frame)
        except Exception as error:  # whatever a user's model raises is that request's error
            self._send(session, FrameType.ERROR, frame.job, child.error_header(error))
            return
        buffers = (_INT64.pack(answer.unknown), answer.prediction, answer.probability, answer.label)
        self._send(session, FrameType.PREDICTION, frame.job, None, buffers)

    def _send(
        self, session: Session, type: FrameType, job: int, header: dict[str, Any] | None, buffers: tuple[Any, ...] = ()
    ) -> None:
        session.connection.queue(type, job, 0, header, buffers)
        if not session.connection.flush():
            session.blocked = True
            self._epoll.modify(session.connection.fileno(), select.EPOLLOUT)

    # ---- models ----

    def _wait_for_model(self, session: Session, version: int) -> None:
        waiting = self._waiting.get(version)
        if waiting is None:
            self._waiting[version] = [session]
            self._supervisor.send(FrameType.LOAD, version)
        elif session not in waiting:
            waiting.append(session)

    def _hear_supervisor(self) -> bool:
        """Models on their way from the supervisor; true when it says STOP or is gone."""
        while (frame := self._supervisor.poll()) is not None:
            if frame.type == FrameType.STOP:
                return True
            if frame.type == FrameType.MODEL and frame.header.get("error"):
                self._refuse(frame.job, frame.header["error"])
            elif frame.type == FrameType.MODEL:
                self._arriving = (frame.job, frame.header, StateCollector())
            elif frame.type == FrameType.STATE and self._arriving is not None:
                self._collect(frame, *self._arriving)
            else:
                raise ProtocolError(f"unexpected {frame.type.name} frame")
        return self._supervisor.closed

    def _collect(self, frame: Frame, version: int, header: dict[str, Any], collector: StateCollector) -> None:
        state = collector.add(frame)
        if state is None:
            return
        self._arriving = None
        self._models.shrink(header.get("keep_bytes", sys.maxsize))
        try:
            model = LoadedModel.load(header, state.data)
        except Exception as error:  # a user's architecture may raise anything
            self._refuse(version, child.error_header(error))
            self._report()
            return
        self._models.add(version, model)
        gc.collect()
        gc.freeze()  # models live long: later collections need not look at them
        self._report()
        for session in self._waiting.pop(version, []):
            self._resume(session)

    def _report(self) -> None:
        """The memory that the models take now, for the device's ledger."""
        self._supervisor.send(FrameType.PROGRESS, header={"model_bytes": self._models.nbytes})

    def _refuse(self, version: int, error: dict[str, Any]) -> None:
        """Answers everything that waits for this version with the error."""
        for session in self._waiting.pop(version, []):
            if session.requests:
                session.requests.popleft()
                with contextlib.suppress(OSError):
                    self._send(session, FrameType.ERROR, version, error)
                self._resume(session)

    def _resume(self, session: Session) -> None:
        """Goes on with a session that waited for a model."""
        if session.connection.fileno() not in self._sessions:
            return  # it left meanwhile
        try:
            self._answer_requests(session)
        except (ProtocolError, OSError):
            self._close(session)


def listen(path: Path) -> socket.socket:
    """Listens on a Unix socket that only this user can reach, in place of one that an earlier predictor left."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o177)
    try:
        listener.bind(str(path))
    finally:
        os.umask(mask)
    listener.setblocking(False)
    listener.listen(BACKLOG)
    return listener


def run(connection: Connection, hello: dict[str, Any]) -> None:
    """The body of the process."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a descriptor for each session that predicts
    listener = listen(SOCKET)  # sessions may connect while torch is imported
    import torch

    import pg_tensile.models  # noqa: F401

    threads = int(os.environ.get("OMP_NUM_THREADS", "1"))
    torch.set_num_threads(max(1, threads - 1))  # the session that packs the next rows needs a core as well
    with torch.inference_mode():
        Predictor(connection, int(os.environ.get(CACHE_VARIABLE, DEFAULT_CACHE)), listener).run()
