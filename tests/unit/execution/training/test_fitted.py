"""Trees of LightGBM, lines of scikit-learn, and averages of models."""

from __future__ import annotations

from typing import Any

import lightgbm
import numpy as np
import pytest
from numpy.typing import NDArray

from pg_tensile.execution.data.dataset import Table, head
from pg_tensile.execution.data.preprocessing import Task
from pg_tensile.execution.models.boosted import BoostedArchitecture, TreeColumns
from pg_tensile.execution.models.linear import LinearArchitecture
from pg_tensile.execution.models.trees import Scorer
from pg_tensile.execution.training import boosting
from pg_tensile.execution.training.averaging import weights_of
from pg_tensile.execution.training.boosting import Boosting, grow
from pg_tensile.execution.training.fitted import Fitting, Step, outputs_of
from pg_tensile.execution.training.settings import Settings
from tests.unit.rows import Prepared, Rows

ROWS = 600
SETTINGS = Settings(epochs=1, batch_size=32)


def prepared(target: str, rows: int = ROWS, validation: float = 0.2) -> Prepared:
    """Return rows with two numbers, one of which has nulls, a category, and a target of the given kind."""
    random = np.random.default_rng(7)
    a, b, c = random.normal(size=rows), random.normal(size=rows), random.integers(0, 4, rows)
    y = np.sin(2 * a) + b + (c == 2) + 0.1 * random.normal(size=rows)
    kinds: dict[str, tuple[str, Any]] = {
        "number": ("float8", y.tolist()),
        "two": ("bool", (y > 0).tolist()),
        "three": ("text", np.array(["low", "middle", "high"])[np.digitize(y, (-0.5, 1.0))].tolist()),
    }
    columns = {
        "a": ("float8", a.tolist()),
        "b": ("float8", [None if i % 9 == 0 else x for i, x in enumerate(b.tolist())]),
        "c": ("text", [f"c{code}" for code in c]),
        "y": kinds[target],
    }
    return Rows(columns).prepare(ranks=True, validation=validation)


def scores(rows: Prepared, table: Table, found: boosting.Grown) -> NDArray[np.float64]:
    columns = TreeColumns.of(rows.fitted.preprocessing.model_inputs)
    return Scorer(found.forest, columns.cardinalities)(columns.matrix(table.features))


@pytest.mark.parametrize(
    ("target", "objective"), [("number", "regression"), ("two", "binary"), ("three", "multiclass")]
)
def test_trees_have_the_outputs_of_lightgbm(target: str, objective: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = prepared(target)
    boosters: list[Any] = []
    create = lightgbm.Booster

    def kept(*args: Any) -> Any:
        boosters.append(create(*args))
        return boosters[-1]

    monkeypatch.setattr(lightgbm, "Booster", kept)
    architecture = BoostedArchitecture(rounds=40, least_rows=5)
    found = grow(Boosting(architecture, 1, 0), rows.fitted.preprocessing, rows.dataset.training, None, lambda _: False)
    assert found.rounds == (40,)
    matrix = TreeColumns.of(rows.fitted.preprocessing.model_inputs).matrix(rows.dataset.validation.features)
    expected = boosters[0].predict(matrix, raw_score=True).reshape(len(matrix), -1)
    assert np.abs(scores(rows, rows.dataset.validation, found) - expected).max() < 1e-6
    assert boosters[0].params["objective"] == objective


def test_trees_do_not_depend_on_the_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boosting, "THREAD_NUMBERS", 1)
    rows = prepared("number")
    forests = [
        grow(
            Boosting(BoostedArchitecture(rounds=30), threads, 3),
            rows.fitted.preprocessing,
            rows.dataset.training,
            rows.dataset.validation,
            lambda _: False,
        ).forest
        for threads in (1, 2)
    ]
    assert forests[0] == forests[1]


def test_quantiles_are_trees_of_their_own_and_cover_their_share() -> None:
    from dataclasses import replace

    rows = prepared("number", 2000)
    preprocessing = replace(rows.fitted.preprocessing, quantiles=(0.1, 0.9))
    found = grow(
        Boosting(BoostedArchitecture(rounds=60), 1, 0),
        preprocessing,
        rows.dataset.training,
        rows.dataset.validation,
        lambda _: False,
    )
    assert len(found.rounds) == found.forest.outputs == 3
    outputs = scores(rows, rows.dataset.validation, found)
    inside = (outputs[:, 1] <= rows.dataset.validation.target) & (rows.dataset.validation.target <= outputs[:, 2])
    assert 0.6 < inside.mean() < 0.95


def fit(rows: Prepared, architecture: Any, observe: Any = lambda _: False) -> tuple[Fitting, Any]:
    fitting = Fitting(rows.fitted.preprocessing, rows.dataset, SETTINGS, 1, observe)
    return fitting, fitting.fit(architecture)


SUBJECTS = [("number", 3), *((target, rows) for target in ("number", "two", "three") for rows in (70, ROWS))]


@pytest.mark.parametrize(("target", "rows"), SUBJECTS)
@pytest.mark.parametrize("architecture", [BoostedArchitecture(rounds=100, least_rows=5), LinearArchitecture()])
def test_fitted_models_are_better_than_a_constant_and_can_be_fitted_to_few_rows(
    target: str, architecture: Any, rows: int
) -> None:
    data = prepared(target, rows)
    fitting, fitted = fit(data, architecture)
    outputs = outputs_of(fitted.model, data.dataset.validation, data.fitted.preprocessing)
    assert np.isfinite(outputs).all() and outputs.shape == (
        data.dataset.validation.rows,
        data.fitted.preprocessing.outputs,
    )
    held = data.dataset.validation.target
    if rows == ROWS:
        if target == "number":
            assert ((outputs[:, 0] - held) ** 2).mean() < 0.6 * held.var()
        else:
            labels = outputs[:, 0] > 0 if target == "two" else outputs.argmax(1)
            assert (labels == held).mean() > 0.6
    again = fitting.refit(architecture, fitted)
    assert np.isfinite(outputs_of(again, data.dataset.validation, data.fitted.preprocessing)).all()


def test_the_observer_ends_the_growth_with_the_best_trees() -> None:
    rows = prepared("number")
    seen: list[Step] = []

    def observe(step: Step) -> bool:
        seen.append(step)
        return step.done == 7

    _, fitted = fit(rows, BoostedArchitecture(), observe)
    assert seen[-1].done == 7
    assert fitted.kept <= 7


def test_without_validation_rows_there_is_a_fixed_number_of_rounds() -> None:
    rows = prepared("number", validation=0.0)
    _, fitted = fit(rows, BoostedArchitecture())
    assert fitted.kept == boosting.ROUNDS_WITHOUT_VALIDATION


class TestWeights:
    """Weights of an average."""

    TABLE = prepared("number").dataset.validation
    TWO = prepared("two").dataset.validation

    def test_of_a_regression_are_those_of_the_least_error(self) -> None:
        target = self.TABLE.target[:, None]
        noise = np.random.default_rng(0).normal(size=(2, *target.shape))
        weights = weights_of([target + noise[0], target + 2 * noise[1]], self.TABLE, Task.REGRESSION)
        assert sum(weights) == pytest.approx(1)
        assert weights[0] == pytest.approx(0.8, abs=0.1)  # in inverse proportion to the variances

    def test_leave_out_a_model_that_does_not_help(self) -> None:
        target = self.TABLE.target[:, None]
        assert weights_of([target, -target], self.TABLE, Task.REGRESSION) == (1.0, 0.0)

    def test_of_labels_are_those_of_the_least_log_loss(self) -> None:
        sure = (2 * self.TWO.target - 1)[:, None] * 2.0
        assert weights_of([sure, -sure], self.TWO, Task.BINARY) == (1.0, 0.0)

    def test_are_equal_without_rows(self) -> None:
        nothing = head(self.TABLE, 0)
        assert weights_of([np.zeros((0, 1))] * 2, nothing, Task.REGRESSION) == (0.5, 0.5)

    def test_of_one_model_is_1(self) -> None:
        assert weights_of([np.zeros((self.TABLE.rows, 1))], self.TABLE, Task.REGRESSION) == (1.0,)
