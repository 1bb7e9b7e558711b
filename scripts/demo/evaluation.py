"""The demo's evaluation: the model's error on diamonds that it has not seen, beside a guess and gradient boosting."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from scripts.demo.screen import Connection, DemoError, console, rows_of, show
from scripts.demo.sql import ERRORS, KNOWN, UNSEEN

CATEGORIES = ("cut", "color", "clarity")


class Boosted(NamedTuple):
    """Mean absolute error of gradient boosting, and the seconds of its training."""

    error: float
    seconds: float


def evaluate(conn: Connection) -> None:
    """Show by how much the model is better than a guess, and what gradient boosting gets from the same rows."""
    errors = show(conn, ERRORS)
    if errors is None:
        raise DemoError("the table diamonds has no rows")
    _, _, guess, own = errors.rows[0]
    console.print(
        f"The model misses a price by ${own:,} on average, the guess by ${guess:,}: {guess / own:.0f} times as much.",
        style="bold",
    )
    with console.status("The same rows for scikit-learn"):
        boosted = gradient_boosting(conn)
    console.print(
        f"Gradient boosting (scikit-learn's HistGradientBoostingRegressor with its defaults), outside the database,"
        f" gets ${boosted.error:,.0f} from the same rows, in {boosted.seconds:.1f} s."
    )


def gradient_boosting(conn: Connection) -> Boosted:
    """Train HistGradientBoostingRegressor on the rows of the training and return its error on those of ERRORS."""
    import pandas as pd
    from sklearn.ensemble import HistGradientBoostingRegressor

    def columns(query: str) -> tuple[Any, Any]:
        result = rows_of(conn, query)
        if result is None:
            raise DemoError("the table diamonds has no rows")
        frame = pd.DataFrame(result.rows, columns=result.columns)
        prices = frame.pop("price")
        return frame.astype(dict.fromkeys(CATEGORIES, "category")), prices

    known, prices = columns(KNOWN)
    unseen, expected = columns(UNSEEN)
    started = time.monotonic()
    model = HistGradientBoostingRegressor(random_state=0).fit(known, prices)
    seconds = time.monotonic() - started
    return Boosted(float((expected - model.predict(unseen)).abs().mean()), seconds)
