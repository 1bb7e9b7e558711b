"""The evaluation of the version that a job has trained, on the rows of a query: a part of the job's record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from psycopg import sql

from pg_tensile.client.calls import call
from pg_tensile.client.connection import Connection, ServerError, extension_schema

Row = dict[str, Any]

DEPLOYED = "SELECT deployed_version FROM tensile.models WHERE model_id = %s"


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Results of evaluate_model and feature_importance. `importance` is None if the version is not the deployed one,
    which feature_importance looks at."""

    query: str
    version: int
    scores: list[Row]  # of evaluate_model
    importance: list[Row] | None  # of feature_importance, the most important feature first


def evaluate(connection: Connection, job: Row, query: str) -> Evaluation:
    """Evaluate the version that a job has trained, with the rights of the connection's role; `job` is its row.

    Raises ServerError if the job has trained no version, or its model is gone, and psycopg.Error."""
    if job["model_id"] is None:
        message = f"job {job['job']} has no model to evaluate"
        hint = "It measures the device, or its model was dropped: leave the query out."
        raise ServerError(message, hint)
    if job["version"] is None:
        hint = "A job makes one when it finishes. wait_for_job waits for that; a failed or cancelled job makes none."
        raise ServerError(f"job {job['job']} is {job['state']} and has made no version to evaluate", hint)
    schema = extension_schema(connection)
    subject = {"model": job["model"], "query": query}

    def rows(function: str, **optional: Any) -> list[Row]:
        called, parameters = call(schema, function, subject, optional)
        return connection.execute(sql.SQL("SELECT * FROM {}").format(called), parameters).fetchall()

    scores = rows("evaluate_model", version=job["version"])
    deployed = connection.execute(DEPLOYED, (job["model_id"],)).fetchone()
    is_deployed = deployed is not None and deployed["deployed_version"] == job["version"]
    return Evaluation(query, job["version"], scores, rows("feature_importance") if is_deployed else None)
