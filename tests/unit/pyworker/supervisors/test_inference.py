"""How the supervisor of the predictor sends a model: chunk by chunk, however large it is and whatever happens to it."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import threading
import time
from collections.abc import Coroutine, Iterator
from typing import Any, ClassVar

import pytest

from pyworker.connection import Connection
from pyworker.supervisors.child_process import Child
from pyworker.supervisors.inference import Inference
from pyworker.supervisors.server import Server
from pyworker.supervisors.supervisor import Request, Wait
from pyworker.wire import Frame, FrameType

CHUNKS = 40
CHUNK_BYTES = 1 << 20  # more than a socket takes at once


class Chunk(bytes):
    """A chunk of weights that counts how many of its kind there are."""

    alive: ClassVar[int] = 0
    most: ClassVar[int] = 0

    def __new__(cls, value: bytes) -> Chunk:
        cls.alive += 1
        cls.most = max(cls.most, cls.alive)
        return super().__new__(cls, value)

    def __del__(self) -> None:
        type(self).alive -= 1


class Catalogue(Server):
    """One model version of so many chunks, of which those after `deleted` are gone when they are asked for."""

    def __init__(self, deleted: int = CHUNKS) -> None:
        self.plpy = type("plpy", (), {"SPIError": RuntimeError})
        self.stopping = self.woken = False
        self.resumed_at = time.monotonic()
        self.deleted = deleted

    def rows(self, sql: str, types: Any = (), *values: Any) -> list[dict[str, Any]]:
        if "model_versions" in sql:
            size = CHUNKS * CHUNK_BYTES
            return [{"architecture": '{"type": "mlp"}', "preprocessing": "{}", "weight_bytes": size}]
        seq = values[1]
        return [{"data": Chunk(bytes([seq]) * CHUNK_BYTES)}] if seq < min(CHUNKS, self.deleted) else []

    def call(self, signature: str, *values: Any) -> Any:
        if signature.startswith("tensile._inference_memory"):
            return values[-1]
        assert signature == "tensile._predictor_socket()", signature
        return "socket"

    def commit(self) -> None:
        pass


def run(supervisor: Coroutine[Request, Wait, None]) -> None:
    """Waits for what each step asks for, as csrc/step.c does."""
    with contextlib.suppress(StopIteration):
        request = supervisor.send(None)  # type: ignore[arg-type]
        while True:
            poll = select.poll()
            poll.register(request.fd, select.POLLIN | (select.POLLOUT if request.writable else 0))
            poll.poll(request.timeout_ms)
            request = supervisor.send(Wait(0))


class Predictor(Child):
    """A child that does nothing, and the connection to a predictor that is this test."""

    def __init__(self, server: Server, connection: Connection) -> None:
        self._server = server
        self._connection = connection
        self._timeout = 0.0
        self._process = subprocess.Popen(["sleep", "600"])
        self._log = os.memfd_create("log")

    def end(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        os.close(self._log)


@pytest.fixture
def frames() -> Iterator[Any]:
    """`frames(catalogue)`: the frames that a predictor gets for one LOAD, and the inference supervisor."""
    with contextlib.ExitStack() as ends:

        def load(catalogue: Catalogue) -> tuple[Inference, list[Frame]]:
            Chunk.alive = Chunk.most = 0
            ours, theirs = socket.socketpair()
            ends.callback(theirs.close)
            ours.setblocking(False)
            inference = Inference(catalogue)
            inference._child = predictor = Predictor(catalogue, Connection(ours))
            ends.callback(predictor.end)
            got: list[Frame] = []

            def hear() -> None:
                connection = Connection(theirs)
                with contextlib.suppress(EOFError):
                    while (frame := connection.recv()) is not None:
                        got.append(frame)

            listener = threading.Thread(target=hear)
            listener.start()
            try:
                run(inference._load(7, 0))
                run(inference._drain())
            finally:
                ours.close()
                listener.join()
            return inference, got

        yield load


def test_a_model_is_sent_chunk_by_chunk(frames: Any) -> None:
    inference, got = frames(Catalogue())
    model, *states = got
    assert model.type == FrameType.MODEL and model.header["error"] is None
    assert [(frame.type, frame.header["seq"]) for frame in states] == [(FrameType.STATE, n) for n in range(CHUNKS)]
    assert [frame.header["last"] for frame in states] == [False] * (CHUNKS - 1) + [True]
    assert all(bytes(frame.buffers[0]) == bytes([n]) * CHUNK_BYTES for n, frame in enumerate(states))
    assert Chunk.most <= 2 and Chunk.alive == 0
    assert list(inference._arriving_bytes) == [CHUNKS * CHUNK_BYTES]


def test_a_version_that_is_deleted_meanwhile_is_an_error(frames: Any) -> None:
    inference, got = frames(Catalogue(deleted=5))
    assert [frame.type for frame in got] == [FrameType.MODEL, *[FrameType.STATE] * 5, FrameType.MODEL]
    assert not any(frame.header["last"] for frame in got[1:6])
    assert got[-1].header["error"]["sqlstate"] == "42704"
    assert not inference._arriving_bytes
