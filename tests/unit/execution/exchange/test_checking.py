"""Models of files: weights must be exactly those of the architecture, whose size is checked before it is built."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pg_tensile.errors import ModelFileError
from pg_tensile.execution import models
from pg_tensile.execution.data.preprocessing import Preprocessing
from pg_tensile.execution.exchange.checking import checked_model
from pg_tensile.execution.training import checkpoint
from tests.unit.rows import Rows, every_type

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "mlp": {"type": "mlp", "hidden": [8], "norm": "batch"},
    "tabular": {"type": "tabular", "members": 2, "hidden": 8, "projection": 8},
    "cnn": {"type": "cnn", "channels": [2], "norm": "batch"},
    "transformer": {"type": "transformer", "dim": 8, "heads": 2, "layers": 1},
}


def preprocessing_of(type: str) -> Preprocessing:
    architecture = models.parse(ARCHITECTURES[type])
    rows, rng = every_type(100), np.random.default_rng(0)
    if type in ("cnn", "transformer"):
        pixels = rng.integers(0, 9, (100, 16)).tolist()
        rows = Rows({"pixels": ("int2[]", pixels), "x": rows.columns["float8"], "y": rows.columns["y"]})
    tokens, ranks = models.token_limits(architecture), models.takes_ranks(architecture)
    return rows.prepare(tokens=tokens, ranks=ranks).fitted.preprocessing


def stored(preprocessing: Preprocessing) -> Any:
    """Return the JSON of the catalogue."""
    return json.loads(json.dumps(preprocessing.to_json()))


def weights_of(type: str, preprocessing: Preprocessing) -> dict[str, Tensor]:
    module = models.build(models.parse(ARCHITECTURES[type]), preprocessing.model_inputs, preprocessing.outputs)
    return dict(module.state_dict())


@pytest.mark.parametrize("type", ARCHITECTURES)
def test_a_model_of_every_architecture_is_loaded(type: str) -> None:
    preprocessing = preprocessing_of(type)
    weights = weights_of(type, preprocessing)
    found, module = checked_model(ARCHITECTURES[type], stored(preprocessing), checkpoint.to_bytes(weights))
    assert found == preprocessing
    assert all(torch.equal(tensor, weights[name]) for name, tensor in module.state_dict().items())


def changed(weights: dict[str, Tensor], change: str) -> dict[str, Tensor]:
    name = "dense.0.weight"
    if change == "more":
        return weights | {"more": torch.ones(1)}
    if change == "missing":
        return {key: tensor for key, tensor in weights.items() if key != name}
    other = {
        "shape": lambda: weights[name].T.contiguous(),
        "type": lambda: weights[name].double(),
        "nan": lambda: weights[name] * float("nan"),
    }[change]()
    return weights | {name: other}


@pytest.mark.parametrize("change", ["more", "missing", "shape", "type", "nan"])
def test_other_weights_are_refused(change: str) -> None:
    preprocessing = preprocessing_of("mlp")
    weights = checkpoint.to_bytes(changed(weights_of("mlp", preprocessing), change))
    with pytest.raises(ModelFileError, match="do not fit") as caught:
        checked_model(ARCHITECTURES["mlp"], stored(preprocessing), weights)
    assert "more" if change == "more" else "dense.0.weight" in (caught.value.detail or "")


@pytest.mark.parametrize(
    ("type", "sizes"),
    [
        ("mlp", {"hidden": [65536] * 64}),
        ("tabular", {"members": 256, "hidden": 65536, "projection": 1024, "layers": 64}),
        ("transformer", {"dim": 8192, "heads": 1, "layers": 64, "feedforward": 65536}),
        ("cnn", {"channels": [4096] * 16, "kernel": 15}),
    ],
)
def test_a_model_that_needs_terabytes_is_refused_without_them(type: str, sizes: dict[str, Any]) -> None:
    preprocessing = preprocessing_of(type)
    weights = checkpoint.to_bytes(weights_of(type, preprocessing))
    with pytest.raises(ModelFileError, match="do not fit"):
        checked_model(ARCHITECTURES[type] | sizes, stored(preprocessing), weights)


def test_damaged_tensors_are_refused() -> None:
    preprocessing = preprocessing_of("mlp")
    weights = checkpoint.to_bytes(weights_of("mlp", preprocessing))
    for damaged in (weights[:-1], weights[:100], b"", weights + b"x"):
        with pytest.raises(ModelFileError, match="damaged"):
            checked_model(ARCHITECTURES["mlp"], stored(preprocessing), damaged)
