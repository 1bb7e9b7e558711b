"""The mixed load of the soak test: does anyone wait for what nobody uses, and do plans come in time?

Two roles train, each one job after the other: small and large networks, with and without plans, some of them with a
promised slowdown, so that jobs share the device, and some wait. Meanwhile a third session predicts with one of several
models within a memory budget, in pauses that are shorter or longer than the time after which a model is idle. The
device holds the largest job, or all models, and not both.

Watched, and judged:

- **Idle memory.** No job waits for memory that only idle models hold, for longer than GIVEN_S. What it lacks is what
  its least memory and that of the running jobs (of promised ones the grant) exceed the budget by; idle is a model that
  this load has not asked for within `pg_tensile.model_idle`. Times in which a prediction waits for memory itself, or
  has lately, do not count: then a job may wait for it (docs/sharing.md, "Jobs and predictions").
- **Plans.** The scheduler's first decision about a job of at most OPERATORS operators follows its trace within PLAN_S
  or, where other processes keep the planner from computing, within CPU_TIMES the processor time that the planner took.
- Every job finishes, and no prediction fails except for lack of memory (53200).
"""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import psycopg

from benchmarks.server.db import kind_of
from benchmarks.server.sampling import sampled
from scripts.cluster import Cluster

Connection = psycopg.Connection[tuple[Any, ...]]

ROLES = ("alice", "bob")
SETTINGS: dict[str, object] = {"pg_tensile.device_memory": "40MB", "pg_tensile.model_idle": "2s"}
IDLE_S = 2.0
MODELS, BUDGET = 5, 6 << 20  # models of the predicting session, and the memory budget of each call
SLACK_BYTES = 1 << 20  # by which least memory in the catalogue may be less than what the planner finds
GIVEN_S = 10.0  # for dropping models and planning, on a busy machine
CLAIM_S = 75.0  # for which a prediction that was refused keeps its place, and a margin
OPERATORS, PLAN_S, CPU_TIMES = 1000, 2.0, 1.5
LOOK_S = 0.1
KINDS: tuple[dict[str, Any], ...] = (  # arguments of train_model
    {"model": "small", "batch_size": 64, "epochs": 4},
    {"model": "wide", "batch_size": 2000, "epochs": 12},
    {"model": "wide", "batch_size": 2000, "epochs": 12, "options": {"max_slowdown": 2}},
    {"model": "wide", "batch_size": 1000, "epochs": 8, "memory_budget": "10MB"},
    {"model": "wide", "batch_size": 1000, "epochs": 8, "policy": "none"},
    {"model": "small", "batch_size": 64, "epochs": 2, "policy": "none"},
)
ARCHITECTURES = {
    "small": {"type": "mlp", "hidden": [32, 32]},
    "wide": {"type": "mlp", "hidden": [128] * 12, "norm": "batch"},
}
PREDICTED = {"type": "mlp", "hidden": [64, 64], "norm": "layer"}
TABLE = """
    CREATE TABLE mixed AS SELECT cos(i) AS a, sin(i * 0.7) AS b, cos(i) + sin(i) AS y FROM generate_series(1, 3000) i;
    GRANT SELECT ON mixed TO PUBLIC
"""
QUERY = "SELECT * FROM mixed"
WAITING = """
    SELECT j.job, t.least_bytes + t.overhead_bytes FROM tensile.jobs j JOIN tensile.traces t ON t.job = j.job
    WHERE j.state = 'waiting' AND j.reason ~ '^needs at least'
"""
RUNNING = """
    SELECT coalesce(sum(CASE WHEN j.options ? 'max_slowdown' THEN greatest(t.least_bytes, f.granted_bytes)
                             ELSE t.least_bytes END + t.overhead_bytes), 0)
    FROM tensile.jobs j JOIN tensile.traces t ON t.job = j.job LEFT JOIN tensile.plans f ON f.job = j.job
    WHERE j.state = 'running'
"""
DEVICE = "SELECT budget_bytes, inference_bytes FROM tensile.devices WHERE name = 'cpu'"
TRACES = """
    SELECT t.job, extract(epoch FROM t.captured_at)::float8, count(o.*) FROM tensile.traces t
    JOIN tensile.operators o ON o.job = t.job WHERE t.revision = 1 GROUP BY t.job
"""
DECIDED = """
    SELECT extract(epoch FROM min(at))::float8 FROM tensile.scheduler_log
    WHERE event = 'scheduled' AND reason ~ ('job ' || %s || ' has come')
"""


class Predicting:
    """The session that predicts: when each model was used last, and when a prediction waited or was refused."""

    def __init__(self) -> None:
        self.used_at: dict[str, float] = {}
        self.asked_at: float | None = None
        self.refused_at = float("-inf")
        self.count: Counter[str] = Counter()
        self.faults: list[str] = []

    def ask(self, conn: Connection, model: str) -> None:
        self.asked_at = self.used_at[model] = time.monotonic()
        try:
            conn.execute("SELECT predict(%s, ARRAY[0.1, 0.2], %s)", (model, f"{BUDGET} B"))
            self.count["answered"] += 1
        except psycopg.Error as error:
            self.refused_at = time.monotonic()
            self.count["refused"] += 1
            if error.sqlstate != "53200":
                self.faults.append(f"a prediction with {model} has failed: {error.sqlstate} {error}")
        self.used_at[model], self.asked_at = time.monotonic(), None

    def idle_bytes(self, conn: Connection) -> int:
        """Return the bytes of the models that are idle; 0 while a prediction waits, or has its place in the order."""
        now, asked_at = time.monotonic(), self.asked_at
        if now - self.refused_at < CLAIM_S or (asked_at is not None and now - asked_at > 0.5):
            return 0
        rows = conn.execute("SELECT model, device_bytes FROM tensile.loaded_models WHERE memory_budget > 0").fetchall()
        return sum(size for model, size in rows if now - self.used_at.get(model, now) > IDLE_S)


class Watch:
    """Monitor of waiting jobs beside idle models, and of the time to the first decision about a job."""

    def __init__(self, cluster: Cluster, predicting: Predicting) -> None:
        self._cluster = cluster
        self._conn = cluster.connect()
        self._predicting = predicting
        self._starved_since: dict[int, float] = {}
        self._cpu: list[tuple[float, float]] = []  # time of day and processor seconds of the planner
        self._come: dict[int, float] = {}  # jobs of whose decision nothing is known yet
        self.longest_starved_s = 0.0
        self.delays_s: list[float] = []
        self.faults: list[str] = []

    def look(self) -> None:
        self._cpu.append((time.time(), self._planner_seconds()))
        self._look_at_waiting()
        self._look_at_plans()

    def _look_at_waiting(self) -> None:
        starved = self._starved()
        now = time.monotonic()
        self._starved_since = {job: self._starved_since.get(job, now) for job in starved}
        for job, since in self._starved_since.items():
            if now - since > GIVEN_S >= self.longest_starved_s:
                self.faults.append(f"job {job} waits for what only idle models hold")
            self.longest_starved_s = max(self.longest_starved_s, now - since)

    def _starved(self) -> list[int]:
        """Return the jobs that could start if idle models gave way."""
        device, running = self._conn.execute(DEVICE).fetchone(), self._conn.execute(RUNNING).fetchone()
        idle_bytes = self._predicting.idle_bytes(self._conn)
        if device is None or running is None or not idle_bytes:
            return []
        budget, inference = device
        free = budget - inference - int(running[0])
        return [job for job, least in self._conn.execute(WAITING) if least + SLACK_BYTES <= free + idle_bytes]

    def _look_at_plans(self) -> None:
        for job, captured_at, operators in self._conn.execute(TRACES).fetchall():
            if job not in self._come and operators <= OPERATORS:
                self._come[job] = captured_at
        for job, captured_at in self._come.items():
            if captured_at < 0:
                continue
            (decided_at,) = self._conn.execute(DECIDED, (job,)).fetchone() or (None,)
            until = decided_at or time.time()
            late = until - captured_at > self._limit_s(captured_at, until)
            if decided_at is None and not late:
                continue
            self._come[job] = -1.0  # judged
            self.delays_s.append(until - captured_at)
            if late:
                self.faults.append(f"job {job} had no decision {until - captured_at:.1f} s after its trace")

    def _limit_s(self, start: float, end: float) -> float:
        """Return the time for a plan: of the planner's processor time between these times of day, or less."""
        before = [seconds for at, seconds in self._cpu if at <= start][-1:] or [0.0]
        computed = max((seconds for at, seconds in self._cpu if at <= end), default=0.0) - before[0]
        return max(PLAN_S, CPU_TIMES * computed)

    def _planner_seconds(self) -> float:
        """Return the processor seconds of the planner, and of those that have ended as if it was one."""
        ticks = 0
        for pid, command in self._cluster.processes().items():
            if kind_of(command) == "planner":
                try:
                    with open(f"/proc/{pid}/stat") as file:
                        ticks += sum(map(int, file.read().rpartition(")")[2].split()[11:13]))
                except OSError:  # it has ended
                    continue
        return ticks / os.sysconf("SC_CLK_TCK")


def mixed_load(
    cluster: Cluster, conn: Connection, minutes: float, delete_old: Callable[[Connection], None]
) -> dict[str, Any]:
    """Run the load for a number of minutes; return counts, longest times, and `faults`, a list of sentences."""
    prepare(cluster, conn)
    predicting, jobs = Predicting(), Counter[str]()
    watch = Watch(cluster, predicting)
    faults: list[str] = []
    end = time.monotonic() + 60 * minutes
    threads = [
        threading.Thread(target=train, args=(cluster, role, seed, end, jobs, faults)) for seed, role in enumerate(ROLES)
    ]
    threads.append(threading.Thread(target=predict, args=(cluster, predicting, end, delete_old)))
    with sampled(lambda: guarded(watch.look, faults), LOOK_S):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    cluster.configure({"pg_tensile.device_memory": 0, "pg_tensile.model_idle": "10s"})
    cluster.reload()
    return {
        "jobs": jobs,
        "predictions": predicting.count,
        "longest_starved_s": round(watch.longest_starved_s, 1),
        "plans": len(watch.delays_s),
        "longest_plan_s": round(max(watch.delays_s, default=0.0), 2),
        "faults": [*faults, *predicting.faults, *watch.faults],
    }


def prepare(cluster: Cluster, conn: Connection) -> None:
    """Make roles, rows and models, and train those that are predicted with."""
    conn.execute(TABLE)
    for role in ROLES:
        conn.execute(f"CREATE ROLE {role} LOGIN IN ROLE tensile_user")
        with cluster.connect(user=role) as session:
            for name, architecture in ARCHITECTURES.items():
                session.execute("SELECT register_model(%s, %s)", (f"{role} {name}", json.dumps(architecture)))
    for number in range(MODELS):
        name = f"predicted {number}"
        conn.execute("SELECT register_model(%s, %s)", (name, json.dumps(PREDICTED)))
        job = conn.execute("SELECT train_model(%s, %s, 'y', epochs => 1)", (name, QUERY)).fetchone()
        conn.execute("SELECT wait_for_job(%s, '10 min')", job)
    cluster.configure(SETTINGS)
    cluster.reload()


def train(cluster: Cluster, role: str, seed: int, end: float, jobs: Counter[str], faults: list[str]) -> None:
    """Train one job after the other."""
    choose = random.Random(seed)
    with cluster.connect(user=role) as conn:
        while time.monotonic() < end:
            kind = dict(choose.choice(KINDS))
            options = json.dumps({"keep": "last"} | kind.pop("options", {}))
            arguments = kind | {"model": f"{role} {kind['model']}", "query": QUERY, "target": "y", "options": options}
            named = ", ".join(f"{name} => %({name})s" for name in arguments)
            job = conn.execute(f"SELECT train_model({named})", arguments).fetchone()
            try:
                conn.execute("SELECT wait_for_job(%s, '15 min')", job)
                jobs["finished"] += 1
            except psycopg.Error as error:
                jobs["failed"] += 1
                faults.append(f"job {job} of {role} ({kind}): {error}")


def predict(cluster: Cluster, predicting: Predicting, end: float, delete_old: Callable[[Connection], None]) -> None:
    """Predict with one model for a while, then with another one after a pause."""
    choose = random.Random(7)
    with cluster.connect() as conn:
        while time.monotonic() < end:
            model = f"predicted {choose.randrange(MODELS)}"
            for _ in range(choose.randrange(1, 20)):
                predicting.ask(conn, model)
                time.sleep(choose.choice((0.01, 0.1, 0.5)))
            delete_old(conn)
            time.sleep(choose.choice((0.0, 1.0, 2 * IDLE_S, 5 * IDLE_S)))


def guarded(look: Callable[[], None], faults: list[str]) -> None:
    """Look, and note an error, so that the next look is taken all the same."""
    try:
        look()
    except Exception as error:
        faults.append(f"the watch has failed: {error!r}")
