"""Rates of predictions for all rows of a table: within SELECT, by predict_rows, and beside them other ways.

Beside `mlp` and `tabular` these are their matrix products alone (products.py), beside `boosted` two libraries of
boosted trees over rows that a client has fetched (fetched.py). All ways take turns, and medians are taken.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import adbc_driver_postgresql.dbapi as adbc
import numpy as np
import psycopg
import pyarrow as pa
from psycopg import sql

from benchmarks.command import Row
from benchmarks.server.predict import Pass, predict_all, stored_model
from benchmarks.server.products import matrices, operations, rate_alone
from benchmarks.synthetic_table import FEATURES, synthetic_table
from scripts.cluster import Cluster

TARGET = "amount"
WORKERS = 2
ARCHITECTURES = {name: {"type": name} for name in ("mlp", "tabular", "boosted", "ensemble")}
EPOCHS = 2  # of networks, whose speed does not depend on the weights
# A plan with workers also for a small table, whose pages are divided as those of a large one
PARALLEL = {"parallel_setup_cost": 0, "parallel_tuple_cost": 0, "min_parallel_table_scan_size": 0}
NO_ROW = "WHERE n0 > 1e300"
IMAGES = """
    CREATE TABLE images AS
    SELECT r % 10 AS label,
        (SELECT array_agg(sin(r * 0.37 + i * 0.011 * (1 + r % 10))::float4) FROM generate_series(1, 28 * 28) i) AS image
    FROM generate_series(1, {rows}) r
"""
TEXTS = """
    CREATE TABLE texts AS
    SELECT r % 4 AS label, (SELECT string_agg('word' || abs(hashint4(r * 31 + i)) % (100 + 50 * (r % 4)), ' ')
                            FROM generate_series(1, 20) i) AS text
    FROM generate_series(1, {rows}) r
"""

Connection = psycopg.Connection[tuple[Any, ...]]


class Sizes(NamedTuple):
    """Numbers of rows and rounds, and seconds of a measurement that takes as long as one likes."""

    rows: int = 1_000_000
    trained: int = 40_000
    fetched: int = 50_000
    images: int = 10_000
    texts: int = 10_000
    rounds: int = 3
    rounds_of_trees: int = 2
    seconds: float = 2.0


QUICK = Sizes(500, 2_000, 500, 500, 200, 1, 1, 0.5)


class Source(NamedTuple):
    """Rows of which the predictor answers for: a table, how it is made, and the architecture."""

    table: str
    made: str
    target: str
    architecture: Mapping[str, Any]


FOR_PREDICTOR = {
    "cnn": Source("images", IMAGES, "label", {"type": "cnn", "shape": [28, 28]}),
    "text": Source("texts", TEXTS, "label", {"type": "mlp"}),
}


def load(cluster: Cluster, sizes: Sizes) -> None:
    """Make the tables `rows`, of the features, and `train`, with the target."""
    frame = synthetic_table(max(sizes.rows, sizes.trained))
    with adbc.connect(cluster.dsn()) as conn, conn.cursor() as cursor:
        features = pa.Table.from_pandas(frame[: sizes.rows][[*FEATURES]], preserve_index=False)
        cursor.adbc_ingest("rows", features, mode="create")
        train = pa.Table.from_pandas(frame[: sizes.trained][[*FEATURES, TARGET]], preserve_index=False)
        cursor.adbc_ingest("train", train, mode="create")
        conn.commit()
    with cluster.connect() as conn:
        conn.execute("CREATE EXTENSION pg_tensile CASCADE")
        conn.execute(f"ALTER TABLE rows SET (parallel_workers = {WORKERS})")
        conn.execute("VACUUM (FREEZE, ANALYZE) rows")
        conn.execute("VACUUM ANALYZE train")


def train(conn: Connection, model: str, architecture: Mapping[str, Any], query: str, target: str) -> None:
    """Train a model, once."""
    if conn.execute("SELECT FROM tensile.models WHERE model = %s", (model,)).fetchone() is not None:
        return
    conn.execute("SELECT register_model(%s, %s)", (model, json.dumps(architecture)))
    job = conn.execute("SELECT train_model(%s, %s, %s, epochs => %s)", (model, query, target, EPOCHS)).fetchone()
    state = conn.execute("SELECT wait_for_job(%s, '1 hour')", job).fetchone()
    if state != ("finished",):
        raise SystemExit(f"{model} was not trained: {state}")


def train_on_table(conn: Connection, model: str) -> None:
    train(conn, model, ARCHITECTURES[model], "SELECT * FROM train", TARGET)


# ---- the ways -------------------------------------------------------------------------------------------------------


def selecting(model: str, table: str, condition: str = "") -> sql.Composed:
    """Return the query for the number and the sum of the predictions."""
    text = f"SELECT count(*), sum(predict({{}}, t)) FROM {table} t {condition}"
    return sql.SQL(text).format(sql.Literal(model))


def predict_one(conn: Connection, model: str, table: str) -> None:
    """Have the model loaded, wherever it is evaluated."""
    conn.execute(sql.SQL(f"SELECT predict({{}}, t) FROM {table} t LIMIT 1").format(sql.Literal(model)))


def select_all(conn: Connection, model: str, table: str = "rows", workers: int = 0) -> Pass:
    """Predict all rows of a table within a SELECT, with parallel workers of that number."""
    conn.execute(f"SET max_parallel_workers_per_gather = {workers}".encode())
    started = time.perf_counter()
    rows, total = conn.execute(selecting(model, table)).fetchone() or (0, 0.0)
    return Pass(time.perf_counter() - started, rows, total)


def with_workers(conn: Connection, model: str) -> None:
    """Have the session take parallel workers, and fail if it does not."""
    for name, value in (PARALLEL | {"max_parallel_workers_per_gather": WORKERS}).items():
        conn.execute(f"SET {name} = {value}".encode())
    explain = sql.SQL("EXPLAIN (ANALYZE, FORMAT JSON) ") + selecting(model, "rows", NO_ROW)
    (explained,) = conn.execute(explain).fetchone() or ([],)
    if (found := launched(explained[0]["Plan"])) != WORKERS:
        raise SystemExit(f"{found} parallel workers were launched instead of {WORKERS}")


def launched(plan: Mapping[str, Any]) -> int:
    """Return the number of parallel workers that the nodes of an explained plan have launched."""
    return plan.get("Workers Launched", 0) + sum(launched(child) for child in plan.get("Plans", ()))


# ---- measuring ------------------------------------------------------------------------------------------------------


def take_turns(
    ways: Mapping[str, Callable[[], Pass]], rounds: int, beside: Callable[[], object] = lambda: None
) -> dict[str, float]:
    """Return the median seconds of each way; all have to make the same predictions. `beside` ends each round."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        passes = {name: way() for name, way in ways.items()}
        first, *others = passes.values()
        if any(one.rows != first.rows or not np.isclose(one.total, first.total, rtol=1e-4) for one in others):
            raise SystemExit(f"the predictions differ: {passes}")
        for name, one in passes.items():
            seconds[name].append(one.seconds)
        beside()
    return {name: statistics.median(values) for name, values in seconds.items()}


def measure_table(
    conn: Connection, model: str, sizes: Sizes, rounds: int, beside: Callable[[], object] = lambda: None
) -> dict[str, Any]:
    """Return the rates of a model for the table of numbers and categories."""
    predict_one(conn, model, "rows")
    with_workers(conn, model)

    def by_predict_rows() -> Pass:
        conn.execute("RESET max_parallel_workers_per_gather")
        return predict_all(conn, model, "SELECT * FROM rows")

    ways = {
        "serial": lambda: select_all(conn, model),
        "parallel": lambda: select_all(conn, model, workers=WORKERS),
        "predict_rows": by_predict_rows,
    }
    seconds = take_turns(ways, rounds, beside)
    return {
        "table": "rates",
        "model": model,
        "rows": sizes.rows,
        **{f"{way}_per_s": round(sizes.rows / took) for way, took in seconds.items()},
        "speedup": seconds["serial"] / seconds["parallel"],
        "serial_times": seconds["serial"] / seconds["predict_rows"],
        "parallel_times": seconds["parallel"] / seconds["predict_rows"],
    }


def measure_beside_products(conn: Connection, model: str, sizes: Sizes) -> Row:
    """Return the rates of a model and of its matrix products."""
    layers = matrices(stored_model(conn, model)[0])
    alone: list[float] = []
    row = measure_table(conn, model, sizes, sizes.rounds, lambda: alone.append(rate_alone(layers, sizes.seconds)))
    rate = statistics.median(alone)
    products = {"products_per_s": round(rate), "gflops": rate * operations(layers) / 1e9}
    return row | products | {"of_products": row["serial_per_s"] / rate}


def measure_for_predictor(conn: Connection, name: str, sizes: Sizes) -> Row:
    """Return the rates of a model that the predictor answers for."""
    source, rows = FOR_PREDICTOR[name], {"cnn": sizes.images, "text": sizes.texts}[name]
    query = f"SELECT * FROM {source.table}"
    conn.execute(source.made.format(rows=rows).encode())
    conn.execute(f"VACUUM ANALYZE {source.table}".encode())
    train(conn, name, source.architecture, query, source.target)
    predict_one(conn, name, source.table)
    ways = {
        "serial": lambda: select_all(conn, name, source.table),
        "predict_rows": lambda: predict_all(conn, name, query),
    }
    seconds = take_turns(ways, sizes.rounds)
    rates = {f"{way}_per_s": round(rows / took) for way, took in seconds.items()}
    times = {"serial_times": seconds["serial"] / seconds["predict_rows"]}
    return {"table": "predictor", "model": name, "rows": rows} | rates | times
