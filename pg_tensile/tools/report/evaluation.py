"""The numbers of a report about the version that the job has trained: metrics, calibration, residuals, importances."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pg_tensile.client import evaluation as client


@dataclass(frozen=True)
class Bin:
    """A tenth of the rows, in the order of the predicted probability."""

    quantile: float
    probability: float  # mean of the predictions
    frequency: float  # share of the rows where it came true
    rows: int


@dataclass(frozen=True)
class Residual:
    """A quantile of target minus prediction."""

    quantile: float
    value: float


@dataclass(frozen=True)
class Importance:
    """How much worse the metric becomes when the values of a feature are shuffled: mean and standard deviation."""

    feature: str
    importance: float
    deviation: float


@dataclass(frozen=True)
class Evaluation:
    """Results on the rows of a query. Classifications have a calibration, regressions have residuals."""

    query: str
    version: int
    metrics: dict[str, float | None]  # those of evaluate_model that are one number
    baselines: dict[str, float | None]  # of each of them, without a model
    calibration: list[Bin]
    residuals: list[Residual]
    importance_metric: str | None
    importance: list[Importance] | None  # None: the version is not the deployed one


def evaluation_of(result: client.Evaluation) -> Evaluation:
    """Return the facts of an evaluation; numbers that are not finite are None or left out."""
    numbers = [row | {"value": _finite(row["value"]), "baseline": _finite(row["baseline"])} for row in result.scores]
    single = [row for row in numbers if row["quantile"] is None and row["metric"] != "confusion"]
    by_quantile: dict[float, dict[str, float]] = {}
    for row in numbers:
        if row["quantile"] is not None and row["value"] is not None:
            by_quantile.setdefault(row["quantile"], {})[row["metric"]] = row["value"]
    bins = {quantile: values for quantile, values in by_quantile.items() if "calibration_rows" in values}
    residuals = {quantile: values for quantile, values in by_quantile.items() if "residual_quantile" in values}
    features = result.importance
    return Evaluation(
        query=result.query,
        version=result.version,
        metrics={row["metric"]: row["value"] for row in single},
        baselines={row["metric"]: row["baseline"] for row in single},
        calibration=[
            Bin(
                quantile,
                values["calibration_probability"],
                values["calibration_frequency"],
                int(values["calibration_rows"]),
            )
            for quantile, values in sorted(bins.items())
        ],
        residuals=[Residual(quantile, values["residual_quantile"]) for quantile, values in sorted(residuals.items())],
        importance_metric=features[0]["metric_used"] if features else None,
        importance=None
        if features is None
        else [
            Importance(row["feature"], row["importance"], _finite(row["deviation"]) or 0.0)
            for row in features
            if _finite(row["importance"]) is not None
        ],
    )


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value
