"""Mistakes that train_model refuses at once, each with an SQLSTATE, a message and a hint.

Nothing is trained here. Mistakes that show when the query runs or PyTorch builds the model: test_training.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from tests.server.refusals import refused
from tests.server.support import SMALL_MLP, Connection, train_late

pytestmark = pytest.mark.usefixtures("nothing_left")


# -- the query --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "sqlstate", "message", "hint"),
    [
        ("", "42601", "empty", "SELECT"),
        ("-- nothing", "42601", "empty", "SELECT"),
        ("SELECT distance, late FROM flights; SELECT 1", "42601", "more than one statement", "SELECT"),
        ("DELETE FROM flights RETURNING distance, late", "42601", "not a SELECT", "SELECT"),
        ("INSERT INTO flights (distance) VALUES (1) RETURNING distance, late", "42601", "not a SELECT", "SELECT"),
        ("CREATE TABLE x AS SELECT distance, late FROM flights", "42601", "not a SELECT", "SELECT"),
        ("EXPLAIN SELECT distance, late FROM flights", "42601", "not a SELECT", "SELECT"),
        ("COPY flights TO STDOUT", "42601", "not a SELECT", "SELECT"),
        ("SELECT distance, late INTO x FROM flights", "25006", "SELECT INTO", "plain SELECT"),
        (
            "WITH gone AS (DELETE FROM flights RETURNING *) SELECT distance, late FROM gone",
            "25006",
            "WITH",
            "plain SELECT",
        ),
        ("SELECT distance, late FROM flights FOR UPDATE", "25006", "FOR UPDATE", "plain SELECT"),
        ("SELECT * FROM (SELECT distance, late FROM flights FOR SHARE) f", "25006", "FOR SHARE", "plain SELECT"),
        ("SELECT distance, late, distance FROM flights", "42701", '"distance"', "AS"),
        ("SELECT distance FROM flights", "42703", 'target "late"', ""),
        ("SELECT distance, late AS lat FROM flights", "42703", 'target "late"', '"lat"'),
        ("SELECT late FROM flights", "22023", "no column besides the target", "feature"),
        ("SELECT notes, late FROM flights", "0A000", 'column "notes" has type jsonb', "cast"),
        ("SELECT distance, legs AS late FROM flights", "0A000", 'target "late" has type integer[]', "number"),
        ("SELECT distance, at AS late FROM flights", "0A000", 'target "late" has type timestamp', "epoch"),
        ("SELECT distance, late FROM scratch", "0A000", 'temporary table "scratch"', "another session"),
    ],
)
def test_query_that_is_not_one_select_to_train_on(
    flights: Connection, query: str, sqlstate: str, message: str, hint: str
) -> None:
    flights.execute("CREATE TEMP TABLE scratch (distance float8, late bool)")
    refused(sqlstate, message, hint, lambda: train_late(flights, query=query))


@pytest.mark.parametrize(
    ("query", "sqlstate", "word"),
    [
        ("SELECT distance, late FRM flights WHERE", "42601", "flights"),
        ("SELECT distance,\n late FROM flights WHERE dist > 3", "42703", "dist > 3"),
        ("SELECT distance, late FROM flihgts", "42P01", "flihgts"),
        ("SELECT sine(distance), late FROM flights", "42883", "sine"),
        ("SELECT distance, late FROM flights WHERE distance = $1", "42P02", "$1"),
    ],
)
def test_errors_in_the_query_show_their_position_in_it(
    flights: Connection, query: str, sqlstate: str, word: str
) -> None:
    with pytest.raises(psycopg.Error) as caught:
        train_late(flights, query=query)
    diag = caught.value.diag
    assert diag.sqlstate == sqlstate
    assert diag.internal_query == query
    assert diag.internal_position is not None
    assert query[int(diag.internal_position) - 1 :].startswith(word)
    assert diag.statement_position is None
    assert "training query" in (diag.context or "")


def test_constant_errors_are_found_without_a_row(flights: Connection) -> None:
    with pytest.raises(psycopg.errors.DivisionByZero, match="division by zero") as caught:
        train_late(flights, query="SELECT 1 / 0 AS x, late FROM flights")
    assert "training query" in (caught.value.diag.context or "")


@pytest.mark.parametrize(
    "query",
    [
        "VALUES (1.0, true), (2.0, false)",
        "WITH f AS (SELECT * FROM flights) SELECT distance AS column1, late AS column2 FROM f",
        "SELECT f.distance AS column1, g.late AS column2 FROM flights f JOIN flights g USING (carrier);",
        "(SELECT 1 AS column1, true AS column2) UNION ALL (SELECT 2, false) ORDER BY 1 LIMIT 5",
        "SELECT legs AS column1, carrier AS column2, at, late::int, '\\x00'::bytea AS b FROM flights",
    ],
)
def test_every_kind_of_select_is_accepted(flights: Connection, query: str) -> None:
    with flights.transaction(force_rollback=True):
        job = train_late(flights, query=query, target="column2")
        assert flights.execute("SELECT query FROM tensile.jobs WHERE job = %s", (job,)).fetchone() == (query,)


def test_a_volatile_function_is_not_called_by_submitting(flights: Connection) -> None:
    flights.execute("CREATE SEQUENCE counter")
    with flights.transaction(force_rollback=True):
        train_late(flights, query="SELECT nextval('counter') AS n, late FROM flights")
    assert flights.execute("SELECT is_called FROM counter").fetchone() == (False,)


# -- the other arguments ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "sqlstate", "message", "hint"),
    [
        ({"model": ""}, "22023", "invalid model name", "1 to 200"),
        ({"model": "la\nte"}, "22023", "invalid model name", "control characters"),
        ({"model": None}, "22004", '"model"', ""),
        ({"query": None}, "22004", '"query"', ""),
        ({"target": None}, "22004", '"target"', ""),
        ({"epochs": None}, "22004", '"epochs"', "default"),
        ({"options": None}, "22004", '"options"', "default"),
        ({"target": "lates"}, "42703", 'target "lates"', '"late"'),
        ({"epochs": 0}, "22023", "epochs is out of range: 0", "1000000"),
        ({"epochs": 1000001}, "22023", "epochs", "1000000"),
        ({"batch_size": -1}, "22023", "batch_size is out of range: -1", "or 0 to have it chosen"),
        ({"batch_size": 10000001}, "22023", "batch_size is out of range: 10000001", "10000000"),
        ({"batch_size": 0, "policy": "none"}, "22023", 'with policy "none"', "policy => 'joint'"),
        (
            {"options": Jsonb({"batch_size_range": [1, 2]})},
            "22023",
            'option "batch_size_range" requires a batch size chosen by plans, but batch_size is null',
            "batch_size => 0",
        ),
        (
            {"options": Jsonb({"learning_rate_scaling": "none"})},
            "22023",
            'option "learning_rate_scaling" requires a batch size chosen by plans',
            "leave the option out",
        ),
        (
            {"batch_size": 0, "options": Jsonb({"learning_rate_scaling": "square"})},
            "22023",
            'key "learning_rate_scaling" in the options: "square"',
            '"accudnn", "linear", "none"',
        ),
        (
            {"batch_size": 0, "options": Jsonb({"batch_size_range": [8]})},
            "22023",
            '"batch_size_range"',
            "an array of 2 values, each an integer from 1 to 10000000",
        ),
        ({"batch_size": 0, "options": Jsonb({"batch_size_range": [0, 8]})}, "22023", '"batch_size_range[0]"', "from 1"),
        ({"batch_size": 0, "options": Jsonb({"batch_size_range": [9, 8]})}, "22023", "empty: from 9 to 8", "[8, 9]"),
        ({"optimizer": "adm"}, "22023", 'unknown optimizer "adm"', "adamw"),
        ({"learning_rate": 0.0}, "22023", "learning_rate is out of range: 0", "0.001"),
        ({"learning_rate": float("nan")}, "22023", "learning_rate is out of range: NaN", "finite"),
        ({"learning_rate": float("inf")}, "22023", "learning_rate is out of range: Infinity", "finite"),
        ({"max_time": "0 s"}, "22023", "max_time is out of range: 00:00:00", "10 minutes"),
        ({"max_time": "-1 min"}, "22023", "max_time is out of range: -00:01:00", "10 minutes"),
        ({"split_by": "lates"}, "42703", 'split_by "lates" is not a column', '"late"'),
        ({"split_by": "zzzzzz"}, "42703", 'split_by "zzzzzz" is not a column', "must return the column"),
        ({"split_by": "late"}, "22023", 'split_by "late" is the target', "another column"),
        ({"validation": 1.0}, "22023", "validation is out of range: 1", "less than 1"),
        ({"validation": -0.1}, "22023", "validation is out of range: -0.1", "less than 1"),
        ({"validation": float("nan")}, "22023", "validation is out of range: NaN", "less than 1"),
        ({"policy": "tensil"}, "22023", 'unknown policy "tensil"', "one of 'none', 'tensile', 'joint', 'swapadvisor'"),
        ({"priority": 1001}, "22023", "priority is out of range: 1001", "1000"),
        ({"memory_budget": "8 gigs"}, "22023", 'invalid memory_budget "8 gigs"', "8GB"),
        ({"memory_budget": ""}, "22023", 'invalid memory_budget ""', "8GB"),
        ({"memory_budget": "-1GB"}, "22023", 'invalid memory_budget "-1GB"', "8GB"),
        ({"memory_budget": "0"}, "22023", 'invalid memory_budget "0"', "8GB"),
        ({"memory_budget": "60%"}, "22023", 'invalid memory_budget "60%"', "8GB"),
        ({"memory_budget": "99999999999TB"}, "22023", "invalid memory_budget", "8GB"),
        ({"options": Jsonb([])}, "22023", "options must be a JSON object", "patience"),
        ({"options": Jsonb({"tsk": "regression"})}, "22023", 'unknown key "tsk" in the options', '"task"'),
        ({"options": Jsonb({"zzzzzzzzz": 1})}, "22023", 'unknown key "zzzzzzzzz" in the options', '"weight_decay"'),
        ({"options": Jsonb({"task": "clustering"})}, "22023", 'key "task"', '"classification"'),
        ({"options": Jsonb({"early_stopping": 3})}, "22023", 'key "early_stopping"', "object"),
        ({"options": Jsonb({"early_stopping": {"patience": -1}})}, "22023", 'key "early_stopping.patience"', "from 0"),
        ({"options": Jsonb({"keep": "first"})}, "22023", 'key "keep" in the options: "first"', '"best", "last"'),
        ({"options": Jsonb({"early_stopping": {"patient": 1}})}, "22023", '"early_stopping.patient"', '"patience"'),
        ({"options": Jsonb({"momentum": 1})}, "22023", 'key "momentum"', "less than 1"),
        ({"options": Jsonb({"clip": 0})}, "22023", 'key "clip"', "greater than 0"),
        ({"options": Jsonb({"threads": 1.5})}, "22023", 'key "threads"', "integer"),
        (
            {"options": Jsonb({"compression": "zip"})},
            "22023",
            'key "compression" in the options: "zip"',
            '"auto", "zvc"',
        ),
        ({"policy": "none", "options": Jsonb({"compression": "auto"})}, "22023", 'compression "auto"', "'joint'"),
        ({"policy": "tensile", "options": Jsonb({"swap_share": 1.5})}, "22023", 'key "swap_share"', "at most 1"),
        ({"policy": "tensile", "options": Jsonb({"swap_share": "all"})}, "22023", 'key "swap_share"', "number"),
        ({"options": Jsonb({"swap_share": 0.5})}, "22023", 'requires the policy "tensile"', "'tensile'"),
        ({"options": Jsonb({"deploy": "yes"})}, "22023", 'key "deploy" in the options: "yes"', "true or false"),
    ],
)
def test_arguments_out_of_range(
    flights: Connection, arguments: dict[str, object], sqlstate: str, message: str, hint: str
) -> None:
    refused(sqlstate, message, hint, lambda: train_late(flights, **arguments))


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GB", 8 << 30),
        ("512 MB", 512 << 20),
        ("1.5kb", 1536),
        ("100", 100),
        (" 2 TB ", 2 << 40),
        ("7 bytes", 7),
        (None, None),
    ],
)
def test_budgets_are_stored_in_bytes(flights: Connection, text: str | None, size: int | None) -> None:
    with flights.transaction(force_rollback=True):
        job = train_late(flights, memory_budget=text)
        assert flights.execute("SELECT memory_budget FROM tensile.jobs WHERE job = %s", (job,)).fetchone() == (size,)


def test_a_job_stores_its_arguments_and_settings(flights: Connection) -> None:
    flights.execute("SET TimeZone = 'Europe/Paris'; SET DateStyle = 'German'; SET IntervalStyle = 'iso_8601'")
    with flights.transaction(force_rollback=True):
        job = train_late(flights, epochs=3, priority=-7, options=Jsonb({"clip": 1}))
        row = flights.execute(
            "SELECT state, model, owner, owner_id = 'postgres'::regrole, epochs, batch_size, optimizer,"
            " learning_rate, validation, seed, policy, priority, options, attempts, settings"
            " FROM tensile.jobs WHERE job = %s",
            (job,),
        ).fetchone()
        path = flights.execute("SHOW search_path").fetchone()
    assert row is not None and path is not None
    assert row[:-1] == ("queued", "late", "postgres", True, 3, None, "adamw", None, 0.2, 0, "joint", -7, {"clip": 1}, 0)
    assert row[-1] == {
        "search_path": path[0],
        "TimeZone": "Europe/Paris",
        "DateStyle": "German, DMY",
        "IntervalStyle": "iso_8601",
    }


@pytest.mark.parametrize("policy", ["none", "tensile", "joint"])
def test_the_policy_is_the_jobs_or_that_of_the_session(flights: Connection, policy: str) -> None:
    stored = "SELECT policy FROM tensile.jobs WHERE job = %s"
    with flights.transaction(force_rollback=True):
        assert flights.execute(stored, (train_late(flights, policy=policy),)).fetchone() == (policy,)
    with flights.transaction(force_rollback=True):
        flights.execute(f"SET LOCAL pg_tensile.policy = '{policy}'")
        assert flights.execute(stored, (train_late(flights),)).fetchone() == (policy,)


def test_two_jobs_for_one_model_at_once(flights: Connection) -> None:
    with flights.transaction(force_rollback=True):
        job = train_late(flights)
        with flights.transaction(force_rollback=True):
            refused(
                "55006",
                f'model "late" is being trained by job {job}',
                f"cancel_job({job})",
                lambda: train_late(flights),
            )
        flights.execute("SELECT register_model('other', %s)", (SMALL_MLP,))
        train_late(flights, model="other")


def test_the_second_of_two_concurrent_submissions_waits_and_is_refused(
    flights: Connection, connect: Callable[..., Connection]
) -> None:
    schema = flights.execute("SELECT current_schema").fetchone()
    assert schema is not None
    second_session = connect(options=f"-c search_path={schema[0]},public -c lock_timeout=300ms")
    with flights.transaction(force_rollback=True):
        train_late(flights)
        with pytest.raises(psycopg.errors.LockNotAvailable):
            train_late(second_session)


def test_nologin_role(flights: Connection, roles: Callable[..., str]) -> None:
    service = roles("service", "NOLOGIN")
    flights.execute(f"GRANT ALL ON flights TO {service}")
    flights.execute("SELECT grant_model('late', %s, 'train')", (service,))
    flights.execute(f"SET ROLE {service}")
    refused("42501", f'role "{service}" is not permitted to log in', "LOGIN", lambda: train_late(flights))
    flights.execute("RESET ROLE")


def test_role_without_connect(flights: Connection, roles: Callable[..., str]) -> None:
    guest = roles("guest")
    flights.execute(f"GRANT ALL ON flights TO {guest}")
    flights.execute("SELECT grant_model('late', %s, 'train')", (guest,))
    with flights.transaction(force_rollback=True):
        flights.execute("REVOKE CONNECT ON DATABASE postgres FROM PUBLIC")
        flights.execute(f"SET LOCAL ROLE {guest}")
        refused("42501", "CONNECT", "CONNECT", lambda: train_late(flights))


def test_another_database(cluster: Any, db: Connection) -> None:
    db.execute("DROP DATABASE IF EXISTS elsewhere")
    db.execute("CREATE DATABASE elsewhere")
    try:
        with cluster.connect("elsewhere") as conn:
            conn.execute("CREATE EXTENSION pg_tensile CASCADE")
            conn.execute("SELECT register_model('late', %s)", (SMALL_MLP,))
            error = refused(
                *("55000", "elsewhere", "pg_tensile.database"),
                lambda: train_late(conn, query="VALUES (1, 2)", target="column2"),
            )
            assert '"postgres"' in (error.diag.message_hint or "")
    finally:
        db.execute("DROP DATABASE elsewhere WITH (FORCE)")


def test_without_preloading(fresh_cluster: Callable[..., Any]) -> None:
    cluster = fresh_cluster()
    with cluster.connect() as conn:
        conn.execute("SELECT register_model('late', %s)", (SMALL_MLP,))
    cluster.configure({"shared_preload_libraries": ""})
    cluster.restart()
    wants = ("55000", "shared_preload_libraries", "shared_preload_libraries")
    with cluster.connect() as conn:
        refused(*wants, lambda: train_late(conn, query="VALUES (1, 2)", target="column2"))
        conn.execute("DROP EXTENSION pg_tensile")
        refused(*wants, lambda: conn.execute("CREATE EXTENSION pg_tensile"))
