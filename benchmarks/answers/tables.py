"""Times, memory, intervals and attributions of the default of train_model, on a large table.

All is measured through SQL in a server of its own, on a table of 12 numbers and 8 categories
(benchmarks/synthetic_table.py), for a regression and a classification:

- training on 40,000 rows, beside scikit-learn's HistGradientBoosting on the same rows, LightGBM with 300 rounds and
  early stopping, and a training of the network that is nowhere cut short;
- the time until the first version predicts a row, on a server just started and later;
- `predict` of one row, in the server and from a client, and `predict_rows` of a million rows;
- the share of held-out rows inside `predict_interval`, and the error of the sums of `explain_prediction`;
- the memory of `evaluate_model` over five million rows beside that over a hundredth of them;
- the memory of a training with a million rows, by `pg_tensile.dataset_cache`.

Memory is that of the child that executes the job: its anonymous memory, sampled, because pages of mapped files, which
the kernel takes back at any time, count in the resident set (RSS).
"""

from __future__ import annotations

import contextlib
import json
import statistics
import time
from collections.abc import Iterator, Mapping
from math import sqrt
from typing import Any, NamedTuple

import psycopg

from benchmarks.answers.answers import store, through_sql
from benchmarks.answers.peers import hist_gradient_boosting, lightgbm_stopped_early
from benchmarks.answers.problems import Problem, error
from benchmarks.checks import Check
from benchmarks.results import Results
from benchmarks.runner import Run, Section, once
from benchmarks.server.cluster import fresh_cluster
from benchmarks.server.db import TRAINER, kind_of
from benchmarks.server.predict import LATENCIES, measure_latencies, p50_p99, predict_all
from benchmarks.server.sampling import sampled
from benchmarks.server.soak import process_sample
from benchmarks.synthetic_table import FEATURES, TARGETS, synthetic_table
from benchmarks.tables import table
from scripts.cluster import Cluster

MODEL = "m"  # as through_sql names it
QUANTILES = "with_quantiles"
COLUMNS = ", ".join(FEATURES)
COVERAGES = (0.8, 0.9, 0.95)
MIB = 1 << 20
SAMPLE_S = 0.1

ENDLESS = """{"early_stopping": {"patience": 1000}, "learning_rate_schedule": "cosine"}"""
ENDLESS_EPOCHS = 64  # at most as many as a small table gets
FIRSTS = 3  # of which the median counts

# Goals
SECONDS, PEER_TIMES = 60.0, 15.0  # of a training, if these are more than as many times LightGBM's
FIRST_SECONDS = 5.0
LEVEL = 0.99  # part of the score of the training that is nowhere cut short
P50_US = 300.0
ROWS_PER_S = 150_000.0
COVERAGE_ERROR = 0.01
ATTRIBUTION_ERROR = 1e-5  # in standard deviations of the target
EVALUATED_BYTES = 160.0  # for each row, at the end, when all scores are computed
# Memory of a training beyond that of a small table: its share of the cache and, whatever the number of rows, three
# windows of 64 MiB (batches.py), blocks that are prepared, and a larger batch
CACHE_SHARE, CACHE_CONSTANT = 1.5, 384 * MIB

Connection = psycopg.Connection[Any]


class Sizes(NamedTuple):
    """Numbers of rows, calls and rounds, and a cache."""

    train: int = 40_000
    held_out: int = 20_000
    calls: int = 5_000
    predicted: int = 1_000_000
    rounds: int = 5
    explained: int = 100
    evaluated: int = 5_000_000
    trained: int = 1_000_000
    cache_mib: int = 64


QUICK = Sizes(4_000, 2_000, 500, 20_000, 3, 10, 100_000, 40_000, 1)
LARGE_CACHE_MIB = 4096


# ---- training -------------------------------------------------------------------------------------------------------


def measure_training(conn: Connection, problem: Problem) -> dict[str, Any]:
    """Train the default on the problem, and others on the same rows; scores are R² or accuracy of the held-out."""
    endless, _ = through_sql(conn, problem, 0, ENDLESS_EPOCHS, ENDLESS)
    held, training = through_sql(conn, problem, 0)
    started = time.perf_counter()
    peer = hist_gradient_boosting(problem, 0)
    peer_seconds = time.perf_counter() - started
    started = time.perf_counter()
    lightgbm_stopped_early(problem)
    lightgbm_seconds = time.perf_counter() - started
    metric = "r2" if problem.is_regression else "accuracy"
    return {
        **training,
        "metric": metric,
        "score": 1.0 - error(problem, held),
        "peer_seconds": round(peer_seconds, 1),
        "peer_score": 1.0 - error(problem, peer),
        "lightgbm_seconds": round(lightgbm_seconds, 1),
        "endless_score": 1.0 - error(problem, endless),
    }


def measure_first(problem: Problem) -> dict[str, Any]:
    """Measure the seconds until the first version has predicted a row: of a server's first job, and of later ones."""
    seconds = []
    with fresh_cluster() as cluster, cluster.connect() as conn:
        conn.execute("CREATE EXTENSION pg_tensile CASCADE")
        store(conn, "train", problem.train)
        query = f"SELECT {COLUMNS}, {problem.target} FROM train"
        for number in range(1 + FIRSTS):
            started = time.perf_counter()
            job = one(conn, "SELECT train_model('first', %s, %s, seed => %s)", query, problem.target, number)
            one(conn, "SELECT wait_for_first_version(%s, '1 hour')", *job)
            one(conn, "SELECT predict('first', t) FROM train t LIMIT 1")
            seconds.append(time.perf_counter() - started)
            one(conn, "SELECT cancel_job(%s)", *job)
            one(conn, "SELECT wait_for_job(%s)", *job)
    return {
        "first_seconds": round(statistics.median(seconds[1:]), 1),
        "first_after_start_seconds": round(seconds[0], 1),
    }


def one(conn: Connection, query: str, *parameters: Any) -> tuple[Any, ...]:
    """Return the only row."""
    row = conn.execute(query.encode(), parameters).fetchone()
    assert row is not None
    return tuple(row)


# ---- predictions ----------------------------------------------------------------------------------------------------


def many(rows: int, table: str, stored: int) -> str:
    """Return a query for this number of rows of a table of `stored` rows, which it repeats."""
    return f"SELECT t.* FROM {table} t, generate_series(1, {-(-rows // stored)}) LIMIT {rows}"


def measure_predictions(conn: Connection, sizes: Sizes) -> dict[str, Any]:
    """Measure calls of predict in the server and from a client, and rows per second of predict_rows."""
    p50, p99 = p50_p99(measure_latencies(conn, MODEL, sizes.calls))
    client_p50, client_p99 = p50_p99(client_latencies(conn, sizes))
    query = many(sizes.predicted, "rows", sizes.train)
    passes = [predict_all(conn, MODEL, query) for _ in range(sizes.rounds)]
    return {
        "p50_us": round(p50, 1),
        "p99_us": round(p99, 1),
        "client_p50_us": round(client_p50, 1),
        "client_p99_us": round(client_p99, 1),
        "rows_per_s": round(sizes.predicted / statistics.median(turn.seconds for turn in passes)),
    }


def client_latencies(conn: Connection, sizes: Sizes) -> list[float]:
    """Return the microseconds of each call from a client, with a prepared statement and the row as jsonb, sorted."""
    rows = [row for (row,) in conn.execute("SELECT to_jsonb(r)::text FROM rows r LIMIT %s", (sizes.calls,))]
    latencies = []
    for row in rows:
        started = time.perf_counter()
        conn.execute("SELECT predict('m', %s::jsonb)", (row,), prepare=True).fetchone()
        latencies.append((time.perf_counter() - started) * 1e6)
    return sorted(latencies)


# ---- intervals and attributions -------------------------------------------------------------------------------------

INSIDE = """
    SELECT avg((amount BETWEEN i.lower AND i.upper)::int)::float8, avg(i.upper - i.lower)
    FROM test t, predict_interval(%s, t, %s) i
"""
SUMS = f"""
    SELECT max(abs(e.sum - e.prediction)) / deviation, (max(e.base) - min(e.base)) / deviation
    FROM (SELECT stddev(amount) AS deviation FROM train) d,
        (SELECT predict('m', t) AS prediction, sum(x.attribution) AS sum,
             sum(x.attribution) FILTER (WHERE x.feature IS NULL) AS base
         FROM (SELECT {COLUMNS} FROM test LIMIT %s) t, explain_prediction('m', t) x GROUP BY t.*) e
    GROUP BY deviation
"""


CONFORMAL_ROWS = """
    SELECT (v.preprocessing -> 'conformal' -> 'rows')::int
    FROM tensile.model_versions v JOIN tensile.models m ON m.model_id = v.model_id AND v.version = m.deployed_version
    WHERE m.model = %s
"""


def measure_intervals(conn: Connection, sizes: Sizes) -> list[dict[str, Any]]:
    """Measure the share of held-out rows inside intervals, for the model and one that has learned quantiles."""
    options = {"quantiles": [0.05, 0.95]}
    query = f"SELECT {COLUMNS}, amount FROM train"
    job = one(conn, "SELECT train_model(%s, %s, 'amount', options => %s)", QUANTILES, query, json.dumps(options))
    conn.execute("SELECT wait_for_job(%s, '1 hour')", job)
    rows = []
    for model in (MODEL, QUANTILES):
        (validation,) = one(conn, CONFORMAL_ROWS, model)
        for coverage in COVERAGES:
            inside, width = one(conn, INSIDE, model, coverage)
            spread = sqrt(coverage * (1.0 - coverage) * (1.0 / validation + 1.0 / sizes.held_out))
            row = {"quantiles": model == QUANTILES, "coverage": coverage, "inside": inside, "width": width}
            rows.append(row | {"validation_rows": validation, "spread": spread})
    return rows


ATTRIBUTIONS = {
    "sum": "largest difference between a prediction and the sum of its attributions",
    "base": "differences between rows of the attribution without a feature, which is the same for all",
}


# ---- memory ---------------------------------------------------------------------------------------------------------


class Peak:
    """The largest sizes of a trainer, by kind of memory (see soak.process_sample)."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.sizes: dict[str, int] = {}

    def look(self) -> None:
        for pid, command in self._cluster.processes().items():
            if kind_of(command) == TRAINER:
                with contextlib.suppress(OSError, KeyError):  # it has ended
                    for key, size in process_sample(pid)[0].items():
                        self.sizes[key] = max(size, self.sizes.get(key, 0))


@contextlib.contextmanager
def measured_job(cluster: Cluster, rows: list[dict[str, Any]], about: Mapping[str, Any]) -> Iterator[None]:
    """Add a row about the job that the block runs: seconds, and the largest sizes of its process."""
    peak = Peak(cluster)
    started = time.perf_counter()
    with sampled(peak.look, SAMPLE_S):
        yield
        seconds = time.perf_counter() - started
    rate = {"seconds": round(seconds, 1), "rows_per_s": round(about["rows"] / seconds)}
    rows.append({**about, **rate, **{f"{key.lower()}_bytes": size for key, size in peak.sizes.items()}})


def measure_evaluations(cluster: Cluster, conn: Connection, sizes: Sizes, task: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for count in (sizes.evaluated // 100, sizes.evaluated):
        with measured_job(cluster, rows, {"task": task, "rows": count}):
            one(conn, "SELECT count(*) FROM evaluate_model('m', %s)", many(count, "train", sizes.train))
    return rows


def measure_trainings(cluster: Cluster, sizes: Sizes) -> list[dict[str, Any]]:
    """Train for one epoch: on the table with a small cache, and on many rows with a small and with a large one."""
    rows: list[dict[str, Any]] = []
    small, large = sizes.cache_mib, LARGE_CACHE_MIB
    for count, cache in ((sizes.train, small), (sizes.trained, small), (sizes.trained, large)):
        cluster.configure({"pg_tensile.dataset_cache": f"{cache}MB"})
        cluster.restart()
        query = f"SELECT {COLUMNS}, late FROM ({many(count, 'train', sizes.train)}) t"
        with cluster.connect() as conn, measured_job(cluster, rows, {"rows": count, "cache_mib": cache}):
            job = one(conn, "SELECT train_model('large', %s, 'late', epochs => 1)", query)
            conn.execute("SELECT wait_for_job(%s, '1 hour')", job)
    return rows


# ---- measuring ------------------------------------------------------------------------------------------------------


def rows(run: Run) -> Iterator[dict[str, Any]]:
    """Yield the rows of TABLES, in the tables of these names and `attributions`."""
    sizes, settings = QUICK if run.quick else Sizes(), {"shared_buffers": "256MB", "pg_tensile.predict_timeout": "60s"}
    with fresh_cluster(settings) as cluster, cluster.connect() as conn:
        conn.execute("CREATE EXTENSION pg_tensile CASCADE")
        frame = synthetic_table(sizes.train + sizes.held_out)
        for task, target in TARGETS.items():
            columns = frame[[*FEATURES, target]]
            problem = Problem(task, target, columns[: sizes.train], columns[sizes.train :].reset_index(drop=True))
            row = {"table": "tasks", "task": task} | measure_training(conn, problem) | measure_first(problem)
            if task == "regression":
                conn.execute(f"CREATE TABLE rows AS SELECT {COLUMNS} FROM train".encode())
                conn.execute("VACUUM ANALYZE rows")
                conn.execute(LATENCIES)
                yield from ({"table": "intervals", **interval} for interval in measure_intervals(conn, sizes))
                yield {"table": "attributions"} | dict(zip(ATTRIBUTIONS, one(conn, SUMS, sizes.explained), strict=True))
            yield row | measure_predictions(conn, sizes)
            evaluations = measure_evaluations(cluster, conn, sizes, task)
            yield from ({"table": "evaluations", **evaluation} for evaluation in evaluations)
        yield from ({"table": "trainings", **trained} for trained in measure_trainings(cluster, sizes))


# ---- the document ---------------------------------------------------------------------------------------------------


def checks(results: Results) -> list[Check]:
    checked = []
    for row in results.rows("tasks"):
        task, seconds, rate = row["task"], row["seconds"], row["rows_per_s"]
        most, level = max(SECONDS, PEER_TIMES * row["lightgbm_seconds"]), row["score"] / row["endless_score"]
        checked += [
            Check("training", f"{task}: seconds", f"{seconds:.0f}", f"≤ {most:.0f}", seconds <= most),
            Check("training", f"{task}: seconds until the first prediction", f"{row['first_seconds']:.1f}",
                  f"≤ {FIRST_SECONDS:.0f}", row["first_seconds"] <= FIRST_SECONDS),
            Check("training", f"{task}: score over that of a training without an end", f"{level:.4f}", f"≥ {LEVEL}",
                  level >= LEVEL),
            Check("predictions", f"{task}: predict of one row, median µs", f"{row['p50_us']:.0f}",
                  f"below {P50_US:.0f}", row["p50_us"] < P50_US),
            Check("predictions", f"{task}: the same from a client", f"{row['client_p50_us']:.0f}",
                  f"below {P50_US:.0f}", row["client_p50_us"] < P50_US),
            Check("predictions", f"{task}: predict_rows, rows/s", f"{rate:,}", f"at least {ROWS_PER_S:,.0f}",
                  rate >= ROWS_PER_S),
        ]  # fmt: skip
    for row in results.rows("intervals"):
        what = f"rows inside, {'quantiles' if row['quantiles'] else 'split conformal'}, {row['coverage']}"
        holds = abs(row["inside"] - row["coverage"]) <= COVERAGE_ERROR
        checked.append(Check("intervals", what, f"{row['inside']:.4f}", f"within {COVERAGE_ERROR}", holds))
    (attributions,) = results.rows("attributions")
    for key, what in ATTRIBUTIONS.items():
        deviation = attributions[key]
        holds = deviation <= ATTRIBUTION_ERROR
        checked.append(Check("attributions", what, f"{deviation:.1e}", f"≤ {ATTRIBUTION_ERROR}", holds))
    for task in TARGETS:
        row_bytes = evaluated_bytes([row for row in results.rows("evaluations") if row["task"] == task])
        what = f"{task}: bytes that evaluate_model takes for a further row"
        holds = row_bytes <= EVALUATED_BYTES
        checked.append(Check("evaluation", what, f"{row_bytes:.0f}", f"≤ {EVALUATED_BYTES:.0f}", holds))
    small, cached, _ = results.rows("trainings")
    beyond = cached["anonymous_bytes"] - small["anonymous_bytes"]
    most = CACHE_SHARE * cached["cache_mib"] * MIB + CACHE_CONSTANT
    what = f"memory for {cached['rows']:,} rows beyond {small['rows']:,}, MiB"
    checked.append(Check("trainings", what, f"{beyond / MIB:.0f}", f"≤ {most / MIB:.0f}", beyond <= most))
    return checked


def evaluated_bytes(rows: list[Mapping[str, Any]]) -> float:
    """Return the memory of an evaluation for each row, for those of few and of many rows."""
    few, many = rows
    return float(many["anonymous_bytes"] - few["anonymous_bytes"]) / (many["rows"] - few["rows"])


TABLES = {
    "training": (
        *("task", "seconds", "first prediction, s", "after a start", "epochs", "metric", "score", "without an end"),
        *("HistGradientBoosting, s", "its score", "LightGBM, s"),
    ),
    "predictions": ("task", "p50, µs", "p99, µs", "client's p50", "client's p99", "predict_rows, rows/s"),
    "intervals": ("learned", "asked", "inside", "its spread", "width", "validation rows"),
    "memory": ("job", "rows", "cache, MiB", "seconds", "anonymous, MiB", "RSS, MiB"),
}


def table_rows(results: Results) -> dict[str, list[tuple[str, ...]]]:
    """Return the rows of TABLES."""
    tasks = results.rows("tasks")
    training = [
        (row["task"], f"{row['seconds']:.1f}", f"{row['first_seconds']:.1f}",
         f"{row['first_after_start_seconds']:.1f}", str(row["epochs"]), row["metric"], f"{row['score']:.4f}",
         f"{row['endless_score']:.4f}", f"{row['peer_seconds']:.1f}", f"{row['peer_score']:.4f}",
         f"{row['lightgbm_seconds']:.1f}")
        for row in tasks
    ]  # fmt: skip
    keys = ("p50_us", "p99_us", "client_p50_us", "client_p99_us")
    predictions = [(row["task"], *(f"{row[key]:.0f}" for key in keys), f"{row['rows_per_s']:,}") for row in tasks]
    intervals = [
        ("mean and quantiles" if row["quantiles"] else "mean", f"{row['coverage']}", f"{row['inside']:.4f}",
         f"{row['spread']:.4f}", f"{row['width']:.2f}", f"{row['validation_rows']:,}")
        for row in results.rows("intervals")
    ]  # fmt: skip
    evaluations, trainings = results.rows("evaluations"), results.rows("trainings")
    jobs: list[dict[str, Any]] = [{"job": f"evaluation, {row['task']}", "cache_mib": ""} | row for row in evaluations]
    jobs += [{"job": "training, one epoch"} | row for row in trainings]
    memory = [
        (row["job"], f"{row['rows']:,}", str(row["cache_mib"]), f"{row['seconds']:.1f}",
         f"{row['anonymous_bytes'] / MIB:.0f}", f"{row['rss_bytes'] / MIB:.0f}")
        for row in jobs
    ]  # fmt: skip
    return {"training": training, "predictions": predictions, "intervals": intervals, "memory": memory}


def tables(results: Results) -> list[str]:
    rows = table_rows(results)
    return [line for name, headings in TABLES.items() for line in table(headings, rows[name])]


BENCHMARK = Section("Large tables", once("all", rows), tables, checks)
