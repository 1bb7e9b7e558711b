"""Limits of a role's jobs: how many run at once (the queue's part is in test_catalogue.py), memory, and time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from tests.server.support import (
    ENDLESS_ROWS,
    FOREVER,
    MLP,
    Connection,
    Row,
    Wait,
    ended,
    finish,
    reason,
    state,
    submit,
    value,
)

MAX_JOBS, MEMORY, TIME = "pg_tensile.role_max_jobs", "pg_tensile.role_job_memory", "pg_tensile.role_job_time"
WIDE = {"type": "mlp", "hidden": [512, 512]}  # some MB with gradients and optimizer state
LIMIT = "SELECT tensile_internal._role_limit(%s::regrole, %s)"


@pytest.fixture
def ann(roles: Callable[..., str]) -> str:
    return roles("ann")


def test_a_limit_is_what_a_new_session_of_the_role_would_have(
    db: Connection, ann: str, alter: Callable[..., None]
) -> None:
    """Whatever this session has; with a setting of its own role, it does not know the server's."""

    def limits(name: str) -> list[int | None]:
        return [value(db, LIMIT, role, name) for role in (ann, "postgres")]

    alter({MAX_JOBS: 9, MEMORY: "1GB"})
    assert limits(MAX_JOBS) == [9, 9] and limits(MEMORY) == [1 << 20, 1 << 20] and limits(TIME) == [None, None]
    db.execute(f"SET {MAX_JOBS} = 8")
    with db.transaction(force_rollback=True):
        database = value(db, "SELECT current_database()")
        for scope, expected in (
            ("ROLE postgres", [9, 5]),
            ("ROLE ALL", [5, 5]),
            (f"DATABASE {database}", [4, 5]),
            (f"ROLE {ann}", [3, 5]),
            (f"ROLE {ann} IN DATABASE {database}", [2, 5]),
        ):
            number = expected[1] if scope == "ROLE postgres" else expected[0]
            db.execute(f"ALTER {scope} SET {MAX_JOBS} = {number}")
            assert limits(MAX_JOBS) == expected, scope
        db.execute(f"ALTER ROLE {ann} IN DATABASE {database} SET {MAX_JOBS} = 0")
        db.execute(f"ALTER ROLE {ann} SET {MEMORY} = '2MB'; ALTER ROLE {ann} SET {TIME} = '1h'")
        assert [value(db, LIMIT, ann, name) for name in (MAX_JOBS, MEMORY, TIME)] == [None, 2048, 3600]


@pytest.mark.parametrize("setting", [MAX_JOBS, MEMORY, TIME])
def test_a_role_cannot_raise_its_limits(ann: str, connect: Callable[..., Connection], setting: str) -> None:
    conn = connect(ann)
    for change in ("SET", f"ALTER ROLE {ann} SET"):
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match="permission denied to set parameter"):
            conn.execute(f"{change} {setting} = 0")


def test_others_do_not_wait_for_a_role_with_too_many_jobs(
    db: Connection, ann: str, connect: Callable[..., Connection], wait_until: Wait
) -> None:
    conn = connect(ann)  # before the limit
    db.execute(f"ALTER ROLE {ann} SET {MAX_JOBS} = 1")
    first = submit(conn, "first", MLP, query=ENDLESS_ROWS)
    wait_until(lambda: state(db, first) == "running")
    second = submit(conn, "second", MLP, epochs=1, priority=9)
    full = f'role "{ann}" runs 1 of 1 jobs ({MAX_JOBS})'
    wait_until(lambda: reason(conn, second) == full, what=lambda: str(reason(conn, second)))
    finish(db, submit(db, "others", MLP, epochs=1, priority=-9))
    assert (state(db, second), value(conn, "SELECT reason FROM tensile.progress WHERE job = %s", second)) == (
        "queued",
        full,
    )
    db.execute("SELECT cancel_job(%s)", (first,))
    finish(conn, second)


def test_a_job_above_its_roles_memory_fails_and_says_whose_limit_it_is(
    db: Connection, ann: str, connect: Callable[..., Connection], wait_until: Wait, job_row: Row
) -> None:
    """A larger memory_budget does not help, and a setting of the session does not exist."""
    db.execute(f"ALTER ROLE {ann} SET {MEMORY} = '1MB'")
    conn = connect(ann)
    job = submit(conn, "wide", WIDE, epochs=1, memory_budget="1GB")
    wait_until(lambda: ended(conn, job))
    row = job_row(conn, job)
    assert (row["state"], row["sqlstate"], row["role_memory"]) == ("failed", "53200", 1 << 20)
    assert "may have 1,048,576" in row["error"] and MEMORY in row["hint"], (row["error"], row["hint"])


def test_a_job_is_planned_within_its_roles_memory(db: Connection, ann: str, connect: Callable[..., Connection]) -> None:
    """It needs more without a plan."""
    db.execute(f"ALTER ROLE {ann} SET {MEMORY} = '2MB'")
    conn = connect(ann)
    job = submit(conn, "deep", {"type": "mlp", "hidden": [256] * 4}, epochs=1, policy="joint")
    finish(conn, job)
    without, granted = conn.execute(
        "SELECT t.vanilla_bytes, p.granted_bytes FROM tensile.traces t JOIN tensile.plans p USING (job) WHERE job = %s",
        (job,),
    ).fetchone() or (0, 0)
    assert without > 2 << 20 >= granted > 0


def test_a_job_trains_no_longer_than_its_role_may(
    db: Connection, ann: str, connect: Callable[..., Connection], job_row: Row
) -> None:
    db.execute(f"ALTER ROLE {ann} SET {TIME} = '1s'")
    conn = connect(ann)
    details: list[str | None] = []
    conn.add_notice_handler(lambda notice: details.append(notice.message_detail))
    job = submit(conn, "m", MLP, epochs=FOREVER, max_time="1 year")
    finish(conn, job)
    row: dict[str, Any] = job_row(conn, job)
    assert (row["stopped"], row["max_time"].days, row["role_time"].seconds) == ("max_time", 365, 1)
    assert any(f"the time was up ({TIME})" in (detail or "") for detail in details), details
