"""The evaluator of small models (csrc/evaluator/evaluator.h) as a library: no PyTorch, and the bits of a session."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, byref, c_bool, c_char, c_char_p, c_int, c_size_t, c_uint64, c_void_p
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

INTERFACE = 1  # EVALUATOR_INTERFACE of interface.h
ALIGNMENT = 64  # bytes, of an image


class Status(IntEnum):
    """Outcome of a compilation."""

    READY = 0
    UNSUITABLE = 1  # PyTorch has to evaluate the version
    DAMAGED = 2


class Stored(NamedTuple):
    """A version as the tables have it: JSON, and a safetensors file."""

    architecture: str
    preprocessing: str
    reference: str | None
    weights: bytes


class Rows(NamedTuple):
    """Raw features of some rows, by kind and in the order of the model's features.

    scalars: float64 [numbers, rows], NaN = null; codes: int32 [categories, rows], -1 = null; arrays, of each feature:
    lengths, int32 [rows], -1 = null, and the elements of all rows, float64."""

    total: int
    scalars: NDArray[np.float64]
    codes: NDArray[np.int32]
    arrays: Sequence[tuple[NDArray[np.int32], NDArray[np.float64]]]

    def part(self, start: int, end: int) -> Rows:
        """Return the rows from `start` to before `end`."""
        arrays = []
        for lengths, elements in self.arrays:
            present = lengths.clip(min=0)
            first, last = (int(present[:place].sum(dtype=np.int64)) for place in (start, end))
            arrays.append((lengths[start:end], elements[first:last]))
        return Rows(end - start, self.scalars[:, start:end], self.codes[:, start:end], arrays)


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
    _fields_ = [("lengths", c_void_p), ("elements", c_void_p)]


class RowsPointer(ctypes.Structure):
    """Rows as the library takes them, valid as long as the arrays in `kept`."""

    kept: list[Any]
    _fields_ = [
        ("rows", c_int),
        ("capacity", c_int),
        ("scalars", c_void_p),
        ("codes", c_void_p),
        ("arrays", POINTER(_Arrays)),
    ]

    @staticmethod
    def to(rows: Rows) -> RowsPointer:
        scalars, codes = _packed(rows.scalars, np.float64), _packed(rows.codes, np.int32)
        parts = [(_packed(lengths, np.int32), _packed(elements, np.float64)) for lengths, elements in rows.arrays]
        arrays = (_Arrays * max(len(parts), 1))()
        for place, (lengths, elements) in enumerate(parts):
            arrays[place] = _Arrays(lengths.ctypes.data, elements.ctypes.data)
        pointer = RowsPointer(rows.total, rows.total, scalars.ctypes.data, codes.ctypes.data, arrays)
        pointer.kept = [scalars, codes, parts]
        return pointer


class _Mismatch(ctypes.Structure):
    _fields_ = [("array", c_int), ("row", c_int), ("length", c_int), ("expected", c_int)]


class Library:
    """The loaded library. Raises OSError if there is none at the path, or one that does not fit this module."""

    def __init__(self, path: str) -> None:
        self.functions: Any = ctypes.CDLL(path)
        found = getattr(self.functions, "evaluator_interface", lambda: None)()
        if found != INTERFACE:
            raise OSError(f"{path} has interface {found}, not {INTERFACE}")
        self.functions.evaluator_open.restype = c_void_p
        self.functions.evaluator_open.argtypes = [c_void_p, c_size_t, c_uint64, POINTER(c_char_p)]
        self.functions.evaluator_outputs.restype = c_bool

    def compile(self, stored: Stored, identity: int = 0) -> tuple[Status, bytes, str | None]:
        """Return the status, the image and what is wrong with a version."""
        reference = None if stored.reference is None else stored.reference.encode()
        texts = [stored.architecture.encode(), stored.preprocessing.encode(), reference, stored.weights]
        given = _Stored(*(part for text in texts for part in (text, len(text or b""))))
        image, size, problem = POINTER(c_char)(), c_size_t(), c_char_p()
        results = byref(image), byref(size), byref(problem)
        status = Status(self.functions.evaluator_compile(byref(given), c_uint64(identity), *results))
        data = ctypes.string_at(image, size.value) if image else b""
        text = problem.value.decode() if problem.value is not None else None
        for pointer in (image, problem):
            if pointer:
                self.functions.pfree(pointer)
        return status, data, text


class Image:
    """An image in memory, which several evaluators may open."""

    def __init__(self, data: bytes, identity: int = 0) -> None:
        memory = np.empty(len(data) + ALIGNMENT, np.uint8)
        start = -memory.ctypes.data % ALIGNMENT
        self.bytes = memory[start : start + len(data)]
        self.bytes[:] = np.frombuffer(data, np.uint8)
        self.identity = identity


class Evaluator:
    """An opened image, for one thread. Raises ValueError if it is damaged."""

    def __init__(self, library: Library, image: Image) -> None:
        self._functions = library.functions
        self._image = image
        problem = c_char_p()
        data = image.bytes
        opened = self._functions.evaluator_open(data.ctypes.data, data.nbytes, image.identity, byref(problem))
        if not opened:
            raise ValueError(problem.value)
        self._self = c_void_p(opened)
        self.outputs_per_row = self._functions.evaluator_outputs_per_row(self._self)

    def close(self) -> None:
        self._functions.evaluator_close(self._self)

    def outputs(self, rows: Rows) -> NDArray[np.float64]:
        """Return the outputs [rows, outputs], the same for a row among any others. Raises WrongLength."""
        outputs = np.empty((rows.total, self.outputs_per_row))
        mismatch, given = _Mismatch(), RowsPointer.to(rows)
        place = c_void_p(outputs.ctypes.data)
        if not self._functions.evaluator_outputs(self._self, byref(given), place, byref(mismatch)):
            raise WrongLength(mismatch.array, mismatch.row, mismatch.length, mismatch.expected)
        return outputs


def _packed(array: NDArray[Any], dtype: DTypeLike) -> NDArray[Any]:
    """Return the array, or a copy, as C has it."""
    return np.require(array, dtype, ["C_CONTIGUOUS", "ALIGNED"])
