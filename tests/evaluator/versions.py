"""Random versions of models that a session evaluates itself, and random rows for them.

All choices come from a `random.Random`, of hypothesis or with a seed.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from pg_tensile.execution import models
from pg_tensile.execution.data.calibration import Calibration
from pg_tensile.execution.data.conformal import Conformal
from pg_tensile.execution.data.drift import BINS, Histogram, Reference, _empty, _prediction
from pg_tensile.execution.data.preprocessing import (
    ArraysInput,
    CategoryInput,
    Feature,
    Inputs,
    Kind,
    Preprocessing,
    Task,
)
from pg_tensile.execution.data.ranks import rank_scale
from pg_tensile.execution.data.series import width_of
from pg_tensile.execution.data.targets import Target, quantiles_of
from pg_tensile.execution.models.boosted import Boosted
from pg_tensile.execution.models.trees import Forest, Tree
from pg_tensile.execution.training.checkpoint import model_tensors, to_bytes
from tests.evaluator.library import RawRows, Stored

STRINGS = ("", "a", "b", "new york", "Zürich", "東京", "\U0001f600", "x" * 300, '"\\', "A", "c", "d", "e\n")
OPTIONAL = ("nulls", "mean", "std", "hour", "low", "high", "buckets", "sql_type")  # which old versions lack
RANKED = ("tabular", "boosted", "linear", "ensemble")
US = 86_400e6
LARGE = 30_000  # bytes of weights


class Version(NamedTuple):
    """A version, as the predictor has it and as it is stored."""

    preprocessing: Preprocessing
    module: nn.Module
    reference: Reference | None
    stored: Stored


def random_version(rnd: Random, architecture: dict[str, Any] | None = None) -> Version:
    """Return a version of an architecture, a random one by default."""
    architecture = architecture or random_architecture(rnd)
    numpy_rnd = np.random.default_rng(rnd.getrandbits(32))
    given = random_preprocessing(rnd, numpy_rnd, architecture["type"] in RANKED)
    text = as_jsonb(_without_some(rnd, given.to_json()))
    preprocessing = Preprocessing.from_json(json.loads(text))
    module = random_module(rnd, numpy_rnd, architecture, preprocessing)
    reference = random_reference(rnd, numpy_rnd, preprocessing) if rnd.random() < 0.7 else None
    stored = Stored(
        json.dumps(architecture),
        text,
        None if reference is None else as_jsonb(reference.to_json()),
        to_bytes(model_tensors(module)),
    )
    return Version(preprocessing, module, reference, stored)


def as_jsonb(value: Any) -> str:
    """Return JSON as jsonb writes it: numbers without a fraction as integers."""

    def whole(item: Any) -> Any:
        if isinstance(item, dict):
            return {key: whole(part) for key, part in item.items()}
        if isinstance(item, list | tuple):
            return [whole(part) for part in item]
        return int(item) if isinstance(item, float) and item.is_integer() else item

    return json.dumps(whole(value), ensure_ascii=False)


def random_architecture(rnd: Random) -> dict[str, Any]:
    kind = rnd.choice(("mlp", "mlp", "tabular", "linear", "boosted", "ensemble"))
    if kind == "mlp":
        norms, activations = ("none", "batch", "layer"), ("relu", "tanh", "gelu", "silu")
        return {
            "type": "mlp",
            "hidden": [rnd.randint(1, 40) for _ in range(rnd.randint(0, 3))],
            "activation": rnd.choice(activations),
            "norm": rnd.choice(norms),
            "dropout": rnd.choice((0, 0.1)),
            "embedding": rnd.randint(1, 9),
        }
    if kind == "tabular":
        keys = {"members": 5, "projection": 40, "hidden": 40, "layers": 3, "embedding": 19}
        return {"type": "tabular"} | {key: rnd.randint(1, most) for key, most in keys.items() if rnd.random() < 0.9}
    if kind == "ensemble":
        names = rnd.sample(("linear", "boosted", "mlp", "tabular"), rnd.randint(1, 3))
        return {"type": "ensemble", "members": names, "weights": [rnd.choice((0, 1, 0.3, 0.5)) for _ in names]}
    return {"type": kind}


def random_preprocessing(rnd: Random, numpy_rnd: np.random.Generator, is_ranked: bool) -> Preprocessing:
    kinds = (_number, _number, _number, _timestamp, _category, _category, _array)
    features = tuple(
        rnd.choice(kinds)(rnd, numpy_rnd, f"f{i}", is_ranked and rnd.random() < 0.9) for i in range(rnd.randint(1, 7))
    )
    task = rnd.choice(list(Task))
    count = {Task.REGRESSION: 0, Task.BINARY: 2, Task.MULTICLASS: rnd.randint(3, 20)}[task]
    numbered = count > 0 and rnd.random() < 0.5
    scores = np.sort(numpy_rnd.normal(size=rnd.randint(1, 30)))
    regression = task == Task.REGRESSION
    return Preprocessing(
        task,
        _target(rnd, numpy_rnd) if regression else Target("y", "category"),
        tuple(f"label {i}" for i in range(count)) or None,
        tuple(rnd.choice((i, i + 0.5, 2**60 + i)) for i in range(count)) if numbered else None,
        features,
        Calibration(rnd.choice((0.5, 1, 2.0)), rnd.choice((0.0, 0.25))) if count and rnd.random() < 0.5 else None,
        Conformal(rnd.randint(len(scores), 100), tuple(scores.tolist())) if regression and rnd.random() < 0.7 else None,
        (0.1, 0.9) if regression and rnd.random() < 0.3 else (),
    )


def _target(rnd: Random, numpy_rnd: np.random.Generator) -> Target:
    transform = rnd.choice((None, "log", "quantile"))
    sample = np.round(np.exp(numpy_rnd.normal(size=rnd.randint(1, 50))), rnd.randint(0, 3))
    return Target(
        "y",
        "number",
        rnd.choice((0.0, 1.5, -3.0)),
        rnd.choice((1.0, 2.0, 0.01)),
        transform,
        quantiles_of(np.sort(sample), 0.0, 100.0) if transform == "quantile" else None,
        rnd.random() < 0.5,
    )


def _number(rnd: Random, numpy_rnd: np.random.Generator, name: str, is_ranked: bool) -> Feature:
    scale = rnd.choice((1.0, 1.0, 1e-3, 1e9, 1e305, 1e-300))
    return _scalar(rnd, name, Kind.NUMERIC, scale, scale * numpy_rnd.normal(size=rnd.choice((2, 40, 400))), is_ranked)


def _timestamp(rnd: Random, numpy_rnd: np.random.Generator, name: str, is_ranked: bool) -> Feature:
    feature = _scalar(rnd, name, Kind.TIMESTAMP, US * 365, US * 365 * numpy_rnd.normal(size=60), is_ranked)
    return Feature(**vars(feature) | {"hour": rnd.random() < 0.5})


def _scalar(rnd: Random, name: str, kind: Kind, scale: float, sample: NDArray[np.float64], is_ranked: bool) -> Feature:
    limited = rnd.random() < 0.6
    return Feature(
        name,
        kind,
        "number",
        nulls=rnd.choice((0, 3)),
        mean=scale * rnd.choice((0.0, 0.5, 1.0)),
        std=rnd.choice((0.0, scale, scale / 3)),
        low=float(sample.min()) if limited else None,
        high=float(sample.max()) if limited else None,
        ranks=rank_scale(np.round(sample / scale, rnd.choice((0, 2, 9))) * scale) if is_ranked else None,
    )


def _category(rnd: Random, numpy_rnd: np.random.Generator, name: str, is_ranked: bool) -> Feature:
    strings = rnd.sample(STRINGS, rnd.randint(0, 8))
    return Feature(
        name, Kind.CATEGORY, "text", categories=tuple(strings), mode=None, buckets=rnd.choice((0, 0, 1, 2, 7))
    )


def _array(rnd: Random, numpy_rnd: np.random.Generator, name: str, is_ranked: bool) -> Feature:
    length, nulls = rnd.choice((rnd.randint(1, 20), rnd.randint(100, 300))), rnd.choice((0, 2))
    if rnd.random() < 0.5:
        return Feature(name, Kind.ARRAY, "array", nulls, mean=0.5, std=rnd.choice((0.0, 2.0)), length=length)
    segment, series = rnd.choice((1, 2, 3, 20)), rnd.random() < 0.5
    width = width_of(length, segment, series)
    stds = tuple(rnd.choice((0.0, 1.5)) if i % 5 == 0 else 1.0 + i for i in range(width))
    means = tuple(numpy_rnd.normal(size=width).tolist())
    return Feature(
        name, Kind.ARRAY, "array", nulls, length=length, means=means, stds=stds, segment=segment, series=series
    )


def _without_some(rnd: Random, value: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON of a preprocessing without some of the keys that versions of earlier releases lack."""
    for feature in value["features"]:
        for key in OPTIONAL:
            if rnd.random() < 0.1:
                feature.pop(key, None)
    for key in ("calibration", "conformal", "quantiles", "baseline"):
        if rnd.random() < 0.1:
            value.pop(key)
    return value


def random_module(
    rnd: Random, numpy_rnd: np.random.Generator, architecture: dict[str, Any], preprocessing: Preprocessing
) -> nn.Module:
    inputs, outputs = preprocessing.model_inputs, preprocessing.outputs
    torch.manual_seed(rnd.getrandbits(32))
    with warnings.catch_warnings(action="ignore"):  # of a linear model of categories alone
        module = models.build(models.parse(architecture), inputs, outputs)
    for part in module.modules():
        if isinstance(part, Boosted):
            forest = random_forest(rnd, numpy_rnd, part)
            part.load_state_dict({"trees": torch.frombuffer(bytearray(forest.to_json()), dtype=torch.uint8)})
        elif isinstance(part, nn.BatchNorm1d):
            assert part.running_mean is not None and part.running_var is not None
            part.running_mean.normal_(0, 0.3)
            part.running_var.uniform_(0.5, 2)
    for name, parameter in module.named_parameters():
        if parameter.dim() == 1 or "linear.weight" in name or name.endswith((".r", ".s")):
            with torch.no_grad():
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return module.eval()


def random_forest(rnd: Random, numpy_rnd: np.random.Generator, model: Boosted) -> Forest:
    """Return trees for a model's columns. Those of others than numbers have thresholds all the same."""
    width = model.columns.width
    most = rnd.choice((1, 4, 30)) if width else 0
    counts = [int(numpy_rnd.integers(0, most + 1)) for _ in range(rnd.randint(0, 5) * model.outputs)]
    return Forest(width, model.outputs, tuple(_tree(numpy_rnd, nodes, model) for nodes in counts))


def _tree(rnd: np.random.Generator, nodes: int, model: Boosted) -> Tree:
    children: list[list[int]] = [[], []]
    sides: list[list[int | None]] = [[None] * nodes, [None] * nodes]
    for node in range(1, nodes):  # under a free side of an earlier node
        free = [(side, parent) for side in (0, 1) for parent in range(node) if sides[side][parent] is None]
        side, parent = free[rnd.integers(len(free))]
        sides[side][parent] = node
    leaves = iter(rnd.permutation(nodes + 1).tolist())
    children = [[-1 - next(leaves) if child is None else child for child in side] for side in sides]
    feature = rnd.integers(0, max(model.columns.width, 1), nodes).tolist()
    codes: list[tuple[int, ...] | None] = []
    for column in feature:
        cardinality = model.columns.cardinalities.get(column)
        some = None if cardinality is None or rnd.random() < 0.1 else rnd.permutation(cardinality + 3)
        codes.append(None if some is None else tuple(some[: int(rnd.integers(0, len(some)))].tolist()))
    threshold = np.round(rnd.normal(size=nodes), int(rnd.integers(0, 4))).tolist()
    value = rnd.normal(size=nodes + 1).tolist()
    return Tree(tuple(feature), tuple(threshold), tuple(codes), tuple(children[0]), tuple(children[1]), tuple(value))


def random_reference(rnd: Random, numpy_rnd: np.random.Generator, preprocessing: Preprocessing) -> Reference:
    histograms = list(_empty(preprocessing).histograms)
    if rnd.random() < 0.7:
        histograms.append(_prediction(preprocessing))
    return Reference(tuple(_histogram(numpy_rnd, item, preprocessing) for item in histograms))


def _histogram(rnd: np.random.Generator, item: Histogram, preprocessing: Preprocessing) -> Histogram:
    edges, labels, bins = item.edges, item.labels, len(item.counts)
    if edges is not None:
        values = np.unique(np.round(rnd.normal(size=int(rnd.integers(0, BINS - 1))), 1))
        edges = tuple(np.repeat(values, rnd.integers(1, 3, len(values))).tolist())
        bins = len(edges) + 2
    if labels is not None:
        labels = tuple(rnd.permutation(len(preprocessing.labels or ()))[: bins - 1].tolist())
    return Histogram(item.name, item.kind, tuple(rnd.integers(0, 9, bins).tolist()), edges, labels)


# ---- rows ----


def random_rows(rnd: Random, preprocessing: Preprocessing, count: int) -> RawRows:
    numpy_rnd = np.random.default_rng(rnd.getrandbits(32))
    scalars = [_scalars(numpy_rnd, feature, count) for feature in preprocessing.numbers]
    strings = [_strings(numpy_rnd, feature, count) for feature in preprocessing.categories]
    arrays = [_arrays(numpy_rnd, feature, count) for feature in preprocessing.arrays]
    return RawRows(count, np.array(scalars, np.float64).reshape(len(scalars), count), strings, arrays)


def _special(rnd: np.random.Generator, x: NDArray[np.float64], share: float) -> NDArray[np.float64]:
    """Return the numbers, some of them replaced by extreme ones and by none."""
    special = rnd.choice([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e308, -1e308, 5e-324], size=x.shape)
    return np.where(rnd.random(x.shape) < share, special, x)


def _scalars(rnd: np.random.Generator, feature: Feature, count: int) -> NDArray[np.float64]:
    scale = abs(feature.std) or 1.0
    with np.errstate(over="ignore"):
        x = feature.mean + scale * rnd.normal(size=count)
    if feature.ranks is not None:
        knots = np.array(feature.ranks.values)
        x = np.where(rnd.random(count) < 0.5, rnd.choice(knots, count), x)
    if feature.kind == Kind.TIMESTAMP:
        x = np.round(rnd.uniform(-3000, 8000, count) * 365 * US / rnd.choice([1, 100, 1000]))
    return _special(rnd, x, 0.15)


def _strings(rnd: np.random.Generator, feature: Feature, count: int) -> list[str | None]:
    known = [*(feature.categories or ()), *STRINGS, None]
    return [known[i] for i in rnd.integers(0, len(known), count)]


def _arrays(rnd: np.random.Generator, feature: Feature, count: int) -> list[NDArray[np.float64] | None]:
    share = rnd.choice([0.0, 0.2, 1.0])
    return [
        None if rnd.random() < 0.2 else _special(rnd, rnd.normal(size=feature.length or 0) * 3, share)
        for _ in range(count)
    ]


def inputs_of(preprocessing: Preprocessing, rows: RawRows) -> Inputs:
    """Return rows as the predictor has them."""
    categories = []
    for number, column in enumerate(rows.strings):
        distinct = sorted({text for text in column if text is not None})
        places = np.array([-1 if text is None else distinct.index(text) for text in column], np.int64)
        categories.append(CategoryInput(places, preprocessing.table(number, distinct)))
    arrays = []
    for items in rows.arrays:
        lengths = np.array([-1 if item is None else len(item) for item in items], np.int32)
        given = [item for item in items if item is not None]
        arrays.append(ArraysInput(lengths, np.concatenate([np.empty(0), *given])))
    return Inputs(rows.total, rows.scalars, categories, arrays)


def whole_outputs(version: Version, inputs: Inputs) -> NDArray[np.float64]:
    """Return the predictor's outputs [rows, outputs]."""
    if inputs.rows == 0:
        return np.empty((0, version.preprocessing.outputs))
    features = version.preprocessing.apply(inputs)
    few_rows = models.few_rows(version.module)
    if few_rows is not None:
        single = features.from_flat([array[:, None] for array in features.flat()])
        return few_rows(single)[:, 0].astype(np.float64)
    tensors = features.from_flat([torch.from_numpy(array) for array in features.flat()])
    with torch.no_grad():
        return version.module(tensors).numpy().astype(np.float64)


def corpus(seeds: Iterable[int]) -> bytes:
    """Return small versions of every architecture, one for each seed, in the form that fuzz.c reads."""
    data = b""
    for seed in seeds:
        stored = random_version(Random(seed)).stored
        if len(stored.weights) < LARGE:
            parts = [text.encode() for text in (stored.architecture, stored.preprocessing, stored.reference or "null")]
            data += b"".join(len(part).to_bytes(4, "little") + part for part in (*parts, stored.weights))
    return data
