"""Helpers for tests of jobs: small data, models that run given code, and the processes of a job."""

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
SMALL_MLP = Jsonb({"type": "mlp", "hidden": [4]})
# 400 rows that an MLP learns well: the class is a plane through two features
ROWS = """
    SELECT cos(i) AS a, sin(i * 0.7) AS b, 'c' || mod(i, 5) AS c,
           CASE WHEN cos(i) + sin(i * 0.7) > 0 THEN 'yes' ELSE 'no' END AS y
    FROM generate_series(1, 400) i
"""
FOREVER = 1_000_000  # epochs
SMALL_JOB: dict[str, Any] = {  # arguments of train_model; no number is left to the recipe, nothing to a plan
    "query": ROWS,
    "target": "y",
    "epochs": 2,
    "batch_size": 64,
    "learning_rate": 1e-3,
    "policy": "none",
    "options": {},
}
SLOW_ROWS = f"SELECT a, y FROM ({ROWS}) r, LATERAL pg_sleep(0.05 + 0 * a)"  # 20 s
ENDLESS_ROWS = f"SELECT a, y FROM ({ROWS}) r WHERE pg_sleep(600) IS NOT NULL"

ONE_BATCH = 100  # rows: a batch takes all rows of ROWS that are for validation, so no larger one has to be tried

BY_CANCEL_JOB = "cancelled by cancel_job"
TERMINATED = "its worker was terminated (pg_terminate_backend)"
WORKERS = "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'pg_tensile worker'"
FEEDS = f"{WORKERS} AND wait_event = 'PgSleep'"  # workers that run SLOW_ROWS


def python_model(*, on_build: str = "", on_forward: str = "") -> dict[str, str]:
    """Return an architecture that runs `on_build` when the model is built and `on_forward` in each forward pass. There
    `step` counts the passes of the process, of training and of validation, from 1."""
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
    """Register the model if there is an architecture, call train_model with small defaults and return the job.

    `options` or `policy` None: the function's default. Policy "none" captures nothing, which takes most of a small
    job's time, and side effects of a captured model do not run in every pass."""
    if architecture is not None:
        register(conn, model, architecture)
    if "query" not in arguments:
        arguments = {"batch_size": ONE_BATCH} | arguments
    arguments = SMALL_JOB | arguments
    options = arguments.pop("options")
    if arguments["policy"] is None:
        del arguments["policy"]
    if options is not None:
        every_epoch = {} if "early_stopping" in options else {"keep": "last"}
        arguments["options"] = Jsonb(every_epoch | options)
    named = ", ".join(f"{key} => %({key})s" for key in arguments)
    row = conn.execute(f"SELECT train_model(%(model)s, {named})", arguments | {"model": model}).fetchone()
    assert row is not None
    return int(row[0])


def value(conn: Connection, sql: str, *parameters: Any) -> Any:
    """Return the first column of the first row, None without a row."""
    row = conn.execute(sql, parameters).fetchone()
    return None if row is None else row[0]


def state(conn: Connection, job: int) -> str:
    return str(value(conn, "SELECT state FROM tensile.jobs WHERE job = %s", job))


def reason(conn: Connection, job: int) -> str | None:
    text: str | None = value(conn, "SELECT reason FROM tensile.jobs WHERE job = %s", job)
    return text


def ended(conn: Connection, job: int) -> bool:
    return bool(value(conn, "SELECT ended_at IS NOT NULL FROM tensile.jobs WHERE job = %s", job))


def no_workers(conn: Connection) -> bool:
    return bool(value(conn, WORKERS) == 0)


def settle(conn: Connection, wait_until: Wait, job: int, seconds: float = 30) -> None:
    """Wait until the job has ended and no worker is left."""
    wait_until(lambda: ended(conn, job), seconds, lambda: f"job {job} is {state(conn, job)}")
    wait_until(lambda: no_workers(conn), what="the worker exits")


def finish(conn: Connection, job: int, timeout: str = "90 s") -> None:
    """Wait for the job; raise its error."""
    assert value(conn, "SELECT wait_for_job(%s, %s::interval)", job, timeout) == "finished"


def digest(conn: Connection, job: int) -> str:
    """Return a digest of the weights of a finished job."""
    return str(
        value(
            conn,
            "SELECT encode(sha256(string_agg(w.data, '' ORDER BY seq)), 'hex') FROM tensile_internal.model_weights w"
            " JOIN tensile.model_versions v ON v.version_id = w.version WHERE v.job = %s",
            job,
        )
    )


def phase(conn: Connection, job: int) -> str | None:
    """Return the job's phase in shared memory, None without a worker."""
    name: str | None = value(conn, "SELECT phase FROM tensile.progress WHERE job = %s", job)
    return name


def steps(conn: Connection, job: int) -> int:
    """Return the number of steps that the job's trainer has reported."""
    return int(value(conn, "SELECT (epoch - 1) * steps + step FROM tensile.progress WHERE job = %s", job) or 0)


def worker_pid(conn: Connection, job: int) -> int | None:
    pid: int | None = value(conn, "SELECT pid FROM tensile.progress WHERE job = %s", job)
    return pid


def children(pid: int) -> list[int]:
    """Return the child processes of a supervisor, also those that the fork server has forked for it, but no zombies."""
    pids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                status, parent, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                arguments = (entry / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
                named = arguments[1:3] == [b"-m", b"pyworker"] and arguments[-1] == str(pid).encode()
                forked = named and session == entry.name
                if (forked or int(parent) == pid) and status != "Z":
                    pids.append(int(entry.name))
    return pids


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def trainer_pid(conn: Connection, job: int) -> int | None:
    """Return the child of the job's worker, None without one."""
    worker = worker_pid(conn, job)
    return next(iter(children(worker)), None) if worker is not None else None


def after_restart(cluster: Any, conn: Connection, wait_until: Callable[..., Any]) -> Connection:
    """Return a new session when a crash has ended this one and the server has restarted."""

    def lost() -> bool:
        with contextlib.suppress(psycopg.OperationalError):
            conn.execute("SELECT 1")
            return False
        conn.close()
        return True

    def connected() -> Connection | None:
        with contextlib.suppress(psycopg.OperationalError):
            made: Connection = cluster.connect()
            return made
        return None

    wait_until(lost, what="the server restarts")
    made: Connection = wait_until(connected)
    return made


def interrupt(cluster: Any, conn: Connection, job: int, wait_until: Callable[..., Any]) -> None:
    """Interrupt the job as a stop of the server does, by an empty pg_tensile.database for a moment."""
    database = value(conn, "SHOW pg_tensile.database")
    cluster.configure({"pg_tensile.database": ""})
    cluster.reload()
    try:
        wait_until(lambda: state(conn, job) == "interrupted", what=lambda: f"job {job} is {state(conn, job)}")
        assert value(conn, "SELECT retries FROM tensile.jobs WHERE job = %s", job) == 0, "a stop is no fault"
    finally:
        cluster.configure({"pg_tensile.database": database})
        cluster.reload()


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def undisturbed(conn: Connection, bystander: Connection) -> Iterator[None]:
    """A context that checks that the server does not restart and that a transaction of another session stays open."""
    started = value(conn, "SELECT pg_postmaster_start_time()")
    with bystander.transaction():
        pid = value(bystander, "SELECT pg_backend_pid()")
        bystander.execute("CREATE TEMP TABLE unfinished (x int) ON COMMIT DROP")
        yield
        bystander.execute("INSERT INTO unfinished VALUES (1)")
        assert value(bystander, "SELECT pg_backend_pid()") == pid
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
