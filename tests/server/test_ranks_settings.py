"""Jobs with ranks as the server sees them: option, settings, their device, and what their trainer reports.

There is no Ray here: trainers are prompted.py, which send what the tests write down.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.types.json import Jsonb

from pg_tensile.tools.cli.main import main
from pyworker.cluster_device import cluster_device
from pyworker.wire import FrameType
from scripts.cluster import child_python
from tests.server.prompted import GIGABYTE, PROFILE, Prompter
from tests.server.refusals import refused
from tests.server.support import BY_CANCEL_JOB, Connection, Row, Wait, phase, reason, register, state, train_late, value
from tests.unit.records import facts_in

NO_CLUSTER = "no Ray cluster is configured"

# -- option and settings ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "arguments", "message", "hint"),
    [
        ({"ranks": 0}, {}, 'invalid value for key "ranks" in the options: 0', "an integer from 1 to 1024, or an array"),
        ({"ranks": "2"}, {}, 'invalid value for key "ranks" in the options: "2"', "an integer from 1 to 1024"),
        ({"ranks": [2]}, {}, 'invalid value for key "ranks" in the options: [2]', "an array of 2 values"),
        ({"ranks": [1, 1025]}, {}, 'invalid value for key "ranks[1]" in the options: 1025', "from 1 to 1024"),
        ({"ranks": [4, 2]}, {}, 'key "ranks" in the options is empty: from 4 to 2', "[2, 4]"),
        ({"ranks": 2}, {"batch_size": 0}, "cannot choose a batch size for several ranks: 2", "batch_size"),
        ({"ranks": [1, 2]}, {"batch_size": 0}, "cannot choose a batch size for several ranks: [1, 2]", "one rank"),
    ],
)
def test_wrong_ranks_are_refused(
    flights: Connection, options: dict[str, Any], arguments: dict[str, Any], message: str, hint: str
) -> None:
    refused("22023", message, hint, lambda: train_late(flights, options=Jsonb(options), **arguments))


@pytest.mark.parametrize("ranks", [1, [1, 1]])
@pytest.mark.parametrize("arguments", [{}, {"batch_size": 0}])
def test_ranks_need_a_cluster(flights: Connection, ranks: object, arguments: dict[str, Any]) -> None:
    options = Jsonb({"ranks": ranks})
    refused("55000", NO_CLUSTER, "pg_tensile.ray_address", lambda: train_late(flights, options=options, **arguments))
    assert value(flights, "SELECT count(*) FROM tensile.jobs") == 0


@pytest.fixture
def write_setting(db: Connection) -> Iterator[Callable[[str, str], object]]:
    """Write a setting to postgresql.auto.conf, without a reload, if it is valid."""
    yield lambda name, text: db.execute(
        sql.SQL("ALTER SYSTEM SET {} = {}").format(sql.Identifier("pg_tensile", name), sql.Literal(text))
    )
    for name in ("ray_address", "ray_token_file", "ray_timeout"):
        db.execute(sql.SQL("ALTER SYSTEM RESET {}").format(sql.Identifier("pg_tensile", name)))


@pytest.mark.parametrize(
    "text", ["ray://head:10001", "ray://10.0.0.1:1", "ray://[fe80::1]:65535", "ray://gpu-1.example.org:10001", ""]
)
def test_addresses_of_clusters(write_setting: Callable[[str, str], object], text: str) -> None:
    write_setting("ray_address", text)


@pytest.mark.parametrize(
    ("name", "text", "detail"),
    [
        *(
            ("ray_address", text, '"ray://host:port"')
            for text in (
                *("auto", "ray:", "ray://", "ray://head", "ray://:10001", "ray://head:", "ray://head:0"),
                *("ray://head:65536", "ray://head:1a", "ray://he ad:1", "ray://head:1/x", "ray://user@head:1"),
                *("ray://fe80::1:1", "ray://[]:1", "ray://[x]:1", "http://head:1"),
            )
        ),
        ("ray_token_file", "token", "must be absolute"),
        ("ray_timeout", "0", None),
    ],
)
def test_wrong_settings_are_refused(
    write_setting: Callable[[str, str], object], name: str, text: str, detail: str | None
) -> None:
    with pytest.raises(psycopg.errors.InvalidParameterValue) as caught:
        write_setting(name, text)
    assert detail is None or detail in (caught.value.diag.message_detail or "")


def test_the_path_of_the_token_is_for_superusers_only(
    db: Connection, roles: Callable[..., str], connect: Callable[..., Connection]
) -> None:
    with connect(roles("user")) as conn:
        assert value(conn, "SHOW pg_tensile.ray_address") == ""
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            conn.execute("SHOW pg_tensile.ray_token_file")


# -- jobs -------------------------------------------------------------------------------------------------------------

SETTINGS = {
    "pg_tensile.ray_address": "ray://head.example:10001",
    "pg_tensile.ray_token_file": "/nowhere/token",
    "pg_tensile.ray_timeout": "7s",
    "pg_tensile.device_memory": "1GB",
}


@pytest.fixture(scope="module")
def prompter(new_cluster: Callable[..., Any], wait_until: Wait) -> Iterator[Prompter]:
    cluster = new_cluster(SETTINGS)
    try:
        with cluster.connect() as conn:
            conn.execute(
                "CREATE ROLE alice LOGIN; CREATE ROLE mallory LOGIN; CREATE ROLE watcher LOGIN IN ROLE"
                " pg_read_all_stats; GRANT tensile_user TO alice, mallory, watcher"
            )
        yield Prompter(cluster, wait_until, child_python())
    finally:
        cluster.end()


@pytest.fixture
def alice(prompter: Prompter) -> Iterator[Connection]:
    with prompter.cluster.connect(user="alice") as conn:
        register(conn, "m")
        yield conn
        conn.execute("SELECT cancel_job(job) FROM tensile.progress")
        conn.execute("SELECT drop_model('m')")


def train(conn: Connection, ranks: object = 2) -> int:
    options = {} if ranks is None else {"ranks": ranks}
    call = "SELECT train_model('m', 'SELECT 1.0 AS x, 2.0 AS y', 'y', batch_size => 8, options => %s)"
    return int(value(conn, call, Jsonb(options)))


def report(rank: int, **fields: Any) -> dict[str, Any]:
    return {"rank": rank, "node": "10.0.0.7", "device": "cuda:0", "state": "training", "step": 3} | fields


def ranks(conn: Connection, columns: str = "rank, state, step") -> list[Any]:
    return conn.execute(f"SELECT {columns} FROM tensile.ranks ORDER BY job, rank").fetchall()


def is_planned(conn: Connection, job: int) -> bool:
    """Return whether the job runs with the memory that it was granted."""
    planned = "SELECT count(*) FROM tensile.scheduler_log WHERE event = 'planned' AND job = %s"
    return state(conn, job) == "running" and value(conn, planned, job) > 0


def failed(conn: Connection, wait_until: Wait, job_row: Row, job: int) -> dict[str, Any]:
    wait_until(lambda: state(conn, job) == "failed", what=lambda: str(job_row(conn, job)))
    return job_row(conn, job)


@pytest.mark.parametrize(("given", "expected"), [(3, [3, 3]), ([2, 4], [2, 4]), (None, None)])
def test_the_trainer_learns_of_ranks_and_cluster(
    prompter: Prompter, alice: Connection, given: object, expected: object
) -> None:
    """The role that submits the job may not read all of the settings."""
    spec = prompter.spec(train(alice, given))
    ray = {"address": "ray://head.example:10001", "token_file": "/nowhere/token", "timeout_s": 7}
    assert (spec["ranks"], spec["ray"]) == (expected, ray if given else None)


def test_a_job_waits_for_the_cluster_and_goes_on(prompter: Prompter, alice: Connection, wait_until: Wait) -> None:
    job = train(alice)

    def waits(text: str) -> None:
        wait_until(lambda: (state(alice, job), reason(alice, job)) == ("waiting", text))

    prompter.progress(job, phase="waiting", waits_for="2 GPUs, 0 are free")
    waits("2 GPUs, 0 are free")
    prompter.progress(job, phase="waiting", waits_for="2 GPUs, 1 is free")
    waits("2 GPUs, 1 is free")
    prompter.progress(job, samples_per_s=1.0)
    prompter.progress(job, phase="waiting", loss=1.0)
    wait_until(lambda: value(alice, "SELECT loss FROM tensile.progress WHERE job = %s", job) == 1)
    assert state(alice, job) == "waiting"
    prompter.progress(job, phase="building")
    wait_until(lambda: (state(alice, job), reason(alice, job)) == ("running", None))
    prompter.progress(job, phase="waiting", waits_for="2 GPUs, 1 is free")
    waits("2 GPUs, 1 is free")
    prompter.progress(job, waits_for=None)
    wait_until(lambda: (state(alice, job), reason(alice, job)) == ("running", None))


def test_a_job_that_waits_for_the_cluster_can_be_cancelled(
    prompter: Prompter, alice: Connection, wait_until: Wait
) -> None:
    job = train(alice)
    prompter.progress(job, phase="waiting", waits_for="4 GPUs")
    wait_until(lambda: state(alice, job) == "waiting")
    alice.execute("SELECT cancel_job(%s)", (job,))
    wait_until(lambda: state(alice, job) == "cancelled")
    assert reason(alice, job) == BY_CANCEL_JOB


def test_ranks_are_shown_to_the_owner_while_they_train(prompter: Prompter, alice: Connection, wait_until: Wait) -> None:
    job = train(alice)
    prompter.progress(job, phase="building", ranks=[report(1, device="", step=None), report(0, samples_per_s=2)])
    everything = "job, rank, node, device, state, step, samples_per_s, device_bytes"
    wait_until(lambda: ranks(alice))
    assert ranks(alice, everything) == [
        (job, 0, "10.0.0.7", "cuda:0", "training", 3, 2.0, None),
        (job, 1, "10.0.0.7", None, "training", None, None, None),
    ]
    prompter.progress(job, ranks=[report(0, state="validating", step=4, device_bytes=2**40)])
    wait_until(lambda: ranks(alice, "rank, state, device_bytes") == [(0, "validating", 2**40)])
    for name, visible in (("watcher", 1), ("mallory", 0)):
        with prompter.cluster.connect(user=name) as conn:
            assert len(ranks(conn)) == visible
    alice.execute("SELECT cancel_job(%s)", (job,))
    wait_until(lambda: state(alice, job) == "cancelled")
    assert ranks(alice) == []
    with prompter.cluster.connect() as conn:
        assert value(conn, "SELECT count(*) FROM tensile_internal.rank_reports") == 0


def test_a_report_names_the_ranks(prompter: Prompter, alice: Connection, wait_until: Wait, tmp_path: Path) -> None:
    job, path = train(alice), tmp_path / "report.html"
    prompter.progress(job, ranks=[report(1, device="cuda:1"), report(0)])
    wait_until(lambda: ranks(alice))
    assert main(["report", str(job), "-d", prompter.cluster.dsn(user="alice"), "-o", str(path)]) == 0
    page = path.read_text("utf-8")
    assert "cuda:0, cuda:1 on 10.0.0.7" in page
    facts = facts_in(page)["ranks"]
    assert (facts["number"], [row["rank"] for row in facts["reports"]]) == (2, [0, 1])
    alice.execute("SELECT cancel_job(%s)", (job,))
    wait_until(lambda: state(alice, job) == "cancelled")
    assert main(["report", str(job), "-d", prompter.cluster.dsn(user="alice"), "-o", str(path)]) == 0
    assert facts_in(path.read_text("utf-8"))["ranks"]["reports"] == []


@pytest.mark.parametrize(
    ("given", "header"),
    [
        pytest.param(2, {"ranks": {"0": report(0)}}, id="no array"),
        pytest.param(2, {"ranks": [report(0), report(0)]}, id="a rank twice"),
        pytest.param(2, {"ranks": [report(0, step="3")]}, id="a text for a number"),
        pytest.param(2, {"waits_for": 4}, id="a number for a text"),
        pytest.param(None, {"ranks": [report(0)]}, id="ranks of a job without any"),
        pytest.param(None, {"waits_for": "4 GPUs"}, id="a cluster of a job without ranks"),
    ],
)
def test_impossible_reports_fail_the_job(
    prompter: Prompter, alice: Connection, wait_until: Wait, job_row: Row, given: object, header: dict[str, Any]
) -> None:
    job = train(alice, given)
    prompter.progress(job, **header)
    row = failed(alice, wait_until, job_row, job)
    assert row["sqlstate"] == "08P01" and row["error"].startswith("the trainer broke the protocol")


# -- the device of a job with ranks -----------------------------------------------------------------------------------


def test_a_job_with_ranks_has_a_device_of_its_own(prompter: Prompter, alice: Connection, wait_until: Wait) -> None:
    """It needs more memory than pg_tensile.device_memory, which is that of a device here."""
    job = train(alice)
    name = cluster_device(job)
    prompter.trace(job, name)
    wait_until(lambda: is_planned(alice, job))
    columns = "total_bytes, budget_bytes, granted_bytes >= %s, jobs"
    shown = alice.execute(f"SELECT {columns} FROM tensile.devices WHERE name = %s", (32 * GIGABYTE, name)).fetchone()
    assert shown == (64 * GIGABYTE, 64 * GIGABYTE, True, 1)
    codecs = {"device": "cpu", "times": {"waking_us": 1}, "relative_error": 0.0}
    prompter.send(job, FrameType.SPARSITY, {"revision": 1, "codecs": codecs}, buffers=5)
    with prompter.cluster.connect() as conn:
        wait_until(lambda: value(conn, "SELECT count(*) FROM tensile_internal.sparsities"))
        described = conn.execute("SELECT * FROM tensile_internal._device_description(%s)", (name,)).fetchone()
        assert described == (PROFILE, codecs["times"])
        of_the_machine = ("device_profiles", "codec_times")
        assert [value(conn, f"SELECT count(*) FROM tensile_internal.{table}") for table in of_the_machine] == [0, 0]
        assert conn.execute("SELECT device FROM tensile_internal._uncalibrated()").fetchall() == [("cpu",)]
        assert not value(conn, "SELECT tensile_internal._admission(0) ? %s", name)


@pytest.mark.parametrize(("given", "device"), [(2, "cpu"), (2, "ray:0"), (None, "ray:0")])
def test_a_device_of_others_fails_the_job(
    prompter: Prompter, alice: Connection, wait_until: Wait, job_row: Row, given: object, device: str
) -> None:
    job = train(alice, given)
    prompter.trace(job, device)
    row = failed(alice, wait_until, job_row, job)
    assert row["sqlstate"] == "08P01" and f'device "{device}"' in row["error"]


def test_a_job_waits_for_cluster_and_memory(prompter: Prompter, alice: Connection, wait_until: Wait) -> None:
    """It goes on when it has both."""
    job = train(alice)
    prompter.trace(job, cluster_device(job))
    wait_until(lambda: is_planned(alice, job))
    prompter.progress(job, phase="waiting", waits_for="2 GPUs")
    wait_until(lambda: state(alice, job) == "waiting")
    prompter.progress(job, phase="training")
    wait_until(lambda: state(alice, job) == "running" and phase(alice, job) == "training")


# -- the cluster fails ------------------------------------------------------------------------------------------------


def test_a_lost_cluster_interrupts_the_job_and_a_missing_one_fails_it(
    prompter: Prompter, alice: Connection, wait_until: Wait, job_row: Row
) -> None:
    job = train(alice)
    prompter.progress(job, phase="building", ranks=[report(0)])
    wait_until(lambda: ranks(alice))
    lost = {"sqlstate": "08006", "message": "the Ray cluster at head.example:10001 cannot be reached", "hint": "look"}
    prompter.send(job, FrameType.ERROR, lost)
    wait_until(lambda: reason(alice, job) == lost["message"])
    assert ranks(alice) == []
    wait_until(lambda: state(alice, job) == "running")
    assert job_row(alice, job)["retries"] == 1
    prompter.send(job, FrameType.ERROR, {"sqlstate": "28000", "message": "wrong token", "hint": "copy it"}, attempt=2)
    row = failed(alice, wait_until, job_row, job)
    assert (row["sqlstate"], row["error"], row["hint"]) == ("28000", "wrong token", "copy it")


def test_a_job_fails_if_its_cluster_is_not_configured_any_more(
    prompter: Prompter, alice: Connection, wait_until: Wait, job_row: Row
) -> None:
    job = train(alice)
    prompter.spec(job)
    cluster, address = prompter.cluster, SETTINGS["pg_tensile.ray_address"]
    cluster.configure({"pg_tensile.ray_address": ""})
    cluster.reload()
    try:
        prompter.send(job, FrameType.ERROR, {"sqlstate": "08006", "message": "it is lost"})
        row = failed(alice, wait_until, job_row, job)
    finally:
        cluster.configure({"pg_tensile.ray_address": address})
        cluster.reload()
        wait_until(lambda: value(alice, "SHOW pg_tensile.ray_address") == address)
    assert (row["sqlstate"], row["error"], row["attempts"]) == ("55000", NO_CLUSTER, 2)
    assert "pg_tensile.ray_address" in row["hint"]
