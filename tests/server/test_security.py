"""A hostile user's script: mallory has a login, a schema of her own and plenty of ideas.

alice owns a model with a version and jobs; bob is a member of pg_read_all_stats. Rows that no worker should touch are
inserted by the superuser. What mallory does must fail with 42501 (or show nothing), and change nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import psycopg
import pytest
from psycopg import sql
from psycopg.types.json import Jsonb

from tests.server.refusals import refused

Connection = psycopg.Connection[tuple[Any, ...]]

MLP = Jsonb({"type": "mlp", "hidden": [4]})
TABLES = [
    *("models", "model_versions", "model_weights", "model_grants"),
    *("jobs", "checkpoints", "checkpoint_chunks", "metrics"),
    *("traces", "operators", "tensors", "latencies", "footprints", "searches", "search_results"),
    *("device_profiles", "latency_models", "sparsities", "codings", "codec_times", "scheduler_log"),
]
OF_THE_MACHINE = {"device_profiles", "latency_models", "codec_times"}  # everybody sees them

# What every user may execute in schema tensile: harmless, or checked by the function itself.
OPEN = {
    *("_version", "_owned", "_check_architecture", "_check_options", "_raise", "_no_such_job"),
    *("_progress", "_devices", "_plan", "_predictions"),
    *("_submitted_here", "_wait_for_change", "_wait_round", "_job_result"),
}
# Open as well, because workers run as the user; each of them raises 42501 outside the process that it is for.
WORKERS_ONLY = {
    "_my_job": "",
    "_process": "",
    "_feed": "0, 'SELECT 1 AS a, 2 AS b', 'b', '{}'",
    "_fetch_plan": "0",
    "_acknowledge_plan": "1",
    "_register_device": "'cpu', 1, 1, 1, 0",
    "_report": "'x', 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1",
    "_job_begin": "1",
    "_job_status": "",
    "_job_rows": "1",
    "_job_checkpoint": "1, 0, ''",
    "_job_checkpoint_done": "1, '{}'",
    "_job_checkpoint_read": "0",
    "_job_metric": """'{"epoch": 1, "split": "training"}'""",
    "_job_version": "'binary', '{}', '{}'",
    "_job_weights": "1, 0, ''",
    "_job_trace": "'{}', '{}', NULL",
    "_job_choice": "'{}'",
    "_job_admitted": "",
    "_job_refusal": "",
    "_job_latency": "'{}', '{}', '{}', '{}'",
    "_job_sparsity": "1, '{}', '{}', '{}', '{}', '{}'",
    "_job_codec_times": "'cpu', '{}', 0",
    "_job_codecs": "",
    "_job_log": "'x', 'x', 1",
    "_job_replan": "'x'",
    "_job_profiles": "",
    "_job_latency_models": "",
    "_calibration_workloads": "",
    "_explain_feed": "0",
    "_explain_wait": "-1, 0, false",
    "_calibrate_done": "'cpu', '{}', '', 1, 1, 0",
    "_job_end": "'finished'",
    "_job_interrupt": "'x', false",
    "_step": "0, -1, 0, false",
}


class Cast(NamedTuple):
    """Connections of the roles, and alice's job and version."""

    alice: Connection
    bob: Connection
    mallory: Connection
    job: int
    version: int


def one(conn: Connection, query: str, *parameters: object) -> Any:
    row = conn.execute(query, parameters).fetchone()
    assert row is not None
    return row[0]


def user(conn: Connection) -> str:
    return str(one(conn, "SELECT current_user"))


def insert_job(db: Connection, owner: str, model: int | None, state: str = "interrupted") -> int:
    """A job that waits for ever, or one that has ended."""
    return int(
        one(
            db,
            "INSERT INTO tensile.jobs (model, model_name, owner_name, query, target, epochs, batch_size, optimizer,"
            " learning_rate, validation, seed, priority, options, settings, state, not_before, ended_at) VALUES"
            " (%s, 'late', %s, 'SELECT secret', 'late', 1, 1, 'sgd', 1, 0, 0, 0, '{}', '{}', %s, now() + '1 year',"
            " CASE WHEN %s <> 'interrupted' THEN now() END) RETURNING id",
            *(model, owner, state, state),
        )
    )


@pytest.fixture
def play(db: Connection, roles: Callable[..., str], connect: Callable[..., Connection]) -> Iterator[Cast]:
    schema = one(db, "SELECT current_schema")
    alice, mallory = roles("alice"), roles("mallory")
    bob = roles("bob", member_of=("pg_read_all_stats",))
    options = f"-c search_path={schema},public"
    conns = {name: connect(user=name, options=options) for name in (alice, bob, mallory)}

    db.execute(
        "CREATE TABLE secrets (x float8, y float8); INSERT INTO secrets SELECT i, i FROM generate_series(1, 50) i"
    )
    model = one(conns[alice], "SELECT register_model('late', %s, 'alice''s')", MLP)
    job = insert_job(db, alice, model)
    version = one(
        db,
        "INSERT INTO tensile.model_versions (model, version, job, task, preprocessing, architecture, weight_bytes)"
        " VALUES (%s, 1, %s, 'regression', '{}', '{}', 6) RETURNING id",
        *(model, job),
    )
    db.execute("INSERT INTO tensile.model_weights VALUES (%s, 0, 'secret')", (version,))
    db.execute("INSERT INTO tensile.metrics (job, epoch, split, loss) VALUES (%s, 1, 'training', 0.5)", (job,))
    db.execute("INSERT INTO tensile.checkpoints (job, generation, meta) VALUES (%s, 1, '{}')", (job,))
    db.execute("INSERT INTO tensile.checkpoint_chunks VALUES (%s, 1, 0, 'secret')", (job,))
    for insert in (
        "traces (job, device, revision, policy, fingerprint, overhead_bytes, least_bytes, graphs, traces)"
        " VALUES (%s, 'cpu', 1, 'joint', 'graph', 0, 1, '[]', '{secret}')",
        "searches (job, state, budget_bytes, seconds, cached) VALUES (%s, 'queued', 1, 1, false)",
        "search_results VALUES ('graph', 'cpu', 1, 1, 'secret', '', 1, 1, 1)",
        "operators (job, operator, target, source) VALUES (%s, 0, 'aten.relu.default', 'secret.py:1')",
        "tensors (job, tensor, name) VALUES (%s, 0, 'secret')",
        "latencies (job, predicted, measured, average, samples, total_us) VALUES (%s, '{1}', '{2}', '{2}', 1, 2)",
        "footprints (job, generation, events, operators, planned, vanilla)"
        " VALUES (%s, 1, 'secret', '{0}', '{1}', '{1}')",
        "sparsities (job, revision, tensors, zero_share, run_share, lz4_share, moved)"
        " VALUES (%s, 1, '{0}', '{0.5}', '{0.1}', '{1}', '{NULL}')",
        "codings (job, decisions) VALUES (%s, '[]')",
        "codec_times (device, times) VALUES ('of nobody', '{}')",
        "scheduler_log (job, event, reason) VALUES (%s, 'planned', 'secret')",
        "device_profiles (device, profile) VALUES ('of nobody', '{}')",
        "latency_models (device, models, kinds, samples) VALUES ('of nobody', '', 1, 1)",
    ):
        db.execute("INSERT INTO tensile." + insert, (job,) if "%s" in insert else ())
    yield Cast(conns[alice], conns[bob], conns[mallory], job, version)
    for conn in conns.values():
        conn.close()
    db.execute("DELETE FROM tensile.jobs; TRUNCATE tensile.device_profiles, tensile.latency_models")
    db.execute("TRUNCATE tensile.codec_times, tensile.search_results, tensile.scheduler_log")


def denied(attempt: Callable[[], object], message: str = "") -> None:
    with pytest.raises(psycopg.Error) as caught:
        attempt()
    assert caught.value.sqlstate == "42501", f"{caught.value.sqlstate}: {caught.value}"
    assert message in str(caught.value)


# -- functions --------------------------------------------------------------------------------------------------------


def test_public_may_execute_what_is_listed_here_and_nothing_else(play: Cast) -> None:
    rows = play.mallory.execute(
        "SELECT proname FROM pg_proc WHERE pronamespace = 'tensile'::regnamespace"
        " AND has_function_privilege(oid, 'EXECUTE')"
    ).fetchall()
    assert {name for (name,) in rows} == OPEN | WORKERS_ONLY.keys()


@pytest.mark.parametrize("name", WORKERS_ONLY)
def test_functions_of_workers_are_useless_in_sessions(play: Cast, name: str) -> None:
    verb = "CALL" if name == "_step" else "SELECT"
    denied(partial(play.mallory.execute, f"{verb} tensile.{name}({WORKERS_ONLY[name]})"))


@pytest.mark.parametrize(
    "call",
    [
        "SELECT tensile._launch_worker(%(job)s, 10)",
        "SELECT tensile._launch_worker(%(job)s, %(alice)s::regrole)",
        "SELECT tensile._publish_plan(%(job)s, '', 1, 1, 1)",
        "SELECT tensile._grants()",
        "SELECT tensile._device_memory()",
        "SELECT tensile._inference_memory('cpu', 1, 1, 1)",
        "SELECT tensile._schedule_jobs()",
        "SELECT tensile._job_waits(%(job)s, '')",
        "SELECT tensile._job_refuse(%(job)s, '{}')",
        "SELECT tensile._log('x', %(job)s)",
        "SELECT tensile._footprint(%(job)s, 1, '', '{}', '{}', '{}', 1, 1, 1, 1, 1, 1, 1, 1, 1)",
        "SELECT tensile._search(%(job)s, 'failed', 1, 1, false, 1, 1, 1, 1)",
        "SELECT tensile._search_result(%(job)s, 1, 1, '', '', 1, 1, 1)",
        "SELECT tensile._searched(%(job)s, 1)",
        "SELECT tensile._keep_tables(%(job)s, '{}')",
        "SELECT * FROM tensile._open_jobs",
        "SELECT tensile._job_slots()",
        "SELECT tensile._notify(%(job)s)",
        "SELECT tensile._queue_next()",
        "SELECT tensile._job_starting(%(job)s)",
        "SELECT tensile._job_requeue(%(job)s, '')",
        "SELECT tensile._reap(%(job)s, '', false)",
        "SELECT tensile._orphans()",
        "SELECT tensile._end_job(%(job)s, 'cancelled')",
        "SELECT tensile._register_model(10::oid, 'm', '{}', NULL, false)",
        "SELECT tensile._cancel_job(10::oid, %(job)s)",
        "SELECT tensile._granted(10::oid, 1, 'train')",
        "SELECT tensile._train_model(10::oid, 'late', '', '', 1, 1, '', 1, 0, 0, NULL, NULL, 0, '{}', '')",
    ],
)
def test_functions_of_the_controller_and_the_owner(play: Cast, call: str) -> None:
    denied(partial(play.mallory.execute, call, {"job": play.job, "alice": user(play.alice)}))


# -- tables -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("table", [*TABLES, "_loaded_models"])
@pytest.mark.parametrize("statement", ["INSERT INTO {} DEFAULT VALUES", "DELETE FROM {}", "TRUNCATE {} CASCADE"])
def test_nobody_writes_tables(play: Cast, table: str, statement: str) -> None:
    name = sql.Identifier("tensile", table)
    for conn in (play.mallory, play.bob, play.alice):
        denied(partial(conn.execute, sql.SQL(statement).format(name)))
        denied(partial(conn.execute, "SELECT nextval('tensile.jobs_id_seq')"))
        denied(partial(conn.execute, "SELECT nextval('tensile.scheduler_log_id_seq')"))


def test_nobody_updates_tables(play: Cast) -> None:
    for change in ("models SET owner_name = current_user", "jobs SET priority = 1000", "model_weights SET data = ''"):
        denied(partial(play.mallory.execute, f"UPDATE tensile.{change}"))


def test_who_sees_which_rows(play: Cast) -> None:
    def seen(conn: Connection) -> set[str]:
        return {table for table in TABLES if one(conn, f"SELECT count(*) FROM tensile.{table}")}

    assert seen(play.alice) == set(TABLES) - {"model_grants"}
    assert seen(play.mallory) == OF_THE_MACHINE
    of_jobs = {"traces", "operators", "tensors", "latencies", "footprints", "sparsities", "codings"}
    of_jobs |= {"scheduler_log", "searches", "search_results"}
    assert seen(play.bob) == {"models", "model_versions", "jobs", "metrics"} | of_jobs | OF_THE_MACHINE


def test_who_sees_what_through_the_views(play: Cast) -> None:
    for conn, visible in ((play.alice, 1), (play.bob, 1), (play.mallory, 0)):
        for view in ("progress", "latency", "footprint", "compression", "search"):
            assert one(conn, f"SELECT count(*) FROM tensile.{view}") == visible
        assert one(conn, "SELECT count(*) FROM tensile.job_history") == 0
        assert one(conn, "SELECT count(*) FROM tensile.predictions") == 0
    assert play.mallory.execute("SELECT * FROM tensile.plan").fetchall() == []


def test_every_view_runs_as_its_reader_and_every_table_has_row_level_security(db: Connection) -> None:
    assert db.execute(
        "SELECT relname FROM pg_class WHERE relnamespace = 'tensile'::regnamespace AND CASE relkind"
        " WHEN 'v' THEN NOT 'security_invoker=true' = ANY (coalesce(reloptions, '{}'))"
        " WHEN 'r' THEN NOT relrowsecurity ELSE false END"
    ).fetchall() == []  # fmt: skip


def test_functions_with_other_rights_have_a_pinned_search_path(db: Connection) -> None:
    assert (
        db.execute(
            "SELECT p.oid::regprocedure FROM pg_proc p JOIN pg_language l ON l.oid = p.prolang"
            " JOIN pg_depend d ON d.objid = p.oid AND d.deptype = 'e' AND d.refclassid = 'pg_extension'::regclass"
            " JOIN pg_extension e ON e.oid = d.refobjid AND e.extname = 'pg_tensile'"
            " WHERE p.prosecdef AND l.lanname NOT IN ('sql', 'plpgsql')"
            "    OR p.prokind = 'f' AND l.lanname IN ('sql', 'plpgsql')"
            "       AND NOT coalesce('search_path=pg_catalog, pg_temp' = ANY (p.proconfig), false)"
        ).fetchall()
        == []
    )


def test_rows_do_not_leak_into_a_function_of_the_reader(play: Cast) -> None:
    play.mallory.execute(
        "CREATE FUNCTION leak(text) RETURNS bool LANGUAGE plpgsql COST 0.0000001 AS"
        " $$ BEGIN RAISE EXCEPTION 'leaked %', $1; END $$"
    )
    for table, column in (
        *(("jobs", "query"), ("models", "name"), ("metrics", "split"), ("model_weights", "data::text")),
        *(("operators", "source"), ("tensors", "name"), ("traces", "policy"), ("scheduler_log", "reason")),
    ):
        assert play.mallory.execute(f"SELECT FROM tensile.{table} WHERE leak({column})").fetchall() == []


# -- other people's models --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        "SELECT register_model('late', '{\"type\": \"mlp\"}', replace => true)",
        "SELECT drop_model('late')",
        "SELECT deploy_model('late', 1)",
        "SELECT grant_model('late', 'public')",
        "SELECT grant_model('late', current_user, 'train')",
        "SELECT revoke_model('late', 'public')",
        "SELECT set_model_owner('late', current_user)",
        "SELECT set_model_memory_budget('late', '1MB')",
    ],
)
def test_models_of_others(play: Cast, call: str) -> None:
    for conn in (play.mallory, play.bob):
        refused("42501", 'must be owner of model "late"', user(play.alice), partial(conn.execute, call))


def test_training_and_predicting_need_a_grant(db: Connection, play: Cast) -> None:
    mallory = user(play.mallory)
    train = partial(one, play.mallory, "SELECT train_model('late', 'VALUES (1, 2)', 'column2')")
    predict = partial(one, play.mallory, "SELECT predict('late', ARRAY[1.0])")
    refused("42501", 'permission denied for model "late"', "grant_model", train)
    refused("42501", "permission denied", "grant_model", predict)
    assert one(play.mallory, "SELECT count(*) FROM tensile.models") == 0

    play.alice.execute("SELECT grant_model('late', %s)", (mallory,))
    assert one(play.mallory, "SELECT count(*) FROM tensile.model_versions") == 1
    assert one(play.mallory, "SELECT count(*) FROM tensile.model_weights") == 0
    refused("42501", 'permission denied for model "late"', "train", train)
    play.alice.execute("SELECT grant_model('late', 'public', 'train')")
    refused("55006", "is being trained", "cancel_job", train)  # alice's job, so this time the grant was good

    play.alice.execute("SELECT revoke_model('late', 'public', 'train'), revoke_model('late', %s)", (mallory,))
    refused("42501", 'permission denied for model "late"', "grant_model", train)
    assert one(db, "SELECT count(*) FROM tensile.model_grants") == 0


def test_mistakes_in_grants(play: Cast) -> None:
    grant = "SELECT grant_model('late', %s, %s)"
    refused("42704", 'role "nobody" does not exist', "case", partial(play.alice.execute, grant, ("nobody", "predict")))
    refused("22023", 'unknown privilege "select"', "predict", partial(play.alice.execute, grant, ("public", "select")))
    give = "SELECT set_model_owner('late', %s)"
    refused("42501", "must be member of role", "superuser", partial(play.alice.execute, give, (user(play.bob),)))
    refused("22023", "public can't own a model", "role", partial(play.alice.execute, give, ("public",)))


def test_a_group_owns_through_its_members(db: Connection, play: Cast, roles: Callable[..., str]) -> None:
    group = roles("group", "NOLOGIN")
    db.execute(f"GRANT {group} TO {user(play.alice)}, {user(play.mallory)}")
    play.alice.execute("SELECT set_model_owner('late', %s)", (group,))
    play.mallory.execute("SELECT deploy_model('late', 1)")
    assert one(play.mallory, "SELECT count(*) FROM tensile.model_weights") == 1
    db.execute(f"REVOKE {group} FROM {user(play.mallory)}")
    denied(partial(play.mallory.execute, "SELECT deploy_model('late', 1)"))
    assert one(play.mallory, "SELECT count(*) FROM tensile.models") == 0


def test_a_new_role_with_an_old_name_inherits_nothing(
    db: Connection, play: Cast, connect: Callable[..., Connection]
) -> None:
    alice = user(play.alice)
    play.alice.close()
    db.execute(f"DROP OWNED BY {alice}; DROP ROLE {alice}; CREATE ROLE {alice} LOGIN")
    impostor = connect(user=alice)
    assert (
        one(impostor, "SELECT count(*) FROM tensile.models") + one(impostor, "SELECT count(*) FROM tensile.jobs") == 0
    )
    denied(partial(impostor.execute, "SELECT drop_model('late')"))
    refused("42704", f"job {play.job} does not exist", "", partial(impostor.execute, f"SELECT cancel_job({play.job})"))
    db.execute("SELECT set_model_owner('late', %s)", (alice,))
    assert one(impostor, "SELECT count(*) FROM tensile.models") == 1


def test_code_needs_pg_execute_server_program(db: Connection, play: Cast) -> None:
    for architecture in ({"type": "python", "source": "x"}, {"type": "import", "callable": "os:system"}):
        for name, replace in (("new", False), ("own", True)):
            play.mallory.execute("SELECT register_model('own', %s, replace => true)", (MLP,))
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
    db.execute(f"GRANT pg_execute_server_program TO {user(play.mallory)}")
    play.mallory.execute("SELECT register_model('new', %s)", (Jsonb({"type": "python", "source": "x"}),))


# -- other people's jobs ----------------------------------------------------------------------------------------------


def test_jobs_of_others(db: Connection, play: Cast) -> None:
    cancel, wait = "SELECT cancel_job(%s)", "SELECT wait_for_job(%s, '0 s')"
    for call in (cancel, wait):
        refused("42704", f"job {play.job} does not exist", "", partial(play.mallory.execute, call, (play.job,)))
    refused(
        "42501", f"permission denied for job {play.job}", "pg_signal", partial(play.bob.execute, cancel, (play.job,))
    )
    refused("57014", f"job {play.job} has not ended", "", partial(play.bob.execute, wait, (play.job,)))

    mine = insert_job(db, "postgres", None)
    db.execute(f"GRANT pg_signal_backend TO {user(play.mallory)}")
    refused("42501", f"permission denied for job {mine}", "superuser", partial(play.mallory.execute, cancel, (mine,)))
    assert one(play.mallory, cancel, play.job) is True
    assert one(db, "SELECT state FROM tensile.jobs WHERE id = %s", play.job) == "cancelled"


def test_a_job_belongs_to_the_current_user(db: Connection, play: Cast) -> None:
    alice = user(play.alice)
    call = "train_model('other', 'VALUES (1, 2)', 'column2')"
    owner = "SELECT owner_name, owner::regrole::text FROM tensile.jobs WHERE id = %s"
    play.alice.execute("SELECT register_model('other', %s)", (MLP,))
    with db.transaction(force_rollback=True):
        db.execute(f"SET LOCAL ROLE {alice}")
        job = one(db, f"SELECT {call}")
        assert db.execute(owner, (job,)).fetchone() == (alice, alice)
    play.alice.execute(f"CREATE FUNCTION retrain() RETURNS bigint LANGUAGE sql SECURITY DEFINER AS $$ SELECT {call} $$")
    with play.mallory.transaction(force_rollback=True):
        job = one(play.mallory, "SELECT retrain()")
        assert one(play.mallory, "SELECT count(*) FROM tensile.jobs WHERE id = %s", job) == 0
        play.mallory.execute("RESET ROLE")


# -- data that the submitter may not read ------------------------------------------------------------------------------


@pytest.fixture
def mallorys_model(play: Cast) -> Cast:
    play.mallory.execute("SELECT register_model('m', %s)", (MLP,))
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
def test_what_may_not_be_read_is_refused_at_submission(
    db: Connection, mallorys_model: Cast, setup: str, query: str
) -> None:
    if setup:
        db.execute(setup)
    denied(partial(mallorys_model.mallory.execute, "SELECT train_model('m', %s, 'y')", (query,)), "permission denied")


def test_views_lend_the_rights_of_their_owner(db: Connection, mallorys_model: Cast) -> None:
    db.execute("CREATE VIEW v AS TABLE secrets; GRANT SELECT ON v TO PUBLIC")
    with mallorys_model.mallory.transaction(force_rollback=True):
        assert one(mallorys_model.mallory, "SELECT train_model('m', 'TABLE v', 'y')") > 0


def test_submitting_runs_nothing_with_the_rights_of_the_extensions_owner(mallorys_model: Cast) -> None:
    """Functions, operators and tables that hide the real ones, in front of pg_catalog and in pg_temp."""
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
    schema = one(mallory, "SELECT current_schema")
    mallory.execute(f"SET search_path = pg_temp, {schema}, pg_catalog, public")
    with mallory.transaction(force_rollback=True):
        mallory.execute("SELECT register_model('m2', %s), grant_model('m', 'public', 'train')", (MLP,))
        mallory.execute("SELECT register_model('m', %s, replace => true)", (MLP,))
        job = one(mallory, "SELECT train_model('m', 'VALUES (1, 2)', 'column2')")
        mallory.execute(
            "SELECT cancel_job(%s), wait_for_job(987654321 - 987654321 + %s) FROM (SELECT 1) x WHERE false", (job, job)
        )
        mallory.execute("SELECT cancel_job(%s)", (job,))
        mallory.execute("SELECT job FROM tensile.progress; SELECT job FROM tensile.job_history")
        mallory.execute("SELECT drop_model('m'), drop_model('m2')")
        strangers = mallory.execute("SELECT * FROM ran WHERE who OPERATOR(pg_catalog.<>) current_user").fetchall()
        assert strangers == []


# -- jobs that really run: what only the worker can see ---------------------------------------------------------------


def failed(conn: Connection, query: str, target: str = "y") -> psycopg.Error:
    """Trains mallory's model on the query and returns the error of the job."""
    job = one(conn, "SELECT train_model('m', %s, %s, epochs => 1)", query, target)
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
        ("25006", "PERFORM set_config('role', 'none', false); INSERT INTO loot VALUES (1)"),
        ("25001", "PERFORM set_config('transaction_read_only', 'off', false); INSERT INTO loot VALUES (1)"),
        ("25006", "RESET ROLE; RESET SESSION AUTHORIZATION; INSERT INTO loot VALUES (1)"),
        ("25006", "PERFORM drop_model('m')"),
        ("2D000", "COMMIT"),
        ("42501", "PERFORM tensile._my_job()"),
        ("42501", "PERFORM tensile._job_end('finished')"),
        ("42501", "PERFORM tensile._job_version('regression', '{}', '{}')"),
        ("42501", "PERFORM tensile._register_device('x', 1, 1, 1, 0)"),
        ("42501", "PERFORM tensile._report('x', 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1)"),
        ("42501", "PERFORM tensile._acknowledge_plan(1)"),
        ("42501", "PERFORM tensile._job_trace('{}', '{}', NULL)"),
        ("42501", "PERFORM tensile._feed(3, 'SELECT 1 AS a, 2 AS b', 'b', '{}')"),
        ("42501", "CALL tensile._step(0, -1, 0, false)"),
    ],
)
def test_a_query_that_writes(db: Connection, mallorys_model: Cast, sqlstate: str, body: str) -> None:
    """Not even in the worker, where functions that it calls could pass for the worker itself."""
    mallory = mallorys_model.mallory
    mallory.execute(
        "CREATE TABLE loot (x int);"
        f"CREATE FUNCTION write() RETURNS int LANGUAGE plpgsql AS $$ BEGIN {body}; RETURN 1; END $$"
    )
    error = failed(mallory, "SELECT write() AS x, i AS y FROM generate_series(1, 50) i")
    assert error.sqlstate == sqlstate, error
    assert one(mallory, "SELECT count(*) FROM loot") == 0
    assert db.execute(
        "SELECT m.name, count(v.id) FROM tensile.models m LEFT JOIN tensile.model_versions v ON v.model = m.id"
        " WHERE m.name = 'm' GROUP BY 1"
    ).fetchall() == [("m", 0)]


def test_row_level_security_holds_in_the_worker(db: Connection, mallorys_model: Cast) -> None:
    db.execute(
        "ALTER TABLE secrets ENABLE ROW LEVEL SECURITY; GRANT SELECT ON secrets TO PUBLIC;"
        "CREATE POLICY few ON secrets USING (current_user <> session_user OR x <= 20)"
    )
    mallory = mallorys_model.mallory
    job = one(mallory, "SELECT train_model('m', 'TABLE secrets', 'y', epochs => 1, batch_size => 4)")
    assert one(mallory, "SELECT wait_for_job(%s, '60 s')", job) == "finished"
    assert one(mallory, "SELECT rows FROM tensile.jobs WHERE id = %s", job) == 20
    assert one(mallory, "SELECT count(*) FROM tensile.model_weights") > 0
    denied(partial(one, mallorys_model.bob, "SELECT predict('m', ARRAY[1.0])"))
    mallory.execute("SELECT grant_model('m', %s)", (user(mallorys_model.bob),))
    assert isinstance(one(mallorys_model.bob, "SELECT predict('m', ARRAY[1.0])"), float)
