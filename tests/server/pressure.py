"""Real jobs on a device that is too small for them, for the tests of memory.

The networks are small and deep: a step takes one or two milliseconds, and plans need as little as a third of the
memory.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Self

from tests.server.support import Connection, Wait, digest, finish, phase, register, steps, trainer_pid, value

ROWS, BATCH_SIZE, EPOCHS = 4096, 256, 45  # whole batches: every step is the same graph
STEPS = ROWS // BATCH_SIZE
IMAGES = f"""
    CREATE TABLE images AS
    SELECT i AS id, i % 4 AS label, (SELECT array_agg(sin(i * 0.37 + p * 0.011 * (1 + i % 4))::float4 ORDER BY p)
                                     FROM generate_series(1, 64) p) AS image
    FROM generate_series(1, {ROWS}) i
"""
NETWORKS: dict[str, dict[str, Any]] = {
    "mlp": {"type": "mlp", "hidden": [128, 128, 128, 64]},
    "cnn": {"type": "cnn", "channels": [2, 4], "hidden": [128, 128], "shape": [8, 8]},
    "bulky": {"type": "cnn", "channels": [64, 64], "hidden": [16], "shape": [8, 8]},  # no plan makes it much smaller
}
ARGUMENTS: dict[str, Any] = {
    "query": "SELECT label, image FROM images",
    "target": "label",
    "batch_size": BATCH_SIZE,
    "learning_rate": 1e-3,
    "validation": 0.0,
}
TRAINED = (("mlp", 1), ("mlp", 2), ("cnn", 1))  # network and seed of the jobs that end: with known weights


class Size(NamedTuple):
    """Bytes that a job needs: without a plan, and at least."""

    vanilla: int
    least: int


class Sample(NamedTuple):
    """The last report of a job's trainer, with the generation of its plan."""

    steps: int
    bytes_swapped: int
    passive_swap_ins: int
    generation: int


class Watch:
    """A context that samples the ledger: the largest memory that jobs held, and violations of the budget."""

    def __init__(self, conn: Connection) -> None:
        self._conn = conn
        self.samples = self.granted = self.in_use = 0
        self.excesses: list[tuple[Any, ...]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._thread.join()
        self._conn.close()
        assert self.samples and not self.excesses, self.excesses[:5]

    def _run(self) -> None:
        while not self._ended.wait(0.01):
            self._look()

    def _look(self) -> None:
        devices = (
            "SELECT granted_bytes + inference_bytes, in_use_bytes + inference_bytes, budget_bytes FROM tensile.devices"
        )
        for granted, in_use, budget in self._conn.execute(devices).fetchall():
            self.samples += 1
            self.granted, self.in_use = max(self.granted, granted), max(self.in_use, in_use)
            if max(granted, in_use) > budget:
                self.excesses.append((granted, in_use, budget))


class Lab:
    """A server with images to train on, and the weights and sizes of its jobs without plans."""

    def __init__(
        self, cluster: Any, wait_until: Wait, trained: Sequence[tuple[str, int]] = TRAINED, epochs: int = EPOCHS
    ) -> None:
        """`trained`: networks and seeds whose weights without plans are needed; `epochs`: those of a job."""
        self.cluster = cluster
        self.wait_until = wait_until
        self.conn: Connection = cluster.connect()
        self.conn.execute(IMAGES)
        self._models = 0
        self._epochs = epochs
        self._defaults: dict[str, str] = {}  # of the settings that `set` has changed
        for network, architecture in NETWORKS.items():
            register(self.conn, network, architecture)
        with ThreadPoolExecutor(2) as pool:  # beside the jobs: both take their time to start
            networks = sorted({network for network, _ in trained})
            sizes = pool.map(self._explain, networks)
            jobs = [self.submit(network, seed, policy="none") for network, seed in trained]
            self.sizes = dict(zip(networks, sizes, strict=True))
        self.weights = {key: self.digest(job) for key, job in zip(trained, jobs, strict=True)}

    def _explain(self, network: str) -> Size:
        options = {"task": "classification", "format": "json"}
        with self.cluster.connect() as conn:
            text = value(conn, f"SELECT explain_training('{network}', {_named(ARGUMENTS | {'options': options})})")
        memory = json.loads(text)["memory"]
        return Size(memory["vanilla_bytes"], memory["least_bytes"])

    # -- jobs ---------------------------------------------------------------------------------------------------------

    def submit(self, network: str, seed: int = 1, **arguments: Any) -> int:
        """Submit a job of a new model."""
        self._models += 1
        model = f"{network}{self._models}"
        register(self.conn, model, NETWORKS[network])
        options = {"task": "classification", "keep": "last"} | arguments.pop("options", {})
        arguments = ARGUMENTS | {"epochs": self._epochs, "seed": seed, "options": options} | arguments
        return int(value(self.conn, f"SELECT train_model('{model}', {_named(arguments)})"))

    def digest(self, job: int) -> str:
        """Wait for the job and return a digest of its weights; raise the job's error."""
        finish(self.conn, job, "240 s")
        return digest(self.conn, job)

    def cancel(self, *jobs: int) -> None:
        for job in jobs:
            self.conn.execute("SELECT cancel_job(%s)", (job,))
        for job in jobs:
            assert value(self.conn, "SELECT wait_for_job(%s, '30 s')", job) == "cancelled"

    def column(self, job: int, name: str) -> Any:
        return value(self.conn, f"SELECT {name} FROM tensile.jobs WHERE job = %s", job)

    def is_training(self, job: int) -> bool:
        return phase(self.conn, job) == "training" and steps(self.conn, job) > 0

    def told(self) -> str:
        """Return the jobs' progress, what failed, and the scheduler's log, for messages of failures."""
        progress = self.conn.execute("SELECT * FROM tensile.progress").fetchall()
        failed = self.conn.execute("SELECT job, sqlstate, error, traceback FROM tensile.jobs WHERE state = 'failed'")
        return "\n".join(map(str, [*progress, *failed.fetchall(), *self.log()]))

    def await_training(self, *jobs: int) -> None:
        self.wait_until(lambda: all(map(self.is_training, jobs)), what=self.told)

    def bring_together(self, *jobs: int, until: Callable[[], Any] | None = None) -> Any:
        """Wait until all these jobs train, or for `until`, and return its value. A job that is an epoch ahead
        is stopped meanwhile, unless it has a new plan to adopt: other jobs may wait for memory that it gives back."""
        stopped: set[int] = set()

        def together() -> Any:
            for job in jobs:
                pid = trainer_pid(self.conn, job)
                ahead = steps(self.conn, job) > STEPS and self.used_generation(job) == self.newest_generation(job)
                if pid is not None and ahead != (pid in stopped):
                    os.kill(pid, signal.SIGSTOP if ahead else signal.SIGCONT)
                    stopped.symmetric_difference_update({pid})
            return all(map(self.is_training, jobs)) if until is None else until()

        try:
            return self.wait_until(together, what=self.told)
        finally:
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)

    def await_steps(self, job: int, more: int = 3 * STEPS) -> None:
        """Wait until the job has done `more` steps."""
        before = steps(self.conn, job)
        self.wait_until(lambda: steps(self.conn, job) >= before + more, what=f"steps of job {job}")

    def await_waiting(self, job: int, reason: str) -> str:
        """Wait until the job waits for a reason that matches; return the reason."""
        text: str = self.wait_until(
            lambda: self.column(job, "CASE WHEN state = 'waiting' AND reason ~ '" + reason + "' THEN reason END"),
            what=lambda: f"{self.column(job, 'state')}, {self.column(job, 'reason')}",
        )
        return text

    # -- memory -------------------------------------------------------------------------------------------------------

    def vanilla(self, networks: Sequence[str]) -> int:
        """Return the bytes that jobs of these networks need together without plans."""
        return sum(self.sizes[network].vanilla for network in networks)

    def set(self, name: str, text: str) -> None:
        self._defaults.setdefault(name, value(self.conn, f"SHOW pg_tensile.{name}"))
        self.cluster.configure({f"pg_tensile.{name}": text})
        self.cluster.reload()
        self.wait_until(lambda: value(self.conn, f"SHOW pg_tensile.{name}") == text)

    def reset(self) -> None:
        """Cancel the remaining jobs, unload the models for prediction, and reset the settings."""
        self.cancel(*(job for (job,) in self.conn.execute("SELECT job FROM tensile.jobs WHERE ended_at IS NULL")))
        inference = "FROM pg_stat_activity WHERE backend_type = 'pg_tensile inference'"
        self.conn.execute(f"SELECT pg_terminate_backend(pid) {inference}")
        self.wait_until(lambda: not value(self.conn, "SELECT sum(inference_bytes) FROM tensile.devices"))
        for name, text in self._defaults.items():
            self.set(name, text)

    def set_memory(self, nbytes: float) -> None:
        """Set the device's budget once no job uses the device."""
        self.wait_until(lambda: value(self.conn, "SELECT count(*) FROM tensile_worker._progress()") == 0)
        self.set("device_memory", f"{int(nbytes) // 1024}kB")

    def watch(self) -> Watch:
        return Watch(self.cluster.connect())

    def granted(self, job: int) -> int:
        """Return the bytes granted to the job's newest plan."""
        return int(value(self.conn, "SELECT granted_bytes FROM tensile.plans WHERE job = %s", job) or 0)

    def slowdown(self, job: int) -> float:
        """Return the expected slowdown of the job under its newest plan."""
        return float(value(self.conn, "SELECT slowdown FROM tensile.progress WHERE job = %s", job) or 1)

    def used_generation(self, job: int) -> int:
        """Return the generation of the plan that the last step used."""
        return int(value(self.conn, "SELECT plan_generation FROM tensile.progress WHERE job = %s", job) or 0)

    def newest_generation(self, job: int) -> int:
        """Return the generation of the plan that was published last."""
        return int(value(self.conn, "SELECT generation FROM tensile.plans WHERE job = %s", job) or 0)

    def sample(self, job: int) -> Sample | None:
        """Return the last report, None if it is not from a step under the newest plan."""
        row = self.conn.execute(
            "SELECT (epoch - 1) * steps + step, bytes_swapped, passive_swap_ins, plan_generation"
            " FROM tensile.progress WHERE job = %s",
            (job,),
        ).fetchone()
        current = row is not None and row[3] is not None and row[3] == self.newest_generation(job)
        return Sample(*row) if row is not None and current else None

    def log(self, event: str | None = None) -> list[tuple[Any, ...]]:
        sql = "SELECT event, job, reason FROM tensile.scheduler_log WHERE event = coalesce(%s, event) ORDER BY id"
        return self.conn.execute(sql, (event,)).fetchall()

    def await_log(self, event: str, job: int | None, pattern: str = "") -> str:
        """Wait for a matching line of the scheduler's log; return the reason of the first one."""
        sql = """
            SELECT reason FROM tensile.scheduler_log
            WHERE event = %s AND job IS NOT DISTINCT FROM %s AND reason ~ %s ORDER BY id LIMIT 1
        """
        text: str = self.wait_until(
            lambda: value(self.conn, sql, event, job, pattern), what=lambda: f"{event}, {job}, {pattern}: {self.told()}"
        )
        return text


def _named(arguments: dict[str, Any]) -> str:
    """Format the arguments of a function in SQL."""
    literals = {
        name: f"'{json.dumps(value)}'" if isinstance(value, dict) else repr(value) for name, value in arguments.items()
    }
    return ", ".join(f"{name} => {literal}" for name, literal in literals.items())
