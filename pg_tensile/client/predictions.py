"""The client's methods for what models predict, and how well."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from psycopg import sql

from pg_tensile.client.calls import ArgumentError, call
from pg_tensile.client.dialects import in_postgres
from pg_tensile.client.frames import (
    DRIFT,
    EVALUATION,
    EVALUATIONS,
    IMPORTANCE,
    PREDICTIONS,
    PROBABILITIES,
    Shape,
    frame,
)
from pg_tensile.client.session import Session
from pg_tensile.errors import noted

if TYPE_CHECKING:
    import pandas as pd

Json = dict[str, Any] | str  # a dict, or JSON as text

DRIFT_OF_MODEL = "SELECT * FROM tensile.drift WHERE model = coalesce(%s, model)"
EVALUATIONS_OF_MODEL = """
    SELECT at, metric, model, version, rows, value, baseline FROM tensile.evaluations WHERE model = %s ORDER BY id
"""


class Predictions:
    """Predictions and evaluations of models through a session."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def predict(
        self,
        model: str,
        query: str | None = None,
        memory_budget: int | str | None = None,
        *,
        source: str | None = None,
        read: str | None = None,
    ) -> pd.DataFrame:
        """Return a prediction for every row of a query, in the query's order (SQL: predict_rows, predict_table).

        Without a query, the rows are those of the one that was derived from the training query; `source` is the name of
        a table that it reads in place of its own. A prediction is the number, or for classes the label and its
        probability. The index is the number of the row, from 1. `memory_budget` is the device memory that the model may
        take, in bytes or as '200MB'; None means the model's own budget, or all that it needs. `read` as in `train`."""
        if query is not None and source is not None:
            hint = "Leave one of them out: the query names its tables itself."
            raise noted(ArgumentError("predict takes a query or a source, not both", hint))
        optional = {"memory_budget": memory_budget, "source": source}
        function = "predict_table" if query is None else "predict_rows"
        return self._table(function, PREDICTIONS, model, query, optional, read)

    def predict_probabilities(self, model: str, features: Json, memory_budget: int | str | None = None) -> pd.DataFrame:
        """Return the probabilities of all classes for a row, the most probable first (SQL: predict_probabilities).

        `features` are the row's: a dict with a key for each, or JSON as text. The index is the class."""
        required, optional = {"model": model, "features": features}, {"memory_budget": memory_budget}
        called, parameters = call(self._session.schema, "predict_probabilities", required, optional)
        return frame(PROBABILITIES, self._session.rows(sql.SQL("SELECT * FROM {}").format(called), parameters))

    def predict_all(
        self, model: str, features: Json, coverage: float | None = None, memory_budget: int | str | None = None
    ) -> dict[str, Any]:
        """Return everything about the prediction for one row (SQL: predict_all).

        Of a regression that is the value and, unless the model has none, its interval of this coverage; of a classifier
        the label, its probability and those of all labels. `features` as in `predict_probabilities`."""
        required = {"model": model, "features": features}
        optional = {"coverage": coverage, "memory_budget": memory_budget}
        answer: dict[str, Any] = self._session.answer("predict_all", required, optional)[0]
        return answer

    def evaluate(
        self,
        model: str,
        query: str,
        by: str | None = None,
        version: int | None = None,
        memory_budget: int | str | None = None,
        *,
        read: str | None = None,
    ) -> pd.DataFrame:
        """Return scores of the model's predictions for the rows of a query, which returns the target as well (SQL:
        evaluate_model).

        The index is the name of the metric; metrics that the rows do not define are NaN. Beside each `value` is that of
        a baseline without a model. With `by`, a column of the
        query, each of its values has scores of its own. `read` as in `train`."""
        optional = {"by": by, "version": version, "memory_budget": memory_budget}
        return self._table("evaluate_model", EVALUATION, model, query, optional, read)

    def importance(
        self,
        model: str,
        query: str,
        repeats: int | None = None,
        metric: str | None = None,
        seed: int | None = None,
        *,
        read: str | None = None,
    ) -> pd.DataFrame:
        """Return how much worse the model's predictions for the rows of a query become when the values of a feature are
        shuffled (SQL: feature_importance). The index is the name of the feature, the most important one first. `read`
        as in `train`."""
        optional = {"repeats": repeats, "metric": metric, "seed": seed}
        return self._table("feature_importance", IMPORTANCE, model, query, optional, read)

    def drift(self, model: str | None = None) -> pd.DataFrame:
        """Return the view tensile.drift of the model, or of all that are yours: predicted rows against the training
        rows, a row for each version and column."""
        return frame(DRIFT, self._session.rows(DRIFT_OF_MODEL, (model,)))

    def schedule_evaluation(
        self, model: str, query: str, every: timedelta | float | str, metric: str | None = None
    ) -> int:
        """Evaluate the deployed version again and again on the rows of a query; return the id of the schedule (SQL:
        schedule_evaluation). `metric` is the only one to be kept."""
        required = {"model": model, "query": query, "every": every}
        return int(self._session.answer("schedule_evaluation", required, {"metric": metric})[0])

    def unschedule_evaluation(self, model: str) -> bool:
        """Remove the model's schedule of evaluations (SQL: unschedule_evaluation). Return False if it has none."""
        return bool(self._session.answer("unschedule_evaluation", {"model": model})[0])

    def evaluations(self, model: str) -> pd.DataFrame:
        """Return the values of tensile.evaluations of a model.

        `evaluations(model)["value"].unstack().plot()` draws them."""
        return frame(EVALUATIONS, self._session.rows(EVALUATIONS_OF_MODEL, (model,)))

    def _table(
        self,
        function: str,
        shape: Shape,
        model: str,
        query: str | None,
        optional: dict[str, Any],
        read: str | None,
    ) -> pd.DataFrame:
        """Return the rows of a function of a model and, unless it is None, a query in the dialect `read`."""
        required = {"model": model} if query is None else {"model": model, "query": in_postgres(query, read)}
        called, parameters = call(self._session.schema, function, required, optional)
        return frame(shape, self._session.rows(sql.SQL("SELECT * FROM {}").format(called), parameters))
