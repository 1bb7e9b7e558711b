"""Schedules: training again by time and by new rows, as the role that has scheduled it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from psycopg.types.json import Jsonb

from tests.server.cast import current_user
from tests.server.refusals import refused
from tests.server.support import MLP, ROWS, SMALL_JOB, Connection, Wait, finish, register, state, value

STATUS = "SELECT last_state, last_error FROM tensile.schedules"


def schedule(conn: Connection, model: str = "m", **arguments: Any) -> int:
    """Call schedule_training with small defaults; return the id of the schedule."""
    arguments = SMALL_JOB | {"options": {"keep": "last"}} | arguments
    arguments["options"] = Jsonb(arguments["options"])
    named = ", ".join(f"{name} => %({name})s" for name in arguments)
    return int(value_of(conn, f"SELECT schedule_training(%(model)s, {named})", arguments | {"model": model}))


def value_of(conn: Connection, sql: str, parameters: dict[str, Any]) -> Any:
    row = conn.execute(sql, parameters).fetchone()
    assert row is not None
    return row[0]


def due(conn: Connection) -> None:
    """Make the schedules due, as if their time had come some periods ago."""
    conn.execute(
        "UPDATE tensile_internal.schedules SET created_at = created_at - 5.5 * every, next_run = next_run - 5 * every;"
        " SELECT tensile_internal._notify(-1)"
    )


def jobs(conn: Connection) -> list[int]:
    return [row[0] for row in conn.execute("SELECT job FROM tensile.jobs WHERE kind = 'train' ORDER BY job").fetchall()]


def job_of_schedule(conn: Connection, wait_until: Wait, number: int = 1) -> int:
    """Wait until that many jobs exist; return the last one."""
    return int(wait_until(lambda: jobs(conn)[number - 1 :])[-1])


def test_a_job_for_each_period_and_one_for_all_that_were_missed(db: Connection, wait_until: Wait) -> None:
    register(db, "m", MLP)
    db.execute("SET TimeZone = 'Asia/Tokyo'")
    schedule(db, every="1 day", seed=7, learning_rate=0.0123, max_time="1 hour 30 minutes", priority=3)
    assert value(db, "SELECT next_run > now() + interval '23 hours' FROM tensile.schedules")
    assert jobs(db) == []
    due(db)
    job = job_of_schedule(db, wait_until)
    finish(db, job)
    row = db.execute(
        "SELECT query, target, epochs, batch_size, seed, learning_rate, max_time::text, priority,"
        " settings->>'TimeZone', owner FROM tensile.jobs WHERE job = %s",
        (job,),
    ).fetchone()
    assert row == (ROWS, "y", 2, 64, 7, 0.0123, "01:30:00", 3, "Asia/Tokyo", "postgres")
    status = (
        "SELECT last_state, last_job, last_version, decision, next_run > now(), next_run < now() + interval '1 day'"
    )
    assert db.execute(f"{status} FROM tensile.schedules").fetchone() == (
        *("finished", job, 1, "deployed"),
        *(True, True),
    )
    assert jobs(db) == [job]


def test_a_schedule_waits_for_the_job_of_its_model(db: Connection, wait_until: Wait) -> None:
    """It submits one job then, although several periods have passed, and none beside one that it has submitted."""
    register(db, "m", MLP)
    schedule(db, every="1 day")
    db.execute("SELECT pg_advisory_lock(11)")
    query = f"SELECT r.* FROM ({ROWS}) r, pg_advisory_xact_lock_shared(11)"
    first = value(db, "SELECT train_model('m', %s, 'y', epochs => 1, policy => 'none')", query)
    due(db)
    wait_until(lambda: state(db, first) == "running")
    due(db)
    wait_until(lambda: value(db, "SELECT count(*) = 1 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"))
    assert jobs(db) == [first]
    assert value(db, "SELECT next_run < now() FROM tensile.schedules")
    db.execute("SELECT pg_advisory_unlock(11)")
    finish(db, job_of_schedule(db, wait_until, 2))
    assert len(jobs(db)) == 2


@pytest.mark.parametrize("partitioned", [False, True])
def test_new_rows_cause_a_training(db: Connection, wait_until: Wait, partitioned: bool) -> None:
    db.execute("CREATE TABLE points (a float8, y text)" + (" PARTITION BY RANGE (a)" if partitioned else ""))
    if partitioned:
        db.execute("CREATE TABLE low PARTITION OF points DEFAULT")
    insert = (
        "INSERT INTO points SELECT sin(i), CASE WHEN sin(i) > 0 THEN 'yes' ELSE 'no' END FROM generate_series(1, {}) i"
    )
    register(db, "m", MLP)
    db.execute(insert.format(300))
    counted = "SELECT {} = %s FROM tensile.schedules"
    flush = "SELECT pg_stat_force_next_flush()"
    db.execute(flush)
    wait_until(lambda: value(db, "SELECT tensile_worker._inserted_rows('points') = 300"))
    schema = value(db, "SELECT current_schema()")
    schedule(db, query=f"SELECT * FROM {schema}.points", rows=100, source=f"{schema}.points")
    db.execute(insert.format(99))
    db.execute(flush)
    wait_until(lambda: value(db, counted.format("new_rows"), 99))
    db.execute("SELECT tensile_internal._notify(-1)")
    db.execute(insert.format(1))
    db.execute(flush)
    wait_until(lambda: value(db, counted.format("new_rows"), 100) or jobs(db))
    db.execute("SELECT tensile_internal._notify(-1)")
    job = job_of_schedule(db, wait_until)
    finish(db, job)
    assert value(db, "SELECT rows FROM tensile.jobs WHERE job = %s", job) == 400
    assert value(db, counted.format("new_rows"), 0) and jobs(db) == [job]
    if not partitioned:
        db.execute("DROP TABLE points; SELECT tensile_internal._notify(-1)")
        wait_until(lambda: db.execute(STATUS).fetchone() == ("refused", "the source of the schedule was dropped"))


@pytest.mark.parametrize(
    ("arguments", "sqlstate", "message", "hint"),
    [
        ({}, "22023", "a schedule needs a time, a number of rows or a drift", "every =>"),
        ({"every": "0 s"}, "22023", "every is out of range: 00:00:00", "1 second"),
        ({"every": "-1 day"}, "22023", "every is out of range: -1 days", "1 second"),
        ({"every": "1 ms"}, "22023", "every is out of range", "1 second"),
        ({"every": "1000 years"}, "22023", "every is out of range", "100 years"),
        ({"every": "-1 month 30 days 00:00:01"}, "22023", "every is out of range", "different signs"),
        ({"every": "2 months -1 second"}, "22023", "every is out of range", "different signs"),
        ({"rows": 10}, "22023", "rows needs the table whose new rows count", "source =>"),
        ({"rows": 0, "source": "pg_class"}, "22023", "rows is out of range: 0", "number of new rows"),
        ({"every": "1 day", "source": "pg_class"}, "22023", "source is given without rows", "source"),
        ({"rows": 10, "source": "pg_tables"}, "22023", 'source "pg_tables" is not a table', "tables"),
        ({"every": "1 day", "model": "none"}, "42704", 'model "none" does not exist', "register_model"),
        ({"every": "1 day", "query": "SELECT 1"}, "42703", "is not a column", "target"),
        ({"every": "1 day", "epochs": 0}, "22023", "epochs is out of range", "1 to"),
        ({"every": "1 day", "options": {"keep": "all"}}, "22023", 'key "keep"', "best"),
    ],
)
def test_wrong_arguments(db: Connection, arguments: dict[str, Any], sqlstate: str, message: str, hint: str) -> None:
    register(db, "m", MLP)
    refused(sqlstate, message, hint, lambda: schedule(db, **arguments))
    assert value(db, "SELECT count(*) FROM tensile_internal.schedules") == 0


def test_a_model_has_one_schedule(db: Connection, connect: Callable[..., Connection]) -> None:
    register(db, "m", MLP)
    schedule(db, every="1 day")
    refused("42710", 'model "m" already has a schedule', "unschedule_training", lambda: schedule(db, every="1 day"))
    assert value(db, "SELECT unschedule_training('m')") is True
    assert value(db, "SELECT unschedule_training('m')") is False
    with db.transaction(force_rollback=True):
        schedule(db, every="1 day")
    assert value(db, "SELECT count(*) FROM tensile_internal.schedules") == 0
    schedule(db, every="1 month")
    db.execute("SELECT drop_model('m')")
    assert value(db, "SELECT count(*) FROM tensile_internal.schedules") == 0


def test_the_next_run_is_a_whole_number_of_periods_after_the_first(db: Connection) -> None:
    next_run = "SELECT tensile_internal._next_run(%s::timestamptz, %s::interval)"
    for start, every in (
        ("2020-01-31 10:00", "1 month"),
        ("2000-02-29 00:00", "1 year"),
        ("2020-03-01 00:00", "1 week 1 hour"),
        ("1990-01-01 00:00", "1 second"),
    ):
        found = value(db, next_run, start, every)
        now = value(db, "SELECT clock_timestamp()")
        assert found > value(db, "SELECT now() - %s::interval * 0.001", every)
        assert value(db, "SELECT %s - %s::interval <= %s", found, every, now) or every == "1 month"
        assert value(db, "SELECT count(*) FROM generate_series(1, 400) k WHERE %s::timestamptz + k * %s::interval = %s",
                     start, every, found) == (1 if every.endswith(("month", "year", "hour")) else 0)  # fmt: skip
    assert value(db, "SELECT tensile_internal._next_run(now(), NULL)") is None


def test_the_controller_sleeps_until_the_next_run(db: Connection) -> None:
    delay = "SELECT tensile_internal._schedule_delay_ms()"
    assert value(db, delay) is None
    for model, arguments in (("a", {"rows": 10, "source": "pg_class"}), ("b", {"every": "30 minutes"})):
        register(db, model, MLP)
        schedule(db, model, **arguments)
        assert value(db, delay) is None if model == "a" else 1_000_000 < value(db, delay) <= 1_800_000


# -- other roles ------------------------------------------------------------------------------------------------------


def test_a_role_that_has_lost_a_privilege_is_told_and_tried_again(
    db: Connection, roles: Callable[..., str], connect: Callable[..., Connection], wait_until: Wait
) -> None:
    register(db, "m", MLP)
    role = roles("trainer")
    trainer = connect(role)
    refused("42501", 'permission denied for model "m"', "grant_model", lambda: schedule(trainer, every="1 day"))
    db.execute("SELECT grant_model('m', %s, 'train')", (role,))
    schema = value(db, "SELECT current_schema()")
    db.execute(f"CREATE TABLE points AS {ROWS}; GRANT SELECT ON points TO {role}")
    schedule(trainer, query=f"SELECT * FROM {schema}.points", every="1 day")

    def outcome(message: str) -> bool:
        found = trainer.execute(STATUS).fetchone()
        return found is not None and message in (found[1] or "")

    steps = [
        ("SELECT revoke_model('m', '{role}', 'train')", 'permission denied for model "m"'),
        (
            "SELECT grant_model('m', '{role}', 'train'); REVOKE tensile_user FROM {role}",
            "permission denied for function",
        ),
        ("GRANT tensile_user TO {role}; REVOKE SELECT ON points FROM {role}", "permission denied for table points"),
    ]
    for change, message in steps:
        db.execute(change.format(role=role))
        due(db)
        if "tensile_user FROM" in change:
            wait_until(
                lambda: (
                    value(db, "SELECT error FROM tensile_internal.schedules")
                    == "permission denied for function train_model"
                )
            )
        else:
            wait_until(lambda: outcome(message), what=message)  # noqa: B023
    assert value(db, "SELECT next_run > now() FROM tensile_internal.schedules")
    db.execute(f"GRANT SELECT ON points TO {role}")
    number = len(jobs(db))
    due(db)
    job = job_of_schedule(db, wait_until, number + 1)
    finish(db, job)
    assert value(db, "SELECT owner FROM tensile.jobs WHERE job = %s", job) == role
    assert trainer.execute(STATUS).fetchone() == ("finished", None)


def test_schedules_of_others(
    db: Connection, roles: Callable[..., str], connect: Callable[..., Connection], wait_until: Wait
) -> None:
    owner, trainer, other = (connect(roles(name)) for name in ("owner", "trainer", "other"))
    register(owner, "m", MLP)
    owner.execute("SELECT grant_model('m', %s, 'train')", (current_user(trainer),))
    schedule(trainer, every="1 day")
    assert value(trainer, "SELECT count(*) FROM tensile.schedules") == 1
    assert value(other, "SELECT count(*) FROM tensile.schedules") == 0
    remove = "SELECT unschedule_training('m')"
    refused("42501", 'must be owner of model "m"', current_user(owner), lambda: other.execute(remove))
    assert value(owner, remove) is True
    schedule(trainer, every="1 day")
    assert value(trainer, remove) is True
    schedule(trainer, every="1 day")
    db.execute(f"DROP OWNED BY {current_user(trainer)}")
    name = current_user(trainer)
    trainer.close()
    db.execute(f"DROP ROLE {name}")
    due(db)
    wait_until(
        lambda: value(db, "SELECT error FROM tensile_internal.schedules") == f'role "{name}" was dropped or renamed'
    )
    db.execute("CREATE TABLE hidden (x int)")
    schema = value(db, "SELECT current_schema()")
    owner.execute(remove)
    refused(
        "42501",
        "permission denied for table",
        "GRANT SELECT",
        lambda: schedule(owner, rows=1, source=f"{schema}.hidden"),
    )


# -- restarts ---------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_training_that_was_missed_while_the_server_was_down_is_made_up_once(
    cluster: Any, db: Connection, wait_until: Wait
) -> None:
    """The server starts anew."""
    register(db, "m", MLP)
    gate = {"query": ROWS, "metric": "accuracy"}
    schedule(db, every="1 hour", options={"deploy": "if_better", "gate": gate})
    db.execute(
        "UPDATE tensile_internal.schedules SET created_at = created_at - interval '3 days', next_run = now() + '1 s'"
    )
    db.close()
    cluster.restart("fast")
    with cluster.connect() as conn:
        job = job_of_schedule(conn, wait_until)
        finish(conn, job)
        assert jobs(conn) == [job]
        assert value(conn, "SELECT next_run > now() FROM tensile_internal.schedules")
        due(conn)
        job = job_of_schedule(conn, wait_until, 2)
        finish(conn, job)
        assert value(conn, "SELECT decision FROM tensile.schedules") == "kept"  # the same weights
