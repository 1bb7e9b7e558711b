"""The predictor as a process of its own: sessions do not wait for models that they have not asked for.

Models of users wait for a pipe: when they are built, or for rows. So the tests decide when something is done.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyworker.connection import Connection
from pyworker.wire import FrameType
from tests.unit.pyworker.children.test_predictor import Process, Version, answer, ask, connect, predictor
from tests.unit.rows import Rows

__all__ = ["connect", "predictor"]

PLAIN = """
import torch
def build(n_inputs, n_outputs):
    return torch.nn.Linear(n_inputs, n_outputs)
"""
HELD_LOAD = """
import torch
def build(n_inputs, n_outputs):
    with open({pipe!r}) as pipe:
        if pipe.read() == "fail":
            raise ZeroDivisionError("no")
    return torch.nn.Linear(n_inputs, n_outputs)
"""
HELD_ROWS = """
import torch
class Model(torch.nn.Linear):
    pipe = None
    def forward(self, x):
        if len(x) > 1 and x.any():  # not in the trial on zeros
            self.pipe = self.pipe or open({pipe!r}, "rb", buffering=0)
            self.pipe.read(1)
        return super().forward(x)
def build(n_inputs, n_outputs):
    return Model(n_inputs, n_outputs)
"""
NUMBERS = iter(range(1001, 2000))  # of versions


@pytest.fixture
def rows() -> Rows:
    return Rows({"x": ("float8", [float(i) for i in range(20)]), "y": ("float8", [2.0 * i for i in range(20)])})


@pytest.fixture
def simple(rows: Rows) -> Version:
    return Version(rows)


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[Path]:
    """A pipe; a model that still waits for it at the end fails."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    yield path


def held(rows: Rows, source: str, pipe: Path) -> Version:
    """Return a version whose model waits for the pipe in the predictor."""
    version = Version(rows, {"type": "python", "source": PLAIN})
    version.architecture = {"type": "python", "source": source.format(pipe=str(pipe))}
    return version


def release(pipe: Path, word: str = "") -> None:
    """Let the model that waits for the pipe go on; blocks until there is one."""
    with pipe.open("w") as writer:
        writer.write(word)


Connect = Callable[[], Connection]


def test_sessions_predict_with_other_models_while_one_is_loaded(
    predictor: Process, connect: Connect, rows: Rows, simple: Version, pipe: Path
) -> None:
    slow, slow_number, number = held(rows, HELD_LOAD, pipe), next(NUMBERS), next(NUMBERS)
    first, second, leaving, other = (connect() for _ in range(4))
    for session in (first, second, leaving):
        ask(session, slow_number, slow.request([1]))
    predictor.give(slow_number, slow)  # once
    leaving.close()
    ask(other, number, simple.request([1]))
    predictor.give(number, simple)  # while the other one is being loaded
    for row in range(3):
        answer(predictor.receive(other))
        ask(other, number, simple.request([row]))
    shown = [model["version"] for model in predictor.loaded(number).header["models"]]
    assert number in shown and slow_number not in shown
    assert first.poll() is None and second.poll() is None
    release(pipe)
    for session in (first, second):
        np.testing.assert_allclose(answer(predictor.receive(session))[1], slow.predictions([1]), rtol=1e-5)
    assert slow_number in [model["version"] for model in predictor.loaded(slow_number).header["models"]]


def test_a_load_that_fails_is_the_error_of_those_who_wait_for_it(
    predictor: Process, connect: Connect, rows: Rows, simple: Version, pipe: Path
) -> None:
    slow, slow_number, number = held(rows, HELD_LOAD, pipe), next(NUMBERS), next(NUMBERS)
    first, second, other = connect(), connect(), connect()
    for session in (first, second):
        ask(session, slow_number, slow.request([1]))
        ask(session, slow_number, slow.request([2]))
    predictor.give(slow_number, slow)
    ask(other, number, simple.request([1]))
    predictor.give(number, simple)
    release(pipe, "fail")
    for session in (first, second):
        failed = predictor.receive(session)
        assert failed.type == FrameType.ERROR and "ZeroDivisionError" in failed.header["message"]
    answer(predictor.receive(other))
    predictor.give(slow_number, slow)  # the next request of both sessions asks for it again
    release(pipe)
    for session in (first, second):
        np.testing.assert_allclose(answer(predictor.receive(session))[1], slow.predictions([2]), rtol=1e-5)


def test_many_rows_keep_nobody_from_other_models(
    predictor: Process, connect: Connect, rows: Rows, simple: Version, pipe: Path
) -> None:
    slow, slow_number, number = held(rows, HELD_ROWS, pipe), next(NUMBERS), next(NUMBERS)
    many, other = connect(), connect()
    ask(many, slow_number, slow.request([1, 2]))
    predictor.give(slow_number, slow)
    ask(other, number, simple.request([1]))
    predictor.give(number, simple)
    answer(predictor.receive(other))
    ask(other, number, simple.request([1, 2] * 20))
    answer(predictor.receive(other))
    assert many.poll() is None
    release(pipe)
    np.testing.assert_allclose(answer(predictor.receive(many))[1], slow.predictions([1, 2]), rtol=1e-5)


def test_a_row_is_answered_between_the_parts_of_a_request_for_many(
    predictor: Process, connect: Connect, rows: Rows, pipe: Path
) -> None:
    slow, number, many, single = held(rows, HELD_ROWS, pipe), next(NUMBERS), connect(), connect()
    ask(single, number, slow.request([3]))
    predictor.give(number, slow)
    answer(predictor.receive(single))
    chosen = [row % 20 for row in range(600)]  # three parts
    ask(many, number, slow.request(chosen))
    with pipe.open("wb", buffering=0) as writer:  # opens when the first part waits
        ask(single, number, slow.request([3]))
        connect()  # greeted after the request has been taken
        writer.write(b"x")
        np.testing.assert_allclose(answer(predictor.receive(single))[1], slow.predictions([3]), rtol=1e-5)
        assert many.poll() is None
    np.testing.assert_allclose(answer(predictor.receive(many))[1], slow.predictions(chosen), rtol=1e-5)


def test_a_request_of_a_session_that_has_left_is_not_finished(
    predictor: Process, connect: Connect, rows: Rows, pipe: Path
) -> None:
    slow, number, leaving, staying = held(rows, HELD_ROWS, pipe), next(NUMBERS), connect(), connect()
    ask(leaving, number, slow.request([row % 20 for row in range(600)]))
    predictor.give(number, slow)
    with pipe.open("wb", buffering=0) as writer:
        leaving.close()
        ask(staying, number, slow.request([3]))
        connect()
        writer.write(b"x")
        answer(predictor.receive(staying))  # without the other parts, for which nothing was written


def test_a_model_is_dropped_after_its_last_answer(
    predictor: Process, connect: Connect, rows: Rows, simple: Version, pipe: Path
) -> None:
    """Its memory counts until then, and the model that takes its place is loaded after that."""
    slow, session, other = held(rows, HELD_ROWS, pipe), connect(), connect()
    slow_number, number = next(NUMBERS), next(NUMBERS)
    ask(session, slow_number, slow.request([1, 2]))
    predictor.give(slow_number, slow)
    predictor.loaded(slow_number)
    with pipe.open("wb"):
        ask(other, number, simple.request([1]))
        predictor.give(number, simple, keep_bytes=0)
        connect()
        assert other.poll() is None
    answer(predictor.receive(session))
    answer(predictor.receive(other))
    header = predictor.loaded(number).header
    (shown,) = header["models"]
    assert (shown["version"], shown["device_bytes"]) == (number, header["device_bytes"]["cpu"])


def test_rows_of_several_sessions_are_computed_with_the_bits_of_each(
    predictor: Process, connect: Connect, simple: Version
) -> None:
    number, sessions = next(NUMBERS), [connect() for _ in range(12)]
    expected = []
    for row in range(len(sessions)):
        ask(sessions[0], number, simple.request([row]))
        if row == 0:
            predictor.give(number, simple)
        expected.append(answer(predictor.receive(sessions[0]))[1].tobytes())
    for row, session in enumerate(sessions):
        ask(session, number, simple.request([row]))
    assert [answer(predictor.receive(session))[1].tobytes() for session in sessions] == expected


@pytest.fixture(autouse=True)
def _drained(predictor: Process) -> Iterator[None]:
    """Take the reports that a test has left."""
    yield
    frame: Any = True
    while frame is not None:
        frame = predictor.supervisor.recv(timeout=0.05)
