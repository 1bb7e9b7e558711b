"""`make bench-tuning`: twenty trials of tune_model beside a script with Optuna and PyTorch on the same cores.

The table is synthetic (synthetic_table.py). Both sides train the same architecture, an MLP with embeddings, from the
same space, with AdamW, the same batch size and number of epochs, and measure the validation rows after each epoch. The
script (tuning_script.py) is run in three ways, each with all cores for PyTorch, as is usual:

    runs      a process for each trial, which reads the table; the study goes on in Optuna's journal file
    study     one process for the study, which reads the table once
    pruned    the same, with Optuna's SuccessiveHalvingPruner

tune_model runs two trials at once, without pruning (against the first two), and with its halving (against the third).
It also keeps checkpoints and progress, stores the weights, and deploys the best version. Rounds are interleaved;
medians and their ratios go to benchmarks/results/tuning-host.json and to docs/benchmarks.md. `--quick` measures once,
on fewer rows, and writes no file.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import psycopg
from psycopg.types.json import Jsonb

from benchmarks.bench_answers import store
from benchmarks.scenarios import RESULTS, Check, measured_on, verdicts, write_document
from benchmarks.server.cluster import fresh_cluster
from benchmarks.synthetic_table import synthetic_table
from benchmarks.tables import show_table, table
from pg_tensile.tools.bench.report import machine, versions
from scripts.cluster import Cluster, child_python

NAME, KIND = "tuning", "host"
PATH = RESULTS / f"{NAME}-{KIND}.json"
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
    status = conn.execute("SELECT best_value, pruned FROM tensile.tuning_status WHERE id = %s", row).fetchone()
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
            command = [child_python(), str(SCRIPT), json.dumps(asked | {"seed": seed * runs + run})]
            done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
        seconds = time.perf_counter() - began
    result = json.loads(done.stdout.splitlines()[-1])
    return Measured(seconds, result["best"], result["pruned"])


def measure(cluster: Cluster, size: Size, rounds: int) -> list[dict[str, Any]]:
    rows = []
    with cluster.connect() as conn:
        conn.execute("CREATE EXTENSION pg_tensile CASCADE")
        store(conn, "bench_rows", synthetic_table(size.rows))
        conn.execute(f"CREATE TABLE bench_script_rows AS SELECT {', '.join(columns())} FROM bench_rows")
        for round in range(rounds):
            ways = {
                "tune_model": lambda: in_database(conn, size, None, round),  # noqa: B023
                "runs": lambda: by_script(cluster.dsn(), size, round, runs=TRIALS),  # noqa: B023
                "study": lambda: by_script(cluster.dsn(), size, round),  # noqa: B023
                "tune_model, halving": lambda: in_database(conn, size, HALVING, round),  # noqa: B023
                "pruned": lambda: by_script(cluster.dsn(), size, round, halving=HALVING),  # noqa: B023
            }
            for way, run in ways.items():
                row = {"way": way, "round": round, **run()._asdict(), "revision": versions()["revision"]}
                print(json.dumps(row), file=sys.stderr, flush=True)
                rows.append(row)
    return rows


# ---- the document ---------------------------------------------------------------------------------------------------


def median(rows: list[dict[str, Any]], way: str, column: str = "seconds") -> float:
    return statistics.median(row[column] for row in rows if row["way"] == way)


def checks(rows: list[dict[str, Any]]) -> list[Check]:
    ratio = median(rows, "tune_model") / median(rows, "runs")
    return [Check("tuning", f"time of {TRIALS} trials, of that of as many runs of the script", f"{ratio:.0%}",
                  f"≤ {MOST:.0%}", ratio <= MOST)]  # fmt: skip


HEADINGS = ("way", "s", "of the runs' time", "log loss", "pruned")


def table_rows(rows: list[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    runs = median(rows, "runs")
    for way in dict.fromkeys(row["way"] for row in rows):
        seconds, best = median(rows, way), median(rows, way, "best")
        yield way, f"{seconds:,.1f}", f"{seconds / runs:.0%}", f"{best:.4f}", f"{median(rows, way, 'pruned'):.0f}"


def page_part(results: Mapping[str, Any]) -> str:
    rows, size = results["rows"], Size(**results["size"])
    revision = ", ".join(dict.fromkeys(row["revision"] for row in rows))
    lines = [
        *(measured_on(KIND, results["machine"], results["versions"], revision), ""),
        *(f"{TRIALS} trials on {size.rows:,} rows, a fifth of them for validation, in {size.epochs} epochs.", ""),
        *(verdicts(checks(rows), ()), ""),
        *table(HEADINGS, table_rows(rows)),
    ]
    return "\n".join(lines).rstrip() + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench_tuning", description="tune_model beside Optuna and PyTorch.")
    parser.add_argument("--quick", action="store_true", help="measure once, on fewer rows, and write no file")
    parser.add_argument("--document", action="store_true", help="write the tables of the results that there are")
    options = parser.parse_args()
    if options.document:
        write_document(NAME, KIND, page_part(json.loads(PATH.read_text())))
        return 0
    size = Size(QUICK_ROWS, QUICK_EPOCHS) if options.quick else Size(ROWS, EPOCHS)
    with fresh_cluster() as cluster:
        rows = measure(cluster, size, 1 if options.quick else ROUNDS)
    show_table(f"{TRIALS} trials, {size.rows:,} rows, {size.epochs} epochs", HEADINGS, table_rows(rows), width=100)
    if not options.quick:
        results = {"machine": machine(None), "versions": versions(), "size": size._asdict(), "rows": rows}
        PATH.write_text(json.dumps(results, indent=1) + "\n")
        write_document(NAME, KIND, page_part(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
