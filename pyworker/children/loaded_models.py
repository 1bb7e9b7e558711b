"""Model versions ready to predict, in one piece or within a memory budget, and the cache that keeps them.

The version's preprocessing turns a request's features into the model's inputs, and its outputs into predictions;
`LoadedModel` and `BudgetedModel` differ in how the model is executed in between.
"""

from __future__ import annotations

import operator
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pg_tensile.execution.data.answers import Answers, answers, explained, interval
from pg_tensile.execution.data.attributions import attributions
from pg_tensile.execution.data.preprocessing import ArraysInput, CategoryInput, Features, Inputs, Preprocessing
from pyworker.children.embedding import BaseModel, Embedder
from pyworker.children.malformed import Malformed
from pyworker.wire import Frame

if TYPE_CHECKING:
    from torch import nn

    from pg_tensile.planning.device.profile import DeviceProfile

HOST = "cpu"
MOST_ROWS = 8192  # of a batch within a memory budget: the most that a PREDICT frame has


class Key(NamedTuple):
    """Key of a loaded model: a version, and the device memory that it is executed within (0 means in one piece).

    A negative number (tensile._base_number) is that of a model as its folder has it, without a version.
    """

    version: int
    memory_budget: int = 0


class Reply(NamedTuple):
    """Contents of a PREDICTION frame; docs/internals.md, "Features (PREDICT)"."""

    unknown: int  # categories never seen in training
    answers: Answers
    extras: tuple[NDArray[np.float64], ...] = ()  # lower and upper bounds [rows], or attributions [features]


class Version:
    """A version with its preprocessing.

    `nbytes` is the memory that it takes of `device`, `host_bytes` the host memory beside that, and `planned_bytes` what
    a prediction for one row takes within a memory budget, or None without one.
    """

    device = HOST
    host_bytes = 0
    planned_bytes: int | None = None

    def __init__(self, preprocessing: Preprocessing, nbytes: int) -> None:
        self.nbytes = nbytes
        self._preprocessing = preprocessing
        self._numbers = len(preprocessing.numbers)
        self._categories = len(preprocessing.categories)
        self._arrays = len(preprocessing.arrays)
        self._embedder: Embedder | None = None
        self._padded = True  # texts have as many tokens as in training

    def predict(self, frame: Frame) -> Reply:
        """Return the reply to a PREDICT frame. Raises Malformed, DataError."""
        inputs, unknown = self.inputs(frame)
        outputs = self.outputs(inputs)
        reply = Reply(unknown, answers(outputs, self._preprocessing))
        coverage = frame.header.get("coverage")
        if coverage is not None:
            return reply._replace(extras=interval(outputs, self._preprocessing, coverage))
        if frame.header.get("explain"):
            return reply._replace(extras=(self._attributions(inputs, int(reply.answers.label[0])),))
        return reply

    def outputs(self, inputs: Inputs) -> NDArray[np.float64]:
        """Return the model's outputs [rows, outputs]. Raises DataError for arrays of a wrong length."""
        return self._execute(self._preprocessing.apply(inputs), inputs.rows).astype(np.float64)

    def _attributions(self, inputs: Inputs, label: int) -> NDArray[np.float64]:
        preprocessing = self._preprocessing
        return attributions(preprocessing, inputs, lambda mixed: explained(self.outputs(mixed), preprocessing, label))

    @property
    def preprocessing(self) -> Preprocessing:
        return self._preprocessing

    def _execute(self, features: Features, rows: int) -> NDArray[Any]:
        """Return the model's outputs [rows, outputs]."""
        raise NotImplementedError

    def embed(self, frame: Frame) -> tuple[Any, ...]:
        """Return the buffers of the answer to an EMBED frame. Raises Malformed unless the model reads texts."""
        if self._embedder is None:
            raise Malformed("a request for embeddings is about a model that reads no texts")
        return self._embedder.embed(frame)

    def close(self) -> None:
        """Release resources that are not memory."""

    def inputs(self, frame: Frame) -> tuple[Inputs, int]:
        """Return the features in a PREDICT frame, and the number of categories never seen in training.

        Raises Malformed."""
        rows, buffers = frame.header.get("rows"), frame.buffers
        if not isinstance(rows, int) or rows < 0 or len(buffers) != 2 + 2 * self._arrays:
            raise Malformed(f"a request has {len(buffers)} buffers and {rows} rows")
        try:
            numeric = np.frombuffer(buffers[0], np.float64).reshape(self._numbers, rows)
            codes = np.frombuffer(buffers[1], np.int32).reshape(self._categories, rows)
        except ValueError:
            raise Malformed(f"a request's buffers do not fit {rows} rows") from None
        categories, unknown = self._category_inputs(codes, frame.header.get("dict") or [])
        arrays = [self._array_input(rows, *buffers[2 + 2 * i : 4 + 2 * i]) for i in range(self._arrays)]
        return Inputs(rows, numeric, categories, arrays), unknown

    def _category_inputs(self, codes: NDArray[np.int32], dictionaries: list[Any]) -> tuple[list[CategoryInput], int]:
        """Return the categories, and the number of values whose strings were never seen in training."""
        if len(dictionaries) != self._categories:
            raise Malformed(f"a request has {len(dictionaries)} dictionaries for {self._categories} categories")
        if not self._categories:
            return [], 0
        limits = [len(strings) for strings in dictionaries]
        lowest, highest = codes.min(initial=0), codes.max(axis=1, initial=-1).tolist()
        if lowest < -1 or any(map(operator.ge, highest, limits)):
            raise Malformed("a request's category codes exceed their dictionary")
        if self._preprocessing.text is not None:
            return self._text_inputs(codes, dictionaries)
        codes_of_strings = [self._preprocessing.codes(number, strings) for number, strings in enumerate(dictionaries)]
        tables = np.array([code for known_codes in codes_of_strings for code in (*known_codes, 0)], np.int64)
        categories: list[CategoryInput] = []
        unknown = end = 0
        for number, (indices, limit, known_codes) in enumerate(zip(codes, limits, codes_of_strings, strict=True)):
            start, end = end, end + limit + 1
            unknown_strings = self._preprocessing.unknown(number, known_codes)
            if True in unknown_strings:
                unknown += int(np.array([*unknown_strings, False])[indices].sum())
            categories.append(CategoryInput(indices, tables[start:end]))
        return categories, unknown

    def _text_inputs(self, codes: NDArray[np.int32], dictionaries: list[Any]) -> tuple[list[CategoryInput], int]:
        """Return the categories of a version with text features, as `_category_inputs`."""
        categories = [
            CategoryInput(indices, self._preprocessing.table(number, strings, self._padded))
            for number, (indices, strings) in enumerate(zip(codes, dictionaries, strict=True))
        ]
        unknown = 0
        for number, (indices, table) in enumerate(categories):
            if not self._preprocessing.categories[number].vocabulary:
                unknown_strings = self._preprocessing.unknown(number, table[:-1].tolist())
                unknown += int(np.array([*unknown_strings, False])[indices].sum())
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

    def _execute(self, features: Features, rows: int) -> NDArray[Any]:
        return self._model(features, rows)


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

    def _execute(self, features: Features, rows: int) -> NDArray[Any]:
        outputs: NDArray[Any] = self._served.predict([self._from_numpy(array) for array in features.flat()]).numpy()
        return outputs

    def close(self) -> None:
        self._served.close()
        self._device.close()


def load(header: dict[str, Any], weights: bytes, profile: DeviceProfile | None, device: str = HOST) -> Model:
    """Load the version that a MODEL frame's header describes, or the model without a version.

    `profile` is that of `device`; both are for a version with a memory budget. Raises TensileError.
    """
    if header["preprocessing"] is None:
        return BaseModel(header["architecture"])
    return load_version(header, weights, profile, device)


def load_version(header: dict[str, Any], weights: bytes, profile: DeviceProfile | None, device: str = HOST) -> Version:
    """Load the version that a MODEL frame's header describes, as `load`. Raises TensileError."""
    import torch

    from pg_tensile.execution import models
    from pg_tensile.execution.training import checkpoint

    preprocessing = Preprocessing.from_json(header["preprocessing"])
    if preprocessing.text is not None:
        _ = preprocessing.encoder  # raises if its folder is missing or another one
    architecture = models.parse(header["architecture"])
    strings = sum(len(text) + 100 for f in preprocessing.categories for text in f.categories or ())
    inherited = 0 if preprocessing.text is None else preprocessing.text.weight_bytes
    memory_budget = header.get("memory_budget") or 0
    with torch.inference_mode(not memory_budget):  # within a budget, an executor takes over the tensors
        module = models.build(architecture, preprocessing.model_inputs, preprocessing.outputs)
        checkpoint.load_model(module, checkpoint.from_bytes(weights))
    if not memory_budget:
        return LoadedModel(preprocessing, module, len(weights) + inherited + strings)
    assert profile is not None
    return BudgetedModel(preprocessing, module, memory_budget, profile, len(weights) + inherited + strings, device)


Model = Version | BaseModel


class ModelCache:
    """Loaded models, the least recently used first, that take at most `limit_bytes` of host memory."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._models: OrderedDict[Key, Model] = OrderedDict()
        self.device_bytes: Counter[str] = Counter()  # by device
        self._host_bytes = 0  # besides those of the CPU as a device

    def get(self, key: Key) -> Model | None:
        model = self._models.get(key)
        if model is not None:
            self._models.move_to_end(key)
        return model

    def shown(self) -> list[dict[str, Any]]:
        """Return the rows of tensile.loaded_models."""
        return [
            {
                "version": key.version,
                "device": model.device,
                "memory_budget": key.memory_budget or None,
                "device_bytes": model.nbytes,
                "planned_bytes": model.planned_bytes,
                "host_bytes": model.host_bytes,
            }
            for key, model in self._models.items()
        ]

    def add(self, key: Key, model: Model) -> None:
        """Keep the model, dropping others to make room for it."""
        self._models[key] = model
        self.device_bytes[model.device] += model.nbytes
        self._host_bytes += model.host_bytes
        while self.device_bytes[HOST] + self._host_bytes > self._limit and len(self._models) > 1:
            self._drop(next(iter(self._models)))

    def shrink(self, device: str, limit_bytes: int) -> None:
        """Drop models on `device`, the least recently used first, until they take at most `limit_bytes` of it."""
        for key in [key for key, model in self._models.items() if model.device == device]:
            if self.device_bytes[device] <= limit_bytes:
                return
            self._drop(key)

    def _drop(self, key: Key) -> None:
        dropped = self._models.pop(key)
        self.device_bytes[dropped.device] -= dropped.nbytes
        self._host_bytes -= dropped.host_bytes
        dropped.close()
