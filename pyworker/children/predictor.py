"""The predictor process: keeps models loaded and answers every session's predictions.

One thread runs one epoll loop over the supervisor's socket, the listening socket (for its owner only) and the
sessions'. A session's requests are answered in order. A version that is not loaded is requested once (LOAD) while the
requests for it wait; MODEL and the weights load it (loaded_models.py). Models are dropped, the least recently used
first, when together they exceed the cache. The same version in one piece and within each memory budget that sessions
use are different models.

Within a memory budget a version predicts on the device that the supervisor says, which the predictor has resolved and
measured for it before (DEVICE). If an accelerator fails, nothing works on it in this process any more: the predictor
answers the request with the cause and ends, and the supervisor starts another one.

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
import struct
import sys
import time
from collections import deque
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pg_tensile.planning.device.profile import DeviceProfile
from pyworker import child
from pyworker.children.job import overhead_bytes
from pyworker.children.loaded_models import Key, Model, ModelCache, load
from pyworker.connection import Connection
from pyworker.state_frames import StateCollector
from pyworker.version import VERSION
from pyworker.wire import Frame, FrameType, ProtocolError

SOCKET_VARIABLE = "PG_TENSILE_SOCKET"
BACKLOG = 128
SPIN_NS = 150_000  # see Predictor._events
CACHE_VARIABLE = "PG_TENSILE_MODEL_CACHE"
DEFAULT_CACHE = 1 << 30
_INT64 = struct.Struct("<q")


class Session:
    """One session's connection and the requests it waits for."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.greeted = False
        self.requests: deque[Frame] = deque()
        self.blocked = False  # it does not read its answers, and is not read from until it does


class Predictor:
    """Server of predictions: an epoll loop over the supervisor, the listening socket and the sessions."""

    def __init__(self, supervisor: Connection, cache_bytes: int, listener: socket.socket) -> None:
        self._supervisor = supervisor
        self._models = ModelCache(cache_bytes)
        self._listener = listener
        self._sessions: dict[int, Session] = {}
        self._waiting: dict[Key, list[Session]] = {}  # sessions by the model that they wait for
        self._arriving: tuple[Key, dict[str, Any], StateCollector] | None = None
        self._failure: Exception | None = None  # of an accelerator
        self._soon = False  # the last request came soon after the one before
        self._epoll = select.epoll()
        self._epoll.register(supervisor.fileno(), select.EPOLLIN)
        self._epoll.register(listener.fileno(), select.EPOLLIN)

    def run(self) -> None:
        """Serve until the supervisor sends STOP or closes its end. Raises the failure of an accelerator."""
        while True:
            for fd, _ in self._events():
                session = self._sessions.get(fd)
                if session is not None:
                    self._serve(session)
                elif fd == self._listener.fileno():
                    self._accept()
                elif fd == self._supervisor.fileno() and self._receive_models():
                    return
                if self._failure is not None:
                    raise self._failure

    def _events(self) -> list[tuple[int, int]]:
        """Return the next events.

        A session often predicts one row after the other, and waking a sleeping core takes longer than an answer: so the
        loop polls for SPIN_NS before it sleeps, if the last request came that soon.
        """
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
        session.requests.clear()
        session.connection.close()

    def _serve(self, session: Session) -> None:
        """Take one frame of the session, and answer what can be answered."""
        connection = session.connection
        try:
            if session.blocked and not self._unblock(session):
                return
            frame = connection.poll()  # only one, so that sessions take turns
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
        """Answer in order, until a request must wait for its model or the session must read its answers."""
        while session.requests and not session.blocked:
            frame = session.requests[0]
            if frame.type == FrameType.HELLO and not session.greeted:
                self._greet(session, frame)
            elif frame.type not in (FrameType.PREDICT, FrameType.EMBED) or not session.greeted:
                raise ProtocolError(f"unexpected {frame.type.name} frame")
            elif (model := self._models.get(key := _key(frame))) is not None and frame.type == FrameType.EMBED:
                self._embed(session, frame, model)
            elif model is not None:
                self._predict(session, frame, model)
            else:
                self._wait_for_model(session, key)
                return
            session.requests.popleft()

    def _greet(self, session: Session, frame: Frame) -> None:
        if frame.header.get("version") != VERSION:
            error = child.VersionMismatch(f"the predictor's version is {VERSION}, not {frame.header.get('version')}")
            self._send(session, FrameType.ERROR, frame.job, child.error_header(error))
            return
        session.greeted = True
        self._send(session, FrameType.HELLO, 0, {"version": VERSION, "python": sys.version, "pid": os.getpid()})

    def _predict(self, session: Session, frame: Frame, model: Model) -> None:
        try:
            unknown, answers, extras = model.predict(frame)
        except Exception as error:  # anything that a user's model raises is that request's error
            self._send(session, FrameType.ERROR, frame.job, self._error_header(error))
            return
        self._send(session, FrameType.PREDICTION, frame.job, None, (_INT64.pack(unknown), *answers, *extras))

    def _embed(self, session: Session, frame: Frame, model: Model) -> None:
        try:
            buffers = model.embed(frame)
        except Exception as error:
            self._send(session, FrameType.ERROR, frame.job, child.error_header(error))
            return
        self._send(session, FrameType.EMBEDDING, frame.job, None, buffers)

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
            self._supervisor.send(FrameType.LOAD, key.version, header={"memory_budget": key.memory_budget})
        elif session not in waiting:
            waiting.append(session)

    def _receive_models(self) -> bool:
        """Receive models from the supervisor; return True after STOP or the end of the connection."""
        while (frame := self._supervisor.poll()) is not None:
            if frame.type == FrameType.STOP:
                return True
            if frame.type == FrameType.MODEL and frame.header.get("error"):
                self._arriving = None  # the error may be about a model that has come in part
                self._refuse(_key(frame), frame.header["error"])
            elif frame.type == FrameType.DEVICE:
                self._describe(frame.header["name"], frame.header["profiles"])
            elif frame.type == FrameType.MODEL:
                self._arriving = (_key(frame), frame.header, StateCollector())
            elif frame.type == FrameType.STATE and self._arriving is not None:
                self._collect(frame, *self._arriving)
            else:
                raise ProtocolError(f"unexpected {frame.type.name} frame")
        return self._supervisor.closed

    def _collect(self, frame: Frame, key: Key, header: dict[str, Any], collector: StateCollector) -> None:
        state = collector.add(frame)
        if state is None:
            return
        self._arriving = None
        device = header["device"]
        self._models.shrink(device, header.get("keep_bytes", sys.maxsize))
        try:
            profile = DeviceProfile(**header["profile"]) if key.memory_budget else None
            model = load(header, state.data, profile, device)
        except Exception as error:  # a user's architecture may raise anything
            self._refuse(key, self._error_header(error))
            self._report()
            return
        self._models.add(key, model)
        gc.collect()
        gc.freeze()  # models live long: exempts them from later collections
        self._report()
        for session in self._waiting.pop(key, []):
            self._resume(session)

    def _describe(self, name: str, profiles: dict[str, dict[str, Any]]) -> None:
        """Answer DEVICE: the device that pg_tensile.device `name` stands for, as jobs resolve it, with its profile.

        `profiles` are those of the catalogue, by device; without one the device is measured now."""
        from pg_tensile.execution.measuring.device import choose_device, measure

        header: dict[str, Any] = {"error": None}
        try:
            device = choose_device(name)
            fields = profiles.get(str(device))
            profile = measure(device) if fields is None else DeviceProfile(**fields)
            overhead = overhead_bytes(device.type, profile)
            header |= {"device": str(device), "profile": asdict(profile), "overhead_bytes": overhead}
        except Exception as error:
            header["error"] = self._error_header(error)
        self._supervisor.send(FrameType.DEVICE, header=header)

    def _error_header(self, error: Exception) -> dict[str, Any]:
        """Return the ERROR frame's header; after the failure of an accelerator, also have the process end.

        Before anyone learns of that, no session can send another request to this process."""
        if device_has_failed(error):
            self._failure = error
            self._listener.close()
            for session in self._sessions.values():
                session.connection.refuse_more()
        return child.error_header(error)

    def _report(self) -> None:
        """Report the loaded models and their memory, for the devices' ledger and tensile.loaded_models."""
        header = {"device_bytes": self._models.device_bytes, "models": self._models.shown()}
        self._supervisor.send(FrameType.PROGRESS, header=header)

    def _refuse(self, key: Key, error: dict[str, Any]) -> None:
        """Answer everything that waits for this model with the error."""
        for session in self._waiting.pop(key, []):
            if session.requests:
                session.requests.popleft()
                with contextlib.suppress(OSError):
                    self._send(session, FrameType.ERROR, key.version, error)
                self._resume(session)

    def _resume(self, session: Session) -> None:
        """Continue a session that waited for a model."""
        if session.connection.fileno() not in self._sessions:
            return  # it has disconnected meanwhile
        try:
            self._answer_requests(session)
        except (ProtocolError, OSError):
            self._close(session)


def device_has_failed(error: BaseException) -> bool:
    """Return whether the error, or one that led to it, is an accelerator's: nothing works on it in this process then.

    A lack of its memory is not."""
    import torch

    chain = [error]
    for link in chain:  # which may be a circle
        chain += [earlier for earlier in (link.__cause__, link.__context__) if earlier and earlier not in chain]
    return any(isinstance(link, torch.AcceleratorError) for link in chain)


def _key(frame: Frame) -> Key:
    """Return the model that a PREDICT or MODEL frame is about. Raises ProtocolError."""
    memory_budget = frame.header.get("memory_budget") or 0
    if not isinstance(memory_budget, int) or memory_budget < 0:
        raise ProtocolError(f"a memory budget of {memory_budget!r}")
    return Key(frame.job, memory_budget)


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
    import torch

    import pg_tensile.execution.models  # noqa: F401

    threads = int(os.environ.get("OMP_NUM_THREADS", "1"))
    torch.set_num_threads(max(1, threads - 1))  # the session that packs the next rows needs a core as well
    with torch.inference_mode():
        Predictor(connection, int(os.environ.get(CACHE_VARIABLE, DEFAULT_CACHE)), listener).run()
