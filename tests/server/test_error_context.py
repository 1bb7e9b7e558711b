"""Errors as psql shows them: without lines about functions of pg_tensile, with those of the user's own functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import psycopg
import pytest

from tests.server.refusals import refused
from tests.server.support import Connection, Wait, finish, register, submit, value

# A refused call of each public function; {} is an argument that depends on the overload.
CALLS = {
    "cancel_job": "SELECT cancel_job(-1)",
    "cancel_tuning": "SELECT cancel_tuning(-1)",
    "deploy_model": "SELECT deploy_model('absent', 1)",
    "drop_model": "SELECT drop_model('absent')",
    "drop_model_version": "SELECT drop_model_version('absent', 1)",
    "embed": "SELECT embed('absent', 'text')",
    "embed_rows": "SELECT embed_rows('absent', 'SELECT ''text''')",
    "evaluate_model": "SELECT evaluate_model('absent', 'SELECT 1')",
    "explain_prediction": "SELECT explain_prediction('absent', {})",
    "explain_training": "SELECT explain_training('m', 'SELECT 1 AS x, 2 AS y', 'y', epochs => 0)",
    "export_model": "SELECT export_model('absent')",
    "feature_importance": "SELECT feature_importance('absent', 'SELECT 1')",
    "grant_model": "SELECT grant_model('absent', 'public')",
    "import_model": "SELECT import_model('\\x00', 'm')",
    "materialize_predictions": "SELECT materialize_predictions('absent', 'SELECT 1', 't')",
    "predict": "SELECT predict('absent', {})",
    "predict_all": "SELECT predict_all('absent', {})",
    "predict_class": "SELECT predict_class('absent', {})",
    "predict_interval": "SELECT predict_interval('absent', {})",
    "predict_probabilities": "SELECT predict_probabilities('absent', {})",
    "predict_rows": "SELECT predict_rows('absent', 'SELECT 1')",
    "predict_table": "SELECT predict_table('absent')",
    "register_model": "SELECT register_model('')",
    "revoke_model": "SELECT revoke_model('absent', 'public')",
    "rollback_model": "SELECT rollback_model('absent')",
    "schedule_evaluation": "SELECT schedule_evaluation('absent', 'SELECT 1', '1 day')",
    "schedule_training": "SELECT schedule_training('m', 'SELECT 1 AS x, 2 AS y', 'y')",
    "set_job_priority": "SELECT set_job_priority(-1, 0)",
    "set_model_memory_budget": "SELECT set_model_memory_budget('absent', '1 pound')",
    "set_model_owner": "SELECT set_model_owner('absent', 'postgres')",
    "set_model_retention": "SELECT set_model_retention('absent', 0)",
    "train_model": "SELECT train_model('m', 'SELECT 1 AS x, 2 AS y', 'y', epochs => 0)",
    "tune_model": "SELECT tune_model('m', 'SELECT 1 AS x, 2 AS y', 'y', trials => 0)",
    "unschedule_evaluation": "SELECT unschedule_evaluation('m')",
    "unschedule_training": "SELECT unschedule_training('m')",
    "wait_for_first_version": "SELECT wait_for_first_version(-1)",
    "wait_for_job": "SELECT wait_for_job(-1)",
    "await_job": "CALL await_job(-1)",
    "wait_for_job_procedure": "CALL wait_for_job_procedure(-1)",
    "wait_for_tuning": "SELECT wait_for_tuning(-1)",
    "calibrate_device": "SELECT calibrate_device(-1)",
}
NEVER_REFUSES = {"models_of_table"}
TELL_BY_FALSE = {"unschedule_evaluation", "unschedule_training"}  # that there is nothing to do
WRAPPERS = {"wait_for_job_procedure"}  # names of 0.1.0, in PL/pgSQL, which adds a context
OF_SUPERUSERS = {"calibrate_device"}
OF_DATABASES = {"release_database", "resume_database"}  # refused by PostgreSQL itself
CHANGES_NOTHING = {
    *("embed", "embed_rows", "evaluate_model", "explain_prediction", "explain_training", "export_model"),
    *("feature_importance", "predict", "predict_all", "predict_class", "predict_interval", "predict_probabilities"),
    *("predict_rows", "predict_table"),
    *("wait_for_first_version", "wait_for_job", "await_job", "wait_for_job_procedure", "wait_for_tuning"),
}
ROUTINES = """
    SELECT {} FROM pg_proc p JOIN pg_depend d ON d.objid = p.oid AND d.classid = 'pg_proc'::regclass AND d.deptype = 'e'
        JOIN pg_extension e ON e.oid = d.refobjid AND e.extname = 'pg_tensile'
    WHERE p.pronamespace = 'public'::regnamespace
"""
USER_FUNCTION = "PL/pgSQL function {}fail(double precision) line 1 at RAISE"


def overloads(db: Connection, name: str) -> list[str]:
    """Return the call of the function, for each of its overloads."""
    if "{}" not in CALLS[name]:
        return [CALLS[name]]
    types = db.execute(ROUTINES.format("format_type(p.proargtypes[1], NULL)") + " AND proname = %s", (name,)).fetchall()
    samples = {
        "record": "ROW(1)",
        "double precision[]": "'{1}'::float8[]",
        "jsonb": "'{}'::jsonb",
        "json": "'{}'::json",
        "text": "'{}'",
    }
    assert len(types) > 1
    return [CALLS[name].replace("{}", samples[type]) for (type,) in types]


def error_of(conn: Connection, statement: str) -> psycopg.Error:
    with pytest.raises(psycopg.Error) as caught:
        conn.execute(statement.encode())
    return caught.value


def test_every_public_function_is_here(db: Connection) -> None:
    names = {name for (name,) in db.execute(ROUTINES.format("DISTINCT p.proname")).fetchall()}
    assert names == CALLS.keys() | NEVER_REFUSES | OF_DATABASES


@pytest.mark.parametrize("name", sorted(CALLS.keys() - TELL_BY_FALSE - WRAPPERS))
def test_a_refusal_has_no_context(db: Connection, name: str) -> None:
    register(db, "m")
    for call in overloads(db, name):
        error = error_of(db, call)
        assert error.sqlstate not in ("XX000", "42883"), f"{call}: {error}"
        assert error.diag.context is None, f"{call}: {error}\n{error.diag.context}"


@pytest.mark.parametrize("name", CALLS)
def test_functions_that_change_tables_say_so_in_a_read_only_transaction(db: Connection, name: str) -> None:
    for call in overloads(db, name):
        error = error_of(db, f"SET TRANSACTION READ ONLY; {call}")
        refusal = f"{name} cannot be called in a read-only transaction"
        assert (error.diag.message_primary == refusal) == (name not in CHANGES_NOTHING), f"{call}: {error}"
        if name not in CHANGES_NOTHING:
            assert error.sqlstate == "25006" and "READ WRITE" in (error.diag.message_hint or "")
            assert error.diag.context is None


def test_the_context_of_the_caller_stays(db: Connection) -> None:
    """Only lines of pg_tensile are left out, not those of a function that calls it."""
    db.execute(
        "CREATE FUNCTION submit() RETURNS void LANGUAGE plpgsql AS"
        " $$ BEGIN PERFORM train_model('m', 'SELECT 1 AS x, 2 AS y', 'y', epochs => 0); END $$"
    )
    register(db, "m")
    lines = (error_of(db, "SELECT submit()").diag.context or "").splitlines()
    assert lines[0].startswith("SQL statement") and lines[1].endswith("line 1 at PERFORM") and len(lines) == 2, lines


def test_an_error_can_be_caught(db: Connection) -> None:
    """The next error has no context either, whatever the block has left."""
    for _ in range(3):
        db.execute("DO $$ BEGIN PERFORM drop_model('absent'); EXCEPTION WHEN undefined_object THEN NULL; END $$")
        assert error_of(db, "SELECT drop_model('absent')").diag.context is None


def test_an_internal_error_keeps_its_context(db: Connection) -> None:
    """A report of it needs all lines; what is wrong here is a table that is not as it should be."""
    with db.transaction(force_rollback=True):
        db.execute(
            "CREATE OR REPLACE FUNCTION tensile_internal._check_model_name(name text) RETURNS void LANGUAGE plpgsql"
            " SET search_path = pg_catalog, pg_temp AS $$ BEGIN RAISE EXCEPTION USING ERRCODE = 'XX000'; END $$"
        )
        error = error_of(db, "SELECT register_model('m')")
    assert "tensile_internal._register_model" in (error.diag.context or "")


# -- code of the user -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(cluster: Any) -> Iterator[Connection]:
    """A connection with the model `line` of the table `points`, and the function `fail` of the user."""
    with cluster.connect() as conn:
        conn.execute("CREATE SCHEMA context; SET search_path = context, public")
        conn.execute(
            "CREATE TABLE points AS SELECT i AS id, i::float8 AS x, 2.0 * i AS y FROM generate_series(1, 50) i"
        )
        conn.execute(
            "CREATE FUNCTION fail(x float8) RETURNS float8 LANGUAGE plpgsql STABLE AS"
            " $$ BEGIN RAISE EXCEPTION 'my own error'; END $$"
        )
        yield conn
        conn.execute("DROP SCHEMA context CASCADE")


QUERY = "SELECT id, fail(x) AS x, y FROM points"
CALLS_WITH_A_QUERY = [
    "predict_rows('line', %(query)s)",
    "evaluate_model('line', %(query)s)",
    "feature_importance('line', %(query)s)",
    "explain_training('line', %(query)s, 'y')",
    "materialize_predictions('line', %(query)s, 'kept', '{id}')",
]


@pytest.fixture
def line(trained: Connection, db: Connection, wait_until: Wait) -> Connection:
    """The same with a version; `db` deletes models after each test."""
    arguments = {"query": "SELECT x, y FROM points", "target": "y", "epochs": 1, "batch_size": 10}
    job = submit(trained, "line", {"type": "mlp", "hidden": [4]}, **arguments)
    finish(trained, job)
    return trained


def test_a_users_function_keeps_its_context(line: Connection) -> None:
    for call in CALLS_WITH_A_QUERY:
        error = error_of_query(line, call, QUERY)
        lines = (error.diag.context or "").splitlines()
        assert error.diag.message_primary == "my own error", f"{call}: {error}"
        assert lines == ["PL/pgSQL function fail(double precision) line 1 at RAISE"], f"{call}: {lines}"


def test_an_error_of_the_query_itself_has_the_query_only(line: Connection) -> None:
    for call in CALLS_WITH_A_QUERY:
        error = error_of_query(line, call, "SELECT id, x / 0 AS x, y FROM points")
        assert error.sqlstate == "22012", f"{call}: {error}"
        assert error.diag.context in (None, "training query"), f"{call}: {error.diag.context}"
        error = error_of_query(line, call, "SELECT id, z AS x, y FROM points")
        assert error.sqlstate == "42703", f"{call}: {error}"
        assert "\n" not in (error.diag.context or ""), f"{call}: {error.diag.context}"


def test_a_time_out_has_no_context(line: Connection) -> None:
    """It may come while the trainer starts, or in the query."""
    slow = "SELECT id, x, y FROM points WHERE pg_sleep(60) IS NOT NULL"
    line.execute("SET statement_timeout = '500 ms'")
    try:
        for call in CALLS_WITH_A_QUERY:
            error = error_of_query(line, call, slow)
            assert error.sqlstate == "57014" and error.diag.context is None, f"{call}: {error.diag.context}"
    finally:
        line.execute("RESET statement_timeout")


def test_a_function_that_is_called_where_the_query_is_planned(line: Connection) -> None:
    """An immutable function of constants is evaluated when train_model checks the query."""
    line.execute("ALTER FUNCTION fail IMMUTABLE")
    try:
        error = error_of_query(line, "train_model('line', %(query)s, 'y')", "SELECT fail(1) AS x, y FROM points")
    finally:
        line.execute("ALTER FUNCTION fail STABLE")
    assert (error.diag.context or "").splitlines() == [
        "PL/pgSQL function fail(double precision) line 1 at RAISE",
        "training query",
    ]


def test_a_call_in_a_query_of_another_call(line: Connection) -> None:
    """The error of the inner one has no context of its own, and the outer one adds none."""
    error = error_of_query(line, "predict_rows('line', %(query)s)", "SELECT predict('absent', ROW(x)) AS x FROM points")
    assert error.sqlstate == "42704" and error.diag.context is None, error.diag.context


def test_a_trigger_on_the_table_of_predictions_keeps_its_context(line: Connection) -> None:
    line.execute("DROP TABLE IF EXISTS kept")
    line.execute("SELECT materialize_predictions('line', 'SELECT id, x FROM points', 'kept', '{id}')")
    line.execute("""
        CREATE OR REPLACE FUNCTION stop() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'no changes'; END $$;
        CREATE TRIGGER stop BEFORE UPDATE ON kept FOR EACH ROW EXECUTE FUNCTION stop();
        UPDATE points SET x = x + 1""")
    error = error_of(line, "SELECT materialize_predictions('line', 'SELECT id, x FROM points', 'kept')")
    assert (error.diag.context or "").splitlines() == ["PL/pgSQL function stop() line 1 at RAISE"]


def error_of_query(conn: Connection, call: str, query: str) -> psycopg.Error:
    with pytest.raises(psycopg.Error) as caught:
        conn.execute(f"SELECT * FROM {call}", {"query": query})
    return caught.value


# -- hints for errors of PostgreSQL -----------------------------------------------------------------------------------


def test_a_role_without_privileges_is_told_which_it_needs(
    db: Connection, roles: Callable[..., str], connect: Callable[..., Connection]
) -> None:
    outsider = connect(roles("outsider", member_of=()))
    for name in CALLS.keys() - OF_SUPERUSERS:
        for call in overloads(db, name):
            attempt = partial(outsider.execute, call.encode())
            error = refused("42501", "permission denied for", "GRANT tensile_user", attempt)
            assert "grant_model" in (error.diag.message_hint or "")
    for use in ("TABLE tensile.jobs", "SELECT tensile_worker._version()"):
        refused("42501", "permission denied for schema", "tensile_user", partial(outsider.execute, use.encode()))


@pytest.mark.parametrize("name", OF_SUPERUSERS)
def test_a_function_for_superusers_says_so(
    db: Connection, roles: Callable[..., str], connect: Callable[..., Connection], name: str
) -> None:
    member = connect(roles("member"))
    refused("42501", "permission denied for function", "superusers", partial(member.execute, CALLS[name].encode()))


def test_a_role_that_names_a_table_is_told_of_the_views(
    db: Connection, roles: Callable[..., str], connect: Callable[..., Connection]
) -> None:
    member = connect(roles("member"))
    for use in ("TABLE tensile_internal.jobs", "SELECT tensile_internal._grants()"):
        attempt = partial(member.execute, use.encode())
        error = refused("42501", "permission denied for schema tensile_internal", "views of schema tensile", attempt)
        assert "tensile_user" not in (error.diag.message_hint or "")


def test_other_privileges_have_no_such_hint(
    db: Connection, roles: Callable[..., str], connect: Callable[..., Connection]
) -> None:
    outsider = connect(roles("outsider", member_of=()))
    schema = value(db, "SELECT current_schema()")
    db.execute("CREATE FUNCTION predict_rain() RETURNS int LANGUAGE sql AS 'SELECT 1'; CREATE TABLE predict ()")
    db.execute("REVOKE ALL ON FUNCTION predict_rain FROM PUBLIC")
    for statement in (f"SELECT {schema}.predict_rain()", f"TABLE {schema}.predict"):
        error = error_of(outsider, statement)
        assert error.sqlstate == "42501" and error.diag.message_hint is None, error


# -- the server's log -------------------------------------------------------------------------------------------------


def test_lines_of_supervisors_have_neither_context_nor_statement(
    cluster: Any, db: Connection, wait_until: Wait
) -> None:
    db.execute(
        "CREATE FUNCTION warn(x float8) RETURNS float8 LANGUAGE plpgsql AS"
        " $$ BEGIN RAISE WARNING 'of the user'; RETURN x; END $$"
    )
    before = len(cluster.log())
    job = submit(db, "m", {"type": "mlp", "hidden": [4]}, query="SELECT warn(1) AS x, 2 AS y", target="y")
    wait_until(lambda: value(db, "SELECT ended_at IS NOT NULL FROM tensile.jobs WHERE job = %s", job))
    wait_until(lambda: f"job {job} f" in cluster.log()[before:])
    log = cluster.log()[before:]
    assert "STATEMENT" not in log and "_step" not in log, log
    assert "of the user" in log and "PL/pgSQL function" in log, log
