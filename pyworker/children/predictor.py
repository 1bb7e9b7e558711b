"""The predictor process: keeps models loaded and answers every session's predictions.

One thread runs one epoll loop over the supervisor's socket, the listening socket (for its owner only) and the
sessions'. A session's requests are answered in order. The loop computes what takes less time than the way to another
thread: few rows of small models without PyTorch, single rows of several sessions at once. Everything else is done by a
thread of the model (model_thread.py): loading, planning, many rows, explanations, embeddings, PyTorch. So sessions wait
for their own model only, and requests for a model that is not loaded wait until it is (served_models.py). The same
version in one piece and within each memory budget that sessions use are different models.

Within a memory budget a version predicts on the device that the supervisor says, which the predictor has resolved and
measured for it before (DEVICE). If an accelerator fails, nothing works on it in this process any more: the predictor
answers the request with the cause and ends, and the supervisor starts another one.

A share of the rows is counted into histograms, after they have been answered (drift_counts.py), or, if the session
reads ahead of what it returns, after it has said that it has passed them on.

A session cannot disturb others: a request that is wrong is answered with ERROR, a stream that is not frames is closed,
and a session that does not read its answers is not read from. Work that does not depend on a row is done when a model
is loaded.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import resource
import select
import socket
import sys
import time
from collections import deque
from collections.abc import Generator
from functools import partial
from pathlib import Path
from typing import Any

from pyworker import child
from pyworker.children.drift_counts import DriftCounts
from pyworker.children.loaded_models import Model, Reply
from pyworker.children.model_cache import Key
from pyworker.children.model_thread import SWITCH_S, Deliveries, Result
from pyworker.children.served_models import Events, ServedModels, model_key
from pyworker.connection import Connection
from pyworker.version import VERSION
from pyworker.wire import Frame, FrameType, ProtocolError

SOCKET_VARIABLE = "PG_TENSILE_SOCKET"
BACKLOG = 128
SPIN_NS = 150_000  # see Predictor._events
CACHE_VARIABLE = "PG_TENSILE_MODEL_CACHE"
DEFAULT_CACHE = 1 << 30
MOST_AT_ONCE = 64  # requests that the loop answers before it looks for others
MOST_HELD = 16  # replies of a session whose rows are counted later
TURN_BYTES = 1 << 20  # of a request that are received before other sessions are served


class Session:
    """One session's connection and its requests that are not answered."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.greeted = False
        self.requests: deque[Frame] = deque()
        self.waits = False  # the first request is being computed, or waits for its model
        self.blocked = False  # it does not read its answers, and is not read from until it does
        self.closed = False
        self.held: dict[int, tuple[Frame, Reply, Model]] = {}  # replies whose rows may not be passed on, by their numbers


class Predictor:
    """Server of predictions: an epoll loop over the supervisor, the listening socket and the sessions."""

    def __init__(self, supervisor: Connection, cache_bytes: int, listener: socket.socket) -> None:
        self._supervisor = supervisor
        self._deliveries = Deliveries()
        self._drift = DriftCounts(supervisor)
        events = Events(self._resume_waiting, self._refuse, self._drift.set_rate, self._error_header)
        self._models = ServedModels(supervisor, cache_bytes, self._deliveries, events)
        self._listener = listener
        self._sessions: dict[int, Session] = {}
        self._waiting: dict[Key, list[Session]] = {}  # sessions by the model that they wait for
        self._at_once: deque[tuple[Session, Frame, Model]] = deque()  # requests that the loop computes itself
        self._failure: Exception | None = None  # of an accelerator
        self._idle_s: float | None = None  # until another model may give way to jobs
        self._soon = False  # the last request came soon after the one before
        self._epoll = select.epoll()
        for source in (supervisor, listener, self._deliveries):
            self._epoll.register(source.fileno(), select.EPOLLIN)

    def run(self) -> None:
        """Serve until the supervisor sends STOP or closes its end. Raises the failure of an accelerator."""
        while True:
            for fd, _ in self._events():
                session = self._sessions.get(fd)
                if session is not None:
                    self._serve(session)
                elif fd == self._listener.fileno():
                    self._accept()
                elif fd == self._deliveries.fileno():
                    self._deliveries.make()
                elif fd == self._supervisor.fileno() and self._models.receive():
                    return
                if self._failure is not None:
                    raise self._failure
            self._answer_at_once()
            if self._failure is not None:
                raise self._failure
            self._drift.report_if_due()
            self._idle_s = self._models.give_way()

    def _events(self) -> list[tuple[int, int]]:
        """Return the next events, or none if there is something to compute.

        A session often predicts one row after the other, and waking a sleeping core takes longer than an answer: so the
        loop polls for SPIN_NS before it sleeps, if the last request came that soon and no thread needs the core.
        """
        if self._at_once:
            return self._epoll.poll(0)
        started = time.perf_counter_ns()
        while self._soon and not self._deliveries.expected and time.perf_counter_ns() - started < SPIN_NS:
            events = self._epoll.poll(0)
            if events:
                return events
            os.sched_yield()  # the session may be waiting for this very core
        pauses = (self._drift.seconds_left(), self._idle_s)
        events = self._epoll.poll(min((pause for pause in pauses if pause is not None), default=None))
        self._soon = time.perf_counter_ns() - started < SPIN_NS
        return events

    # ---- sessions ----

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._close_idle_session()
            return  # otherwise the session has already given up
        sock.setblocking(False)
        self._sessions[sock.fileno()] = Session(Connection(sock))
        self._epoll.register(sock.fileno(), select.EPOLLIN)

    def _close_idle_session(self) -> None:
        """Close an idle session to make room for another one.

        A session whose idle connection has ended reconnects without an error.
        """
        for session in self._sessions.values():
            if session.greeted and not session.requests and not session.blocked:
                self._close(session)
                return

    def _close(self, session: Session) -> None:
        fd = session.connection.fileno()
        with contextlib.suppress(OSError):
            self._epoll.unregister(fd)
        del self._sessions[fd]
        session.closed = True
        session.requests.clear()
        session.connection.close()

    def _serve(self, session: Session) -> None:
        """Take one frame of the session, and answer what can be answered."""
        connection = session.connection
        try:
            if session.blocked and not self._unblock(session):
                return
            frame = connection.poll(TURN_BYTES)  # only one, so that sessions take turns
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
        """Answer in order, until a request has to be computed or the session must read its answers."""
        while session.requests and not session.blocked and not session.waits:
            frame = session.requests[0]
            if frame.type == FrameType.HELLO and not session.greeted:
                self._greet(session, frame)
                session.requests.popleft()
            elif frame.type == FrameType.PASSED and session.greeted:
                self._count_passed(session, frame)
                session.requests.popleft()
            elif frame.type not in (FrameType.PREDICT, FrameType.EMBED) or not session.greeted:
                raise ProtocolError(f"unexpected {frame.type.name} frame")
            else:
                self._begin(session, frame)

    def _begin(self, session: Session, frame: Frame) -> None:
        """Have the first request computed when its model is there."""
        key = model_key(frame)
        model = self._models.get(key)
        session.waits = True
        if model is None:
            self._wait_for_model(session, key)
        elif frame.type == FrameType.PREDICT and model.at_once(frame):
            self._at_once.append((session, frame, model))
        else:
            done = partial(self._computed, session, frame, model)
            self._models.compute(key, model, _steps(model, frame), done, lambda: not session.closed)

    def _greet(self, session: Session, frame: Frame) -> None:
        if frame.header.get("version") != VERSION:
            error = child.VersionMismatch(f"the predictor's version is {VERSION}, not {frame.header.get('version')}")
            self._send(session, FrameType.ERROR, frame.job, child.error_header(error))
            return
        session.greeted = True
        self._send(session, FrameType.HELLO, 0, {"version": VERSION, "python": sys.version, "pid": os.getpid()})

    def _answer_at_once(self) -> None:
        """Compute requests of the loop; those for one model together."""
        asked: dict[Model, list[tuple[Session, Frame]]] = {}
        for _ in range(min(len(self._at_once), MOST_AT_ONCE)):
            session, frame, model = self._at_once.popleft()
            if not session.closed:
                asked.setdefault(model, []).append((session, frame))
        for model, requests in asked.items():
            replies = model.replies([frame for _, frame in requests])
            for (session, frame), reply in zip(requests, replies, strict=True):
                self._answer(session, frame, reply, model)

    def _computed(self, session: Session, frame: Frame, model: Model, result: Result) -> None:
        self._answer(session, frame, result.value if result.error is None else result.error, model)

    def _answer(self, session: Session, frame: Frame, reply: Reply | tuple[Any, ...] | Exception, model: Model) -> None:
        """Answer the session's first request, and continue with the next one."""
        if isinstance(reply, Exception):
            answer = FrameType.ERROR, frame.job, self._error_header(reply)
        if session.closed:
            return
        try:
            if isinstance(reply, Exception):
                self._send(session, *answer)
            elif isinstance(reply, Reply):
                buffers = (reply.unknown, *reply.answers, *reply.extras)
                self._send(session, FrameType.PREDICTION, frame.job, None, buffers)
                self._count(session, frame, reply, model)
            else:
                self._send(session, FrameType.EMBEDDING, frame.job, None, reply)
            session.requests.popleft()
            self._continue(session)
        except (ProtocolError, OSError):
            self._close(session)

    def _count(self, session: Session, frame: Frame, reply: Reply, model: Model) -> None:
        """Count the rows of a reply, or hold it until the session says which of them it has passed on."""
        number = frame.header.get("held")
        if number is None:
            self._drift.see(frame, reply, model, range(len(reply.answers.label)))
            return
        session.held[number] = frame, reply, model
        while len(session.held) > MOST_HELD:
            del session.held[next(iter(session.held))]

    def _count_passed(self, session: Session, passed: Frame) -> None:
        first, rows = passed.header.get("first"), passed.header.get("rows")
        if not isinstance(first, int) or not isinstance(rows, int) or min(first, rows) < 0:
            raise ProtocolError("a PASSED frame without numbers of rows")
        held = session.held.get(passed.job)
        if held is None:
            return  # it was too old, or the session has had another connection
        total = len(held[1].answers.label)
        self._drift.see(*held, range(first, min(first + rows, total)))
        if first + rows >= total:
            del session.held[passed.job]

    def _continue(self, session: Session) -> None:
        session.waits = False
        self._answer_requests(session)

    def _send(
        self, session: Session, type: FrameType, job: int, header: dict[str, Any] | None, buffers: tuple[Any, ...] = ()
    ) -> None:
        session.connection.queue(type, job, 0, header, buffers)
        if not session.connection.flush():
            session.blocked = True
            self._epoll.modify(session.connection.fileno(), select.EPOLLOUT)

    # ---- models ----

    def _wait_for_model(self, session: Session, key: Key) -> None:
        waiting = self._waiting.get(key)
        if waiting is None:
            self._waiting[key] = [session]
            self._models.ask_for(key)
        else:
            waiting.append(session)

    def _resume_waiting(self, key: Key) -> None:
        """Continue the sessions that have waited for the model."""
        for session in self._waiting.pop(key, []):
            if not session.closed:
                try:
                    self._continue(session)
                except (ProtocolError, OSError):
                    self._close(session)

    def _refuse(self, key: Key, error: dict[str, Any]) -> None:
        """Answer everything that waits for this model with the error."""
        for session in self._waiting.pop(key, []):
            if not session.closed:
                try:
                    session.requests.popleft()
                    self._send(session, FrameType.ERROR, key.version, error)
                    self._continue(session)
                except (ProtocolError, OSError):
                    self._close(session)

    def _error_header(self, error: Exception) -> dict[str, Any]:
        """Return the ERROR frame's header; after the failure of an accelerator, also have the process end.

        Before anyone learns of that, no session can send another request to this process."""
        if device_has_failed(error):
            self._failure = error
            self._listener.close()
            for session in self._sessions.values():
                session.connection.refuse_more()
        return child.error_header(error)


def _steps(model: Model, frame: Frame) -> Generator[None, None, Any]:
    """Compute what a PREDICT or EMBED frame asks for."""
    if frame.type == FrameType.EMBED:
        return model.embed(frame)
    return (yield from model.predict_in_parts(frame))


def device_has_failed(error: BaseException) -> bool:
    """Return whether the error, or one that led to it, is an accelerator's: nothing works on it in this process then.

    Running out of its memory does not count."""
    import torch

    chain = [error]
    for link in chain:  # which may be a circle
        chain += [earlier for earlier in (link.__cause__, link.__context__) if earlier and earlier not in chain]
    return any(isinstance(link, torch.AcceleratorError) for link in chain)


def listen(path: Path) -> socket.socket:
    """Listen on a Unix socket that only this user can reach, replacing one that an earlier predictor left."""
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
    """Run the process."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a descriptor for each session that predicts
    listener = listen(Path(os.environ[SOCKET_VARIABLE]))  # sessions may connect while torch is imported
    gc.disable()  # collections take a fifth of the time of these imports, which make no garbage
    import torch

    import pg_tensile.execution.models  # noqa: F401

    threads = int(os.environ.get("OMP_NUM_THREADS", "1"))
    torch.set_num_threads(max(1, threads - 1))  # the session that packs the next rows needs a core as well
    sys.setswitchinterval(SWITCH_S)
    gc.freeze()  # the modules stay
    gc.enable()
    with torch.inference_mode():
        Predictor(connection, int(os.environ.get(CACHE_VARIABLE, DEFAULT_CACHE)), listener).run()
