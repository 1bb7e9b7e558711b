"""Speed of predictions with a trained model: one row at a time inside a session, and whole queries against a client.

The model predicts the late arrival of flights, an MLP with embeddings, trained for one epoch, because speed
does not depend on the weights. Latency: `predict` of a row, timed in PL/pgSQL, row after row. Rate: `predict_rows` over
the year's departures, against a program with psycopg and PyTorch that fetches the same rows, predicts in batches of the
same size and discards the answers (its model is loaded beforehand). The join behind the rows is executed once for both.
Rounds are interleaved and medians taken. Latency is also measured with each of SPINS as pg_tensile.predict_spin in
turn, under the same load.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import psycopg
import torch
from numpy.typing import NDArray

from benchmarks import flights
from benchmarks.checks import Goal
from benchmarks.runner import Run, goals_section
from benchmarks.server.cluster import fresh_cluster
from pg_tensile.execution import models
from pg_tensile.execution.data.preprocessing import CategoryInput, Features, Inputs, Kind, Preprocessing
from pg_tensile.execution.training import checkpoint

Connection = psycopg.Connection[tuple[Any, ...]]

MODEL = "late_arrival"
SINGLE_ROWS = 20_000
ARCHITECTURE = {"type": "mlp", "hidden": [128, 128, 128, 64]}
ROUNDS = 5
SPINS = (0, 50, 150, 500)  # microseconds
SPIN_ROWS = 2000  # in a turn
BATCH = 8192
QUERY = "SELECT * FROM rows"
LATENCIES = """
    CREATE FUNCTION latencies(model text, n int) RETURNS SETOF float8 LANGUAGE plpgsql AS $$
    DECLARE
        r rows;
        started timestamptz;
    BEGIN
        FOR r IN SELECT * FROM rows LIMIT n LOOP
            started := clock_timestamp();
            PERFORM predict(model, r);
            RETURN NEXT extract(epoch FROM clock_timestamp() - started) * 1e6;
        END LOOP;
    END $$
"""


def stored_model(conn: Connection, model: str) -> tuple[torch.nn.Module, Preprocessing]:
    """Return the deployed version of a model, for evaluation, and its preprocessing."""
    row = conn.execute(
        """
        SELECT v.version_id, v.architecture, v.preprocessing FROM tensile.model_versions v
        JOIN tensile.models m ON m.model_id = v.model_id AND m.deployed_version = v.version
        WHERE m.model = %s
        """,
        (model,),
    ).fetchone()
    assert row is not None
    version, architecture, preprocessing = row
    fitted = Preprocessing.from_json(preprocessing)
    module = models.build(models.parse(architecture), fitted.model_inputs, fitted.outputs).eval()
    read = "SELECT data FROM tensile_internal.model_weights WHERE version = %s ORDER BY seq"
    chunks = conn.execute(read, (version,)).fetchall()
    checkpoint.load_model(module, checkpoint.from_bytes(b"".join(chunk for (chunk,) in chunks)))
    return module, fitted


class Client:
    """A program outside the server with the same model: psycopg, numpy and PyTorch."""

    def __init__(self, conn: Connection) -> None:
        self._conn = conn
        self._module, self._preprocessing = stored_model(conn, MODEL)
        fitted = self._preprocessing
        # The server converts times to numbers, because numpy does not accept Python's datetime
        expressions = [
            f"(extract(epoch FROM {f.name}) - 946684800)::float8 * 1e6" if f.kind == Kind.TIMESTAMP else f.name
            for f in fitted.features
        ]
        self._query = f"SELECT {', '.join(expressions)} FROM rows"

    @torch.inference_mode()
    def predict_all(self) -> float:
        """Predict all rows and return the sum of the predictions."""
        total = 0.0
        with self._conn.cursor(binary=True) as cursor:
            cursor.execute(self._query.encode())
            while rows := cursor.fetchmany(BATCH):
                total += float(self._predict(rows).sum())
        return total

    def _predict(self, rows: Sequence[tuple[Any, ...]]) -> torch.Tensor:
        fitted = self._preprocessing
        columns = list(zip(*rows, strict=True))
        numeric: list[NDArray[np.float64]] = []
        categories: list[CategoryInput] = []
        for feature, values in zip(fitted.features, columns, strict=True):
            if feature.kind == Kind.CATEGORY:
                places = {text: number for number, text in enumerate(dict.fromkeys(v for v in values if v is not None))}
                codes = fitted.codes(len(categories), places)
                indices = np.fromiter((places.get(value, -1) for value in values), np.int64, len(values))
                categories.append(CategoryInput(indices, np.array([*codes, 0], np.int64)))
            else:
                numeric.append(np.array(values, np.float64))
        features = fitted.apply(Inputs(len(rows), np.stack(numeric), categories, []))
        tensors = [torch.from_numpy(array) for array in features.flat()]
        logits = self._module(Features.from_flat(tensors))[:, 0].double()
        scale, shift = fitted.calibration or (1.0, 0.0)
        return torch.sigmoid(logits * scale + shift)


def set_up(conn: Connection) -> None:
    flights.load(conn)
    conn.execute("CREATE TABLE rows AS SELECT * FROM departures")
    conn.execute("VACUUM ANALYZE rows")
    conn.execute("CREATE EXTENSION pg_tensile CASCADE")
    conn.execute("SET pg_tensile.predict_timeout = '60 s'")
    conn.execute("SELECT register_model('late_arrival', %s)", (json.dumps(ARCHITECTURE),))
    job = conn.execute(
        "SELECT train_model('late_arrival', %s, 'late', epochs => 1, batch_size => 1024)", (QUERY,)
    ).fetchone()
    conn.execute("SELECT wait_for_job(%s)", job)
    conn.execute(LATENCIES)


def measure_latencies(conn: Connection, model: str, calls: int = SINGLE_ROWS) -> list[float]:
    """Return the microseconds of each call, sorted."""
    conn.execute("SELECT count(*) FROM latencies(%s, 1000)", (model,))  # warm up
    return sorted(row[0] for row in conn.execute("SELECT latencies(%s, %s)", (model, calls)).fetchall())


def p50_p99(latencies: Sequence[float]) -> tuple[float, float]:
    """Return the median and the 99th percentile of sorted latencies."""
    return statistics.median(latencies), latencies[len(latencies) * 99 // 100]


class Pass(NamedTuple):
    """One query with predict_rows."""

    seconds: float
    rows: int
    total: float  # of the predictions


def predict_all(conn: Connection, model: str, query: str) -> Pass:
    """Predict all rows of the query, which are counted in the server."""
    started = time.perf_counter()
    ask = "SELECT count(*), sum(prediction) FROM predict_rows(%s, %s)"
    rows, total = conn.execute(ask, (model, query)).fetchone() or (0, 0.0)
    return Pass(time.perf_counter() - started, rows, total)


def measure_spins(conn: Connection, rounds: int) -> dict[int, float]:
    """Return the median microseconds of a call by pg_tensile.predict_spin; turns are short, to share the same load."""
    latencies: dict[int, list[float]] = {spin: [] for spin in SPINS}
    for _ in range(rounds):
        for spin, latencies_us in latencies.items():
            conn.execute(f"SET pg_tensile.predict_spin = {spin}".encode())
            rows = conn.execute("SELECT latencies(%s, %s)", (MODEL, SPIN_ROWS)).fetchall()
            latencies_us += [row[0] for row in rows]
    conn.execute("RESET pg_tensile.predict_spin")
    return {spin: round(statistics.median(latencies_us), 1) for spin, latencies_us in latencies.items()}


def measure_rates(conn: Connection, rounds: int) -> tuple[int, list[float], list[float]]:
    """Return the rows, and the seconds of each round of predict_rows and of the client."""
    client = Client(conn)
    inside: list[float] = []
    outside: list[float] = []
    rows = 0
    for _ in range(rounds):
        seconds, rows, expected = predict_all(conn, MODEL, QUERY)
        inside.append(seconds)
        started = time.perf_counter()
        total = client.predict_all()
        outside.append(time.perf_counter() - started)
        if not np.isclose(expected, total, rtol=1e-4):
            raise SystemExit(f"the predictions differ: their sums are {expected} and {total}")
    return rows, inside, outside


def measure(run: Run) -> dict[str, Any]:
    rounds = 1 if run.quick else ROUNDS
    with fresh_cluster({"shared_buffers": "256MB"}) as cluster, cluster.connect() as conn:
        set_up(conn)
        latencies = measure_latencies(conn, MODEL)
        spins = measure_spins(conn, rounds)
        rows, inside, outside = measure_rates(conn, rounds)
    p50, p99 = p50_p99(latencies)
    return {
        "p50_us": round(p50, 1),
        "p99_us": round(p99, 1),
        "rows_per_s": round(rows / statistics.median(inside)),
        "ratio_vs_client": round(statistics.median(outside) / statistics.median(inside), 2),
        "p50_us_by_predict_spin": spins,
    }


GOALS = (
    Goal("p50_us", "predict of one row in a session, median µs", ".0f", most=150),
    Goal("p99_us", "the same, 99th percentile", ".0f"),
    Goal("rows_per_s", "predict_rows, rows/s", ",", least=200_000),
    Goal("ratio_vs_client", "times as fast as psycopg and PyTorch", ".2f", least=1),
)
BENCHMARK = goals_section("Predictions", "predict", measure, GOALS)
