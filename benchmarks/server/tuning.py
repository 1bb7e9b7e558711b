"""Twenty trials of tune_model beside a script with Optuna and PyTorch on the same cores.

The table is synthetic (synthetic_table.py). Both sides train the same architecture, an MLP with embeddings, from the
same space, with AdamW, the same batch size and number of epochs, and measure the validation rows after each epoch. The
script (tuning_script.py) is run in three ways, each with all cores for PyTorch, as is usual:

    runs      a process for each trial, which reads the table; the study goes on in Optuna's journal file
    study     one process for the study, which reads the table once
    pruned    the same, with Optuna's SuccessiveHalvingPruner

tune_model runs two trials at once, without pruning (against the first two), and with its halving (against the third).
It also keeps checkpoints and progress, stores the weights, and deploys the best version. Rounds are interleaved and
medians taken.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import psycopg
from psycopg.types.json import Jsonb

from benchmarks.answers.answers import store
from benchmarks.checks import Check
from benchmarks.results import Results
from benchmarks.runner import Run, Section, once
from benchmarks.server.cluster import fresh_cluster
from benchmarks.synthetic_table import synthetic_table
from benchmarks.tables import table
from scripts.cluster import child_python

SCRIPT = Path(__file__).with_name("tuning_script.py")
TRIALS, EPOCHS, BATCH_SIZE, ROWS, ROUNDS = 20, 6, 256, 20_000, 3
QUICK_ROWS, QUICK_EPOCHS = 5_000, 4
MOST = 0.6  # of the time of the runs
HALVING = {"min_epochs": 2, "factor": 3}
SPACE = {
    "hidden": [[64], [128], [128, 64], [256, 128]],
    "learning_rate": {"low": 3e-4, "high": 1e-2, "log": True},
    "dropout": {"low": 0.0, "high": 0.3},
}
TARGET = "late"


class Measured(NamedTuple):
    """Seconds of a way to tune, the least log loss of the validation rows, and the number of trials pruned."""

    seconds: float
    best: float
    pruned: int


class Size(NamedTuple):
    rows: int
    epochs: int


# ---- the ways -------------------------------------------------------------------------------------------------------


def in_database(conn: psycopg.Connection[Any], size: Size, halving: Mapping[str, int] | None, seed: int) -> Measured:
    """Tune with tune_model, from the call to the deployed version."""
    conn.execute("SELECT register_model('bench', '{\"type\": \"mlp\"}')")
    began = time.perf_counter()
    row = conn.execute(
        "SELECT tune_model('bench', %s, %s, space => %s, trials => %s, epochs => %s, batch_size => %s, parallel => 2,"
        " halving => %s, seed => %s, options => %s)",
        (f"SELECT {', '.join(columns())} FROM bench_rows", TARGET, Jsonb(SPACE), TRIALS, size.epochs, BATCH_SIZE,
         None if halving is None else Jsonb(halving), seed, Jsonb({"early_stopping": {"patience": 0}})),
    ).fetchone()  # fmt: skip
    conn.execute("SELECT wait_for_tuning(%s)", row)
    seconds = time.perf_counter() - began
    status = conn.execute("SELECT best_value, pruned FROM tensile.tunings WHERE tuning = %s", row).fetchone()
    assert status is not None
    conn.execute("SELECT drop_model('bench')")
    return Measured(seconds, *status)


def columns() -> list[str]:
    return [name for name in synthetic_table(1).columns if name != "amount"]


def by_script(dsn: str, size: Size, seed: int, *, runs: int = 1, halving: Mapping[str, int] | None = None) -> Measured:
    """Tune by `runs` processes, each of which makes its part of the trials."""
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        asked = {
            "dsn": dsn,
            "table": "bench_script_rows",
            "target": TARGET,
            "seed": seed,
            "threads": cores,
            "trials": TRIALS // runs,
            "epochs": size.epochs,
            "batch_size": BATCH_SIZE,
            "halving": halving,
            "storage": f"{folder}/journal.log" if runs > 1 else None,
        }
        began = time.perf_counter()
        for run in range(runs):
            # -P: select.py in the script's folder is not Python's module of that name
            command = [child_python(), "-P", str(SCRIPT), json.dumps(asked | {"seed": seed * runs + run})]
            done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
        seconds = time.perf_counter() - began
    result = json.loads(done.stdout.splitlines()[-1])
    return Measured(seconds, result["best"], result["pruned"])


def measure(run: Run) -> Iterator[dict[str, Any]]:
    """Yield the medians of each way."""
    size, rounds = (Size(QUICK_ROWS, QUICK_EPOCHS), 1) if run.quick else (Size(ROWS, EPOCHS), ROUNDS)
    with fresh_cluster() as cluster, cluster.connect() as conn:
        conn.execute("CREATE EXTENSION pg_tensile CASCADE")
        store(conn, "bench_rows", synthetic_table(size.rows))
        conn.execute(f"CREATE TABLE bench_script_rows AS SELECT {', '.join(columns())} FROM bench_rows")
        dsn = cluster.dsn()
        ways: dict[str, Callable[[int], Measured]] = {
            "tune_model": lambda seed: in_database(conn, size, None, seed),
            "runs": lambda seed: by_script(dsn, size, seed, runs=TRIALS),
            "study": lambda seed: by_script(dsn, size, seed),
            "tune_model, halving": lambda seed: in_database(conn, size, HALVING, seed),
            "pruned": lambda seed: by_script(dsn, size, seed, halving=HALVING),
        }
        measured = [{way: tune(seed) for way, tune in ways.items()} for seed in range(rounds)]
    for way in ways:
        of_the_way = [in_round[way] for in_round in measured]
        medians = Measured(*map(statistics.median, zip(*of_the_way, strict=True)))
        yield {"way": way, **medians._asdict(), "rounds": rounds, "rows": size.rows, "epochs": size.epochs}


# ---- the document ---------------------------------------------------------------------------------------------------


def of_the_runs(results: Results) -> dict[str, float]:
    """Return the time of each way over that of the runs of the script."""
    seconds = {row["way"]: row["seconds"] for row in results.rows()}
    return {way: own / seconds["runs"] for way, own in seconds.items()}


def checks(results: Results) -> list[Check]:
    ratio = of_the_runs(results)["tune_model"]
    return [Check("tuning", f"time of {TRIALS} trials, of that of as many runs of the script", f"{ratio:.0%}",
                  f"≤ {MOST:.0%}", ratio <= MOST)]  # fmt: skip


def tables(results: Results) -> list[str]:
    rows, ratios = results.rows(), of_the_runs(results)
    size = Size(rows[0]["rows"], rows[0]["epochs"])
    shown = [
        (row["way"], f"{row['seconds']:,.1f}", f"{ratios[row['way']]:.0%}", f"{row['best']:.4f}", f"{row['pruned']:g}")
        for row in rows
    ]
    what = f"{TRIALS} trials on {size.rows:,} rows, a fifth of them for validation, in {size.epochs} epochs."
    return [what, "", *table(("way", "s", "of the runs' time", "log loss", "pruned"), shown)]


BENCHMARK = Section("Tuning", once("rounds", measure), tables, checks)
