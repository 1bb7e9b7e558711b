"""Models as ONNX graphs: the preprocessing in PyTorch is numpy's to the bit, graphs predict what their models do."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from pg_tensile.errors import ExportError
from pg_tensile.execution import models
from pg_tensile.execution.data.answers import answers, probabilities
from pg_tensile.execution.data.calibration import Calibration
from pg_tensile.execution.data.cycles import UNIX_US
from pg_tensile.execution.data.preprocessing import Kind, Preprocessing, Task, TokenLimits
from pg_tensile.execution.exchange.onnx_check import Columns, check_graph, drawn, inputs_of_columns
from pg_tensile.execution.exchange.onnx_graph import inputs_of, null_string, onnx_bytes, outputs_of
from pg_tensile.execution.exchange.onnx_predicting import GraphPredictor
from pg_tensile.execution.exchange.raw_model import RawModel
from pg_tensile.execution.exchange.values import inputs_of as values_of_texts
from pg_tensile.execution.models.boosted import Boosted, BoostedArchitecture
from pg_tensile.execution.models.ensemble import Ensemble
from pg_tensile.execution.models.whole import WholeModel
from pg_tensile.execution.training.boosting import Boosting, grow
from tests.unit.rows import Rows, every_type, printed

ROWS = 500
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "several": {"type": "tabular", "members": 2, "hidden": 8, "projection": 8},
    "tokens": {"type": "transformer", "dim": 8, "heads": 2, "layers": 1},
}


def rows_of(kind: str, without: Collection[str] = ()) -> Rows:
    rows, rng = every_type(300), np.random.default_rng(0)
    rows.columns = {name: column for name, column in rows.columns.items() if name not in without}
    if kind == "several":
        rows.columns = {**rows.columns, "y": ("text", [f"class {i % 3}" for i in range(300)])}
    elif kind == "tokens":
        lists = [[int(token) for token in rng.integers(0, 30, i % 7)] if i % 9 else None for i in range(300)]
        numbers = ("float8", rng.normal(size=300).tolist())
        rows = Rows({"label": numbers, "tokens": ("int4[]", lists), "y": ("text", ["ab"[i % 2] for i in range(300)])})
    elif kind != "two":
        y = np.exp(rng.normal(size=300))
        rows.columns = {**rows.columns, "y": ("float8", (y - (kind == "differences")).tolist())}
    return rows


def fitted(kind: str, without: Collection[str] = ()) -> Preprocessing:
    rows = rows_of(kind, without)
    tokens = TokenLimits(None, 50) if kind == "tokens" else None
    transform = kind if kind in ("log", "quantile") else "none"
    preprocessing = rows.prepare(tokens=tokens, ranks=kind == "several", transform=transform).fitted.preprocessing
    return replace(preprocessing, calibration=Calibration(1.5, 0.25)) if kind == "two" else preprocessing


def model(kind: str, preprocessing: Preprocessing) -> torch.nn.Module:
    torch.manual_seed(0)
    architecture = models.parse(ARCHITECTURES.get(kind, {"type": "mlp", "hidden": [8]}))
    return models.build(architecture, preprocessing.model_inputs, preprocessing.outputs).eval()


def tensors(preprocessing: Preprocessing, columns: Columns) -> list[torch.Tensor]:
    """Return the inputs of RawModel."""
    inputs = inputs_of_columns(preprocessing, columns, ROWS)
    codes = iter(inputs.categories)
    values = []
    for feature in preprocessing.features:
        column = columns[feature.name]
        if feature.kind == Kind.CATEGORY:
            category = next(codes)
            values.append(torch.from_numpy(category.table[category.places]))
            continue
        values.append(torch.from_numpy(column + UNIX_US if feature.kind == Kind.TIMESTAMP else column))
        if feature.tokens is not None:
            code = {token: number for number, token in enumerate(feature.tokens, 2)}
            values.append(torch.tensor([[code.get(token, 1) for token in row] for row in column.tolist()]))
    return values


@pytest.mark.parametrize("kind", ["two", "several", "numbers", "differences", "log", "quantile", "tokens"])
def test_features_and_answers_are_those_of_the_preprocessing(kind: str) -> None:
    preprocessing, rng = fitted(kind), np.random.default_rng(1)
    module = model(kind, preprocessing)
    columns = {feature.name: drawn(feature, ROWS, rng) for feature in preprocessing.features}
    values = tensors(preprocessing, columns)
    features = preprocessing.apply(inputs_of_columns(preprocessing, columns, ROWS))
    raw = RawModel(preprocessing, module)
    for found, wanted in zip(raw._features(values).flat(), features.flat(), strict=True):
        assert np.allclose(found.numpy(), wanted, rtol=0, atol=1e-6) and found.numpy().dtype == wanted.dtype
    with torch.no_grad():
        outputs = module(type(features).from_flat([torch.from_numpy(x) for x in features.flat()])).double().numpy()
        results = [result.numpy() for result in raw(*values)]
    expected = answers(outputs, preprocessing)
    if preprocessing.task == Task.REGRESSION:
        assert np.allclose(results[0], expected.prediction, rtol=1e-5, atol=1e-7)
        assert (results[0].min() < 0) == (kind == "differences")
        return
    assert np.array_equal(results[0], expected.label)
    assert np.allclose(results[1], expected.probability, atol=1e-6)
    assert np.allclose(results[2], probabilities(outputs, preprocessing), atol=1e-6)


@pytest.mark.parametrize("kind", ["log", pytest.param("tokens", marks=pytest.mark.long)])
def test_a_graph_predicts_what_its_model_does_and_another_one_is_refused(kind: str) -> None:
    """Long for tokens, whose attention is exported for seconds; their features are compared above."""
    import onnx

    without = ("int2", "int4", "float4", "time")  # which are exported as int8, float8 and date are
    preprocessing = fitted(kind, without)
    module = model(kind, preprocessing)
    contents = onnx_bytes(preprocessing, module, {"name": kind})
    assert check_graph(contents, preprocessing, module) < 0.1
    graph = onnx.load_from_string(contents).graph
    assert [value.name for value in graph.input] == [feature.name for feature in preprocessing.features]
    assert [value.name for value in graph.output] == [value.name for value in outputs_of(preprocessing)]
    columns = rows_of(kind, without).columns
    compare_texts(contents, preprocessing, module, {name: texts(*column) for name, column in columns.items()})
    with torch.no_grad():
        list(module.parameters())[-1].add_(torch.linspace(0.1, 0.2, preprocessing.outputs).reshape(-1))
    with pytest.raises(ExportError, match="predicts other numbers") as caught:
        check_graph(contents, preprocessing, module)
    assert "largest difference" in (caught.value.detail or "")


def texts(kind: str, values: Sequence[Any]) -> list[str]:
    """Return the values as texts, with some that no row of the training has."""
    found = [printed(kind, value) for value in values]
    unusual = {"text": "new", "int4[]": "{NULL,7,NULL}", "float8[]": "{NULL,NULL,NULL}", "float8": "-Infinity"}
    if kind in unusual:
        found[1] = unusual[kind]
    if kind == "int4[]":
        found[2:4] = ["{}", "{" + ",".join(map(str, range(40))) + "}"]
    return found


def compare_texts(
    contents: bytes, preprocessing: Preprocessing, module: torch.nn.Module, columns: Mapping[str, Sequence[str]]
) -> None:
    """Compare what the graph and the model predict for rows of texts."""
    rows = list(zip(*columns.values(), strict=True))
    found = list(GraphPredictor(contents).predict([*columns], iter(rows)))
    inputs = values_of_texts(preprocessing, columns, len(rows))
    with torch.no_grad():
        outputs = WholeModel(preprocessing, module)(preprocessing.apply(inputs), len(rows)).astype(np.float64)
    expected = answers(outputs, preprocessing)
    assert [row[0] for row in found] == [*range(1, len(rows) + 1)]
    assert np.allclose(np.array([row[1] for row in found], float), expected.prediction, rtol=1e-4, atol=1e-5)
    if preprocessing.labels is None:
        assert all(row[2:] == (None, None) for row in found)
    else:
        assert [row[2] for row in found] == [preprocessing.labels[label] for label in expected.label]
        assert np.allclose(np.array([row[3] for row in found], float), expected.probability, atol=1e-5)


@pytest.mark.long
def test_trees_and_averages_are_exported() -> None:
    """Long: the export takes seconds. What trees predict in PyTorch is compared in test_trees.py."""
    rows, rng = every_type(400), np.random.default_rng(0)
    names = {"int2", "int4", "float4", "time"}  # which are exported as int8, float8 and date are
    rows.columns = {name: column for name, column in rows.columns.items() if name not in names}
    rows.columns = {**rows.columns, "y": ("float8", rng.normal(size=400).tolist())}
    prepared = rows.prepare(ranks=True)
    preprocessing, dataset = prepared.fitted.preprocessing, prepared.dataset
    architecture = BoostedArchitecture(rounds=20, least_rows=5)
    grown = grow(Boosting(architecture, 1, 0), preprocessing, dataset.training, None, lambda _: False)
    trees = Boosted(preprocessing.model_inputs, preprocessing.outputs, grown.forest)
    lines = models.build(models.parse({"type": "linear"}), preprocessing.model_inputs, preprocessing.outputs)
    module = Ensemble([trees, lines], [0.75, 0.25]).eval()
    assert check_graph(onnx_bytes(preprocessing, module, {"name": "trees"}), preprocessing, module) < 0.1


def test_what_onnx_cannot_do_is_refused() -> None:
    preprocessing = fitted("two")
    (text,) = preprocessing.categories
    hashed, tokenised = replace(text, buckets=2), replace(text, vocabulary=9)
    for feature, reason in ((hashed, "are hashed"), (tokenised, "read by a tokenizer")):
        with pytest.raises(ExportError, match=reason) as caught:
            inputs_of(replace(preprocessing, features=(feature,)))
        assert caught.value.hint


def test_the_string_for_null_is_no_category() -> None:
    (text,) = fitted("two").categories
    assert null_string(text) == ""
    assert null_string(replace(text, categories=("a", ""))) == "<null>"


def test_an_output_has_another_name_than_a_feature() -> None:
    assert [value.name for value in outputs_of(fitted("tokens"))] == ["label_", "probability", "probabilities"]


@pytest.mark.parametrize("library", ["onnx", "onnxruntime", "onnxscript"])
def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch, library: str) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    preprocessing = fitted("two")
    with pytest.raises(ExportError, match="the format onnx needs") as caught:
        onnx_bytes(preprocessing, model("two", preprocessing), {})
    assert "pip install 'onnx>=" in (caught.value.hint or "")
