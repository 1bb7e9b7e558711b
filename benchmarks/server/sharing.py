"""Jobs that share an accelerator in the database: in turns, together, within little memory, killed, beside predictions.

Each mix of jobs is trained in five ways, on a server of its own:

- `turns`: one job after another, each with the whole device;
- `together`: all at once on a device with room for all;
- `tight`: all at once within `TIGHT` of the sum of what their tensors take alone, and what each process takes besides;
- `killed`: as `tight`, where the trainer of the first job is killed (SIGKILL) after its first checkpoint;
- `predicting`: as `tight`, while a session asks for predictions within a memory budget all the time.

A row has the time of all jobs, the ledger's largest values, and the bytes of each process by the driver's count beside
those that the ledger has for it, both at the moment when the former exceeded the latter by most. Weights have to be
those of the jobs alone. Memory does not flow between jobs of an accelerator, so that is no way. The ledger may exceed
its budget by the overhead of a process that has just come, until the others have made room.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import psycopg

from benchmarks.checks import Check
from benchmarks.command import Row
from benchmarks.results import Results
from benchmarks.runner import Run, Section
from benchmarks.server.cluster import fresh_cluster
from benchmarks.server.jobs import NETWORKS, TIGHT, Watch, Work, digest, set_memory, size, submit, wait_until_left
from benchmarks.server.sampling import sampled
from benchmarks.tables import table
from pg_tensile.execution.backends import nvml
from pg_tensile.execution.device_choice import choose_device
from scripts.cluster import Cluster

WAYS = ("turns", "together", "tight", "killed", "predicting")
SAMPLE_S = 0.05
SETTLED_S = 5.0
LEDGER = """
    SELECT t.job, coalesce(p.granted_bytes, 0) + t.overhead_bytes
    FROM tensile.traces t LEFT JOIN tensile.plans p USING (job)
"""
SMALL_SPEEDUP = 1.2  # of two small jobs together over one after the other
MOST = 1.02  # times turns, of jobs together
FEATURES = 8
ASKED = {"type": "mlp", "hidden": [512, 512, 512], "norm": "layer"}  # whose predictions are asked for
ASKED_BUDGET = "2MB"  # of more for its weights

Connection = psycopg.Connection[Any]


class Mix(NamedTuple):
    """Networks of the jobs, and their work. `ways`: those that are measured."""

    networks: tuple[str, ...]
    work: Work
    ways: tuple[str, ...] = WAYS


DEEP = Work(rows=4096, epochs=10, batch_size=512, rounds=1, checkpoints=True)
MIXES = {
    "2 deep": Mix(("ResNet-110", "SE-ResNet-110"), DEEP),
    "2 small": Mix(("MLP", "MLP"), DEEP._replace(epochs=60), ("turns", "together")),
    "3 deep": Mix(("ResNet-110", "SE-ResNet-110", "ResNet-110"), DEEP, ("turns", "tight", "killed")),
}
QUICK = Work(rows=160, epochs=3, batch_size=32, rounds=1, checkpoints=True)
QUICK_MIXES = {
    "2 deep": Mix(("CNN", "ResNet-20"), QUICK),
    "2 small": Mix(("MLP", "MLP"), QUICK, ("turns", "together")),
    "3 deep": Mix(("CNN", "CNN", "CNN"), QUICK, ("turns", "tight")),
}


class Processes:
    """Bytes of each trainer by the driver, beside the ledger's, where the former exceed the latter by most.

    The ledger's are the most of the last SETTLED_S seconds: a trainer gives memory back a little after its new plan."""

    def __init__(self, cluster: Cluster, conn: Connection, device: str) -> None:
        self._cluster, self._conn, self._device = cluster, conn, device
        self.most: dict[int, tuple[int, int]] = {}  # by job: by the driver, in the ledger
        self._lately: deque[tuple[float, dict[int, int]]] = deque()  # the ledger at times

    def look(self) -> None:
        by_driver = driver_bytes(self._device)
        now = time.monotonic()
        self._lately.append((now, dict(self._conn.execute(LEDGER).fetchall())))
        while self._lately[0][0] < now - SETTLED_S:
            self._lately.popleft()
        ledger: dict[int, int] = {}
        for _, there in self._lately:
            ledger |= {job: max(nbytes, ledger.get(job, 0)) for job, nbytes in there.items()}
        for job, pid in trainers(self._cluster, self._conn).items():
            if job in ledger and pid in by_driver:
                self.keep(job, by_driver[pid], ledger[job])

    def keep(self, job: int, taken: int, allowed: int) -> None:
        """Keep the bytes of a process by the driver and in the ledger if the former exceed by more than before."""
        before = self.most.get(job)
        if before is None or taken - allowed > before[0] - before[1]:
            self.most[job] = (taken, allowed)


def driver_bytes(device: str) -> dict[int, int]:
    """Return the bytes of each process on a CUDA device, by its number; nothing for other types of devices.

    A process whose memory the driver does not tell is left out. In a container the numbers are the host's."""
    if device.partition(":")[0] != "cuda":
        return {}
    counts = nvml.ask(choose_device(device), nvml.process_counts) or {}
    return {number: nbytes for number, nbytes in counts.items() if nbytes is not None}


def trainers(cluster: Cluster, conn: Connection) -> dict[int, int]:
    """Return the process of each job that trains. The last argument of a trainer is the process of its supervisor."""
    commands = cluster.processes().items()
    by_supervisor = {words.split()[-1]: pid for pid, words in commands if "-m pyworker trainer" in words}
    rows = conn.execute("SELECT job, pid::text FROM tensile.progress WHERE pid IS NOT NULL").fetchall()
    return {job: by_supervisor[supervisor] for job, supervisor in rows if supervisor in by_supervisor}


# ---- the ways --------------------------------------------------------------------------------------------------------


class Server:
    """A server whose jobs use one accelerator."""

    def __init__(self, cluster: Cluster, conn: Connection, device: str, work: Work) -> None:
        self.cluster, self.conn, self.device, self.work = cluster, conn, device, work

    def run(self, way: str, models: Sequence[str], tight_mb: int) -> Row:
        """Train a job of each model in one way, and return the row of it, with digests of the weights."""
        wait_until_left(self.conn)
        set_memory(self.cluster, self.conn, 0 if way in ("turns", "together") else tight_mb)
        with ExitStack() as stack:
            watch = Watch(stack.enter_context(self.cluster.connect()))
            processes = Processes(self.cluster, stack.enter_context(self.cluster.connect()), self.device)
            predictions: list[float] = []
            if way == "predicting":
                asking = stack.enter_context(self.cluster.connect())
                stack.enter_context(sampled(partial(predict, asking, predictions), 0))
            began = time.perf_counter()
            stack.enter_context(sampled(watch.look, SAMPLE_S))
            stack.enter_context(sampled(processes.look, SAMPLE_S))
            jobs, weights = [], []
            for seed, model in enumerate(models):
                jobs.append(submit(self.conn, self.work, model, seed))
                if way == "turns":
                    weights.append(digest(self.conn, jobs[-1]))
            if way == "killed":
                kill_after_checkpoint(self.cluster, self.conn, jobs[0])
            weights = weights or [digest(self.conn, job) for job in jobs]
            seconds = time.perf_counter() - began
        attempts = "SELECT array_agg(attempts ORDER BY job) FROM tensile.jobs WHERE job = ANY(%s)"
        return {
            "way": way,
            "seconds": seconds,
            "weights": weights,
            "budget_bytes": watch.budget,
            "most_granted_bytes": watch.granted,
            "most_in_use_bytes": watch.in_use,
            "attempts": one(self.conn, attempts, jobs),
            "driver_bytes": [processes.most[job][0] for job in jobs if job in processes.most],
            "ledger_bytes": [processes.most[job][1] for job in jobs if job in processes.most],
            "predictions": len(predictions),
            "predict_ms_median": statistics.median(predictions) if predictions else None,
            "predict_ms_most": max(predictions, default=None),
        }


def one(conn: Connection, sql: str, *parameters: Any) -> Any:
    row = conn.execute(sql, parameters).fetchone()
    return None if row is None else row[0]


def kill_after_checkpoint(cluster: Cluster, conn: Connection, job: int) -> None:
    """Kill the trainer of a job that has a checkpoint; a job that has ended before is left alone."""
    state = "SELECT ended_at IS NOT NULL FROM tensile.jobs WHERE job = %s"
    checkpoint = "SELECT EXISTS (SELECT FROM tensile_internal.checkpoints WHERE job = %s AND meta IS NOT NULL)"
    while not one(conn, state, job):
        pid = trainers(cluster, conn).get(job)
        if pid is not None and one(conn, checkpoint, job):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            return
        time.sleep(SAMPLE_S)


def predict(conn: Connection, times: list[float]) -> None:
    """Ask for a prediction within a memory budget, and add its milliseconds to `times`."""
    numbers = ", ".join(["0.5"] * FEATURES)
    began = time.perf_counter()
    conn.execute(f"SELECT predict('asked', ARRAY[{numbers}], '{ASKED_BUDGET}')")
    times.append((time.perf_counter() - began) * 1e3)


# ---- the section -----------------------------------------------------------------------------------------------------


def settings_of(device: str, folder: Path) -> dict[str, object]:
    """Return the settings with which children use the device."""
    if device != "emulated":
        return {"pg_tensile.device": device}
    from tests.server.emulated_device import install_emulator

    return {"pg_tensile.device": device, "pg_tensile.python": install_emulator(folder / "emulator")}


def set_up(conn: Connection, work: Work) -> None:
    """Make the tables, and the model whose predictions are asked for."""
    conn.execute("CREATE EXTENSION pg_tensile CASCADE")
    conn.execute(work.images)
    columns = ", ".join(f"sin(i * {number + 1}) AS x{number}" for number in range(FEATURES))
    conn.execute(f"CREATE TABLE numbers AS SELECT cos(i) AS y, {columns} FROM generate_series(1, 200) i")
    conn.execute("SELECT register_model('asked', %s)", (json.dumps(ASKED),))
    train = "SELECT train_model('asked', 'SELECT * FROM numbers', 'y', epochs => 1, policy => 'none')"
    conn.execute("SELECT wait_for_job(%s)", (one(conn, train),))


def measure(title: str, mix: Mix, device: str) -> Iterator[Row]:
    """Yield a row for each way in which the jobs of a mix are trained."""
    with TemporaryDirectory(prefix="pgt-sharing-", dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        with fresh_cluster(settings_of(device, Path(folder))) as cluster, cluster.connect() as conn:
            set_up(conn, mix.work)
            models = [f"{name} {number}" for number, name in enumerate(mix.networks)]
            for model, name in zip(models, mix.networks, strict=True):
                conn.execute("SELECT register_model(%s, %s)", (model, json.dumps(NETWORKS[name])))
            sizes = [size(conn, mix.work, model) for model in models]
            overheads, vanilla_bytes = [job.overhead for job in sizes], sum(job.vanilla for job in sizes)
            tight = int(TIGHT * vanilla_bytes + sum(overheads)) >> 20
            server, alone_weights = Server(cluster, conn, device, mix.work), None
            for way in mix.ways:
                row = server.run(way, models, tight)
                weights = row.pop("weights")
                alone_weights = alone_weights or weights
                row |= {"vanilla_bytes": vanilla_bytes, "overhead_bytes": max(overheads)}
                yield {"jobs": title, **row, "bit_identical": weights == alone_weights}


def rows(run: Run) -> Iterator[Row]:
    mixes = QUICK_MIXES if run.quick else MIXES
    for title in run.scenarios(mixes):
        yield from measure(title, mixes[title], run.device)


def sharing_checks(rows: Sequence[Row]) -> list[Check]:
    """Check weights, the ledger's budget, and that the driver counts no more for a process than the ledger has."""
    checked = []
    for row in rows:
        what = f"{row['jobs']}, {row['way']}"
        same = "those of the jobs alone" if row["bit_identical"] else "others"
        checked.append(Check("sharing", f"{what}: weights", same, "those of the jobs alone", row["bit_identical"]))
        granted, most = row["most_granted_bytes"], row["budget_bytes"] + row["overhead_bytes"]
        asked = f"≤ {most:,}: the budget, and a process that comes"
        checked.append(Check("sharing", f"{what}: granted", f"{granted:,}", asked, granted <= most))
        for number, (taken, allowed) in enumerate(zip(row["driver_bytes"], row["ledger_bytes"], strict=True), 1):
            name = f"{what}: process {number} by the driver"
            checked.append(Check("sharing", name, f"{taken:,}", f"≤ {allowed:,} of the ledger", taken <= allowed))
    return checked


def ratio_checks(rows: Sequence[Row]) -> list[Check]:
    """Check that jobs together are not slower than in turns, and small ones faster."""
    turns = {row["jobs"]: row["seconds"] for row in rows if row["way"] == "turns"}
    checked = []
    for row in rows:
        if row["way"] == "together" and row["jobs"] in turns:
            ratio = row["seconds"] / turns[row["jobs"]]
            most = 1 / SMALL_SPEEDUP if "small" in row["jobs"] else MOST
            what = f"{row['jobs']} together, over turns"
            checked.append(Check("sharing", what, f"{ratio:.2f}", f"≤ {most:.2f}", ratio <= most))
    return checked


def checks(results: Results) -> list[Check]:
    """Check the rows; times say something on CUDA only."""
    rows = results.rows()
    return [*sharing_checks(rows), *(ratio_checks(rows) if results.kind == "cuda" else ())]


def tables(results: Results) -> list[str]:
    headings = (
        *("jobs", "way", "s", "times turns", "budget, MiB", "most granted, MiB", "most in use, MiB"),
        *("processes by the driver, MiB", "in the ledger, MiB", "attempts", "predictions", "ms each"),
    )
    turns = {row["jobs"]: row["seconds"] for row in results.rows() if row["way"] == "turns"}
    shown = []
    for row in results.rows():
        ratio = f"{row['seconds'] / turns[row['jobs']]:.2f}" if row["jobs"] in turns else ""
        sizes = (mib(row[name]) for name in ("budget_bytes", "most_granted_bytes", "most_in_use_bytes"))
        processes = (", ".join(map(mib, row[name])) for name in ("driver_bytes", "ledger_bytes"))
        asked = (str(row["predictions"]), f"{row['predict_ms_median']:.1f}") if row["predictions"] else ("", "")
        attempts = ", ".join(map(str, row["attempts"]))
        shown.append((row["jobs"], row["way"], f"{row['seconds']:.1f}", ratio, *sizes, *processes, attempts, *asked))
    return table(headings, shown)


def mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.0f}"


BENCHMARK = Section(
    "Jobs that share an accelerator",
    rows,
    tables,
    checks,
    lambda _: list(MIXES),
    "cuda",
)
