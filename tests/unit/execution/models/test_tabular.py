"""The architecture tabular: its forms for prediction equal it; within half its memory, training has the same bits."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from pg_tensile.execution import models
from pg_tensile.execution.data.preprocessing import ArrayInput, Features, ModelInputs
from pg_tensile.execution.models import tabular
from pg_tensile.execution.models.tabular import PART, Tabular
from pg_tensile.execution.training.graphs import Sizes, capture_graphs
from pg_tensile.execution.training.settings import Settings
from tests.unit.execution.training.test_steps import assert_same, at_half, case
from tests.unit.rows import every_type

CPU = torch.device("cpu")
INPUTS = {
    "numbers": ModelInputs(4, (), (), ((-1.0, 0.0, 1.0), (-1.0, 1.0))),
    "binary": ModelInputs(2, (), (), ((-1.0, 1.0), (-2.0, 2.0))),
    "categories": ModelInputs(0, (3, 5), ()),
    "plain": ModelInputs(3, (), ()),
    "arrays": ModelInputs(1, (4,), (ArrayInput(6, 0),), ()),
    "all": ModelInputs(5, (3,), (ArrayInput(2, 0),), ((-1.0, 0.5, 2.0), (-1.0, 1.0))),
}


def features(inputs: ModelInputs, rows: int) -> Features:
    rng = np.random.default_rng(rows)
    categories = [rng.integers(0, size, rows) for size in inputs.cardinalities]
    return Features(
        rng.normal(scale=2.0, size=(rows, inputs.numeric)).astype(np.float32),
        np.array(categories, np.int64).reshape(len(categories), rows).T.copy(),
        tuple(rng.normal(size=(rows, array.length)).astype(np.float32) for array in inputs.arrays),
    )


def model_of(inputs: ModelInputs, outputs: int, **keys: Any) -> Tabular:
    torch.manual_seed(1)
    model = models.build(models.parse({"type": "tabular", **keys}), inputs, outputs)
    assert isinstance(model, Tabular)
    with torch.no_grad():
        for parameter in model.parameters():  # the embeddings begin as linear ones
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("rows", [1, 7, 2 * PART + 3])
@pytest.mark.parametrize("keys", [{}, {"layers": 1, "members": 3}, {"layers": 3, "dropout": 0.5}], ids=str)
def test_forms_for_prediction_equal_the_model(kind: str, rows: int, keys: dict[str, Any]) -> None:
    inputs = INPUTS[kind]
    model, arrays = model_of(inputs, 3, **keys).eval(), features(inputs, rows)
    tensors = Features.from_flat([torch.from_numpy(array) for array in arrays.flat()])
    few_rows = models.few_rows(model)
    assert few_rows is not None
    with torch.inference_mode():
        expected = model(tensors).numpy()
        assert expected.shape == (rows, 3) and expected.std() > 0
        assert np.allclose(models.fused(model).eval()(tensors).numpy(), expected, atol=1e-5)
    assert np.allclose(few_rows(arrays), expected, atol=1e-5)


def test_the_form_for_many_rows_needs_no_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = INPUTS["all"]
    model = model_of(inputs, 2).eval()
    tensors = Features.from_flat([torch.from_numpy(array) for array in features(inputs, 50).flat()])
    fused = models.fused(model)
    with torch.inference_mode():
        onednn = fused(tensors)
        monkeypatch.setattr(tabular, "ONEDNN", False)
        assert torch.allclose(fused(tensors), onednn, atol=1e-5)


def test_members_answer_alone_in_training_and_together_in_evaluation() -> None:
    inputs = INPUTS["all"]
    model = model_of(inputs, 2)
    tensors = Features.from_flat([torch.from_numpy(array) for array in features(inputs, 5).flat()])
    members = model.train()(tensors)
    assert members.shape == (5, model.members, 2)
    assert torch.equal(model.eval()(tensors), members.mean(1))


def test_every_type_of_column_is_captured() -> None:
    prepared = every_type(300).prepare(ranks=True)
    preprocessing = prepared.fitted.preprocessing
    model = model_of(preprocessing.model_inputs, preprocessing.outputs)
    settings = Settings(epochs=1, batch_size=64)
    graphs = capture_graphs(model, settings, preprocessing.task, Sizes.of(prepared.dataset, preprocessing), CPU)
    assert {"train", "evaluate"} <= set(graphs.named())


def test_training_within_half_of_the_memory_gives_the_same_bits() -> None:
    job = case(every_type(600).prepare(ranks=True), {"type": "tabular"}, batch_size=256)
    steps, part = at_half(job)
    assert part <= 0.51
    assert_same(job, steps)


def test_a_model_is_built_without_libraries_that_take_seconds_to_import() -> None:
    program = """
import random, sys
from pg_tensile.execution import models
from pg_tensile.execution.data.preprocessing import ModelInputs
state = random.getstate()
models.build(models.parse({"type": "tabular"}), ModelInputs(2, (3,), (), ((0.0, 1.0),)), 1)
assert random.getstate() == state
print([name for name in ("sklearn", "scipy", "pandas", "transformers") if name in sys.modules])
import sklearn.metrics
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
