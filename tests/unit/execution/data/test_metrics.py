"""Metrics of an epoch: equal to scikit-learn's on the same rows, however these are cut into batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from pg_tensile.execution.data import metrics
from pg_tensile.execution.data.answers import answers, predictions, probabilities, target_values
from pg_tensile.execution.data.metrics import Metrics, MetricSums
from pg_tensile.execution.data.preprocessing import Preprocessing, Target, Task
from pg_tensile.execution.data.scores import Classified, Estimated
from tests.scikit_learn_scores import expected


def preprocessing(labels: int) -> Preprocessing:
    """Return that of a regression (0 labels), of two labels or of more."""
    if labels == 0:
        return Preprocessing(Task.REGRESSION, Target("y", "float8", mean=1e6, std=20.0), None, None, ())
    task = Task.BINARY if labels == 2 else Task.MULTICLASS
    return Preprocessing(task, Target("y", "text"), tuple(f"label {number}" for number in range(labels)), None, ())


class Rows:
    """Random outputs, targets and weights, cut into batches."""

    def __init__(self, labels: int, rows: int, seed: int, weighted: bool) -> None:
        random = np.random.default_rng(seed)
        width = labels if labels > 2 else 1
        self.preprocessing = preprocessing(labels)
        self.outputs = random.normal(size=(rows, width)).astype(np.float32).round(1)  # some are equal
        if labels == 0:
            self.target = (self.outputs[:, 0] + random.normal(size=rows) / 2).astype(np.float32)
        else:
            self.target = random.integers(0, labels, rows).astype(np.int64 if labels > 2 else np.float32)
        self.weight = random.integers(0, 3, rows).astype(np.float32) + np.float32(0.5) if weighted else None

    def sums(self, batch: int, ranks: bool = True) -> MetricSums:
        sums = MetricSums(self.preprocessing, ranks)
        self.add(sums, 0, len(self.target), batch)
        return sums

    def add(self, sums: MetricSums, first: int, last: int, batch: int) -> None:
        for start in range(first, last, batch):
            part = slice(start, min(start + batch, last))
            sums.add(self.outputs[part], self.target[part], None if self.weight is None else self.weight[part])

    def expected(self) -> dict[str, float | None]:
        """Return the metrics by scikit-learn."""
        exact = self.outputs.astype(np.float64)
        weight = None if self.weight is None else self.weight.astype(np.float64)
        if self.preprocessing.task == Task.REGRESSION:
            actual = target_values(self.target.astype(np.float64), self.preprocessing)
            return expected(Estimated(actual, predictions(exact, self.preprocessing)), weight)
        chances, predicted = probabilities(exact, self.preprocessing), answers(exact, self.preprocessing).label
        return expected(Classified(self.target.astype(np.int64), chances, predicted), weight)


def values(result: Metrics) -> dict[str, Any]:
    return {name: value for name, value in result.to_json().items() if name not in ("samples", "loss")}


@given(
    labels=st.sampled_from([0, 2, 3, 6]),
    rows=st.integers(1, 60),
    batch=st.integers(1, 60),
    seed=st.integers(0, 1000),
    weighted=st.booleans(),
)
def test_metrics_are_scikit_learns(labels: int, rows: int, batch: int, seed: int, weighted: bool) -> None:
    data = Rows(labels, rows, seed, weighted)
    result = data.sums(batch).result(rows, 0.5)
    assert (result.samples, result.loss) == (rows, 0.5)
    expected = data.expected()
    for name, value in values(result).items():
        if name in expected:
            wanted = expected[name]
            assert value == (None if wanted is None else pytest.approx(wanted, rel=1e-8, abs=1e-9)), name
        else:
            assert value is None, name


def test_all_metrics_of_a_task_are_there() -> None:
    assert {
        name for name, value in values(Rows(0, 50, 1, False).sums(7).result(50, 1.0)).items() if value is not None
    } == {*("rmse", "mae", "r2")}
    for labels in (2, 5):
        names = {name for name, value in values(Rows(labels, 50, 1, False).sums(7).result(50, 1.0)).items() if value}
        assert names == {
            *("accuracy", "balanced_accuracy", "f1", "precision", "recall", "mcc", "log_loss", "brier"),
            *("roc_auc", "pr_auc"),
        }


@pytest.mark.parametrize("labels", [0, 2, 4])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_state_that_is_restored_goes_on_to_the_same_bits(labels: int, weighted: bool) -> None:
    data = Rows(labels, 100, 5, weighted)
    whole = data.sums(10, ranks=False).result(100, 1.0)
    first, second = MetricSums(data.preprocessing), MetricSums(data.preprocessing)
    data.add(first, 0, 40, 10)
    second.restore({name: array.copy() for name, array in first.arrays.items()})
    data.add(second, 40, 100, 10)
    assert second.result(100, 1.0) == whole


def test_a_state_of_an_earlier_version_has_no_metrics_that_it_lacks() -> None:
    data = Rows(2, 20, 1, False)
    sums = MetricSums(data.preprocessing)
    sums.restore({name: np.ones(2, np.int64) for name in ("hits", "predicted", "actual")})
    data.add(sums, 0, 20, 5)
    result = sums.result(40, 1.0)
    assert result.log_loss is None and result.accuracy is None and result.recall is not None


def test_rankings_are_those_of_the_first_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "RANKED_ROWS", 70)
    data = Rows(2, 200, 3, False)
    result = data.sums(30).result(200, 1.0)
    first = Rows(2, 200, 3, False)
    first.outputs, first.target = first.outputs[:70], first.target[:70]
    assert result.roc_auc == pytest.approx(first.expected()["roc_auc"])
    assert result.accuracy == pytest.approx(data.expected()["accuracy"])
    assert data.sums(30, ranks=False).result(200, 1.0).roc_auc is None


def test_the_mean_of_an_ensembles_members_counts() -> None:
    data = Rows(3, 40, 2, False)
    noise = np.random.default_rng(0).normal(size=(40, 1, 3)).astype(np.float32)
    members = np.concatenate([data.outputs[:, None] + noise, data.outputs[:, None] - noise], axis=1)
    sums = MetricSums(data.preprocessing)
    sums.add(members, data.target)
    assert sums.result(40, 1.0).log_loss == pytest.approx(data.expected()["log_loss"], rel=1e-5)


def test_a_constant_target_or_a_single_label_defines_no_comparison() -> None:
    ones: NDArray[np.float32] = np.ones((4, 1), np.float32)
    sums = MetricSums(preprocessing(0))
    sums.add(ones, np.full(4, 2.0, np.float32))
    assert sums.result(4, 1.0).r2 is None and sums.result(4, 1.0).rmse == pytest.approx(20.0)
    sums = MetricSums(preprocessing(2), ranks=True)
    sums.add(ones, np.zeros(4, np.float32))
    result = sums.result(4, 1.0)
    assert (result.accuracy, result.roc_auc, result.mcc, result.recall) == (0, None, None, None)
    assert MetricSums(preprocessing(2)).result(0, None) == Metrics(0, None)
