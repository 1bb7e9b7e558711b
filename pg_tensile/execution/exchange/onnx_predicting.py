"""Predictions with an ONNX graph that `export_model` has made, by onnxruntime: without a server, and without PyTorch.

The graph takes raw columns. How texts become their values is in its metadata (onnx_graph.py, `columns_json`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from pg_tensile.errors import ModelFileError
from pg_tensile.execution.data.cycles import UNIX_US
from pg_tensile.execution.data.preprocessing import Feature, Kind, wrong_array
from pg_tensile.execution.exchange.predictor import Predictor, Row, known
from pg_tensile.execution.exchange.values import arrays_of, numbers_of

UNKNOWN = 0.5  # in place of a token, which is a whole number


@contextmanager
def _refusing(what: str) -> Iterator[None]:
    """Raise an error of onnxruntime, which has a class for each kind, as ModelFileError."""
    try:
        yield
    except Exception as error:
        hint = "Export the model again."
        raise ModelFileError(f"onnxruntime cannot {what} the ONNX graph", hint, str(error)[:1000]) from None


class GraphPredictor(Predictor):
    """The model in a file of the format onnx. Raises ModelFileError."""

    def __init__(self, contents: bytes) -> None:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        with _refusing("read"):
            self._session = onnxruntime.InferenceSession(contents, options, providers=["CPUExecutionProvider"])
        try:
            description = json.loads(self._session.get_modelmeta().custom_metadata_map["columns"])
            self.features = [Feature.from_json(column["feature"]) for column in description["columns"]]
            self._nulls = [column.get("null") for column in description["columns"]]
            self._numbers: list[float] | None = description["label_values"]
        except (KeyError, TypeError, ValueError, AttributeError):
            hint = "Export the model with this version of pg_tensile."
            raise ModelFileError("the ONNX graph does not say how its columns are written as texts", hint) from None

    def answers(self, columns: Mapping[str, Sequence[str]], rows: int, first: int) -> Iterator[Row]:
        feeds = {
            feature.name: _values(feature, null, columns[feature.name], first)
            for feature, null in zip(self.features, self._nulls, strict=True)
        }
        with _refusing("run"):
            found = self._session.run(None, feeds)
        if len(found) == 1:
            yield from ((number, known(x), None, None) for number, x in enumerate(found[0].tolist(), first))
            return
        labels, probability, probabilities = found
        predictions = self._predictions(probabilities)
        answered = zip(predictions.tolist(), labels.tolist(), probability.tolist(), strict=True)
        for number, (prediction, label, share) in enumerate(answered, first):
            yield number, known(prediction), label, share

    def _predictions(self, probabilities: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the probability of the second of two labels, else the numbers that the labels stand for [rows]."""
        if probabilities.shape[1] == 2:
            return probabilities[:, 1]
        if self._numbers is None:
            return np.full(len(probabilities), np.nan)
        return np.array(self._numbers, np.float64)[probabilities.argmax(1)]


def _values(feature: Feature, null: str | None, texts: Sequence[str], first: int) -> NDArray[Any]:
    """Return a column of the graph: text or float64 [rows], or float64 [rows, length]; NaN stands for null."""
    if feature.kind == Kind.CATEGORY:
        return np.array([text or null for text in texts], object)
    if feature.kind != Kind.ARRAY:
        numbers = np.array(numbers_of(feature, texts, first))
        return numbers + UNIX_US if feature.kind == Kind.TIMESTAMP else numbers
    length = feature.length or 0
    found = np.full((len(texts), length), np.nan)
    for place, part in enumerate(arrays_of(feature, texts, first)):
        if part is None:
            continue
        if feature.tokens is not None:
            tokens = np.where(np.isnan(part), UNKNOWN, part)[:length] if len(part) else np.array([UNKNOWN])
            found[place, : len(tokens)] = tokens
        elif len(part) != length:
            raise wrong_array(feature, len(part), first - 1 + place)
        else:  # an element that is null is as one that is not finite, but a row of nothing else is no null
            found[place] = np.where(np.isnan(part), np.inf, part)
    return found
