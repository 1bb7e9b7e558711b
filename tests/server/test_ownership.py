"""Models, jobs and data of other roles: access needs a grant, at submission and in the worker."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import psycopg
import pytest
from psycopg.types.json import Jsonb

from tests.server.cast import Cast, current_user, denied, insert_job, visible
from tests.server.refusals import refused
from tests.server.support import SMALL_MLP, Connection, value

# -- models of other roles --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        "SELECT register_model('late', '{\"type\": \"mlp\"}', replace => true)",
        "SELECT drop_model('late')",
        "SELECT deploy_model('late', 1)",
        "SELECT rollback_model('late')",
        "SELECT grant_model('late', 'public')",
        "SELECT grant_model('late', current_user, 'train')",
        "SELECT revoke_model('late', 'public')",
        "SELECT set_model_owner('late', current_user)",
        "SELECT set_model_memory_budget('late', '1MB')",
        "SELECT drop_model_version('late', 1)",
        "SELECT set_model_retention('late', 1)",
    ],
)
def test_models_of_others(play: Cast, call: str) -> None:
    for conn in (play.mallory, play.bob):
        refused("42501", 'must be owner of model "late"', current_user(play.alice), partial(conn.execute, call))


def test_training_and_predicting_need_a_grant(db: Connection, play: Cast) -> None:
    mallory = current_user(play.mallory)
    train = partial(value, play.mallory, "SELECT train_model('late', 'VALUES (1, 2)', 'column2')")
    predict = partial(value, play.mallory, "SELECT predict('late', ARRAY[1.0])")
    refused("42501", 'permission denied for model "late"', "grant_model", train)
    refused("42501", "permission denied", "grant_model", predict)
    assert value(play.mallory, "SELECT count(*) FROM tensile.models") == 0

    play.alice.execute("SELECT grant_model('late', %s)", (mallory,))
    assert value(play.mallory, "SELECT count(*) FROM tensile.model_versions") == 1
    assert visible(db, mallory, "model_weights") == 0
    refused("42501", 'permission denied for model "late"', "train", train)
    play.alice.execute("SELECT grant_model('late', 'public', 'train')")
    refused("55006", "is being trained", "cancel_job", train)  # alice's job runs, so the grant is valid

    play.alice.execute("SELECT revoke_model('late', 'public', 'train'), revoke_model('late', %s)", (mallory,))
    refused("42501", 'permission denied for model "late"', "grant_model", train)
    assert value(db, "SELECT count(*) FROM tensile.model_grants") == 0


def test_mistakes_in_grants(play: Cast) -> None:
    grant = "SELECT grant_model('late', %s, %s)"
    refused("42704", 'role "nobody" does not exist', "case", partial(play.alice.execute, grant, ("nobody", "predict")))
    refused("22023", 'unknown privilege "select"', "predict", partial(play.alice.execute, grant, ("public", "select")))
    give = "SELECT set_model_owner('late', %s)"
    refused(
        "42501", "must be member of role", "superuser", partial(play.alice.execute, give, (current_user(play.bob),))
    )
    refused("22023", "public cannot own a model", "role", partial(play.alice.execute, give, ("public",)))


def test_a_group_owns_through_its_members(db: Connection, play: Cast, roles: Callable[..., str]) -> None:
    group = roles("group", "NOLOGIN")
    db.execute(f"GRANT {group} TO {current_user(play.alice)}, {current_user(play.mallory)}")
    play.alice.execute("SELECT set_model_owner('late', %s)", (group,))
    play.mallory.execute("SELECT deploy_model('late', 1)")
    assert visible(db, current_user(play.mallory), "model_weights") == 1
    db.execute(f"REVOKE {group} FROM {current_user(play.mallory)}")
    denied(partial(play.mallory.execute, "SELECT deploy_model('late', 1)"))
    assert value(play.mallory, "SELECT count(*) FROM tensile.models") == 0


def test_a_new_role_with_an_old_name_inherits_nothing(
    db: Connection, play: Cast, connect: Callable[..., Connection]
) -> None:
    alice = current_user(play.alice)
    play.alice.close()
    db.execute(f"DROP OWNED BY {alice}; DROP ROLE {alice}; CREATE ROLE {alice} LOGIN IN ROLE tensile_user")
    impostor = connect(user=alice)
    assert (
        value(impostor, "SELECT count(*) FROM tensile.models") + value(impostor, "SELECT count(*) FROM tensile.jobs")
        == 0
    )
    denied(partial(impostor.execute, "SELECT drop_model('late')"))
    refused("42704", f"job {play.job} does not exist", "", partial(impostor.execute, f"SELECT cancel_job({play.job})"))
    db.execute("SELECT set_model_owner('late', %s)", (alice,))
    assert value(impostor, "SELECT count(*) FROM tensile.models") == 1


def test_code_needs_pg_execute_server_program(db: Connection, play: Cast) -> None:
    for architecture in ({"type": "python", "source": "x"}, {"type": "import", "callable": "os:system"}):
        for name, replace in (("new", False), ("own", True)):
            play.mallory.execute("SELECT register_model('own', %s, replace => true)", (SMALL_MLP,))
            refused(
                *(
                    "42501",
                    f'permission denied for architecture type "{architecture["type"]}"',
                    "pg_execute_server_program",
                ),
                partial(
                    play.mallory.execute,
                    "SELECT register_model(%s, %s, NULL, %s)",
                    (name, Jsonb(architecture), replace),
                ),
            )
    db.execute(f"GRANT pg_execute_server_program TO {current_user(play.mallory)}")
    play.mallory.execute("SELECT register_model('new', %s)", (Jsonb({"type": "python", "source": "x"}),))


# -- jobs of other roles ----------------------------------------------------------------------------------------------


def test_jobs_of_others(db: Connection, play: Cast) -> None:
    cancel, wait = "SELECT cancel_job(%s)", "SELECT wait_for_job(%s, '0 s')"
    for call in (cancel, wait):
        refused("42704", f"job {play.job} does not exist", "", partial(play.mallory.execute, call, (play.job,)))
    refused(
        "42501", f"permission denied for job {play.job}", "pg_signal", partial(play.bob.execute, cancel, (play.job,))
    )
    refused("57014", f"job {play.job} has not ended", "", partial(play.bob.execute, wait, (play.job,)))

    mine = insert_job(db, "postgres", None)
    db.execute(f"GRANT pg_signal_backend TO {current_user(play.mallory)}")
    refused("42501", f"permission denied for job {mine}", "superuser", partial(play.mallory.execute, cancel, (mine,)))
    assert value(play.mallory, cancel, play.job) is True
    assert value(db, "SELECT state FROM tensile.jobs WHERE job = %s", play.job) == "cancelled"


def test_a_job_belongs_to_the_current_user(db: Connection, play: Cast) -> None:
    alice = current_user(play.alice)
    call = "train_model('other', 'VALUES (1, 2)', 'column2')"
    owner = "SELECT owner, owner_id::regrole::text FROM tensile.jobs WHERE job = %s"
    play.alice.execute("SELECT register_model('other', %s)", (SMALL_MLP,))
    with db.transaction(force_rollback=True):
        db.execute(f"SET LOCAL ROLE {alice}")
        job = value(db, f"SELECT {call}")
        assert db.execute(owner, (job,)).fetchone() == (alice, alice)
    play.alice.execute(f"CREATE FUNCTION retrain() RETURNS bigint LANGUAGE sql SECURITY DEFINER AS $$ SELECT {call} $$")
    with play.mallory.transaction(force_rollback=True):
        job = value(play.mallory, "SELECT retrain()")
        assert value(play.mallory, "SELECT count(*) FROM tensile.jobs WHERE job = %s", job) == 0
        play.mallory.execute("RESET ROLE")


# -- unreadable data, at submission ------------------------------------------------------------------------------------


@pytest.fixture
def mallorys_model(play: Cast) -> Cast:
    play.mallory.execute("SELECT register_model('m', %s)", (SMALL_MLP,))
    return play


@pytest.mark.parametrize(
    ("setup", "query"),
    [
        ("", "SELECT * FROM secrets"),
        ("GRANT SELECT (x) ON secrets TO PUBLIC", "SELECT x, y FROM secrets"),
        ("", "SELECT x, y FROM (VALUES (1, 2)) v (x, y) WHERE x IN (SELECT x FROM secrets)"),
        ("", "WITH s AS MATERIALIZED (SELECT * FROM secrets) SELECT x, y FROM s"),
        ("CREATE VIEW v WITH (security_invoker = true) AS TABLE secrets; GRANT ALL ON v TO PUBLIC", "TABLE v"),
        ("CREATE VIEW v AS TABLE secrets", "TABLE v"),
        (
            "CREATE FUNCTION f() RETURNS SETOF secrets LANGUAGE sql STABLE BEGIN ATOMIC SELECT * FROM secrets; END",
            "SELECT * FROM f()",
        ),
        (
            "CREATE FUNCTION f() RETURNS int LANGUAGE sql AS 'SELECT 1'; REVOKE ALL ON FUNCTION f FROM PUBLIC",
            "SELECT f() AS x, 1 AS y",
        ),
    ],
)
def test_unreadable_data_is_refused_at_submission(db: Connection, mallorys_model: Cast, setup: str, query: str) -> None:
    if setup:
        db.execute(setup)
    denied(partial(mallorys_model.mallory.execute, "SELECT train_model('m', %s, 'y')", (query,)), "permission denied")


def test_views_lend_the_rights_of_their_owner(db: Connection, mallorys_model: Cast) -> None:
    db.execute("CREATE VIEW v AS TABLE secrets; GRANT SELECT ON v TO PUBLIC")
    with mallorys_model.mallory.transaction(force_rollback=True):
        assert value(mallorys_model.mallory, "SELECT train_model('m', 'TABLE v', 'y')") > 0


def test_submitting_runs_nothing_with_the_rights_of_the_extensions_owner(mallorys_model: Cast) -> None:
    """Functions, operators and tables hide the real ones, before pg_catalog and in pg_temp."""
    mallory = mallorys_model.mallory
    mallory.execute(
        "CREATE TABLE ran (who name, what text); GRANT ALL ON ran TO PUBLIC;"
        "CREATE FUNCTION spy(what text) RETURNS bool LANGUAGE plpgsql AS"
        " $$ BEGIN INSERT INTO ran VALUES (current_user, what); RETURN true; END $$;"
        "CREATE FUNCTION format(text, text) RETURNS text LANGUAGE sql AS $$ SELECT spy('format')::text $$;"
        "CREATE FUNCTION length(text) RETURNS int LANGUAGE sql AS $$ SELECT spy('length')::int $$;"
        "CREATE FUNCTION current_setting(text) RETURNS text LANGUAGE sql AS $$ SELECT spy('setting')::text $$;"
        "CREATE FUNCTION same(text, text) RETURNS bool LANGUAGE sql AS $$ SELECT spy('=') $$;"
        "CREATE FUNCTION same(bigint, bigint) RETURNS bool LANGUAGE sql AS $$ SELECT spy('=') $$;"
        "CREATE OPERATOR = (LEFTARG = text, RIGHTARG = text, FUNCTION = same);"
        "CREATE OPERATOR = (LEFTARG = bigint, RIGHTARG = bigint, FUNCTION = same);"
        "CREATE TEMP VIEW pg_roles AS SELECT 1 AS oid, 'x'::name AS rolname, spy('roles') AS rolsuper;"
        "GRANT ALL ON pg_temp.pg_roles TO PUBLIC"
    )
    schema = value(mallory, "SELECT current_schema")
    mallory.execute(f"SET search_path = pg_temp, {schema}, pg_catalog, public")
    with mallory.transaction(force_rollback=True):
        mallory.execute("SELECT register_model('m2', %s), grant_model('m', 'public', 'train')", (SMALL_MLP,))
        mallory.execute("SELECT register_model('m', %s, replace => true)", (SMALL_MLP,))
        job = value(mallory, "SELECT train_model('m', 'VALUES (1, 2)', 'column2')")
        mallory.execute(
            "SELECT cancel_job(%s), wait_for_job(987654321 - 987654321 + %s) FROM (SELECT 1) x WHERE false", (job, job)
        )
        mallory.execute("SELECT cancel_job(%s)", (job,))
        mallory.execute("SELECT job FROM tensile.progress; SELECT job FROM tensile.job_history")
        mallory.execute("SELECT drop_model('m'), drop_model('m2')")
        strangers = mallory.execute("SELECT * FROM ran WHERE who OPERATOR(pg_catalog.<>) current_user").fetchall()
        assert strangers == []


# -- unreadable data, in the worker -----------------------------------------------------------------------------------


def failed(conn: Connection, query: str, target: str = "y") -> psycopg.Error:
    """Train mallory's model on the query and return the error of the job."""
    job = value(conn, "SELECT train_model('m', %s, %s, epochs => 1, policy => 'none')", query, target)
    with pytest.raises(psycopg.Error) as caught:
        conn.execute("SELECT wait_for_job(%s, '60 s')", (job,))
    return caught.value


def test_a_function_does_not_lend_the_rights_of_the_worker(mallorys_model: Cast) -> None:
    mallory = mallorys_model.mallory
    mallory.execute(
        "CREATE FUNCTION peek() RETURNS TABLE (x float8, y float8) LANGUAGE plpgsql AS"
        " $$ BEGIN RETURN QUERY SELECT * FROM secrets; END $$"
    )
    error = failed(mallory, "SELECT * FROM peek()")
    assert error.sqlstate == "42501", error
    assert "secrets" in str(error)


@pytest.mark.parametrize(
    ("sqlstate", "body"),
    [
        ("25006", "INSERT INTO loot VALUES (1)"),
        ("42501", "PERFORM set_config('role', 'none', false); INSERT INTO loot VALUES (1)"),
        ("25001", "PERFORM set_config('transaction_read_only', 'off', false); INSERT INTO loot VALUES (1)"),
        ("42501", "RESET ROLE; RESET SESSION AUTHORIZATION; INSERT INTO loot VALUES (1)"),
        ("25006", "PERFORM drop_model('m')"),
        ("2D000", "COMMIT"),
        ("42501", "PERFORM tensile_worker._my_job()"),
        ("42501", "PERFORM tensile_worker._job_end('finished')"),
        ("42501", "PERFORM tensile_worker._job_version('regression', '{}', '{}', '')"),
        ("42501", "PERFORM tensile_worker._register_device('x', 1, 1, 1, 0)"),
        ("42501", "PERFORM tensile_worker._report('x', 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1)"),
        ("42501", "PERFORM tensile_worker._acknowledge_plan(1)"),
        ("42501", "PERFORM tensile_worker._job_trace('{}', '{}', NULL)"),
        ("42501", "PERFORM tensile_worker._feed(3, 'SELECT 1 AS a, 2 AS b', 'b', '{}')"),
        ("42501", "EXECUTE 'CALL tensile_worker._step(0, -1, 0, false)'"),
    ],
)
def test_a_query_that_writes(db: Connection, mallorys_model: Cast, sqlstate: str, body: str) -> None:
    """Functions called in the worker could otherwise act as the worker itself."""
    mallory = mallorys_model.mallory
    mallory.execute(
        "CREATE TABLE loot (x int);"
        f"CREATE FUNCTION write() RETURNS int LANGUAGE plpgsql AS $$ BEGIN {body}; RETURN 1; END $$"
    )
    error = failed(mallory, "SELECT write() AS x, i AS y FROM generate_series(1, 50) i")
    assert error.sqlstate == sqlstate, error
    assert value(mallory, "SELECT count(*) FROM loot") == 0
    assert db.execute(
        "SELECT m.model, count(v.version_id) FROM tensile.models m"
        " LEFT JOIN tensile.model_versions v ON v.model_id = m.model_id"
        " WHERE m.model = 'm' GROUP BY 1"
    ).fetchall() == [("m", 0)]


def test_analysing_a_query_lends_no_rights_either(db: Connection, mallorys_model: Cast) -> None:
    """A literal of a composite type runs the CHECK of its domain whenever the query is analysed."""
    mallory = mallorys_model.mallory
    acts = (
        "PERFORM tensile_worker._register_device('loot', 4096, 1, 1, 0)",
        """PERFORM tensile_worker._job_codec_times('cpu', '{"loot": 1}', 0.1)""",
        "PERFORM tensile_worker._job_log('loot', 'loot', 1)",
        "INSERT INTO loot VALUES (1)",
    )
    tries = "".join(f"BEGIN {act}; EXCEPTION WHEN OTHERS THEN NULL; END;" for act in acts)
    mallory.execute(
        "CREATE TABLE loot (x int);"
        "CREATE FUNCTION try() RETURNS bool LANGUAGE plpgsql AS $$ BEGIN"
        " IF (SELECT backend_type FROM pg_stat_activity WHERE pid = pg_backend_pid()) <> 'client backend'"
        f" THEN {tries} END IF; RETURN true; END $$;"
        "CREATE DOMAIN trap AS float8 CHECK (try()); CREATE TYPE pair AS (x trap)"
    )
    query = "SELECT ('(1)'::pair).x + i AS x, i AS y FROM generate_series(1, 100) i"
    job = value(mallory, "SELECT train_model('m', %s, 'y', epochs => 1, policy => 'none')", query)
    assert value(mallory, "SELECT wait_for_job(%s, '60 s')", job) == "finished"
    assert value(mallory, "SELECT count(*) FROM loot") == 0
    assert value(db, "SELECT count(*) FROM tensile.devices WHERE name = 'loot'") == 0
    assert value(db, "SELECT count(*) FROM tensile.device_profiles WHERE device = 'loot'") == 0
    assert value(db, "SELECT count(*) FROM tensile_internal.codec_times WHERE times ? 'loot'") == 0
    assert value(db, "SELECT count(*) FROM tensile.scheduler_log WHERE event = 'loot'") == 0


def test_row_level_security_holds_in_the_worker(db: Connection, mallorys_model: Cast) -> None:
    db.execute(
        "ALTER TABLE secrets ENABLE ROW LEVEL SECURITY; GRANT SELECT ON secrets TO PUBLIC;"
        "CREATE POLICY few ON secrets USING (current_user <> session_user OR x <= 20)"
    )
    mallory = mallorys_model.mallory
    job = value(
        mallory, "SELECT train_model('m', 'TABLE secrets', 'y', epochs => 1, batch_size => 4, policy => 'none')"
    )
    assert value(mallory, "SELECT wait_for_job(%s, '60 s')", job) == "finished"
    assert value(mallory, "SELECT rows FROM tensile.jobs WHERE job = %s", job) == 20
    assert visible(db, current_user(mallory), "model_weights") > 0
    denied(partial(value, mallorys_model.bob, "SELECT predict('m', ARRAY[1.0])"))
    mallory.execute("SELECT grant_model('m', %s)", (current_user(mallorys_model.bob),))
    assert isinstance(value(mallorys_model.bob, "SELECT predict('m', ARRAY[1.0])"), float)
