"""What the tests of jobs share: small data, models that do as they are told, and the processes behind a job."""

from __future__ import annotations

import contextlib
import os
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
from psycopg.types.json import Jsonb

Connection = psycopg.Connection[tuple[Any, ...]]
Wait = Callable[..., Any]  # fixture wait_until
Row = Callable[[Connection, int], dict[str, Any]]  # fixture job_row

MLP = {"type": "mlp", "hidden": [8]}
# 400 rows that an MLP learns well: the class is a plane through two features
ROWS = """
    SELECT cos(i) AS a, sin(i * 0.7) AS b, 'c' || mod(i, 5) AS c,
           CASE WHEN cos(i) + sin(i * 0.7) > 0 THEN 'yes' ELSE 'no' END AS y
    FROM generate_series(1, 400) i
"""
FOREVER = 1_000_000  # epochs
SLOW_ROWS = f"SELECT a, y FROM ({ROWS}) r, LATERAL pg_sleep(0.05 + 0 * a)"  # 20 s

BY_CANCEL_JOB = "cancelled by cancel_job"
TERMINATED = "its worker was terminated (pg_terminate_backend)"
WORKERS = "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'pg_tensile worker'"
FEEDS = f"{WORKERS} AND wait_event = 'PgSleep'"  # workers that run SLOW_ROWS


def python_model(*, on_build: str = "", on_forward: str = "") -> dict[str, str]:
    """An architecture whose code runs `on_build` when it is built and `on_forward` in each forward pass, where `step`
    counts those passes (in training and in validation) from 1 in each process."""
    source = """
import os, signal, sys, time
import torch

def once(path):
    "True for the first process that asks with this path."
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True

class Model(torch.nn.Module):
    def __init__(self, n_inputs, n_outputs):
        super().__init__()
        self.linear = torch.nn.Linear(n_inputs, n_outputs)
        self.passes = 0

    def forward(self, x):
        self.passes += 1
        step = self.passes
{on_forward}
        return self.linear(x)

def build(n_inputs, n_outputs):
{on_build}
    return Model(n_inputs, n_outputs)
"""
    return {
        "type": "python",
        "source": source.replace("{on_build}", textwrap.indent(textwrap.dedent(on_build) or "pass", "    ")).replace(
            "{on_forward}", textwrap.indent(textwrap.dedent(on_forward) or "pass", "        ")
        ),
    }


def register(conn: Connection, name: str, architecture: dict[str, Any] = MLP) -> None:
    conn.execute("SELECT register_model(%s, %s)", (name, Jsonb(architecture)))


def submit(conn: Connection, model: str, architecture: dict[str, Any] | None = None, **arguments: Any) -> int:
    """train_model with small defaults, after register_model if there is an architecture; the job. What Python code does
    beside computing is done in every pass only where the model is not captured."""
    if architecture is not None:
        register(conn, model, architecture)
        if architecture["type"] == "python":
            arguments = {"policy": "none"} | arguments
    arguments = {"query": ROWS, "target": "y", "epochs": 2, "options": {}} | arguments
    arguments["options"] = Jsonb(arguments["options"])
    named = ", ".join(f"{key} => %({key})s" for key in arguments)
    row = conn.execute(f"SELECT train_model(%(model)s, {named})", arguments | {"model": model}).fetchone()
    assert row is not None
    return int(row[0])


def value(conn: Connection, sql: str, *parameters: Any) -> Any:
    """The first column of the first row; None if there is no row."""
    row = conn.execute(sql, parameters).fetchone()
    return None if row is None else row[0]


def state(conn: Connection, job: int) -> str:
    return str(value(conn, "SELECT state FROM tensile.jobs WHERE id = %s", job))


def reason(conn: Connection, job: int) -> str | None:
    text: str | None = value(conn, "SELECT reason FROM tensile.jobs WHERE id = %s", job)
    return text


def ended(conn: Connection, job: int) -> bool:
    return bool(value(conn, "SELECT ended_at IS NOT NULL FROM tensile.jobs WHERE id = %s", job))


def no_workers(conn: Connection) -> bool:
    return bool(value(conn, WORKERS) == 0)


def settle(conn: Connection, wait_until: Wait, job: int, seconds: float = 30) -> None:
    """Wait until the job has ended and no worker is left."""
    wait_until(lambda: ended(conn, job), seconds, lambda: f"job {job} is {state(conn, job)}")
    wait_until(lambda: no_workers(conn), what="the worker exits")


def phase(conn: Connection, job: int) -> str | None:
    """From shared memory: starting, loading, training, validating, saving; None without a worker."""
    found: str | None = value(conn, "SELECT phase FROM tensile.progress WHERE job = %s", job)
    return found


def steps(conn: Connection, job: int) -> int:
    """How many steps the job's executor has done, as far as it has reported."""
    return int(value(conn, "SELECT (epoch - 1) * steps + step FROM tensile.progress WHERE job = %s", job) or 0)


def worker_pid(conn: Connection, job: int) -> int | None:
    found: int | None = value(conn, "SELECT pid FROM tensile.progress WHERE job = %s", job)
    return found


def children(pid: int) -> list[int]:
    """Live child processes; zombies are dead."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                if int(parent) == pid and state != "Z":
                    found.append(int(entry.name))
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def executor_pid(conn: Connection, job: int) -> int | None:
    """The process that the job's worker has started, if it has."""
    worker = worker_pid(conn, job)
    return next(iter(children(worker)), None) if worker is not None else None


def interrupt(cluster: Any, conn: Connection, job: int, wait_until: Callable[..., Any]) -> None:
    """Stops the job's worker as a server stop does while the server goes on: pg_tensile works nowhere for a moment."""
    database = value(conn, "SHOW pg_tensile.database")
    cluster.configure({"pg_tensile.database": ""})
    cluster.reload()
    try:
        wait_until(lambda: state(conn, job) == "interrupted", what=lambda: f"job {job} is {state(conn, job)}")
    finally:
        cluster.configure({"pg_tensile.database": database})
        cluster.reload()


def cpu_seconds(pid: int) -> float:
    """What a process has computed so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def undisturbed(conn: Connection, other: Connection) -> Iterator[None]:
    """The server is not restarted meanwhile, and an open transaction of another session goes on."""
    started = value(conn, "SELECT pg_postmaster_start_time()")
    with other.transaction():
        pid = value(other, "SELECT pg_backend_pid()")
        other.execute("CREATE TEMP TABLE unfinished (x int) ON COMMIT DROP")
        yield
        other.execute("INSERT INTO unfinished VALUES (1)")
        assert value(other, "SELECT pg_backend_pid()") == pid
    assert value(conn, "SELECT pg_postmaster_start_time()") == started


def inference_pid(conn: Connection) -> int | None:
    pid: int | None = value(conn, "SELECT pid FROM pg_stat_activity WHERE backend_type = 'pg_tensile inference'")
    return pid


def train_late(conn: Connection, **arguments: object) -> int:
    """Call train_model for fixture `flights` with valid arguments, except those given."""
    arguments = {"model": "late", "query": "SELECT distance, carrier, late FROM flights", "target": "late"} | arguments
    named = ", ".join(f"{name} => %({name})s" for name in arguments)
    row = conn.execute(f"SELECT train_model({named})", arguments).fetchone()
    assert row is not None
    return int(row[0])
