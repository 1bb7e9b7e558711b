"""Predictions with ONNX graphs without PyTorch, for rows of texts; graphs of models are compared in test_onnx.py."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from pg_tensile.errors import DataError, ModelFileError
from pg_tensile.execution.exchange.onnx_graph import OPSET
from pg_tensile.execution.exchange.onnx_predicting import GraphPredictor
from tests.repository import REPOSITORY

HEADER = ["id", "at", "x"]
FEATURES = [
    {"feature": {"name": "x", "kind": "numeric", "type": "float8"}},
    {"feature": {"name": "at", "kind": "timestamp", "type": "timestamp"}},
]


def graph(label_values: Any = None, labels: int = 3, **metadata: str) -> bytes:
    """Return a graph whose most probable label is that of the number x, modulo the number of labels."""
    inputs = [helper.make_tensor_value_info(name, TensorProto.DOUBLE, ["rows"]) for name in ("x", "at")]
    outputs = [
        helper.make_tensor_value_info("label", TensorProto.STRING, ["rows"]),
        helper.make_tensor_value_info("probability", TensorProto.DOUBLE, ["rows"]),
        helper.make_tensor_value_info("probabilities", TensorProto.DOUBLE, ["rows", labels]),
    ]
    names = {"keys_int64s": [*range(labels)], "values_strings": [f"label {i}" for i in range(labels)]}
    nodes = [
        helper.make_node("Constant", [], ["second"], value_float=1e6),
        helper.make_node("CastLike", ["second", "at"], ["us"]),
        helper.make_node("Div", ["at", "us"], ["seconds"]),
        helper.make_node("Add", ["x", "seconds"], ["sum"]),
        helper.make_node("Cast", ["sum"], ["number"], to=TensorProto.INT64),
        helper.make_node("Constant", [], ["depth"], value_int=labels),
        helper.make_node("Mod", ["number", "depth"], ["code"]),
        helper.make_node("Constant", [], ["shares"], value_floats=[0.125, 0.75]),
        helper.make_node("OneHot", ["code", "depth", "shares"], ["floats"]),
        helper.make_node("CastLike", ["floats", "at"], ["probabilities"]),
        helper.make_node("ReduceMax", ["probabilities", "axis"], ["probability"], keepdims=0),
        helper.make_node("LabelEncoder", ["code"], ["label"], domain="ai.onnx.ml", default_string="", **names),
    ]
    axis = helper.make_tensor("axis", TensorProto.INT64, [1], [1])
    imports = [helper.make_opsetid("", OPSET), helper.make_opsetid("ai.onnx.ml", 3)]
    made = helper.make_model(
        helper.make_graph(nodes, "g", inputs, outputs, [axis]), opset_imports=imports, ir_version=10
    )
    columns = json.dumps({"columns": FEATURES, "label_values": label_values})
    helper.set_model_props(made, {"columns": columns} | metadata)
    onnx.checker.check_model(made)
    return bytes(made.SerializeToString())


def test_the_prediction_of_labels_is_their_number_or_a_probability() -> None:
    rows = [["7", "1970-01-01 00:00:04", "1"], ["8", "1970-01-01 00:00:00+00", "1"]]  # 5 and 1
    expected = [(1, "label 2", 0.75), (2, "label 1", 0.75)]
    for label_values, numbers in ((None, [None, None]), ([10, 20, 30], [30.0, 20.0])):
        found = list(GraphPredictor(graph(label_values)).predict(HEADER, iter(rows)))
        assert [row[1] for row in found] == numbers
        assert [(row[0], *row[2:]) for row in found] == expected
    two = GraphPredictor(graph(labels=2)).predict(HEADER, iter([["", "1970-01-01", "1"], ["", "1970-01-01", "2"]]))
    assert [row[1:] for row in two] == [(0.75, "label 1", 0.75), (0.125, "label 0", 0.75)]


def test_what_is_no_graph_of_ours_is_refused() -> None:
    with pytest.raises(ModelFileError, match="cannot read the ONNX graph"):
        GraphPredictor(b"\x08 something else")
    for columns in ("", "[]", "{}", json.dumps({"columns": [{"feature": {"name": "x"}}], "label_values": None})):
        with pytest.raises(ModelFileError, match="does not say how its columns are written") as caught:
            GraphPredictor(graph(columns=columns))
        assert caught.value.hint


def test_a_graph_with_other_inputs_is_refused() -> None:
    columns = json.dumps({"columns": FEATURES[:1], "label_values": None})
    with pytest.raises(ModelFileError, match="cannot run the ONNX graph") as caught:
        list(GraphPredictor(graph(columns=columns)).predict(["x"], iter([["1"]])))
    assert "at" in (caught.value.detail or "")


def test_texts_that_are_no_values_are_refused() -> None:
    predictor = GraphPredictor(graph())
    with pytest.raises(DataError, match='feature "x" is not a number in row 2'):
        list(predictor.predict(HEADER, iter([["", "", "1"], ["", "", "one"]])))
    with pytest.raises(DataError, match='feature "at" is missing in the header'):
        list(predictor.predict(["x"], iter([["1"]])))


def test_the_command_predicts_with_a_graph_without_pytorch(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(graph([10, 20, 30]))
    (tmp_path / "rows.csv").write_text("at,x,more\n1970-01-01,4,1\n,,\n")
    program = "import sys; sys.modules['torch'] = None; from pg_tensile.tools.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "predict", str(tmp_path / "model.onnx"), str(tmp_path / "rows.csv")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)
    assert (done.returncode, done.stderr) == (0, "")
    header, first, second = done.stdout.splitlines()
    assert (header, first) == ("row_number,prediction,label,probability", "1,20.0,label 1,0.75")
    assert second.startswith("2,") and np.isfinite(float(second.split(",")[1]))  # of two nulls
