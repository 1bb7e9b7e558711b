"""Fitting of a model's baseline (baseline.py), and its metrics: those of a model with constant outputs.

Metrics of a training are weighted if its rows are, so their baseline is that of the weighted rows. The baseline that is
stored with the version is for evaluations, which have no weights. Needs numpy only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pg_tensile.execution.data.answers import target_values
from pg_tensile.execution.data.baseline import FREQUENCIES, LAST, MEAN, Baseline
from pg_tensile.execution.data.columns import Chunk, float_values
from pg_tensile.execution.data.dataset import Dataset, Table, together
from pg_tensile.execution.data.fitting import FittedPreprocessing
from pg_tensile.execution.data.metrics import MetricSums
from pg_tensile.execution.data.preprocessing import Preprocessing, Scaling, Task, standardise
from pg_tensile.execution.data.scores import EPSILON
from pg_tensile.execution.data.splits import KeyDivision

PIECE = 1 << 18  # rows that are summed up at once; the median is that of the first ones, which are a random sample
LEAST_GAIN = 0.01  # share of the baseline's error by which a model has to be better on any number of rows
CHANCE_ROWS = 2.0  # divided by the number of rows: what chance makes of it, as the epoch is chosen by the same rows
NAMES = {
    MEAN: "the mean of the training rows",
    LAST: "the last value before them",
    FREQUENCIES: "the frequencies of the classes",
}

Numbers = NDArray[np.float64]


# ---- fitting ----


def with_baseline(fitted: FittedPreprocessing, blocks: Iterable[Chunk], dataset: Dataset) -> FittedPreprocessing:
    """Return what was fitted with its baseline; `blocks` are all rows, `dataset` those with a target."""
    preprocessing = fitted.preprocessing
    baseline = _fit(preprocessing, dataset.training._replace(weight=None))
    division = fitted.division
    if preprocessing.task == Task.REGRESSION and division.by == "time" and dataset.validation.rows:
        assert isinstance(division, KeyDivision)
        last = Baseline(last=_newest(fitted, division, blocks))
        errors = [_metrics(each, preprocessing, dataset.validation).get("rmse", np.inf) for each in (last, baseline)]
        baseline = last if errors[0] < errors[1] else baseline
    return replace(fitted, preprocessing=replace(preprocessing, baseline=baseline))


def _fit(preprocessing: Preprocessing, table: Table) -> Baseline:
    """Return the baseline of the rows of a table, which count by their weights."""
    if preprocessing.task != Task.REGRESSION:
        labels = len(preprocessing.labels or ())
        counts = np.zeros(labels)
        for y, weight in _pieces(table):
            counts += np.bincount(y.astype(np.int64), weight, labels)
        return Baseline(frequencies=tuple((counts / counts.sum()).tolist()))
    total = weights = 0.0
    for y, weight in _pieces(table):
        total += float(weight @ target_values(y, preprocessing))
        weights += float(weight.sum())
    first, weight = next(_pieces(table))
    order = np.argsort(first, kind="stable")
    sums = np.cumsum(weight[order])
    middle = first[order][np.searchsorted(sums, sums[-1] / 2)]
    return Baseline(total / weights, float(target_values(middle, preprocessing)))


def _newest(fitted: FittedPreprocessing, division: KeyDivision, blocks: Iterable[Chunk]) -> float:
    """Return the mean target of the training rows with the newest time."""
    newest, total, rows = -1, 0.0, 0
    for block in blocks:
        part = fitted.training_part(block)
        keys = division.keys(part)
        newer = int(keys.max(initial=0))
        if newer < newest or not part.rows:
            continue
        values = float_values(part.columns[fitted.roles.target])[keys == newer]
        before, count = (total, rows) if newer == newest else (0.0, 0)
        newest, total, rows = newer, before + float(values.sum()), count + len(values)
    return total / rows


def _pieces(table: Table) -> Iterator[tuple[Numbers, Numbers]]:
    """Yield the encoded targets and the weights of a table, as float64 and piece by piece."""
    for start in range(0, table.rows, PIECE):
        rows = slice(start, start + PIECE)
        target = table.target[rows].astype(np.float64)
        yield target, np.ones(len(target)) if table.weight is None else table.weight[rows].astype(np.float64)


# ---- metrics ----


def constant_outputs(baseline: Baseline, preprocessing: Preprocessing) -> dict[str, Numbers]:
    """Return the outputs [outputs] of a model with the baseline's answers, by the name of the answer.

    The model is not calibrated."""
    if baseline.frequencies is not None:
        odds = np.log(np.maximum(baseline.frequencies, EPSILON))
        return {FREQUENCIES: odds[1:] - odds[:1] if preprocessing.task == Task.BINARY else odds}
    target = preprocessing.target
    scaling = Scaling.of(target.mean, target.std)
    return {
        name: standardise(target.transformed(np.array([number])), scaling)
        for name, number in baseline.to_json().items()
    }


def measured(preprocessing: Preprocessing, dataset: Dataset, crossed: bool = False) -> dict[str, Any]:
    """Return the metrics of the baseline as JSON: {"kind", "split", …}, by the names of a model's metrics.

    The rows are those for validation or, without such rows, the training rows; all of them if the metrics to compare
    with are those of a cross-validation (`crossed`)."""
    assert preprocessing.baseline is not None
    baseline = preprocessing.baseline
    if baseline.kind != LAST and dataset.training.weight is not None:
        baseline = _fit(preprocessing, dataset.training)
    split, table = ("validation", dataset.validation) if dataset.validation.rows else ("training", dataset.training)
    if crossed:
        table = together(dataset.training, dataset.validation)
    return {"kind": baseline.kind, "split": split} | _metrics(baseline, preprocessing, table)


def _metrics(baseline: Baseline, preprocessing: Preprocessing, table: Table) -> dict[str, float]:
    """Return the metrics of a baseline on the rows of a table, as far as they are defined."""
    preprocessing = replace(preprocessing, calibration=None)
    result: dict[str, float] = {}
    for name, outputs in constant_outputs(baseline, preprocessing).items():
        sums = MetricSums(preprocessing, ranks=True)
        for target, weight in _pieces(table):
            sums.add(np.broadcast_to(outputs, (len(target), len(outputs))), target, weight)
        metrics = sums.result(table.rows, None).to_json()
        del metrics["samples"]
        result |= {key: value for key, value in metrics.items() if value is not None and baseline.answer(key) == name}
    if "log_loss" in result:
        result["calibrated_log_loss"] = result["log_loss"]  # frequencies are calibrated
    return result


# ---- comparison ----


def shortfall(metrics: Mapping[str, Any]) -> list[str]:
    """Return a warning if a model is no better than its baseline; `metrics` are those of its version.

    It has to be better by either the squared or the absolute error, of probabilities by the log loss or the Brier
    score."""
    baseline = metrics["baseline"]
    own = metrics[baseline["split"]]
    classifies = baseline["kind"] == FREQUENCIES
    calibrated = own.get("calibrated_log_loss") is not None
    names = ("calibrated_log_loss" if calibrated else "log_loss", "brier") if classifies else ("rmse", "mae")
    pairs = [(own.get(name), baseline.get(name)) for name in names]
    gains = [1.0 - value / error for value, error in pairs if value is not None and error]
    if not gains or max(gains) >= LEAST_GAIN + CHANCE_ROWS / own["samples"]:
        return []
    value, error = pairs[0]
    metric, answer = "log_loss" if classifies else "rmse", NAMES[baseline["kind"]]
    degree = "hardly" if max(gains) > 0 else "no"
    return [
        f"the model is {degree} better than {answer}: {metric} {value:.4g} on the {baseline['split']} rows instead of"
        f" {error:.4g}; select features that say more about the target, check how the query joins them, or train for"
        " more epochs if they were few"
    ]
