"""Check of an exported ONNX graph: it must predict what the model predicts, on rows like those of the training.

The training rows are gone, so rows are drawn from what the preprocessing knows of them: ranges, means and deviations,
quantiles, categories, tokens, and nulls.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray
from torch import nn

from pg_tensile.errors import ExportError
from pg_tensile.execution.data.answers import answers, probabilities
from pg_tensile.execution.data.cycles import DAY_US, UNIX_US
from pg_tensile.execution.data.preprocessing import (
    ArraysInput,
    CategoryInput,
    Feature,
    Inputs,
    Kind,
    Preprocessing,
    Task,
)
from pg_tensile.execution.exchange.onnx_graph import libraries, null_string, outputs_of
from pg_tensile.execution.models.whole import WholeModel

ROWS = 1000
TOLERANCE = 1e-4  # of a probability; of a prediction relative to the target's standard deviation or its size
NULL_SHARE = 0.1

Columns = dict[str, NDArray[Any]]  # by feature: float64 [rows], text [rows] (None: null) or float64 [rows, length]


def check_graph(contents: bytes, preprocessing: Preprocessing, module: nn.Module, seed: int = 0) -> float:
    """Return the largest difference between the graph's predictions and the model's, in units of TOLERANCE.

    Raises ExportError if it is above 1, or if onnxruntime cannot run the graph."""
    _, runtime = libraries()
    rng = np.random.default_rng(seed)
    columns = {feature.name: drawn(feature, ROWS, rng) for feature in preprocessing.features}
    inputs = inputs_of_columns(preprocessing, columns, ROWS)
    with torch.inference_mode():
        outputs = WholeModel(preprocessing, module)(preprocessing.apply(inputs), ROWS).astype(np.float64)
    try:
        found = run_graph(runtime, contents, preprocessing, columns)
    except Exception as error:  # onnxruntime has classes of its own for each kind
        hint = "Export it in the format tensile or torch."
        raise ExportError("onnxruntime cannot run the exported graph", hint, str(error)[:1000]) from error
    difference = _difference(found, outputs, preprocessing)
    if not difference <= 1.0:
        raise ExportError(
            "the exported graph predicts other numbers than the model",
            "Export it in the format tensile or torch, and report this.",
            f"the largest difference is {difference * TOLERANCE:.3g}, the largest that is accepted {TOLERANCE:g}",
        )
    return difference


def run_graph(runtime: Any, contents: bytes, preprocessing: Preprocessing, columns: Columns) -> list[Any]:
    """Return the graph's outputs for columns."""
    options = runtime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = torch.get_num_threads()
    session = runtime.InferenceSession(contents, options, providers=["CPUExecutionProvider"])
    feeds = {}
    for feature in preprocessing.features:
        column = columns[feature.name]
        if feature.kind == Kind.CATEGORY:
            null = null_string(feature)
            feeds[feature.name] = np.array([null if text is None else text for text in column], object)
        else:
            feeds[feature.name] = column + UNIX_US if feature.kind == Kind.TIMESTAMP else column
    return list(session.run([value.name for value in outputs_of(preprocessing)], feeds))


def _difference(found: list[Any], outputs: NDArray[np.float64], preprocessing: Preprocessing) -> float:
    expected = answers(outputs, preprocessing)
    if preprocessing.task == Task.REGRESSION:
        scale = TOLERANCE * (preprocessing.target.std + np.abs(expected.prediction))
        return float((np.abs(found[0] - expected.prediction) / np.maximum(scale, 1e-300)).max())
    label, probability, shares = found
    wanted = probabilities(outputs, preprocessing)
    labels = np.array(preprocessing.labels, object)
    top = np.sort(wanted, axis=1)
    clear = top[:, -1] - top[:, -2] > 2 * TOLERANCE
    if (label != labels[expected.label])[clear].any():
        return float("inf")
    differences = np.abs(shares - wanted).max(), np.abs(probability - expected.probability).max()
    return float(max(differences)) / TOLERANCE


# ---- rows ----


def inputs_of_columns(preprocessing: Preprocessing, columns: Columns, rows: int) -> Inputs:
    """Return the raw values of columns."""
    numbers = [columns[feature.name] for feature in preprocessing.numbers]
    categories, arrays = [], []
    for place, feature in enumerate(preprocessing.categories):
        texts = list(dict.fromkeys(text for text in columns[feature.name] if text is not None))
        code = {text: number for number, text in enumerate(texts)}
        places = np.array([-1 if text is None else code[text] for text in columns[feature.name]], np.int32)
        categories.append(CategoryInput(places, preprocessing.table(place, texts)))
    for feature in preprocessing.arrays:
        x = columns[feature.name]
        lengths = np.where(np.isnan(x).all(1), -1, x.shape[1] if feature.tokens is None else (~np.isnan(x)).sum(1))
        kept = x[lengths >= 0].ravel() if feature.tokens is None else x[~np.isnan(x)]
        arrays.append(ArraysInput(lengths.astype(np.int32), kept))
    return Inputs(rows, np.array(numbers).reshape(len(numbers), rows), categories, arrays)


def drawn(feature: Feature, rows: int, rng: Generator) -> NDArray[Any]:
    """Return values of a feature: within its range, at its edges and beyond them, and nulls."""
    null = rng.random(rows) < NULL_SHARE
    if feature.kind == Kind.CATEGORY:
        texts = np.array([*(feature.categories or ())[:ROWS], "a string that is new"], object)
        chosen = texts[rng.integers(0, len(texts), rows)]
        chosen[null] = None
        return chosen
    if feature.kind == Kind.ARRAY:
        return _drawn_arrays(feature, null, rng)
    low = feature.mean - 3 * feature.std if feature.low is None else feature.low
    high = feature.mean + 3 * feature.std if feature.high is None else feature.high
    x = low + (high - low) * rng.uniform(-0.2, 1.2, rows)
    known = [low, high, feature.mean, *(feature.ranks.values if feature.ranks else ())]
    some = rng.random(rows) < 0.2
    x = np.where(some, np.array(known)[rng.integers(0, len(known), rows)], x)
    if feature.kind == Kind.TIMESTAMP:  # PostgreSQL has whole microseconds
        x = np.round(x) if feature.hour else np.round(x / DAY_US) * DAY_US
        x = np.clip(x, -6e16, 6e16)
    elif feature.type == "bool" or feature.type.startswith("int"):
        x = np.round(x)
    return np.where(null, np.nan, x)


def _drawn_arrays(feature: Feature, null: NDArray[np.bool_], rng: Generator) -> NDArray[np.float64]:
    shape = (len(null), feature.length or 0)
    if feature.tokens is None:
        x = rng.normal(feature.mean, feature.std, shape)
        x[rng.random(shape) < NULL_SHARE / 10] = np.nan
    else:
        tokens = np.array([*feature.tokens, -1], np.float64)
        x = tokens[rng.integers(0, len(tokens), shape)]
        lengths = rng.integers(1, shape[1] + 1, len(null))
        x[np.arange(shape[1]) >= lengths[:, None]] = np.nan
    x[null] = np.nan
    return x
