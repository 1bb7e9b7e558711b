"""The predictor as a process of its own, with the test as its supervisor and its sessions."""

from __future__ import annotations

import os
import re
import resource
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pg_tensile.execution import models
from pg_tensile.execution.data.answers import predictions
from pg_tensile.execution.data.preprocessing import Features, Preprocessing
from pg_tensile.execution.training import checkpoint
from pg_tensile.memory_limit import memory_bytes
from pg_tensile.planning.device.profile import DeviceProfile
from pyworker.connection import Connection
from pyworker.state_frames import send_state
from pyworker.version import VERSION
from pyworker.wire import Frame, FrameType, encode
from tests.repository import REPOSITORY
from tests.unit.executing import FAST
from tests.unit.execution.data.test_preprocessing import inputs_of
from tests.unit.execution.training.test_steps import CNN, TRANSFORMER, images, texts
from tests.unit.rows import Rows, every_type

CACHE_BYTES = 300_000
MLP = {"type": "mlp", "hidden": [16]}


class Version:
    """A model version as the catalogue has it."""

    def __init__(self, rows: Rows, architecture: dict[str, Any] = MLP, task: str | None = None) -> None:
        self.rows = rows
        self.architecture = architecture
        parsed = models.parse(architecture)
        prepared = rows.prepare(task=task, tokens=models.token_limits(parsed))
        self.preprocessing: Preprocessing = prepared.fitted.preprocessing
        self.model: nn.Module = models.build(parsed, self.preprocessing.model_inputs, self.preprocessing.outputs).eval()
        self.weights = checkpoint.to_bytes(checkpoint.model_tensors(self.model))

    def outputs(self, chosen: list[int]) -> np.ndarray:
        features = self.preprocessing.apply(inputs_of(self.preprocessing, self.rows, chosen))
        with torch.no_grad():
            tensors = Features.from_flat([torch.from_numpy(array) for array in features.flat()])
            return self.model(tensors).numpy().astype(np.float64)

    def predictions(self, chosen: list[int]) -> np.ndarray:
        """Return the answers of a regression, in the target's unit."""
        return predictions(self.outputs(chosen), self.preprocessing)

    def request(self, chosen: list[int]) -> tuple[dict[str, Any], list[Any]]:
        """Header and buffers of a PREDICT frame for those rows."""
        inputs = inputs_of(self.preprocessing, self.rows, chosen)
        names = [feature.name for feature in self.preprocessing.categories]
        texts = [[self.rows.columns[name][1][row] for row in chosen] for name in names]
        strings = [sorted({text for text in column if text is not None}, reverse=True) for column in texts]
        codes = np.array([category.places for category in inputs.categories], np.int32).reshape(len(names), len(chosen))
        buffers = [np.ascontiguousarray(inputs.numeric), codes]
        for array in inputs.arrays:
            buffers += [array.lengths, array.elements]
        return {"rows": len(chosen), "dict": strings}, buffers


class Process:
    """The predictor and this test's end of its supervisor's socket."""

    def __init__(self, folder: Path, *paths: Path) -> None:
        """Start it in `folder`; `paths` are for its modules, besides the repository's."""
        self.socket = folder / "predict.sock"
        ours, theirs = socket.socketpair()
        environment = os.environ | {
            "PG_TENSILE_FD": str(theirs.fileno()),
            "PG_TENSILE_PARENT": str(os.getpid()),
            "PG_TENSILE_MODEL_CACHE": str(CACHE_BYTES),
            "PG_TENSILE_SOCKET": str(self.socket),
            "PYTHONPATH": os.pathsep.join(map(str, (REPOSITORY, *paths))),
        }
        command = [sys.executable, "-m", "pyworker", "predictor"]
        self.process = subprocess.Popen(command, env=environment, cwd=folder, pass_fds=[theirs.fileno()])
        theirs.close()
        self.supervisor = Connection(ours)
        assert self.receive(self.supervisor).type == FrameType.HELLO
        self.supervisor.send(FrameType.HELLO, header={"version": VERSION})

    @staticmethod
    def receive(connection: Connection) -> Frame:
        frame = connection.recv(timeout=20)
        assert frame is not None, "no answer within 20 s"
        return frame

    def asked(self) -> Frame:
        """Return the predictor's next request to its supervisor, after its reports about memory."""
        while (frame := self.receive(self.supervisor)).type == FrameType.PROGRESS:
            pass
        return frame

    def loaded(self, number: int) -> Frame:
        """Return the predictor's report after it has loaded this version."""
        while (frame := self.receive(self.supervisor)).type != FrameType.PROGRESS or frame.job != number:
            assert frame.type == FrameType.PROGRESS
        return frame

    def give(self, number: int, version: Version, keep_bytes: int | None = None, device: str = "cpu") -> int:
        """Answers the LOAD of this version; the memory budget that it asks for."""
        frame = self.asked()
        assert (frame.type, frame.job) == (FrameType.LOAD, number)
        header: dict[str, Any] = {
            "architecture": version.architecture,
            "preprocessing": version.preprocessing.to_json(),
            "error": None,
            "device": device,
            "memory_budget": frame.header["memory_budget"],
            "profile": asdict(FAST),
        }
        if keep_bytes is not None:
            header["keep_bytes"] = keep_bytes
        self.supervisor.send(FrameType.MODEL, number, header=header)
        send_state(self.supervisor, number, 0, "weights", version.weights)
        return header["memory_budget"]

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.supervisor.close()


@pytest.fixture(scope="module")
def predictor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    folder = tmp_path_factory.mktemp("data")
    (folder / "predict.sock").touch()  # an earlier predictor's
    process = Process(folder)
    yield process
    assert process.process.poll() is None, "the predictor died"
    process.end()


@pytest.fixture
def connect(predictor: Process) -> Iterator[Callable[[], Connection]]:
    """A new session that has shaken hands."""
    opened: list[Connection] = []

    def make() -> Connection:
        sock = socket.socket(socket.AF_UNIX)
        opened.append(Connection(sock))
        while True:
            try:
                sock.connect(str(predictor.socket))
                break
            except (ConnectionRefusedError, FileNotFoundError):  # not listening yet
                assert predictor.process.poll() is None
        opened[-1].send(FrameType.HELLO, header={"version": VERSION})
        assert predictor.receive(opened[-1]).type == FrameType.HELLO
        return opened[-1]

    yield make
    for connection in opened:
        connection.close()


NUMBERS = iter(range(1, 1000))  # of versions: each test loads its own


def ask(session: Connection, number: int, request: tuple[dict[str, Any], list[Any]]) -> None:
    session.send(FrameType.PREDICT, number, 0, *request)


def answer(frame: Frame) -> tuple[int, np.ndarray, np.ndarray, np.ndarray]:
    assert frame.type == FrameType.PREDICTION, frame.header
    unknown, prediction, probability, label = frame.buffers
    return (
        int(np.frombuffer(unknown, np.int32).sum()),
        np.frombuffer(prediction, np.float64),
        np.frombuffer(probability, np.float64),
        np.frombuffer(label, np.int32),
    )


def with_target(kind: str, values: list[Any]) -> Rows:
    rows = every_type(len(values))
    rows.columns["y"] = (kind, values)
    return rows


@pytest.mark.parametrize("chosen", [[3], list(range(60))], ids=["one row", "many rows"])
@pytest.mark.parametrize(
    ("target", "task"),
    [
        (("float8", [float(i % 17) for i in range(60)]), None),
        (("bool", [i % 3 == 0 for i in range(60)]), None),
        (("text", ["abc"[i % 3] for i in range(60)]), None),
        (("int4", [i % 4 * 10 for i in range(60)]), "classification"),
    ],
    ids=["regression", "binary", "text", "integers"],
)
def test_answers_are_the_models(
    predictor: Process, connect: Callable[[], Connection], target: Any, task: str | None, chosen: list[int]
) -> None:
    version, number, session = Version(with_target(*target), task=task), next(NUMBERS), connect()
    ask(session, number, version.request(chosen))
    predictor.give(number, version)
    unknown, prediction, probability, label = answer(predictor.receive(session))
    outputs = version.outputs(chosen)
    fitted = version.preprocessing
    (words,) = (set(feature.categories or ()) for feature in fitted.categories)
    texts = [version.rows.columns["text"][1][row] for row in chosen]
    assert unknown == sum(text is not None and text not in words for text in texts)
    if fitted.task == "regression":
        np.testing.assert_allclose(prediction, version.predictions(chosen), rtol=1e-4, atol=1e-5)
        assert np.isnan(probability).all() and (label == -1).all()
    elif fitted.task == "binary":
        expected = 1 / (1 + np.exp(-outputs[:, 0]))
        np.testing.assert_allclose(prediction, expected, rtol=1e-4)
        assert (label == (prediction > 0.5)).all()
        np.testing.assert_allclose(probability, np.maximum(prediction, 1 - prediction))
    else:
        odds = np.exp(outputs)
        assert (label == odds.argmax(1)).all()
        np.testing.assert_allclose(probability, odds.max(1) / odds.sum(1), rtol=1e-4)
        if fitted.label_values is None:
            assert np.isnan(prediction).all()
        else:
            assert (prediction == np.array(fitted.label_values)[label]).all()


def test_strings_never_seen_are_unknown_and_counted(predictor: Process, connect: Callable[[], Connection]) -> None:
    rows = Rows({"c": ("text", ["a", "b"] * 10), "d": ("text", ["x", "y"] * 10), "y": ("int4", list(range(20)))})
    version, number, session = Version(rows), next(NUMBERS), connect()
    codes = np.array([[0, 1, 2, -1, 1], [-1, 0, 0, 0, 1]], np.int32)
    ask(session, number, ({"rows": 5, "dict": [["a", "new", "b"], ["x", "newer"]]}, [np.empty((0, 5)), codes]))
    predictor.give(number, version)
    unknown, prediction, _, _ = answer(predictor.receive(session))
    assert unknown == 3  # "new" twice, "newer" once; nulls are not
    ask(session, number, ({"rows": 1, "dict": [[], ["x"]]}, [np.empty((0, 1)), np.array([[-1], [0]], np.int32)]))
    assert answer(predictor.receive(session))[1] == pytest.approx(prediction[3])
    ask(session, number, ({"rows": 0, "dict": [[], []]}, [b"", b""]))
    assert [len(part) for part in answer(predictor.receive(session))[1:]] == [0, 0, 0]


def test_a_session_says_which_rows_it_has_passed_on(
    predictor: Process, connect: Callable[[], Connection], simple: Version
) -> None:
    session, number = connect(), next(NUMBERS)
    header, buffers = simple.request([1, 2, 3])
    ask(session, number, ({**header, "held": 7}, buffers))
    predictor.give(number, simple)
    answer(predictor.receive(session))
    for held in (7, 7, 8):  # the last two are not held any more
        session.send(FrameType.PASSED, held, 0, {"first": 1, "rows": 9})
    for held in range(100):
        ask(session, number, ({**header, "held": held}, buffers))
        answer(predictor.receive(session))
    session.send(FrameType.PASSED, 7, 0, {"first": -1, "rows": 1})
    with pytest.raises(EOFError):
        session.recv(timeout=20)


@pytest.fixture
def simple() -> Version:
    rows = Rows({"x": ("float8", [float(i) for i in range(20)]), "y": ("float8", [2.0 * i for i in range(20)])})
    return Version(rows)


def test_a_version_is_asked_for_once_and_answers_keep_their_order(
    predictor: Process, connect: Callable[[], Connection], simple: Version
) -> None:
    number, sessions = next(NUMBERS), [connect() for _ in range(3)]
    for session in sessions:
        for row in (1, 2, 3):
            ask(session, number, simple.request([row]))
    predictor.give(number, simple)
    for session in sessions:
        found = [answer(predictor.receive(session))[1][0] for _ in range(3)]
        np.testing.assert_allclose(found, simple.predictions([1, 2, 3]), rtol=1e-4, atol=1e-5)
    predictor.loaded(number)
    assert predictor.supervisor.recv(timeout=0.05) is None


def test_a_model_that_is_deleted_while_it_comes_is_an_error_and_can_be_asked_for_again(
    predictor: Process, connect: Callable[[], Connection], simple: Version
) -> None:
    number, session = next(NUMBERS), connect()
    ask(session, number, simple.request([1]))
    assert predictor.asked().type == FrameType.LOAD
    header: dict[str, Any] = {"error": None, "memory_budget": 0}
    predictor.supervisor.send(FrameType.MODEL, number, header=header)
    chunk = {"kind": "weights", "seq": 0, "last": False, "meta": None}
    predictor.supervisor.send(FrameType.STATE, number, header=chunk, buffers=[simple.weights[:100]])
    header["error"] = {"sqlstate": "42704", "message": "gone", "hint": None}
    predictor.supervisor.send(FrameType.MODEL, number, header=header)
    refused = predictor.receive(session)
    assert refused.type == FrameType.ERROR and refused.header["message"] == "gone"
    ask(session, number, simple.request([1]))
    predictor.give(number, simple)
    answer(predictor.receive(session))


def test_models_unused_for_longest_make_room(predictor: Process, connect: Callable[[], Connection]) -> None:
    rows = Rows({"x": ("float8", [float(i) for i in range(20)]), "y": ("float8", [2.0 * i for i in range(20)])})
    big = Version(rows, {"type": "mlp", "hidden": [180, 180]})
    assert 2 * len(big.weights) < CACHE_BYTES < 3 * len(big.weights)
    first, second, third = (next(NUMBERS) for _ in range(3))
    session = connect()

    def use(number: int, loads: bool) -> None:
        ask(session, number, big.request([0]))
        if loads:
            predictor.give(number, big)
        answer(predictor.receive(session))

    use(first, loads=True)
    use(second, loads=True)
    use(first, loads=False)
    use(third, loads=True)  # instead of the second
    use(first, loads=False)
    use(second, loads=True)


def test_models_make_room_when_the_device_has_none(predictor: Process, connect: Callable[[], Connection]) -> None:
    """`keep_bytes` of the others stay, and the predictor says what its models take."""
    rows = Rows({"x": ("float8", [float(i) for i in range(20)]), "y": ("float8", [2.0 * i for i in range(20)])})
    small = Version(rows, {"type": "mlp", "hidden": [8]})
    numbers = [next(NUMBERS) for _ in range(3)]
    session = connect()
    for number, keep_bytes in zip(numbers, (0, None, 0), strict=True):
        ask(session, number, small.request([0]))
        predictor.give(number, small, keep_bytes)
        answer(predictor.receive(session))
    ask(session, numbers[2], small.request([0]))  # there
    answer(predictor.receive(session))
    progress = predictor.loaded(numbers[2])
    assert 0 < progress.header["device_bytes"]["cpu"] < 2 * len(small.weights)
    ask(session, numbers[1], small.request([0]))  # gone
    predictor.give(numbers[1], small)
    answer(predictor.receive(session))


WIDE = {"type": "mlp", "hidden": [128, 128, 128], "norm": "layer"}  # not what few_rows executes


@pytest.mark.parametrize(
    ("rows", "architecture", "small"),
    [(every_type(60), WIDE, 80_000), (images(60), CNN, 5_000), (texts(60), TRANSFORMER, 18_000)],
    ids=["mlp", "cnn", "transformer"],
)
def test_a_version_within_a_memory_budget_is_another_model(
    predictor: Process, connect: Callable[[], Connection], rows: Rows, architecture: dict[str, Any], small: int
) -> None:
    """The same bits in batches of the same size, whatever the budget, which is what it takes of the device's memory."""
    version, number, session = Version(rows, architecture), next(NUMBERS), connect()
    one, many = version.request([5]), version.request(list(range(32)))
    assert small < len(version.weights) or architecture is TRANSFORMER
    outputs = []
    for budget in (0, small, 100 * len(version.weights)):  # the last has room for a batch of all rows
        ask(session, number, (one[0] | {"memory_budget": budget}, one[1]))
        assert predictor.give(number, version, keep_bytes=0) == budget
        answers = [answer(predictor.receive(session))]
        ask(session, number, (many[0] | {"memory_budget": budget}, many[1]))
        answers.append(answer(predictor.receive(session)))
        outputs.append([parts[1].tobytes() + parts[2].tobytes() + parts[3].tobytes() for parts in answers])
        progress = predictor.loaded(number)
        taken = progress.header["device_bytes"]["cpu"]
        assert taken == budget if budget else taken >= len(version.weights)
        (shown,) = progress.header["models"]
        assert (shown["version"], shown["memory_budget"] or 0) == (number, budget)
    whole, within, roomy = outputs
    assert roomy == whole and within[0] == whole[0]


def test_devices_are_resolved_as_jobs_do(predictor: Process) -> None:
    """With the profile of the catalogue, or a measured one."""

    def describe(name: str, profiles: dict[str, Any]) -> dict[str, Any]:
        predictor.supervisor.send(FrameType.DEVICE, header={"name": name, "profiles": profiles, "overheads": []})
        frame = None
        while frame is None or frame.type == FrameType.PROGRESS:
            frame = predictor.supervisor.recv(timeout=100)  # of a busy machine that is measured
            assert frame is not None, "no answer"
        assert frame.type == FrameType.DEVICE
        return frame.header

    known = describe("cpu", {"cpu": asdict(FAST), "cuda:0": {}})
    assert known == {"error": None, "device": "cpu", "profile": asdict(FAST), "overhead_bytes": 0}
    answered = describe("cpu", {})
    assert answered["error"] is None, answered
    measured = DeviceProfile.from_json(answered["profile"])
    assert (measured.name, measured.memory_bytes) == ("host", memory_bytes())
    error = describe("cuda:77", {})["error"]
    assert error["sqlstate"] == "55000" and "cuda:77" in error["message"] and error["hint"]


def test_a_memory_budget_that_is_too_small_names_the_least(
    predictor: Process, connect: Callable[[], Connection], simple: Version
) -> None:
    number, session = next(NUMBERS), connect()
    header, buffers = simple.request([1])

    def asked_with(budget: int) -> Frame:
        ask(session, number, (header | {"memory_budget": budget}, buffers))
        predictor.give(number, simple)
        return predictor.receive(session)

    refused = asked_with(100)
    assert (refused.type, refused.header["sqlstate"]) == (FrameType.ERROR, "53200")
    message = r"the model needs at least ([\d,]+) bytes of device memory, but may have 100"
    match = re.fullmatch(message, refused.header["message"])
    assert match and refused.header["hint"]
    least = int(match[1].replace(",", ""))
    assert asked_with(least - 1).type == FrameType.ERROR
    assert answer(asked_with(least))


@pytest.mark.parametrize("budget", [-1, "1MB", 1.5])
def test_a_memory_budget_that_is_no_number_of_bytes_ends_the_session(
    connect: Callable[[], Connection], simple: Version, budget: Any
) -> None:
    session = connect()
    header, buffers = simple.request([1])
    ask(session, 1, (header | {"memory_budget": budget}, buffers))
    with pytest.raises(EOFError):
        session.recv(timeout=20)


def broken(request: tuple[dict[str, Any], list[Any]]) -> Iterator[tuple[dict[str, Any], list[Any]]]:
    header, buffers = request
    yield header, buffers[:-1]
    yield header, [*buffers, b""]
    yield header | {"rows": 3}, buffers
    yield header | {"rows": -1}, buffers
    yield header | {"rows": "1"}, buffers
    yield {}, buffers
    yield header | {"dict": header["dict"][:-1]}, buffers
    yield header | {"dict": [[] for _ in header["dict"]]}, buffers
    yield header | {"dict": 7}, buffers
    yield header | {"dict": [7]}, buffers
    yield header, [buffers[0], np.full_like(buffers[1], -2), *buffers[2:]]
    yield header, [buffers[0], buffers[1] + 100, *buffers[2:]]
    yield header, [b"1234567", *buffers[1:]]
    yield header, [*buffers[:-2], buffers[-2] + 1, buffers[-1]]
    yield header, [*buffers[:-1], b"123"]


def test_malformed_requests_are_errors_and_the_session_goes_on(
    predictor: Process, connect: Callable[[], Connection]
) -> None:
    version, number, session = Version(every_type(60)), next(NUMBERS), connect()
    good = version.request([5])
    ask(session, number, good)
    predictor.give(number, version)
    expected = answer(predictor.receive(session))
    for request in broken(good):
        ask(session, number, request)
        frame = predictor.receive(session)
        assert frame.type == FrameType.ERROR and frame.header["message"], request[0]
        ask(session, number, good)
        assert answer(predictor.receive(session))[1] == expected[1]


def test_arrays_of_a_wrong_length_are_a_data_error(predictor: Process, connect: Callable[[], Connection]) -> None:
    rows = Rows({"a": ("float8[]", [[i, 1.0] for i in range(20)]), "y": ("int4", list(range(20)))})
    version, number, session = Version(rows), next(NUMBERS), connect()
    lengths, elements = np.array([2, 3], np.int32), np.zeros(5)
    ask(session, number, ({"rows": 2, "dict": []}, [b"", b"", lengths, elements]))
    predictor.give(number, version)
    frame = predictor.receive(session)
    assert frame.type == FrameType.ERROR and frame.header["sqlstate"] == "22000"
    assert frame.header["message"] == 'feature "a" has an array of 3 elements in row 2, not 2'
    assert frame.header["hint"] == "The model was trained with arrays of 2 elements."


@pytest.mark.parametrize(
    "garbage", [b"GET / HTTP/1.1\r\n\r\n" * 4, encode(FrameType.JOB)[0], encode(FrameType.HELLO)[0]]
)
def test_streams_that_are_not_ours_are_closed(
    predictor: Process, connect: Callable[[], Connection], garbage: bytes, simple: Version
) -> None:
    session, other, number = connect(), connect(), next(NUMBERS)
    os.write(session.fileno(), garbage)
    with pytest.raises(EOFError):
        session.recv(timeout=20)
    ask(other, number, simple.request([1]))
    predictor.give(number, simple)
    answer(predictor.receive(other))


def test_a_session_that_leaves_in_the_middle_disturbs_nobody(
    predictor: Process, connect: Callable[[], Connection], simple: Version
) -> None:
    number = next(NUMBERS)
    leaving, waiting, staying = connect(), connect(), connect()
    os.write(
        leaving.fileno(),
        b"".join(bytes(part) for part in encode(FrameType.PREDICT, number, 0, *simple.request([1])))[:50],
    )
    ask(waiting, number, simple.request([1]))
    ask(staying, number, simple.request([2]))
    leaving.close()
    waiting.close()
    predictor.give(number, simple)
    answer(predictor.receive(staying))


def test_an_idle_session_makes_room_when_no_descriptor_is_left(
    predictor: Process, connect: Callable[[], Connection]
) -> None:
    pid, limit = predictor.process.pid, resource.RLIMIT_NOFILE
    idle = connect()
    before = resource.prlimit(pid, limit)
    try:
        descriptors = set(map(int, os.listdir(f"/proc/{pid}/fd")))
        resource.prlimit(pid, limit, (min(set(range(len(descriptors) + 1)) - descriptors), before[1]))
        session = connect()
    finally:
        resource.prlimit(pid, limit, before)
    with pytest.raises(EOFError):
        idle.recv(timeout=20)
    version, number = Version(every_type(60)), next(NUMBERS)
    ask(session, number, version.request([1]))
    predictor.give(number, version)
    answer(predictor.receive(session))


def test_a_session_that_does_not_read_blocks_only_itself(
    predictor: Process, connect: Callable[[], Connection], simple: Version
) -> None:
    number, lazy, other = next(NUMBERS), connect(), connect()
    many = simple.request([1] * 20_000)
    ask(lazy, number, many)
    predictor.give(number, simple)
    for _ in range(40):
        lazy.queue(FrameType.PREDICT, number, 0, *many)
        lazy.flush()
    for _ in range(3):
        ask(other, number, simple.request([1]))
        answer(predictor.receive(other))
    for _ in range(41):
        while not lazy.flush():
            frame = lazy.recv(timeout=20)
            assert frame is not None and frame.type == FrameType.PREDICTION
            break
        else:
            break


def test_models_that_cannot_be_loaded_are_the_requests_errors(
    predictor: Process, connect: Callable[[], Connection], simple: Version
) -> None:
    session, number = connect(), next(NUMBERS)
    ask(session, number, simple.request([1]))
    assert predictor.asked().job == number
    error = {"sqlstate": "42704", "message": "this version does not exist any more", "hint": "Deploy another one."}
    predictor.supervisor.send(
        FrameType.MODEL, number, header={"architecture": None, "preprocessing": None, "error": error}
    )
    frame = predictor.receive(session)
    assert frame.type == FrameType.ERROR and frame.header == error

    other = Version(simple.rows, {"type": "mlp", "hidden": [3]})
    other.weights = simple.weights  # not its own
    ask(session, number, simple.request([1]))
    predictor.give(number, other)
    frame = predictor.receive(session)
    assert (frame.type, frame.header["sqlstate"]) == (FrameType.ERROR, "XX001")
    assert frame.header["message"] == "the stored weights do not fit the model"

    ask(session, number, simple.request([1]))  # nothing of it was kept
    predictor.give(number, simple)
    answer(predictor.receive(session))


def test_what_a_users_model_raises_is_the_requests_error(
    predictor: Process, connect: Callable[[], Connection], simple: Version
) -> None:
    source = """
import torch
class Model(torch.nn.Linear):
    def forward(self, x):
        if len(x) == 1:
            raise ZeroDivisionError("one row")
        return super().forward(x)
def build(n_inputs, n_outputs):
    return Model(n_inputs, n_outputs)
"""
    version, number, session = Version(simple.rows, {"type": "python", "source": source}), next(NUMBERS), connect()
    ask(session, number, version.request([1]))
    predictor.give(number, version)
    frame = predictor.receive(session)
    assert (frame.type, frame.header["sqlstate"]) == (FrameType.ERROR, "22023")
    assert frame.header["message"] == "the model raised ZeroDivisionError: one row"
    ask(session, number, version.request([1, 2]))
    answer(predictor.receive(session))


def test_other_versions_of_ours_are_refused(predictor: Process, connect: Callable[[], Connection]) -> None:
    connect().close()
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(str(predictor.socket))
    session = Connection(sock)
    session.send(FrameType.HELLO, header={"version": "0.0.1"})
    frame = predictor.receive(session)
    assert (frame.type, frame.header["sqlstate"]) == (FrameType.ERROR, "55000") and frame.header["hint"]
    session.close()


def test_only_the_owner_reaches_the_socket(predictor: Process, connect: Callable[[], Connection]) -> None:
    connect()
    assert stat.S_IMODE(predictor.socket.stat().st_mode) == 0o600
    assert stat.S_IMODE(predictor.socket.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize("how", ["STOP", "gone"])
def test_the_predictor_ends_with_its_supervisor(tmp_path: Path, how: str) -> None:
    process = Process(tmp_path)
    try:
        if how == "STOP":
            process.supervisor.send(FrameType.STOP)
        else:
            process.supervisor.close()
        assert process.process.wait(timeout=20) == 0
    finally:
        process.end()


def test_the_cache_may_be_smaller_than_a_model(simple: Version) -> None:
    from pyworker.children.loaded_models import LoadedModel
    from pyworker.children.model_cache import Key, ModelCache

    cache = ModelCache(1)
    models_ = [replaced(simple) for _ in range(2)]
    for number, model in enumerate(models_):
        cache.add(Key(number), model)
        assert cache.get(Key(number)) is model
    assert cache.get(Key(0)) is None
    assert isinstance(models_[0], LoadedModel)


def replaced(version: Version) -> Any:
    from pyworker.children.loaded_models import LoadedModel

    return LoadedModel(replace(version.preprocessing), version.model, 100)


def test_a_failed_device_is_found_behind_other_errors() -> None:
    from pyworker.children.predictor import device_has_failed

    def error_after(*earlier: Exception) -> Exception:
        """Return an error with these before it, each the context of the one before, and the first one its own."""
        error: Exception = ValueError("last")
        chain = [error, *earlier, error]
        for link, context in pairwise(chain):
            link.__context__ = context
        return error

    assert not device_has_failed(error_after(RuntimeError(), torch.OutOfMemoryError()))
    assert device_has_failed(error_after(RuntimeError(), torch.AcceleratorError()))
    assert device_has_failed(torch.AcceleratorError())
