"""Which of the predicted rows are counted, and what is reported of them."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from pg_tensile.execution import models
from pg_tensile.execution.data.drift import reference_of
from pyworker.children import drift_counts
from pyworker.children.drift_counts import DriftCounts
from pyworker.children.loaded_models import LoadedModel, Reply
from pyworker.connection import Connection
from pyworker.wire import Frame, FrameType
from tests.unit.rows import Rows

ROWS = 200


@pytest.fixture(scope="module")
def version() -> LoadedModel:
    numbers = [float(i) for i in range(ROWS)]
    words = [f"w{i % 3}" for i in range(ROWS)]
    prepared = Rows({"x": ("float8", numbers), "c": ("text", words), "y": ("float8", numbers)}).prepare(validation=0.0)
    preprocessing = prepared.fitted.preprocessing
    module = models.build(models.parse({"type": "mlp", "hidden": [4]}), preprocessing.model_inputs, 1).eval()
    version = LoadedModel(preprocessing, module, 1)
    version.reference = reference_of(prepared.fitted, prepared.store.blocks())
    return version


@pytest.fixture
def supervisor(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[DriftCounts, Connection]]:
    """Counts that are reported at once, and the supervisor's end of the connection."""
    monkeypatch.setattr(drift_counts, "REPORT_S", 0.0)
    ours, theirs = socket.socketpair()
    yield DriftCounts(Connection(theirs)), Connection(ours)
    ours.close()
    theirs.close()


def request(numbers: list[float], **header: Any) -> Frame:
    rows = len(numbers)
    codes = np.zeros((1, rows), np.int32).tobytes()
    buffers = [memoryview(np.array([numbers]).tobytes()), memoryview(codes)]
    return Frame(FrameType.PREDICT, 7, 0, {"rows": rows, "dict": [["w1"]], **header}, buffers)


def see(counts: DriftCounts, version: LoadedModel, *frames: Frame) -> None:
    """Have the version answer the frames together, as the predictor's loop does."""
    for frame, reply in zip(frames, replies(version, *frames), strict=True):
        counts.see(frame, reply, version, range(frame.header["rows"]))


def replies(version: LoadedModel, *frames: Frame) -> list[Reply]:
    with torch.inference_mode():
        found = version.replies(frames)
    return [reply for reply in found if isinstance(reply, Reply)]


def reported(counts: DriftCounts, supervisor: Connection) -> tuple[int, list[int]]:
    """Return rows and counts of the report, 0 and none if there is none."""
    counts.report_if_due()
    frame = supervisor.poll()
    if frame is None:
        return 0, []
    assert (frame.type, frame.job) == (FrameType.DRIFT, 7)
    return frame.header["rows"], frame.buffers[0].cast("q").tolist()


def test_all_rows_or_none(version: LoadedModel, supervisor: tuple[DriftCounts, Connection]) -> None:
    counts, connection = supervisor
    see(counts, version, request([1.0]))
    assert counts.seconds_left() is None and reported(counts, connection) == (0, [])
    counts.set_rate(1.0)
    see(counts, version, request([-1.0]), request([1e9]), request([float("nan")]))  # answered together
    see(counts, version, request([float(i) for i in range(ROWS)]))
    assert counts.seconds_left() == 0
    rows, bins = reported(counts, connection)
    assert rows == ROWS + 3 and sum(bins) == 2 * rows  # each row is in a bin of each column
    assert bins[:3] == [1, 11, 10] and bins[20] == 11
    assert reported(counts, connection) == (0, [])
    counts.set_rate(0.0)
    see(counts, version, request([1.0]))
    assert reported(counts, connection) == (0, [])


def test_some_rows_of_a_frame(version: LoadedModel, supervisor: tuple[DriftCounts, Connection]) -> None:
    counts, connection = supervisor
    counts.set_rate(1.0)
    frame = request([float(i) for i in range(ROWS)])
    (reply,) = replies(version, frame)
    counts.see(frame, reply, version, range(2))
    counts.see(frame, reply, version, range(2, 3))
    counts.see(frame, reply, version, range(5, 5))
    alone = request([0.0, 1.0, 2.0])
    rows, bins = reported(counts, connection)
    see(counts, version, alone)
    assert (rows, bins) == reported(counts, connection)


@pytest.mark.parametrize("rows", [1, 7, 500])
def test_each_row_counts_with_the_same_probability(
    version: LoadedModel, supervisor: tuple[DriftCounts, Connection], monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    counts, connection = supervisor
    monkeypatch.setattr(counts, "_random", random.Random(rows))
    counts.set_rate(0.05)
    (reply,) = replies(version, request([float(i % ROWS) for i in range(rows)]))
    for _ in range(20_000 // rows):
        counts.see(request([0.0] * rows), reply, version, range(rows))
    total, bins = reported(counts, connection)
    assert total == pytest.approx(1000, rel=0.15) and sum(bins) == 2 * total
    if rows == 500:
        numbers = np.array(bins[1:21])
        assert (numbers > 0.5 * total / 20).all()


def test_tiny_rates_and_versions_without_statistics(
    version: LoadedModel, supervisor: tuple[DriftCounts, Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts, connection = supervisor
    for rate in (5e-324, 1e-300, 1e-12):
        counts.set_rate(rate)
        see(counts, version, request([1.0] * 100))
    counts.set_rate(1.0)
    monkeypatch.setattr(version, "reference", None)
    see(counts, version, request([1.0] * 100))
    assert reported(counts, connection) == (0, [])
