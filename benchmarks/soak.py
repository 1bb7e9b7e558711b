"""A soak test for growth: short jobs, a job with a checkpoint every second, a mixed load, under continual sampling.

    python -m benchmarks.soak [--jobs 1000] [--minutes 60] [--mixed 60] [--document]

The mixed load is that of soak_mixed.py, which also says what must not happen in it. 0 leaves a phase out.

The server's autovacuum has its default settings, except for a shorter pause between its rounds. The test deletes what a
user would delete: of ended jobs the newest KEPT stay, of versions the newest KEPT and the deployed one
(docs/operations.md, "Disk"). Short jobs run RUNNING at once, each makes a version, and predictions are made with it.

Sampled: the size and the dead rows of each table of the extension, with its indexes and its TOAST table; the memory
(RSS, PSS and anonymous) and the file descriptors of each process; the job slots in use; the lines of the log.

Judged, in each phase: the last third of the samples against the first third, after a warm-up of a tenth, 30 s at least.
Sizes, dead rows and slots by the largest value, memory and descriptors by the median, log lines by their number. Memory
of a process is judged by its anonymous part, because shared memory counts as the process touches it. A series is flat
if its last third is at most the first times (1 + relative) + absolute of its kind's tolerance (TOLERANCES). Processes
that did not exist throughout the phase are counted, not judged.

Results go to benchmarks/results/soak-host.json, unless a phase is shorter than the default one; phases that are left
out keep their earlier results. --document only writes them into docs/operations.md. The exit status is 1 if something
grows, or if the mixed load has a fault.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psycopg
from rich.console import Console
from rich.table import Table

from benchmarks.bench_db import kind_of
from benchmarks.server.cluster import fresh_cluster
from benchmarks.server.sampling import sampled
from benchmarks.soak_mixed import mixed_load
from pg_tensile.tools.bench.report import machine, versions
from scripts.cluster import REPOSITORY, Cluster

Connection = psycopg.Connection[tuple[Any, ...]]
Sample = dict[tuple[str, str], float]  # by kind and name

RESULTS = REPOSITORY / "benchmarks" / "results" / "soak-host.json"
PAGE = REPOSITORY / "docs" / "operations.md"
JOBS, MINUTES, MIXED_MINUTES = 1000, 60.0, 60.0
RUNNING = 4
KEPT = 20
SAMPLE_S = 2.0
WARM_UP_S = 30.0
SETTINGS = {
    "pg_tensile.threads": 1,
    "pg_tensile.max_jobs": RUNNING,
    "autovacuum_naptime": "5s",
    "shared_buffers": "32MB",
    "max_wal_size": "256MB",
}
ROWS = """
    CREATE TABLE points AS
    SELECT cos(i) AS a, sin(i * 0.7) AS b, 'c' || mod(i, 5) AS c, cos(i) + sin(i * 0.7) AS y
    FROM generate_series(1, 400) i
"""
SMALL = {"type": "mlp", "hidden": [8]}
LARGE = {"type": "mlp", "hidden": [512, 512]}  # a checkpoint of some 3 MB
# Epochs of seconds, because epochs and metrics get rows in each one.
MANY_ROWS = "SELECT p.* FROM points p CROSS JOIN generate_series(1, 500)"
FOREVER = 1_000_000  # epochs
DELETE = (
    "DELETE FROM tensile.jobs WHERE ended_at IS NOT NULL AND id < (SELECT max(id) FROM tensile.jobs) - %(kept)s",
    "DELETE FROM tensile.model_versions v USING tensile.models m"
    " WHERE m.id = v.model AND v.version <> m.deployed_version"
    " AND v.version <= (SELECT max(o.version) FROM tensile.model_versions o WHERE o.model = m.id) - %(kept)s",
)
TABLES = """
    SELECT c.relname, pg_total_relation_size(c.oid),
           pg_stat_get_dead_tuples(c.oid) + pg_stat_get_dead_tuples(c.reltoastrelid)
    FROM pg_class c WHERE c.relnamespace = 'tensile'::regnamespace AND c.relkind = 'r'
"""


class Tolerance(NamedTuple):
    relative: float
    absolute: float
    unit: str
    of_third: Callable[[Sequence[float]], float]


MIB = float(1 << 20)
TOLERANCES = {
    "table size": Tolerance(0.25, 8 * MIB, "MiB", max),
    "dead rows": Tolerance(0.5, 5000, "rows", max),
    "anonymous memory": Tolerance(0.1, 8 * MIB, "MiB", statistics.median),
    "memory of all processes (PSS)": Tolerance(0.1, 32 * MIB, "MiB", statistics.median),
    "file descriptors": Tolerance(0.0, 4, "", statistics.median),
    "job slots": Tolerance(0.0, 0, "", max),
    "log lines": Tolerance(0.25, 20, "lines", lambda values: values[-1] - values[0]),
}


# ---- sampling -------------------------------------------------------------------------------------------------------


def process_sample(pid: int) -> tuple[dict[str, int], int]:
    """Return Rss, Pss and Anonymous in bytes, and the number of descriptors. Raises OSError."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    sizes = {key: int(number) << 10 for key, number in re.findall(r"^(\w+): +(\d+) kB", text, re.MULTILINE)}
    return {key: sizes[key] for key in ("Rss", "Pss", "Anonymous")}, len(os.listdir(f"/proc/{pid}/fd"))


class Soak:
    """The samples of one phase."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._conn = cluster.connect()
        self.samples: list[Sample] = []
        self.kinds: Counter[str] = Counter()
        self._seen: set[int] = set()
        self._memory: dict[str, dict[str, int]] = {}

    def look(self) -> None:
        sample: Sample = {}
        for name, size, dead in self._conn.execute(TABLES):
            sample["table size", name] = size
            sample["dead rows", name] = dead or 0
        slots = self._conn.execute("SELECT count(*) FROM tensile._progress()").fetchone()
        sample["job slots", "in use"] = slots[0] if slots else 0
        with self._cluster.log_file.open("rb") as log:
            sample["log lines", "server.log"] = sum(1 for _ in log)
        sample["memory of all processes (PSS)", "all"] = self._processes(sample)
        self.samples.append(sample)

    def _processes(self, sample: Sample) -> int:
        total = 0
        for pid, command in self._cluster.processes().items():
            name = f"{label(command)} {pid}"
            with contextlib.suppress(OSError, KeyError):  # it has ended
                sizes, descriptors = process_sample(pid)
                sample["anonymous memory", name] = sizes["Anonymous"]
                sample["file descriptors", name] = descriptors
                total += sizes["Pss"]
                self._memory[name] = sizes
                if pid not in self._seen:
                    self._seen.add(pid)
                    self.kinds[label(command)] += 1
        return total

    def judged(self) -> list[dict[str, Any]]:
        """Return a row for each series that is in all samples after the warm-up."""
        samples = self.samples[max(len(self.samples) // 10, int(WARM_UP_S / SAMPLE_S)) :]
        third = len(samples) // 3
        if third < 3:
            raise SystemExit("the phase was too short to say anything: take more jobs or minutes")
        series: dict[tuple[str, str], list[float]] = defaultdict(list)
        for sample in samples:
            for key, value in sample.items():
                series[key].append(value)
        return [
            self._judged(*key, values[:third], values[-third:])
            for key, values in sorted(series.items())
            if len(values) == len(samples)
        ]

    def _judged(self, kind: str, name: str, first: list[float], last: list[float]) -> dict[str, Any]:
        tolerance = TOLERANCES[kind]
        before, after = tolerance.of_third(first), tolerance.of_third(last)
        limit = before * (1 + tolerance.relative) + tolerance.absolute
        row = {"kind": kind, "name": re.sub(r" \d+$", "", name), "first": before, "last": after, "limit": limit}
        row["flat"] = after <= limit
        if name in self._memory and kind == "anonymous memory":
            row |= {"rss_bytes": self._memory[name]["Rss"], "pss_bytes": self._memory[name]["Pss"]}
        return row


def label(command: str) -> str:
    """Return the kind of a process; for PostgreSQL's own processes, their names."""
    kind = kind_of(command)
    if kind != "server":
        return kind
    named = re.match(r"postgres: ([a-z][a-z ]+[a-z])", command)
    return named[1] if named else "postmaster"


@contextlib.contextmanager
def phase(cluster: Cluster, name: str, console: Console, phases: list[dict[str, Any]]) -> Iterator[None]:
    """Sample during the block, and judge at its end."""
    soak, started = Soak(cluster), time.monotonic()
    with sampled(soak.look, SAMPLE_S):
        yield
    rows = soak.judged()
    seconds = round(time.monotonic() - started)
    judged = {"name": name, "seconds": seconds, "samples": len(soak.samples), "processes": soak.kinds, "series": rows}
    phases.append(judged | {"machine": machine(), "versions": versions()})
    show(judged, console)


# ---- load -----------------------------------------------------------------------------------------------------------


def short_jobs(conn: Connection, count: int, console: Console) -> None:
    """Run jobs, RUNNING at a time, on models of their own, so that each job's version is deployed."""
    open_jobs: list[tuple[int, str]] = []
    for number in range(count + RUNNING):
        if number >= RUNNING:
            job, model = open_jobs.pop(0)
            state = conn.execute("SELECT wait_for_job(%s, '10 min')", (job,)).fetchone()
            if state != ("finished",):
                raise SystemExit(f"job {job}: {state}")
            conn.execute("SELECT sum(predict(%s, p)) FROM points p", (model,))
            delete_old(conn)
        if number < count:
            model = f"small {number % RUNNING}"
            row = conn.execute(
                "SELECT train_model(%s, 'SELECT * FROM points', 'y', epochs => 2, seed => %s)", (model, number)
            ).fetchone()
            assert row is not None
            open_jobs.append((row[0], model))
        if number % 50 == 0:
            console.print(f"{min(number, count)} of {count} jobs", style="dim")


def delete_old(conn: Connection) -> None:
    """Delete old jobs and versions."""
    for statement in DELETE:
        conn.execute(statement, {"kept": KEPT})


def checkpoints(conn: Connection, minutes: float) -> int:
    """Run one job with a checkpoint every second for `minutes`, and return the number of checkpoints."""
    row = conn.execute(
        "SELECT train_model('large', %s, 'y', epochs => %s,"
        """ options => '{"checkpoint_interval": 1, "keep": "last"}')""",
        (MANY_ROWS, FOREVER),
    ).fetchone()
    time.sleep(60 * minutes)
    written = conn.execute("SELECT max(generation) FROM tensile.checkpoints WHERE job = %s", row).fetchone()
    conn.execute("SELECT cancel_job(%s)", row)
    conn.execute("SELECT wait_for_job(%s, '2 min')", row)
    return int(written[0] or 0) if written else 0


def slots_left(conn: Connection) -> int:
    """Return the slots in use after every job has ended and every worker has had time to end."""
    deadline = time.monotonic() + 30
    while True:
        (in_use,) = conn.execute("SELECT count(*) FROM tensile._progress()").fetchone() or (0,)
        if in_use == 0 or time.monotonic() > deadline:
            return int(in_use)
        time.sleep(0.1)


def soak(cluster: Cluster, jobs: int, minutes: float, mixed_minutes: float, console: Console) -> dict[str, Any]:
    """Run the phases, of which those of no jobs or minutes are left out."""
    phases: list[dict[str, Any]] = []
    with cluster.connect() as conn:
        conn.execute("CREATE EXTENSION pg_tensile CASCADE")
        conn.execute(ROWS)
        for number in range(RUNNING):
            conn.execute("SELECT register_model(%s, %s)", (f"small {number}", json.dumps(SMALL)))
        conn.execute("SELECT register_model('large', %s)", (json.dumps(LARGE),))
        short_jobs(conn, RUNNING, console)  # starts all processes, the predictor among them
        if jobs:
            with phase(cluster, f"{jobs:,} short jobs, {RUNNING} at once", console, phases):
                short_jobs(conn, jobs, console)
        if minutes:
            with phase(cluster, f"a checkpoint every second for {minutes:g} minutes", console, phases):
                written = checkpoints(conn, minutes)
            phases[-1]["checkpoints"] = written
        if mixed_minutes:
            with phase(cluster, f"jobs of two roles and predictions for {mixed_minutes:g} minutes", console, phases):
                seen = mixed_load(cluster, conn, mixed_minutes, delete_old)
            phases[-1]["mixed"] = seen
            console.print(json.dumps({key: value for key, value in seen.items() if key != "faults"}))
        in_use = slots_left(conn)
    return {"phases": phases, "slots_left": in_use}


# ---- results --------------------------------------------------------------------------------------------------------


def amount(kind: str, value: float) -> str:
    unit = TOLERANCES[kind].unit
    return f"{value / MIB:.1f} MiB" if unit == "MiB" else f"{value:,.0f} {unit}".rstrip()


def show(judged: dict[str, Any], console: Console) -> None:
    """Print the series that grew, and the largest of each kind."""
    table = Table(title=f"{judged['name']}: {judged['seconds']:,} s, {judged['samples']:,} samples")
    for heading in ("", "", "first third", "last third", "flat up to", ""):
        table.add_column(heading, justify="right" if "third" in heading or "up" in heading else "left")
    for row in notable(judged["series"]):
        values = (amount(row["kind"], row[key]) for key in ("first", "last", "limit"))
        table.add_row(row["kind"], row["name"], *values, "flat" if row["flat"] else "[red]grows[/red]")
    console.print(table)
    flat = sum(row["flat"] for row in judged["series"])
    console.print(f"{flat} of {len(judged['series'])} series are flat.\n")


def notable(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return all series that grow, and of each kind the four with the largest last third, without duplicates."""
    rows_shown = []
    for kind in TOLERANCES:
        of_kind = sorted((row for row in rows if row["kind"] == kind), key=lambda row: -row["last"])
        rows_shown += [row for number, row in enumerate(of_kind) if number < 4 or not row["flat"]]
    return rows_shown


BEGIN, END = "<!-- soak-host: begin, written by benchmarks/soak.py -->", "<!-- soak-host: end -->"


def section(results: dict[str, Any]) -> str:
    """Return the outcome of each phase for docs/operations.md; the results have all series."""
    lines: list[str] = []
    for judged in results["phases"]:
        growing = [f"{row['kind']} of {row['name']}" for row in judged["series"] if not row["flat"]]
        flat = len(judged["series"]) - len(growing)
        written = f", {judged['checkpoints']:,} checkpoints" if "checkpoints" in judged else ""
        if "mixed" in judged:
            seen = judged["mixed"]
            written = f", {sum(seen['jobs'].values()):,} jobs, {sum(seen['predictions'].values()):,} predictions"
        lines += [
            f"**{judged['name'][0].upper()}{judged['name'][1:]}** ({judged['seconds'] / 60:.0f} minutes{written}, on"
            f" {judged['machine']['cores']} cores of {judged['machine']['cpu']}, revision"
            f" {judged['versions']['revision']}): {flat} of {len(judged['series'])} series are flat"
            f"{', and these grow: ' if growing else ''}{', '.join(growing)}.",
            "",
        ]
        if "mixed" in judged:
            lines += [
                f"The scheduler decided about each of {seen['plans']:,} jobs within {seen['longest_plan_s']:.2f} s of"
                f" its coming; no job lacked memory that only idle models held for more than"
                f" {seen['longest_starved_s']:.1f} s.",
                "",
            ]
    return "\n".join(lines)


def with_earlier(results: dict[str, Any]) -> dict[str, Any]:
    """Return the results with the stored ones of phases that were left out."""
    earlier = json.loads(RESULTS.read_text())["phases"] if RESULTS.exists() else []
    phases = {judged["name"]: judged for judged in [*earlier, *results["phases"]]}
    return results | {"phases": list(phases.values())}


def write_page(results: dict[str, Any]) -> None:
    text = PAGE.read_text()
    start, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    PAGE.write_text(f"{text[:start]}\n{section(results)}{text[end:]}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="soak", description="Does anything of a server grow?")
    parser.add_argument("--jobs", type=int, default=JOBS, help="short jobs")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="of checkpoints every second")
    parser.add_argument("--mixed", type=float, default=MIXED_MINUTES, help="minutes of the mixed load")
    parser.add_argument("--document", action="store_true", help="write the last results into docs/operations.md")
    options = parser.parse_args()
    if options.document:
        write_page(json.loads(RESULTS.read_text()))
        return 0
    console = Console(width=140, highlight=False)
    with fresh_cluster(SETTINGS) as cluster:
        results = soak(cluster, options.jobs, options.minutes, options.mixed, console)
    growing = [row for judged in results["phases"] for row in judged["series"] if not row["flat"]]
    for row in growing:
        console.print(f"grows: {row['kind']} of {row['name']}", style="red")
    faults = [fault for judged in results["phases"] for fault in judged.get("mixed", {}).get("faults", [])]
    for fault in faults:
        console.print(fault, style="red")
    if results["slots_left"]:
        console.print(f"{results['slots_left']} job slots are still in use", style="red")
    sizes = ((options.jobs, JOBS), (options.minutes, MINUTES), (options.mixed, MIXED_MINUTES))
    if all(size >= default or not size for size, default in sizes):
        RESULTS.write_text(json.dumps(with_earlier(results), indent=1) + "\n")
        console.print(f"Written: {RESULTS}")
    if not growing and not results["slots_left"]:
        console.print("Nothing grows.")
    return int(bool(growing or faults or results["slots_left"]))


if __name__ == "__main__":
    sys.exit(main())
