"""The demo's evaluation: the first model on the month that it has not seen, beside gradient boosting."""

from __future__ import annotations

import time
from collections.abc import Mapping
from decimal import Decimal
from typing import NamedTuple

from scripts.demo.screen import Connection, DemoError, Rows, console, print_rows, rows_of, show
from scripts.demo.sql import CALIBRATION, EVALUATION, IMPORTANCE, LATE, ROWS_OF_BOTH

CATEGORIES = ("carrier", "origin", "dest", "engine")


class Boosted(NamedTuple):
    """Metrics of gradient boosting, and the seconds of its training."""

    metrics: dict[str, float]
    seconds: float


def evaluate(conn: Connection) -> None:
    """Show how good the first model is in December, beside gradient boosting, and what it looks at."""
    scores = show(conn, EVALUATION)
    if scores is None:
        raise DemoError("evaluate_model returned no metrics")
    compare_with_boosting(conn, dict(scores.rows))
    console.print("\nOf ten flights with a probability of 30 %, three should be late. A table of all probabilities:")
    show(conn, CALIBRATION)
    shares = rows_of(conn, LATE)
    if shares is not None:
        december, before = shares.rows[0]
        console.print(f"{december} % of December's flights were late, {before} % of those before.", style="dim")
    console.print(
        "\nBy which columns does it predict? Its log loss is so much worse when the values of a column are shuffled:"
    )
    show(conn, IMPORTANCE)


def compare_with_boosting(conn: Connection, own: Mapping[str, Decimal]) -> None:
    """Print the model's `own` metrics, and those of gradient boosting with the same rows and columns."""
    with console.status("The same rows for scikit-learn's HistGradientBoostingClassifier"):
        boosted = gradient_boosting(conn)
    console.print(
        f"\nscikit-learn's HistGradientBoostingClassifier, with its defaults, the same rows and columns and outside the"
        f" database, took {boosted.seconds:.0f} s to train. Both in December:"
    )
    rows = [(name, f"{own[name]:.4f}", f"{value:.4f}") for name, value in boosted.metrics.items()]
    print_rows(Rows(["metric", "late_arrival", "gradient boosting"], rows))
    console.print("A higher roc_auc is better, and a lower log_loss and brier.", style="dim")


def gradient_boosting(conn: Connection) -> Boosted:
    """Train HistGradientBoostingClassifier on all rows before December and return its metrics in December."""
    import pandas as pd
    from sklearn.ensemble import HistGradientBoostingClassifier
    from sklearn.metrics import brier_score_loss, log_loss, roc_auc_score

    result = rows_of(conn, ROWS_OF_BOTH)
    if result is None:
        raise DemoError("the view departures has no rows")
    frame = pd.DataFrame(result.rows, columns=result.columns)
    december, late = frame.pop("december").astype(bool), frame.pop("late").astype(bool)
    frame = frame.astype({name: "category" if name in CATEGORIES else "float64" for name in frame})
    started = time.monotonic()
    model = HistGradientBoostingClassifier(random_state=0).fit(frame[~december], late[~december])
    seconds = time.monotonic() - started
    probability = model.predict_proba(frame[december])[:, 1]
    metrics = {"roc_auc": roc_auc_score, "log_loss": log_loss, "brier": brier_score_loss}
    return Boosted({name: float(metric(late[december], probability)) for name, metric in metrics.items()}, seconds)
