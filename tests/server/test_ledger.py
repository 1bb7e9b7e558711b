"""Live numbers in shared memory: progress, the plan table, and the ledger that says whose memory of a device is whose.

Workers and scheduler do as the tests order (stage.py).
"""

from __future__ import annotations

import random
import struct
import time
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from tests.server.stage import Stage, Wait
from tests.server.support import Connection, register, value

# Arguments of tensile._report
REPORTED = (
    *("phase", "epoch", "epochs", "step", "steps", "loss", "samples_per_s", "device_bytes", "device_peak_bytes"),
    *("bytes_swapped", "stall_us", "passive_swap_ins", "utilisation", "raw_bytes_swapped"),
)
NOTHING = (None,) * len(REPORTED)


def report(stage: Stage, job: int, **numbers: object) -> None:
    arguments = ", ".join(f"{name} => {numbers.get(name, 'NULL')}" for name in REPORTED)
    stage.order(job, f"SELECT tensile._report({arguments})")


def progress(conn: Connection, job: int) -> Any:
    return conn.execute(f"SELECT {', '.join(REPORTED)} FROM tensile._progress() WHERE job = %s", (job,)).fetchone()


def use_device(stage: Stage, job: int, name: str, total: int = 1000, overhead: int = 0) -> None:
    stage.order(job, f"SELECT tensile._register_device('{name}', {total}, 5e9, 6e9, {overhead})")


@pytest.fixture
def second(stage: Stage, job: int) -> Any:
    """Another job with a worker."""
    number = stage.job("n")
    yield number
    stage.cancel(number)


# -- progress ---------------------------------------------------------------------------------------------------------


def test_progress_is_live_and_null_leaves_a_number_as_it_is(stage: Stage, job: int) -> None:
    assert progress(stage.alice, job) == NOTHING
    report(stage, job, phase="'training'", epoch=1, epochs=10, step=2, steps=20, loss=0.5, samples_per_s=1000)
    report(stage, job, device_bytes=4096, device_peak_bytes=8192, passive_swap_ins=3, utilisation=0.25)
    assert progress(stage.alice, job) == ("training", 1, 10, 2, 20, 0.5, 1000, 4096, 8192, None, None, 3, 0.25, None)
    report(stage, job, step=3, loss="'NaN'", device_bytes=0, bytes_swapped=7, stall_us=8, raw_bytes_swapped=9)
    row = progress(stage.alice, job)
    assert row[:5] == ("training", 1, 10, 3, 20) and row[5] != row[5]
    assert row[6:] == (1000, 0, 8192, 7, 8, 3, 0.25, 9)
    report(stage, job, phase=f"'{'ä' * 100}'")
    assert progress(stage.alice, job)[0] == "ä" * 15, "cut to 31 bytes, never within a character"


def test_progress_and_plan_are_for_the_owner_and_those_who_may_see_all(stage: Stage, job: int) -> None:
    use_device(stage, job, "cpu")
    publish(stage, job, [event(1)])
    for user, seen in (("alice", 1), ("watcher", 1), ("postgres", 1), ("mallory", 0)):
        with stage.cluster.connect(user=user) as conn:
            for rows in ("_progress()", "_plan()", "progress", "plan"):
                assert value(conn, f"SELECT count(*) FROM tensile.{rows}") == seen, (user, rows)


# -- devices ----------------------------------------------------------------------------------------------------------


def device(conn: Connection, name: str, columns: str) -> Any:
    return conn.execute(f"SELECT {columns} FROM tensile.devices WHERE name = %s", (name,)).fetchone()


def test_devices_show_their_jobs_and_what_they_use(stage: Stage, job: int, second: int) -> None:
    use_device(stage, job, "cuda:7", 3_000_000_000, overhead=300)
    stage.order(second, "SELECT tensile._register_device('cuda:7', 500, 1, 1, 40)")  # the first one's word counts
    everything = "total_bytes, budget_bytes, granted_bytes, in_use_bytes, inference_bytes, jobs, utilisation"
    assert device(stage.alice, "cuda:7", everything) == (3_000_000_000, 1 << 30, 340, 0, 0, 2, None)
    assert device(stage.alice, "cuda:7", "out_bytes_per_s, in_bytes_per_s") == (5e9, 6e9)
    report(stage, job, device_bytes=100, utilisation=0.5)
    report(stage, second, device_bytes=20, utilisation=0.25)
    publish(stage, job, [], 6000)
    with stage.cluster.connect(user="mallory") as conn:
        assert device(conn, "cuda:7", everything) == (3_000_000_000, 1 << 30, 6340, 120, 0, 2, 0.5)

    use_device(stage, job, "cuda:8")
    assert device(stage.alice, "cuda:7", everything) == (3_000_000_000, 1 << 30, 40, 20, 0, 1, 0.25)
    assert device(stage.alice, "cuda:8", "budget_bytes, granted_bytes, jobs") == (1000, 0, 1)


def test_devices_that_nobody_uses_make_room(stage: Stage, job: int) -> None:
    for number in range(40):  # more than the ledger holds, but never two at once
        use_device(stage, job, f"device {number}")
    assert device(stage.alice, "device 39", "jobs") == (1,)
    for bad in ("'', 1, 1, 1, 0", "'x', 0, 1, 1, 0", "'x', 1, 0, 1, 0", "'x', 1, 1, 'NaN', 0", "'x', 1, 1, 1, -1"):
        with pytest.raises(psycopg.errors.InvalidParameterValue):
            stage.order(job, f"SELECT tensile._register_device({bad})")


MOST = 1 << 50  # bytes; no device has more


@pytest.mark.parametrize(
    "numbers",
    [
        pytest.param(f"'cuda:7', {MOST + 1}, 1, 1, 0", id="more memory than there is"),
        pytest.param(f"'cpu', {MOST}, 1, 1, 0", id="more memory than this host has"),
        pytest.param("'cuda:7', 1000, 1, 1, 1001", id="an overhead beyond the memory"),
        pytest.param(f"'cuda:7', {2**63 - 1}, 1, 1, {2**63 - 2}", id="the largest numbers"),
        pytest.param("'cuda:7', 1000, 1e16, 1, 0", id="a link faster than light"),
        pytest.param("'cuda:7', 1000, 1, 'Infinity', 0", id="an infinite rate"),
    ],
)
def test_numbers_that_no_device_has_are_refused_and_change_nothing(stage: Stage, job: int, numbers: str) -> None:
    """What a child says of its device counts for all jobs on it. The slot keeps its device and its grant."""
    use_device(stage, job, "cuda:7", 1_000_000, overhead=300)
    publish(stage, job, [], 6000)
    columns = "total_bytes, granted_bytes, out_bytes_per_s, jobs"
    before = device(stage.alice, "cuda:7", columns)
    assert before == (1_000_000, 6300, 5e9, 1)
    with pytest.raises(psycopg.errors.InvalidParameterValue):
        stage.order(job, f"SELECT tensile._register_device({numbers})")
    assert device(stage.alice, "cuda:7", columns) == before


def test_the_largest_numbers_do_not_overflow_the_sums(stage: Stage, job: int, second: int) -> None:
    for each in (job, second):
        use_device(stage, each, "cuda:7", MOST, overhead=MOST)
        report(stage, each, device_bytes=2**63 - 1, device_peak_bytes=2**63 - 1, utilisation=17)
    columns = "granted_bytes, in_use_bytes, utilisation"
    assert device(stage.alice, "cuda:7", columns) == (2 * MOST, 2 * MOST, 1)
    report(stage, job, device_bytes=-5, utilisation="'NaN'")
    report(stage, second, device_bytes=0, utilisation=-1)
    assert device(stage.alice, "cuda:7", columns) == (2 * MOST, 0, 0)


def test_a_device_too_many_changes_nothing(new_cluster: Callable[..., Any], wait_until: Wait) -> None:
    """The ledger holds 16; the job that brings the seventeenth keeps the one that it has."""
    cluster = new_cluster({"pg_tensile.max_jobs": 17, "max_worker_processes": 30, "pg_tensile.plan_events": 1024})
    stage = Stage(cluster, wait_until)
    try:
        jobs = []
        for number in range(17):
            register(stage.alice, f"m{number}")
            jobs.append(stage.job(f"m{number}"))
            use_device(stage, jobs[-1], f"cuda:{min(number, 15)}", 1000, overhead=10 + number)
        publish(stage, jobs[15], [], 500)
        with pytest.raises(psycopg.errors.ProgramLimitExceeded):
            use_device(stage, jobs[15], "one too many")
        assert device(stage.alice, "cuda:15", "jobs, granted_bytes") == (2, 500 + 25 + 26)
        publish(stage, jobs[3], [], 500)
        use_device(stage, jobs[3], "another")  # it is alone on its device, whose place the new one takes
        assert device(stage.alice, "another", "jobs, granted_bytes") == (1, 0)
        assert device(stage.alice, "cuda:3", "jobs") is None
    finally:
        stage.close()


# -- plans ------------------------------------------------------------------------------------------------------------


def event(
    kind: int, tensor: int = 0, version: int = 0, trigger: int = 0, delay_us: int = 0, deadline: int = 0, size: int = 0
) -> bytes:
    """One event row (docs/internals.md, "Shared memory")."""
    return struct.pack("<B3xiiiiiq", kind, tensor, version, trigger, delay_us, deadline, size)


def plan_call(job: int, events: list[bytes], granted: int = 0, planned: int | None = None, link: object = 1) -> str:
    plan = "\\x" + b"".join(events).hex()
    return f"tensile._publish_plan({job}, '{plan}', {granted if planned is None else planned}, {granted}, {link})"


def publish(stage: Stage, job: int, events: list[bytes], granted: int = 0, **numbers: Any) -> int | None:
    """The new generation; None: there is no room for the grant."""
    row = stage.order("scheduler", f"SELECT {plan_call(job, events, granted, **numbers)} AS g")[0]
    return None if row["g"] is None else int(row["g"])


def fetch(stage: Stage, job: int, after: int) -> Any:
    sql = f"SELECT generation AS g, encode(events, 'hex') AS e FROM tensile._fetch_plan({after})"
    return stage.order(job, sql)


@pytest.fixture
def planned(stage: Stage, job: int) -> int:
    """A job on a device."""
    use_device(stage, job, "cpu")
    return job


def test_a_published_plan_arrives_at_the_worker_and_in_sql(stage: Stage, planned: int) -> None:
    assert fetch(stage, planned, 0) == [None]
    events = [event(1, 5, 1, 10, 250, 12, 1 << 40), event(2, 5, 1, 30, 0, 40, 1 << 40), event(3, 6), event(4, 7)]
    first = publish(stage, planned, events, granted=900, planned=800, link=0.5)
    assert first == 1
    assert fetch(stage, planned, 0) == [{"g": first, "e": b"".join(events).hex()}]
    numbers = stage.order(planned, "SELECT planned_bytes, granted_bytes, link_share FROM tensile._fetch_plan(0)")
    assert numbers == [{"planned_bytes": 800, "granted_bytes": 900, "link_share": 0.5}]
    assert fetch(stage, planned, first) == [None]
    rows = stage.alice.execute(
        "SELECT generation, sequence, event, tensor, version, trigger_operator, delay_us, deadline_operator, bytes,"
        " tensor_name, trigger_name FROM tensile.plan WHERE job = %s ORDER BY sequence",
        (planned,),
    ).fetchall()
    assert rows[0] == (first, 0, "swap_out", 5, 1, 10, 250, 12, 1 << 40, None, None)  # the job has sent no names
    assert [row[2] for row in rows] == ["swap_out", "swap_in", "recompute", "release"]


def test_an_order_travels_behind_the_events_and_sql_shows_captured_operators(stage: Stage, planned: int) -> None:
    events, order = (
        [event(1, 5, trigger=1, deadline=2), event(2, 5, trigger=3, deadline=7)],
        struct.pack("<4i", 0, 2, 1, 3),
    )
    call = plan_call(planned, events)[:-1]
    assert stage.order("scheduler", f"SELECT {call}, '\\x{order.hex()}') AS g") == [{"g": 1}]
    fetched = stage.order(
        planned, "SELECT encode(events, 'hex') AS e, encode(plan_order, 'hex') AS o FROM tensile._fetch_plan(0)"
    )
    assert fetched == [{"e": b"".join(events).hex(), "o": order.hex()}]
    sql = "SELECT trigger_operator, deadline_operator FROM tensile.plan WHERE job = %s ORDER BY sequence"
    assert stage.alice.execute(sql, (planned,)).fetchall() == [(2, 1), (3, 7)]  # a place that there is not stays
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
    assert value(stage.alice, "SELECT count(*) FROM tensile._plan()") == 0


def test_progress_shows_the_generation_that_the_executor_uses(stage: Stage, planned: int) -> None:
    generation = "SELECT plan_generation FROM tensile.progress WHERE job = %s"
    publish(stage, planned, [])
    publish(stage, planned, [])
    assert value(stage.alice, generation, planned) is None
    for acknowledged in (1, 2, 1):
        stage.order(planned, f"SELECT tensile._acknowledge_plan({acknowledged})")
        assert value(stage.alice, generation, planned) == max(acknowledged, value(stage.alice, generation, planned))
    for unknown in (0, 3, -1):
        with pytest.raises(psycopg.errors.InvalidParameterValue):
            stage.order(planned, f"SELECT tensile._acknowledge_plan({unknown})")
    assert value(stage.alice, generation, planned) == 2


def test_the_next_job_does_not_inherit_a_plan_nor_numbers(stage: Stage, planned: int) -> None:
    publish(stage, planned, [event(4, 1)], granted=1000)
    report(stage, planned, phase="'training'", passive_swap_ins=1)
    stage.end(planned)
    following = stage.job()
    assert progress(stage.alice, following) == NOTHING
    assert fetch(stage, following, 0) == [None]
    use_device(stage, following, "cpu")
    assert publish(stage, following, [], granted=1000) == 1, "with the memory of the job before"
    stage.end(following)


@pytest.mark.parametrize(
    ("call", "sqlstate"),
    [
        ("tensile._publish_plan({}, '\\x00', 1, 1, 1)", "22023"),
        ("tensile._publish_plan({}, '\\x" + event(1)[:-1].hex() + "', 1, 1, 1)", "22023"),
        (plan_call(0, [event(0)]), "22023"),
        (plan_call(0, [event(1), event(5)]), "22023"),
        (plan_call(0, [b"\1\5" + event(1)[2:]]), "22023"),
        (plan_call(0, [b"\2\1" + event(2)[2:]]), "22023"),
        (plan_call(0, [b"\1\1\1" + event(1)[3:]]), "22023"),
        (plan_call(0, [event(4)] * 1025), "54000"),
        (plan_call(0, [])[:-1] + ", '\\x000000')", "22023"),
        (plan_call(0, [])[:-1] + ", '\\xffffffff')", "22023"),
        (plan_call(0, [], granted=9, planned=10), "22023"),
        (plan_call(0, [], granted=9, planned=-1), "22023"),
        (plan_call(0, [], link="'NaN'"), "22023"),
        (plan_call(0, [], link=1.5), "22023"),
    ],
    ids=[
        *(
            "one byte",
            "not whole",
            "kind 0",
            "kind 5",
            "codec 5",
            "codec of a swap-in",
            "padding",
            "too long",
            "half an operator",
            "no operator",
            "more planned than granted",
        ),
        *("less than nothing", "no number", "more than the link"),
    ],
)
def test_what_is_no_plan_is_refused_and_the_old_one_stays(stage: Stage, planned: int, call: str, sqlstate: str) -> None:
    generation = publish(stage, planned, [event(4, 9)] * 1024)
    assert generation is not None
    with pytest.raises(psycopg.errors.lookup(sqlstate)):
        stage.order("scheduler", "SELECT " + call.replace("{}", str(planned)).replace("plan(0,", f"plan({planned},"))
    assert fetch(stage, planned, generation) == [None]
    assert stage.alice.execute("SELECT DISTINCT tensor FROM tensile._plan()").fetchall() == [(9,)]


def test_a_plan_for_a_job_without_a_worker_or_device_is_refused(stage: Stage, job: int) -> None:
    for nobody in (1_000_000, job):
        with pytest.raises(psycopg.errors.UndefinedObject):
            publish(stage, nobody, [event(4)])


def test_nobody_sees_half_a_plan(stage: Stage, planned: int) -> None:
    """The scheduler replaces the plan as fast as it can; each plan's events all have one tensor."""
    writer = " ".join(f"PERFORM {plan_call(planned, [event(4, number)] * 1000)};" for number in (1, 2))
    unread = "NOT EXISTS (SELECT FROM stage.endings WHERE process = 'reader')"
    number = stage.place("scheduler", f"DO $$BEGIN WHILE {unread} LOOP {writer} END LOOP; END$$")
    seen: set[int | None] = set()
    deadline = time.monotonic() + 60
    while len(seen) < 50 and time.monotonic() < deadline:
        row = stage.alice.execute(
            "SELECT count(*), count(DISTINCT tensor), count(DISTINCT generation), min(generation) FROM tensile._plan()"
        ).fetchone()
        assert row is not None and row[:3] in ((1000, 1, 1), (0, 0, 0)), row
        seen.add(row[3])
    stage.conn.execute("INSERT INTO stage.endings VALUES ('reader', 0)")
    stage.answer(number)
    assert len(seen) == 50, "the readers saw the plan change"


# -- the ledger -------------------------------------------------------------------------------------------------------


def acknowledge(stage: Stage, job: int, generation: int) -> None:
    stage.order(job, f"SELECT tensile._acknowledge_plan({generation})")


def granted(stage: Stage, name: str) -> Any:
    return device(stage.alice, name, "granted_bytes")[0]


def test_a_grant_that_does_not_fit_is_not_published(stage: Stage, job: int, second: int) -> None:
    for number in (job, second):
        use_device(stage, number, "cuda:0", 1000, overhead=100)
    assert publish(stage, job, [], 500) == 1
    assert publish(stage, second, [], 301) is None
    assert fetch(stage, second, 0) == [None]
    assert granted(stage, "cuda:0") == 700
    assert publish(stage, second, [], 300) == 1
    assert publish(stage, second, [], 301) is None
    assert granted(stage, "cuda:0") == 1000


def test_who_shrinks_goes_first(stage: Stage, job: int, second: int) -> None:
    """Until its executor has made an iteration under the smaller plan, the memory of the larger one is not free."""
    for number in (job, second):
        use_device(stage, number, "cuda:0", 1000)
    assert publish(stage, job, [], 700) == 1
    assert publish(stage, second, [], 300) == 1
    assert publish(stage, job, [], 400) == 2
    assert publish(stage, second, [], 600) is None
    acknowledge(stage, job, 1)  # it has the new plan in hand, but this is of the old one
    assert publish(stage, second, [], 600) is None
    acknowledge(stage, job, 2)
    assert granted(stage, "cuda:0") == 700
    assert publish(stage, second, [], 600) == 2
    assert publish(stage, job, [], 500) is None, "it has to wait in turn"


def test_grants_are_listed_for_the_scheduler(stage: Stage, job: int, second: int) -> None:
    use_device(stage, job, "cuda:0", 1000, overhead=7)
    publish(stage, job, [], 700, planned=600)
    acknowledge(stage, job, 1)
    publish(stage, job, [], 400, planned=300)
    rows = {row["job"]: list(row.values())[1:] for row in stage.order("scheduler", "SELECT * FROM tensile._grants()")}
    assert rows == {job: ["cuda:0", 700, 7, 2, 1, 300, 400], second: [None, 0, 0, 0, 0, 0, 0]}


def test_the_end_of_a_job_gives_its_memory_back(stage: Stage, job: int, second: int, wait_until: Wait) -> None:
    for number in (job, second):
        use_device(stage, number, "cuda:0", 1000, overhead=50)
    assert publish(stage, job, [], 900) == 1
    assert publish(stage, second, [], 900) is None
    stage.cancel(job)
    wait_until(lambda: granted(stage, "cuda:0") == 50)
    assert publish(stage, second, [], 900) == 1


def test_a_lower_limit_stops_growth_and_nothing_else(stage: Stage, job: int, wait_until: Wait) -> None:
    def limit(memory: str) -> None:
        stage.cluster.configure({"pg_tensile.device_memory": memory})
        stage.cluster.reload()
        show = "SELECT current_setting('pg_tensile.device_memory') AS s"
        wait_until(lambda: stage.order("scheduler", show)[0]["s"] == memory)

    use_device(stage, job, "cuda:0", 1 << 31)
    assert publish(stage, job, [], 100 << 20) == 1
    limit("64MB")
    try:
        rows = stage.order("scheduler", "SELECT * FROM tensile._device_memory() WHERE device = 'cuda:0'")
        assert list(rows[0].values()) == ["cuda:0", 1 << 31, 64 << 20, 0]
        assert publish(stage, job, [], 101 << 20) is None
        assert publish(stage, job, [], 100 << 20) == 2
        assert publish(stage, job, [], 50 << 20) == 3
        acknowledge(stage, job, 3)
        assert publish(stage, job, [], 65 << 20) is None
        assert publish(stage, job, [], 64 << 20) == 4
    finally:
        limit("1GB")


def test_the_sum_never_exceeds_the_budget_whatever_the_order(stage: Stage, job: int, second: int) -> None:
    """Compared with a ledger of a few lines, which knows nothing of locks and slots."""
    budget = 1000
    jobs = (job, second)
    entry = dict.fromkeys(jobs, 0)
    plans: dict[int, list[int]] = {number: [] for number in jobs}
    random.seed(4)
    refused = 0
    for number in jobs:
        use_device(stage, number, "cuda:0", budget)
    for _ in range(60):
        number = random.choice(jobs)
        if plans[number] and random.random() < 0.4:
            generation = random.choice((len(plans[number]), max(1, len(plans[number]) - 1)))
            acknowledge(stage, number, generation)
            if generation == len(plans[number]):
                entry[number] = plans[number][-1]
        else:
            grant = random.randrange(0, budget)
            fits = grant <= entry[number] or sum(entry.values()) - entry[number] + grant <= budget
            generation_or_none = publish(stage, number, [], grant)
            assert generation_or_none == (len(plans[number]) + 1 if fits else None)
            refused += not fits
            if fits:
                plans[number].append(grant)
                entry[number] = max(entry[number], grant)
        assert granted(stage, "cuda:0") == sum(entry.values()) <= budget
    assert refused > 5


@pytest.fixture
def inference(stage: Stage) -> Any:
    """The inference process, started by a prediction that nobody will answer."""
    stage.conn.execute(
        "INSERT INTO tensile.model_versions (model, version, task, preprocessing, architecture, weight_bytes)"
        """ SELECT id, 1, 'regression', '{"features": [{"name": "x", "kind": "numeric", "type": "float8"}]}', '{}', 1"""
        " FROM tensile.models WHERE name = 'm'; UPDATE tensile.models SET deployed_version = 1 WHERE name = 'm'"
    )
    with stage.alice.transaction(), pytest.raises(psycopg.errors.QueryCanceled), stage.alice.transaction():
        stage.alice.execute("SET LOCAL pg_tensile.predict_timeout = 100; SELECT predict('m', ARRAY[1.0])")
    yield "inference"
    stage.conn.execute("UPDATE tensile.models SET deployed_version = NULL; DELETE FROM tensile.model_versions")


def test_the_predictor_takes_what_there_is_room_for(stage: Stage, job: int, inference: str, wait_until: Wait) -> None:
    def ask(least: int, wanted: int) -> Any:
        sql = f"SELECT tensile._inference_memory('cuda:0', 1000, {least}, {wanted}) AS bytes"
        return stage.order(inference, sql)[0]["bytes"]

    use_device(stage, job, "cuda:0", 1000, overhead=50)
    assert publish(stage, job, [], 450) == 1
    assert ask(100, 600) == 500
    assert device(stage.alice, "cuda:0", "granted_bytes, inference_bytes") == (500, 500)
    assert publish(stage, job, [], 451) is None
    assert ask(100, 200) == 200
    assert ask(700, 700) is None, "but jobs are planned into what that leaves"
    memory = "SELECT inference_bytes AS i FROM tensile._device_memory() WHERE device = 'cuda:0'"
    assert stage.order("scheduler", memory) == [{"i": 700}]
    assert publish(stage, job, [], 451) is None
    assert publish(stage, job, [], 250) == 2
    acknowledge(stage, job, 2)
    assert ask(700, 700) == 700
    with pytest.raises(psycopg.errors.InvalidParameterValue):
        ask(2, 1)
    stage.conn.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE backend_type ~ 'inference'")
    wait_until(lambda: device(stage.alice, "cuda:0", "inference_bytes") == (0,))
    assert publish(stage, job, [], 950) == 3


def test_what_wakes_the_scheduler(stage: Stage, planned: int) -> None:
    publish(stage, planned, [], 100)
    stage.woken("scheduler", lambda: acknowledge(stage, planned, 1))
    stage.woken("scheduler", lambda: stage.conn.execute("SELECT tensile._notify(%s)", (planned,)))
    stage.woken("scheduler", stage.cluster.reload)
    stage.woken("scheduler", lambda: stage.end(planned))


def test_the_worker_is_woken_by_a_plan(stage: Stage, planned: int) -> None:
    stage.woken(planned, lambda: publish(stage, planned, []))


def test_an_acknowledgement_wakes_those_who_wait_for_a_change(stage: Stage, planned: int) -> None:
    publish(stage, planned, [])
    stage.alice.execute("SELECT tensile._wait_for_change(0)")
    acknowledge(stage, planned, 1)
    stage.alice.execute("BEGIN; SET LOCAL statement_timeout = '30 s'; SELECT tensile._wait_for_change(60000); COMMIT")
