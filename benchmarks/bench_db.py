"""`make bench-db`: all measurements in a real server, and training in it against scripts outside.

Jobs per hour: one to four jobs of the networks of bench_jobs.py run at once through train_model; the same number of
scripts, each of which fetches the same rows with psycopg and trains the same network with plain PyTorch on all cores,
run one after another, because nothing would arbitrate between them. Everything in a job and in a script counts:
starting, fetching, training, storing the weights. Rounds are interleaved and medians taken.

Memory: the resident (RSS) and proportional (PSS) set sizes of every process of the server while those jobs run: the
samples at which all processes' PSS was largest.

Then bench_feed, bench_predict, bench_training and bench_jobs follow, whose last lines of output are JSON, and the
growth of planning with the trace. All results go to benchmarks/results/db-host.json, as tables to docs/benchmarks.md
and, as JSON, to the last line of output. `--only jobs` leaves the others out; `--document` writes the tables of the
existing results.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psycopg

from benchmarks.bench_jobs import MIXES, NETWORKS, WORK
from benchmarks.bench_tensile import planning, planning_checks, planning_table
from benchmarks.scenarios import RESULTS as FOLDER
from benchmarks.scenarios import Check, measured_on, verdicts, write_document
from benchmarks.server.cluster import fresh_cluster
from benchmarks.server.sampling import sampled
from benchmarks.tables import show_table, table
from pg_tensile.tools.bench.report import machine, versions
from scripts.cluster import REPOSITORY, Cluster, child_python

RESULTS = FOLDER / "db-host.json"
ROUNDS = 3
SAMPLE_S = 0.2
OTHERS = ("bench_feed", "bench_predict", "bench_training", "bench_jobs")
TRAINER = ("trainer", "executor")  # a job's child process; results of before have the second name
ONE_TO_FOUR = {1: ("ResNet-20",), 2: MIXES["2 mixed"], 3: MIXES["3 mixed"], 4: MIXES["4 mixed"]}

Connection = psycopg.Connection[Any]

SCRIPT = """
import json, sys
import numpy as np, psycopg, torch
from torch import nn

conninfo, architecture, epochs, batch_size, seed = json.loads(sys.argv[1])
torch.manual_seed(seed)
with psycopg.connect(conninfo) as conn:
    rows = conn.execute("SELECT label, image FROM images").fetchall()
x = torch.tensor(np.array([image for _, image in rows], np.float32))
y = torch.tensor([label for label, _ in rows])
x = (x - x.mean(0)) / x.std(0)
if architecture["type"] == "python":
    space = {}
    exec(architecture["source"], space)
    model = space["build"](x.shape[1], 10)
else:
    shape, channels = architecture["shape"], architecture["channels"]
    layers = [nn.Unflatten(1, shape)]
    for before, after in zip([shape[0], *channels], channels):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Flatten(), nn.LazyLinear(128), nn.ReLU(), nn.Linear(128, 10)]
    model = nn.Sequential(*layers)
    model(x[:1])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
for epoch in range(epochs):
    order = torch.randperm(len(x))
    total = 0.0
    for start in range(0, len(x), batch_size):
        index = order[start : start + batch_size]
        loss = nn.functional.cross_entropy(model(x[index]), y[index])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        total += loss.item() * len(index)
torch.save(model.state_dict(), sys.argv[2])
"""


# ---- training -------------------------------------------------------------------------------------------------------


def outside(cluster: Cluster, networks: Sequence[str]) -> float:
    """Return the seconds of the scripts, one after another."""
    with tempfile.NamedTemporaryFile(suffix=".pt") as weights:
        began = time.perf_counter()
        for seed, name in enumerate(networks):
            job = json.dumps([cluster.dsn(), NETWORKS[name], WORK.epochs, WORK.batch_size, seed])
            command = [child_python(), "-c", SCRIPT, job, weights.name]
            subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
        return time.perf_counter() - began


def inside(conn: Connection, networks: Sequence[str]) -> float:
    """Return the seconds of the jobs, all at once."""
    began = time.perf_counter()
    jobs = [
        conn.execute(f"SELECT train_model('{name} {seed}', {WORK.arguments(seed)})").fetchone()
        for seed, name in enumerate(networks)
    ]
    for job in jobs:
        state = conn.execute("SELECT wait_for_job(%s, '30 min')", job).fetchone()
        if state != ("finished",):
            raise SystemExit(f"job {job}: {state}")
    return time.perf_counter() - began


def jobs_per_hour(cluster: Cluster) -> list[dict[str, Any]]:
    rows = []
    with cluster.connect() as conn:
        conn.execute("CREATE EXTENSION pg_tensile CASCADE")
        conn.execute(WORK.images)
        for seed, name in {pair for networks in ONE_TO_FOUR.values() for pair in enumerate(networks)}:
            conn.execute("SELECT register_model(%s, %s)", (f"{name} {seed}", json.dumps(NETWORKS[name])))
        for count, networks in ONE_TO_FOUR.items():
            times: dict[str, list[float]] = {"inside": [], "outside": []}
            largest = Largest(cluster)
            with sampled(largest.look, SAMPLE_S):
                for _ in range(ROUNDS):
                    times["inside"].append(inside(conn, networks))
                    times["outside"].append(outside(cluster, networks))
            ratios = [a / b for a, b in zip(times["outside"], times["inside"], strict=True)]
            rows.append(
                {
                    "jobs": count,
                    "networks": list(networks),
                    "jobs_per_hour": round(3600 * count / statistics.median(times["inside"])),
                    "scripts_per_hour": round(3600 * count / statistics.median(times["outside"])),
                    "times_as_many": round(statistics.median(ratios), 2),
                    "processes": largest.rows,
                }
            )
    return rows


# ---- memory ---------------------------------------------------------------------------------------------------------


class Largest:
    """The sample with the largest PSS of all the server's processes, by kind of process."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.rows: list[dict[str, Any]] = []
        self._most = 0

    def look(self) -> None:
        kinds = by_kind(self._cluster.processes())
        total = sum(kind["pss_bytes"] for kind in kinds)
        if total > self._most:
            self._most, self.rows = total, kinds


def by_kind(processes: Mapping[int, str]) -> list[dict[str, Any]]:
    """Return a row for each kind of process; `processes`: command lines by process."""
    kinds: dict[str, dict[str, Any]] = {}
    for pid, command in processes.items():
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:  # it has ended
            continue
        sizes = {key: int(number) << 10 for key, number in re.findall(r"^(Rss|Pss): +(\d+) kB", lines, re.MULTILINE)}
        row = kinds.setdefault(kind_of(command), {"count": 0, "rss_bytes": 0, "pss_bytes": 0})
        row["count"] += 1
        row["rss_bytes"] += sizes["Rss"]
        row["pss_bytes"] += sizes["Pss"]
    return [{"process": kind} | row for kind, row in sorted(kinds.items())]


def kind_of(command: str) -> str:
    """Return the kind of a process: "trainer", "planner", …; for pg_tensile's background workers their kind with
    "(server)", for PostgreSQL's own processes "server"."""
    child = re.search(r"-m pyworker (\w+)", command)
    if child:
        return child[1]
    worker = re.match(r"postgres: pg_tensile ([a-z]+)", command)
    return f"{worker[1]} (server)" if worker else "server"


# ---- all ------------------------------------------------------------------------------------------------------------


def show(rows: Sequence[dict[str, Any]]) -> None:
    lines = []
    for row in rows:
        pss = ", ".join(f"{part['process']} {part['pss_bytes'] >> 20}" for part in row["processes"])
        rates = (f"{row['jobs_per_hour']:,}", f"{row['scripts_per_hour']:,}", f"{row['times_as_many']:.2f}")
        lines.append((str(row["jobs"]), *rates, pss))
    title = f"jobs at once in the database against scripts one after another ({ROUNDS} rounds)"
    headings = ("jobs", "per hour", "scripts per hour", "times as many", "processes, PSS MiB")
    show_table(title, headings, lines, width=140)


# ---- the document ---------------------------------------------------------------------------------------------------


class Goal(NamedTuple):
    """A promise of another benchmark: its name and key, words and format of the table, and the least or the most."""

    benchmark: str
    key: str
    what: str
    form: str
    least: float | None = None
    most: float | None = None

    def check(self, results: Mapping[str, Any]) -> Check:
        value = results[self.benchmark][self.key]
        holds = (self.least is None or value >= self.least) and (self.most is None or value < self.most)
        asked = f"at least {self.least:,}" if self.least is not None else ""
        asked = f"below {self.most:,}" if self.most is not None else asked
        return Check(self.benchmark, self.what, f"{value:{self.form}}", asked, holds)


GOALS = (
    Goal("bench_feed", "rows_per_s", "336,776 rows × 12 columns to the executor's array, rows/s", ","),
    Goal("bench_feed", "prepared_rows_per_s", "the same, standardised and split for validation, rows/s", ","),
    Goal("bench_feed", "ratio_vs_adbc", "times as fast as ADBC, the faster of its two queries", ".2f", least=4),
    Goal("bench_feed", "ratio_vs_psycopg", "times as fast as psycopg's fetchall", ".2f"),
    Goal("bench_predict", "p50_us", "predict of one row in a session, median µs", ".0f", most=150),
    Goal("bench_predict", "p99_us", "the same, 99th percentile", ".0f"),
    Goal("bench_predict", "rows_per_s", "predict_rows, rows/s", ",", least=200_000),
    Goal("bench_predict", "ratio_vs_client", "times as fast as psycopg and PyTorch", ".2f", least=1),
    Goal("bench_training", "ratio", "flights' network, speed over plain PyTorch's, a thread each", ".2f", least=0.95),
    Goal("bench_training", "ratio_all_cores", "the same over plain PyTorch's on both cores", ".2f"),
)
TOGETHER = 1.10  # times the same jobs one after another, at most


def checks(results: Mapping[str, Any]) -> list[Check]:
    checked = [goal.check(results) for goal in GOALS if goal.least is not None or goal.most is not None]
    for row in results["jobs"]:
        ratio = row["times_as_many"]
        what = f"jobs an hour over scripts an hour, {row['jobs']} at once"
        checked.append(Check("jobs", what, f"{ratio:.2f}", "at least 1", ratio >= 1))
    for row in results["bench_jobs"]:
        what = f"{row['jobs']} together, over one after another"
        checked.append(
            Check("bench_jobs", what, f"{row['together']:.2f}", f"≤ {TOGETHER:.2f}", row["together"] <= TOGETHER)
        )
        granted, budget, same = row["most_granted_bytes"], row["budget_bytes"], row["bit_identical"]
        what = f"{row['jobs']}: granted"
        checked.append(Check("bench_jobs", what, f"{granted:,}", f"≤ {budget:,}", granted <= budget))
        checked.append(Check("bench_jobs", f"{row['jobs']}: weights", str(same), "those of the jobs alone", same))
    return checked + planning_checks(results["planning"])


def page_part(results: Mapping[str, Any]) -> str:
    """Return the generated part of the section."""
    lines = [
        *(measured_on("host", results["machine"], results["versions"], results["versions"]["revision"]), ""),
        *(verdicts(checks(results), ()), ""),
        *table(("what", "found", "asked for", ""), goal_rows(results)),
        *table(
            ("jobs", "jobs an hour", "scripts an hour", "times as many", "PSS, MiB", "executors' PSS", "their RSS"),
            job_rows(results["jobs"]),
        ),
        *table(
            ("jobs at once", "both fit", "within 60 %", "budget, MiB", "most granted, MiB"),
            together_rows(results["bench_jobs"]),
        ),
        *planning_table(results["planning"]),
    ]
    return "\n".join(lines).rstrip() + "\n"


def goal_rows(results: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for goal in GOALS:
        check = goal.check(results)
        yield check.what, check.found, check.asked, "" if check.holds else "**missed**"


def job_rows(rows: Sequence[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    for row in rows:
        executors = next(process for process in row["processes"] if process["process"] in TRAINER)
        pss_bytes = sum(process["pss_bytes"] for process in row["processes"])
        memory = pss_bytes, executors["pss_bytes"], executors["rss_bytes"]
        rates = (f"{row['jobs']}", f"{row['jobs_per_hour']:,}", f"{row['scripts_per_hour']:,}")
        ratio = f"{row['times_as_many']:.2f}" + ("" if row["times_as_many"] >= 1 else ", **missed**")
        yield *rates, ratio, *(f"{value / 2**20:,.0f}" for value in memory)


def together_rows(rows: Sequence[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    for row in rows:
        memory = (f"{row[name] / 2**20:.1f}" for name in ("budget_bytes", "most_granted_bytes"))
        yield row["jobs"], f"{row['together']:.2f}", f"{row['tight']:.2f}", *memory


def other(name: str) -> Any:
    """Run another benchmark and return the JSON in its last line."""
    print(f"{name} …", file=sys.stderr)
    command = [sys.executable, "-m", f"benchmarks.{name}"]
    done = subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    lines = done.stdout.splitlines()
    print("\n".join(lines[:-1]))
    if done.returncode or not lines:
        return {"error": f"exit status {done.returncode}"}
    return json.loads(lines[-1])


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench_db", description="Everything measured in a real server.")
    parser.add_argument("--only", choices=("jobs",), help="leave the other benchmarks out; writes no file of results")
    parser.add_argument("--document", action="store_true", help="write the tables of the results that there are")
    options = parser.parse_args()
    if options.document:
        write_document("db", "host", page_part(json.loads(RESULTS.read_text())))
        return 0
    with fresh_cluster() as cluster:
        rows = jobs_per_hour(cluster)
    show(rows)
    results: dict[str, Any] = {"machine": machine(None), "versions": versions(), "jobs": rows}
    if options.only is None:
        results |= {name: other(name) for name in OTHERS} | {"planning": planning("host", quick=False)}
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        write_document("db", "host", page_part(results))
    print(json.dumps(results))
    return int(any("error" in results[name] for name in OTHERS if name in results))


if __name__ == "__main__":
    sys.exit(main())
