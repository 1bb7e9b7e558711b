"""Every architecture learns something, and says what is wrong with it."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pg_tensile.errors import ArchitectureError, TensileError
from pg_tensile.execution import models
from pg_tensile.execution.data.preprocessing import ArrayInput, Features, ModelInputs
from pg_tensile.execution.models import few_rows
from pg_tensile.execution.training import checkpoint
from pg_tensile.execution.training.settings import Settings
from pg_tensile.execution.training.trainer import Trainer
from tests.unit.execution.training.test_training import Recorder, eager_steps
from tests.unit.rows import Prepared, Rows, every_type

RNG = np.random.default_rng(0)
MIXED = ModelInputs(3, (5, 2), (ArrayInput(4, 0),))
LINEAR_SOURCE = """
import torch
def build(n_inputs, n_outputs):
    return torch.nn.Sequential(torch.nn.Linear(n_inputs, 32), torch.nn.ReLU(), torch.nn.Linear(32, n_outputs))
"""


def features(inputs: ModelInputs, rows: int) -> Features:
    categories = np.stack([RNG.integers(0, size, rows) for size in inputs.cardinalities], 1)
    arrays = [
        RNG.integers(1, a.vocabulary, (rows, a.length))
        if a.vocabulary
        else RNG.normal(size=(rows, a.length)).astype("f")
        for a in inputs.arrays
    ]
    return Features(RNG.normal(size=(rows, inputs.numeric)).astype(np.float32), categories, tuple(arrays))


def tensors(values: Features) -> Features:
    return Features.from_flat([torch.from_numpy(array) for array in values.flat()])


def numbers(count: int = 400) -> Rows:
    """The label is the quadrant's sign for some category and the opposite for the others."""
    a, b, c = RNG.normal(size=count), RNG.normal(size=count), RNG.integers(0, 4, count)
    label = (a * b > 0) ^ (c == 0)
    text = [f"c{value}" for value in c]
    return Rows(
        {"a": ("float8", a.tolist()), "b": ("float4", b.tolist()), "c": ("text", text), "y": ("bool", label.tolist())}
    )


def images(count: int = 400) -> Rows:
    """Where is the bright spot: left or right, top or bottom?"""
    pixels = RNG.integers(0, 30, (count, 8, 8))
    x, y = RNG.integers(0, 8, count), RNG.integers(0, 8, count)
    pixels[np.arange(count), y, x] = 255
    labels = [
        f"{'top' if row < 4 else 'bottom'} {'left' if column < 4 else 'right'}"
        for row, column in zip(y, x, strict=True)
    ]
    return Rows({"i": ("uint8[]", pixels.reshape(count, 64).tolist()), "y": ("text", labels)})


def sentences(count: int = 400) -> Rows:
    """Return sentences labelled with the number of tokens that are 7."""
    tokens = [RNG.integers(1, 9, RNG.integers(1, 12)).tolist() for _ in range(count)]
    return Rows({"t": ("int4[]", tokens), "y": ("float8", [row.count(7) / len(row) for row in tokens])})


@pytest.mark.parametrize(
    ("rows", "architecture", "epochs", "metric", "least"),
    [
        (numbers(), {"type": "mlp", "hidden": [64, 32]}, 40, "accuracy", 0.85),
        (numbers(), {"type": "mlp", "hidden": [64], "norm": "layer", "activation": "gelu"}, 40, "accuracy", 0.8),
        (images(), {"type": "cnn", "norm": "batch"}, 12, "accuracy", 0.9),
        (sentences(), {"type": "transformer", "dim": 16, "heads": 2, "layers": 1}, 30, "r2", 0.8),
        (numbers(), {"type": "python", "source": LINEAR_SOURCE}, 40, "accuracy", 0.85),
        (
            numbers(),
            {"type": "import", "callable": "tests.unit.execution.models.test_models:Custom", "kwargs": {"width": 32}},
            40,
            "accuracy",
            0.85,
        ),
    ],
    ids=["mlp", "mlp-gelu", "cnn", "transformer", "python", "import"],
)
def test_each_architecture_learns(
    rows: Rows, architecture: dict[str, Any], epochs: int, metric: str, least: float
) -> None:
    parsed = models.parse(architecture)
    prepared = rows.prepare(tokens=models.token_limits(parsed))
    outcome = train(prepared, architecture, epochs)
    assert outcome["validation"][metric] > least, outcome


def train(prepared: Prepared, architecture: dict[str, Any], epochs: int) -> dict[str, Any]:
    checkpoint.seed_generators(1)
    fitted = prepared.fitted.preprocessing
    model = models.build(models.parse(architecture), fitted.model_inputs, fitted.outputs)
    settings = Settings(epochs, 16, learning_rate=5e-3, seed=1)
    steps = eager_steps(model, settings, prepared)
    return Trainer(settings, steps, prepared.dataset, fitted, Recorder()).run().metrics


class Custom(nn.Module):
    """A module such as an import architecture names."""

    def __init__(self, n_inputs: int, n_outputs: int, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(n_inputs, width), nn.Tanh(), nn.Linear(width, n_outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


@pytest.mark.parametrize(
    "architecture", [{"type": "mlp"}, {"type": "cnn"}, {"type": "python", "source": LINEAR_SOURCE}]
)
def test_all_kinds_of_features_reach_the_model(architecture: dict[str, Any]) -> None:
    model = models.build(models.parse(architecture), MIXED, 3).eval()
    values = tensors(features(MIXED, 6))
    outputs = model(values)
    assert outputs.shape == (6, 3)
    for changed in (
        values._replace(numeric=values.numeric + 1),
        values._replace(categories=1 - values.categories.clamp(max=1)),
        values._replace(arrays=(values.arrays[0] + 1,)),
    ):
        assert not torch.allclose(model(changed), outputs)


def test_a_transformer_joins_other_features_and_ignores_padding() -> None:
    inputs = ModelInputs(2, (3,), (ArrayInput(2, 0), ArrayInput(6, 9)))
    model = models.build(models.parse({"type": "transformer", "dim": 8, "heads": 2}), inputs, 1).eval()
    values = tensors(features(inputs, 4))
    tokens = values.arrays[1].clone()
    tokens[:, 4:] = 0
    padded = values._replace(arrays=(values.arrays[0], tokens))
    outputs = model(padded)
    assert not torch.allclose(model(values), outputs)
    assert not torch.allclose(model(padded._replace(numeric=values.numeric + 1)), outputs)
    alone = Features.from_flat([array[:1] for array in padded.flat()])
    torch.testing.assert_close(model(alone), outputs[:1])


@pytest.mark.parametrize("norm", ["none", "batch"])
@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_the_numpy_mlp_equals_the_module(activation: str, norm: str) -> None:
    architecture = {"type": "mlp", "hidden": [32, 16], "activation": activation, "dropout": 0.5, "norm": norm}
    model = models.build(models.parse(architecture), MIXED, 3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.rand_like(parameter))
        for _ in range(3):
            model(tensors(features(MIXED, 50)))  # statistics of batches
    model.eval()
    function = few_rows(model)
    assert function is not None
    for rows in (1, 5):
        values = features(MIXED, rows)
        expected = model(tensors(values)).detach().numpy()
        np.testing.assert_allclose(function(values), expected, rtol=2e-5, atol=1e-6)


def test_the_numpy_mlp_leaves_other_models_alone() -> None:
    for architecture in ({"type": "mlp", "activation": "gelu"}, {"type": "mlp", "norm": "layer"}, {"type": "cnn"}):
        assert few_rows(models.build(models.parse(architecture), MIXED, 1)) is None


@pytest.mark.parametrize(
    ("shape", "length"), [([8, 8], 64), ([3, 7, 5], 105), ([1, 64], 64), ([2, 40, 33], 2640), (None, 49)]
)
@pytest.mark.parametrize("channels", [[4], [4, 8, 8, 8]])
def test_images_of_any_shape_fit(shape: list[int] | None, length: int, channels: list[int]) -> None:
    inputs = ModelInputs(0, (), (ArrayInput(length, 0),))
    architecture = {"type": "cnn", "channels": channels} | ({"shape": shape} if shape else {})
    model = models.build(models.parse(architecture), inputs, 2)
    assert model(
        Features(torch.empty(3, 0), torch.empty(3, 0, dtype=torch.int64), (torch.randn(3, length),))
    ).shape == (3, 2)


# ---- what is wrong ----


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        ({"type": "mpl"}, 'unknown architecture type "mpl"'),
        ({}, 'key "type" is missing'),
        ({"type": "mlp", "hiden": [1]}, 'unknown key "hiden" in the architecture "mlp"'),
        ({"type": "mlp", "hidden": [0]}, r'key "hidden\[0\]" in the architecture "mlp": 0'),
        ({"type": "mlp", "hidden": 5}, 'key "hidden" in the architecture "mlp": 5'),
        ({"type": "mlp", "hidden": [True]}, r'key "hidden\[0\]" in the architecture "mlp": true'),
        ({"type": "mlp", "dropout": 1}, 'key "dropout" in the architecture "mlp": 1'),
        ({"type": "mlp", "activation": "rely"}, 'key "activation" in the architecture "mlp": "rely"'),
        ({"type": "cnn", "kernel": 4}, 'key "kernel" in the architecture "cnn": 4'),
        ({"type": "transformer", "dim": 1.5}, 'key "dim" in the architecture "transformer": 1.5'),
        ({"type": "transformer", "dim": 10}, 'key "dim" .* is not divisible by "heads": 10, 4'),
        ({"type": "import"}, 'key "callable" is missing'),
        ({"type": "import", "callable": "os.path"}, 'key "callable" in the architecture "import": "os.path"'),
        ({"type": "import", "callable": "a..b:c"}, 'key "callable"'),
        ({"type": "python"}, 'key "source" is missing'),
        ({"type": "python", "source": ""}, 'key "source" in the architecture "python": ""'),
    ],
)
def test_wrong_architectures_name_the_key(architecture: dict[str, Any], message: str) -> None:
    with pytest.raises(ArchitectureError, match=message) as error:
        models.parse(architecture)
    assert error.value.hint


def test_integers_of_json_may_have_a_point() -> None:
    assert models.parse({"type": "mlp", "hidden": [16.0], "dropout": 0.0}) == models.parse(
        {"type": "mlp", "hidden": [16]}
    )


@pytest.mark.parametrize(
    ("architecture", "inputs", "message"),
    [
        ({"type": "cnn"}, ModelInputs(2, (), ()), "a cnn needs exactly one array feature, the query has 0"),
        ({"type": "cnn"}, ModelInputs(0, (), (ArrayInput(6, 0),)), "an image of 6 elements is not a square"),
        ({"type": "cnn", "shape": [2, 4]}, ModelInputs(0, (), (ArrayInput(9, 0),)), "the shape 2×4 does not fit"),
        (
            {"type": "transformer"},
            ModelInputs(0, (), (ArrayInput(9, 0),)),
            "exactly one array of tokens, the query has 0",
        ),
        ({"type": "import", "callable": "no_such:f"}, MIXED, 'could not import "no_such:f": No module named'),
        ({"type": "import", "callable": "os:no_such"}, MIXED, 'could not import "os:no_such"'),
        ({"type": "python", "source": "1 +"}, MIXED, "the architecture's source raised SyntaxError"),
        ({"type": "python", "source": "x = 1"}, MIXED, "does not define build"),
        ({"type": "python", "source": "def build(a, b): return 5"}, MIXED, "build returned int instead of a module"),
        ({"type": "python", "source": "def build(a, b): raise KeyError('k')"}, MIXED, "build raised KeyError: 'k'"),
        ({"type": "python", "source": "def build(a): pass"}, MIXED, "build raised TypeError"),
        ({"type": "python", "source": "import sys\nsys.exit(3)"}, MIXED, "raised SystemExit: 3"),
        (
            {"type": "python", "source": "import torch\ndef build(a, b): return torch.nn.Linear(a, b + 1)"},
            MIXED,
            r"the model returned \[2, 3\] for 2 rows",
        ),
        (
            {"type": "python", "source": "import torch\ndef build(a, b): return torch.nn.Linear(a + 1, b)"},
            MIXED,
            "the model raised RuntimeError: mat1 and mat2 shapes",
        ),
        (
            {"type": "python", "source": "import torch\ndef build(a, b): return torch.nn.Identity()"},
            MIXED,
            "without parameters to train",
        ),
        ({"type": "python", "source": LINEAR_SOURCE}, ModelInputs(1, (70_000,), ()), "70001 inputs, more than 65536"),
    ],
)
def test_models_that_cannot_be_built_say_why(architecture: dict[str, Any], inputs: ModelInputs, message: str) -> None:
    with pytest.raises(ArchitectureError, match=message) as error:
        models.build(models.parse(architecture), inputs, 2)
    assert isinstance(error.value, TensileError) and not error.value.message.endswith(".")


def test_the_traceback_shows_the_line_of_the_source() -> None:
    source = "def helper():\n    return 1 / 0  # here\ndef build(a, b):\n    return helper()\n"
    with pytest.raises(ArchitectureError) as error:
        models.build(models.parse({"type": "python", "source": source}), MIXED, 2)
    text = "".join(traceback.format_exception(error.value))
    assert "return 1 / 0  # here" in text and "ZeroDivisionError" in text


def test_import_finds_nested_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_models.py").write_text(
        "import torch\nclass Zoo:\n    @staticmethod\n"
        "    def make(n, m, bias=True): return torch.nn.Linear(n, m, bias=bias)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    architecture = {"type": "import", "callable": "my_models:Zoo.make", "kwargs": {"bias": False}}
    try:
        model = models.build(models.parse(architecture), MIXED, 2)
    finally:
        sys.modules.pop("my_models", None)
    assert [name for name, _ in model.named_parameters()] == ["module.weight"]


def test_every_type_of_column_trains() -> None:
    assert train(every_type(200).prepare(), {"type": "mlp", "hidden": [16]}, 2)["training"]["samples"] > 100
