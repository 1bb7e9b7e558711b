"""The evaluator in Python: versions as a session compiles, opens and evaluates them."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from ctypes import POINTER, byref, c_bool, c_char, c_char_p, c_double, c_int, c_int32, c_int64, c_size_t, c_uint64
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pg_tensile.execution.data.answers import Answers
from tests.evaluator import build

READY, UNSUITABLE, DAMAGED = range(3)
VECTORS = ("baseline", "AVX2", "AVX-512")  # by the number in EVALUATOR_VECTORS


class Stored(NamedTuple):
    """A version as the tables have it: JSON, and a safetensors file."""

    architecture: str
    preprocessing: str
    reference: str | None
    weights: bytes


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


class WrongLength(Exception):
    """The array feature, the row, the length of its array and that expected."""


class _Stored(ctypes.Structure):
    _fields_ = [
        ("architecture", c_char_p),
        ("architecture_length", c_size_t),
        ("preprocessing", c_char_p),
        ("preprocessing_length", c_size_t),
        ("reference", c_char_p),
        ("reference_length", c_size_t),
        ("weights", c_char_p),
        ("weight_bytes", c_size_t),
    ]


class _Arrays(ctypes.Structure):
    _fields_ = [("lengths", POINTER(c_int32)), ("elements", POINTER(c_double))]


class _Rows(ctypes.Structure):
    _fields_ = [
        ("rows", c_int),
        ("capacity", c_int),
        ("scalars", POINTER(c_double)),
        ("codes", POINTER(c_int32)),
        ("arrays", POINTER(_Arrays)),
    ]


class _Mismatch(ctypes.Structure):
    _fields_ = [("array", c_int), ("row", c_int), ("length", c_int), ("expected", c_int)]


@cache
def _library() -> Any:
    library = ctypes.CDLL(str(build.library()))
    library.evaluator_open.restype = ctypes.c_void_p
    library.evaluator_interval_rows.restype = c_int64
    library.evaluator_outputs.restype = c_bool
    library.blake2b_hash.restype = c_uint64
    library.blake2b_hash.argtypes = [c_char_p, c_size_t]
    for name in ("close", "outputs_per_row", "labels", "interval_rows", "bins", "histograms"):
        getattr(library, f"evaluator_{name}").argtypes = [ctypes.c_void_p]
    library.evaluator_open.argtypes = [ctypes.c_void_p, c_size_t, c_uint64, POINTER(c_char_p)]
    return library


def string_hash(data: bytes) -> int:
    return _library().blake2b_hash(data, len(data))


def compiled(stored: Stored, identity: int = 1) -> tuple[int, bytes, str | None]:
    """Return the status, the image and what is wrong with a version."""
    reference = None if stored.reference is None else stored.reference.encode()
    texts = [stored.architecture.encode(), stored.preprocessing.encode(), reference, stored.weights]
    given = _Stored(*(part for text in texts for part in (text, len(text or b""))))
    image, size, problem = POINTER(c_char)(), c_size_t(), c_char_p()
    status = _library().evaluator_compile(byref(given), c_uint64(identity), byref(image), byref(size), byref(problem))
    data = ctypes.string_at(image, size.value) if image else b""
    text = problem.value.decode() if problem.value is not None else None
    for pointer in (image, problem):
        if pointer:
            _library().pfree(pointer)
    return status, data, text


class Evaluator:
    """An opened image. Raises ValueError if it is damaged.

    `vectors` is the number of the instructions that it may use; less than these, if the machine has fewer."""

    def __init__(self, image: bytes, vectors: int = 2, identity: int = 1) -> None:
        self._lib = _library()
        self._memory = np.empty(len(image) + 64, np.uint8)
        start = -self._memory.ctypes.data % 64
        self._image = self._memory[start : start + len(image)]
        self._image[:] = np.frombuffer(image, np.uint8)
        problem = c_char_p()
        os.environ["EVALUATOR_VECTORS"] = str(vectors)
        opened = self._lib.evaluator_open(self._image.ctypes.data, len(image), identity, byref(problem))
        if not opened:
            raise ValueError(problem.value)
        self._self = ctypes.c_void_p(opened)
        counts = c_int(), c_int(), c_int()
        self._lib.evaluator_features(self._self, *map(byref, counts))
        self.features = tuple(count.value for count in counts)  # numbers, categories and arrays
        self.outputs_per_row = self._lib.evaluator_outputs_per_row(self._self)
        self.labels = self._lib.evaluator_labels(self._self)
        self.interval_rows = self._lib.evaluator_interval_rows(self._self)
        self.bins = self._lib.evaluator_bins(self._self)
        self.histograms = self._lib.evaluator_histograms(self._self)

    def close(self) -> None:
        self._lib.evaluator_close(self._self)

    def code(self, category: int, text: str) -> tuple[int, bool]:
        """Return the code of a string, and whether it counts as unknown."""
        unknown, data = c_bool(), text.encode()
        code = self._lib.evaluator_code(self._self, c_int(category), data, c_int(len(data)), byref(unknown))
        return code, unknown.value

    def rows(self, raw: RawRows) -> _Rows:
        """Return rows in the form of the interface, which lives as long as what it refers to."""
        codes = np.array(
            [[-1 if s is None else self.code(i, s)[0] for s in column] for i, column in enumerate(raw.strings)],
            np.int32,
        ).reshape(len(raw.strings), raw.total)
        arrays = (_Arrays * max(len(raw.arrays), 1))()
        kept: list[Any] = [codes, raw.scalars, arrays]
        for i, column in enumerate(raw.arrays):
            lengths = np.array([-1 if item is None else len(item) for item in column], np.int32)
            elements = np.concatenate([np.empty(0), *(item for item in column if item is not None)])
            arrays[i] = _Arrays(_pointer(lengths, c_int32), _pointer(elements, c_double))
            kept += [lengths, elements]
        rows = _Rows(raw.total, raw.total, _pointer(raw.scalars, c_double), _pointer(codes, c_int32), arrays)
        rows.kept = kept
        return rows

    def outputs(self, raw: RawRows) -> NDArray[np.float64]:
        """Return the outputs [rows, outputs]. Raises WrongLength."""
        rows = self.rows(raw)
        outputs = np.empty((raw.total, self.outputs_per_row))
        mismatch = _Mismatch()
        if not self._lib.evaluator_outputs(self._self, byref(rows), _pointer(outputs, c_double), byref(mismatch)):
            raise WrongLength(mismatch.array, mismatch.row, mismatch.length, mismatch.expected)
        return outputs

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
        rows = self.rows(raw)
        bins = np.empty((raw.total, self.histograms), np.int32)
        for row in range(raw.total):
            prediction, label = c_double(answers.prediction[row]), c_int32(answers.label[row])
            place = _pointer(bins[row], c_int32)
            self._lib.evaluator_row_bins(self._self, byref(rows), c_int(row), prediction, label, place)
        return bins


def _pointer(array: NDArray[Any], kind: Any) -> Any:
    return array.ctypes.data_as(POINTER(kind))
