"""`make bench-db`: everything measured in a real server, and training in it against scripts outside.

Jobs per hour: one to four jobs of the networks of bench_jobs.py run at once through train_model; the same number of
scripts, each of which fetches the same rows with psycopg and trains the same network with plain PyTorch on all cores,
run one after another, as without anything that would arbitrate between them. All of a job and all of a script counts:
starting, fetching, training, storing the weights. In rounds that take turns, medians.

Memory: the resident (RSS) and proportional (PSS) set sizes of every process of the server while those jobs run: the
samples at which all processes' PSS was largest.

Then bench_feed, bench_predict, bench_training and bench_jobs, whose last lines of output are JSON, and how planning
grows with the trace. All goes to benchmarks/results/db-host.json and, as JSON, to the last line of output.
`--only jobs` leaves the others out.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psycopg
from rich.console import Console
from rich.table import Table

from benchmarks.bench_jobs import BATCH_SIZE, EPOCHS, IMAGES, MIXES, NETWORKS, arguments
from benchmarks.bench_tensile import planning
from benchmarks.sampling import sampled
from pg_tensile.bench.report import machine, versions
from scripts.cluster import Cluster, child_python, temporary_cluster

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "db-host.json"
ROUNDS = 3
SAMPLE_S = 0.2
OTHERS = ("bench_feed", "bench_predict", "bench_training", "bench_jobs")
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


def outside(cluster: Cluster, networks: Sequence[str], folder: Path) -> float:
    """Seconds of the scripts, one after another."""
    began = time.perf_counter()
    for seed, name in enumerate(networks):
        job = json.dumps([cluster.dsn(), NETWORKS[name], EPOCHS, BATCH_SIZE, seed])
        command = [child_python(), "-c", SCRIPT, job, str(folder / "weights.pt")]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    return time.perf_counter() - began


def inside(conn: Connection, networks: Sequence[str]) -> float:
    """Seconds of the jobs, all at once."""
    began = time.perf_counter()
    jobs = [
        conn.execute(f"SELECT train_model('{name} {seed}', {arguments(seed)})").fetchone()
        for seed, name in enumerate(networks)
    ]
    for job in jobs:
        state = conn.execute("SELECT wait_for_job(%s, '30 min')", job).fetchone()
        if state != ("finished",):
            raise SystemExit(f"job {job}: {state}")
    return time.perf_counter() - began


def jobs_per_hour(cluster: Cluster, folder: Path) -> list[dict[str, Any]]:
    rows = []
    with cluster.connect() as conn:
        conn.execute("CREATE EXTENSION pg_tensile CASCADE")
        conn.execute(IMAGES)
        for seed, name in {pair for networks in ONE_TO_FOUR.values() for pair in enumerate(networks)}:
            conn.execute("SELECT register_model(%s, %s)", (f"{name} {seed}", json.dumps(NETWORKS[name])))
        for count, networks in ONE_TO_FOUR.items():
            times: dict[str, list[float]] = {"inside": [], "outside": []}
            largest = Largest(cluster)
            with sampled(largest.look, SAMPLE_S):
                for _ in range(ROUNDS):
                    times["inside"].append(inside(conn, networks))
                    times["outside"].append(outside(cluster, networks, folder))
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
    """The sample of the server's processes with the most PSS, by what they are."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.rows: list[dict[str, Any]] = []
        self._most = 0

    def look(self) -> None:
        found = by_kind(self._cluster.processes())
        total = sum(each["pss_bytes"] for each in found)
        if total > self._most:
            self._most, self.rows = total, found


def by_kind(processes: Mapping[int, str]) -> list[dict[str, Any]]:
    """A row for each kind of process; `processes`: command lines by process."""
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
    """ "executor", "planner", "scheduler", …; of PostgreSQL's own processes "server"."""
    child = re.search(r"-m pyworker (\w+)", command)
    if child:
        return child[1]
    worker = re.match(r"postgres: pg_tensile ([a-z]+)", command)
    return f"{worker[1]} (server)" if worker else "server"


# ---- all ------------------------------------------------------------------------------------------------------------


def show(rows: Sequence[dict[str, Any]]) -> None:
    table = Table(title=f"jobs at once in the database against scripts one after another ({ROUNDS} rounds)")
    for heading in ("jobs", "per hour", "scripts per hour", "times as many", "processes, PSS MiB"):
        table.add_column(heading, justify="right")
    for row in rows:
        pss = ", ".join(f"{each['process']} {each['pss_bytes'] >> 20}" for each in row["processes"])
        rates = (f"{row['jobs_per_hour']:,}", f"{row['scripts_per_hour']:,}", f"{row['times_as_many']:.2f}")
        table.add_row(str(row["jobs"]), *rates, pss)
    Console(width=140).print(table)


def other(name: str) -> Any:
    """What another benchmark says in its last line."""
    print(f"{name} …", file=sys.stderr)
    command = [sys.executable, "-m", f"benchmarks.{name}"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    lines = done.stdout.splitlines()
    print("\n".join(lines[:-1]))
    if done.returncode or not lines:
        return {"error": f"exit status {done.returncode}"}
    return json.loads(lines[-1])


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench_db", description="Everything measured in a real server.")
    parser.add_argument("--only", choices=("jobs",), help="leave the other benchmarks out; writes no file of results")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="pgt-bench-", dir="/tmp"))
    folder.chmod(0o711)
    try:
        with temporary_cluster(folder / "cluster", {"pg_tensile.device": "cpu"}) as cluster:
            rows = jobs_per_hour(cluster, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    show(rows)
    results: dict[str, Any] = {"machine": machine(None), "versions": versions(), "jobs": rows}
    if options.only is None:
        results |= {name: other(name) for name in OTHERS} | {"planning": planning("host", quick=False)}
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results))
    return int(any("error" in results[name] for name in OTHERS if name in results))


if __name__ == "__main__":
    sys.exit(main())
