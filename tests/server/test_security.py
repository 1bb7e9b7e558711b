"""Privileges of functions and tables: mallory has a login and a schema of her own.

alice owns a model with a version and jobs; bob is a member of pg_read_all_stats. The superuser inserts rows that no
worker may touch. Attempts of mallory must fail with 42501 (or show nothing) and change nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from psycopg import sql
from psycopg.types.json import Jsonb

from tests.server.cast import Cast, among_the_tables, current_user, denied, denied_within, visible
from tests.server.support import MLP, ROWS, SMALL_MLP, Connection, finish, submit, value

TABLES = [
    *("models", "model_versions", "model_weights", "model_grants", "version_sources"),
    *("jobs", "checkpoints", "checkpoint_chunks", "epochs", "metrics"),
    *("traces", "operators", "tensors", "operator_latencies", "plans", "plan_searches", "search_results"),
    *("device_profiles", "latency_models", "sparsities", "codings", "codec_times", "scheduler_log"),
    *("rank_reports", "tunings", "trials"),
]


OF_THE_MACHINE = {"device_profiles", "latency_models", "codec_times"}  # visible to all roles


# What every user may execute in schema tensile_worker: harmless, or checked by the function itself.
OPEN = {
    *("_version", "_owned", "_raise", "_no_such_job", "_base_number", "_inserted_rows"),
    *("_drift", "_drift_begin", "_drift_limits", "_psi", "_ks", "_add_counts", "_sum_counts"),
    *("_materialize_predictions", "_check_unique", "_deployed_version"),
    *("_progress", "_devices", "_plan", "_predictions", "_loaded_models"),
    *("_submitted_here", "_wait_for_change", "_wait_round", "_job_result", "_explain_latency_models"),
    *("_tell_result", "_next_step", "_rounded", "_beside", "_members", "_course", "_has_metrics", "_check_waiting"),
    *("_tuning_result", "_no_such_tuning", "_check_sees_changes"),
}


# Executable as well, because workers run as the user; each raises 42501 outside of its process.
WORKERS_ONLY = {
    "_explain_running": "",
    "_explain_ray": "'{}'",
    "_my_job": "",
    "_stop_cause": "",
    "_take_interrupt": "",
    "_process": "",
    "_python_folder": "",
    "_training_sources": "'SELECT 1 AS a', '{}', NULL",
    "_job_sources": "1, '[]'",
    "_same_query": "'SELECT 1 AS a', 'SELECT 1 AS a', '{}'",
    "_check_prediction_query": "1, 'SELECT 1 AS a', 'SELECT 1 AS a', '{}'",
    "_job_prediction_query": "1, '{}'",
    "_gate_feed": "0, 0, 1, 1, 'SELECT 1 AS a, 2 AS b', '{}'",
    "_evaluation_feed": "0, 1, 'SELECT 1 AS a, 2 AS b', '{}'",
    "_job_evaluation": "",
    "_job_evaluation_weights": "1, 0",
    "_job_evaluated": "1, 1, '{}', '{}'",
    "_job_first_version": "",
    "_job_start_weights": "0",
    "_job_gate": "",
    "_job_gate_weights": "1, 0",
    "_job_decide": "NULL, NULL, NULL, NULL, NULL, NULL",
    "_feed": "0, 'SELECT 1 AS a, 2 AS b', 'b', '{}'",
    "_fetch_plan": "0",
    "_acknowledge_plan": "1",
    "_group_socket": "-1",
    "_flow_state": "",
    "_register_device": "'cpu', 1, 1, 1, 0",
    "_report": "'x', 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1",
    "_job_begin": "1",
    "_job_status": "",
    "_job_rows": "1",
    "_job_checkpoint": "1, 0, ''",
    "_job_checkpoint_done": "1, '{}'",
    "_job_checkpoint_read": "0",
    "_job_metric": """'{"epoch": 1, "split": "training"}'""",
    "_job_version": "'binary', '{}', '{}', ''",
    "_job_weights": "1, 0, ''",
    "_job_trace": "'{}', '{}', NULL",
    "_job_choice": "'{}'",
    "_job_settings": "'{}'",
    "_job_architecture": "'{}', 'a reason'",
    "_job_admitted": "",
    "_job_waits_for": "",
    "_job_ranks": "'[]'",
    "_job_ray": "",
    "_job_refusal": "",
    "_job_latency": "'{}', '{}', '{}', '{}'",
    "_job_sparsity": "1, '{}', '{}', '{}', '{}', '{}'",
    "_job_codec_times": "'cpu', '{}', 0",
    "_job_codecs": "",
    "_job_overhead": "'{}'",
    "_job_overheads": "",
    "_job_log": "'x', 'x', 1",
    "_job_profiles": "",
    "_job_latency_models": "",
    "_calibration_workloads": "",
    "_run_statement": "'SELECT 1'",
    "_session_feed": "0",
    "_session_wait": "-1, 0, false",
    "_session_weights": "1, 0",
    "_calibrate_done": "'cpu', '{}', '', 1, 1, 0, '{}', ''",
    "_job_end": "'finished'",
    "_job_interrupt": "'x', false",
    "_step": "0, -1, 0, false",
}


# -- functions --------------------------------------------------------------------------------------------------------


def test_public_may_execute_what_is_listed_here_and_nothing_else(play: Cast) -> None:
    rows = play.mallory.execute(
        "SELECT proname FROM pg_proc WHERE has_function_privilege(oid, 'EXECUTE') AND pronamespace IN"
        " ('tensile'::regnamespace, 'tensile_internal'::regnamespace, 'tensile_worker'::regnamespace)"
    ).fetchall()
    assert {name for (name,) in rows} == OPEN | WORKERS_ONLY.keys()


def test_no_function_is_executable_by_public(
    db: Connection, roles: Callable[..., str], connect: Callable[..., Connection]
) -> None:
    outsider = connect(roles("outsider", member_of=()))
    routines = (
        "SELECT p.oid::regprocedure::text FROM pg_proc p JOIN pg_depend d ON d.objid = p.oid AND d.deptype = 'e'"
        " JOIN pg_extension e ON e.oid = d.refobjid AND e.extname = 'pg_tensile'"
        " WHERE p.pronamespace = 'public'::regnamespace AND has_function_privilege({}, p.oid, 'EXECUTE')"
    )
    assert outsider.execute(routines.format("current_user")).fetchall() == []
    assert len(outsider.execute(routines.format("'tensile_user'")).fetchall()) > 15
    for use in ("SELECT predict('m', '{1}'::float8[])", "TABLE tensile.models", "SELECT tensile_worker._my_job()"):
        denied(partial(outsider.execute, use), "permission denied")


# The public functions: for members of tensile_predictor and tensile_user, for those of tensile_user only, and others. A
# new one belongs into one of these.
PREDICTING = {
    *("predict", "predict_all", "predict_class", "predict_interval", "predict_probabilities", "predict_rows"),
    *("predict_table", "explain_prediction", "embed", "embed_rows", "evaluate_model", "feature_importance"),
    "models_of_table",
}
CHANGING = {
    *("register_model", "drop_model", "deploy_model", "rollback_model", "grant_model", "revoke_model"),
    *("set_model_owner", "set_model_memory_budget", "set_model_retention", "drop_model_version"),
    *("train_model", "explain_training", "schedule_training", "unschedule_training"),
    *("tune_model", "cancel_tuning", "wait_for_tuning", "schedule_evaluation", "unschedule_evaluation"),
    *("cancel_job", "set_job_priority", "wait_for_job", "await_job", "wait_for_job_procedure"),
    *("wait_for_first_version", "materialize_predictions", "export_model", "import_model"),
}
OF_ADMINISTRATORS = {"calibrate_device", "release_database", "resume_database"}


@pytest.mark.parametrize(
    ("role", "allowed"), [("tensile_user", PREDICTING | CHANGING), ("tensile_predictor", PREDICTING)]
)
def test_what_members_may_call(db: Connection, role: str, allowed: set[str]) -> None:
    rows = db.execute(
        "SELECT p.proname, bool_and(has_function_privilege(%(role)s, p.oid, 'EXECUTE')),"
        " bool_or(has_function_privilege(%(role)s, p.oid, 'EXECUTE')) FROM pg_proc p"
        " JOIN pg_depend d ON d.classid = 'pg_proc'::regclass AND d.objid = p.oid AND d.deptype = 'e'"
        " JOIN pg_extension e ON e.oid = d.refobjid AND e.extname = 'pg_tensile'"
        " WHERE p.pronamespace = 'public'::regnamespace GROUP BY p.proname",
        {"role": role},
    ).fetchall()
    assert {name for name, *_ in rows} == PREDICTING | CHANGING | OF_ADMINISTRATORS
    assert {name for name, every, some in rows if every} == {name for name, every, some in rows if some} == allowed
    usage = "SELECT has_schema_privilege(%s, %s, 'USAGE')"
    schemas = ("tensile", "tensile_worker", "tensile_internal")
    assert [value(db, usage, role, schema) for schema in schemas] == [True, True, False]


def test_a_predictor_predicts_and_evaluates(
    db: Connection, roles: Callable[..., str], connect: Callable[..., Connection]
) -> None:
    """With the models that were granted to it, whose privilege to train is of no use to it."""
    analyst = roles("analyst", member_of=("tensile_predictor",))
    for name in ("shown", "hidden"):
        finish(db, submit(db, name, MLP, epochs=1))
    db.execute(f"SELECT grant_model('shown', '{analyst}'), grant_model('shown', '{analyst}', 'train')")
    with connect(analyst) as conn:
        row = Jsonb({"a": 1, "b": 1, "c": "c1"})
        assert value(conn, "SELECT predict_class('shown', %s)", row) in ("yes", "no")
        assert value(conn, "SELECT count(*) FROM predict_rows('shown', %s)", ROWS) == 400
        assert value(conn, "SELECT value FROM evaluate_model('shown', %s) WHERE metric = 'accuracy'", ROWS) > 0.4
        denied(partial(conn.execute, "SELECT predict_class('hidden', %s)", (row,)), 'model "hidden"')
        assert conn.execute("SELECT model FROM tensile.models").fetchall() == [("shown",)]
        assert value(conn, "SELECT count(*) FROM tensile.model_versions") == 1
        assert value(conn, "SELECT count(*) FROM tensile.jobs") == 0
        denied(partial(submit, conn, "shown"), "train_model")
        denied(
            partial(
                conn.execute,
                "SELECT tensile_worker._materialize_predictions('shown', %s, 't', '{a}', NULL, '')",
                (ROWS,),
            )
        )


def test_a_job_needs_more_than_a_single_function(
    db: Connection, roles: Callable[..., str], connect: Callable[..., Connection]
) -> None:
    """The job's worker runs as the role, too."""
    role = roles("guest", member_of=())
    db.execute(f"GRANT EXECUTE ON FUNCTION register_model, train_model TO {role}")
    db.execute(f"SELECT register_model('m', %s), grant_model('m', '{role}', 'train')", (SMALL_MLP,))
    with connect(role) as conn:
        denied(partial(conn.execute, "SELECT train_model('m', 'VALUES (1, 2)', 'column2')"), "tensile")


@pytest.mark.parametrize("name", WORKERS_ONLY)
def test_functions_of_workers_are_useless_in_sessions(play: Cast, name: str) -> None:
    verb = "CALL" if name == "_step" else "SELECT"
    denied(partial(play.mallory.execute, f"{verb} tensile_worker.{name}({WORKERS_ONLY[name]})"))


@pytest.mark.parametrize(
    "call",
    [
        "SELECT tensile_internal._launch_worker(%(job)s, 10)",
        "SELECT tensile_internal._launch_worker(%(job)s, %(alice)s::regrole)",
        "SELECT tensile_internal._publish_plan(%(job)s, '', 1, 1, 1)",
        "SELECT tensile_internal._grants()",
        "SELECT tensile_internal._device_memory()",
        "SELECT tensile_internal._inference_memory('cpu', 1, 1, 1)",
        "SELECT tensile_internal._lack_memory('cpu', '{1}', 1, 0)",
        "SELECT tensile_internal._lacking_memory()",
        "SELECT tensile_internal._report_loaded('{}', '{}')",
        "SELECT tensile_internal._predictor_socket()",
        "SELECT tensile_internal._schedule_jobs()",
        "SELECT tensile_internal._due_schedules()",
        "SELECT tensile_internal._run_schedule(1)",
        "SELECT tensile_internal._open_tunings()",
        "SELECT tensile_internal._advance_tuning(1, 1)",
        "SELECT tensile_internal._add_trial(1, 0, '{}')",
        "SELECT tensile_internal._fail_tuning(1, '', '', '')",
        "SELECT tensile_internal._stop_trial(%(job)s, '')",
        "SELECT tensile_internal._cancel_tuning(10::oid, 1)",
        """SELECT tensile_internal._submit_training(10::oid, '{"model": "late"}', '{}', '{}')""",
        "SELECT tensile_internal._job_waits(%(job)s, '')",
        "SELECT tensile_internal._job_refuse(%(job)s, '{}')",
        "SELECT tensile_internal._log('x', %(job)s)",
        "SELECT tensile_internal._footprint(%(job)s, 1, '', '{}', '{}', '{}', 1, 1, 1, 1, 1, 1, 1, 1, 1)",
        "SELECT tensile_internal._search(%(job)s, 'failed', 1, 1, false, 1, 1, 1, 1)",
        "SELECT tensile_internal._search_result(%(job)s, 1, 1, '', '', 1, 1, 1)",
        "SELECT tensile_internal._searched(%(job)s, 1)",
        "SELECT tensile_internal._keep_tables(%(job)s, '{}')",
        "SELECT * FROM tensile_internal._open_jobs",
        "SELECT tensile_internal._job_slots()",
        "SELECT tensile_internal._notify(%(job)s)",
        "SELECT tensile_internal._notify_stop(%(job)s)",
        "SELECT tensile_internal._log_job('x')",
        "SELECT tensile_internal._log_event(%(job)s, 'x')",
        "SELECT tensile_internal._announce_end(%(job)s, 'x')",
        "SELECT tensile_internal._free_slots()",
        "SELECT tensile_internal._worker_end(%(job)s)",
        "SELECT tensile_internal._reap_terminated(%(job)s, '')",
        "SELECT tensile_internal._queue_next()",
        "SELECT tensile_internal._job_starting(%(job)s)",
        "SELECT tensile_internal._job_requeue(%(job)s, '')",
        "SELECT tensile_internal._reap(%(job)s, '', false)",
        "SELECT tensile_internal._orphans()",
        "SELECT tensile_internal._end_job(%(job)s, 'cancelled')",
        "SELECT tensile_internal._register_model(10::oid, 'm', '{}', NULL, false)",
        "SELECT tensile_internal._cancel_job(10::oid, %(job)s)",
        "SELECT tensile_internal._granted(10::oid, 1, 'train')",
        """SELECT tensile_internal._train_model(10::oid, '{"model": "late"}', '', '{}')""",
    ],
)
def test_functions_of_the_controller_and_the_owner(play: Cast, call: str) -> None:
    denied(partial(play.mallory.execute, call, {"job": play.job, "alice": current_user(play.alice)}))


# -- tables -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("table", TABLES)
def test_users_cannot_name_tables(play: Cast, table: str) -> None:
    for conn in (play.mallory, play.bob, play.alice):
        denied(partial(conn.execute, f"TABLE tensile_internal.{table}"), "schema tensile_internal")


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("statement", ["INSERT INTO {} DEFAULT VALUES", "DELETE FROM {}", "TRUNCATE {} CASCADE"])
def test_users_cannot_write_tables(db: Connection, play: Cast, table: str, statement: str) -> None:
    """Their privileges do not allow it either, whatever those on the schema are."""
    name = sql.Identifier("tensile_internal", table)
    for conn in (play.mallory, play.bob, play.alice):
        denied(partial(conn.execute, sql.SQL(statement).format(name)))
        with among_the_tables(db, current_user(conn)):
            denied_within(db, sql.SQL(statement).format(name), f"table {table}")
            denied_within(db, "SELECT nextval('tensile_internal.jobs_id_seq')", "sequence")
            denied_within(db, "SELECT nextval('tensile_internal.scheduler_log_id_seq')", "sequence")


def test_nobody_may_more_than_read_any_relation(db: Connection) -> None:
    assert db.execute(
        "SELECT c.oid::regclass::text, a.privilege_type FROM pg_class c, aclexplode(c.relacl) a"
        " WHERE c.relnamespace IN ('tensile'::regnamespace, 'tensile_internal'::regnamespace)"
        " AND a.grantee <> c.relowner AND a.privilege_type <> 'SELECT'"
    ).fetchall() == []  # fmt: skip


def test_users_cannot_update_tables(db: Connection, play: Cast) -> None:
    for change in ("models SET owner = current_user", "jobs SET priority = 1000", "model_weights SET data = ''"):
        denied(partial(play.mallory.execute, f"UPDATE tensile_internal.{change}"))
        with among_the_tables(db, current_user(play.mallory)):
            denied_within(db, f"UPDATE tensile_internal.{change}", f"table {change.split()[0]}")


def test_users_cannot_write_views(play: Cast) -> None:
    """Views with joins cannot be updated by anyone; these could."""
    for change in ("UPDATE tensile.jobs SET priority = 9", "DELETE FROM tensile.trials"):
        for conn in (play.mallory, play.bob, play.alice):
            denied(partial(conn.execute, change))


def test_tables_show_visible_rows_only(db: Connection, play: Cast) -> None:
    def seen(conn: Connection) -> set[str]:
        return {table for table in TABLES if visible(db, current_user(conn), table)}

    assert seen(play.alice) == set(TABLES) - {"model_grants"}
    assert seen(play.mallory) == OF_THE_MACHINE
    of_jobs = {"traces", "operators", "tensors", "operator_latencies", "plans", "sparsities", "codings"}
    of_jobs |= {"scheduler_log", "plan_searches", "search_results", "rank_reports", "tunings", "trials"}
    of_models = {"models", "model_versions", "version_sources", "jobs", "epochs", "metrics"}
    assert seen(play.bob) == of_models | of_jobs | OF_THE_MACHINE


def test_views_show_visible_rows_only(play: Cast) -> None:
    def seen(conn: Connection) -> set[str]:
        views = conn.execute("SELECT relname FROM pg_class WHERE relnamespace = 'tensile'::regnamespace").fetchall()
        views.remove(("devices",))  # of all jobs of the server
        return {view for (view,) in views if value(conn, f"SELECT count(*) FROM tensile.{view}")}

    assert seen(play.mallory) == {"device_profiles", "latency_models"}
    shown = {"models", "model_versions", "model_sources", "model_status", "jobs", "progress", "epoch_metrics"}
    shown |= {"metrics", "traces", "operators", "tensors", "latency", "plans", "footprint", "compression"}
    shown |= {"plan_searches", "ranks", "scheduler_log", "tunings", "trials", "device_profiles", "latency_models"}
    assert seen(play.alice) == seen(play.bob) == shown


def test_views_show_rows_of_visible_jobs_only(play: Cast) -> None:
    for conn, rows in ((play.alice, 1), (play.bob, 1), (play.mallory, 0)):
        for view in ("progress", "epoch_metrics", "latency", "footprint", "compression", "plan_searches", "ranks"):
            assert value(conn, f"SELECT count(*) FROM tensile.{view}") == rows
        assert value(conn, "SELECT count(*) FROM tensile.job_history") == 0
        assert value(conn, "SELECT count(*) FROM tensile.predictions") == 0
    assert play.mallory.execute("SELECT * FROM tensile.plan_events").fetchall() == []


def test_every_view_runs_as_its_reader_and_every_table_has_row_level_security(db: Connection) -> None:
    assert db.execute(
        "SELECT oid::regclass::text FROM pg_class WHERE relnamespace IN"
        " ('tensile'::regnamespace, 'tensile_internal'::regnamespace, 'tensile_worker'::regnamespace) AND CASE relkind"
        " WHEN 'v' THEN NOT 'security_invoker=true' = ANY (coalesce(reloptions, '{}'))"
        " WHEN 'r' THEN NOT relrowsecurity ELSE false END"
    ).fetchall() == []  # fmt: skip


def test_schemas_have_what_their_names_say(db: Connection) -> None:
    kinds = (
        "SELECT coalesce(array_agg(DISTINCT relkind::text), '{}') FROM pg_class"
        " WHERE relkind NOT IN ('S', 'i') AND relnamespace = %s::regnamespace"
    )
    assert value(db, kinds, "tensile") == ["v"]
    assert value(db, kinds, "tensile_internal") == ["r", "v"]
    assert value(db, kinds, "tensile_worker") == []


def test_functions_with_the_callers_rights_name_nothing_that_callers_may_not(db: Connection) -> None:
    assert (
        db.execute(
            "SELECT p.oid::regprocedure FROM pg_proc p JOIN pg_language l ON l.oid = p.prolang"
            " JOIN pg_depend d ON d.objid = p.oid AND d.deptype = 'e' AND d.refclassid = 'pg_extension'::regclass"
            " JOIN pg_extension e ON e.oid = d.refobjid AND e.extname = 'pg_tensile'"
            " WHERE NOT p.prosecdef AND l.lanname IN ('sql', 'plpgsql') AND p.prosrc ~ 'tensile_internal'"
            " AND p.pronamespace <> 'tensile_internal'::regnamespace"
        ).fetchall()
        == []
    )


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


def test_rows_do_not_leak_into_a_function_of_the_reader(db: Connection, play: Cast) -> None:
    play.mallory.execute(
        "CREATE FUNCTION leak(text) RETURNS bool LANGUAGE plpgsql COST 0.0000001 AS"
        " $$ BEGIN RAISE EXCEPTION 'leaked %', $1; END $$"
    )
    leak = sql.SQL("SELECT FROM {} WHERE {}.leak({})")
    schema = sql.Identifier(value(db, "SELECT current_schema"))
    columns = (
        *(("jobs", "query"), ("metrics", "split"), ("operators", "source"), ("tensors", "name"), ("traces", "policy")),
        ("scheduler_log", "reason"),
    )
    for view, column in (*columns, ("models", "model")):
        name = sql.Identifier("tensile", view)
        assert play.mallory.execute(leak.format(name, schema, sql.SQL(column))).fetchall() == []
    with among_the_tables(db, current_user(play.mallory)):
        for table, column in (*columns, ("models", "name"), ("model_weights", "data::text")):
            name = sql.Identifier("tensile_internal", table)
            assert db.execute(leak.format(name, schema, sql.SQL(column))).fetchall() == []
