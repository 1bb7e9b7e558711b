"""The predictor's process with an accelerator: the device that it resolves, and what a failure of it ends."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pg_tensile.planning.device.profile import A100_40GB
from pyworker.connection import Connection
from pyworker.version import VERSION
from pyworker.wire import FrameType
from tests.accelerator.target import DEVICE, TYPE
from tests.repository import REPOSITORY
from tests.unit.pyworker.children.test_predictor import Process, Version, answer, ask
from tests.unit.rows import Rows, every_type

MLP = {"type": "mlp", "hidden": [32, 32], "norm": "layer"}  # not what few_rows executes
LOOKUP = """
import torch
class Model(torch.nn.Module):
    def __init__(self, outputs):
        super().__init__()
        self.table = torch.nn.Embedding(4, 8)
        self.last = torch.nn.Linear(8, outputs)
    def forward(self, x):
        return self.last(self.table((x[:, 0] > 0).long() * 100))
def build(n_inputs, n_outputs):
    return Model(n_outputs)
"""


@pytest.fixture
def predictor(tmp_path: Path) -> Iterator[Process]:
    process = Process(tmp_path, REPOSITORY / "tests" / "emulated")
    yield process
    process.end()


@pytest.fixture
def connect(predictor: Process) -> Iterator[Callable[[], Connection]]:
    """A new session that has shaken hands; `describe` comes first."""
    with contextlib.ExitStack() as opened:

        def make() -> Connection:
            sock = opened.enter_context(socket.socket(socket.AF_UNIX))
            sock.connect(str(predictor.socket))
            session = Connection(sock)
            session.send(FrameType.HELLO, header={"version": VERSION})
            assert predictor.receive(session).type == FrameType.HELLO
            return session

        yield make


def describe(predictor: Process, name: str) -> dict[str, Any]:
    """Return the answer to DEVICE; the predictor listens by then."""
    header = {"name": name, "profiles": {DEVICE: asdict(A100_40GB)}, "overheads": []}
    predictor.supervisor.send(FrameType.DEVICE, header=header)
    frame = predictor.receive(predictor.supervisor)
    assert frame.type == FrameType.DEVICE
    return frame.header


def ask_within(session: Connection, version: Version, row: int, budget: int) -> None:
    header, buffers = version.request([row])
    ask(session, 1, (header | {"memory_budget": budget}, buffers))


def test_a_version_within_a_budget_predicts_on_the_device(
    predictor: Process, connect: Callable[[], Connection]
) -> None:
    described = describe(predictor, TYPE)
    assert (described["error"], described["device"], described["profile"]) == (None, DEVICE, asdict(A100_40GB))
    assert described["overhead_bytes"] > 100 << 20  # of a context
    version, session, shown = Version(every_type(60), MLP), connect(), {}
    got = []
    for budget, device in ((0, "cpu"), (60_000, DEVICE), (60_001, "cpu")):
        ask_within(session, version, 5, budget)
        assert predictor.give(1, version, device=device) == budget
        got.append(answer(predictor.receive(session))[1])
        progress = predictor.receive(predictor.supervisor).header
        shown = {model["memory_budget"]: model["device"] for model in progress["models"]}
    assert shown == {None: "cpu", 60_000: DEVICE, 60_001: "cpu"}
    assert progress["device_bytes"][DEVICE] == 60_000 < progress["device_bytes"]["cpu"]
    np.testing.assert_allclose(got[1], got[0], rtol=0 if TYPE == "emulated" else 1e-3)
    assert got[2] == got[0]


def test_a_device_that_is_not_there_is_an_error_and_the_cpu_goes_on(
    predictor: Process, connect: Callable[[], Connection]
) -> None:
    error = describe(predictor, f"{TYPE}:9")["error"]
    assert error["sqlstate"] == "55000" and f"{TYPE}:9" in error["message"] and error["hint"]
    assert describe(predictor, "cpu")["device"] == "cpu"
    version, session = Version(every_type(60), MLP), connect()
    ask(session, 1, version.request([5]))
    predictor.give(1, version)
    answer(predictor.receive(session))


@pytest.mark.long
def test_the_predictor_ends_after_a_failure_of_the_device(
    predictor: Process, connect: Callable[[], Connection]
) -> None:
    """A kernel reads beyond its table; the request is answered with the cause. A process captures and ends."""
    describe(predictor, DEVICE)
    values = [float(i) for i in range(20)]
    version = Version(Rows({"x": ("float8", values), "y": ("float8", values)}), {"type": "python", "source": LOOKUP})
    session, idle, budget = connect(), connect(), 1 << 20
    ask_within(session, version, 0, budget)
    predictor.give(1, version, device=DEVICE)
    answer(predictor.receive(session))
    ask_within(session, version, 19, budget)
    frame = predictor.receive(session)
    assert frame.type == FrameType.ERROR and frame.header["message"] == f"the device {DEVICE} has failed"
    assert frame.header["detail"] and frame.header["hint"]
    for other in (session, idle):  # from now on, they connect to another predictor
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            ask_within(other, version, 0, budget)
    with pytest.raises(ConnectionRefusedError):
        connect()
    reason = predictor.asked()
    assert (reason.type, reason.header["message"]) == (FrameType.ERROR, frame.header["message"])
    assert predictor.process.wait(timeout=60) == 1
