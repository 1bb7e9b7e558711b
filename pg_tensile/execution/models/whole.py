"""A trained model executed in one piece on the CPU, in the way that is fastest for as many rows as there are."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from pg_tensile.execution.data.answers import FEW_ROWS
from pg_tensile.execution.data.preprocessing import PADDING, Features, Preprocessing
from pg_tensile.execution.models.registry import few_rows, fused

TEXT_ROWS = 32  # of texts that a transformer reads at once
PART_ROWS = 256  # of a part, between two of which other work may be done
MOST_ROWS = 8192  # of a part of a model whose weights are all used for every row
PART_PRODUCTS = 1 << 31  # of weights and rows in a part, some 50 ms
QUICK_S = 1e-3  # of one row

Part = Callable[[], NDArray[Any]]


class WholeModel:
    """Maps features to outputs; few rows are computed in numpy where the model can be, each as if it was alone.

    `quick`: one row takes less than QUICK_S, in numpy."""

    def __init__(self, preprocessing: Preprocessing, module: nn.Module) -> None:
        self._module = fused(module).eval()
        self._few_rows = few_rows(module)
        self._outputs = preprocessing.outputs
        self._texts = sum(feature.vocabulary is not None for feature in preprocessing.categories)
        parameters = sum(parameter.numel() for parameter in module.parameters())
        self._part_rows = _part_rows(parameters, self._few_rows is not None)
        self.quick = self._few_rows is not None and self._row_seconds(preprocessing) < QUICK_S

    def __call__(self, features: Features, rows: int) -> NDArray[Any]:
        """Return the outputs [rows, outputs]."""
        outputs = [part() for part in self.parts(features, rows)]
        return outputs[0] if len(outputs) == 1 else np.concatenate(outputs)

    def parts(self, features: Features, rows: int) -> list[Part]:
        """Return functions that compute the outputs of some rows each, in their order, at least one."""
        if 0 < rows <= FEW_ROWS and self._few_rows is not None:
            return [partial(self._single, features)]
        if self._texts:
            return [partial(self._read, features, rows)]
        size = self._part_rows
        starts = range(0, max(rows, 1), size)
        return [partial(self._call, [array[at : at + size] for array in features.flat()]) for at in starts]

    def _row_seconds(self, preprocessing: Preprocessing) -> float:
        """Return the seconds that one row takes: the least of some, as the machine may be busy."""
        features = Features.from_flat([np.zeros((1, *shape), dtype) for shape, dtype in preprocessing.layout()[:-1]])
        times = []
        for _ in range(5):
            began = time.perf_counter()
            self(features, 1)
            times.append(time.perf_counter() - began)
        return min(times)

    def _single(self, features: Features) -> NDArray[Any]:
        """Return the outputs of rows, each computed as if it was alone."""
        assert self._few_rows is not None
        outputs: NDArray[Any] = self._few_rows(Features.from_flat([array[:, None] for array in features.flat()]))[:, 0]
        return outputs

    def _read(self, features: Features, rows: int) -> NDArray[Any]:
        """Return the outputs of rows with texts."""
        outputs = np.empty((rows, self._outputs), np.float32)
        for chosen, arrays in shorten(features.flat(), self._texts):
            outputs[chosen] = self._call(arrays)
        return outputs

    def _call(self, arrays: list[NDArray[Any]]) -> NDArray[Any]:
        tensors = [torch.from_numpy(array) for array in arrays]
        outputs: NDArray[Any] = self._module(Features.from_flat(tensors)).numpy()
        return outputs


def _part_rows(parameters: int, dense: bool) -> int:
    """Return the rows of a part: a power of two, for a model whose weights are all used for every row if `dense`."""
    rows = max(PART_PRODUCTS // max(parameters, 1), FEW_ROWS + 1)
    return min(1 << (rows.bit_length() - 1), MOST_ROWS if dense else PART_ROWS)


def shorten(arrays: list[NDArray[Any]], texts: int) -> Iterator[tuple[NDArray[np.intp], list[NDArray[Any]]]]:
    """Yield the rows of `arrays` in parts with texts of similar length, and which rows these are.

    The last `texts` arrays are tokens, which are cut behind the longest text of each part. A transformer needs memory
    and time for padding as well."""
    tokens = arrays[-texts:]
    lengths = np.max([(array != PADDING).sum(1) for array in tokens], axis=0)
    order = np.argsort(lengths, kind="stable")
    for start in range(0, len(order), TEXT_ROWS):
        chosen = order[start : start + TEXT_ROWS]
        longest = max(1, int(lengths[chosen].max()))
        cut = [np.ascontiguousarray(array[chosen, :longest]) for array in tokens]
        yield chosen, [*(array[chosen] for array in arrays[:-texts]), *cut]
