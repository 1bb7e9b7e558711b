"""The catalogue of a job's memory, written by workers and scheduler: contents, visibility and retention.

Workers and scheduler execute SQL of the tests (stage.py), so that each call comes from a process that may make it.
"""

from __future__ import annotations

import json
from typing import Any

import psycopg
import pytest

from tests.server.cast import among_the_tables
from tests.server.stage import Stage
from tests.server.support import Connection, Wait, state, value

FROM = {"module": "layers.0", "source": "model.py:3", "signature": "f32[8,4]"}
DETAILS = FROM | {"flops": 256, "bytes": 1 << 40, "random": False}
USE = {"bytes": 128, "first_operator": 0, "last_operator": 3}
TABLES = {
    "operators": [
        {"operator": 0, "target": "placeholder", "phase": "forward", "tensors": []},
        {"operator": 1, "target": "aten.addmm.default", "phase": "forward", "tensors": [0, 1]} | DETAILS,
        {"operator": 2, "target": "aten.relu.default", "phase": "forward", "tensors": [1]},
        {"operator": 3, "target": "output", "phase": "optimizer", "tensors": []},
    ],
    "tensors": [
        {"tensor": 0, "name": "layers.0.weight", "kind": "parameter", "dtype": "float32", "shape": [8, 4]} | USE,
        {"tensor": 1, "name": "addmm", "kind": "activation", "dtype": "float32", "shape": [], "bytes": 1 << 40},
    ],
}
RATES = dict.fromkeys(("out_bytes_per_s", "in_bytes_per_s", "flops_per_s", "bytes_per_s"), 1_000_000_000)
TIMES = dict.fromkeys(("transfer_latency_us", "launch_us", "handover_us"), 2)
PROFILE: dict[str, object] = {"name": "here", "memory_bytes": 1 << 30, "process_bytes": 0, "duplex_factor": 1}
PROFILE |= RATES | TIMES
NEEDS = {"persistent_bytes": 100, "parameters": 3, "vanilla_bytes": 5000, "least_bytes": 2000, "operator": "addmm"}
GRAPHS = [{"name": "train", "rows": 64}]
FIRST: dict[str, object] = {"device": "cpu", "profile": PROFILE, "revision": 1, "policy": "joint", "fingerprint": "f"}
FIRST |= NEEDS | {"overhead_bytes": 7, "overhead_measured": False, "graphs": GRAPHS}
NAMES = ("traces", "operators", "tensors", "operator_latencies", "plans")


def literal(content: object) -> str:
    text = content if isinstance(content, str) else json.dumps(content)
    return "'" + text.replace("'", "''") + "'"


def trace(stage: Stage, job: int, tables: object = None, **header: object) -> None:
    """Store a trace of the job as its worker does on a TRACE frame."""
    rows = "NULL" if tables is None else literal(tables)
    stage.order(job, f"SELECT tensile_worker._job_trace({literal(FIRST | header)}, ARRAY['\\x01'::bytea], {rows})")


def latency(stage: Stage, job: int, measured: str, total_us: float = 10.0) -> None:
    header = literal({"samples": 2, "total_us": total_us, "load": 0.5})
    stage.order(job, f"SELECT tensile_worker._job_latency({header}, '{{0,4,2,1}}', '{measured}', '{{0,5,2,1}}')")


def footprint(stage: Stage, job: int, generation: int = 1) -> None:
    arrays = "'', '{0,1,2,1,3}', '{100,200,300,200,100}', '{100,300,500}'"
    stage.order(
        "scheduler",
        f"SELECT tensile_internal._footprint({job}, {generation}, {arrays}, 12, 10, 300, 306, 50, 60, 70, 0.5, 1)",
    )


def rows_of(conn: Connection, job: int) -> set[str]:
    """Return the names of the tables that have rows of the job."""
    return {name for name in NAMES if value(conn, f"SELECT count(*) FROM tensile_internal.{name} WHERE job = %s", job)}


@pytest.fixture
def traced(stage: Stage, job: int) -> int:
    """A job that waits for its first plan."""
    trace(stage, job, TABLES)
    return job


# -- waiting and admission --------------------------------------------------------------------------------------------


def test_the_first_trace_makes_a_job_wait_and_a_plan_lets_it_run(stage: Stage, traced: int) -> None:
    row = "SELECT state, reason FROM tensile.progress WHERE job = %s"
    assert stage.alice.execute(row, (traced,)).fetchone() == ("waiting", "its memory is being planned")
    for news in (True, False):
        waits = stage.order("scheduler", f"SELECT tensile_internal._job_waits({traced}, 'job 7 is in the way') AS news")
        assert waits == [{"news": news}]
    assert stage.alice.execute(row, (traced,)).fetchone() == ("waiting", "job 7 is in the way")
    stage.order(traced, "SELECT tensile_worker._job_admitted()")
    assert stage.alice.execute(row, (traced,)).fetchone() == ("running", None)
    trace(stage, traced, revision=2, least_bytes=2500)
    assert state(stage.alice, traced) == "running"
    assert stage.order("scheduler", f"SELECT tensile_internal._job_waits({traced}, 'too late') AS news") == [
        {"news": False}
    ]


def test_jobs_that_wait_or_run_are_listed_for_the_scheduler(stage: Stage, traced: int) -> None:
    stage.conn.execute("UPDATE tensile_internal.jobs SET priority = 2, memory_budget = 9000 WHERE id = %s", (traced,))
    row = stage.order("scheduler", "SELECT * FROM tensile_internal._schedule_jobs()")[0]
    assert 0 <= row.pop("waited_s") < 60 and 2 <= row.pop("priority") < 2.2
    kept = {name: FIRST[name] for name in ("policy", "device", "revision", "overhead_bytes", "least_bytes")}
    news: dict[str, Any] = {"job": traced, "waiting": True, "memory_budget": 9000, "refused": False}
    news |= {"total_us": None, "rejected": None}
    assert row == kept | news
    stage.order(traced, "SELECT tensile_worker._job_admitted()")
    latency(stage, traced, "{0,1,1,1}", total_us=123)
    trace(stage, traced, revision=2)
    row = stage.order("scheduler", "SELECT * FROM tensile_internal._schedule_jobs()")[0]
    assert (row["waiting"], row["total_us"], row["revision"]) == (False, 123, 2)
    stage.conn.execute("UPDATE tensile_internal.jobs SET state = 'interrupted' WHERE id = %s", (traced,))
    assert stage.order("scheduler", "SELECT * FROM tensile_internal._schedule_jobs()") == [None]
    stage.conn.execute("UPDATE tensile_internal.jobs SET state = 'running' WHERE id = %s", (traced,))


def test_priority_grows_while_a_job_is_not_done(stage: Stage, traced: int) -> None:
    """As in the queue, priority grows by a step for each 300 s (pg_tensile.ageing) since submission."""
    stage.conn.execute(
        "UPDATE tensile_internal.jobs SET submitted_at = now() - '600 s'::interval WHERE id = %s", (traced,)
    )
    assert 2 <= stage.order("scheduler", "SELECT priority FROM tensile_internal._schedule_jobs()")[0]["priority"] < 2.2


def test_a_refused_job_sees_the_refusal(stage: Stage, traced: int) -> None:
    refusal = {"budget_bytes": 1000, "least_bytes": 2000, "operator": "it's addmm"}
    with_status = "SELECT tensile_worker._job_status() AS s, tensile_worker._job_refusal() AS r"
    assert stage.order(traced, with_status) == [{"s": "ok", "r": None}]
    stage.order("scheduler", f"SELECT tensile_internal._job_refuse({traced}, {literal(refusal)})")
    answer = stage.order(traced, with_status)[0]
    assert (answer["s"], json.loads(answer["r"])) == ("refused", refusal)
    assert stage.order("scheduler", "SELECT refused FROM tensile_internal._schedule_jobs()") == [{"refused": True}]
    trace(stage, traced, revision=2)
    assert stage.order(traced, with_status) == [{"s": "ok", "r": None}], "with another trace it may be possible"


def test_a_trace_and_latencies_wake_the_scheduler(stage: Stage, job: int) -> None:
    stage.woken("scheduler", lambda: trace(stage, job, TABLES))
    stage.woken("scheduler", lambda: latency(stage, job, "{0,1,1,1}"))


def test_a_waiting_job_can_be_cancelled_and_interrupted(stage: Stage, traced: int, wait_until: Wait) -> None:
    stage.cluster.configure({"pg_tensile.database": ""})  # stops the worker, which writes nothing here
    stage.cluster.reload()
    wait_until(lambda: value(stage.conn, "SELECT count(*) FROM tensile_worker._progress()") == 0)
    stage.cluster.configure({"pg_tensile.database": "postgres"})
    stage.cluster.reload()
    again = "SELECT attempts FROM tensile.jobs WHERE job = %s AND state = 'running'"
    wait_until(lambda: value(stage.conn, again, traced) == 2, what="the next worker")
    assert rows_of(stage.conn, traced) == set(), "rows of the previous attempt are deleted"
    trace(stage, traced, TABLES)
    assert state(stage.conn, traced) == "waiting"
    stage.cancel(traced)


def test_a_job_that_is_executed_eagerly_has_no_graphs(stage: Stage, job: int) -> None:
    header = literal({**FIRST, "policy": "none", "vanilla_bytes": None, "fingerprint": None, "graphs": []})
    stage.order(job, f"SELECT tensile_worker._job_trace({header}, '{{}}', NULL)")
    columns = "policy, vanilla_bytes, least_bytes, graphs, cardinality(traces)"
    row = stage.alice.execute(f"SELECT {columns} FROM tensile.traces WHERE job = %s", (job,)).fetchone()
    assert row == ("none", None, 2000, [], 0)
    for view in ("latency", "footprint", "plan_events"):
        assert value(stage.alice, f"SELECT count(*) FROM tensile.{view} WHERE job = %s", job) == 0


# -- tables and views -------------------------------------------------------------------------------------------------


def test_a_trace_is_stored_unchanged(stage: Stage, traced: int) -> None:
    columns = (
        "device, revision, policy, fingerprint, overhead_bytes, persistent_bytes, parameters, vanilla_bytes,"
        " least_bytes, largest_operator, graphs, traces"
    )
    row = stage.alice.execute(f"SELECT {columns} FROM tensile.traces WHERE job = %s", (traced,)).fetchone()
    assert row == ("cpu", 1, "joint", "f", 7, 100, 3, 5000, 2000, "addmm", GRAPHS, [b"\1"])
    operator = stage.alice.execute(
        "SELECT target, phase, module, source, signature, flops, bytes, random, tensors FROM tensile.operators"
        " WHERE job = %s AND operator = 1",
        (traced,),
    ).fetchone()
    assert operator == (
        *("aten.addmm.default", "forward", "layers.0", "model.py:3", "f32[8,4]", 256, 1 << 40, False, [0, 1]),
    )
    tensor = stage.alice.execute(
        "SELECT name, kind, dtype, shape, bytes, first_operator, last_operator FROM tensile.tensors"
        " WHERE job = %s AND tensor = 0",
        (traced,),
    ).fetchone()
    assert tensor == ("layers.0.weight", "parameter", "float32", [8, 4], 128, 0, 3)


def test_events_of_a_plan_have_names(stage: Stage, traced: int) -> None:
    stage.order(traced, "SELECT tensile_worker._register_device('cpu', 1000, 1, 1, 0)")
    events = "01" + "000000" + "00000000" + "01000000" + "01000000" + "05000000" + "02000000" + "8000000000000000"
    stage.order("scheduler", f"SELECT tensile_internal._publish_plan({traced}, '\\x{events}', 1, 1, 1)")
    columns = (
        "job, generation, sequence, event, tensor, tensor_name, tensor_kind, bytes, trigger_operator, trigger_name,"
        " delay_us, deadline_operator, version"
    )
    assert stage.alice.execute(f"SELECT {columns} FROM tensile.plan_events").fetchall() == [
        (traced, 1, 0, "swap_out", 0, "layers.0.weight", "parameter", 128, 1, "aten.addmm.default", 5, 2, 1)
    ]


def test_latencies_are_shown_by_operator(stage: Stage, traced: int) -> None:
    view = (
        "SELECT operator, target, predicted_us, measured_us, average_us, samples, relative_error FROM tensile.latency"
        " WHERE job = %s ORDER BY operator"
    )
    rows = stage.alice.execute(view, (traced,)).fetchall()
    assert rows[1] == (1, "aten.addmm.default", None, None, None, None, None), "before anything was measured"
    latency(stage, traced, "{0,5,NaN}")  # NaN and a missing value
    assert stage.alice.execute(view, (traced,)).fetchall() == [
        (0, "placeholder", 0, 0, 0, 2, None),
        (1, "aten.addmm.default", 4, 5, 5, 2, 0.2),
        (2, "aten.relu.default", 2, None, 2, 2, None),
        (3, "output", 1, None, 1, 2, None),
    ]
    latency(stage, traced, "{Infinity,1e-45,3e38,-1}")
    assert len(stage.alice.execute(view, (traced,)).fetchall()) == 4


def test_the_footprint_is_shown_by_step(stage: Stage, traced: int) -> None:
    footprint(stage, traced)
    view = "SELECT * FROM tensile.footprint WHERE job = %s ORDER BY sequence"
    addmm = "aten.addmm.default"
    assert stage.alice.execute(view, (traced,)).fetchall() == [
        (traced, 0, 0, "placeholder", 100, 100),
        (traced, 1, 1, addmm, 200, 300),
        (traced, 2, 2, "aten.relu.default", 300, 500),
        (traced, 3, 1, addmm, 200, None),  # recomputed: a step that does not exist without a plan
        (traced, 4, 3, "output", 100, None),
    ]
    footprint(stage, traced, generation=2)
    columns = (
        "generation, iteration_us, vanilla_us, planned_bytes, granted_bytes, host_bytes, out_bytes, in_bytes,"
        " stall_us, recomputes"
    )
    row = stage.alice.execute(f"SELECT {columns} FROM tensile.plans WHERE job = %s", (traced,)).fetchone()
    assert row == (2, 12, 10, 300, 306, 50, 60, 70, 0.5, 1)
    footprint(stage, 1_000_000)  # a deleted job


def test_five_thousand_operators_are_stored_and_shown(stage: Stage, job: int) -> None:
    typical = {"target": "aten.convolution_backward.default", "signature": "f32[16,64,56,56]" * 4, "tensors": [7, 8]}
    operators = [typical | {"operator": i} for i in range(5000)]
    tensors = [{"tensor": i, "name": f"t{i}", "shape": [16, 64, 56, 56], "bytes": i} for i in range(8000)]
    tables = literal({"operators": operators, "tensors": tensors})
    stage.order(job, f"CREATE TEMP TABLE big AS SELECT {tables}::jsonb AS tables")
    call = f"SELECT tensile_worker._job_trace({literal(FIRST)}, '{{}}', (SELECT b.tables FROM pg_temp.big b))"
    stage.order(job, call)
    assert value(stage.alice, "SELECT count(*) FROM tensile.operators WHERE job = %s", job) == 5000
    latencies = "(SELECT array_agg(g::real) FROM generate_series(1, 5000) g)"
    header = literal({"samples": 1, "total_us": 1})
    stage.order(job, f"SELECT tensile_worker._job_latency({header}, {latencies}, {latencies}, {latencies})")
    assert value(stage.alice, "SELECT sum(samples) FROM tensile.latency WHERE job = %s", job) == 5000


# -- retention --------------------------------------------------------------------------------------------------------


def test_the_last_jobs_trace_stays_until_a_later_one_of_its_model_ends(stage: Stage, traced: int) -> None:
    latency(stage, traced, "{0,5,2,1}")
    footprint(stage, traced)
    other_job = stage.job("n")
    trace(stage, other_job, TABLES)
    stage.cancel(other_job)
    stage.cancel(traced)
    assert rows_of(stage.conn, traced) == set(NAMES), "to be looked at"
    later = stage.job()
    trace(stage, later, TABLES)
    assert rows_of(stage.conn, traced) == set(NAMES)
    stage.cancel(later)
    assert rows_of(stage.conn, traced) == set()
    assert rows_of(stage.conn, later) == {"traces", "operators", "tensors"}
    assert rows_of(stage.conn, other_job) == {"traces", "operators", "tensors"}
    stage.conn.execute("DELETE FROM tensile_internal.jobs WHERE id = %s", (later,))
    assert rows_of(stage.conn, later) == set()


def test_dropping_a_model_deletes_its_traces(stage: Stage, wait_until: Wait) -> None:
    stage.alice.execute("""SELECT register_model('short', '{"type": "mlp"}')""")
    first = stage.job("short")
    trace(stage, first, TABLES)
    stage.cancel(first)
    second = stage.job("short")
    trace(stage, second, TABLES)
    stage.alice.execute("SELECT drop_model('short')")
    assert rows_of(stage.conn, first) == set()
    wait_until(lambda: value(stage.conn, "SELECT ended_at FROM tensile.jobs WHERE job = %s", second) is not None)
    assert rows_of(stage.conn, second) == set()


def test_the_log_keeps_the_last_ten_thousand_lines(stage: Stage) -> None:
    stage.order("scheduler", "SELECT tensile_internal._log('filler') FROM generate_series(1, 10250)")
    stage.order("scheduler", "SELECT tensile_internal._log('last', 1, 2, 'cpu', 'why', '{\"bytes\": 3}')")
    count, newest = stage.conn.execute("SELECT count(*), max(id) FROM tensile.scheduler_log").fetchall()[0]
    assert 10_000 <= count < 10_100
    row = stage.conn.execute(
        "SELECT event, job, generation, device, reason, details FROM tensile.scheduler_log WHERE id = %s", (newest,)
    ).fetchone()
    assert row == ("last", 1, 2, "cpu", "why", {"bytes": 3})


# -- devices and calibration ------------------------------------------------------------------------------------------


def test_a_profile_is_measured_once(stage: Stage, traced: int) -> None:
    trace(stage, traced, revision=2, profile=PROFILE | {"name": "slower now"})
    trace(stage, traced, revision=3, device="cuda:0", profile=None)
    assert stage.alice.execute("SELECT device, profile FROM tensile.device_profiles").fetchall() == [("cpu", PROFILE)]
    profiles = stage.order(traced, "SELECT tensile_worker._job_profiles() AS p")[0]["p"]
    assert json.loads(profiles) == {"cpu": PROFILE}


IMPOSSIBLE: tuple[tuple[str, object], ...] = (
    *(("memory_bytes", number) for number in (0, -1, 1 << 60, None)),
    *(("out_bytes_per_s", number) for number in (0, -1e9, 1e30, "NaN", "Infinity")),
    *(("duplex_factor", number) for number in (0.1, 2)),
    *(("launch_us", number) for number in (-1, 1e9)),
    *(("process_bytes", number) for number in (-1, 2 << 30, None)),
)


def test_an_impossible_profile_is_not_stored(stage: Stage, traced: int) -> None:
    """The first profile would count for the jobs of all roles."""
    stored = "SELECT count(*) FROM tensile.device_profiles WHERE device = 'cuda:3'"
    for field, number in IMPOSSIBLE:
        with pytest.raises(psycopg.errors.InvalidParameterValue, match=f'{field} of device "cuda:3" cannot be'):
            trace(stage, traced, revision=2, device="cuda:3", profile=PROFILE | {field: number})
            pytest.fail(f"{field} may be {number}")
        assert value(stage.conn, stored) == 0, (field, number)


CALIBRATION = (
    "INSERT INTO tensile_internal.jobs (kind, model, owner, query, target, epochs, batch_size, optimizer,"
    " learning_rate, validation, seed, priority, options, settings)"
    " VALUES ('calibrate', '', 'alice', '', '', 1, 1, 'sgd', 1, 0, 0, 0, '{}', '{}') RETURNING id"
)
DONE = "tensile_worker._calibrate_done('cpu', '{\"rate\": 1}', '\\x0102', 3, 400, 0.1, '{}', '2.1')"


def test_only_a_calibration_writes_latency_models(stage: Stage, traced: int) -> None:
    with pytest.raises(psycopg.errors.InsufficientPrivilege, match="not a calibration"):
        stage.order(traced, f"SELECT {DONE}")
    assert stage.order(traced, "SELECT * FROM tensile_worker._job_latency_models()") == [None]


def test_a_calibration_is_a_job_without_a_model(stage: Stage, traced: int) -> None:
    stage.conn.execute("GRANT EXECUTE ON FUNCTION calibrate_device TO alice")
    with stage.conn.transaction():
        calibration = value(stage.conn, CALIBRATION)
        stage.conn.execute("SELECT tensile_internal._notify(%s)", (calibration,))
    with pytest.raises(psycopg.errors.UniqueViolation):
        stage.conn.execute(CALIBRATION)  # only one calibration may wait
    assert stage.order(calibration, "SELECT tensile_worker._job_status() AS s") == [{"s": "ok"}]
    stage.order(calibration, f"SELECT {DONE}, tensile_worker._job_end('finished')")
    assert state(stage.alice, calibration) == "finished"
    stage.conn.execute(
        "SELECT pg_terminate_backend(pid) FROM tensile_worker._progress() WHERE job = %s", (calibration,)
    )
    columns = "device, models, kinds, samples, error, job"
    with stage.cluster.connect(user="mallory") as conn:
        models = conn.execute(f"SELECT {columns} FROM tensile.latency_models").fetchall()
        assert models == [("cpu", b"\1\2", 3, 400, 0.1, calibration)]
        assert value(conn, "SELECT profile FROM tensile.device_profiles WHERE device = 'cpu'") == {"rate": 1}
    given = stage.order(traced, "SELECT device, encode(models, 'hex') AS m FROM tensile_worker._job_latency_models()")
    assert given == [{"device": "cpu", "m": "0102"}]


# -- visibility -------------------------------------------------------------------------------------------------------


def test_a_jobs_memory_is_visible_to_its_owner_and_pg_read_all_stats(stage: Stage, traced: int) -> None:
    latency(stage, traced, "{0,5,2,1}")
    footprint(stage, traced)
    stage.order(traced, "SELECT tensile_worker._job_log('rejected', 'too large', 3)")
    stage.order("scheduler", "SELECT tensile_internal._log('planner', reason => 'of nobody')")
    log = "SELECT count(*) FROM tensile.scheduler_log WHERE job = %s"
    for user, sees_job, sees_all in (("alice", 1, 0), ("watcher", 1, 1), ("mallory", 0, 0)):
        with among_the_tables(stage.conn, user):
            assert rows_of(stage.conn, traced) == (set(NAMES) if sees_job else set()), user
        with stage.cluster.connect(user=user) as conn:
            assert value(conn, log, traced) == sees_job
            assert bool(value(conn, "SELECT count(*) FROM tensile.scheduler_log WHERE job IS NULL")) == sees_all
            for view in ("traces", "operators", "tensors", "latency", "plans", "footprint"):
                assert bool(value(conn, f"SELECT count(*) FROM tensile.{view}")) == sees_job, (user, view)


def test_a_worker_cannot_change_traces_of_other_jobs(stage: Stage, traced: int) -> None:
    """Workers run as their users; the functions identify the job by the process."""
    with stage.cluster.connect(user="mallory") as conn:
        conn.execute("""SELECT register_model('hers', '{"type": "mlp"}')""")
        job: Any = value(conn, "SELECT train_model('hers', 'SELECT 1.0 AS x, 2.0 AS y', 'y')")
    stage.order(job, "SELECT 1 AS one")
    trace(stage, job, TABLES, least_bytes=1)
    least = {
        number: value(stage.conn, "SELECT least_bytes FROM tensile.traces WHERE job = %s", number)
        for number in (job, traced)
    }
    assert least == {job: 1, traced: 2000}
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        stage.order(job, f"SELECT tensile_internal._job_refuse({traced}, '{{}}')")
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        stage.order(job, f"SELECT tensile_internal._keep_tables({traced}, '{{}}')")
    stage.cancel(job)
