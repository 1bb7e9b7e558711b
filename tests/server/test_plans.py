"""Progress and plans in shared memory.

Scheduler and workers execute SQL of the tests (stage.py).
"""

from __future__ import annotations

import struct
import time
from typing import Any

import psycopg
import pytest

from tests.server.stage import REPORTED, Stage, event, fetch, plan_call, publish, report, use_device
from tests.server.support import Connection, value

NOTHING = (None,) * len(REPORTED)


def progress(conn: Connection, job: int) -> Any:
    return conn.execute(
        f"SELECT {', '.join(REPORTED)} FROM tensile_worker._progress() WHERE job = %s", (job,)
    ).fetchone()


# -- progress ---------------------------------------------------------------------------------------------------------


def test_progress_is_live_and_null_leaves_a_number_as_it_is(stage: Stage, job: int) -> None:
    assert progress(stage.alice, job) == NOTHING
    report(stage, job, phase="'training'", epoch=1, epochs=10, step=2, steps=20, loss=0.5, samples_per_s=1000)
    report(stage, job, device_bytes=4096, device_peak_bytes=8192, passive_swap_ins=3, utilisation=0.25)
    live = "training", 1, 10, 2, 20, 0.5, 1000, 4096, 8192, None, None, 3, 0.25, None, None, None
    assert progress(stage.alice, job) == live
    report(stage, job, step=3, loss="'NaN'", device_bytes=0, bytes_swapped=7, stall_us=8, raw_bytes_swapped=9)
    report(stage, job, time_left_s=60, least_time_left_s=30)
    row = progress(stage.alice, job)
    assert row[:5] == ("training", 1, 10, 3, 20) and row[5] != row[5]
    assert row[6:] == (1000, 0, 8192, 7, 8, 3, 0.25, 9, 60, 30)
    report(stage, job, phase=f"'{'ä' * 100}'")
    assert progress(stage.alice, job)[0] == "ä" * 15, "cut to 31 bytes, never within a character"


def test_progress_and_plan_are_visible_to_the_owner_and_pg_read_all_stats(stage: Stage, job: int) -> None:
    use_device(stage, job, "cpu")
    publish(stage, job, [event(1)])
    for user, seen in (("alice", 1), ("watcher", 1), ("postgres", 1), ("mallory", 0)):
        with stage.cluster.connect(user=user) as conn:
            of_worker = ("tensile_worker._progress()", "tensile_worker._plan()")
            for rows in (*of_worker, "tensile.progress", "tensile.plan_events"):
                assert value(conn, f"SELECT count(*) FROM {rows}") == seen, (user, rows)


# -- plans ------------------------------------------------------------------------------------------------------------


def test_a_published_plan_arrives_at_the_worker_and_in_sql(stage: Stage, planned: int) -> None:
    assert fetch(stage, planned, 0) == [None]
    events = [event(1, 5, 1, 10, 250, 12, 1 << 40), event(2, 5, 1, 30, 0, 40, 1 << 40), event(3, 6), event(4, 7)]
    first = publish(stage, planned, events, granted=900, planned=800, link=0.5)
    assert first == 1
    assert fetch(stage, planned, 0) == [{"g": first, "e": b"".join(events).hex()}]
    numbers = stage.order(planned, "SELECT planned_bytes, granted_bytes, link_share FROM tensile_worker._fetch_plan(0)")
    assert numbers == [{"planned_bytes": 800, "granted_bytes": 900, "link_share": 0.5}]
    assert fetch(stage, planned, first) == [None]
    rows = stage.alice.execute(
        "SELECT generation, sequence, event, tensor, version, trigger_operator, delay_us, deadline_operator, bytes,"
        " tensor_name, trigger_name FROM tensile.plan_events WHERE job = %s ORDER BY sequence",
        (planned,),
    ).fetchall()
    assert rows[0] == (first, 0, "swap_out", 5, 1, 10, 250, 12, 1 << 40, None, None)  # the job has stored no names
    assert [row[2] for row in rows] == ["swap_out", "swap_in", "recompute", "release"]


def test_an_order_travels_behind_the_events_and_sql_shows_captured_operators(stage: Stage, planned: int) -> None:
    events, order = (
        [event(1, 5, trigger=1, deadline=2), event(2, 5, trigger=3, deadline=7)],
        struct.pack("<4i", 0, 2, 1, 3),
    )
    call = plan_call(planned, events)[:-1]
    assert stage.order("scheduler", f"SELECT {call}, '\\x{order.hex()}') AS g") == [{"g": 1}]
    fetched = stage.order(
        planned, "SELECT encode(events, 'hex') AS e, encode(plan_order, 'hex') AS o FROM tensile_worker._fetch_plan(0)"
    )
    assert fetched == [{"e": b"".join(events).hex(), "o": order.hex()}]
    sql = "SELECT trigger_operator, deadline_operator FROM tensile.plan_events WHERE job = %s ORDER BY sequence"
    assert stage.alice.execute(sql, (planned,)).fetchall() == [
        (2, 1),
        (3, 7),
    ]  # indices beyond the order stay unchanged
    publish(stage, planned, events)
    assert stage.alice.execute(sql, (planned,)).fetchall() == [(1, 2), (3, 7)]


def test_events_and_order_have_the_table_together(stage: Stage, planned: int) -> None:
    for events, operators, fits in (
        (1024, 0, True),
        (1024, 1, False),
        (1023, 8, True),
        (1023, 9, False),
        (0, 8192, True),
    ):
        call = f"{plan_call(planned, [event(4)] * events)[:-1]}, '\\x{'00' * 4 * operators}')"
        if fits:
            stage.order("scheduler", f"SELECT {call}")
        else:
            with pytest.raises(psycopg.errors.ProgramLimitExceeded, match=r"orders \d+ operators does not fit"):
                stage.order("scheduler", f"SELECT {call}")


def test_a_plan_without_events_is_a_plan(stage: Stage, planned: int) -> None:
    first = publish(stage, planned, [event(4)])
    second = publish(stage, planned, [])
    assert (first, second) == (1, 2)
    assert fetch(stage, planned, 1) == [{"g": second, "e": ""}]
    assert value(stage.alice, "SELECT count(*) FROM tensile_worker._plan()") == 0


def test_progress_shows_the_generation_that_the_trainer_uses(stage: Stage, planned: int) -> None:
    generation = "SELECT plan_generation FROM tensile.progress WHERE job = %s"
    publish(stage, planned, [])
    publish(stage, planned, [])
    assert value(stage.alice, generation, planned) is None
    for acknowledged in (1, 2, 1):
        stage.order(planned, f"SELECT tensile_worker._acknowledge_plan({acknowledged})")
        assert value(stage.alice, generation, planned) == max(acknowledged, value(stage.alice, generation, planned))
    for unknown in (0, 3, -1):
        with pytest.raises(psycopg.errors.InvalidParameterValue):
            stage.order(planned, f"SELECT tensile_worker._acknowledge_plan({unknown})")
    assert value(stage.alice, generation, planned) == 2


def test_the_next_job_does_not_inherit_a_plan_nor_numbers(stage: Stage, planned: int) -> None:
    publish(stage, planned, [event(4, 1)], granted=1000)
    report(stage, planned, phase="'training'", passive_swap_ins=1)
    stage.end(planned)
    following = stage.job()
    assert progress(stage.alice, following) == NOTHING
    assert fetch(stage, following, 0) == [None]
    use_device(stage, following, "cpu")
    assert publish(stage, following, [], granted=1000) == 1, "with the memory of the previous job"
    stage.end(following)


INVALID = {
    "one byte": ("tensile_internal._publish_plan({}, '\\x00', 1, 1, 1)", "22023"),
    "not whole": ("tensile_internal._publish_plan({}, '\\x" + event(1)[:-1].hex() + "', 1, 1, 1)", "22023"),
    "kind 0": (plan_call(0, [event(0)]), "22023"),
    "kind 5": (plan_call(0, [event(1), event(5)]), "22023"),
    "codec 5": (plan_call(0, [b"\1\5" + event(1)[2:]]), "22023"),
    "codec of a swap-in": (plan_call(0, [b"\2\1" + event(2)[2:]]), "22023"),
    "padding": (plan_call(0, [b"\1\1\1" + event(1)[3:]]), "22023"),
    "too long": (plan_call(0, [event(4)] * 1025), "54000"),
    "half an operator": (plan_call(0, [])[:-1] + ", '\\x000000')", "22023"),
    "no operator": (plan_call(0, [])[:-1] + ", '\\xffffffff')", "22023"),
    "more planned than granted": (plan_call(0, [], granted=9, planned=10), "22023"),
    "less than nothing": (plan_call(0, [], granted=9, planned=-1), "22023"),
    "no number": (plan_call(0, [], link="'NaN'"), "22023"),
    "more than the link": (plan_call(0, [], link=1.5), "22023"),
}


def test_invalid_plans_are_refused_and_the_old_one_stays(stage: Stage, planned: int) -> None:
    generation = publish(stage, planned, [event(4, 9)] * 1024)
    assert generation is not None
    for name, (call, sqlstate) in INVALID.items():
        call = call.replace("{}", str(planned)).replace("plan(0,", f"plan({planned},")
        assert stage.refusal("scheduler", "SELECT " + call) == sqlstate, name
        assert fetch(stage, planned, generation) == [None], name
    assert stage.alice.execute("SELECT DISTINCT tensor FROM tensile_worker._plan()").fetchall() == [(9,)]


def test_a_plan_for_a_job_without_a_worker_or_device_is_refused(stage: Stage, job: int) -> None:
    for unknown_job in (1_000_000, job):
        with pytest.raises(psycopg.errors.UndefinedObject):
            publish(stage, unknown_job, [event(4)])


def test_readers_never_see_half_a_plan(stage: Stage, planned: int) -> None:
    """The scheduler replaces the plan as fast as it can; all events of a plan have the same tensor."""
    writer = " ".join(f"PERFORM {plan_call(planned, [event(4, number)] * 1000)};" for number in (1, 2))
    unread = "NOT EXISTS (SELECT FROM stage.endings WHERE process = 'reader')"
    number = stage.place("scheduler", f"DO $$BEGIN WHILE {unread} LOOP {writer} END LOOP; END$$")
    seen: set[int | None] = set()
    deadline = time.monotonic() + 60
    while len(seen) < 50 and time.monotonic() < deadline:
        row = stage.alice.execute(
            "SELECT count(*), count(DISTINCT tensor), count(DISTINCT generation), min(generation)"
            " FROM tensile_worker._plan()"
        ).fetchone()
        assert row is not None and row[:3] in ((1000, 1, 1), (0, 0, 0)), row
        seen.add(row[3])
    stage.conn.execute("INSERT INTO stage.endings VALUES ('reader', 0)")
    stage.answer(number)
    assert len(seen) == 50, "the readers saw the plan change"
