"""Model versions ready to predict, in one piece or within a memory budget.

The version's preprocessing turns a request's features into the model's inputs, and its outputs into predictions;
`LoadedModel` and `BudgetedModel` differ in how the model is executed in between.

A row has the same bits whoever else asks. Few rows of a model that can do without PyTorch are computed as if each was
alone, in one request or in several together. The rows of any other request are computed by themselves, in parts whose
sizes depend on the model alone.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from pg_tensile.errors import DataError
from pg_tensile.execution.data.answers import FEW_ROWS, Answers, answers, interval, probabilities
from pg_tensile.execution.data.drift import Reference
from pg_tensile.execution.data.preprocessing import ArraysInput, CategoryInput, Features, Inputs, Preprocessing
from pg_tensile.execution.global_state import shared
from pyworker.children.embedding import BaseModel, Embedder
from pyworker.children.malformed import Malformed
from pyworker.wire import Frame

if TYPE_CHECKING:
    from torch import nn

    from pg_tensile.planning.device.profile import DeviceProfile

HOST = "cpu"
MOST_ROWS = 8192  # of a batch within a memory budget: the most that a PREDICT frame has


Part = Callable[[], NDArray[Any]]


class Reply(NamedTuple):
    """Contents of a PREDICTION frame; docs/internals.md, "Features (PREDICT)"."""

    unknown: NDArray[np.int32]  # categories never seen in training [rows]
    answers: Answers
    extras: tuple[NDArray[np.float64], ...] = ()  # what the request wishes for more
    inputs: Inputs | None = None  # the features, among those of other requests
    first: int = 0  # place of the first row in `inputs`


class Version:
    """A version with its preprocessing.

    `nbytes` is the memory that it takes of `device`, `host_bytes` the host memory beside that, and `planned_bytes` what
    a prediction for one row takes within a memory budget, or None without one.
    """

    device = HOST
    host_bytes = 0
    planned_bytes: int | None = None
    quick = False  # few rows take less time than the way to the model's thread
    reference: Reference | None = None  # histograms of the training rows

    def __init__(self, preprocessing: Preprocessing, nbytes: int) -> None:
        self.nbytes = nbytes
        self._preprocessing = preprocessing
        self._numbers = len(preprocessing.numbers)
        self._categories = len(preprocessing.categories)
        self._arrays = len(preprocessing.arrays)
        self._has_texts = any(feature.is_text for feature in preprocessing.categories)
        self._embedder: Embedder | None = None
        self._padded = True  # texts have as many tokens as in training

    def at_once(self, frame: Frame) -> bool:
        """Return whether a PREDICT frame is to be answered by the predictor's loop, with `replies`."""
        header = frame.header
        return self.quick and header.get("rows") in _FEW

    def replies(self, frames: Sequence[Frame]) -> list[Reply | Exception]:
        """Return the reply to each of several PREDICT frames, or its error: the bits of each by itself."""
        single = [frame for frame in frames if frame.header.get("rows") == 1 and not frame.header.keys() & _WISHES]
        found: dict[int, Reply] = {}
        for start in range(0, len(single), FEW_ROWS):
            together = single[start : start + FEW_ROWS]
            if len(together) > 1:
                with contextlib.suppress(Exception):  # of one of them, which is to have it alone
                    found.update(zip(map(id, together), self._single_rows(together), strict=True))
        return [found.get(id(frame)) or self._reply(frame) for frame in frames]

    def _reply(self, frame: Frame) -> Reply | Exception:
        try:
            return self.predict(frame)
        except Exception as error:  # anything that a user's model raises is that request's error
            return error

    def _single_rows(self, frames: Sequence[Frame]) -> list[Reply]:
        """Return the replies to frames of one row each, computed at once. Raises an error if one of them is wrong."""
        inputs, unknown = self._joined_inputs(frames)
        prediction, probability, label = answers(self.outputs(inputs), self._preprocessing)
        return [
            Reply(
                unknown[row : row + 1],
                Answers(prediction[row : row + 1], probability[row : row + 1], label[row : row + 1]),
                inputs=inputs,
                first=row,
            )
            for row in range(len(frames))
        ]

    def _joined_inputs(self, frames: Sequence[Frame]) -> tuple[Inputs, NDArray[np.int32]]:
        """Return the features in frames of one row each, and how many of each row's categories are unknown."""
        numeric = _joined_buffers(frames, 0, np.float64, self._numbers)
        codes = _joined_buffers(frames, 1, np.int32, self._categories)
        dictionaries = [frame.header.get("dict") or [] for frame in frames]
        fit = codes.min(initial=0) >= -1 and {self._categories}.issuperset(map(len, dictionaries))
        if not fit or not {2 + 2 * self._arrays}.issuperset(len(frame.buffers) for frame in frames):
            raise Malformed("a request does not fit the model")
        categories, unknown = [], np.zeros(len(frames), np.int32)
        for number, column in enumerate(codes.tolist()):
            strings = [lists[number][code] for lists, code in zip(dictionaries, column, strict=True) if code >= 0]
            places = [row for row, code in enumerate(column) if code >= 0]
            known_codes = self._preprocessing.codes(number, strings)
            indices = np.full(len(frames), -1)
            indices[places] = np.arange(len(places))
            categories.append(CategoryInput(indices, np.array([*known_codes, 0], np.int64)))
            unknown[places] += np.array(self._preprocessing.unknown(number, known_codes), np.int32)
        arrays = []
        for index in range(self._arrays):
            parts = [self._array_input(1, *frame.buffers[2 + 2 * index : 4 + 2 * index]) for frame in frames]
            arrays.append(ArraysInput(*map(np.concatenate, zip(*parts, strict=True))))
        return Inputs(len(frames), numeric, categories, arrays), unknown

    def predict(self, frame: Frame) -> Reply:
        """Return the reply to a PREDICT frame. Raises Malformed, DataError."""
        steps = self.predict_in_parts(frame)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                reply: Reply = end.value
                return reply

    def predict_in_parts(self, frame: Frame) -> Generator[None, None, Reply]:
        """Compute the reply to a PREDICT frame in parts, and return it. Raises Malformed, DataError."""
        inputs, unknown = self.inputs(frame)
        parts: list[NDArray[Any]] = []
        for part in self._parts(inputs):
            if parts:
                yield
            parts.append(part())
        outputs = _whole(parts)
        reply = Reply(unknown, answers(outputs, self._preprocessing), inputs=inputs)
        return reply._replace(extras=self._extras(frame.header, outputs))

    def _extras(self, header: dict[str, Any], outputs: NDArray[np.float64]) -> tuple[NDArray[np.float64], ...]:
        """Return what a request wishes for besides answers. Raises DataError."""
        coverage = header.get("coverage")
        if coverage is not None:
            return self._bounds(outputs, coverage, bool(header.get("optional")))
        if header.get("probabilities"):
            return (probabilities(outputs, self._preprocessing),)
        return ()

    def _bounds(self, outputs: NDArray[np.float64], coverage: float, optional: bool) -> tuple[NDArray[np.float64], ...]:
        """Return the lower and upper bounds [rows]; nothing if they are optional and the model has none."""
        try:
            return interval(outputs, self._preprocessing, coverage)
        except DataError:
            if optional:
                return ()
            raise

    def outputs(self, inputs: Inputs) -> NDArray[np.float64]:
        """Return the model's outputs [rows, outputs]. Raises DataError for arrays of a wrong length."""
        return _whole([part() for part in self._parts(inputs)])

    def _parts(self, inputs: Inputs) -> list[Part]:
        return self._execute(self._preprocessing.apply(inputs), inputs.rows)

    @property
    def preprocessing(self) -> Preprocessing:
        return self._preprocessing

    def _execute(self, features: Features, rows: int) -> list[Part]:
        """Return functions that compute the model's outputs [rows, outputs], one part each, at least one."""
        raise NotImplementedError

    def embed(self, frame: Frame) -> tuple[Any, ...]:
        """Return the buffers of the answer to an EMBED frame. Raises Malformed unless the model reads texts."""
        if self._embedder is None:
            raise Malformed("a request for embeddings is about a model that reads no texts")
        return self._embedder.embed(frame)

    def close(self) -> None:
        """Release resources that are not memory."""

    def inputs(self, frame: Frame) -> tuple[Inputs, NDArray[np.int32]]:
        """Return the features in a PREDICT frame, and the number of categories never seen in training in each row.

        Raises Malformed."""
        rows, buffers = frame.header.get("rows"), frame.buffers
        if not isinstance(rows, int) or rows < 0 or len(buffers) != 2 + 2 * self._arrays:
            raise Malformed(f"a request has {len(buffers)} buffers and {rows} rows")
        try:
            numeric = np.frombuffer(buffers[0], np.float64).reshape(self._numbers, rows)
            codes = np.frombuffer(buffers[1], np.int32).reshape(self._categories, rows)
        except ValueError:
            raise Malformed(f"a request's buffers do not fit {rows} rows") from None
        categories, unknown = self._category_inputs(rows, codes, frame.header.get("dict") or [])
        arrays = [self._array_input(rows, *buffers[2 + 2 * i : 4 + 2 * i]) for i in range(self._arrays)]
        return Inputs(rows, numeric, categories, arrays), unknown

    def _category_inputs(
        self, rows: int, codes: NDArray[np.int32], dictionaries: list[Any]
    ) -> tuple[list[CategoryInput], NDArray[np.int32]]:
        """Return the categories, and the number of values in each row whose strings were never seen in training."""
        unknown = np.zeros(rows, np.int32)
        if len(dictionaries) != self._categories:
            raise Malformed(f"a request has {len(dictionaries)} dictionaries for {self._categories} categories")
        if not self._categories:
            return [], unknown
        limits = [len(strings) for strings in dictionaries]
        lowest, highest = codes.min(initial=0), codes.max(axis=1, initial=-1).tolist()
        if lowest < -1 or any(map(operator.ge, highest, limits)):
            raise Malformed("a request's category codes exceed their dictionary")
        if self._has_texts:
            return self._text_inputs(codes, dictionaries, unknown)
        codes_of_strings = [self._preprocessing.codes(number, strings) for number, strings in enumerate(dictionaries)]
        tables = np.array([code for known_codes in codes_of_strings for code in (*known_codes, 0)], np.int64)
        categories: list[CategoryInput] = []
        end = 0
        for number, (indices, limit, known_codes) in enumerate(zip(codes, limits, codes_of_strings, strict=True)):
            start, end = end, end + limit + 1
            unknown_strings = self._preprocessing.unknown(number, known_codes)
            if True in unknown_strings:
                unknown += np.array([*unknown_strings, False])[indices]
            categories.append(CategoryInput(indices, tables[start:end]))
        return categories, unknown

    def _text_inputs(
        self, codes: NDArray[np.int32], dictionaries: list[Any], unknown: NDArray[np.int32]
    ) -> tuple[list[CategoryInput], NDArray[np.int32]]:
        """Return the categories of a version with text features, as `_category_inputs`."""
        categories = [
            CategoryInput(indices, self._preprocessing.table(number, strings, self._padded))
            for number, (indices, strings) in enumerate(zip(codes, dictionaries, strict=True))
        ]
        for number, (indices, table) in enumerate(categories):
            if not self._preprocessing.categories[number].is_text:
                unknown_strings = self._preprocessing.unknown(number, table[:-1].tolist())
                unknown += np.array([*unknown_strings, False])[indices]
        return categories, unknown

    @staticmethod
    def _array_input(rows: int, lengths: memoryview, elements: memoryview) -> ArraysInput:
        try:
            array = ArraysInput(np.frombuffer(lengths, np.int32), np.frombuffer(elements, np.float64))
        except ValueError as error:
            raise Malformed(str(error)) from None
        if len(array.lengths) != rows or array.lengths.clip(min=0).sum(dtype=np.int64) != len(array.elements):
            raise Malformed(f"a request's array elements do not fit {rows} rows")
        return array


class LoadedModel(Version):
    """Version that is executed in one piece, on the CPU: there, one row takes less than the way to another device."""

    def __init__(self, preprocessing: Preprocessing, module: nn.Module, nbytes: int) -> None:
        from pg_tensile.execution.models.whole import WholeModel

        super().__init__(preprocessing, nbytes)
        self._padded = False
        self._model = WholeModel(preprocessing, module)
        if preprocessing.text is not None:
            transformer: Any = module.texts
            self._embedder = Embedder(transformer, preprocessing.encoder, preprocessing.text.length)
        self.quick = self._model.quick and not self._has_texts

    def _execute(self, features: Features, rows: int) -> list[Part]:
        return self._model.parts(features, rows)


class BudgetedModel(Version):
    """Version that is executed under plans within `memory_budget` bytes of a device.

    The whole budget counts as memory that it takes. Raises TensileError.
    """

    def __init__(
        self,
        preprocessing: Preprocessing,
        module: nn.Module,
        memory_budget: int,
        profile: DeviceProfile,
        host_bytes: int,
        device: str = HOST,
    ) -> None:
        import torch

        from pg_tensile.execution.runtime.open_device import open_device
        from pg_tensile.execution.training.prediction import FlatModel, Served

        super().__init__(preprocessing, memory_budget)
        self.device = device
        self.host_bytes = host_bytes
        self._from_numpy = torch.from_numpy
        example = [torch.from_numpy(np.empty((1, *shape), dtype)) for shape, dtype in preprocessing.layout()[:-1]]
        with torch.inference_mode(False):
            self._device = open_device(torch.device(device), profile, memory_budget)
        try:
            self._served = Served(FlatModel(module.eval()), example, self._device, MOST_ROWS)
        except BaseException:
            self._device.close()
            raise
        self.planned_bytes = self._served.candidates[1].device_peak_bytes

    def _execute(self, features: Features, rows: int) -> list[Part]:
        return [partial(self._predict, features)]

    def _predict(self, features: Features) -> NDArray[Any]:
        outputs: NDArray[Any] = self._served.predict([self._from_numpy(array) for array in features.flat()]).numpy()
        return outputs

    def close(self) -> None:
        self._served.close()
        self._device.close()


_FEW = range(1, FEW_ROWS + 1)
_WISHES = {"coverage", "explain", "probabilities"}  # keys of a request's header for more than predictions


def _whole(parts: list[NDArray[Any]]) -> NDArray[np.float64]:
    return (parts[0] if len(parts) == 1 else np.concatenate(parts)).astype(np.float64)


def _joined_buffers(frames: Sequence[Frame], number: int, dtype: DTypeLike, width: int) -> NDArray[Any]:
    """Return a buffer of each frame as a column, [width, frames]. Raises Malformed unless it has this width."""
    buffers = [frame.buffers[number] for frame in frames]
    if not {width * np.dtype(dtype).itemsize}.issuperset(map(len, buffers)):
        raise Malformed("a request's buffers do not fit one row")
    return np.ascontiguousarray(np.frombuffer(b"".join(buffers), dtype).reshape(len(frames), width).T)


def load(header: dict[str, Any], weights: list[memoryview], profile: DeviceProfile | None, device: str = HOST) -> Model:
    """Load the version that a MODEL frame's header describes, or the model without a version.

    `weights`: a safetensors file in pieces, which are taken. `profile` is that of `device`; both are for a version with
    a memory budget. Raises TensileError.
    """
    if header["preprocessing"] is None:
        return BaseModel(header["architecture"])
    return load_version(header, weights, profile, device)


def load_version(
    header: dict[str, Any], weights: list[memoryview], profile: DeviceProfile | None, device: str = HOST
) -> Version:
    """Load the version that a MODEL frame's header describes, as `load`. Raises TensileError."""
    import torch

    from pg_tensile.execution import models
    from pg_tensile.execution.training import checkpoint

    preprocessing = Preprocessing.from_json(header["preprocessing"])
    if preprocessing.text is not None:
        _ = preprocessing.encoder  # raises if its folder is missing or another one
    for number, feature in enumerate(preprocessing.categories):
        if feature.vectors is not None:
            preprocessing.table(number, [])  # imports what encoding needs
    architecture = models.parse(header["architecture"])
    strings = sum(len(text) + 100 for f in preprocessing.categories for text in f.categories or ())
    inherited = 0 if preprocessing.text is None else preprocessing.text.weight_bytes
    memory_budget = header.get("memory_budget") or 0
    weight_bytes = sum(chunk.nbytes for chunk in weights)
    with torch.inference_mode(not memory_budget):  # within a budget, an executor takes over the tensors
        with shared():
            module = models.build(architecture, preprocessing.model_inputs, preprocessing.outputs)
        with checkpoint.from_chunks(weights) as tensors:
            checkpoint.load_model(module, tensors)
    vectors = sum(f.vectors.nbytes for f in preprocessing.categories if f.vectors is not None)
    host_bytes = weight_bytes + inherited + strings + vectors + models.derived_bytes(module)
    if not memory_budget:
        version: Version = LoadedModel(preprocessing, module, host_bytes)
    else:
        assert profile is not None
        version = BudgetedModel(preprocessing, module, memory_budget, profile, host_bytes, device)
    with contextlib.suppress(DataError):  # without usable statistics it predicts all the same
        version.reference = Reference.from_json(header.get("reference"), preprocessing)
    return version


Model = Version | BaseModel
