"""`pg-tensile top` against a real server: it prints the numbers of SQL, and its keys take effect.

Workers and scheduler execute SQL of the tests (stage.py), so that the numbers are known.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import pytest

from pg_tensile.planning.device.profile import RTX_A6000
from pg_tensile.tools.cli.main import main
from tests.server.stage import Stage, train
from tests.server.support import Wait, cpu_seconds, register, state, value
from tests.server.terminal import REPOSITORY, Terminal

HEADER = {"device": "cpu", "profile": {**asdict(RTX_A6000), "memory_bytes": 1 << 30}, "revision": 1, "policy": "joint"}
HEADER |= {
    "overhead_measured": False,
    "fingerprint": "f",
    "persistent_bytes": 100,
    "parameters": 3,
    "vanilla_bytes": 118 << 20,
}
HEADER |= {"least_bytes": 98 << 20, "operator": "addmm", "overhead_bytes": 7, "graphs": [{"name": "train", "rows": 64}]}
REPORT = "'training', 7, 10, 5, 10, 0.1134, 1204, 102760448, 104857600, 4445, 83000, 0, 0.25, NULL, 38, 38"
REASON = "needs at least 73.5 MB of device memory; 38.5 MB of the 210.0 MB of cpu are not needed by the job that runs"
REFRESHES = 40


def command(stage: Any, *arguments: str, user: str = "alice") -> list[str]:
    """pg-tensile top of a cluster."""
    cluster = getattr(stage, "cluster", stage)
    return [sys.executable, "-m", "pg_tensile", "top", "-d", cluster.dsn(user=user), *arguments]


def document(stage: Stage, capsys: Any, user: str = "alice") -> dict[str, Any]:
    assert main(command(stage, "--once", "--json", user=user)[3:]) == 0
    output: dict[str, Any] = json.loads(capsys.readouterr().out)
    return output


def trace(stage: Stage, job: int) -> None:
    """Send a trace of the job, which then waits for a plan."""
    stage.order(job, f"SELECT tensile_worker._job_trace('{json.dumps(HEADER)}', ARRAY['\\x01'::bytea], NULL)")


@pytest.fixture
def running(stage: Stage, job: int) -> int:
    """A running job with all numbers."""
    stage.order(job, "SELECT tensile_worker._register_device('cpu', 268435456, 5e9, 6e9, 0)")
    trace(stage, job)
    stage.order("scheduler", f"SELECT tensile_internal._publish_plan({job}, '', 105906176, 106954752, 1)")
    arrays = "'', '{0}', '{1}', '{1}'"
    numbers = "12, 10, 105906176, 106954752, 50, 60, 70, 0.5, 1"
    stage.order("scheduler", f"SELECT tensile_internal._footprint({job}, 1, {arrays}, {numbers})")
    stage.order("scheduler", f"SELECT tensile_internal._log('planned', {job}, 1, 'cpu', 'job {job} has come')")
    stage.order(job, "SELECT tensile_worker._acknowledge_plan(1), tensile_worker._job_admitted()")
    stage.order(job, f"SELECT tensile_worker._report({REPORT})")
    return job


@pytest.fixture
def waiting(stage: Stage, running: int) -> Iterator[int]:
    """A job that waits for memory."""
    job = stage.job("n")
    trace(stage, job)
    stage.order("scheduler", f"SELECT tensile_internal._job_waits({job}, '{REASON}')")
    yield job
    stage.cancel(job)


# -- once -------------------------------------------------------------------------------------------------------------


def test_once_prints_the_view(stage: Stage, waiting: int, running: int, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(command(stage, "--once")[3:]) == 0
    wide = capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", "80")
    assert main(command(stage, "--once")[3:]) == 0
    narrow = capsys.readouterr().out
    assert max(map(len, narrow.splitlines())) <= 80
    for part in ("1 running, 1 waiting", "of 256 MB granted", "training", "7/10", "0.1134", "1.20k", "101 MB"):
        assert part in wide and part in narrow, part
    for part in ("98.0 MB", "100 MB", "4.34 kB", "0.08s", "5/10", "joint", REASON):
        assert part in wide, part
    assert "needs at least" in narrow and "\x1b" not in narrow


def test_json_has_the_numbers_of_sql(stage: Stage, waiting: int, running: int, capsys: Any) -> None:
    output = document(stage, capsys)
    columns = (
        *("job", "model", "owner", "state", "reason", "pid", "phase", "epoch", "epochs", "step", "steps", "loss"),
        *("samples_per_s", "device_bytes", "device_peak_bytes", "bytes_swapped", "passive_swap_ins", "plan_generation"),
    )

    rows = stage.alice.execute(f"SELECT {', '.join(columns)} FROM tensile.progress ORDER BY job").fetchall()
    assert [tuple(job[column] for column in columns) for job in output["jobs"]] == rows
    assert [job["job"] for job in output["jobs"]] == [running, waiting]
    first = output["jobs"][0]
    assert (first["planned_bytes"], first["granted_bytes"], first["vanilla_bytes"]) == (105906176, 106954752, 118 << 20)
    assert (first["stall_s"], first["progress"], first["device"], first["policy"]) == (0.083, 0.65, "cpu", "joint")
    assert (first["eta_s"], first["time_left_s"], first["may_stop_early"]) == (38, 38, False)
    (waits,) = output["queue"]
    assert (waits["job"], waits["state"], waits["reason"], waits["retry_in_s"]) == (waiting, "waiting", REASON, None)
    assert 0 < waits["waited_s"] < 120
    names = [name for name in output["devices"][0] if name != "link_bytes_per_s"]
    rows = stage.alice.execute(f"SELECT {', '.join(names)} FROM tensile.devices ORDER BY name").fetchall()
    assert [tuple(device[name] for name in names) for device in output["devices"]] == rows
    assert abs(output["at"] - time.time()) < 60


def test_missing_numbers_are_null(stage: Stage, job: int, capsys: Any) -> None:
    stage.order(job, "SELECT tensile_worker._report('training', 1, 10, 1, 10, 'NaN', 'Infinity', 1, 1, 1, 1, 0, NULL)")
    (output,) = document(stage, capsys)["jobs"]
    assert output["loss"] is None and output["samples_per_s"] is None and output["step"] == 1


def test_losses_of_earlier_epochs_and_the_time_left_are_shown_at_once(
    stage: Stage, running: int, capsys: Any, monkeypatch: Any
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for epoch in range(1, 7):
        stage.conn.execute(
            "INSERT INTO tensile_internal.epochs (job, epoch, split, at)"
            " SELECT job, %s, 'training', heartbeat - %s * interval '10 s' FROM tensile.progress WHERE job = %s",
            (epoch, 7 - epoch, running),
        )
        loss = (running, epoch, 1 / epoch)
        stage.conn.execute("INSERT INTO tensile_internal.metrics VALUES (%s, %s, 'training', 'loss', %s)", loss)
    assert main(command(stage, "--once")[3:]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if " training " in line]
    assert "█▄▃▂" in line and " 38s " in line


def test_the_view_shows_visible_jobs_only(stage: Stage, running: int, capsys: Any) -> None:
    seen = {user: document(stage, capsys, user)["jobs"] for user in ("alice", "watcher", "postgres", "mallory")}
    assert {user: [job["job"] for job in jobs] for user, jobs in seen.items()} == {
        "alice": [running],
        "watcher": [running],
        "postgres": [running],
        "mallory": [],
    }
    assert document(stage, capsys, "mallory")["devices"][0]["jobs"] == 1
    assert main(command(stage, "--once", user="mallory")[3:]) == 0
    assert "You see your own jobs only." in capsys.readouterr().out.replace("\n", " ")


# -- errors -----------------------------------------------------------------------------------------------------------


def refusal(capsys: Any, *arguments: str, status: int = 1) -> str:
    """Run the command, which has to fail with an error and a hint and print nothing else; return the error."""
    assert main(["top", *arguments]) == status
    out, error = capsys.readouterr()
    assert out == "" and error.startswith("pg-tensile: ") and "\nhint: " in error
    assert "Traceback" not in error
    return str(error)


def test_no_server_no_database_no_extension_no_role(stage: Stage, capsys: Any) -> None:
    cluster = stage.cluster
    assert "cannot connect" in refusal(capsys, "--once", "-h", "/nonexistent", "-d", "x", "-U", "y")
    assert '"nowhere" does not exist' in refusal(capsys, "--once", "-d", cluster.dsn("nowhere"))
    assert '"nobody" does not exist' in refusal(capsys, "--once", "--json", "-d", cluster.dsn(user="nobody"))
    stage.conn.execute("CREATE DATABASE without")
    without = refusal(capsys, "--json", "-d", cluster.dsn("without"))
    assert '"without" has no extension' in without and 'works in database "postgres"' in without
    stage.conn.execute("DROP DATABASE without")
    assert "connection string" in refusal(capsys, "--once", "-d", "host=x nonsense")
    assert "--interval" in refusal(capsys, "--interval", "0", status=2)


def test_a_role_without_privileges(stage: Stage, capsys: Any) -> None:
    stage.conn.execute("REVOKE USAGE ON SCHEMA tensile FROM tensile_user")
    try:
        assert "permission denied" in refusal(capsys, "--once", "-d", stage.cluster.dsn(user="mallory"))
    finally:
        stage.conn.execute("GRANT USAGE ON SCHEMA tensile TO tensile_user")


def test_without_a_terminal_it_asks_for_once_or_json(stage: Stage, capsys: Any) -> None:
    assert "--json" in refusal(capsys, "-d", stage.cluster.dsn(user="alice"), status=2)


# -- live -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def live(stage: Stage, wait_until: Wait) -> Iterator[Callable[..., Terminal]]:
    """`live(user, width, height)`: start the view in a terminal."""
    opened: list[Terminal] = []

    def start(user: str = "alice", width: int = 80, height: int = 24) -> Terminal:
        arguments = command(stage, "--interval", "0.2", user=user)
        opened.append(Terminal(arguments, wait_until, width, height))
        return opened[-1]

    yield start
    for terminal in opened:
        terminal.__exit__()


@pytest.mark.parametrize(("keys", "status"), [("q", 0), ("\x03", 0), (signal.SIGTERM, 143)], ids=str)
def test_the_view_ends_and_restores_the_terminal(
    live: Callable[..., Terminal], running: int, keys: str | signal.Signals, status: int
) -> None:
    terminal = live()
    text = terminal.until(f"▸{running:3} m ", "101 MB", "1 running, 0 waiting", "q quit", "planned 101 MB")
    assert max(map(len, text.splitlines())) <= 80
    assert not terminal.is_restored()
    if isinstance(keys, str):
        terminal.send(keys)
    else:
        os.kill(terminal.process.pid, keys)
    assert terminal.status() == status
    terminal.await_restored()
    assert "Traceback" not in terminal.text()


def test_the_view_follows_the_numbers_and_the_size_of_the_terminal(
    stage: Stage, live: Callable[..., Terminal], running: int
) -> None:
    terminal = live()
    terminal.until("7/10", "epoch 7 of 10", without="STALL%")
    stage.order(running, f"SELECT tensile_worker._report({REPORT.replace('7, 10, 5', '8, 10, 6')})")
    terminal.until("8/10", "step 6 of 10")
    terminal.resize(200, 40)
    terminal.until("STALL%", "POLICY")
    terminal.resize(40, 10)
    terminal.until("MODEL", "q quit", without="STALL%")


def test_keys_select_sort_and_open_pages(live: Callable[..., Terminal], waiting: int, running: int) -> None:
    terminal = live()
    terminal.until(f"▸{running:3} m ", f"── job {running} m ")
    terminal.send("\x1b[B")
    terminal.until(f"▸{waiting:3} n ", f"── job {waiting} n ", "are not needed by the job that runs")
    terminal.send("k")
    terminal.until(f"▸{running:3} m ")
    terminal.send("s")
    terminal.until("running, by memory")
    terminal.send("\r")
    terminal.until(
        *(
            "SELECT 1.0 AS x, 2.0 AS y",
            f"planned 1: job {running} has come",
            "plan 1 by joint",
            "adamw",
            "batch size 64",
        ),
        "Esc back",
    )
    terminal.send("\x1b")
    terminal.until("running, by memory", without="Esc back")
    terminal.send("?")
    terminal.until("cancel the selected job, after a question")
    terminal.send("\x1b")
    terminal.until("running, by memory")
    terminal.send("q")
    assert terminal.status() == 0


def test_details_show_the_ranks_as_long_as_the_job_is_open(
    stage: Stage, live: Callable[..., Terminal], running: int
) -> None:
    rank = {"node": "10.0.0.4", "device": "cuda:0", "state": "training", "step": 7, "samples_per_s": 602.0}
    ranks = [rank | {"rank": number, "device_bytes": 1 << 20} for number in (1, 0)]
    stage.order(running, f"SELECT tensile_worker._job_ranks('{json.dumps(ranks)}')")
    terminal = live(width=120, height=40)
    terminal.until(f"▸{running:3} m ")
    terminal.send("\r")
    numbers = "10.0.0.4  cuda:0  training     7     602  1.00 MB"
    terminal.until("rank  node", f"   0  {numbers}", f"   1  {numbers}")


@pytest.mark.long
def test_c_cancels_after_a_question(
    stage: Stage, live: Callable[..., Terminal], running: int, wait_until: Wait
) -> None:
    terminal = live()
    terminal.until(f"▸{running:3} m ")
    terminal.send("cy")  # typed ahead: no answer to a question that is not yet shown
    terminal.until(f"Cancel job {running}? y cancels it")
    terminal.send("n")
    terminal.until("q quit")
    assert state(stage.conn, running) == "running"
    assert value(stage.conn, "SELECT cancel_requested FROM tensile.jobs WHERE job = %s", running) is False
    terminal.send("c")
    terminal.until(f"Cancel job {running}?")
    terminal.send("y")
    terminal.until(f"Job {running} is being cancelled.")
    wait_until(lambda: state(stage.conn, running) == "cancelled")
    terminal.until("No open jobs", "0 running, 0 waiting")
    terminal.until("q quit", without="is being cancelled")  # the message disappears


def test_a_refused_cancel_is_shown_and_the_view_continues(
    stage: Stage, live: Callable[..., Terminal], running: int
) -> None:
    terminal = live("watcher")
    terminal.until(f"▸{running:3} m ")
    terminal.send("c")
    terminal.until(f"Cancel job {running}?")
    terminal.send("y")
    terminal.until(f"permission denied for job {running}")
    terminal.send("j")
    terminal.until(f"▸{running:3} m ", "q quit")
    assert state(stage.conn, running) == "running"


def test_details_stay_when_the_job_has_ended(
    stage: Stage, live: Callable[..., Terminal], running: int, wait_until: Wait
) -> None:
    terminal = live()
    terminal.until(f"▸{running:3} m ")
    terminal.send("\r")
    terminal.until("plan 1 by joint")
    stage.conn.execute(
        "SELECT tensile_internal._end_job(%s, 'failed', '22000', 'no rows', 'Ask for some.')", (running,)
    )
    stage.conn.execute(
        "UPDATE tensile_internal.jobs SET cancel_requested = true WHERE id = %s", (running,)
    )  # the worker reads it
    terminal.until("failed", "no rows (22000)", "Ask for some.", "0 running, 0 waiting")
    terminal.send("\x1b")
    terminal.until("No open jobs")
    wait_until(
        lambda: value(stage.conn, "SELECT count(*) FROM tensile_worker._progress()") == 0, what="its worker ends"
    )


def test_ctrl_z_gives_the_terminal_back_and_fg_takes_it_again(stage: Stage, wait_until: Wait) -> None:
    """bash is the shell that the view is stopped under, and continued by."""
    top = " ".join(f"'{part}'" for part in command(stage, "--interval", "0.2"))
    script = f"{top}; echo stopped with $?; read -r line; fg; echo ended with $?"
    with Terminal(["bash", "--norc", "-mc", script], wait_until) as terminal:
        terminal.until("No open jobs", "q quit")
        terminal.send("\x1a")
        terminal.until("stopped with 148")
        terminal.await_restored()
        terminal.send("\n")
        terminal.until("No open jobs", "q quit", without="stopped")
        terminal.send("q")
        terminal.until("ended with 0")
        assert terminal.status() == 0


@pytest.mark.long
def test_the_server_goes_away_and_comes_back(fresh_cluster: Callable[..., Any], wait_until: Wait) -> None:
    cluster = fresh_cluster()
    with Terminal(command(cluster, "--interval", "0.2", user="postgres"), wait_until) as terminal:
        terminal.until("No open jobs", without="trying again")
        for mode in ("fast", "immediate"):
            cluster.stop(mode)
            terminal.until("trying again: cannot connect", "No open jobs")
            terminal.send("?")  # keys work while the server is down
            terminal.until("cancel the selected job")
            terminal.send("\x1b")
            cluster.start()
            terminal.until("No open jobs", without="trying again")
        with cluster.connect() as conn:
            conn.execute("DROP EXTENSION pg_tensile")
            terminal.until("trying again", "no extension pg_tensile")
            conn.execute("CREATE EXTENSION pg_tensile")
            terminal.until("No open jobs", without="trying again")
        terminal.send("q")
        assert terminal.status() == 0
        terminal.await_restored()


# -- cost -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def crowd(stage: Stage, wait_until: Wait) -> Iterator[list[int]]:
    """Sixteen running jobs with numbers."""
    models = [f"crowd {number}" for number in range(16)]
    for model in models:
        register(stage.alice, model)
    jobs = [train(stage.alice, model) for model in models]
    for job in jobs:
        stage.order(job, f"SELECT tensile_worker._report({REPORT})")
    yield jobs
    for job in jobs:
        stage.cancel(job)
    wait_until(lambda: value(stage.conn, "SELECT count(*) FROM tensile_worker._progress()") == 0)


@pytest.mark.long
@pytest.mark.timeout(180)
def test_a_refresh_takes_less_than_ten_milliseconds_of_the_server(stage: Stage, crowd: list[int]) -> None:
    """Less than 1 % of a core at one refresh a second. The first refreshes, which plan the query, do not count.

    Long: many refreshes are averaged.
    """
    arguments = ["env", "--default-signal=INT", *command(stage, "--json", "--interval", "0.1")]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(arguments, cwd=REPOSITORY, **pipes) as process:
        assert process.stdout is not None and process.stderr is not None
        for _ in range(10):
            output = json.loads(process.stdout.readline())
        assert [job["job"] for job in output["jobs"]] == crowd
        backend = "SELECT pid FROM pg_stat_activity WHERE application_name = 'pg_tensile' AND usename = 'alice'"
        pid = value(stage.conn, backend)
        before = cpu_seconds(pid)
        for _ in range(REFRESHES):
            process.stdout.readline()
        spent = cpu_seconds(pid) - before
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=20)
    assert process.returncode == 0
    assert spent / REFRESHES < 0.01
