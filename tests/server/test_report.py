"""`pg-tensile report` and `trace` of real jobs: numbers are those of SQL, and errors are reported."""

from __future__ import annotations

import fcntl
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from psycopg.rows import dict_row

from pg_tensile.tools.cli.main import main
from tests.browser import Browser
from tests.perfetto import COMPLAINTS, LANES, Perfetto
from tests.server.pressure import Lab
from tests.server.support import FOREVER, ROWS, finish, python_model, submit, value
from tests.unit import trace_format
from tests.unit.records import facts_in
from tests.unit.trace_format import of

HOSTILE = "</script><b id=evil>"


@pytest.fixture(scope="module")
def running(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Path]:
    """A cancelled job that had a plan with swaps or recompute events, and its report while it ran."""
    vanilla, least = lab.sizes["mlp"]
    budget = f"{(vanilla + least) // 2 // 1024}kB"
    job = lab.submit("mlp", epochs=FOREVER, memory_budget=budget, validation=0.2)
    lab.await_training(job)
    measured = "SELECT count(*) > 0 FROM tensile.latency WHERE job = %s AND measured_us > 0"
    lab.wait_until(lambda: value(lab.conn, measured, job), what=lab.told)
    metrics = "SELECT count(*) > 3 FROM tensile.epoch_metrics WHERE job = %s"
    lab.wait_until(lambda: value(lab.conn, metrics, job), what=lab.told)
    path = tmp_path_factory.mktemp("running") / "report.html"
    assert run(lab, "report", job, path) == 0
    lab.cancel(job)
    return job, path


@pytest.fixture(scope="module")
def planned(running: tuple[int, Path]) -> int:
    return running[0]


@pytest.fixture(scope="module")
def page(lab: Lab, planned: int, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of the job that had a plan."""
    path = tmp_path_factory.mktemp("page") / "report.html"
    assert run(lab, "report", planned, path) == 0
    return path


@pytest.fixture(scope="module")
def facts(page: Path) -> dict[str, Any]:
    return facts_in(page.read_text("utf-8"))


def run(
    lab: Lab,
    command: str,
    job: object,
    path: object,
    *flags: str,
    user: str = "postgres",
    host: object = None,
) -> int:
    """Run the command and return its exit status."""
    where = ("-h", str(host or lab.cluster.folder), "-p", str(lab.cluster.port), "-d", "postgres", "-U", user)
    return main([command, str(job), *where, *flags, "-o", str(path)])


def rows(lab: Lab, sql: str, *parameters: object) -> list[dict[str, Any]]:
    with lab.conn.cursor(row_factory=dict_row) as cursor:
        return cursor.execute(sql, parameters).fetchall()


def reported(lab: Lab, job: int, path: Path) -> dict[str, Any]:
    assert run(lab, "report", job, path) == 0
    return facts_in(path.read_text("utf-8"))


# -- numbers ----------------------------------------------------------------------------------------------------------


def test_the_numbers_of_the_plan_are_those_of_sql(lab: Lab, planned: int, facts: dict[str, Any]) -> None:
    (published,) = rows(lab, "SELECT * FROM tensile.plans WHERE job = %s", planned)
    summary = facts["summary"]
    names = (
        *("generation", "planned_bytes", "granted_bytes", "host_bytes", "iteration_us", "vanilla_us", "stall_us"),
        *("out_bytes", "in_bytes", "recomputes"),
    )
    assert {name: summary[name] for name in names} == {name: published[name] for name in names}
    footprint = rows(lab, "SELECT * FROM tensile.footprint WHERE job = %s ORDER BY sequence", planned)
    for name in ("operator", "planned_bytes", "vanilla_bytes"):
        assert facts["footprint"][name] == [row[name] for row in footprint]
    assert summary["vanilla_bytes"] == max(row["vanilla_bytes"] for row in footprint)
    assert summary["planned_bytes"] == max(row["planned_bytes"] for row in footprint) < summary["vanilla_bytes"]
    shown = facts["iteration"]
    assert (shown["out"]["bytes"], shown["in"]["bytes"]) == (published["out_bytes"], published["in_bytes"])
    assert shown["repeated_steps"] == published["recomputes"]
    assert summary["out_bytes"] + summary["recomputes"] > 0  # the plan is not empty


def test_the_tensors_are_those_of_sql(lab: Lab, planned: int, facts: dict[str, Any]) -> None:
    tensors = {row["tensor"]: row for row in rows(lab, "SELECT * FROM tensile.tensors WHERE job = %s", planned)}
    assert facts["tensors"]
    for row in facts["tensors"]:
        tensor = tensors[row["tensor"]]
        for name in ("name", "kind", "dtype", "shape", "bytes"):
            assert row[name] == tensor[name], name
    assert sum(row["bytes"] * row["out"] for row in facts["tensors"]) == facts["summary"]["out_bytes"]
    assert sum(row["bytes"] * row["in"] for row in facts["tensors"]) == facts["summary"]["in_bytes"]


def test_the_jobs_life_is_that_of_sql(lab: Lab, planned: int, facts: dict[str, Any]) -> None:
    latency = rows(lab, "SELECT * FROM tensile.latency WHERE job = %s ORDER BY operator", planned)
    for name in ("predicted_us", "measured_us", "average_us"):
        assert facts["latency"][name] == [row[name] for row in latency]
    total = value(lab.conn, "SELECT total_us FROM tensile_internal.operator_latencies WHERE job = %s", planned)
    assert facts["latency"]["total_us"] == pytest.approx(total, rel=1e-4)
    assert facts["latency"]["samples"] == value(
        lab.conn, "SELECT samples FROM tensile_internal.operator_latencies WHERE job = %s", planned
    )
    errors = "percentile_cont(0.5) WITHIN GROUP (ORDER BY relative_error) FROM tensile.latency WHERE job = %s"
    assert facts["latency"]["median_error"] == pytest.approx(value(lab.conn, f"SELECT {errors}", planned))
    metrics = rows(lab, "SELECT * FROM tensile.epoch_metrics WHERE job = %s ORDER BY epoch, split", planned)
    last = [row for row in metrics if row["epoch"] == metrics[-1]["epoch"]]
    for row, fact in zip(last, facts["metrics"][-len(last) :], strict=True):
        assert {name: fact[name] for name in ("epoch", "split", "loss", "accuracy", "samples")} == {
            name: row[name] for name in ("epoch", "split", "loss", "accuracy", "samples")
        }
    assert facts["epochs"] == len({row["epoch"] for row in metrics})
    log = rows(lab, "SELECT * FROM tensile.scheduler_log WHERE job = %s ORDER BY id", planned)
    assert [(line["id"], line["event"], line["generation"], line["reason"]) for line in facts["log"]] == [
        (row["id"], row["event"], row["generation"], row["reason"]) for row in log
    ]
    for line, row in zip(facts["log"], log, strict=True):
        if row["event"] == "planned":
            names = ("planned_bytes", "granted_bytes", "iteration_us", "link_share", "events")
            assert {name: line[name] for name in names} == {name: row["details"][name] for name in names}


def test_the_job_is_that_of_sql(lab: Lab, planned: int, facts: dict[str, Any]) -> None:
    (job,) = rows(lab, "SELECT * FROM tensile.jobs WHERE job = %s", planned)
    for name in ("model", "query", "epochs", "batch_size", "learning_rate", "state", "memory_budget", "options"):
        assert facts["job"][name] == job[name], name
    assert facts["job"]["architecture"]["type"] == "mlp"
    assert facts["versions"]["PostgreSQL"] == value(lab.conn, "SHOW server_version")
    assert facts["settings"]["pg_tensile.threads"] == value(lab.conn, "SHOW pg_tensile.threads")
    (profile,) = rows(lab, "SELECT profile FROM tensile.device_profiles WHERE device = %s", facts["job"]["device"])
    assert facts["profile"]["memory_bytes"] == profile["profile"]["memory_bytes"]


def test_a_job_that_runs_shows_live_numbers(running: tuple[int, Path]) -> None:
    facts = facts_in(running[1].read_text("utf-8"))
    assert facts["job"]["state"] == "running" and facts["progress"]["phase"] is not None
    assert facts["progress"]["device_peak_bytes"] > 0


def test_a_browser_shows_the_numbers_of_sql(
    lab: Lab, planned: int, page: Path, facts: dict[str, Any], tmp_path: Path
) -> None:
    browser = Browser(tmp_path)
    try:
        tab = browser.page()
        tab.open(page, "document.documentElement.dataset.charts === 'drawn'")
        shown = dict(
            tab.evaluate("[...document.querySelectorAll('[data-fact]')].map((e) => [e.dataset.fact, e.dataset.value])")
        )
        assert tab.complaints == []
        assert tab.evaluate("document.querySelectorAll('#plans tbody tr').length") == len(facts["log"])
        tensors = tab.evaluate(
            "[...document.querySelectorAll('#tensors tbody tr')].map((row) => Number(row.cells[8].dataset.value))"
        )
    finally:
        browser.close()
    (published,) = rows(lab, "SELECT * FROM tensile.plans WHERE job = %s", planned)
    for name in ("planned_bytes", "granted_bytes", "iteration_us", "stall_us", "out_bytes", "in_bytes", "host_bytes"):
        assert json.loads(shown[f"summary.{name}"]) == published[name], name
    assert shown["job.state"] == "cancelled"
    assert sum(tensors) == published["out_bytes"] + published["in_bytes"]


# -- evaluation -------------------------------------------------------------------------------------------------------

CLASSIFIED, ESTIMATED = "judged", "estimated"
ESTIMATED_ROWS = """
    SELECT i % 40 AS km, 'c' || i % 3 AS courier, i % 40 * 3.0 + i % 7 AS minutes FROM generate_series(1, 900) i
"""
QUERIES = {CLASSIFIED: ROWS, ESTIMATED: ESTIMATED_ROWS}


@pytest.fixture(scope="module")
def versions(lab: Lab) -> dict[str, int]:
    """The job that has trained a version of a classification."""
    job = submit(lab.conn, CLASSIFIED, {"type": "mlp", "hidden": [8]})
    finish(lab.conn, job)
    return {CLASSIFIED: job}


@pytest.fixture(scope="module")
def both_versions(lab: Lab, versions: dict[str, int]) -> dict[str, int]:
    """Jobs that have trained a version each of a classification and of a regression."""
    job = submit(lab.conn, ESTIMATED, {"type": "mlp", "hidden": [8]}, query=ESTIMATED_ROWS, target="minutes")
    finish(lab.conn, job)
    return versions | {ESTIMATED: job}


def evaluated(lab: Lab, model: str, job: int, path: Path) -> dict[str, Any]:
    """Return the evaluation in the report of a job, on the rows that its model was trained with."""
    assert run(lab, "report", job, path, "--evaluate", QUERIES[model]) == 0
    evaluation: dict[str, Any] = facts_in(path.read_text("utf-8"))["evaluation"]
    return evaluation


@pytest.mark.long
@pytest.mark.parametrize("model", [CLASSIFIED, ESTIMATED])
def test_the_evaluation_is_that_of_sql(lab: Lab, both_versions: dict[str, int], model: str, tmp_path: Path) -> None:
    """Long: two evaluations and two importances, each in a process of its own."""
    facts = evaluated(lab, model, both_versions[model], tmp_path / "report.html")
    scores = rows(lab, "SELECT * FROM evaluate_model(%s, %s)", model, QUERIES[model])
    assert facts["version"] == 1 and facts["query"] == QUERIES[model]
    single = [row for row in scores if row["quantile"] is None and row["metric"] != "confusion"]
    assert facts["metrics"] == {row["metric"]: row["value"] for row in single}
    assert facts["baselines"] == {row["metric"]: row["baseline"] for row in single}

    def by_quantile(metric: str) -> list[tuple[float, float]]:
        return [(row["quantile"], row["value"]) for row in scores if row["metric"] == metric]

    for name in ("probability", "frequency", "rows"):
        assert [(row["quantile"], row[name]) for row in facts["calibration"]] == by_quantile(f"calibration_{name}")
    assert [(row["quantile"], row["value"]) for row in facts["residuals"]] == by_quantile("residual_quantile")
    assert bool(facts["calibration"]) == (model == CLASSIFIED) and bool(facts["residuals"]) == (model == ESTIMATED)
    importances = rows(lab, "SELECT * FROM feature_importance(%s, %s)", model, QUERIES[model])
    assert facts["importance_metric"] == importances[0]["metric_used"]
    for fact, row in zip(facts["importance"], importances, strict=True):
        assert fact == {name: row[name] for name in ("feature", "importance", "deviation")}


@pytest.mark.long
def test_the_version_of_the_job_is_evaluated_not_the_deployed_one(
    lab: Lab, versions: dict[str, int], tmp_path: Path
) -> None:
    later = submit(lab.conn, CLASSIFIED, options={"deploy": False}, epochs=9, learning_rate=0.05)
    finish(lab.conn, later)
    facts = evaluated(lab, CLASSIFIED, later, tmp_path / "report.html")
    score = "SELECT value FROM evaluate_model(%s, %s, version => %s) WHERE metric = 'log_loss'"
    first, second = (value(lab.conn, score, CLASSIFIED, ROWS, version) for version in (1, 2))
    assert facts["version"] == 2 and facts["metrics"]["log_loss"] == second != first
    assert facts["importance"] is None


def test_without_rows_the_option_is_named(
    lab: Lab, versions: dict[str, int], planned: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reported(lab, versions[CLASSIFIED], tmp_path / "report.html")["evaluation"] is None
    assert "--evaluate QUERY" in capsys.readouterr().out
    assert reported(lab, planned, tmp_path / "report.html")["evaluation"] is None  # it has no version
    assert "--evaluate" not in capsys.readouterr().out
    assert run(lab, "report", versions[CLASSIFIED], "-") == 0
    assert capsys.readouterr().out.endswith("</html>\n")


@pytest.mark.parametrize(
    ("query", "why"),
    [
        ("SELECT nothing FROM nowhere", 'relation "nowhere" does not exist'),
        ("SELECT", 'feature "a" is missing'),
        (f"SELECT a, b, c FROM ({ROWS}) r", 'target "y" is missing'),
        (f"SELECT a, c, y FROM ({ROWS}) r", 'feature "b" is missing'),
        (f"SELECT * FROM ({ROWS}) r WHERE false", "no rows"),
        ("CREATE TABLE bad (i int)", "query"),
    ],
)
def test_rows_that_cannot_be_evaluated_are_refused(
    lab: Lab, versions: dict[str, int], query: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = run(lab, "report", versions[CLASSIFIED], tmp_path / "file", "--evaluate", query)
    said = capsys.readouterr()
    assert status == 1 and said.out == "" and "Traceback" not in said.err
    assert said.err.startswith("pg-tensile: ") and why in said.err
    assert not list(tmp_path.iterdir())


def test_a_job_without_a_version_is_not_evaluated(
    lab: Lab, planned: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(lab, capsys, "report", planned, tmp_path / "file", "--evaluate", ROWS)
    assert f"job {planned} is cancelled and has made no version to evaluate" in said
    assert not list(tmp_path.iterdir())


def test_a_model_that_was_dropped_is_not_evaluated(
    lab: Lab, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = submit(lab.conn, "dropped", {"type": "mlp", "hidden": [4]})
    lab.conn.execute("SELECT cancel_job(%s)", (job,))
    lab.wait_until(lambda: value(lab.conn, "SELECT ended_at IS NOT NULL FROM tensile.jobs WHERE job = %s", job))
    lab.conn.execute("SELECT drop_model('dropped')")
    assert f"job {job} has no model" in refused(lab, capsys, "report", job, tmp_path / "file", "--evaluate", ROWS)
    assert reported(lab, job, tmp_path / "report.html")["evaluation"] is None


@pytest.mark.long
def test_an_evaluation_needs_the_right_to_predict(
    lab: Lab, versions: dict[str, int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lab.conn.execute("DROP ROLE IF EXISTS onlooker")
    lab.conn.execute("CREATE ROLE onlooker LOGIN IN ROLE tensile_user, pg_read_all_stats")
    arguments = (versions[CLASSIFIED], tmp_path / "file", "--evaluate", ROWS)
    assert "permission denied" in refused(lab, capsys, "report", *arguments, user="onlooker")
    lab.conn.execute("SELECT grant_model(%s, 'onlooker')", (CLASSIFIED,))
    assert run(lab, "report", *arguments, user="onlooker") == 0
    lab.conn.execute("SELECT revoke_model(%s, 'onlooker')", (CLASSIFIED,))


# -- trace events -----------------------------------------------------------------------------------------------------


def test_the_trace_events_add_up_to_the_numbers_of_sql(lab: Lab, planned: int, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    assert run(lab, "trace", planned, path) == 0
    document = trace_format.read(path.read_text("utf-8"))
    (published,) = rows(lab, "SELECT * FROM tensile.plans WHERE job = %s", planned)
    footprint = rows(lab, "SELECT * FROM tensile.footprint WHERE job = %s ORDER BY sequence", planned)
    assert [event["args"]["bytes"] for event in of(document, "C")] == [row["planned_bytes"] for row in footprint]
    computes = of(document, "X", "compute")
    assert [event["args"]["operator"] for event in computes] == [row["operator"] for row in footprint]
    assert [event["args"]["target"] for event in computes] == [row["target"] for row in footprint]
    for lane, name in (("link out", "out_bytes"), ("link in", "in_bytes")):
        assert sum(event["args"]["bytes"] for event in of(document, "X", lane)) == published[name]
    executed = value(
        lab.conn,
        "SELECT sum(l.average_us::float8) FROM tensile.footprint f JOIN tensile.latency l USING (job, operator)"
        " WHERE f.job = %s",
        planned,
    )
    waits = len(of(document, "X", "swap executor"))
    assert sum(event["dur"] for event in computes) == pytest.approx(executed, rel=1e-4, abs=0.25 * (waits + 1))
    assert document["otherData"]["generation"] == published["generation"]
    assert document["otherData"]["versions"]["PostgreSQL"] == value(lab.conn, "SHOW server_version")


@pytest.mark.long
def test_perfetto_shows_the_numbers_of_sql(lab: Lab, planned: int, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    assert run(lab, "trace", planned, path) == 0
    browser = Browser(tmp_path)
    try:
        with Perfetto(browser) as perfetto:
            perfetto.read(path.read_text("utf-8"))
            assert perfetto.query(COMPLAINTS) == []
            lanes = {row["lane"]: row for row in perfetto.query(LANES)}
            (memory,) = perfetto.query("SELECT count(*) AS steps, sum(value) AS total, max(value) AS most FROM counter")
    finally:
        browser.close()
    (published,) = rows(lab, "SELECT out_bytes, in_bytes FROM tensile.plans WHERE job = %s", planned)
    (footprint,) = rows(
        lab,
        "SELECT count(*) AS steps, sum(planned_bytes)::int8 AS total, max(planned_bytes) AS most FROM tensile.footprint"
        " WHERE job = %s",
        planned,
    )
    assert memory == footprint and lanes["compute"]["slices"] == footprint["steps"]
    moved = {way: (lanes.get(f"link {way}") or {"bytes": 0})["bytes"] for way in ("out", "in")}
    assert moved == {"out": published["out_bytes"], "in": published["in_bytes"]}


def test_a_trace_can_be_written_to_stdout(lab: Lab, planned: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(lab, "trace", planned, "-") == 0
    assert trace_format.read(capsys.readouterr().out)["otherData"]["job"] == planned


def test_a_plan_is_listed_with_the_events_that_sql_has(
    lab: Lab, planned: int, capsys: pytest.CaptureFixture[str]
) -> None:
    events = value(lab.conn, "SELECT length(events) / 32 FROM tensile.plans WHERE job = %s", planned)
    operators = value(lab.conn, "SELECT count(*) FROM tensile.operators WHERE job = %s", planned)
    assert events > 0
    where = ("-h", str(lab.cluster.folder), "-p", str(lab.cluster.port), "-d", "postgres", "-U", "postgres")
    for flags in ((), ("--all",)):
        assert main(["plan", str(planned), *flags, *where]) == 0
        lines = capsys.readouterr().out.splitlines()
        event_lines = [line for line in lines if re.match(r" {10}(swap out|swap in|recompute|release) ", line)]
        assert len(event_lines) == events
        if flags:
            assert len(lines) == 1 + operators + events


def test_an_eager_job_has_no_plan_to_list(lab: Lab, eager: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(lab, "plan", eager, "-") == 1
    assert f"job {eager} is executed eagerly" in capsys.readouterr().err


# -- jobs without a plan ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def eager(lab: Lab) -> int:
    return int(value(lab.conn, "SELECT min(job) FROM tensile.jobs WHERE policy = 'none'"))


def test_an_eager_job_has_a_report_and_no_trace(
    lab: Lab, eager: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = reported(lab, eager, tmp_path / "report.html")
    assert facts["iteration"] is None and facts["metrics"]
    assert "executed eagerly" in (tmp_path / "report.html").read_text("utf-8")
    capsys.readouterr()
    assert run(lab, "trace", eager, tmp_path / "trace.json") == 1
    said = capsys.readouterr().err
    assert f"job {eager} is executed eagerly" in said and "hint: Train with policy => 'joint'" in said
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_a_failed_job_shows_its_error_as_text(lab: Lab, tmp_path: Path) -> None:
    model = python_model(on_forward=f'raise ValueError("{HOSTILE}")')
    job = submit(lab.conn, "fails", model)
    lab.wait_until(lambda: value(lab.conn, "SELECT state FROM tensile.jobs WHERE job = %s", job) == "failed")
    facts = reported(lab, job, tmp_path / "report.html")
    assert HOSTILE in f"{facts['job']['error']} {facts['job']['detail']} {facts['job']['traceback']}"
    text = (tmp_path / "report.html").read_text("utf-8")
    assert HOSTILE not in text and "&lt;b id=evil&gt;" in text
    assert "What went wrong" in text


# -- errors -----------------------------------------------------------------------------------------------------------


def refused(lab: Lab, capsys: pytest.CaptureFixture[str], command: str, *arguments: Any, **where: Any) -> str:
    """Run the command, which has to fail with one line and a hint; return its message."""
    status = run(lab, command, *arguments, **where)
    said = capsys.readouterr()
    assert status in (1, 2) and said.out == ""
    lines = said.err.splitlines()
    assert lines[0].startswith("pg-tensile: ") and any(line.startswith("hint: ") for line in lines), said.err
    assert "Traceback" not in said.err
    return said.err


@pytest.mark.parametrize("command", ["report", "trace"])
def test_without_a_server(
    lab: Lab, planned: int, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "cannot connect" in refused(lab, capsys, command, planned, tmp_path / "file", host=tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["report", "trace"])
def test_an_unknown_job_is_refused(lab: Lab, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "there is no job 987654" in refused(lab, capsys, command, 987654, tmp_path / "file")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["report", "trace"])
def test_a_job_of_another_role_is_refused(
    lab: Lab, planned: int, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lab.conn.execute("DROP ROLE IF EXISTS oscar")
    lab.conn.execute("CREATE ROLE oscar LOGIN IN ROLE tensile_user")
    said = refused(lab, capsys, command, planned, tmp_path / "file", user="oscar")
    assert f"there is no job {planned}, or it belongs to another role" in said
    assert not list(tmp_path.iterdir())
    lab.conn.execute("GRANT pg_read_all_stats TO oscar")
    assert run(lab, command, planned, tmp_path / "file", user="oscar") == 0


@pytest.mark.parametrize("command", ["report", "trace"])
def test_a_file_that_cannot_be_written(
    lab: Lab, planned: int, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "missing" / "file", tmp_path / "folder"):
        said = refused(lab, capsys, command, planned, path)
        assert f"{path} cannot be written" in said and "-o" in said
        assert f"{path} cannot be written" in refused(
            lab, capsys, command, 1 << 40, path
        )  # checked before anything else
    assert [path.name for path in tmp_path.rglob("*")] == ["folder"]


def test_a_trace_is_written_through_pipes_and_links(lab: Lab, planned: int, tmp_path: Path) -> None:
    pipe, link, file = (tmp_path / name for name in ("pipe", "link", "file"))
    os.mkfifo(pipe)
    link.symlink_to(file)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, 1 << 20)  # room for the whole trace: nothing reads meanwhile
        assert run(lab, "trace", planned, pipe) == 0
        assert run(lab, "trace", planned, link) == 0
        assert os.read(reader, 1 << 20).decode().startswith('{"traceEvents":[')
    finally:
        os.close(reader)
    assert pipe.is_fifo() and link.is_symlink()
    assert trace_format.read(file.read_text("utf-8"))["otherData"]["job"] == planned


def test_a_job_id_that_is_no_number(lab: Lab, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert '"late" is not the number of a job' in refused(lab, capsys, "report", "late", tmp_path / "file")
