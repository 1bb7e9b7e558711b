"""predict, predict_class and predict_rows: answers, refusals and faults.

Small models are trained once for the file; predictions are compared with each other (all functions must give the same
answer) and with the data.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from psycopg import errors
from psycopg.types.json import Jsonb

from tests.server.refusals import refusal
from tests.server.shared import SharedServer
from tests.server.support import Connection, register, submit, value

FLIGHTS = """
    CREATE TABLE flights AS
    SELECT i AS id, (i % 24)::int2 AS hour, nullif(i % 700, 13)::int AS distance, (i % 100) / 10.0 AS wind,
           i % 3 = 0 AS weekend, '2024-01-01'::timestamptz + i * interval '1 hour' AS departure,
           (ARRAY['UA', 'AA', 'B6', 'DL'])[i % 4 + 1] AS carrier, ARRAY[i % 7, i % 5, i % 3] AS recent,
           (i % 24) * 2.0 + (i % 100) / 10.0 AS delay,
           CASE WHEN i % 24 > 12 THEN 'late' ELSE 'on time' END AS verdict,
           i % 4 AS gate
    FROM generate_series(1, 4000) i
"""
KINDS = """
    CREATE TYPE mood AS ENUM ('sad', 'ok');
    CREATE DOMAIN even AS int8 CHECK (VALUE % 2 = 0);
    CREATE TABLE kinds AS
    SELECT i AS id, i % 3 = 0 AS bool, (i % 24)::int2 AS int2, i AS int4, (i * 2)::even AS domain,
           (ARRAY[0.1, 'NaN', 2.7, '-Infinity'])[i % 4 + 1]::float4 AS float4,
           (ARRAY[0.1, 'Infinity', i, 'NaN'])[i % 4 + 1]::float8 AS float8,
           (ARRAY[1.10, 'NaN', i])[i % 3 + 1]::numeric AS numeric,
           make_interval(days => i % 50, secs => i / 7.0) AS interval,
           time '08:00' + i * interval '1 min' AS time, date '2024-01-01' + i AS date,
           (CASE WHEN i % 9 = 0 THEN 'infinity' ELSE timestamp '2024-01-01' + i * interval '17 min' END) AS timestamp,
           timestamptz '2024-03-09' + i * interval '7 hours' AS timestamptz,
           (ARRAY['a', 'b  ', 'ä', ''])[i % 4 + 1] AS text, (ARRAY['a ', 'b'])[i % 2 + 1]::varchar AS varchar,
           (ARRAY['a', 'bc', ''])[i % 3 + 1]::char(6) AS bpchar, (ARRAY['x', 'y'])[i % 2 + 1]::"char" AS char,
           (ARRAY['n', 'm'])[i % 2 + 1]::name AS name, md5((i % 5)::text)::uuid AS uuid,
           (ARRAY['sad', 'ok'])[i % 2 + 1]::mood AS mood, decode(lpad(to_hex(i % 256), 4, '0'), 'hex') AS bytea,
           ARRAY[i % 7, NULL, i % 3] AS ints, ARRAY[0.1, i % 5 + 0.7, 'NaN']::float4[] AS floats,
           ARRAY[i % 2 = 0, true] AS bools, ARRAY[1.5, NULL, i % 4]::numeric[] AS numerics,
           nullif(i % 5, 0) AS nulls, (i % 24) + (i % 7) * 3 + (i % 11) / 2.0 AS y
    FROM generate_series(1, 600) i
"""
FEATURES = "hour, distance, wind, weekend, departure, carrier, recent"
NUMBERS = "hour, distance, wind, weekend"
MLP = {"type": "mlp", "hidden": [16]}
CLASSIFY = {"task": "classification"}
# The rows for validation are a single batch, and too few to calibrate probabilities
LEARNING: dict[str, Any] = {
    "epochs": 4,
    "batch_size": 400,
    "learning_rate": 0.03,
    "validation": 0.04,
    "seed": 1,
}
TRAINED = {  # name: features, target, options
    "delay": (FEATURES, "delay", {}),
    "numbers": (NUMBERS, "delay", {}),
    "verdict": (FEATURES, "verdict", {}),
    "carrier": (NUMBERS, "carrier", {}),
    "gate": (f"{NUMBERS}, carrier", "gate", CLASSIFY),
}


@pytest.fixture(scope="module")
def server(shared_server: SharedServer) -> SharedServer:
    """The worker's cluster with trained models."""
    with shared_server.connect() as conn:
        conn.execute(FLIGHTS)
        conn.execute("GRANT SELECT ON flights TO PUBLIC")
        jobs = []
        for name, (features, target, options) in TRAINED.items():
            query = f"SELECT {features}, {target} FROM flights"
            jobs.append(submit(conn, name, MLP, query=query, target=target, options=options, **LEARNING))
        conn.execute(KINDS)
        jobs.append(submit(conn, "kinds", MLP, query="SELECT * FROM kinds", target="y", epochs=2, seed=1))
        register(conn, "untrained", MLP)
        for job in jobs:
            assert value(conn, "SELECT wait_for_job(%s, '100 s')", job) == "finished"
    return shared_server


@pytest.fixture
def conn(server: Any) -> Iterator[Connection]:
    with server.connect() as connection:
        connection.execute("SET pg_tensile.predict_timeout = '20 s'")
        yield connection


@pytest.fixture
def role(conn: Connection) -> Iterator[str]:
    """A role without a grant on any model, dropped at the end."""
    name = f"stranger_{time.monotonic_ns()}"
    conn.execute(f"CREATE ROLE {name} LOGIN IN ROLE tensile_user")
    yield name
    conn.execute("RESET ROLE")
    conn.execute(f"DROP OWNED BY {name}")
    conn.execute(f"DROP ROLE {name}")


# -- answers ---------------------------------------------------------------------------------------------------------


def test_all_functions_give_the_same_prediction(conn: Connection) -> None:
    rows = conn.execute(f"""
        SELECT predict('numbers', f), predict('numbers', ARRAY[s.hour, s.distance, s.wind, s.weekend::int]::float8[]),
               predict('numbers', to_jsonb(s)), r.prediction
        FROM flights f
        CROSS JOIN LATERAL (SELECT {NUMBERS}) s
        JOIN predict_rows('numbers', 'SELECT * FROM flights ORDER BY id') r ON r.row_number = f.id
        WHERE id < 50
    """).fetchall()
    assert len(rows) == 49
    for whole_row, array, jsonb, rows_prediction in rows:
        assert whole_row == array == jsonb
        assert rows_prediction == pytest.approx(whole_row, rel=1e-5)


def test_all_functions_take_every_kind_of_feature(conn: Connection) -> None:
    rows = conn.execute(f"""
        SELECT predict('delay', f), predict('delay', to_jsonb(s)), r.prediction
        FROM flights f
        CROSS JOIN LATERAL (SELECT {FEATURES}) s
        JOIN predict_rows('delay', 'SELECT * FROM flights ORDER BY id') r ON r.row_number = f.id
        WHERE id % 100 = 13
    """).fetchall()
    assert len(rows) == 40
    assert len({row[0] for row in rows}) == 40
    for whole_row, jsonb, rows_prediction in rows:
        assert jsonb == whole_row
        assert rows_prediction == pytest.approx(whole_row, rel=1e-5)


def test_the_model_learnt_what_the_data_say(conn: Connection) -> None:
    query = "SELECT * FROM flights ORDER BY id"
    correlation = value(
        conn,
        "SELECT corr(r.prediction, f.delay) FROM predict_rows('delay', %s) r JOIN flights f ON f.id = r.row_number",
        query,
    )
    assert correlation > 0.9
    share = value(
        conn,
        "SELECT avg((r.label = verdict)::int) FROM predict_rows('verdict', %s) r JOIN flights f ON f.id = r.row_number",
        query,
    )
    assert share > 0.9


def test_binary_predictions_are_probabilities_of_the_second_label(conn: Connection) -> None:
    rows = conn.execute("""
        SELECT predict('verdict', f), predict_class('verdict', f), r.*
        FROM flights f JOIN predict_rows('verdict', 'SELECT * FROM flights ORDER BY id') r ON r.row_number = f.id
        WHERE id < 100
    """).fetchall()
    for prediction, label, _, rows_prediction, rows_label, probability in rows:
        assert label == rows_label == ("on time" if prediction > 0.5 else "late")
        assert rows_prediction == pytest.approx(prediction, abs=1e-5)
        assert probability == pytest.approx(max(prediction, 1 - prediction), abs=1e-5)


def test_labels_that_are_numbers_are_predicted_as_numbers(conn: Connection) -> None:
    rows = conn.execute("SELECT predict('gate', f), predict_class('gate', f) FROM flights f LIMIT 50").fetchall()
    assert {str(int(prediction)) for prediction, _ in rows} <= {"0", "1", "2", "3"}
    assert all(str(int(prediction)) == label for prediction, label in rows)


def test_other_labels_need_predict_class(conn: Connection) -> None:
    sqlstate, message, hint = refusal(conn, "SELECT predict('carrier', f) FROM flights f LIMIT 1")
    assert (sqlstate, hint) == ("42804", "Use predict_class.")
    assert "carrier" in message
    assert value(conn, "SELECT predict_class('carrier', f) FROM flights f LIMIT 1") in {"UA", "AA", "B6", "DL"}
    rows = conn.execute("SELECT * FROM predict_rows('carrier', 'SELECT * FROM flights LIMIT 3')").fetchall()
    assert [row[:2] for row in rows] == [(1, None), (2, None), (3, None)]
    assert all(0.25 <= row[3] <= 1 for row in rows)


def test_a_regression_has_no_classes(conn: Connection) -> None:
    sqlstate, _, hint = refusal(conn, "SELECT predict_class('delay', f) FROM flights f LIMIT 1")
    assert (sqlstate, hint) == ("42804", "Use predict.")
    row = conn.execute("SELECT * FROM predict_rows('delay', 'SELECT * FROM flights LIMIT 1')").fetchone()
    assert row is not None
    assert row[2:] == (None, None)


def test_null_features_are_imputed_and_null_arguments_are_null(conn: Connection) -> None:
    nothing = dict.fromkeys(FEATURES.split(", "))
    assert math.isfinite(value(conn, "SELECT predict('delay', %s)", Jsonb(nothing)))
    assert math.isfinite(value(conn, "SELECT predict('numbers', '{NULL,NULL,NULL,NULL}'::float8[])"))
    assert value(conn, "SELECT predict('numbers', NULL::float8[])") is None
    assert value(conn, "SELECT predict(NULL, '{1,2,3,1}'::float8[])") is None


def test_categories_never_seen_are_counted(conn: Connection) -> None:
    counted = "SELECT coalesce(sum(unknown_categories), 0), coalesce(sum(rows), 0) FROM tensile_worker._predictions()"
    before = conn.execute(counted).fetchone()
    unseen = "SELECT 1 AS hour, 2 AS distance, 3 AS wind, true AS weekend, 'ZZ' AS carrier"
    value(conn, f"SELECT predict('gate', x) FROM ({unseen}) x")
    query = "SELECT hour, distance, wind, weekend, 'Q' || id % 2 AS carrier FROM flights LIMIT 10"
    conn.execute("SELECT * FROM predict_rows('gate', %s)", (query,))
    after = conn.execute(counted).fetchone()
    assert before is not None
    assert after is not None
    assert (after[0] - before[0], after[1] - before[1]) == (11, 11)


def test_features_accept_all_types_of_their_kind(conn: Connection) -> None:
    answers = conn.execute("""
        SELECT predict('delay', x) FROM (SELECT 5::int8 AS hour, 7.5::numeric AS distance, 2::float4 AS wind,
            true AS weekend, '2024-01-05'::date AS departure, 'UA'::char(4) AS carrier,
            '{1,2,3}'::numeric[] AS recent) x
        UNION ALL
        SELECT predict('delay', x) FROM (SELECT 5 AS hour, 7.5::float8 AS distance, 2 AS wind, 1 AS weekend,
            '2024-01-05 00:00+00'::timestamptz AS departure, 'UA'::name AS carrier, '\\x010203'::bytea AS recent) x
        UNION ALL
        SELECT predict('delay', '{"hour": 5, "distance": 7.5, "wind": 2, "weekend": true,
            "departure": "2024-01-05 01:00+01", "carrier": "UA", "recent": [[1], [2, 3]]}'::jsonb)
    """).fetchall()
    assert len(set(answers)) == 1


def test_whatever_trains_as_a_row_predicts_as_jsonb(conn: Connection) -> None:
    """Each type, with null, what is no number in JSON, and a time zone that is not UTC."""
    conn.execute("SET TimeZone = 'America/New_York'; SET IntervalStyle = 'sql_standard'")
    rows = conn.execute("""
        SELECT predict('kinds', k), predict('kinds', to_jsonb(k)), predict('kinds', to_jsonb(k) || '{"extra": [1]}')
        FROM kinds k ORDER BY id LIMIT 120
    """).fetchall()
    assert len({row for row, *_ in rows}) > 100
    assert all(row == jsonb == more for row, jsonb, more in rows)


def test_a_timestamp_without_offset_is_in_the_zone_of_the_session(conn: Connection) -> None:
    """If the feature was trained with a timestamptz; that of a timestamp has no zone."""

    def ask(zone: str, **features: str) -> Any:
        conn.execute(f"SET TimeZone = '{zone}'")
        return value(conn, "SELECT predict('kinds', to_jsonb(k) || %s) FROM kinds k WHERE id = 7", Jsonb(features))

    new_york = ask("America/New_York", timestamptz="2024-02-01 10:00")
    assert new_york == ask("UTC", timestamptz="2024-02-01 10:00-05") != ask("UTC", timestamptz="2024-02-01 10:00")
    plain = [
        ask(zone, timestamptz="2024-02-01 10:00+00", timestamp="2024-02-01 10:00") for zone in ("UTC", "Asia/Tokyo")
    ]
    assert plain[0] == plain[1]


@pytest.mark.parametrize(
    ("feature", "given", "sqlstate"),
    [("time", "soon", "22007"), ("interval", "x", "22007"), ("float8", "5", "42804"), ("bytea", "\\xz", "22023")],
)
def test_strings_that_are_no_such_value_are_refused(conn: Connection, feature: str, given: str, sqlstate: str) -> None:
    ask = "SELECT predict('kinds', to_jsonb(k) || %s) FROM kinds k WHERE id = 7"
    assert refusal(conn, ask, Jsonb({feature: given}))[0] == sqlstate


def test_null_elements_are_imputed_and_no_zeros(conn: Connection) -> None:
    ask = f"""
        SELECT predict('delay', x), predict('delay', to_jsonb(x))
        FROM (SELECT {FEATURES.removesuffix("recent")} %s::int[] AS recent FROM flights WHERE id = 1) x
    """
    unknown, zero = (conn.execute(ask, (recent,)).fetchone() for recent in ([None, 1, 1], [0, 1, 1]))
    assert unknown is not None and unknown[0] == unknown[1] and zero not in (None, unknown)


# -- refusals --------------------------------------------------------------------------------------------------------


def test_a_missing_feature_is_named_with_a_similar_name(conn: Connection) -> None:
    row = "SELECT predict('numbers', x) FROM (SELECT 1 AS hour, 2 AS distnace, 3 AS wind, true AS weekend) x"
    assert refusal(conn, row) == ("42703", 'feature "distance" is missing', 'Did you mean "distnace"?')
    query = "SELECT 1 AS hour, 2 AS distance, true AS weekend, 5 AS extra"
    sqlstate, message, hint = refusal(conn, "SELECT * FROM predict_rows('numbers', %s)", query)
    assert (sqlstate, message) == ("42703", 'feature "wind" is missing')
    assert "every feature" in hint
    twice = "SELECT 1 AS hour, 2 AS distance, 3 AS wind, 4 AS wind, true AS weekend"
    assert refusal(conn, "SELECT * FROM predict_rows('numbers', %s)", twice)[0] == "42702"


def test_jsonb_needs_a_key_for_every_feature_and_ignores_others(conn: Connection) -> None:
    ask = "SELECT predict('numbers', %s)"
    good = {"hour": 1, "distance": 2, "wind": 3, "weekend": True}
    assert value(conn, ask, Jsonb(good | {"windd": 1})) == value(conn, ask, Jsonb(good))
    wrong = {"windd" if key == "wind" else key: item for key, item in good.items()}
    assert refusal(conn, ask, Jsonb(wrong)) == ("42703", 'feature "wind" is missing', 'Did you mean "windd"?')
    sqlstate, message, hint = refusal(conn, ask, Jsonb({"hour": 1, "distance": 2, "weekend": True}))
    assert (sqlstate, message) == ("42703", 'feature "wind" is missing')
    assert NUMBERS in hint
    assert refusal(conn, ask, Jsonb([1, 2, 3, 4]))[0] == "42804"


def test_an_array_must_have_every_feature_and_nothing_but_numbers(conn: Connection) -> None:
    sqlstate, message, hint = refusal(conn, "SELECT predict('numbers', '{1,2,3}'::float8[])")
    assert (sqlstate, message) == ("2202E", 'model "numbers" has 4 features, but the array has 3 elements')
    assert NUMBERS in hint
    sqlstate, message, _ = refusal(conn, "SELECT predict('gate', '{1,2,3,4,5}'::float8[])")
    assert sqlstate == "42804"
    assert "carrier" in message


@pytest.mark.parametrize(
    ("feature", "expression"),
    [("hour", "'5'::text"), ("hour", "now()"), ("departure", "5"), ("carrier", "'{a}'::text[]"), ("recent", "5")],
)
def test_a_feature_of_another_kind_is_refused(conn: Connection, feature: str, expression: str) -> None:
    columns = [f"{expression} AS {name}" if name == feature else name for name in FEATURES.split(", ")]
    query = f"SELECT {', '.join(columns)} FROM flights LIMIT 1"
    for ask in (f"SELECT predict('delay', x) FROM ({query}) x", f"SELECT * FROM predict_rows('delay', $${query}$$)"):
        sqlstate, message, hint = refusal(conn, ask)
        assert (sqlstate, feature in message, "cast" in hint) == ("42804", True, True)


@pytest.mark.parametrize(
    ("feature", "given"),
    [("hour", "5"), ("departure", 5), ("departure", "soon"), ("recent", ["a"]), ("recent", [{}]), ("carrier", ["UA"])],
)
def test_a_json_value_of_another_kind_is_refused(conn: Connection, feature: str, given: Any) -> None:
    features = dict.fromkeys(FEATURES.split(", ")) | {feature: given}
    sqlstate, _, _ = refusal(conn, "SELECT predict('delay', %s)", Jsonb(features))
    assert sqlstate in {"42804", "22007"}


def test_arrays_of_another_length_are_refused_and_the_session_goes_on(conn: Connection) -> None:
    ask = "SELECT predict('delay', %s)"
    features = dict.fromkeys(FEATURES.split(", "))
    sqlstate, message, hint = refusal(conn, ask, Jsonb(features | {"recent": [1, 2]}))
    assert (sqlstate[:2] if sqlstate else "") in {"22", "38"}
    assert "recent" in message
    assert hint
    assert math.isfinite(value(conn, ask, Jsonb(features | {"recent": [1, 2, 3]})))


def test_models_that_cannot_predict(conn: Connection) -> None:
    numbers = "'{1,2,3,4}'::float8[]"
    sqlstate, message, hint = refusal(conn, f"SELECT predict('number', {numbers})")
    assert (sqlstate, message, hint) == ("42704", 'model "number" does not exist', 'Did you mean "numbers"?')
    sqlstate, _, hint = refusal(conn, f"SELECT predict('untrained', {numbers})")
    assert sqlstate == "55000"
    assert "train_model" in hint
    assert refusal(conn, "SELECT * FROM predict_rows('nothing like it', 'SELECT 1')")[0] == "42704"


def test_the_query_of_predict_rows_is_one_select_that_changes_nothing(conn: Connection) -> None:
    ask = "SELECT * FROM predict_rows('numbers', %s)"
    assert refusal(conn, ask, "DELETE FROM flights")[0] == "42601"
    assert refusal(conn, ask, "SELECT 1; SELECT 2")[0] == "42601"
    assert refusal(conn, ask, "WITH d AS (DELETE FROM flights RETURNING *) SELECT * FROM d")[0] == "25006"
    assert refusal(conn, ask, "SELECT * FROM flights FOR UPDATE")[0] == "25006"
    with pytest.raises(errors.SyntaxError) as caught:
        conn.execute(ask, ("SELECT hour FRM flights",))
    assert caught.value.diag.internal_query == "SELECT hour FRM flights"
    assert caught.value.diag.internal_position == "17"
    conn.execute("CREATE FUNCTION pg_temp.write() RETURNS int LANGUAGE sql AS 'DELETE FROM flights RETURNING 1'")
    writing = "SELECT pg_temp.write() AS hour, 1 AS distance, 2 AS wind, true AS weekend"
    assert refusal(conn, ask, writing)[0] == "25006"
    assert value(conn, "SELECT count(*) FROM flights") == 4000
    conn.execute("CREATE TEMP TABLE proof (x int)")
    conn.execute("INSERT INTO proof VALUES (1)")  # the session itself may still write


# -- predict_rows ----------------------------------------------------------------------------------------------------


def test_many_rows_come_back_in_order(conn: Connection) -> None:
    query = "SELECT f.*, n FROM flights f, generate_series(1, 12) n ORDER BY n, id"
    rows = conn.execute("SELECT row_number, prediction FROM predict_rows('numbers', %s)", (query,)).fetchall()
    assert [row[0] for row in rows] == list(range(1, 48_001))
    assert [row[1] for row in rows[:4000]] == pytest.approx([row[1] for row in rows[44_000:]], rel=1e-5)
    assert len({row[1] for row in rows}) > 1000


def test_no_rows_are_no_rows(conn: Connection) -> None:
    assert conn.execute("SELECT * FROM predict_rows('delay', 'SELECT * FROM flights WHERE false')").fetchall() == []


def test_the_query_may_predict_itself(conn: Connection) -> None:
    query = """
        SELECT predict('numbers', f) AS hour, r.prediction AS distance, 1 AS wind, true AS weekend
        FROM flights f JOIN predict_rows('numbers', 'SELECT * FROM flights ORDER BY id') r ON r.row_number = f.id
    """
    rows = conn.execute("SELECT prediction FROM predict_rows('numbers', %s)", (query,)).fetchall()
    assert len(rows) == 4000


def test_an_error_in_the_query_ends_only_that_call(conn: Connection) -> None:
    query = "SELECT 1 / (20000 - i) AS hour, i AS distance, 1 AS wind, true AS weekend FROM generate_series(1, 30000) i"
    for _ in range(3):
        assert refusal(conn, "SELECT * FROM predict_rows('numbers', %s)", query)[0] == "22012"
    assert math.isfinite(value(conn, "SELECT predict('numbers', f) FROM flights f LIMIT 1"))


def test_predict_rows_sees_the_transaction_and_runs_as_the_caller(conn: Connection, role: str) -> None:
    with conn.transaction(force_rollback=True):
        conn.execute("UPDATE flights SET hour = 0")
        hours = conn.execute("SELECT * FROM predict_rows('numbers', 'SELECT * FROM flights LIMIT 3')").fetchall()
        assert len(hours) == 3
    conn.execute("CREATE TABLE secret AS SELECT * FROM flights LIMIT 1")
    conn.execute("SELECT grant_model('numbers', %s)", (role,))
    conn.execute(f"SET ROLE {role}")
    assert refusal(conn, "SELECT * FROM predict_rows('numbers', 'SELECT * FROM secret')")[0] == "42501"
    conn.execute("RESET ROLE")
    conn.execute("DROP TABLE secret")


def test_sessions_do_not_get_each_others_answers(conn: Connection, server: Any) -> None:
    ask = "SELECT predict('numbers', f) FROM flights f WHERE id BETWEEN %s AND %s ORDER BY id"
    expected = [row[0] for row in conn.execute(ask, (1, 400)).fetchall()]
    assert len(set(expected)) > 300

    def session(number: int) -> list[float]:
        first = 1 + 50 * number
        with server.connect() as own:
            own.execute("SET pg_tensile.predict_timeout = '20 s'")
            rows = [row[0] for _ in range(5) for row in own.execute(ask, (first, first + 49)).fetchall()]
        assert rows[:50] * 5 == rows
        return rows[:50]

    with ThreadPoolExecutor(8) as pool:
        answers = [answer for part in pool.map(session, range(8)) for answer in part]
    assert answers == expected


# -- privileges and versions -----------------------------------------------------------------------------------------


def test_others_need_a_grant(conn: Connection, server: Any, role: str) -> None:
    ask = "SELECT predict('numbers', '{1,2,3,1}'::float8[])"
    with server.connect(user=role) as stranger:
        sqlstate, _, hint = refusal(stranger, ask)
        assert sqlstate == "42501"
        assert "grant_model" in hint
        assert refusal(stranger, "SELECT * FROM predict_rows('numbers', 'SELECT 1')")[0] == "42501"
        assert refusal(stranger, "SELECT predict('numbrs', '{1}'::float8[])")[2] != 'Did you mean "numbers"?'
        conn.execute("SELECT grant_model('numbers', %s, 'train')", (role,))
        assert refusal(stranger, ask)[0] == "42501"
        conn.execute("SELECT grant_model('numbers', %s)", (role,))
        assert math.isfinite(value(stranger, ask))
        conn.execute("SELECT revoke_model('numbers', %s)", (role,))
        assert refusal(stranger, ask)[0] == "42501"
        conn.execute("SELECT grant_model('numbers', 'public')")
        assert math.isfinite(value(stranger, ask))
        conn.execute("SELECT revoke_model('numbers', 'public')")
        conn.execute("SELECT revoke_model('numbers', %s, 'train')", (role,))


def test_a_grant_to_a_group_is_for_its_members(conn: Connection, role: str) -> None:
    conn.execute(f"CREATE ROLE {role}_group")
    conn.execute("SELECT grant_model('numbers', %s)", (f"{role}_group",))
    ask = "SELECT predict('numbers', '{1,2,3,1}'::float8[])"
    conn.execute(f"SET ROLE {role}")
    assert refusal(conn, ask)[0] == "42501"
    conn.execute("RESET ROLE")
    conn.execute(f"GRANT {role}_group TO {role}")
    conn.execute(f"SET ROLE {role}")
    assert math.isfinite(value(conn, ask))
    conn.execute("RESET ROLE")
    conn.execute("SELECT revoke_model('numbers', %s)", (f"{role}_group",))
    conn.execute(f"DROP ROLE {role}_group")


@pytest.mark.long
def test_deploying_is_seen_at_once_by_this_transaction_and_at_commit_by_others(conn: Connection, server: Any) -> None:
    ask = "SELECT predict('versions', '{1,2,3,1}'::float8[])"
    query = f"SELECT {NUMBERS}, delay FROM flights"
    job = submit(conn, "versions", MLP, query=query, target="delay", epochs=1)
    value(conn, "SELECT wait_for_job(%s, '60 s')", job)
    first = value(conn, ask)
    job = submit(conn, "versions", query=query, target="delay", epochs=2, seed=7)
    value(conn, "SELECT wait_for_job(%s, '60 s')", job)
    second = value(conn, ask)
    assert first != second
    with server.connect() as other:
        assert value(other, ask) == second
        with conn.transaction():
            conn.execute("SELECT deploy_model('versions', 1)")
            assert value(conn, ask) == first
            assert value(other, ask) == second
            raise psycopg.Rollback
        assert value(conn, ask) == value(other, ask) == second
        with conn.transaction():
            with conn.transaction(force_rollback=True):  # a savepoint
                conn.execute("SELECT deploy_model('versions', 1)")
                assert value(conn, ask) == first
            assert value(conn, ask) == second
        conn.execute("SELECT deploy_model('versions', 1)")
        assert value(conn, ask) == value(other, ask) == first
        other.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        value(other, "SELECT 1")
        conn.execute("SELECT deploy_model('versions', 2)")
        assert value(other, ask) == first
        other.execute("COMMIT")
        assert value(other, ask) == second
    conn.execute("SELECT drop_model('versions')")
    assert refusal(conn, ask)[0] == "42704"


def test_a_call_notices_that_its_row_type_changed(conn: Connection) -> None:
    conn.execute("CREATE TABLE changing AS SELECT * FROM flights LIMIT 1")
    conn.execute("""
        CREATE FUNCTION pg_temp.ask() RETURNS float8 LANGUAGE plpgsql AS
        $$ DECLARE r changing; BEGIN SELECT * INTO r FROM changing; RETURN predict('numbers', r); END $$
    """)
    before = value(conn, "SELECT pg_temp.ask()")
    conn.execute(
        "ALTER TABLE changing DROP COLUMN id, ALTER COLUMN hour TYPE numeric, ADD COLUMN note text DEFAULT 'x'"
    )
    assert value(conn, "SELECT pg_temp.ask()") == before
    conn.execute("ALTER TABLE changing DROP COLUMN wind")
    assert refusal(conn, "SELECT pg_temp.ask()")[0] == "42703"
    conn.execute("ALTER TABLE changing ADD COLUMN wind text DEFAULT '1'")
    assert refusal(conn, "SELECT pg_temp.ask()")[0] == "42804"
    conn.execute("DROP TABLE changing")


def test_predictions_work_beside_parallel_workers(conn: Connection) -> None:
    conn.execute("SET parallel_setup_cost = 0; SET parallel_tuple_cost = 0; SET min_parallel_table_scan_size = 0")
    conn.execute(
        "SET debug_parallel_query = on" if conn.info.server_version >= 160000 else "SET force_parallel_mode = on"
    )
    query = "SELECT sum(predict('numbers', f)) FROM flights f WHERE hour > 3"
    plan = "\n".join(row[0] for row in conn.execute(f"EXPLAIN {query}").fetchall())
    assert "Gather" in plan
    parallel = value(conn, query)  # the first call in a session: the model is looked up in parallel mode
    conn.execute("RESET ALL")
    assert value(conn, query) == pytest.approx(parallel)
