"""Checks of the preprocessing in a model file: types, ranges and relations of all fields.

A version's preprocessing is applied in the process that predicts for all sessions, so that one from elsewhere must be
such as training makes it. Whether it fits the weights is checked by building the model (checking.py). The names of
fields are those of `Preprocessing.to_json`. Needs numpy only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from pg_tensile.errors import ModelFileError
from pg_tensile.execution.data.columns import ARRAY_TYPES, SCALAR_TYPES
from pg_tensile.execution.data.conformal import MOST_SCORES
from pg_tensile.execution.data.preprocessing import Kind, Preprocessing, Task
from pg_tensile.execution.data.ranks import QUANTILES
from pg_tensile.execution.data.series import width_of
from pg_tensile.execution.data.targets import MOST_QUANTILES
from pg_tensile.execution.data.text_vectors import TextVectors

MOST_FEATURES = 1664  # columns of a query
MOST_LABELS = 10_000
MOST_ELEMENTS = 1 << 24  # of an array
MOST_TOKENS = 65_536  # of a text or an array of tokens
MOST_CODES = 1 << 24
MOST_NAME = 10_000  # characters

Check = Callable[[Any], bool]


def checked_preprocessing(value: Any) -> Preprocessing:
    """Return the preprocessing with this JSON. Raises ModelFileError, which names the field that is wrong."""
    _fields(value, PREPROCESSING, "preprocessing", optional=OPTIONAL)
    _fields(value["target"], TARGET, "target", optional={"quantiles", "nonnegative"})
    features = value["features"]
    for number, feature in enumerate(features):
        _feature(feature, f"features[{number}]")
    _require(len({feature["name"] for feature in features}) == len(features), "features")
    _require(value["target"]["name"] not in {feature["name"] for feature in features}, "target")
    for name, checks in (("calibration", CALIBRATION), ("conformal", CONFORMAL), ("text", TEXT), ("rows", ROWS)):
        if value.get(name) is not None:
            _fields(value[name], checks, name)
    if value.get("baseline") is not None:
        _fields(value["baseline"], BASELINE, "baseline", optional={*BASELINE})
    _check_task(value)
    _check_texts(value)
    return Preprocessing.from_json(value)


def _check_task(value: dict[str, Any]) -> None:
    """Check what depends on the task."""
    labels, values = value["labels"], value["label_values"]
    target, regression = value["target"], value["task"] == Task.REGRESSION
    _require((labels is None) == regression, "labels")
    _require(regression or (len(labels) == 2 if value["task"] == Task.BINARY else len(labels) > 2), "labels")
    _require(values is None or (not regression and len(values) == len(labels)), "label_values")
    _require(regression or not value.get("quantiles"), "quantiles")
    _require(regression or value.get("conformal") is None, "conformal")
    _require(not regression or value.get("calibration") is None, "calibration")
    _check_baseline(value.get("baseline"), None if regression else len(labels))
    _require((target.get("transform") == "quantile") == (target.get("quantiles") is not None), "target.quantiles")
    _require(regression or target.get("transform") is None, "target.transform")


def _check_baseline(baseline: dict[str, Any] | None, labels: int | None) -> None:
    """Check that a baseline has the answers of one kind; `labels` is their number, None for a regression."""
    if baseline is not None:
        kinds = ({"mean", "median"}, {"last"}) if labels is None else ({"frequencies"},)
        _require({*baseline} in kinds, "baseline")
        _require(labels is None or len(baseline["frequencies"]) == labels, "baseline.frequencies")


def _check_texts(value: dict[str, Any]) -> None:
    """Check that features are texts only where there is a tokenizer."""
    texts = [feature for feature in value["features"] if feature.get("vocabulary") is not None]
    _require(not texts or value.get("text") is not None, "text")
    for feature in texts:
        length = feature.get("length")
        _require(length is not None and length <= value["text"]["length"], f"{feature['name']}.length")


def _feature(feature: Any, where: str) -> None:
    kind = feature.get("kind") if isinstance(feature, dict) else None
    if not isinstance(kind, str) or kind not in KINDS:
        raise _wrong(f"{where}.kind")
    needed, others = KINDS[kind]
    _fields(feature, COMMON | needed | others, where, optional=set(others) | set(COMMON) - {"name", "kind", "type"})
    if kind == Kind.ARRAY:
        _require(feature["type"] in ARRAY_TYPES, f"{where}.type")
        most = MOST_ELEMENTS if feature.get("tokens") is None else MOST_TOKENS
        _require(feature["length"] <= most, f"{where}.length")
        means, stds = feature.get("means"), feature.get("stds")
        for values in (means, stds):
            _require((values is None) == (means is None), f"{where}.stds")
            width = width_of(feature["length"], feature.get("segment") or 1, bool(feature.get("series")))
            _require(values is None or len(values) == width, f"{where}.means")
    if feature.get("vectors") is not None:
        _fields(feature["vectors"], VECTORS, f"{where}.vectors")
        _require(feature.get("length") == _width(feature["vectors"]), f"{where}.vectors")
        _require(feature.get("vocabulary") is None and not feature.get("categories"), f"{where}.vectors")
    low, high = feature.get("low"), feature.get("high")
    _require((low is None) == (high is None) and (low is None or low <= high), f"{where}.low")
    if feature.get("ranks") is not None:
        _fields(feature["ranks"], RANKS, f"{where}.ranks")
        _require(len(feature["ranks"]["values"]) == len(feature["ranks"]["deviates"]), f"{where}.ranks")


def _width(vectors: dict[str, str]) -> int | None:
    """Return the length of the vectors of a text, None if they cannot be made."""
    try:
        return TextVectors(**vectors).encoder.width
    except ValueError:
        return None


def _fields(value: Any, checks: dict[str, Check], where: str, optional: set[str] | None = None) -> None:
    """Check that `value` is an object with these fields and no others."""
    if not isinstance(value, dict):
        raise _wrong(where)
    for name in value.keys() - checks.keys():
        raise _wrong(f"{where}.{name}")
    for name, check in checks.items():
        if name in value:
            _require(check(value[name]), f"{where}.{name}")
        else:
            _require(name in (optional or ()), f"{where}.{name}")


def _require(fulfilled: bool, where: str) -> None:
    if not fulfilled:
        raise _wrong(where)


def _wrong(where: str) -> ModelFileError:
    hint = "Export the model again; no other program can write such a file."
    return ModelFileError(f'the model file has a preprocessing that cannot be used: "{where}"', hint=hint)


# ---- values ----


def _number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False


def _count(most: int, least: int = 0) -> Check:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _between(low: float, high: float) -> Check:
    return lambda value: _number(value) and low <= value <= high


def _text(value: Any) -> bool:
    if not isinstance(value, str) or "\0" in value:
        return False
    try:
        value.encode()  # fails for halves of characters (surrogates)
    except UnicodeEncodeError:
        return False
    return True


def _name(value: Any) -> bool:
    return _text(value) and 0 < len(value) <= MOST_NAME


def _one_of(values: Sequence[str]) -> Check:
    return lambda value: isinstance(value, str) and value in values


def _or_null(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _list(check: Check, most: int, least: int = 0) -> Check:
    return lambda value: isinstance(value, list) and least <= len(value) <= most and all(map(check, value))


def _different(check: Check) -> Check:
    return lambda value: check(value) and len(set(value)) == len(value)


def _ascending(check: Check, strictly: bool = False) -> Check:
    def ascends(value: Any) -> bool:
        pairs = pairwise(value) if check(value) else [(1, 0)]
        return all(a < b if strictly else a <= b for a, b in pairs)

    return ascends


_spread = _between(0.0, math.inf)
_bool: Check = lambda value: isinstance(value, bool)  # noqa: E731
_list_or_object: Check = lambda value: isinstance(value, list | dict)  # noqa: E731
_numbers = _list(_number, MOST_LABELS)

PREPROCESSING: dict[str, Check] = {
    "task": _one_of(list(Task)),
    "target": _list_or_object,
    "labels": _or_null(_different(_list(_text, MOST_LABELS))),
    "label_values": _or_null(_numbers),
    "features": _list(_list_or_object, MOST_FEATURES, 1),
    "calibration": _or_null(_list_or_object),
    "conformal": _or_null(_list_or_object),
    "quantiles": _list(_between(0.0, 1.0), 100),
    "text": _or_null(_list_or_object),
    "baseline": _or_null(_list_or_object),
    "rows": _or_null(_list_or_object),
}
OPTIONAL = {"calibration", "conformal", "quantiles", "text", "baseline", "rows"}
ROWS = dict.fromkeys(("training", "validation", "skipped"), _count(1 << 62))
TARGET: dict[str, Check] = {
    "name": _name,
    "type": _one_of([*SCALAR_TYPES]),
    "mean": _number,
    "std": _spread,
    "transform": _or_null(_one_of(["log", "quantile"])),
    "quantiles": _or_null(_ascending(_list(_number, MOST_QUANTILES, 2))),
    "nonnegative": _bool,
}
CALIBRATION: dict[str, Check] = {"scale": _between(0.0, 1e6), "shift": _between(-1e6, 1e6)}
CONFORMAL: dict[str, Check] = {"rows": _count(1 << 62, 1), "scores": _ascending(_list(_number, MOST_SCORES, 1))}
BASELINE: dict[str, Check] = dict.fromkeys(("mean", "median", "last"), _number) | {
    "frequencies": _list(_between(0.0, 1.0), MOST_LABELS)
}
TEXT: dict[str, Check] = {
    "path": _name,
    "length": _count(MOST_TOKENS, 1),
    "sha256": _name,
    "weight_bytes": _count(1 << 50),
}
VECTORS: dict[str, Check] = dict.fromkeys(("words", "characters", "idf", "projection", "center", "scale"), _text)
RANKS: dict[str, Check] = {
    name: _ascending(_list(_number, QUANTILES + 1, 2), strictly=True) for name in ("values", "deviates")
}
COMMON: dict[str, Check] = {
    "name": _name,
    "kind": _one_of(list(Kind)),
    "type": _one_of([*SCALAR_TYPES, *ARRAY_TYPES]),
    "nulls": _count(1 << 62),
    "mean": _number,
    "std": _spread,
    "hour": _bool,
    "buckets": _count(MOST_CODES),
    "sql_type": _name,
}
_RANGE: dict[str, Check] = {"low": _or_null(_number), "high": _or_null(_number), "ranks": _or_null(_list_or_object)}
# fields of each kind besides the common ones: those that it needs, and those that it may have
KINDS: dict[str, tuple[dict[str, Check], dict[str, Check]]] = {
    Kind.NUMERIC: ({}, _RANGE),
    Kind.TIMESTAMP: ({}, _RANGE),
    Kind.CATEGORY: (
        {},
        {
            "categories": _or_null(_different(_list(_text, MOST_CODES))),
            "mode": _or_null(_text),
            "length": _or_null(_count(MOST_TOKENS, 1)),
            "vocabulary": _or_null(_count(MOST_CODES, 2)),
            "vectors": _or_null(_list_or_object),
        },
    ),
    Kind.ARRAY: (
        {"length": _count(MOST_ELEMENTS)},
        {
            "tokens": _or_null(_ascending(_list(_count((1 << 63) - 1, -(1 << 63)), MOST_CODES), strictly=True)),
            "means": _or_null(_list(_number, MOST_ELEMENTS)),
            "stds": _or_null(_list(_spread, MOST_ELEMENTS)),
            "segment": _or_null(_count(MOST_ELEMENTS, 1)),
            "series": _or_null(_bool),
        },
    ),
}
