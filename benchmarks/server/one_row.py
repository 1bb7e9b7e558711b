"""Predictions of one row after the other in a session: times, several sessions, and beside a training.

Times are measured in PL/pgSQL (predict.py, serving.py): in one session, in several busy ones, and in one while a job
trains a network on the same cores with the default of pg_tensile.nice.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator

from benchmarks.command import Row
from benchmarks.server.predict import measure_latencies, p50_p99
from benchmarks.server.serving import Server, Work, measure_sessions, percentile
from benchmarks.server.table_rates import TARGET, Connection
from scripts.cluster import Cluster

CALLS = 20_000
TRAINED, ARCHITECTURE = "beside", '{"type": "tabular"}'
STEPS = 50  # of the job, before anything is measured beside it
LOOK_S = 0.1


@contextlib.contextmanager
def training(conn: Connection) -> Iterator[None]:
    """Have a job train a network while the block runs."""
    if conn.execute("SELECT FROM tensile.models WHERE model = %s", (TRAINED,)).fetchone() is None:
        conn.execute("SELECT register_model(%s, %s)", (TRAINED, ARCHITECTURE))
    call = "SELECT train_model(%s, 'SELECT * FROM train', %s, epochs => 100000, batch_size => 512, options => %s)"
    (job,) = conn.execute(call, (TRAINED, TARGET, '{"early_stopping": {"patience": 1000}}')).fetchone() or (None,)
    try:
        look = "SELECT phase, step + epoch * coalesce(steps, 0) FROM tensile.progress WHERE job = %s"
        while (found := conn.execute(look, (job,)).fetchone()) is None or found[0] != "training" or found[1] < STEPS:
            (state,) = conn.execute("SELECT state FROM tensile.jobs WHERE job = %s", (job,)).fetchone() or (None,)
            if state in ("failed", "cancelled", "finished"):
                raise SystemExit(f"the job to measure beside is {state}")
            time.sleep(LOOK_S)
        yield
    finally:
        conn.execute("SELECT cancel_job(%s)", (job,))
        conn.execute("SELECT wait_for_job(%s)", (job,))


def measure_row(cluster: Cluster, conn: Connection, model: str, work: Work, calls: int = CALLS) -> Row:
    """Return the times of a prediction, alone and beside others, in microseconds, and rates of one and of sessions."""
    server = Server(cluster, model)
    p50, p99 = p50_p99(measure_latencies(conn, model, calls))
    rates: dict[int, list[float]] = {1: [], 8: []}
    p99s: dict[str, list[float]] = {"alone": [], "training": []}
    for _ in range(work.rounds):
        sessions = measure_sessions(server, work)
        for count, measured in rates.items():
            measured.append(sessions[f"per_s_{count}"])
        p99s["alone"].append(percentile([call.us for call in server.calls(work.seconds)], 99))
        with training(conn):
            p99s["training"].append(percentile([call.us for call in server.calls(work.seconds)], 99))
    per_s = {count: statistics.median(measured) for count, measured in rates.items()}
    p99_us = {beside: statistics.median(measured) for beside, measured in p99s.items()}
    return {
        "table": "row",
        "model": model,
        "p50_us": p50,
        "p99_us": p99,
        "per_s_1": per_s[1],
        "per_s_8": per_s[8],
        "sessions_times": per_s[8] / per_s[1],
        "p99_alone_us": p99_us["alone"],
        "p99_training_us": p99_us["training"],
        "training_times": p99_us["training"] / p99_us["alone"],
    }
