"""How the supervisor of the predictor sends a model: chunk by chunk, however large it is and whatever happens to it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import threading
import time
from collections.abc import Coroutine, Iterator
from typing import Any, ClassVar

import pytest

from pg_tensile.memory_limit import memory_bytes
from pyworker.connection import Connection
from pyworker.supervisors.child_process import Child
from pyworker.supervisors.inference import Inference
from pyworker.supervisors.processes import SpawnedProcess
from pyworker.supervisors.server import Server
from pyworker.supervisors.supervisor import Request, Wait
from pyworker.wire import Frame, FrameType

CHUNKS = 40
CHUNK_BYTES = 1 << 20  # more than a socket takes at once
PROFILE = {"name": "GPU", "memory_bytes": 20_000}
GPU = {"error": None, "device": "cuda:0", "profile": PROFILE, "overhead_bytes": 500}  # an answer to DEVICE
BUDGETS = {"cuda:0": 10_000}  # of devices


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

    def __init__(self, deleted: int = CHUNKS, chunks: int = CHUNKS) -> None:
        self.plpy = type("plpy", (), {"SPIError": RuntimeError})
        self.stopping = self.woken = self.flow_fault = False
        self.resumed_at = time.monotonic()
        self.deleted = deleted
        self.chunks = chunks
        self.booked: dict[str, int] = {}  # bytes by device, as the ledger has them

    def rows(self, sql: str, types: Any = (), *values: Any) -> list[dict[str, Any]]:
        if "model_versions" in sql:
            size = self.chunks * CHUNK_BYTES
            return [{"architecture": '{"type": "mlp"}', "preprocessing": "{}", "reference": None, "weight_bytes": size}]
        if "device_profiles" in sql:
            return [{"device": "cuda:0", "profile": json.dumps(PROFILE)}]
        if "tensile_worker._devices()" in sql:
            return [{"budget_bytes": BUDGETS[values[0]]}]
        seq = values[1]
        return [{"data": Chunk(bytes([seq]) * CHUNK_BYTES)}] if seq < min(self.chunks, self.deleted) else []

    def call(self, signature: str, *values: Any) -> Any:
        if signature.startswith("tensile_internal._inference_memory"):
            device, total, _, wanted = values
            assert total == (memory_bytes() if device == "cpu" else PROFILE["memory_bytes"])
            self.booked[device] = wanted
            return wanted
        if signature == "tensile_internal._measured_overheads(int8)":
            assert values == (None,)
            return "[]"
        if signature == "pg_catalog.current_setting(text)":
            assert values == ("pg_tensile.device",)
            return "auto"
        if signature.startswith("tensile_internal._report_loaded"):
            return None
        assert signature == "tensile_internal._predictor_socket()", signature
        return "socket"

    def commit(self) -> None:
        pass


def run(supervisor: Coroutine[Request, Wait, None]) -> None:
    """Waits for what each step asks for, as csrc/processes/step.c does."""
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
        self._groups = None
        self._log = os.memfd_create("log")
        self._sleeping = SpawnedProcess(["sleep", "600"], os.environ, self._log, self._log)
        self._process = self._sleeping

    def end(self) -> None:
        self._sleeping.kill()
        while self._sleeping.reap() is None:
            time.sleep(0.01)
        os.close(self._log)


@pytest.fixture
def frames() -> Iterator[Any]:
    """`frames(catalogue, budgets, described)`: the frames that a predictor gets for a LOAD with each budget, and the
    inference supervisor; `described` are its answers to DEVICE."""
    with contextlib.ExitStack() as ends:

        def load(
            catalogue: Catalogue, budgets: tuple[int, ...] = (0,), described: tuple[dict[str, Any], ...] = ()
        ) -> tuple[Inference, list[Frame]]:
            Chunk.alive = Chunk.most = 0
            ours, theirs = socket.socketpair()
            ends.callback(theirs.close)
            ours.setblocking(False)
            inference = Inference(catalogue)
            inference._child = predictor = Predictor(catalogue, Connection(ours))
            ends.callback(predictor.end)
            got: list[Frame] = []
            answers = iter(described)

            def hear() -> None:
                connection = Connection(theirs)
                with contextlib.suppress(EOFError):
                    while (frame := connection.recv()) is not None:
                        got.append(frame)
                        if frame.type == FrameType.DEVICE:
                            connection.send(FrameType.DEVICE, header=next(answers))

            listener = threading.Thread(target=hear)
            listener.start()
            try:
                for budget in budgets:
                    run(inference._load(7, budget))
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
    assert [size for _, size in inference._arriving.values()] == [CHUNKS * CHUNK_BYTES]


def test_a_version_that_is_deleted_meanwhile_is_an_error(frames: Any) -> None:
    inference, got = frames(Catalogue(deleted=5))
    assert [frame.type for frame in got] == [FrameType.MODEL, *[FrameType.STATE] * 5, FrameType.MODEL]
    assert not any(frame.header["last"] for frame in got[1:6])
    assert got[-1].header["error"]["sqlstate"] == "55000"
    assert not inference._arriving and inference._host.arriving_bytes == 0


def test_budgets_are_reserved_on_the_device_of_jobs(frames: Any) -> None:
    """The predictor is asked for it once; the ledger counts its overhead there, and models in one piece on the CPU."""
    catalogue = Catalogue(chunks=1)
    inference, got = frames(catalogue, (3000, 0, 4000), (GPU,))
    device, *models = [frame for frame in got if frame.type != FrameType.STATE]
    assert device.header == {"name": "auto", "profiles": {"cuda:0": PROFILE}, "overheads": []}
    chosen = [(model.header["device"], model.header["keep_bytes"], model.header["profile"]) for model in models]
    assert chosen == [("cuda:0", 0, PROFILE), ("cpu", 0, None), ("cuda:0", 0, PROFILE)]
    assert catalogue.booked == {"cpu": CHUNK_BYTES, "cuda:0": 500 + 3000 + 4000}

    def report(version: int, memory_budget: int, **device_bytes: int) -> None:
        taken = {key.replace("_", ":"): size for key, size in device_bytes.items()}
        header = {"device_bytes": taken, "closed_bytes": {}, "models": [], "memory_budget": memory_budget}
        inference._handle(Frame(FrameType.PROGRESS, version, 0, header, []))

    report(7, 0, cpu=10)  # the others take longer
    assert catalogue.booked == {"cpu": 10, "cuda:0": 500 + 3000 + 4000}
    report(7, 3000, cuda_0=3000, cpu=10)
    assert catalogue.booked == {"cpu": 10, "cuda:0": 500 + 3000 + 4000}
    report(7, 4000, cuda_0=3000 + 4000, cpu=10)  # while the other one is being closed
    assert catalogue.booked == {"cpu": 10, "cuda:0": 500 + 3000 + 4000}
    report(0, 0, cuda_0=4000, cpu=10)
    assert catalogue.booked == {"cpu": 10, "cuda:0": 500 + 4000}
    inference._forget_models()
    for memory in inference._memories.values():
        memory.return_unused()
    assert catalogue.booked == {"cpu": 0, "cuda:0": 0}


def test_a_budget_and_the_overhead_have_to_fit_the_device(frames: Any) -> None:
    catalogue = Catalogue(chunks=1)
    _, got = frames(catalogue, (BUDGETS["cuda:0"] - 500, BUDGETS["cuda:0"] - 499), (GPU,))
    errors = [frame.header["error"] for frame in got if frame.type == FrameType.MODEL]
    assert errors[0] is None and errors[1]["sqlstate"] == "22023"
    assert errors[1]["message"] == 'a memory_budget of 9,501 bytes is more than the 9,500 of device "cuda:0"'


def test_a_device_that_cannot_be_used_is_asked_for_again(frames: Any) -> None:
    error = {"sqlstate": "55000", "message": "it is not there", "hint": "Look.", "traceback": "…"}
    _, got = frames(Catalogue(chunks=1), (3000, 0, 3000), ({"error": error}, GPU))
    got = [frame for frame in got if frame.type != FrameType.STATE]
    types = [FrameType.DEVICE, FrameType.MODEL, FrameType.MODEL, FrameType.DEVICE, FrameType.MODEL]
    assert [frame.type for frame in got] == types
    refused = got[1].header
    assert (refused["memory_budget"], refused["error"].pop("hint")) == (3000, "Look.")
    assert refused["error"] == {"sqlstate": "55000", "message": "it is not there"}
    assert got[2].header["error"] is None and got[4].header["device"] == "cuda:0"
