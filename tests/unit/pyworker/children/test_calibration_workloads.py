"""The training steps that a calibration measures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pg_tensile.errors import ArchitectureError
from pg_tensile.execution.data.preprocessing import ArrayInput, ModelInputs, Task
from pg_tensile.execution.data.pretrained_folder import MODEL_PATH_VARIABLE
from pyworker.children.calibration_workloads import Workload, capture_workload, standard_workloads, workloads
from tests.pretrained import WORDS, save_bert

CPU = torch.device("cpu")
TRAINED = {
    "architecture": {"type": "mlp", "hidden": [4]},
    "inputs": {"numeric": 2, "cardinalities": [3], "arrays": [], "edges": [], "vectors": 0},
    "outputs": 1,
    "task": "regression",
    "batch_size": 10,
    "optimizer": "sgd",
    "options": {},
}


def targets(workload: Workload) -> set[str]:
    return set(capture_workload(workload, CPU).trace.target.values)


@pytest.mark.parametrize(
    ("architecture", "array"),
    [
        ({"type": "cnn", "shape": [3, 8, 8]}, ArrayInput(192, 0)),
        ({"type": "cnn", "shape": [8, 4]}, ArrayInput(32, 0)),
        ({"type": "transformer", "dim": 8, "length": 12, "vocabulary": 100}, ArrayInput(12, 100)),
    ],
)
def test_an_architecture_that_says_its_sizes_is_measured_untrained(
    architecture: dict[str, Any], array: ArrayInput
) -> None:
    workload = Workload.untrained(architecture)
    assert workload is not None
    assert workload.inputs == ModelInputs(0, (), (array,))
    assert (workload.task, workload.batch_size > 1) == (Task.BINARY, True)
    assert capture_workload(workload, CPU).trace.operator_count > 2


@pytest.mark.parametrize(
    "architecture",
    [
        {"type": "mlp"},
        {"type": "tabular"},
        {"type": "cnn"},
        {"type": "transformer"},
        {"type": "python", "source": "raise SystemExit"},
    ],
)
def test_an_architecture_whose_sizes_only_the_data_tell_is_left_out(architecture: dict[str, Any]) -> None:
    assert Workload.untrained(architecture) is None


def test_a_pretrained_model_reads_texts_as_long_as_it_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MODEL_PATH_VARIABLE, str(tmp_path))
    save_bert(tmp_path / "bert")
    workload = Workload.untrained({"type": "pretrained", "path": "bert", "length": 16})
    assert workload is not None
    (texts,) = workload.inputs.arrays
    assert texts.length == 16
    assert texts.vocabulary > len(WORDS)
    assert capture_workload(workload, CPU).trace.operator_count > 2


def test_a_pretrained_model_without_its_folder_is_an_error() -> None:
    with pytest.raises(ArchitectureError):
        Workload.untrained({"type": "pretrained", "path": "gone"})


@pytest.mark.parametrize(
    ("options", "more"),
    [
        ({"precision": "bfloat16"}, True),
        ({"quantiles": [0.1, 0.9]}, True),
        ({"average_weights": True}, True),
        ({"clip": 1.0}, True),
        ({"patience": 3}, False),
    ],
)
def test_options_that_change_the_step_count(options: dict[str, Any], more: bool) -> None:
    plain = Workload.from_json(TRAINED)
    assert bool(targets(plain._replace(options=options)) - targets(plain)) == more


def test_registered_models_come_first_then_variants_and_the_standard_set_in_turns() -> None:
    trained = Workload.from_json(TRAINED)
    order = list(workloads([trained]))
    standard = list(standard_workloads())
    assert order[0] == trained
    assert [workload.batch_size for workload in order[1:5:2]] == [5, 20]
    assert order[2:6:2] == standard[:2]
    assert len(order) == 3 + len(standard)


def test_the_standard_set_begins_with_every_kind_of_architecture() -> None:
    first = list(standard_workloads())[:8]
    assert [workload.architecture["type"] for workload in first[::2]] == ["mlp", "tabular", "cnn", "transformer"]
    for workload in first[::2]:
        assert capture_workload(workload, CPU).trace.operator_count > 2
