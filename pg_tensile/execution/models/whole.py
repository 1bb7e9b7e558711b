"""A trained model executed in one piece on the CPU, in the way that is fastest for as many rows as there are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from pg_tensile.execution.data.preprocessing import PADDING, Features, Preprocessing
from pg_tensile.execution.models.registry import few_rows, fused

FEW_ROWS = 16
TEXT_ROWS = 32  # of texts that a transformer reads at once


class WholeModel:
    """Maps features to outputs; few rows are computed in numpy where the model can be."""

    def __init__(self, preprocessing: Preprocessing, module: nn.Module) -> None:
        self._module = fused(module).eval()
        self._few_rows = few_rows(module)
        self._outputs = preprocessing.outputs
        self._texts = sum(feature.vocabulary is not None for feature in preprocessing.categories)

    def __call__(self, features: Features, rows: int) -> NDArray[Any]:
        """Return the outputs [rows, outputs]."""
        if rows <= FEW_ROWS and self._few_rows is not None:
            return self._few_rows(features)
        if self._texts:
            outputs = np.empty((rows, self._outputs), np.float32)
            for chosen, arrays in shorten(features.flat(), self._texts):
                outputs[chosen] = self._call(arrays)
            return outputs
        return self._call(features.flat())

    def _call(self, arrays: list[NDArray[Any]]) -> NDArray[Any]:
        tensors = [torch.from_numpy(array) for array in arrays]
        outputs: NDArray[Any] = self._module(Features.from_flat(tensors)).numpy()
        return outputs


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
