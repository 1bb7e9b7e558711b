"""First predictions: after the start of a server, and of a new session; and evaluations and explanations.

- **server**: the first prediction after a start, in a session that has connected and asked something else before;
- **session**: connecting with a first query, and the first prediction that follows, in a server that has predicted;
- **evaluation**: evaluate_model of a few thousand rows, while the fork server is warm;
- **explanation**: the first explain_prediction after a start, and the second.

Times are medians, in milliseconds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import NamedTuple

from benchmarks.command import Row
from benchmarks.server.table_rates import Connection
from scripts.cluster import Cluster

FIRST = "SELECT predict('{model}', t) FROM rows t LIMIT 1"
EXPLAIN = "SELECT count(*) FROM (SELECT * FROM rows LIMIT 1) t, explain_prediction('{model}', t)"
EVALUATE = "SELECT count(*) FROM evaluate_model('{model}', 'SELECT * FROM train LIMIT {rows}')"


class FirstSizes(NamedTuple):
    """Numbers of starts, sessions, evaluations, and rows of an evaluation."""

    starts: int = 5
    sessions: int = 100
    evaluations: int = 3
    rows: int = 5_000


QUICK = FirstSizes(starts=1, sessions=5, evaluations=1, rows=1_000)


def took_ms(conn: Connection, query: str) -> float:
    began = time.perf_counter()
    conn.execute(query.encode()).fetchall()
    return (time.perf_counter() - began) * 1e3


def after_start(cluster: Cluster, query: str) -> tuple[float, float]:
    """Return the times of the first and of the second execution of a query after a start of the server."""
    cluster.restart()
    with cluster.connect() as conn:
        took_ms(conn, "SELECT 1")
        return took_ms(conn, query), took_ms(conn, query)


def new_session(cluster: Cluster, query: str) -> tuple[float, float]:
    """Return the times of connecting with a first query, and of another one."""
    began = time.perf_counter()
    with cluster.connect() as conn:
        conn.execute("SELECT 1").fetchall()
        return (time.perf_counter() - began) * 1e3, took_ms(conn, query)


def measure_first(cluster: Cluster, model: str, sizes: FirstSizes) -> Iterator[Row]:
    """Yield the times of a model, a row for each of the four subjects."""
    asked, explained = FIRST.format(model=model), EXPLAIN.format(model=model)
    evaluated = EVALUATE.format(model=model, rows=sizes.rows)
    # In turns, so that all have the same share of what else the machine does
    starts = [(after_start(cluster, asked), after_start(cluster, explained)) for _ in range(sizes.starts)]
    sessions = [new_session(cluster, asked) for _ in range(sizes.sessions)]
    with cluster.connect() as conn:
        took_ms(conn, evaluated)  # starts the fork server
        evaluations = [took_ms(conn, evaluated) for _ in range(sizes.evaluations)]
    predictions, explanations = zip(*starts, strict=True)
    first, second = medians(predictions)
    yield {"table": "server", "model": model, "first_ms": first, "second_ms": second}
    connecting, predicting = medians(sessions)
    yield {"table": "session", "model": model, "connecting_ms": connecting, "first_ms": predicting}
    yield {"table": "evaluation", "model": model, "rows": sizes.rows, "ms": statistics.median(evaluations)}
    first, second = medians(explanations)
    yield {"table": "explanation", "model": model, "first_ms": first, "second_ms": second}


def medians(pairs: list[tuple[float, float]] | tuple[tuple[float, float], ...]) -> tuple[float, float]:
    first, second = zip(*pairs, strict=True)
    return statistics.median(first), statistics.median(second)
