"""Training in a real server, against scripts outside, and the memory of all its processes.

Jobs per hour: one to four jobs of the networks of jobs.py run at once through train_model; the same number of
scripts, each of which fetches the same rows with psycopg and trains the same network with plain PyTorch on all cores,
run one after another, because nothing would arbitrate between them. Everything in a job and in a script counts:
starting, fetching, training, storing the weights. Rounds are interleaved and medians taken.

Memory: the resident (RSS) and proportional (PSS) set sizes of every process of the server while those jobs run: the
samples at which all processes' PSS was largest.
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psycopg

from benchmarks.checks import Check
from benchmarks.results import Results
from benchmarks.runner import Run, Section
from benchmarks.server.cluster import fresh_cluster
from benchmarks.server.jobs import MIXES, NETWORKS, WORK
from benchmarks.server.sampling import sampled
from benchmarks.tables import table
from scripts.cluster import Cluster, child_python

ROUNDS = 3
SAMPLE_S = 0.2
TRAINER = "trainer"  # the kind of the process that trains, as its command names it
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


def measure(cluster: Cluster, conn: Connection, networks: Sequence[str], rounds: int) -> dict[str, Any]:
    """Return the rates of these jobs at once and of as many scripts, and the largest sample of all processes."""
    times: dict[str, list[float]] = {"inside": [], "outside": []}
    largest = Largest(cluster)
    with sampled(largest.look, SAMPLE_S):
        for _ in range(rounds):
            times["inside"].append(inside(conn, networks))
            times["outside"].append(outside(cluster, networks))
    trainers = next(kind for kind in largest.rows if kind["process"] == TRAINER)
    ratios = [a / b for a, b in zip(times["outside"], times["inside"], strict=True)]
    return {
        "jobs": len(networks),
        "networks": list(networks),
        "jobs_per_hour": round(3600 * len(networks) / statistics.median(times["inside"])),
        "scripts_per_hour": round(3600 * len(networks) / statistics.median(times["outside"])),
        "times_as_many": round(statistics.median(ratios), 2),
        "trainers_pss_bytes": trainers["pss_bytes"],
        "trainers_rss_bytes": trainers["rss_bytes"],
        "processes": largest.rows,
    }


def rows(run: Run) -> Iterator[dict[str, Any]]:
    """Measure one to four jobs at once; `quick`: one, in one round."""
    counts = {f"{count} at once": count for count in ONE_TO_FOUR if count == 1 or not run.quick}
    with fresh_cluster() as cluster, cluster.connect() as conn:
        conn.execute("CREATE EXTENSION pg_tensile CASCADE")
        conn.execute(WORK.images)
        for seed, name in {pair for networks in ONE_TO_FOUR.values() for pair in enumerate(networks)}:
            conn.execute("SELECT register_model(%s, %s)", (f"{name} {seed}", json.dumps(NETWORKS[name])))
        for name in run.scenarios(counts):
            yield measure(cluster, conn, ONE_TO_FOUR[counts[name]], 1 if run.quick else ROUNDS)


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


# ---- the document ---------------------------------------------------------------------------------------------------


def checks(results: Results) -> list[Check]:
    return [
        Check("db", f"jobs an hour over scripts an hour, {row['jobs']} at once", f"{row['times_as_many']:.2f}",
              "at least 1", row["times_as_many"] >= 1)
        for row in results.rows()
    ]  # fmt: skip


def tables(results: Results) -> list[str]:
    headings = ("jobs", "jobs an hour", "scripts an hour", "times as many", "PSS, MiB", "trainers' PSS", "their RSS")
    return table(headings, job_rows(results.rows()))


def job_rows(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    for row in rows:
        pss_bytes = sum(process["pss_bytes"] for process in row["processes"])
        memory = pss_bytes, row["trainers_pss_bytes"], row["trainers_rss_bytes"]
        rates = (f"{row['jobs']}", f"{row['jobs_per_hour']:,}", f"{row['scripts_per_hour']:,}")
        yield *rates, f"{row['times_as_many']:.2f}", *(f"{value / 2**20:,.0f}" for value in memory)


BENCHMARK = Section("Jobs an hour in the database", rows, tables, checks)
