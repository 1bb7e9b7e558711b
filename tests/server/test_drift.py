"""Drift: predicted rows against the training rows, alarms, trainings that drift causes, and who sees what."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.server.cast import among_the_tables
from tests.server.refusals import refused
from tests.server.shared import SharedServer, unload
from tests.server.support import MLP, Connection, Wait, finish, register, state, submit, value

CLUSTER_SETTINGS = {"pg_tensile.drift_sample_rate": 1}
TABLE = """
    CREATE TABLE orders AS
    SELECT i AS id, sin(i) AS distance, i % 7 AS weekday, (ARRAY['north', 'south', 'west', NULL])[i % 4 + 1] AS shop,
           '2026-01-01'::timestamp + i * interval '1 hour' AS at, 20 + 5 * sin(i) + i % 7 AS minutes
    FROM generate_series(1, 1000) i
"""
QUERY = "SELECT distance, weekday, shop, at, minutes FROM orders"
FEATURES = "SELECT distance, weekday, shop, at FROM orders"
SAME = "SELECT * FROM orders WHERE id % 3 = 0"  # a period that no column has
FARTHER = "SELECT distance + 1 AS distance, weekday, shop, at FROM orders"
DRIFT = "SELECT column_name, kind, rows, psi, ks, drifted FROM tensile.drift WHERE model = %s AND version = %s"
ROWS = "SELECT coalesce(max(rows), 0) FROM tensile.drift WHERE model = %s"


@pytest.fixture(scope="module")
def server(shared_server: SharedServer, wait_until: Wait) -> SharedServer:
    """The worker's cluster, which counts all rows, with a model."""
    with shared_server.connect() as conn:
        unload(conn, wait_until)  # the predictor learns of the setting when it starts
        conn.execute(TABLE)
        finish(conn, submit(conn, "delivery", MLP, query=QUERY, target="minutes"))
    return shared_server


@pytest.fixture
def conn(server: Any) -> Iterator[Connection]:
    """A connection; nothing is counted, scheduled or alarmed before."""
    with server.connect() as connection:
        connection.execute("DELETE FROM tensile_internal.schedules; DELETE FROM tensile_internal.evaluation_schedules")
        connection.execute("DELETE FROM tensile_internal.drift_counts; DELETE FROM tensile_internal.drift_alarms")
        yield connection


def predict(conn: Connection, query: str = SAME, times: int = 1) -> int:
    """Predict with the model; return the number of rows."""
    return sum(value(conn, "SELECT count(*) FROM predict_rows('delivery', %s)", query) for _ in range(times))


def count(conn: Connection, wait_until: Wait, query: str = SAME, times: int = 1) -> None:
    """Predict, and wait until the rows are counted."""
    before = value(conn, ROWS, "delivery")
    rows = predict(conn, query, times)
    wait_until(lambda: value(conn, ROWS, "delivery") == before + rows, what="rows are counted")


def columns(conn: Connection, model: str = "delivery", version: int = 1) -> dict[str, dict[str, Any]]:
    rows = conn.execute(DRIFT, (model, version)).fetchall()
    return {row[0]: dict(zip(("kind", "rows", "psi", "ks", "drifted"), row[1:], strict=True)) for row in rows}


# -- the statistics ---------------------------------------------------------------------------------------------------


def test_rows_like_those_of_the_training_have_not_drifted(conn: Connection, wait_until: Wait) -> None:
    assert columns(conn) == {}
    count(conn, wait_until)
    found = columns(conn)
    assert list(found) == ["distance", "weekday", "shop", "at", "minutes"]
    assert {name: row["kind"] for name, row in found.items()} == {
        **dict.fromkeys(("distance", "weekday", "shop"), "feature"), "at": "time", "minutes": "prediction"
    }  # fmt: skip
    assert {name: row["drifted"] for name, row in found.items()} == dict.fromkeys(found, False) | {"at": None}
    assert all(0 <= row["psi"] < 0.1 and row["rows"] == 333 for row in found.values())
    assert found["shop"]["ks"] is None and all(row["ks"] < 0.1 for name, row in found.items() if name != "shop")
    assert value(conn, "SELECT count(*) FROM tensile_internal.drift_alarms") == 0


def test_the_column_that_drifts_is_told_once(server: Any, conn: Connection, wait_until: Wait) -> None:
    with server.connect() as listener:
        listener.execute("LISTEN tensile_drift")
        count(conn, wait_until, FARTHER)
        found = columns(conn)
        assert found["distance"]["drifted"] and found["distance"]["psi"] > 1 and found["distance"]["ks"] > 0.4
        assert [found[name]["drifted"] for name in ("weekday", "shop")] == [False, False]
        alarm = conn.execute("SELECT column_name, psi, threshold FROM tensile_internal.drift_alarms").fetchone()
        assert alarm == ("distance", found["distance"]["psi"], 0.2)
        count(conn, wait_until, FARTHER)
        count(conn, wait_until, SAME, times=60)  # which is most of the rows now
        assert columns(conn)["distance"]["psi"] < 0.16
        assert value(conn, "SELECT count(*) FROM tensile_internal.drift_alarms") == 0
        listener.execute("SELECT 1")
        told = [json.loads(notice.payload) for notice in listener.notifies(timeout=0)]
    model = value(conn, "SELECT model_id FROM tensile.models WHERE model = 'delivery'")
    assert told == [{"model": model, "version": 1, "psi": pytest.approx(alarm[1])}]


def test_single_rows_in_all_forms_count(conn: Connection, wait_until: Wait) -> None:
    for call in (
        "SELECT predict('delivery', o) FROM one o LIMIT 30",
        "SELECT predict('delivery', to_jsonb(o)) FROM one o LIMIT 30",
        "SELECT predict_interval('delivery', o) FROM one o LIMIT 30",
        """SELECT predict('delivery', to_jsonb(o) || '{"distance": null, "shop": "new"}') FROM one o LIMIT 10""",
        "SELECT explain_prediction('delivery', o) FROM one o LIMIT 1",  # does not count
    ):
        conn.execute(f"WITH one AS ({FEATURES}) {call}")
    wait_until(lambda: value(conn, ROWS, "delivery") == 100)
    assert {row["drifted"] for row in columns(conn).values()} == {None}  # too few


def test_rows_that_are_read_ahead_count_when_they_are_passed_on(conn: Connection, wait_until: Wait) -> None:
    with conn.transaction(), conn.cursor("c") as cursor:
        cursor.execute("SELECT predict('delivery', o) FROM orders o")
        assert len(cursor.fetchmany(40)) == 40  # 63 have been read
    wait_until(lambda: value(conn, ROWS, "delivery") == 40)
    conn.execute("SELECT avg(predict('delivery', o)) FROM orders o")
    wait_until(lambda: value(conn, ROWS, "delivery") == 1040)


def test_the_sample_rate(server: Any, conn: Connection, wait_until: Wait) -> None:
    rate = "SELECT tensile_internal._drift_rate()"
    conn.execute("ALTER SYSTEM SET pg_tensile.drift_sample_rate = 0.1")
    server.reload()
    try:
        wait_until(lambda: value(conn, rate) == 0.1)
        rows = 0

        def fewer_are_counted() -> bool:
            nonlocal rows
            before = value(conn, ROWS, "delivery")
            rows = predict(conn, FARTHER)
            wait_until(lambda: value(conn, ROWS, "delivery") > before)
            return bool(value(conn, ROWS, "delivery") - before < rows / 2)

        wait_until(fewer_are_counted)  # the predictor learns of the rate before or after a request
    finally:
        conn.execute("ALTER SYSTEM RESET pg_tensile.drift_sample_rate")
        server.reload()
        wait_until(lambda: value(conn, rate) == 1)

        def all_are_counted() -> bool:
            before = value(conn, ROWS, "delivery")
            rows = predict(conn)
            wait_until(lambda: value(conn, ROWS, "delivery") > before)
            return bool(value(conn, ROWS, "delivery") == before + rows)

        wait_until(all_are_counted)


COUNTS = st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 10**9)), min_size=1, max_size=60)


def test_the_index_is_at_least_0_and_0_for_equal_shares(conn: Connection) -> None:
    @given(COUNTS, st.integers(1, 1000))
    def check(bins: list[tuple[int, int]], factor: int) -> None:
        expected, actual = (list(side) for side in zip(*bins, strict=True))
        psi, ks, equal, distance = (
            conn.execute(
                "SELECT tensile_worker._psi(%s::bigint[], %s::bigint[]), tensile_worker._ks(%s::bigint[],"
                " %s::bigint[]),"
                " tensile_worker._psi(%s::bigint[], %s::bigint[]), tensile_worker._ks(%s::bigint[], %s::bigint[])",
                [expected, actual] * 2 + [expected, [factor * number for number in expected]] * 2,
            ).fetchone()
            or ()
        )
        if sum(expected) and sum(actual):
            assert psi >= 0 and 0 <= ks <= 1
        else:
            assert psi is None
        if sum(expected):
            assert equal == 0 and distance == pytest.approx(0, abs=1e-9)

    check()


@pytest.mark.parametrize("rows", [200, 1000, 20000])
def test_the_index_does_not_grow_with_few_rows(conn: Connection, rows: int) -> None:
    """Of samples of one distribution it is far below any threshold, and of another one it is the same for all sizes."""
    conn.execute("SELECT setseed(0.5)")
    draw = "SELECT array_agg(n ORDER BY b) FROM (SELECT b, count(v) AS n FROM generate_series(0, 20) b LEFT JOIN" \
        " (SELECT floor(20 * random() ^ {}) AS v FROM generate_series(1, {})) r ON v = b GROUP BY b) c"  # fmt: skip
    index = f"SELECT tensile_worker._psi(({draw.format(1, 50000)}), ({draw.format('{}', rows)}))"
    assert value(conn, index.format(1)) < 0.06
    assert 0.2 < value(conn, index.format(1.7)) < 0.45


# -- trainings --------------------------------------------------------------------------------------------------------


def schedule(conn: Connection, **arguments: Any) -> None:
    options = '{"deploy": "never", "keep": "last"}'
    named = ", ".join(f"{name} => %({name})s" for name in arguments)
    conn.execute(
        f"SELECT schedule_training('delivery', %(query)s, 'minutes', epochs => 2, policy => 'none',"
        f" options => '{options}', {named})",
        {"query": QUERY} | arguments,
    )


def test_drift_causes_one_training(conn: Connection, wait_until: Wait) -> None:
    schedule(conn, drift=0.5, every="1 day")
    assert value(conn, "SELECT DISTINCT threshold FROM tensile.drift WHERE kind <> 'time'") is None
    count(conn, wait_until)
    assert value(conn, "SELECT DISTINCT threshold FROM tensile.drift WHERE kind <> 'time'") == 0.5
    assert value(conn, "SELECT last_run FROM tensile_internal.schedules") is None
    predict(conn, FARTHER)
    job = wait_until(lambda: value(conn, "SELECT last_job FROM tensile.schedules"))
    finish(conn, job)
    reason, next_run = conn.execute("SELECT last_reason, next_run > now() FROM tensile.schedules").fetchone() or ()
    assert reason.startswith("drift ") and reason.endswith('of "distance"') and next_run
    # The version is not deployed, so the rows drift as before; but they count anew, and not at once.
    due = "SELECT tensile_internal._due_reason(s) FROM tensile_internal.schedules s"
    assert columns(conn)["distance"]["drifted"]
    count(conn, wait_until, FARTHER)
    assert value(conn, due) is None
    conn.execute("UPDATE tensile_internal.schedules SET last_run = last_run - interval '8 hours'")
    assert value(conn, due).startswith("drift ")
    conn.execute("UPDATE tensile_internal.schedules SET last_run = clock_timestamp() + interval '1 second'")
    assert value(conn, due) is None


@pytest.mark.parametrize("drift", [0, -1, 10.1, float("nan"), float("inf")])
def test_a_threshold_out_of_range(conn: Connection, drift: float) -> None:
    refused("22023", "drift is out of range", "0.2", lambda: schedule(conn, drift=drift))


# -- roles, restarts, files -------------------------------------------------------------------------------------------


def role(conn: Connection, name: str, group: str) -> str:
    conn.execute(f"DROP ROLE IF EXISTS {name}; CREATE ROLE {name} LOGIN; GRANT tensile_user{group} TO {name}")
    return name


def test_roles_that_may_predict_do_not_see_what_others_predict(server: Any, conn: Connection, wait_until: Wait) -> None:
    count(conn, wait_until, FARTHER)
    guest, watcher = role(conn, "guest", ""), role(conn, "watcher", ", pg_read_all_stats")
    conn.execute("SELECT grant_model('delivery', 'guest')")
    relations = ("tensile.drift", "tensile.drift_alarms", "tensile_internal.drift_counts")

    def seen(by: str) -> list[int]:
        with among_the_tables(conn, by):
            return [value(conn, f"SELECT count(*) FROM {relation}") for relation in relations]

    assert seen(guest) == [0, 0, 0] and seen(watcher) == [5, 1, 1]
    with server.connect(user=guest) as other:
        assert value(other, "SELECT count(*) FROM tensile.models") == 1
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            other.execute("SELECT tensile_internal._count_drift(1, 1, '{1}')")
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            other.execute("DELETE FROM tensile_internal.drift_counts")


def test_a_restart_keeps_the_counts(server: Any, conn: Connection, wait_until: Wait) -> None:
    count(conn, wait_until, FARTHER)
    before = columns(conn)
    conn.close()
    server.restart("fast")
    with server.connect() as conn:
        assert columns(conn) == before
        count(conn, wait_until, FARTHER)
        assert columns(conn)["distance"]["rows"] == 2000
        conn.execute(
            "UPDATE tensile_internal.drift_counts SET since = since - interval '8 days';"
            " SELECT tensile_internal._forget_drift()"
        )
        for table in ("drift_counts", "drift_alarms"):
            assert value(conn, f"SELECT count(*) FROM tensile_internal.{table}") == 0


def test_a_version_that_was_dropped_and_one_without_statistics(conn: Connection) -> None:
    conn.execute("SELECT tensile_internal._count_drift(0, 1, '{1}')")
    version = value(conn, "SELECT version_id FROM tensile.model_versions WHERE version = 1")
    conn.execute("SELECT tensile_internal._count_drift(%s, 1, '{1}')", (version,))  # other bins
    assert value(conn, "SELECT count(*) FROM tensile_internal.drift_counts") == 0


def test_a_model_file_has_the_statistics(conn: Connection) -> None:
    assert value(conn, "SELECT import_model(export_model('delivery', 1), 'copy')") == 1
    assert value(conn, "SELECT count(DISTINCT reference) FROM tensile.model_versions WHERE version = 1") == 1
    conn.execute("SELECT drop_model('copy')")


# -- evaluations ------------------------------------------------------------------------------------------------------

EVALUATE = "SELECT schedule_evaluation('delivery', %s, %s)"
DUE = """
    UPDATE tensile_internal.evaluation_schedules SET next_run = now() - interval '1 s';
    SELECT tensile_internal._notify(-1)
"""
STATUS = "SELECT last_state, last_error FROM tensile.evaluation_schedules"


def evaluated(conn: Connection, wait_until: Wait, model: str = "delivery") -> int:
    """Have the evaluation run; return its job."""
    before = value(conn, "SELECT coalesce(max(job), 0) FROM tensile.jobs")
    conn.execute(DUE)
    job = wait_until(
        lambda: value(conn, "SELECT last_job FROM tensile_internal.evaluation_schedules WHERE last_job > %s", before)
    )
    wait_until(lambda: state(conn, job) in ("finished", "failed", "cancelled"))
    return int(job)


def test_the_deployed_version_is_evaluated_when_the_truth_arrives(
    server: Any, conn: Connection, wait_until: Wait
) -> None:
    guest = role(conn, "guest", "")
    conn.execute("SELECT grant_model('delivery', 'guest'); GRANT SELECT ON orders TO guest")
    with server.connect(user=guest) as other:
        other.execute("SELECT schedule_evaluation('delivery', %s, '1 day', metric => 'rmse')", (QUERY,))
        assert value(other, "SELECT next_run > now() + interval '23 hours' FROM tensile.evaluation_schedules")
    finish(conn, evaluated(conn, wait_until))
    rows = "SELECT row_number() OVER (ORDER BY id) AS row_number, minutes FROM orders"
    error = (
        f"sqrt(avg((prediction - minutes) ^ 2)) FROM predict_rows('delivery', %s) JOIN ({rows}) r USING (row_number)"
    )
    expected = value(conn, f"SELECT {error}", f"{FEATURES} ORDER BY id")
    kept = conn.execute("SELECT version, rows, metric, value, baseline FROM tensile.evaluations").fetchall()
    baseline = value(conn, "SELECT baseline FROM evaluate_model('delivery', %s) WHERE metric = 'rmse'", QUERY)
    assert kept == [(1, 1000, "rmse", pytest.approx(expected, rel=1e-5), baseline)]
    second = evaluated(conn, wait_until)
    assert value(conn, "SELECT count(*) FROM tensile.evaluations") == 2
    jobs = "SELECT array_agg(job) FROM tensile.jobs WHERE kind = 'evaluate' AND owner = 'guest'"
    assert value(conn, jobs) == [second]
    conn.execute("REVOKE SELECT ON orders FROM guest")
    evaluated(conn, wait_until)
    assert conn.execute(STATUS).fetchone() == ("failed", "permission denied for table orders")
    conn.execute("SELECT revoke_model('delivery', 'guest'); GRANT SELECT ON orders TO guest")
    evaluated(conn, wait_until)
    assert conn.execute(STATUS).fetchone() == ("failed", 'permission denied for model "delivery"')
    conn.execute("REVOKE tensile_user FROM guest")
    conn.execute(DUE)
    refusal = ("refused", "permission denied for function schedule_evaluation")
    wait_until(lambda: conn.execute(STATUS).fetchone() == refusal)
    assert value(conn, "SELECT unschedule_evaluation('delivery')") is True
    assert value(conn, "SELECT unschedule_evaluation('delivery')") is False
    conn.execute("DELETE FROM tensile_internal.evaluations; REVOKE ALL ON orders FROM guest")


def test_an_evaluation_beside_a_training(conn: Connection, wait_until: Wait) -> None:
    conn.execute(EVALUATE, (QUERY, "1 day"))
    conn.execute("SELECT pg_advisory_lock(7)")
    held = f"SELECT r.* FROM ({QUERY}) r, pg_advisory_xact_lock_shared(7)"
    training = submit(conn, "delivery", query=held, target="minutes", options={"deploy": "never"})
    wait_until(lambda: state(conn, training) == "running")
    finish(conn, evaluated(conn, wait_until))
    assert state(conn, training) == "running"
    metrics = {row[0] for row in conn.execute("SELECT metric FROM tensile.evaluations").fetchall()}
    assert {"rmse", "mae", "r2"} <= metrics
    conn.execute("SELECT pg_advisory_unlock(7)")
    finish(conn, training)
    conn.execute("DELETE FROM tensile_internal.evaluations")


@pytest.mark.parametrize(
    ("arguments", "sqlstate", "message"),
    [
        ((QUERY, "0 s"), "22023", "every is out of range"),
        ((QUERY, None), "22004", 'argument "every" must not be null'),
        ((None, "1 day"), "22004", 'argument "query" must not be null'),
        (("SELECT distance FROM orders", "1 day"), "42703", "weekday"),
        (("DELETE FROM orders", "1 day"), "42601", "SELECT"),
    ],
)
def test_wrong_evaluations(conn: Connection, arguments: Any, sqlstate: str, message: str) -> None:
    refused(sqlstate, message, "", lambda: conn.execute(EVALUATE, arguments))
    assert value(conn, "SELECT count(*) FROM tensile_internal.evaluation_schedules") == 0


def test_a_model_has_one_schedule_of_evaluations(conn: Connection) -> None:
    conn.execute(EVALUATE, (QUERY, "1 day"))
    refused("42710", "already", "unschedule_evaluation", lambda: conn.execute(EVALUATE, (QUERY, "1 day")))
    register(conn, "untrained")
    wrong = EVALUATE.replace("%s)", "%s, 'f1')")
    refused("22023", 'no metric "f1"', "rmse", lambda: conn.execute(wrong, (QUERY, "1 day")))
    refused("55000", "", "", lambda: conn.execute(EVALUATE.replace("delivery", "untrained"), (QUERY, "1 day")))
    conn.execute("SELECT drop_model('untrained')")
