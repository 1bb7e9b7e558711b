"""A soak test for growth: short jobs, a job with a checkpoint every second, a mixed load, under continual sampling.

The mixed load is that of soak_mixed.py, which also says what must not happen in it. `--jobs` and `--phase-minutes` give
the number of short jobs and the minutes of each other phase; shorter ones are `--quick`.

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
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psycopg

from benchmarks.checks import Check
from benchmarks.results import Results
from benchmarks.runner import Run, Section, say
from benchmarks.server.cluster import fresh_cluster
from benchmarks.server.db import kind_of
from benchmarks.server.sampling import sampled
from benchmarks.server.soak_mixed import mixed_load
from benchmarks.tables import table
from scripts.cluster import Cluster

Connection = psycopg.Connection[tuple[Any, ...]]
Sample = dict[tuple[str, str], float]  # by kind and name

JOBS, MINUTES = 1000, 60.0
QUICK_JOBS, QUICK_MINUTES = 50, 2.0
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
    "DELETE FROM tensile_internal.jobs WHERE ended_at IS NOT NULL"
    " AND id < (SELECT max(id) FROM tensile_internal.jobs) - %(kept)s",
    "DELETE FROM tensile_internal.model_versions v USING tensile_internal.models m"
    " WHERE m.id = v.model_id AND v.version <> m.deployed_version"
    " AND v.version <="
    " (SELECT max(o.version) FROM tensile_internal.model_versions o WHERE o.model_id = m.id) - %(kept)s",
)
TABLES = """
    SELECT c.relname, pg_total_relation_size(c.oid),
           pg_stat_get_dead_tuples(c.oid) + pg_stat_get_dead_tuples(c.reltoastrelid)
    FROM pg_class c WHERE c.relnamespace = 'tensile_internal'::regnamespace AND c.relkind = 'r'
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
        slots = self._conn.execute("SELECT count(*) FROM tensile_worker._progress()").fetchone()
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
def phase(cluster: Cluster, found: dict[str, Any]) -> Iterator[None]:
    """Sample during the block, and note what is found at its end."""
    soak, started = Soak(cluster), time.monotonic()
    with sampled(soak.look, SAMPLE_S):
        yield
    found |= {"seconds": round(time.monotonic() - started), "samples": len(soak.samples), "processes": soak.kinds}
    found["series"] = soak.judged()


# ---- load -----------------------------------------------------------------------------------------------------------


def short_jobs(conn: Connection, count: int) -> None:
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
            say(f"{min(number, count)} of {count} jobs")


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
    written = conn.execute("SELECT max(generation) FROM tensile_internal.checkpoints WHERE job = %s", row).fetchone()
    conn.execute("SELECT cancel_job(%s)", row)
    conn.execute("SELECT wait_for_job(%s, '2 min')", row)
    return int(written[0] or 0) if written else 0


def slots_left(conn: Connection) -> int:
    """Return the slots in use after every job has ended and every worker has had time to end."""
    deadline = time.monotonic() + 30
    while True:
        (in_use,) = conn.execute("SELECT count(*) FROM tensile_worker._progress()").fetchone() or (0,)
        if in_use == 0 or time.monotonic() > deadline:
            return int(in_use)
        time.sleep(0.1)


def rows(run: Run) -> Iterator[dict[str, Any]]:
    """Yield a row for each phase, and one for each of its series."""
    quick = (QUICK_JOBS, QUICK_MINUTES) if run.quick else (JOBS, MINUTES)
    count, minutes = run.options.jobs or quick[0], run.options.phase_minutes or quick[1]
    with fresh_cluster(SETTINGS) as cluster, cluster.connect() as conn:
        conn.execute("CREATE EXTENSION pg_tensile CASCADE")
        conn.execute(ROWS)
        for number in range(RUNNING):
            conn.execute("SELECT register_model(%s, %s)", (f"small {number}", json.dumps(SMALL)))
        conn.execute("SELECT register_model('large', %s)", (json.dumps(LARGE),))
        short_jobs(conn, RUNNING)  # starts all processes, the predictor among them
        for name in run.scenarios(PHASES):
            found: dict[str, Any] = {"jobs": count if name == SHORT else None, "checkpoints": None, "mixed": None}
            with phase(cluster, found):
                if name == SHORT:
                    short_jobs(conn, count)
                elif name == CHECKPOINTS:
                    found["checkpoints"] = checkpoints(conn, minutes)
                else:
                    found["mixed"] = mixed_load(cluster, conn, minutes, delete_old)
            series = found.pop("series")
            yield {"table": "phases", **found, "slots_left": slots_left(conn)}
            yield from ({"table": "series", **row} for row in series)


SHORT, CHECKPOINTS = f"short jobs, {RUNNING} at once", "a checkpoint every second"
PHASES = (SHORT, CHECKPOINTS, "jobs of two roles and predictions")

# ---- results --------------------------------------------------------------------------------------------------------


def amount(kind: str, value: float) -> str:
    unit = TOLERANCES[kind].unit
    return f"{value / MIB:.1f} MiB" if unit == "MiB" else f"{value:,.0f} {unit}".rstrip()


def notable(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return all series that grow, and of each kind the four with the largest last third, without duplicates."""
    rows_shown = []
    for kind in TOLERANCES:
        of_kind = sorted((row for row in rows if row["kind"] == kind), key=lambda row: -row["last"])
        rows_shown += [row for number, row in enumerate(of_kind) if number < 4 or not row["flat"]]
    return rows_shown


def checks(results: Results) -> list[Check]:
    checked = []
    for row in results.rows("series"):
        found, limit = (amount(row["kind"], row[key]) for key in ("last", "limit"))
        checked.append(Check("soak", f"{row['scenario']}: {row['kind']} of {row['name']}", found, limit, row["flat"]))
    for row in results.rows("phases"):
        faults = (row["mixed"] or {}).get("faults", [])
        checked += [Check("soak", row["scenario"], fault, "no fault", False) for fault in faults]
        slots = row["slots_left"]
        checked.append(Check("soak", f"{row['scenario']}: job slots in use at the end", f"{slots}", "0", slots == 0))
    return checked


def tables(results: Results) -> list[str]:
    lines: list[str] = []
    for phase in results.rows("phases"):
        series = [row for row in results.rows("series") if row["scenario"] == phase["scenario"]]
        lines += [f"## {phase['scenario'][0].upper()}{phase['scenario'][1:]}", "", *described(phase, series), ""]
        cells = [
            (row["kind"], row["name"], *(amount(row["kind"], row[key]) for key in ("first", "last", "limit")),
             "flat" if row["flat"] else "**grows**")
            for row in notable(series)
        ]  # fmt: skip
        lines += table(("what", "which", "first third", "last third", "flat up to", ""), cells)
    return lines


def described(phase: dict[str, Any], series: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield sentences about a phase."""
    flat, mixed = sum(row["flat"] for row in series), phase["mixed"]
    done = f"{phase['jobs']:,} jobs" if phase["jobs"] else f"{phase['checkpoints']:,} checkpoints" if not mixed else ""
    if mixed:
        done = f"{sum(mixed['jobs'].values()):,} jobs, {sum(mixed['predictions'].values()):,} predictions"
    yield f"{phase['seconds'] / 60:.0f} minutes, {done}: {flat} of {len(series)} series are flat."
    if mixed:
        yield (
            f"The scheduler decided about each of {mixed['plans']:,} jobs within {mixed['longest_plan_s']:.2f} s of its"
            " coming; no job lacked memory that only idle models held for more than"
            f" {mixed['longest_starved_s']:.1f} s."
        )


BENCHMARK = Section("Does anything of a server grow?", rows, tables, checks, lambda _: PHASES)
