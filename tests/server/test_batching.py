"""Batches of predictions in the executor: nobody notices them but by the time that they take.

Every statement returns the rows, and then the error, that it returns row by row. Two small models are trained once for
the file.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from psycopg import errors

from tests.examples import examples
from tests.server.shared import SharedServer
from tests.server.support import Connection, Wait, submit, value

MLP = {"type": "mlp", "hidden": [8]}
# Row 700 of `wrong` has an array of another length and a document without a feature; `divisor` is 0 there.
TABLES = """
    CREATE TABLE points AS
    SELECT i AS id, (i % 24)::int AS hour, (i % 10) / 10.0::float8 AS wind,
           (ARRAY['UA', 'AA', 'B6'])[i % 3 + 1] AS carrier, ARRAY[i % 7, i % 5]::float8[] AS recent,
           (i % 24) * 2.0 + i % 10 AS delay, CASE WHEN i % 24 > 12 THEN 'late' ELSE 'on time' END AS verdict
    FROM generate_series(1, 1500) i;
    CREATE TABLE few AS SELECT * FROM points WHERE id <= 120;
    CREATE TABLE wrong AS
    SELECT id, hour, wind, carrier, CASE WHEN id = 700 THEN ARRAY[1.0] ELSE recent END AS recent, id - 700 AS divisor,
           jsonb_build_object('hour', hour, 'wind', wind, 'carrier', carrier,
                              CASE WHEN id = 700 THEN 'other' ELSE 'recent' END, recent) AS document
    FROM points;
    CREATE TABLE keys AS SELECT i AS id, i % 5 AS part FROM generate_series(1, 200, 3) i;
    ALTER TABLE points ADD PRIMARY KEY (id);
    ALTER TABLE few ADD dropped int;
    ALTER TABLE few DROP dropped;
    GRANT ALL ON ALL TABLES IN SCHEMA {schema} TO PUBLIC;
"""
NODE = "Custom Scan (Predict)"


@pytest.fixture(scope="module")
def server(shared_server: SharedServer) -> SharedServer:
    """The worker's cluster with two models."""
    with shared_server.connect() as conn:
        conn.execute(TABLES.format(schema=shared_server.schema))
        conn.execute("ANALYZE points, few, wrong, keys")
        learning: dict[str, Any] = {"epochs": 1, "batch_size": 400, "learning_rate": 0.03, "seed": 1}
        features = "hour, wind, carrier, recent"
        jobs = [
            submit(conn, "delay", MLP, query=f"SELECT {features}, delay FROM points", target="delay", **learning),
            submit(conn, "verdict", MLP, query="SELECT hour, wind, verdict FROM points", target="verdict", **learning),
        ]
        for job in jobs:
            assert value(conn, "SELECT wait_for_job(%s, '100 s')", job) == "finished"
    return shared_server


@pytest.fixture
def conn(server: Any) -> Iterator[Connection]:
    with server.connect() as connection:
        yield connection


def plan(conn: Connection, sql: str, options: str = "COSTS OFF") -> str:
    return "\n".join(line for (line,) in conn.execute(f"EXPLAIN ({options}) {sql}").fetchall())


def batched(conn: Connection, sql: str) -> bool:
    return NODE in plan(conn, sql)


def outcome(conn: Connection, sql: str, *, batching: bool) -> tuple[list[tuple[Any, ...]], str | None]:
    """Return the rows that the client sees, and the error after them."""
    conn.execute(f"SET pg_tensile.predict_batching = {batching}")
    rows: list[tuple[Any, ...]] = []
    try:
        rows.extend(conn.cursor().stream(sql))
    except psycopg.Error as error:
        return rows, f"{error.sqlstate}: {error.diag.message_primary}"
    finally:
        conn.execute("RESET pg_tensile.predict_batching")
    return rows, None


def same(one: Any, other: Any) -> bool:
    """Return whether two values are equal, but for the rounding of computations of other sizes."""
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-4, abs_tol=1e-4)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def check_same(conn: Connection, sql: str) -> tuple[list[tuple[Any, ...]], str | None]:
    """Check that the statement has the same outcome with and without batches, and return it.

    If a row causes several errors, it may be another one that is raised."""
    expected, error = outcome(conn, sql, batching=False)
    rows, raised = outcome(conn, sql, batching=True)
    assert (raised is None) == (error is None), sql
    assert same(rows, expected), sql
    return rows, error


def predicted(conn: Connection, model: str = "delay") -> int:
    """Return the number of rows that were predicted for and passed on."""
    return int(value(conn, "SELECT coalesce(sum(rows), 0) FROM tensile.predictions WHERE model = %s", model))


# ---- any query ----

CALLS = (
    "predict('delay', t)",
    "predict('delay', t, '100MB')",
    "(predict_interval('delay', t)).upper",
    "predict('verdict', ARRAY[t.hour, t.wind])",
    "predict('verdict', ROW(t.hour, t.wind))",
    "predict('verdict', jsonb_build_object('hour', t.hour, 'wind', t.wind))",
    "length(predict_class('verdict', to_jsonb(t)))",
    "predict('delay', to_json(t))",
    "predict('verdict', to_json(t)::text)",
    "predict('verdict', nullif(ARRAY[t.hour, t.wind], ARRAY[5, 0.5]::float8[]))",
    "CASE WHEN t.hour > 5 THEN predict('delay', t) END",
    "coalesce(nullif(t.hour, 7), predict('delay', t))",
    "(t.hour > 3 AND predict('verdict', ARRAY[t.hour, t.wind]) > 0.5)::int",
    "predict('delay', t) + predict('verdict', ARRAY[t.hour, t.wind]) * 10 / (t.id - {bad})",
    "predict('verdict', ARRAY[t.hour, 10 / (t.id - {bad})])",
    "predict('delay', ROW(t.hour, t.wind, t.carrier, CASE WHEN t.id = {bad} THEN ARRAY[1.0] ELSE t.recent END)::shape)",
)
SOURCES = (
    "few t",
    "(SELECT * FROM few ORDER BY hour, id) t",
    "(SELECT * FROM few OFFSET 3 LIMIT 50) t",
    "(SELECT few.* FROM few JOIN keys USING (id)) t",
    "few t JOIN keys k USING (id)",
    "few t LEFT JOIN keys k ON k.id = t.id AND k.part = 1",
    "(SELECT * FROM few UNION ALL SELECT * FROM points WHERE id BETWEEN 200 AND 240) t",
    "keys k, LATERAL (SELECT * FROM few WHERE few.id % 40 = k.id % 40 ORDER BY few.id LIMIT 3) t",
    "(SELECT * FROM points WHERE id < 100 AND 100 / (id - {bad}) < 50) t",
)
SHAPES = (
    "SELECT t.id, {call} FROM {source} {rest}",
    "SELECT t.id, {call}, {other} FROM {source} {rest}",
    "SELECT t FROM {source} WHERE {call} > 5 {rest}",
    "SELECT t, {call}, row_to_json(t)::text, {other}, predict_all('verdict', t)->'value' FROM {source} {rest}",
    "SELECT t.id, {other} FROM {source} WHERE t.hour > 2 AND {call} > 5 AND 7 / (t.id + 1 - {bad}) < 9 {rest}",
    "SELECT count(*), avg({call}), max({other}) FROM {source}",
    "SELECT t.hour, avg({call}), count({other}) FILTER (WHERE t.id % 2 = 0) FROM {source} GROUP BY 1 ORDER BY 1 {rest}",
    "SELECT round(({call})::numeric, 1), count(*) FROM {source} GROUP BY 1 ORDER BY 1, 2",
    "SELECT t.hour, carrier, sum({call}) FROM {source} GROUP BY GROUPING SETS (t.hour, carrier, ()) ORDER BY 1, 2",
    "SELECT t.id, {call}, sum(t.hour) OVER (ORDER BY t.id), lag({other}) OVER (ORDER BY t.id) FROM {source} {rest}",
    "WITH c AS MATERIALIZED (SELECT t.id, {call} AS p FROM {source}) SELECT * FROM c, few WHERE c.id = few.id {rest}",
    "SELECT t.id, (SELECT max({call} + few.id) FROM few WHERE few.id < 4) FROM {source} {rest}",
    "SELECT few.id FROM few WHERE EXISTS (SELECT FROM {source} WHERE t.id > few.id AND {call} > 5) {rest}",
    "SELECT t.id, generate_series(1, t.id % 3), {call} FROM {source} {rest}",
    "SELECT DISTINCT t.hour, {call} IS NULL FROM {source} ORDER BY 1, 2",
    "SELECT avg(p) FROM (SELECT {call} AS p, row_number() OVER (ORDER BY t.id) AS n FROM {source}) s WHERE n < 9",
)
RESTS = ("", "LIMIT 1", "LIMIT 20", "OFFSET 5 LIMIT 30", "ORDER BY t.id", "ORDER BY t.id DESC LIMIT 25")


@pytest.mark.timeout(600)
@given(
    shape=st.sampled_from(SHAPES),
    source=st.sampled_from(SOURCES),
    call=st.sampled_from(CALLS),
    other=st.sampled_from(CALLS),
    rest=st.sampled_from(RESTS),
    bad=st.sampled_from((0, 33, 77)),
    in_session=st.booleans(),
)
@examples(40, long=600, suppress=[HealthCheck.function_scoped_fixture])
def test_batches_change_no_row_and_no_error(
    conn: Connection, shape: str, source: str, call: str, other: str, rest: str, bad: int, in_session: bool
) -> None:
    conn.execute(f"SET pg_tensile.predict_in_session = {in_session}")
    if value(conn, "SELECT to_regtype('shape')") is None:
        conn.execute("CREATE TYPE shape AS (hour int, wind float8, carrier text, recent float8[])")
    if "ORDER BY" in shape or "FROM few WHERE" in shape or " c, few " in shape:
        rest = rest[rest.find("LIMIT") :] if "LIMIT" in rest else ""
    sql = shape.format(source=source, call=call, other=other, rest=rest, bad=bad).format(bad=bad)
    check_same(conn, sql)


# ---- errors ----


@pytest.mark.parametrize("in_session", [True, False])
@pytest.mark.parametrize(
    ("sql", "error"),
    [
        ("SELECT id, predict('delay', document) FROM wrong", "42703"),  # while it is packed
        ("SELECT id, predict('delay', w) FROM wrong w", "22"),  # from the model
        ("SELECT id, predict('verdict', ARRAY[hour, 1 / divisor]) FROM wrong", "22012"),  # in its features
        ("SELECT id, predict('verdict', w) FROM wrong w WHERE 1 / divisor < 5", "22012"),  # in the input
        ("SELECT id, predict('verdict', w) / divisor FROM wrong w", "22012"),  # in what is made of the answer
        ("SELECT id, predict('verdict', w), predict('delay', document) FROM wrong w", "42703"),
    ],
)
def test_an_error_in_row_700_comes_at_row_700(conn: Connection, sql: str, error: str, in_session: bool) -> None:
    conn.execute(f"SET pg_tensile.predict_in_session = {in_session}")
    assert batched(conn, sql)
    before = predicted(conn, "verdict" if "verdict" in sql else "delay")
    rows, raised = outcome(conn, sql, batching=True)
    assert [row[0] for row in rows] == [*range(1, 700)]
    assert (raised or "").startswith(error), raised
    if "/ divisor FROM" not in sql:  # an error that is raised elsewhere ends the counting
        assert predicted(conn, "verdict" if "verdict" in sql else "delay") - before == 699
    rows, raised = outcome(conn, f"{sql} LIMIT 699", batching=True)
    assert (len(rows), raised) == (699, None)


def test_an_error_that_is_never_due(conn: Connection) -> None:
    """An error behind a LIMIT is raised for other readers of the same rows only, and EXPLAIN ANALYZE shows the plan."""
    quotients = "WITH q AS MATERIALIZED (SELECT *, 1 / divisor AS quotient FROM wrong)"
    first = "SELECT predict('verdict', w) FROM wrong w WHERE 1 / divisor < 5 LIMIT 600"
    for sql in (
        first,
        f"SELECT count(p) FROM ({first}) s(p)",
        f"{quotients} SELECT predict('verdict', q) FROM q LIMIT 600",
        f"{quotients} (SELECT predict('verdict', q) FROM q LIMIT 600) UNION ALL SELECT count(quotient) FROM q",
        "SELECT k.id, (SELECT count(p) FROM (SELECT predict('verdict', w) FROM wrong w"
        " WHERE 1 / divisor < 5 AND w.id > k.id OFFSET 3 LIMIT 600 - k.id % 7) s(p)) FROM keys k WHERE k.id < 9",
    ):
        check_same(conn, sql)
    assert "actual" in plan(conn, first, "ANALYZE")


def test_a_cursor_sees_the_rows_before_an_error(conn: Connection) -> None:
    with conn.transaction(force_rollback=True), conn.cursor("c") as cursor:
        cursor.execute("SELECT id, predict('delay', w) FROM wrong w")
        assert len(cursor.fetchmany(600)) == 600
        assert len(cursor.fetchmany(99)) == 99
        with pytest.raises(errors.DataException):
            cursor.fetchmany(1)


def test_what_is_not_evaluated_raises_nothing(conn: Connection) -> None:
    """A model that does not exist is found out by the first row that is predicted for, and there is none."""
    for sql in (
        "SELECT CASE WHEN id < 0 THEN predict('none', t) END FROM points t",
        "SELECT coalesce(id, predict('none', t)) FROM points t",
        "SELECT id > 0 OR predict('none', t) > 0 FROM points t",
        "SELECT id < 0 AND predict('none', t) > 0 FROM points t",
        "SELECT count(predict('none', t)) FILTER (WHERE id < 0) FROM points t",
        "SELECT id FROM points t WHERE id > 0 OR predict('none', t) > 0",
        "SELECT lag(predict('none', t)) OVER (PARTITION BY id) FROM points t",
    ):
        assert not batched(conn, sql), sql
        assert outcome(conn, sql, batching=True)[1] is None, sql
    for sql in (
        "SELECT predict('none', t) FROM points t WHERE id < 0",
        "SELECT id FROM points t WHERE id < 0 AND predict('none', t) > 0",
        "SELECT p FROM keys k, LATERAL (SELECT predict('none', t) AS p FROM few t WHERE id = -k.id OFFSET 0) t",
        "SELECT count(predict('none', t)) FROM points t WHERE id < 0",
    ):
        assert batched(conn, sql), sql
        assert outcome(conn, sql, batching=True)[1] is None, sql
    assert (check_same(conn, "SELECT predict('none', t) FROM points t")[1] or "").startswith("42704")


# ---- what reading ahead must not do ----


def test_only_rows_that_are_passed_on_are_counted(conn: Connection) -> None:
    before = predicted(conn)
    assert len(conn.execute("SELECT predict('delay', t) FROM points t LIMIT 5").fetchall()) == 5
    assert predicted(conn) - before == 5
    with conn.transaction(), conn.cursor("c") as cursor:
        cursor.execute("SELECT predict('delay', t) FROM points t")
        cursor.fetchmany(100)
        assert predicted(conn) - before == 105
        cursor.fetchmany(100)
    assert predicted(conn) - before == 205
    conn.execute("SELECT avg(predict('delay', t)) FROM points t")
    assert predicted(conn) - before == 1705


def test_a_limit_bounds_what_is_read(conn: Connection) -> None:
    sql = "SELECT id, predict('delay', t) FROM points t ORDER BY md5(id::text) LIMIT 5"
    text = plan(conn, sql, "ANALYZE, COSTS OFF, TIMING OFF")
    assert NODE in text and "top-N heapsort" in text
    text = plan(conn, "SELECT predict('delay', t) FROM points t LIMIT 50 OFFSET 5", "ANALYZE, COSTS OFF, TIMING OFF")
    assert "Seq Scan on points t (actual rows=55" in text


def test_nothing_volatile_is_read_ahead(conn: Connection) -> None:
    conn.execute("CREATE SEQUENCE IF NOT EXISTS numbers")
    conn.execute("SELECT setval('numbers', 1, false)")
    inside = "SELECT predict('delay', t) FROM (SELECT *, nextval('numbers') AS n FROM points OFFSET 0) t LIMIT 5"
    assert not batched(conn, inside)
    beside = "SELECT nextval('numbers'), predict('delay', t) FROM points t LIMIT 5"
    assert batched(conn, beside)
    assert [row[0] for row in conn.execute(beside).fetchall()] == [1, 2, 3, 4, 5]
    assert value(conn, "SELECT last_value FROM numbers") == 5
    modifying = "WITH w AS (UPDATE few SET hour = hour RETURNING *) SELECT predict('delay', w) FROM w"
    assert not batched(conn, modifying)
    assert len(conn.execute(modifying).fetchall()) == 120
    locking = "SELECT predict('delay', t) FROM (SELECT * FROM few FOR UPDATE) t"
    assert not batched(conn, locking)


def test_functions_of_users_are_read_ahead_only_where_all_rows_are_read(conn: Connection) -> None:
    conn.execute(
        "CREATE OR REPLACE FUNCTION shifted(int) RETURNS int IMMUTABLE LANGUAGE plpgsql AS 'BEGIN RETURN $1 + 1; END'"
    )
    condition = "FROM points t WHERE shifted(id) < 77"
    assert not batched(conn, f"SELECT predict('delay', t) {condition}")
    assert batched(conn, f"SELECT avg(predict('delay', t)) {condition}")
    assert batched(conn, f"CREATE TABLE copy AS SELECT avg(predict('delay', t)) {condition}")
    assert not batched(conn, f"SELECT avg(p) FROM (SELECT predict('delay', t) AS p {condition} LIMIT 9) s")
    check_same(conn, f"SELECT avg(predict('delay', t)) {condition}")


def test_a_model_that_differs_by_row_is_no_batch(conn: Connection) -> None:
    sql = "SELECT id, predict(CASE WHEN hour > 5 THEN 'delay' ELSE 'verdict' END, t) FROM few t"
    assert not batched(conn, sql)
    assert len(check_same(conn, sql)[0]) == 120


def test_no_node_where_the_executor_goes_back(conn: Connection) -> None:
    with conn.transaction():
        conn.execute("DECLARE c SCROLL CURSOR FOR SELECT id, predict('verdict', t) FROM points t")
        assert len(conn.execute("FETCH 10 FROM c").fetchall()) == 10
        assert conn.execute("FETCH BACKWARD 1 FROM c").fetchall()[0][0] == 9
    conn.execute("SET enable_hashjoin = off; SET enable_nestloop = off; SET enable_material = off")
    joined = (
        "SELECT s.id, s.p, few.wind FROM few JOIN (SELECT id, hour, predict('delay', t) AS p FROM points t"
        " ORDER BY hour OFFSET 0) s ON s.hour = few.hour"
    )
    assert "Merge Join" in plan(conn, joined)
    rows = check_same(conn, f"{joined} WHERE s.id < 60 ORDER BY 1, few.id")[0]
    assert len(rows) == 59 * 5


def test_cursors_that_do_not_say_whether_they_go_back(conn: Connection) -> None:
    declare = "DECLARE c CURSOR FOR SELECT id, predict('delay', t) FROM few t"
    with conn.transaction(force_rollback=True):
        conn.execute(declare)
        conn.execute("FETCH 3 FROM c")
        with pytest.raises(errors.ObjectNotInPrerequisiteState, match="only scan forward"):
            conn.execute("FETCH BACKWARD 1 FROM c")
    with conn.transaction(force_rollback=True):
        conn.execute(declare)
        conn.execute("FETCH 3 FROM c")
        with pytest.raises(errors.InvalidCursorState, match="not a simply updatable scan"):
            conn.execute("UPDATE few SET hour = 0 WHERE CURRENT OF c")
    with conn.transaction(force_rollback=True):
        conn.execute(f"{declare} FOR UPDATE")
        conn.execute("FETCH 3 FROM c")
        assert value(conn, "UPDATE few SET hour = 0 WHERE CURRENT OF c RETURNING id") == 3


# ---- statements ----


def test_inserts_and_updates(conn: Connection) -> None:
    conn.execute("CREATE TABLE IF NOT EXISTS results (id int PRIMARY KEY, delay float8, verdict text)")
    expected: dict[int, float] = dict(
        conn.execute("SELECT id, predict('delay', t) FROM points t ORDER BY id LIMIT 100").fetchall()
    )

    def stored() -> dict[int, float]:
        return dict(conn.execute("SELECT id, delay FROM results").fetchall())

    for statement in (
        "INSERT INTO results SELECT id, predict('delay', t), predict_class('verdict', t) FROM points t WHERE id <= 100",
        "INSERT INTO results SELECT id FROM points WHERE id <= 100; "
        "UPDATE results r SET delay = predict('delay', t) FROM points t WHERE t.id = r.id",
        "MERGE INTO results r USING (SELECT id, predict('delay', t) AS p FROM points t WHERE id <= 100 OFFSET 0) s "
        "ON r.id = s.id WHEN MATCHED THEN UPDATE SET delay = p WHEN NOT MATCHED THEN INSERT VALUES (s.id, p)",
    ):
        conn.execute("TRUNCATE results")
        assert batched(conn, statement.rpartition("; ")[2])
        conn.execute(statement)
        assert stored() == pytest.approx(expected, rel=1e-4)
    conn.execute("CREATE TABLE IF NOT EXISTS own AS SELECT *, 0.0::float8 AS p FROM points WHERE id <= 100")
    conn.execute("UPDATE own SET p = predict('delay', own)")
    assert dict(conn.execute("SELECT id, p FROM own").fetchall()) == pytest.approx(expected, rel=1e-4)


def test_a_row_that_has_changed_meanwhile_is_predicted_for_again(
    conn: Connection, server: Any, wait_until: Wait
) -> None:
    conn.execute("CREATE TABLE IF NOT EXISTS moving AS SELECT *, NULL::float8 AS p FROM points WHERE id <= 20")
    sql = "UPDATE moving SET p = predict('verdict', ARRAY[hour, wind])"
    locking = "SELECT id, hour, predict('verdict', ARRAY[hour, wind]) FROM moving ORDER BY id FOR UPDATE"
    assert batched(conn, sql) and batched(conn, locking)
    with server.connect() as other:
        pid = other.info.backend_pid
        for statement in (sql, locking):
            conn.execute("UPDATE moving SET hour = 1")
            low, high = (value(conn, "SELECT predict('verdict', ARRAY[%s, 0.5])", hour) for hour in (1, 23))
            conn.execute("UPDATE moving SET wind = 0.5")
            with conn.transaction():
                conn.execute("UPDATE moving SET hour = 23 WHERE id = 15")
                results: list[Any] = []

                def run(statement: str = statement, results: list[Any] = results) -> None:
                    cursor = other.execute(statement)
                    if cursor.description:
                        results.extend(cursor.fetchall())

                thread = threading.Thread(target=run)
                thread.start()
                wait_until(lambda: value(conn, "SELECT cardinality(pg_blocking_pids(%s)) > 0", pid))
            thread.join()
            results = results or conn.execute("SELECT id, hour, p FROM moving ORDER BY id").fetchall()
            assert {row[0]: row[2] for row in results} == pytest.approx(
                {i: high if i == 15 else low for i in range(1, 21)}, rel=1e-4
            )


def test_rows_are_locked_as_they_are_returned(conn: Connection, server: Any) -> None:
    with conn.transaction(), conn.cursor("c") as cursor, server.connect() as other:
        cursor.execute("SELECT id, predict('delay', t) FROM points t ORDER BY id FOR UPDATE")
        assert len(cursor.fetchmany(30)) == 30
        free = other.execute("SELECT id FROM points WHERE id <= 100 ORDER BY id FOR UPDATE SKIP LOCKED").fetchall()
        assert [id for (id,) in free] == [*range(31, 101)]


# ---- parameters, rescans, workers ----


def test_prepared_statements(conn: Connection) -> None:
    conn.execute("SET plan_cache_mode = force_generic_plan")
    conn.execute(
        "PREPARE p(text, int, int) AS SELECT id, predict($1, t) FROM points t WHERE id <= $2 ORDER BY id LIMIT $3"
    )
    assert batched(conn, "EXECUTE p('delay', 10, 3)")
    for model in ("delay", "verdict", "delay"):
        rows = conn.execute(f"EXECUTE p('{model}', 40, 25)").fetchall()
        assert len(rows) == 25
        assert same(rows, conn.execute(f"SELECT id, predict('{model}', t) FROM points t WHERE id <= 25").fetchall())
    with pytest.raises(errors.UndefinedObject):
        conn.execute("EXECUTE p('none', 40, 25)")
    assert conn.execute("EXECUTE p(NULL, 40, 2)").fetchall() == [(1, None), (2, None)]
    assert conn.execute("EXECUTE p('none', 0, NULL)").fetchall() == []
    assert len(conn.execute("EXECUTE p('delay', 40, NULL)").fetchall()) == 40
    conn.execute("SET pg_tensile.predict_batching = off")
    conn.execute("PREPARE q AS SELECT predict('delay', t) FROM points t")
    assert not batched(conn, "EXECUTE q")


def test_parameters_of_the_executor(conn: Connection) -> None:
    for sql in (
        "SELECT id, predict((SELECT max(name) FROM (VALUES ('delay')) v(name)), t) FROM few t",
        "SELECT k.id, s.* FROM keys k, LATERAL (SELECT t.id, predict('delay', t), k.part FROM few t"
        " WHERE t.id BETWEEN k.id AND k.id + k.part) s",
        "SELECT k.id, (SELECT sum(predict('verdict', ARRAY[t.hour, k.part])) FROM few t WHERE t.id < 9) FROM keys k",
        "SELECT m, (SELECT sum(predict(m, t)) FROM few t) FROM unnest(ARRAY['delay', 'verdict', 'delay']) m",
        "SELECT t.id, (SELECT sum(k.part) FROM keys k WHERE k.id < t.id), predict('delay', t) FROM few t",
    ):
        assert batched(conn, sql), sql
        assert check_same(conn, sql)[1] is None


def test_partitions(conn: Connection) -> None:
    conn.execute("CREATE TABLE parted (LIKE points) PARTITION BY RANGE (id)")
    conn.execute("CREATE TABLE low PARTITION OF parted FOR VALUES FROM (0) TO (500)")
    conn.execute(
        "CREATE TABLE high (wind float8, gone int, verdict text, id int NOT NULL, hour int, carrier text,"
        " recent float8[], delay numeric)"
    )
    conn.execute("ALTER TABLE high DROP gone")
    conn.execute("ALTER TABLE parted ATTACH PARTITION high FOR VALUES FROM (500) TO (2000)")
    conn.execute("INSERT INTO parted SELECT * FROM points")
    expected = value(conn, "SELECT avg(predict('delay', t)) FROM points t")
    for sql in (
        "SELECT avg(predict('delay', t)) FROM parted t",
        "SELECT avg(p) FROM (SELECT predict('delay', t) AS p FROM parted t WHERE id > 0 OFFSET 0) s",
        "SELECT avg(predict('delay', t)) FROM parted t WHERE predict_interval('delay', t) IS NOT NULL",
    ):
        assert batched(conn, sql)
        assert value(conn, sql) == pytest.approx(expected, rel=1e-5)
    conn.execute("SET enable_partitionwise_aggregate = on")
    check_same(conn, "SELECT id % 3, sum(predict('delay', t)) FROM parted t GROUP BY 1 ORDER BY 1")


def test_parallel_workers(conn: Connection) -> None:
    functions = conn.execute(
        "SELECT oid::regprocedure::text, proparallel FROM pg_proc WHERE proname IN ('predict', 'predict_class')"
    ).fetchall()
    with conn.transaction(force_rollback=True):
        for name, _ in functions:
            conn.execute(f"ALTER FUNCTION {name} PARALLEL SAFE")
        for setting in ("parallel_setup_cost", "parallel_tuple_cost", "min_parallel_table_scan_size"):
            conn.execute(f"SET LOCAL {setting} = 0")
        for sql in (
            "SELECT count(*), avg(predict('delay', t)), max(predict_class('verdict', t)) FROM points t",
            "SELECT id, predict('delay', t) FROM points t ORDER BY hour, id LIMIT 700",
            "SELECT count(*) FROM points t WHERE predict('delay', t) > 20",
        ):
            text = plan(conn, sql, "ANALYZE, VERBOSE, COSTS OFF, TIMING OFF")
            gather, node = (text.find(name) for name in ("Gather", f"Parallel {NODE}"))
            assert 0 <= gather < node and "Workers Launched: 2" in text, text
            assert "Version: 1" in text and ("LIMIT" in sql or "Rows: 1500" in text), text
            conn.execute("SET LOCAL max_parallel_workers_per_gather = 0")
            alone = conn.execute(sql).fetchall()
            conn.execute("SET LOCAL max_parallel_workers_per_gather = 2")
            assert same(conn.execute(sql).fetchall(), alone)


# ---- security ----


def test_conditions_keep_their_order(conn: Connection) -> None:
    """Rows behind a barrier or a policy are not predicted for: the model would refuse their arrays."""
    conn.execute("CREATE OR REPLACE VIEW barrier WITH (security_barrier) AS SELECT * FROM wrong WHERE id <> 700")
    conn.execute("GRANT SELECT ON barrier TO PUBLIC")
    sql = "SELECT count(*) FROM {} t WHERE predict('delay', t) > 0 AND id > 650 AND id < 750"
    assert batched(conn, sql.format("barrier"))
    assert check_same(conn, sql.format("barrier"))[1] is None
    conn.execute("ALTER TABLE wrong ENABLE ROW LEVEL SECURITY")
    conn.execute("CREATE POLICY visible ON wrong USING (id <> 700)")
    conn.execute("CREATE ROLE batching_reader IN ROLE tensile_user")
    conn.execute("SELECT grant_model('delay', 'batching_reader')")
    try:
        conn.execute("SET ROLE batching_reader")
        assert batched(conn, sql.format("wrong"))
        assert check_same(conn, sql.format("wrong"))[1] is None
    finally:
        conn.execute("RESET ROLE")
        conn.execute("DROP POLICY visible ON wrong; ALTER TABLE wrong DISABLE ROW LEVEL SECURITY")


def test_privileges_are_those_of_the_function(conn: Connection) -> None:
    with conn.transaction(force_rollback=True):
        conn.execute("CREATE ROLE batching_nobody")
        conn.execute(f"GRANT USAGE ON SCHEMA {value(conn, 'SELECT current_schema()')} TO batching_nobody")
        conn.execute("SET LOCAL ROLE batching_nobody")
        with pytest.raises(errors.InsufficientPrivilege, match="for function predict"):
            conn.execute("SELECT avg(predict('delay', t)) FROM points t")
    with conn.transaction(force_rollback=True):
        conn.execute("CREATE ROLE batching_stranger IN ROLE tensile_user")
        conn.execute("SET LOCAL ROLE batching_stranger")
        with pytest.raises(errors.InsufficientPrivilege, match="with model"):
            conn.execute("SELECT avg(predict('delay', t)) FROM points t")


def test_another_function_of_the_same_name_is_left_alone(conn: Connection) -> None:
    with conn.transaction(force_rollback=True):
        conn.execute(
            "CREATE FUNCTION predict(text, points) RETURNS float8 LANGUAGE sql IMMUTABLE AS 'SELECT 1.0::float8'"
        )
        assert not batched(conn, "SELECT predict('delay', t) FROM points t")
        conn.execute(
            "CREATE FUNCTION foretold(points) RETURNS float8 LANGUAGE sql STABLE"
            " AS 'SELECT public.predict(''delay'', $1::record)'"
        )
        assert batched(conn, "SELECT avg(foretold(t)) FROM points t")


# ---- EXPLAIN and the setting ----


def test_explain(conn: Connection) -> None:
    sql = "SELECT id, predict('delay', t), predict_interval('delay', t), predict_class('verdict', t) FROM points t"
    text = plan(conn, sql, "VERBOSE, COSTS OFF")
    assert "(predict('delay'::text, t.*, NULL::text))" in text
    assert "Model: delay" in text and "Model: verdict" in text and "Version" not in text
    (document,) = conn.execute(f"EXPLAIN (ANALYZE, FORMAT JSON) {sql}").fetchone() or ()
    node = document[0]["Plan"]
    assert node["Custom Plan Provider"] == "Predict"
    assert [prediction["Model"] for prediction in node["Predictions"]] == ["delay", "verdict"]
    for prediction in node["Predictions"]:
        assert (prediction["Version"], prediction["Rows"]) == (1, 1500)
        assert 10 < prediction["Batches"] < 15 and prediction["Prediction Time"] > 0
    text = plan(conn, sql, "ANALYZE, COSTS OFF, TIMING OFF")
    assert "Rows: 1500" in text and "Time: " not in text.replace("Planning Time: ", "").replace("Execution Time: ", "")


def test_the_setting(conn: Connection) -> None:
    sql = "SELECT avg(predict('delay', t)) FROM points t"
    assert batched(conn, sql)
    conn.execute("SET pg_tensile.predict_batching = off")
    assert not batched(conn, sql)


def test_a_database_without_the_extension(server: Any) -> None:
    with server.connect() as conn, contextlib.ExitStack() as ends:
        conn.execute("CREATE DATABASE empty")
        ends.callback(conn.execute, "DROP DATABASE empty WITH (FORCE)")
        with psycopg.connect(server.cluster.dsn("empty")) as other:
            other.execute("CREATE FUNCTION predict(text, int) RETURNS int LANGUAGE sql AS 'SELECT $2' IMMUTABLE STRICT")
            assert other.execute("SELECT sum(predict('m', i)) FROM generate_series(1, 3) i").fetchone() == (6,)
