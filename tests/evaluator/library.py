"""The evaluator in Python: versions as a session compiles, opens and evaluates them."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from ctypes import POINTER, byref, c_bool, c_char_p, c_double, c_int, c_int32, c_int64, c_size_t, c_uint64
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pg_tensile.execution import evaluator
from pg_tensile.execution.data.answers import Answers
from pg_tensile.execution.evaluator import Image, Library, Rows, RowsPointer, Status, Stored, WrongLength
from tests.evaluator import build

__all__ = ["Stored", "WrongLength"]
READY, UNSUITABLE, DAMAGED = Status
VECTORS = ("baseline", "AVX2", "AVX-512")  # by the number in EVALUATOR_VECTORS


class RawRows(NamedTuple):
    """Rows as a session has them.

    scalars: [numbers, rows]; strings: [categories][rows], None = null; arrays: [arrays][rows], None = null."""

    total: int
    scalars: NDArray[np.float64]
    strings: list[list[str | None]]
    arrays: list[list[NDArray[np.float64] | None]]

    def chosen(self, rows: Sequence[int]) -> RawRows:
        """Return some of the rows, in this order."""
        return RawRows(
            len(rows),
            np.ascontiguousarray(self.scalars[:, list(rows)]),
            [[column[row] for row in rows] for column in self.strings],
            [[column[row] for row in rows] for column in self.arrays],
        )


@cache
def _library() -> Library:
    library = Library(str(build.library()))
    functions = library.functions
    functions.evaluator_interval_rows.restype = c_int64
    functions.blake2b_hash.restype = c_uint64
    functions.blake2b_hash.argtypes = [c_char_p, c_size_t]
    for name in ("labels", "interval_rows", "bins", "histograms"):
        getattr(functions, f"evaluator_{name}").argtypes = [ctypes.c_void_p]
    return library


def string_hash(data: bytes) -> int:
    return _library().functions.blake2b_hash(data, len(data))


def compiled(stored: Stored, identity: int = 1) -> tuple[Status, bytes, str | None]:
    """Return the status, the image and what is wrong with a version."""
    return _library().compile(stored, identity)


class Evaluator(evaluator.Evaluator):
    """An opened image with all that a session asks it for. Raises ValueError if it is damaged.

    `vectors` is the number of the instructions that it may use; less than these, if the machine has fewer."""

    def __init__(self, image: bytes, vectors: int = 2, identity: int = 1) -> None:
        os.environ["EVALUATOR_VECTORS"] = str(vectors)
        super().__init__(_library(), Image(image, identity))
        self._lib = self._functions
        counts = c_int(), c_int(), c_int()
        self._lib.evaluator_features(self._self, *map(byref, counts))
        self.features = tuple(count.value for count in counts)  # numbers, categories and arrays
        self.labels = self._lib.evaluator_labels(self._self)
        self.interval_rows = self._lib.evaluator_interval_rows(self._self)
        self.bins = self._lib.evaluator_bins(self._self)
        self.histograms = self._lib.evaluator_histograms(self._self)

    def code(self, category: int, text: str) -> tuple[int, bool]:
        """Return the code of a string, and whether it counts as unknown."""
        unknown, data = c_bool(), text.encode()
        code = self._lib.evaluator_code(self._self, c_int(category), data, c_int(len(data)), byref(unknown))
        return code, unknown.value

    def rows(self, raw: RawRows) -> Rows:
        """Return rows with the codes of their strings."""
        codes = np.array(
            [[-1 if s is None else self.code(i, s)[0] for s in column] for i, column in enumerate(raw.strings)],
            np.int32,
        ).reshape(len(raw.strings), raw.total)
        arrays = []
        for column in raw.arrays:
            lengths = np.array([-1 if item is None else len(item) for item in column], np.int32)
            arrays.append((lengths, np.concatenate([np.empty(0), *(item for item in column if item is not None)])))
        return Rows(raw.total, raw.scalars, codes, arrays)

    def raw_outputs(self, raw: RawRows) -> NDArray[np.float64]:
        """Return the outputs [rows, outputs]. Raises WrongLength."""
        return self.outputs(self.rows(raw))

    def answers(self, outputs: NDArray[np.float64]) -> Answers:
        count = len(outputs)
        prediction, probability, label = np.empty(count), np.empty(count), np.empty(count, np.int32)
        pointers = [_pointer(outputs, c_double), c_int(count), _pointer(prediction, c_double)]
        pointers += [_pointer(probability, c_double), _pointer(label, c_int32)]
        self._lib.evaluator_answers(self._self, *pointers)
        return Answers(prediction, probability, label)

    def probabilities(self, outputs: NDArray[np.float64]) -> NDArray[np.float64]:
        found = np.empty((len(outputs), self.labels))
        pointers = [_pointer(outputs, c_double), c_int(len(outputs)), _pointer(found, c_double)]
        self._lib.evaluator_probabilities(self._self, *pointers)
        return found

    def interval(self, outputs: NDArray[np.float64], coverage: float) -> tuple[int, NDArray[Any], NDArray[Any]]:
        """Return the status and the bounds [rows]."""
        lower, upper = np.empty(len(outputs)), np.empty(len(outputs))
        status = self._lib.evaluator_interval(
            self._self,
            _pointer(outputs, c_double),
            c_int(len(outputs)),
            c_double(coverage),
            _pointer(lower, c_double),
            _pointer(upper, c_double),
        )
        return status, lower, upper

    def row_bins(self, raw: RawRows, answers: Answers) -> NDArray[np.int32]:
        """Return the bin of each histogram [rows, histograms]."""
        rows = RowsPointer.to(self.rows(raw))
        bins = np.empty((raw.total, self.histograms), np.int32)
        for row in range(raw.total):
            prediction, label = c_double(answers.prediction[row]), c_int32(answers.label[row])
            place = _pointer(bins[row], c_int32)
            self._lib.evaluator_row_bins(self._self, byref(rows), c_int(row), prediction, label, place)
        return bins


def _pointer(array: NDArray[Any], kind: Any) -> Any:
    return array.ctypes.data_as(POINTER(kind))
