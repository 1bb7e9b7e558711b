"""A cluster whose scheduler, workers and inference process execute SQL of a test: functions that only they may call.

The processes are real, but their procedure tensile_worker._step is replaced by one that reads SQL from a table
(`Stage`).
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import psycopg

from tests.server.support import Connection, Wait, register, state, value

LAUNCHER, CONTROLLER, SCHEDULER, WORKER = (
    f"pg_tensile {name}" for name in ("launcher", "controller", "scheduler", "worker")
)
BOTH = {CONTROLLER, SCHEDULER}


def processes(conn: Connection) -> dict[str, tuple[int, str | None]]:
    """Map the type of each of the extension's processes to its pid and database."""
    rows = conn.execute(
        "SELECT backend_type, pid, datname FROM pg_stat_activity WHERE backend_type LIKE 'pg_tensile%'"
    ).fetchall()
    return {row[0]: (row[1], row[2]) for row in rows}


def running_in(conn: Connection, database: str) -> set[str]:
    """Return the types of the extension's processes in a database."""
    return {kind for kind, (_, name) in processes(conn).items() if name == database}


def terminate(conn: Connection, kind: str) -> int:
    pid, _ = processes(conn)[kind]
    assert value(conn, "SELECT pg_terminate_backend(%s)", pid)
    return pid


def restart_processes(cluster: Any, conn: Connection, wait_until: Wait) -> None:
    """Stop controller and scheduler by an empty pg_tensile.database, and let the launcher start them again.

    It waits for seconds after the end of one that was terminated, but not after this."""
    cluster.alter({"pg_tensile.database": ""})
    wait_until(lambda: set(processes(conn)) == {LAUNCHER}, what="the processes end")
    cluster.alter({"pg_tensile.database": None})
    wait_until(lambda: set(processes(conn)) >= BOTH, what="the processes start again")


def await_turn(conn: Connection, wait_until: Wait, kind: str) -> None:
    """Wake the extension's processes, and wait until the one of this type has had a whole turn since."""
    turn = "SELECT state = 'idle' AND state_change > %s FROM pg_stat_activity WHERE backend_type = %s"
    for _ in range(2):  # the first turn may have begun before
        before = value(conn, "SELECT clock_timestamp()")
        conn.execute("SELECT tensile_internal._notify(-1)")
        wait_until(lambda: value(conn, turn, before, kind), what=f"a turn of the {kind}")  # noqa: B023


def train(conn: Connection, model: str = "m") -> int:
    sql = (
        "SELECT train_model(%s, 'SELECT 1.0 AS x, 2.0 AS y', 'y', epochs => 10, batch_size => 64,"
        """ learning_rate => 0.001, options => '{"keep": "last"}')"""
    )
    return int(value(conn, sql, model))


# The body of tensile_worker._step on a stage: the processes named in {staged} execute orders, the others run the real
# code. An order is one statement, or several with waits before and between them: "WAIT milliseconds; SELECT ...; WAIT
# ...". The answer is then that of the last wait.
STEP = """
this = plpy.execute("SELECT tensile_worker._process() AS process, tensile_worker._python_folder() AS folder")[0]
process = this["process"]
import json, sys, types
if sys.path[0] != this["folder"]:
    sys.path.insert(0, this["folder"])
from pyworker.supervisors import supervisor


def execute(sql):
    try:
        with plpy.subtransaction():
            return [dict(row) for row in plpy.execute(sql)]
    except plpy.SPIError as error:
        return {{"error": error.sqlstate, "message": str(error)}}


async def obey(sql):
    if not sql.startswith("WAIT"):
        return execute(sql)
    for part in sql.split("; "):
        if part.startswith("WAIT"):
            answer = [{{"bits": int(await supervisor.suspend(supervisor.Request(-1, int(part[5:]), False)))}}]
        elif isinstance(error := execute(part), dict):
            return error
    return answer


def leaves(name):
    if process != "worker":
        return False
    if plpy.execute("SELECT tensile_worker._job_status() AS s")[0]["s"] in ("ok", "refused"):
        return False
    plpy.execute("SELECT tensile_worker._job_end('cancelled', NULL, NULL, NULL, NULL, NULL, NULL)")
    return True


async def run(plpy):
    plpy.execute("SELECT set_config('client_min_messages', 'error', false)")
    name = process
    if process == "worker":
        name = str(plpy.execute("SELECT tensile_worker._my_job() AS job")[0]["job"])
        plpy.execute("SELECT tensile_worker._job_begin(0)")
    while True:
        bits = await supervisor.suspend(supervisor.Request(-1, 20, False))
        if bits & (supervisor.Wait.STOP | supervisor.Wait.GONE):
            plpy.execute("INSERT INTO stage.endings VALUES ('%s', %d)" % (name, bits))
            return
        if leaves(name):
            return
        sql = "SELECT id, sql FROM stage.orders WHERE process = '%s' AND answer IS NULL ORDER BY id" % name
        for order in plpy.execute(sql):
            answer = await obey(order["sql"])
            plan = plpy.prepare("UPDATE stage.orders SET answer = $1 WHERE id = $2", ["json", "int"])
            plpy.execute(plan, [json.dumps(answer, default=str), order["id"]])
            plpy.commit()


if process in {staged}:
    module = types.ModuleType("pyworker.supervisors." + process)
    module.run = run
    sys.modules.setdefault("pyworker.supervisors." + process, module)
return supervisor.step(plpy, process, bits)
"""


def set_the_stage(conn: Connection, *staged: str) -> None:
    """Create the tables of orders, and let processes of these kinds that start from now on execute them."""
    conn.execute(
        "CREATE SCHEMA stage; CREATE TABLE stage.orders (id serial, process text, sql text, answer json);"
        "CREATE TABLE stage.endings (process text, bits int); GRANT USAGE ON SCHEMA stage TO PUBLIC;"
        "GRANT ALL ON ALL TABLES IN SCHEMA stage TO PUBLIC"
    )
    replace_step(conn, "plpython3u", STEP.format(staged=staged))


def replace_step(conn: Connection, language: str, body: str) -> None:
    conn.execute(
        "CREATE OR REPLACE PROCEDURE tensile_worker._step(bits int, INOUT fd int, INOUT timeout_ms int, INOUT"
        " writable bool)"
        f" LANGUAGE {language} AS $body${body}$body$"
    )


class Stage:
    """A cluster whose processes execute orders of the test: "scheduler", "inference", and workers by job."""

    def __init__(self, cluster: Any, wait_until: Wait) -> None:
        self.cluster = cluster
        self.conn: Connection = cluster.connect()
        self._wait_until = wait_until
        set_the_stage(self.conn, "scheduler", "inference", "worker")
        self.conn.execute(
            "CREATE ROLE alice LOGIN; CREATE ROLE mallory LOGIN; CREATE ROLE watcher LOGIN IN ROLE pg_read_all_stats;"
            "GRANT tensile_user TO alice, mallory, watcher"
        )
        restart_processes(cluster, self.conn, wait_until)
        self.order("scheduler", "SELECT 1 AS one")
        self.alice: Connection = cluster.connect(user="alice")
        register(self.alice, "m")
        register(self.alice, "n")

    def place(self, process: str | int, sql: str) -> int:
        """Insert an order without waiting for its answer; return its number."""
        return int(
            value(self.conn, "INSERT INTO stage.orders (process, sql) VALUES (%s, %s) RETURNING id", str(process), sql)
        )

    def order(self, process: str | int, sql: str) -> Any:
        """Run SQL in a process and return its rows; raise its error."""
        return self.answer(self.place(process, sql))

    def refusal(self, process: str | int, sql: str) -> str | None:
        """Run SQL in a process and return the SQLSTATE of its error, None without one."""
        try:
            self.order(process, sql)
        except psycopg.Error as error:
            return error.sqlstate
        return None

    def answer(self, number: int) -> Any:
        """Wait for the answer to an order and return its rows; raise its error."""
        row = self._wait_until(lambda: self._answer(number), 15, f"the answer to order {number}")
        if isinstance(row, dict):
            raise psycopg.errors.lookup(row["error"])(row["message"])
        return row

    def _answer(self, number: int) -> Any:
        answer = value(self.conn, "SELECT answer FROM stage.orders WHERE id = %s", number)
        return [None] if answer == [] else answer

    def job(self, model: str = "m") -> int:
        """Submit a job as alice and wait for its worker."""
        job = train(self.alice, model)
        self.order(job, "SELECT 1 AS one")
        return job

    def cancel(self, job: int) -> None:
        """Cancel the job if it has not ended."""
        self.conn.execute("SELECT cancel_job(%s)", (job,))
        self._wait_until(lambda: state(self.conn, job) == "cancelled", 10)

    def end(self, job: int) -> None:
        """Cancel the job and wait until no worker is left."""
        self.cancel(job)
        self._wait_until(lambda: value(self.conn, "SELECT count(*) FROM tensile_worker._progress()") == 0, 10)

    def woken(self, process: str | int, event: Callable[[], object]) -> None:
        """Check that the event ends a wait of the process."""
        assert self.wait_bits(process, event) & 4

    def wait_bits(self, process: str | int, event: Callable[[], object]) -> int:
        """Return the causes of the end of a wait of the process that the event ends."""
        number = self.place(process, "WAIT 0; SELECT pg_advisory_lock(7); WAIT 10000; SELECT pg_advisory_unlock(7)")
        waits = (
            "SELECT count(*) FROM pg_locks l JOIN pg_stat_activity a USING (pid)"
            " WHERE l.locktype = 'advisory' AND a.wait_event_type = 'Extension'"
        )
        self._wait_until(lambda: value(self.conn, waits) == 1, 10, "the process waits")
        event()
        return int(self.answer(number)[0]["bits"])

    def close(self) -> None:
        self.alice.close()
        self.conn.close()
        self.cluster.end()


# Arguments of tensile_worker._report
REPORTED = (
    *("phase", "epoch", "epochs", "step", "steps", "loss", "samples_per_s", "device_bytes", "device_peak_bytes"),
    *("bytes_swapped", "stall_us", "passive_swap_ins", "utilisation", "raw_bytes_swapped", "time_left_s"),
    "least_time_left_s",
)


def report(stage: Stage, job: int, **numbers: object) -> None:
    arguments = ", ".join(f"{name} => {numbers.get(name, 'NULL')}" for name in REPORTED)
    stage.order(job, f"SELECT tensile_worker._report({arguments})")


def use_device(stage: Stage, job: int, name: str, total: int = 1000, overhead: int = 0) -> None:
    stage.order(job, f"SELECT tensile_worker._register_device('{name}', {total}, 5e9, 6e9, {overhead})")


def event(
    kind: int, tensor: int = 0, version: int = 0, trigger: int = 0, delay_us: int = 0, deadline: int = 0, size: int = 0
) -> bytes:
    """Return the bytes of an event (docs/internals.md, "Shared memory")."""
    return struct.pack("<B3xiiiiiq", kind, tensor, version, trigger, delay_us, deadline, size)


def plan_call(job: int, events: list[bytes], granted: int = 0, planned: int | None = None, link: object = 1) -> str:
    plan = "\\x" + b"".join(events).hex()
    return (
        f"tensile_internal._publish_plan({job}, '{plan}', {granted if planned is None else planned}, {granted}, {link})"
    )


def publish(stage: Stage, job: int, events: list[bytes], granted: int = 0, **numbers: Any) -> int | None:
    """Publish a plan and return its generation, None if the grant does not fit."""
    row = stage.order("scheduler", f"SELECT {plan_call(job, events, granted, **numbers)} AS g")[0]
    return None if row["g"] is None else int(row["g"])


def fetch(stage: Stage, job: int, after: int) -> Any:
    sql = f"SELECT generation AS g, encode(events, 'hex') AS e FROM tensile_worker._fetch_plan({after})"
    return stage.order(job, sql)
