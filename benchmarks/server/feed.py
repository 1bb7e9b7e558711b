"""Speed of reading rows from a table into one float32 array: the feed against ADBC and psycopg, in the same run.

336,776 rows × 12 columns of int2, int4, int8, float4, float8, numeric, boolean and date, some of them null. The feed is
measured inside real jobs (feed_child.py stands in for the trainer); the clients are measured in this
process, connected beforehand, with the faster of two queries for ADBC (numeric as it is, or cast by the server). Rounds
are interleaved and medians taken. `prepared_rows_per_s` covers everything up to the trainer's ordered, split and
standardised tables.
"""

from __future__ import annotations

import json
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import adbc_driver_postgresql.dbapi as adbc
import numpy as np
import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from benchmarks.checks import Goal
from benchmarks.runner import Run, goals_section
from benchmarks.server.cluster import fresh_cluster
from scripts.cluster import Cluster, child_python

ROWS = 336_776
ROUNDS = 7
DAY_US = 86_400_000_000
MIXED = """
    CREATE TABLE mixed AS SELECT
        (random() * 30000)::int2 AS c_int2,
        (random() * 1e9)::int4 AS c_int4,
        nullif((random() * 1000)::int4, 7) AS c_int4_null,
        (random() * 1e15)::int8 AS c_int8,
        random()::float4 AS c_float4,
        random() * 1e6 AS c_float8,
        CASE WHEN random() > 0.02 THEN random() END AS c_float8_null,
        (random() * 10000)::numeric(10, 2) AS c_numeric,
        (random() * 1000)::numeric(12, 4) AS c_numeric4,
        random() < 0.5 AS c_bool,
        date '2013-01-01' + (random() * 364)::int AS c_date,
        (random() * 100)::int2 AS y
    FROM generate_series(1, %s)
"""
QUERY = "SELECT * FROM mixed"
# Clients either receive numeric as it is, or let the server convert it
CAST_QUERY = """
    SELECT c_int2, c_int4, c_int4_null, c_int8, c_float4, c_float8, c_float8_null,
           c_numeric::float8 AS c_numeric, c_numeric4::float8 AS c_numeric4, c_bool, c_date, y FROM mixed
"""
DATE = 10  # index of the column
EPOCH = np.datetime64("2000-01-01", "D")

Matrix = NDArray[np.float32]


class Feed:
    """Jobs whose trainer measures instead of training."""

    def __init__(self, cluster: Cluster, conn: psycopg.Connection[Any]) -> None:
        self._cluster = cluster
        self._conn = conn
        self._folder = cluster.folder / "child"
        self._folder.mkdir()
        shutil.copy(Path(__file__).with_name("feed_child.py"), self._folder)
        conn.execute("""SELECT register_model('bench', '{"type": "mlp"}')""")

    def use(self, mode: str) -> None:
        """Select the measurement, `array` or `prepared`, from the next job on."""
        script = self._folder / mode
        script.write_text(f'#!/bin/sh\nexec "{child_python()}" "{self._folder}/feed_child.py" {mode}\n')
        script.chmod(0o755)
        self._cluster.configure({"pg_tensile.python": script})
        self._cluster.reload()
        deadline = time.monotonic() + 10
        while self._setting() != str(script):  # a new session has the settings of new workers
            if time.monotonic() > deadline:
                raise SystemExit("the server did not reload its configuration")
            time.sleep(0.02)

    def __call__(self) -> dict[str, Any]:
        row = self._conn.execute("SELECT train_model('bench', %s, 'y')", (QUERY,)).fetchone()
        assert row is not None
        try:
            self._conn.execute("SELECT wait_for_job(%s, '2 min')", row)
        except psycopg.Error as error:
            message = str(error.diag.message_primary)
        start = message.find("{")
        if start < 0:
            raise SystemExit(f"the job failed: {message}")
        result: dict[str, Any] = json.loads(message[start:])
        return result

    def _setting(self) -> str:
        with self._cluster.connect() as conn:
            row = conn.execute("SHOW pg_tensile.python").fetchone()
            assert row is not None
            return str(row[0])


def arrow_to_float32(table: pa.Table) -> Matrix:
    """Return the table as an array [rows, columns], NaN where it is null."""
    matrix = np.empty((table.num_rows, table.num_columns), np.float32)
    for index, column in enumerate(table.columns):
        if pa.types.is_date32(column.type):
            days = pc.subtract(column.cast(pa.int32()), int(EPOCH.astype(int)))
            column = pc.multiply(days.cast(pa.int64()), DAY_US)
        matrix[:, index] = column.cast(pa.float32(), safe=False).to_numpy()
    return matrix


def fetch_adbc(connection: Any, query: str) -> Matrix:
    with connection.cursor() as cursor:
        cursor.execute(query)
        return arrow_to_float32(cursor.fetch_arrow_table())


def fetch_psycopg(conn: psycopg.Connection[Any]) -> Matrix:
    """Fetch all rows by the binary protocol.

    Dates are fetched as the server's day numbers, because numpy converts no date to a float.
    """
    query = CAST_QUERY.replace("c_date,", "c_date - '2000-01-01'::date,")
    with conn.cursor(binary=True) as cursor:
        matrix = np.array(cursor.execute(query.encode()).fetchall(), np.float32)
    matrix[:, DATE] *= DAY_US
    return matrix


def timed(fetch: Callable[[], Matrix], sums: list[float]) -> float:
    started = time.perf_counter()
    matrix = fetch()
    seconds = time.perf_counter() - started
    if len(matrix) != ROWS or not np.allclose(np.nansum(matrix, axis=0, dtype=np.float64), sums, rtol=1e-6):
        raise SystemExit("the arrays differ")
    return seconds


def seconds_of(cluster: Cluster, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each round, by method."""
    with cluster.connect() as conn:
        conn.execute("SELECT setseed(0)")
        conn.execute(MIXED % ROWS)
        conn.execute("VACUUM ANALYZE mixed")
        conn.execute("CREATE EXTENSION pg_tensile CASCADE")
        feed = Feed(cluster, conn)
        feed.use("array")
        sums = feed()["sums"]
        seconds: dict[str, list[float]] = {name: [] for name in ("feed", "adbc", "adbc cast", "psycopg", "prepared")}
        uri = f"postgresql:///postgres?host={cluster.folder}&port={cluster.port}&user=postgres"
        with adbc.connect(uri) as arrow:
            for _ in range(rounds):
                seconds["feed"].append(feed()["seconds"])
                seconds["adbc"].append(timed(lambda: fetch_adbc(arrow, QUERY), sums))
                seconds["adbc cast"].append(timed(lambda: fetch_adbc(arrow, CAST_QUERY), sums))
                seconds["psycopg"].append(timed(lambda: fetch_psycopg(conn), sums))
        feed.use("prepared")
        seconds["prepared"] = [feed()["seconds"] for _ in range(3)]
    return seconds


def measure(run: Run) -> dict[str, Any]:
    with fresh_cluster({"shared_buffers": "256MB"}) as cluster:
        seconds = seconds_of(cluster, 1 if run.quick else ROUNDS)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "rows_per_s": round(ROWS / medians["feed"]),
        "ratio_vs_adbc": round(min(medians["adbc"], medians["adbc cast"]) / medians["feed"], 2),
        "ratio_vs_psycopg": round(medians["psycopg"] / medians["feed"], 2),
        "prepared_rows_per_s": round(ROWS / medians["prepared"]),
    }


GOALS = (
    Goal("rows_per_s", f"{ROWS:,} rows × 12 columns to the trainer's array, rows/s", ","),
    Goal("prepared_rows_per_s", "the same, standardised and split for validation, rows/s", ","),
    Goal("ratio_vs_adbc", "times as fast as ADBC, the faster of its two queries", ".2f", least=4),
    Goal("ratio_vs_psycopg", "times as fast as psycopg's fetchall", ".2f"),
)
BENCHMARK = goals_section("Feeding rows to a job", "feed", measure, GOALS)
