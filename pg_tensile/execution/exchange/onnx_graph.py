"""Export of a model as an ONNX graph that takes raw columns and returns answers.

PyTorch's exporter makes the graph of preprocessing, model and answers (raw_model.py); nodes of ai.onnx.ml that turn
strings into codes and numbers of labels into strings are put in front of it and behind it.
"""

from __future__ import annotations

import importlib
import itertools
import json
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pg_tensile.errors import ExportError
from pg_tensile.execution.data.preprocessing import FIRST_TOKEN, UNKNOWN_TOKEN, Feature, Kind, Preprocessing, Task
from pg_tensile.execution.exchange.raw_model import RawModel
from pg_tensile.extras import pip_install

OPSET = 18
ML_OPSET = 3
NULLS = ("", "<null>", "<NULL>", "\\N")  # strings for null: the first that is not a category
INSTALL = f"Install them for the Python that pg_tensile.python names: {pip_install('onnx-export')}."
NUMBER, TEXT = "DOUBLE", "STRING"


class Value(NamedTuple):
    """Input or output of the graph: its name, ONNX's name of its type, its columns (None: one value), its meaning."""

    name: str
    type: str
    columns: int | None
    meaning: str


def libraries() -> tuple[Any, Any]:
    """Return the modules onnx and onnxruntime. Raises ExportError if one is not installed."""
    try:
        importlib.import_module("onnxscript")  # PyTorch's exporter needs it
        return importlib.import_module("onnx"), importlib.import_module("onnxruntime")
    except ImportError as error:
        raise ExportError("the format onnx needs onnx, onnxscript and onnxruntime", INSTALL, str(error)) from error


def null_string(feature: Feature) -> str:
    """Return the string that stands for null in a category."""
    return next(text for text in NULLS if text not in (feature.categories or ()))


def inputs_of(preprocessing: Preprocessing) -> list[Value]:
    """Return the inputs of the graph, in the order of the features. Raises ExportError for what ONNX cannot do."""
    return [_input(feature) for feature in preprocessing.features]


def _input(feature: Feature) -> Value:
    if feature.vocabulary is not None:
        hint = "Tokenizers are not part of ONNX: export it in the format tensile."
        raise ExportError(f'the text "{feature.name}" is read by a tokenizer, which ONNX lacks', hint)
    if feature.vectors is not None:
        hint = "Export it in the format tensile."
        raise ExportError(f'the text "{feature.name}" is read by its hashed words, which ONNX cannot count', hint)
    if feature.buckets > 1:
        hint = "Leave the column out, or group its values; or export the model in the format tensile."
        raise ExportError(f'the strings of "{feature.name}" are hashed, which ONNX cannot do', hint)
    if feature.kind == Kind.CATEGORY:
        return Value(feature.name, TEXT, None, f"text; null is {json.dumps(null_string(feature))}")
    if feature.kind == Kind.ARRAY:
        what = (
            "tokens; NaN behind the last" if feature.tokens is not None else "array of numbers; NaN is a null element"
        )
        return Value(feature.name, NUMBER, feature.length or 0, f"{what}; only NaN is null")
    if feature.kind == Kind.TIMESTAMP:
        return Value(feature.name, NUMBER, None, "microseconds since 1970-01-01 00:00 UTC; NaN is null")
    what = "0 (false) or 1 (true)" if feature.type == "bool" else "number"
    return Value(feature.name, NUMBER, None, f"{what}; NaN is null")


def outputs_of(preprocessing: Preprocessing) -> list[Value]:
    """Return the outputs of the graph; a name that is a feature's has underscores behind it."""
    if preprocessing.task == Task.REGRESSION:
        values = [Value("prediction", NUMBER, None, f"of {preprocessing.target.name}")]
    else:
        labels = json.dumps(preprocessing.labels, ensure_ascii=False)
        values = [
            Value("label", TEXT, None, "most probable label"),
            Value("probability", NUMBER, None, "of the label"),
            Value("probabilities", NUMBER, len(preprocessing.labels or ()), f"of the labels {labels}"),
        ]
    names = {feature.name for feature in preprocessing.features}
    return [value._replace(name=_free(value.name, names)) for value in values]


def _free(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    return name


def onnx_bytes(preprocessing: Preprocessing, module: nn.Module, metadata: dict[str, str]) -> bytes:
    """Return the model, in evaluation mode, as the bytes of an ONNX file. Raises ExportError."""
    onnx, _ = libraries()
    given, results = inputs_of(preprocessing), outputs_of(preprocessing)
    core = _exported(RawModel(preprocessing, module).eval(), preprocessing)
    prefix = _free("model", {value.name[:5] for value in (*given, *results)}) + "/"
    onnx.compose.add_prefix(core, prefix, inplace=True)
    graph = core.graph
    names = (f"{prefix}in{number}" for number in itertools.count())
    front: list[Any] = []
    for value, feature in zip(given, preprocessing.features, strict=True):
        front += _front(onnx, value, feature, names, prefix)
    behind = _behind(onnx, results, [f"{prefix}out{number}" for number in range(len(results))], preprocessing)
    nodes = [*front, *graph.node, *behind]
    del graph.node[:], graph.input[:], graph.output[:]
    graph.node.extend(nodes)
    graph.input.extend(_declared(onnx, value) for value in given)
    graph.output.extend(_declared(onnx, value) for value in results)
    core.opset_import.append(onnx.helper.make_opsetid("ai.onnx.ml", ML_OPSET))
    core.producer_name = "pg_tensile"
    onnx.helper.set_model_props(core, metadata | {"columns": columns_json(preprocessing)})
    try:
        onnx.checker.check_model(core)
        contents: bytes = core.SerializeToString()
    except Exception as error:  # of the checker, and of protobuf for more than 2 GB
        hint = "Export it in the format tensile or torch."
        raise ExportError("the model cannot be written as an ONNX graph", hint, str(error)[:1000]) from error
    return contents


def columns_json(preprocessing: Preprocessing) -> str:
    """Return what onnx_predicting.py reads: how texts become values of the inputs, and the numbers of labels."""
    columns = []
    for feature in preprocessing.features:
        told: dict[str, Any] = {"name": feature.name, "kind": feature.kind, "type": feature.type}
        if feature.kind == Kind.ARRAY:
            told |= {"length": feature.length, "tokens": None if feature.tokens is None else []}
        null = {"null": null_string(feature)} if feature.kind == Kind.CATEGORY else {}
        columns.append({"feature": told} | null)
    return json.dumps({"columns": columns, "label_values": preprocessing.label_values}, ensure_ascii=False)


def _exported(raw: RawModel, preprocessing: Preprocessing) -> Any:
    example = _example(preprocessing)
    rows = torch.export.Dim("rows")
    try:
        with warnings.catch_warnings(action="ignore"), torch.no_grad():
            program = torch.onnx.export(
                raw,
                tuple(example),
                dynamo=True,
                opset_version=OPSET,
                dynamic_shapes=(tuple({0: rows} for _ in example),),
                input_names=[f"in{number}" for number in range(len(example))],
                output_names=[f"out{number}" for number in range(len(outputs_of(preprocessing)))],
                verbose=False,
            )
        assert program is not None
        return program.model_proto
    except Exception as error:  # of many classes, by an operator that ONNX lacks or by code of the model
        hint = "ONNX may lack one of its operators; export it in the format tensile or torch."
        raise ExportError("the model cannot be exported as an ONNX graph", hint, str(error)[:1000]) from error


def _example(preprocessing: Preprocessing) -> list[Tensor]:
    """Return inputs of RawModel of two rows."""
    tensors = []
    for feature in preprocessing.features:
        if feature.kind == Kind.CATEGORY:
            tensors.append(torch.zeros(2, dtype=torch.int64))
        elif feature.kind == Kind.ARRAY:
            tensors.append(torch.zeros(2, feature.length or 0, dtype=torch.float64))
            if feature.tokens is not None:
                tensors.append(torch.zeros(2, feature.length or 0, dtype=torch.int64))
        else:
            tensors.append(torch.zeros(2, dtype=torch.float64))
    return tensors


def _front(onnx: Any, value: Value, feature: Feature, names: Iterator[str], prefix: str) -> list[Any]:
    """Return the nodes between an input and those of RawModel, whose names come from `names`."""
    make = onnx.helper.make_node
    if feature.kind == Kind.CATEGORY:
        texts = [*(feature.categories or ()), null_string(feature)]
        codes = [*range(1, len(texts)), 0]
        rare = len(texts) if feature.buckets else 0
        return [_encoder(onnx, value.name, next(names), keys_strings=texts, values_int64s=codes, default_int64=rare)]
    nodes = [make("Identity", [value.name], [next(names)])]
    if feature.tokens is not None:
        integers, place = f"{prefix}integers/{value.name}", next(names)
        known = f"{prefix}known/{value.name}"
        zero = f"{prefix}zero/{value.name}"
        nodes += [
            make("IsNaN", [value.name], [known]),
            make("Constant", [], [zero], value_float=0.0),
            make("CastLike", [zero, value.name], [f"{zero}/double"]),
            make("Where", [known, f"{zero}/double", value.name], [f"{known}/number"]),
            make("Cast", [f"{known}/number"], [integers], to=onnx.TensorProto.INT64),
        ]
        tokens = list(feature.tokens) or [0]
        codes = [number + FIRST_TOKEN for number in range(len(feature.tokens))] or [UNKNOWN_TOKEN]
        keys = {"keys_int64s": tokens, "values_int64s": codes, "default_int64": UNKNOWN_TOKEN}
        nodes.append(_encoder(onnx, integers, place, **keys))
    return nodes


def _behind(onnx: Any, results: Sequence[Value], names: Sequence[str], preprocessing: Preprocessing) -> list[Any]:
    """Return the nodes between the outputs of RawModel, which have these names, and those of the graph."""
    nodes = []
    for value, name in zip(results, names, strict=True):
        if value.type == TEXT:
            labels = list(preprocessing.labels or ())
            keys = {"keys_int64s": list(range(len(labels))), "values_strings": labels, "default_string": ""}
            nodes.append(_encoder(onnx, name, value.name, **keys))
        else:
            nodes.append(onnx.helper.make_node("Identity", [name], [value.name]))
    return nodes


def _encoder(onnx: Any, source: str, result: str, **attributes: Any) -> Any:
    return onnx.helper.make_node("LabelEncoder", [source], [result], domain="ai.onnx.ml", **attributes)


def _declared(onnx: Any, value: Value) -> Any:
    shape = ["rows"] if value.columns is None else ["rows", value.columns]
    type = getattr(onnx.TensorProto, value.type)
    return onnx.helper.make_tensor_value_info(value.name, type, shape, value.meaning)
