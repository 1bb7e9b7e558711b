"""The Python client against a server whose schema, models, columns and queries have names that need quoting.

alice owns the models; one job has finished, another one never ends. mallory has no privileges on them, watcher may see
them. Tests that stop a server use their own.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from psycopg import sql

from pg_tensile.client import (
    ArgumentError,
    Client,
    ConnectionLost,
    Job,
    JobTimeout,
    ServerError,
    TrainingFailed,
    connect,
)
from pg_tensile.client.frames import PLAN, frame
from tests.server.support import FOREVER, MLP, ROWS, Wait, trainer_pid, value
from tests.unit.records import facts_in

SCHEMA = "Odd %s; schema - (1)"
MODEL = "a \"model\"; '%s' -- [red]\\ <b>"
QUERY = f'SELECT a AS "100%", b AS "it\'s", c, y AS "the ""answer"";" FROM ({ROWS}) r'
LONG_QUERY = f"{QUERY}, generate_series(1, 60)"  # few epochs, so that their metrics do not become many
TARGET = 'the "answer";'
DEEP = {"type": "mlp", "hidden": [128, 128, 128, 64]}  # its minimum is well below its memory without a plan
SETTINGS: dict[str, Any] = {"batch_size": 50, "validation": 0.25}
EPOCHS = 6
LAST = {"keep": "last"}  # no early stopping


@pytest.fixture(scope="module")
def server(new_cluster: Callable[..., Any]) -> Iterator[Any]:
    cluster = new_cluster(extension=False)
    try:
        with cluster.connect() as conn:
            conn.execute(
                sql.SQL(
                    "CREATE SCHEMA {0}; CREATE EXTENSION pg_tensile SCHEMA {0} CASCADE;"
                    "GRANT USAGE ON SCHEMA {0} TO PUBLIC; CREATE ROLE alice LOGIN; CREATE ROLE mallory LOGIN;"
                    "CREATE ROLE watcher LOGIN IN ROLE pg_read_all_stats; GRANT tensile_user TO alice, mallory, watcher"
                ).format(sql.Identifier(SCHEMA))
            )
        with connect(cluster.dsn(user="alice")) as alice:
            for name in (MODEL, "endless"):
                alice.register(name, DEEP, "of a test")
        yield cluster
        with connect(cluster.dsn()) as admin:
            for row in admin.connection.execute("SELECT job FROM tensile.progress").fetchall():
                job = admin.job(row["job"])
                with cluster.connect() as conn:
                    pid = trainer_pid(conn, job.number)
                if pid is not None:
                    os.kill(pid, signal.SIGCONT)
                job.cancel()
                job.wait(progress=False, timeout=30)
    finally:
        cluster.end()


@pytest.fixture
def client(server: Any) -> Iterator[Client]:
    """alice's."""
    with connect(server.dsn(user="alice")) as client:
        yield client


@pytest.fixture(scope="module")
def budget(server: Any) -> int:
    """A budget in bytes, below the memory of the jobs without plans and above their minimum."""
    with connect(server.dsn(user="alice")) as client:
        text = client.explain(MODEL, QUERY, TARGET, options={"format": "json"}, **SETTINGS)
    memory = json.loads(text)["memory"]
    return int(memory["least_bytes"] + memory["vanilla_bytes"]) // 2


@pytest.fixture(scope="module")
def trained(server: Any, budget: int) -> int:
    """The id of a finished job."""
    with connect(server.dsn(user="alice")) as client:
        job = client.train(
            MODEL, QUERY, TARGET, epochs=EPOCHS, learning_rate=1e-2, memory_budget=budget, options=LAST, **SETTINGS
        )
        assert job.wait(progress=False, timeout=90) == "finished"
        return job.number


@pytest.fixture
def endless(server: Any, client: Client, budget: int, wait_until: Wait) -> Iterator[Job]:
    """A job that trains, left by an earlier test or new. It is stopped between the tests that need it."""
    rows = client.connection.execute("SELECT job FROM tensile.progress WHERE model = 'endless'").fetchall()
    if rows:
        job = client.job(rows[0]["job"])
    else:
        job = client.train(
            "endless", LONG_QUERY, TARGET, epochs=FOREVER, memory_budget=budget, options=LAST, **SETTINGS
        )
    with server.connect() as conn:
        pid = trainer_pid(conn, job.number)
        if pid is not None:
            os.kill(pid, signal.SIGCONT)
        wait_until(lambda: phase(client, job) == "training", what=lambda: job.state)
        yield job
        pid = trainer_pid(conn, job.number)
        if pid is not None:
            os.kill(pid, signal.SIGSTOP)


def phase(client: Client, job: Job) -> str | None:
    row = client.connection.execute("SELECT phase FROM tensile.progress WHERE job = %s", (job.number,)).fetchone()
    return None if row is None else row["phase"]


# -- a job that has finished ------------------------------------------------------------------------------------------


def test_a_finished_job_is_waited_for_at_once(client: Client, trained: int, capsys: pytest.CaptureFixture[str]) -> None:
    job = client.job(trained)
    assert (job.number, job.model, job.state) == (trained, MODEL, "finished")
    assert job.wait(timeout=0) == "finished"
    assert "100%" in capsys.readouterr().out
    assert job.cancel() is False and job.set_priority(3) is False


def test_metrics_have_a_row_for_each_epoch_and_split(client: Client, trained: int) -> None:
    metrics = client.job(trained).metrics()
    assert list(metrics.index) == [
        (epoch, split) for epoch in range(1, EPOCHS + 1) for split in ("training", "validation")
    ]
    assert (metrics["loss"] > 0).all() and (metrics["samples"] > 0).all() and metrics["rmse"].isna().all()
    losses = metrics["loss"].unstack()["training"]
    assert losses[EPOCHS] < losses[1]
    row = client.connection.execute(
        "SELECT accuracy FROM tensile.epoch_metrics WHERE job = %s AND epoch = %s AND split = 'validation'",
        (trained, EPOCHS),
    ).fetchone()
    assert row is not None and metrics.loc[(EPOCHS, "validation"), "accuracy"] == row["accuracy"]


def test_the_memory_of_an_ended_job_is_still_there(client: Client, trained: int, budget: int) -> None:
    job = client.job(trained)
    plan, latency, footprint = job.plan(), job.latency(), job.footprint()
    assert len(plan) and set(plan["event"]) <= {"swap_out", "swap_in", "recompute", "release"}
    assert plan["tensor_name"].notna().any() and plan["trigger_name"].notna().any()
    assert list(latency.index) == list(range(len(latency))) and len(latency) > 20
    assert latency["predicted_us"].notna().all() and latency["average_us"].notna().any()
    assert footprint["planned_bytes"].max() <= budget < footprint["vanilla_bytes"].max()
    assert set(footprint["operator"]) <= set(latency.index)


def test_a_job_without_memory_and_metrics_has_empty_frames(client: Client) -> None:
    """The job never starts."""
    client.register("empty", MLP, replace=True)
    with client.connection.transaction(force_rollback=True):
        job = client.train("empty", ROWS, "y")
        frames = (job.metrics(), job.plan(), job.latency(), job.footprint(), job.ranks())
        with pytest.raises(ServerError, match="can't be waited for in an open transaction") as caught:
            job.wait(progress=False)
        assert caught.value.hint == "Commit first, then wait."
    assert not any(map(len, frames))
    assert list(frames[1].columns) == [name for name in PLAN.columns if name != "sequence"]
    with pytest.raises(ServerError, match=f"there is no job {job.number}, or it belongs to another role"):
        job.wait(progress=False)


def test_the_ranks_of_a_job_are_those_of_sql(server: Any) -> None:
    """The job never starts; what its ranks report is invented."""
    known = {"node": "10.0.0.4", "device": "cuda:0", "state": "training", "step": 7, "samples_per_s": 602.5}
    ranks = [known | {"rank": 1, "device_bytes": 1 << 40}, {"rank": 0, "node": "10.0.0.5", "state": "starting"}]
    with connect(server.dsn()) as admin, admin.connection.transaction(force_rollback=True):
        admin.register("ranked", MLP)
        job = admin.train("ranked", ROWS, "y")
        report = "INSERT INTO tensile_internal.rank_reports (job, ranks) VALUES (%s, %s)"
        admin.connection.execute(report, (job.number, json.dumps(ranks)))
        table = job.ranks()
    assert list(table.index) == [0, 1] and list(table["state"]) == ["starting", "training"]
    assert table.loc[1].to_dict() == known | {"device_bytes": 1 << 40}
    assert table.loc[0].isna().sum() == 4 and table.loc[0, "node"] == "10.0.0.5"


def test_a_report_is_a_page_inline_or_in_a_file(client: Client, trained: int, tmp_path: Path) -> None:
    report = client.job(trained).report(tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == report.html
    assert report.html.lstrip().lower().startswith("<!doctype html")
    assert report._repr_html_().startswith("<iframe ")
    assert "[red]\\ <b>" not in report.html


@pytest.mark.long
def test_a_report_has_the_evaluation_of_a_query(client: Client, trained: int) -> None:
    """Long: two evaluations and two importances, each in a process of its own."""
    facts = facts_in(client.job(trained).report(evaluate=QUERY).html)
    scores = client.evaluate(MODEL, QUERY)
    assert facts["evaluation"]["metrics"]["accuracy"] == scores.loc["accuracy", "value"]
    assert [row["feature"] for row in facts["evaluation"]["importance"]] == list(client.importance(MODEL, QUERY).index)
    with pytest.raises(ArgumentError, match="argument query is not a str"):
        client.job(trained).report(evaluate=1)  # type: ignore[arg-type]


def test_a_notebook_shows_a_job_as_a_table(client: Client, trained: int, endless: Job) -> None:
    shown = client.job(trained)._repr_html_()
    assert (
        "finished" in shown
        and f"{EPOCHS} of {EPOCHS}" in shown
        and "Accuracy of validation" in shown
        and "without a plan" in shown
    )
    assert "&lt;b&gt;" in shown and "<b>" not in shown
    assert "running" in endless._repr_html_()
    assert repr(endless) == f"<job {endless.number} of model 'endless'>"


def test_predictions_are_those_of_sql(client: Client, trained: int) -> None:
    query = QUERY + " ORDER BY a"
    answer = client.predict(MODEL, query)
    called = sql.SQL("SELECT * FROM {}(%s, %s)").format(sql.Identifier(SCHEMA.replace("%", "%%"), "predict_rows"))
    rows = client.connection.execute(called, (MODEL, query)).fetchall()
    assert list(answer.index) == [row["row_number"] for row in rows] == list(range(1, 401))
    for name in ("prediction", "label", "probability"):
        assert list(answer[name]) == [row[name] for row in rows]
    truth = [row[TARGET] for row in client.connection.execute(query.encode()).fetchall()]
    assert sum(answer["label"] == truth) > 300
    within_budget = client.predict(MODEL, query, memory_budget="1GB")  # by the predictor
    assert within_budget["prediction"].to_numpy() == pytest.approx(answer["prediction"].to_numpy(), abs=1e-5)
    assert within_budget["label"].equals(answer["label"])
    with pytest.raises(ServerError, match="memory_budget"):
        client.predict(MODEL, query, memory_budget="a lot")
    one = {"100%": 0.5, "it's": 0.25, "c": "c1"}
    probabilities = client.predict_probabilities(MODEL, one, memory_budget="1GB")["probability"]
    assert sorted(probabilities.index) == ["no", "yes"] and probabilities.sum() == pytest.approx(1)
    everything = client.predict_all(MODEL, json.dumps(one), memory_budget=10**9)
    assert everything["label"] == probabilities.index[0] and everything["probabilities"] == dict(probabilities)
    with pytest.raises(ArgumentError):
        client.predict_all(MODEL, {"100%": float("nan")})


def test_models_and_jobs_are_listed(client: Client, trained: int) -> None:
    model = client.models().loc[MODEL]
    assert (model["type"], model["owner"], model["description"]) == ("mlp", "alice", "of a test")
    assert model["versions"] >= 1 and model["deployed_version"] >= 1
    job = client.jobs().loc[trained]
    assert (job["kind"], job["model"], job["state"]) == ("train", MODEL, "finished")
    assert job["submitted_at"] < job["started_at"] < job["ended_at"]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::pg_tensile.client.job.JobWarning")  # an epoch may be no better than the baseline
def test_versions_are_dropped_on_demand_and_by_a_retention(client: Client) -> None:
    """Takes seconds: several versions are trained."""
    client.register("kept", MLP)

    def train() -> None:
        assert client.train("kept", ROWS, "y", epochs=1).wait(progress=False) == "finished"

    def versions() -> tuple[int, int]:
        model = client.models().loc["kept"]
        return model["versions"], model["deployed_version"]

    train()
    train()
    client.drop_version("kept", 1)
    assert versions() == (1, 2)
    with pytest.raises(ServerError, match="deployed"):
        client.drop_version("kept", 2)
    client.keep_versions("kept", 1)
    train()
    assert versions() == (1, 3)
    with pytest.raises(ServerError, match="out of range"):
        client.keep_versions("kept", -1)
    with pytest.raises(ArgumentError, match="whole number or None"):
        client.keep_versions("kept", "all")  # type: ignore[arg-type]
    client.keep_versions("kept", None)
    train()
    assert versions() == (2, 4)
    client.drop("kept")


def test_versions_are_deployed_and_models_dropped(client: Client, trained: int) -> None:
    client.deploy(MODEL, 1, "the only one")
    with pytest.raises(ServerError, match="no earlier deployment to return to"):
        client.rollback(MODEL)
    with pytest.raises(ServerError, match="has no version 77") as caught:
        client.deploy(MODEL, 77)
    assert caught.value.hint and "It has: 1" in caught.value.hint
    client.register("short-lived", MLP)
    with pytest.raises(ServerError, match="already exists"):
        client.register("short-lived", MLP)
    client.register("short-lived", json.dumps(DEEP), replace=True)
    client.drop("short-lived")
    assert "short-lived" not in client.models().index


# -- a job that trains ------------------------------------------------------------------------------------------------


def test_the_plan_is_the_view_while_the_job_runs_and_stays_after(
    client: Client, endless: Job, wait_until: Wait
) -> None:
    from pandas.testing import assert_frame_equal

    columns = sql.SQL(", ").join(map(sql.Identifier, PLAN.columns))
    query = sql.SQL("SELECT {} FROM tensile.plan_events WHERE job = %s ORDER BY sequence").format(columns)

    def view() -> list[dict[str, Any]]:
        return client.connection.execute(query, (endless.number,)).fetchall()

    def same_generation() -> tuple[Any, Any] | None:
        before, plan, after = view(), endless.plan(), view()
        return (plan, frame(PLAN, before)) if len(plan) and before == after else None

    plan, expected = wait_until(same_generation)
    assert_frame_equal(plan, expected)
    assert endless.cancel() is True
    assert endless.wait(progress=False, timeout=30) == "cancelled"
    wait_until(lambda: not view(), what="the slot of the job is free")
    kept = endless.plan()
    assert len(kept) and list(kept.columns) == list(plan.columns) and dict(kept.dtypes) == dict(plan.dtypes)


def test_waiting_ends_after_the_timeout_and_the_job_goes_on(client: Client, endless: Job) -> None:
    with pytest.raises(JobTimeout, match=f"job {endless.number} has not ended in time: it is ") as caught:
        endless.wait(timeout=0.6)
    assert caught.value.hint and "cancel()" in caught.value.hint
    with pytest.raises(ArgumentError, match="timeout is not a number"):
        endless.wait(timeout="a while")  # type: ignore[arg-type]
    assert endless.state in ("running", "waiting")


@pytest.mark.parametrize("progress", [True, False])
def test_ctrl_c_ends_the_waiting_and_nothing_else(
    server: Any, client: Client, endless: Job, wait_until: Wait, progress: bool
) -> None:
    """Ctrl-C arrives while the connection is idle between two polls, without a snapshot."""
    pid = client.connection.info.backend_pid
    idle = (
        "SELECT count(*) = 1 FROM pg_stat_activity WHERE pid = %s AND state = 'idle' AND backend_xmin IS NULL"
        " AND query LIKE '%%LEFT JOIN tensile.progress%%'"
    )

    def strike() -> None:
        with server.connect() as conn:
            wait_until(lambda: value(conn, idle, pid), what="a poll")
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with ThreadPoolExecutor(1) as pool, pytest.raises(KeyboardInterrupt):
            pool.submit(strike)
            endless.wait(progress, timeout=30)
    finally:
        signal.signal(signal.SIGINT, before)
    assert endless.state in ("running", "waiting")


def test_other_threads_use_the_client_meanwhile(client: Client, endless: Job) -> None:
    tasks: list[Callable[[], object]] = [client.jobs, endless.metrics, endless.report, endless.plan]
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(endless.wait, progress=False, timeout=60) for _ in range(2)]
        reading = [pool.submit(task) for task in tasks]
        for task in reading:
            task.result()
        assert not any(task.done() for task in waiting)
        assert endless.set_priority(5) is True
        assert endless.cancel() is True
        assert [task.result() for task in waiting] == ["cancelled", "cancelled"]


def test_privileges_to_see_and_to_change_jobs(server: Any, trained: int, endless: Job) -> None:
    number = endless.number
    with connect(server.dsn(user="mallory")) as mallory, pytest.raises(ServerError, match="another role") as caught:
        mallory.job(number)
    assert caught.value.hint
    with connect(server.dsn(user="watcher")) as watcher:
        job = watcher.job(number)
        assert job.state in ("running", "waiting") and number in watcher.jobs().index
        with pytest.raises(JobTimeout):
            job.wait(progress=False, timeout=0)
        acts: list[Callable[[], object]] = [job.cancel, partial(job.set_priority, 7)]
        for act in acts:
            with pytest.raises(ServerError, match="permission denied for job") as caught:
                act()
            assert caught.value.hint and caught.value.__notes__ == [f"hint: {caught.value.hint}"]
        with pytest.raises(ServerError, match="permission denied to predict with model"):
            watcher.predict(MODEL, QUERY)


# -- refusals ---------------------------------------------------------------------------------------------------------


def test_a_failed_job_raises_its_own_error(client: Client) -> None:
    client.register("failing", MLP, replace=True)
    job = client.train("failing", "SELECT 1.0 / (i - 300) AS x, i AS y FROM generate_series(1, 400) i", "y")
    with pytest.raises(TrainingFailed, match="division by zero") as caught:
        job.wait(progress=False, timeout=60)
    row = client.connection.execute("SELECT * FROM tensile.jobs WHERE job = %s", (job.number,)).fetchone()
    assert row is not None
    error = caught.value
    assert (error.message, error.hint, error.detail) == (row["error"], row["hint"], row["detail"])
    assert (error.job, error.sqlstate, error.traceback) == (job.number, row["sqlstate"], row["traceback"])
    assert job.state == "failed" and "division by zero" in job._repr_html_()
    assert "division by zero" in client.jobs().loc[job.number, "error"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"epochs": 0}, "epochs is out of range"),
        ({"epochs": 2**40}, "integer out of range"),
        ({"learning_rate": float("nan")}, "learning_rate is out of range"),
        ({"optimizer": "'; --"}, "unknown optimizer"),
        ({"memory_budget": 0}, "invalid memory_budget"),
        ({"memory_budget": "a lot"}, "invalid memory_budget"),
        ({"options": {"patience": 3}}, "patience"),
        ({"options": "{"}, "invalid input syntax for type json"),
        ({"target": "b"}, "b"),
        ({"query": "SELECT"}, ""),
        ({"query": "DROP TABLE x"}, ""),
        ({"model": "two\nlines"}, "invalid model name"),
        ({"model": "a\0b"}, "NUL"),
        ({"model": "\ud800"}, "a text cannot be sent"),
    ],
)
def test_errors_of_the_server_are_raised(client: Client, arguments: dict[str, Any], message: str) -> None:
    given = {"model": MODEL, "query": QUERY, "target": TARGET} | arguments
    jobs = len(client.jobs())
    submits: list[Callable[..., object]] = [client.train, client.explain]
    for submit in submits:
        with pytest.raises(ServerError) as caught:
            submit(**given)
        assert message in caught.value.message
    assert len(client.jobs()) == jobs


def test_arguments_of_a_wrong_name_or_type(client: Client, trained: int) -> None:
    with pytest.raises(ArgumentError, match='explain has no argument "epoch"') as caught:
        client.explain(MODEL, QUERY, TARGET, epoch=3)
    assert caught.value.hint and "epochs" in caught.value.hint
    with pytest.raises(ArgumentError, match="batch_size is not a whole number"):
        client.train(MODEL, QUERY, TARGET, batch_size=2.5)  # type: ignore[arg-type]
    for number in ("1", 1.5, None):
        with pytest.raises(ArgumentError, match="job is not a whole number"):
            client.job(number)  # type: ignore[arg-type]
    for number in (0, -1, 2**63, 10**30):
        with pytest.raises(ServerError, match="there is no job"):
            client.job(number)


@pytest.mark.long
def test_evaluations_and_importances_are_tables(client: Client, trained: int) -> None:
    scores = client.evaluate(MODEL, QUERY)
    assert scores.loc["rows", "value"] == 400
    assert 0.5 < scores.loc["accuracy", "value"] <= 1
    assert set(scores.loc["confusion", "label"]) == {"yes", "no"}
    groups = client.evaluate(MODEL, QUERY, by="c", version=1)
    assert set(groups["group_value"]) == {f"c{number}" for number in range(5)}
    assert groups.loc["rows", "value"].sum() == 400
    features = client.importance(MODEL, QUERY, repeats=2, metric="accuracy", seed=1)
    assert set(features.index) == {"100%", "it's", "c"} and features["importance"].iloc[0] > 0
    assert list(features["importance"]) == sorted(features["importance"], reverse=True)


def test_explain_is_what_explain_training_prints(client: Client, trained: int) -> None:
    lines = client.explain(MODEL, QUERY, TARGET, epochs=3, batch_size=100, policy="none").splitlines()
    assert lines[0].startswith(f'Train "{MODEL}" (mlp) on cpu, policy none: 3 epochs of ')
    assert any(line.strip().startswith("Start") for line in lines)


def test_a_calibration_is_a_job(server: Any, client: Client) -> None:
    with pytest.raises(ServerError, match="permission denied"):
        client.calibrate()
    with connect(server.dsn()) as admin:
        job = admin.calibrate(seconds=60)
        assert admin.jobs().loc[job.number, "kind"] == "calibrate"
        assert job.cancel() is True
        assert job.wait(progress=False, timeout=60) == "cancelled"


# -- the connection ---------------------------------------------------------------------------------------------------


def test_a_closed_client_says_so(server: Any, trained: int) -> None:
    with connect(server.dsn(user="alice")) as client:
        job = client.job(trained)
    client.close()
    asks: list[Callable[[], object]] = [client.jobs, job.wait, job.report, job.plan]
    for ask in asks:
        with pytest.raises(ConnectionLost, match="the client is closed") as caught:
            ask()
        assert caught.value.hint and "Connect again" in caught.value.hint
    assert "the client is closed" in job._repr_html_()


def test_a_database_without_the_extension(server: Any) -> None:
    with pytest.raises(ServerError, match='database "template1" has no extension') as caught:
        connect(server.dsn("template1"))
    assert "hint: " in caught.value.__notes__[0]


@pytest.mark.long
def test_the_server_restarts_while_a_job_is_waited_for(fresh_cluster: Callable[..., Any], wait_until: Wait) -> None:
    cluster = fresh_cluster()
    with connect(cluster.dsn()) as client:
        client.register("m", MLP)
        job = client.train("m", ROWS, "y", epochs=FOREVER, options=LAST)

        def restart() -> None:
            with connect(cluster.dsn()) as other:
                wait_until(lambda: phase(other, job) == "training")
            cluster.restart()

        with ThreadPoolExecutor(1) as pool:
            restarted = pool.submit(restart)
            with pytest.raises(ConnectionLost, match="the connection to the server is lost: ") as caught:
                job.wait(timeout=90)
            restarted.result()
        assert "\n" not in caught.value.message and "Jobs continue" in str(caught.value.__notes__)
        with pytest.raises(ConnectionLost):
            client.jobs()
    with connect(cluster.dsn()) as client:
        answer = client.job(job.number)
        assert answer.state not in ("finished", "failed", "cancelled")
        answer.cancel()
        assert answer.wait(progress=False, timeout=60) == "cancelled"


def test_schedules_drift_and_evaluations(client: Client, trained: int) -> None:
    settings: dict[str, Any] = {"epochs": 3, "max_time": timedelta(hours=1)}
    assert client.schedule_training(MODEL, QUERY, TARGET, every="1 day", drift=0.3, **settings) > 0
    assert client.schedule_evaluation(MODEL, QUERY, timedelta(days=1), metric="accuracy") > 0
    schedules = client.schedules()
    assert schedules.loc[MODEL, "drift"] == 0.3 and schedules.loc[MODEL, "every"] == "1 day"
    assert client.unschedule_training(MODEL) and client.unschedule_evaluation(MODEL)
    assert not client.unschedule_training(MODEL) and not client.unschedule_evaluation(MODEL)
    assert client.schedules().empty and client.evaluations(MODEL).empty
    with pytest.raises(ServerError, match="drift is out of range"):
        client.schedule_training(MODEL, QUERY, TARGET, drift=-1)
    with pytest.raises(ArgumentError, match='schedule_training has no argument "epoch"'):
        client.schedule_training(MODEL, QUERY, TARGET, drift=1, epoch=1)
    with pytest.raises(ArgumentError, match="source"):
        client.schedule_training(MODEL, QUERY, TARGET, rows=1, source=1)  # type: ignore[arg-type]
    client.connection.execute("SELECT * FROM tensile.drift_alarms")
    found = client.drift()
    assert list(found.columns) == ["kind", "rows", "since", "psi", "ks", "threshold", "drifted"]
    assert client.drift("none").empty
