"""The Python client without a server: calls, frames, the bar, reports and what errors say."""

from __future__ import annotations

import io
import subprocess
import sys
import traceback
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from pg_tensile.client import ArgumentError, Report, ServerError, TrainingFailed, connect
from pg_tensile.client.bar import Bar, left, note, share
from pg_tensile.client.calls import ARGUMENTS, call, converted
from pg_tensile.client.frames import FOOTPRINT, JOBS, LATENCY, METRICS, MODELS, PLAN, PREDICTIONS, RANKS, Shape, frame
from pg_tensile.client.job import events_of
from pg_tensile.client.training import SETTINGS
from pg_tensile.errors import noted
from pg_tensile.planning.plan.plan import Event, EventKind, Plan
from tests.repository import REPOSITORY

SHAPES = (FOOTPRINT, JOBS, LATENCY, METRICS, MODELS, PLAN, PREDICTIONS, RANKS)


def loaded_by(program: str) -> set[str]:
    """The modules that are loaded after a program."""
    command = [sys.executable, "-c", f"{program}\nimport sys\nprint(*sys.modules)"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_what_is_imported_is_what_is_used() -> None:
    assert not {"psycopg", "rich", "numpy"} & loaded_by("import pg_tensile.client")
    every = "import pg_tensile.client as c\nassert dir(c) == c.__all__\nfor name in c.__all__: getattr(c, name)"
    assert not {"torch", "pandas", "IPython", "matplotlib"} & loaded_by(every)
    with pytest.raises(AttributeError, match="no attribute 'conect'"):
        sys.modules["pg_tensile.client"].conect  # noqa: B018


# -- calls ------------------------------------------------------------------------------------------------------------


def test_arguments_are_named_typed_and_never_part_of_the_sql() -> None:
    hostile = "'; DROP TABLE models; -- %s %(model)s"
    required = {"model": hostile, "query": hostile, "target": '"'}
    optional = {"epochs": 3, "policy": None, "validation": 0, "options": {"a": hostile}, "memory_budget": 5000}
    composed, parameters = call('we"ird %s', "train_model", required, optional)
    text = composed.as_string(None)
    assert text.startswith('"we""ird %%s"."train_model"("model" => %(model)s::"pg_catalog"."text", ')
    assert text.endswith('"memory_budget" => %(memory_budget)s::"pg_catalog"."text")')
    assert '"epochs" => %(epochs)s::"pg_catalog"."int4"' in text
    assert "DROP" not in text and "policy" not in text
    assert parameters["model"] == hostile and parameters["memory_budget"] == "5000B"
    assert parameters["validation"] == 0.0 and parameters["options"].startswith('{"a": "')


def test_every_setting_of_a_job_has_a_type() -> None:
    assert set(SETTINGS) <= set(ARGUMENTS)


@pytest.mark.parametrize(
    ("name", "value", "parameter"),
    [
        ("epochs", np.int64(7), 7),
        ("seed", 2**62, 2**62),
        ("learning_rate", 1, 1.0),
        ("learning_rate", np.float32(0.5), 0.5),
        ("learning_rate", Decimal("0.25"), 0.25),
        ("memory_budget", "8GB", "8GB"),
        ("options", '{"clip": 1}', '{"clip": 1}'),
        ("options", {}, "{}"),
        ("replace", False, False),
    ],
)
def test_values_become_parameters(name: str, value: Any, parameter: Any) -> None:
    found = converted(name, value)
    assert found == parameter and type(found) is type(parameter)


def nested(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("epochs", 2.5),
        ("epochs", True),
        ("epochs", "3"),
        ("epochs", None),
        ("learning_rate", "0.1"),
        ("learning_rate", 10**400),
        ("validation", False),
        ("query", None),
        ("query", b"SELECT 1"),
        ("model", 7),
        ("replace", 1),
        ("memory_budget", 1.5),
        ("memory_budget", True),
        ("options", {"a": float("nan")}),
        ("options", {"a": object()}),
        ("options", {("a",): 1}),
        ("options", nested(100_000)),
    ],
)
def test_a_value_of_a_wrong_type_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ArgumentError, match=f"argument {name} is not ") as caught:
        call("public", "train_model", {name: value})
    error = caught.value
    assert error.hint and error.hint.startswith("Pass ") and error.detail
    printed = "".join(traceback.format_exception_only(error))
    assert f"hint: {error.hint}" in printed and "detail: " in printed


def test_a_hint_is_printed_once() -> None:
    error = noted(noted(ServerError("it is so", "Do this.")))
    assert error.__notes__ == ["hint: Do this."]
    assert not hasattr(noted(ServerError("it is so")), "__notes__")


def test_no_server_and_no_connection_string_are_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="cannot connect") as caught:
        connect(host=str(tmp_path), port=5432, dbname="postgres")
    assert "PGHOST" in str(caught.value.__notes__)
    with pytest.raises(ServerError, match="connection string") as caught:
        connect("no string at all")
    assert "postgresql://" in str(caught.value.__notes__)


# -- frames -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_an_empty_frame_has_its_columns_types_and_index(shape: Shape) -> None:
    made = frame(shape, [])
    assert len(made) == 0
    assert tuple(made.index.names) == shape.key
    columns = {name: kind for name, kind in shape.columns.items() if name not in shape.key}
    assert {name: str(kind) for name, kind in made.dtypes.items()} == columns


@pytest.mark.parametrize("shape", SHAPES)
def test_types_do_not_depend_on_what_is_missing(shape: Shape) -> None:
    values: Mapping[str, Any] = {
        "int64": 3, "Int64": None, "float64": None, "string": None, "datetime64[us, UTC]": None,
    }  # fmt: skip
    row = {name: values[kind] for name, kind in shape.columns.items()} | {"nobody asked for": 1}
    made = frame(shape, [row])
    assert dict(made.dtypes) == dict(frame(shape, []).dtypes)
    assert made.isna().sum().sum() == sum(
        kind != "int64" for name, kind in shape.columns.items() if name not in shape.key
    )


def test_metrics_can_be_drawn_and_times_are_utc() -> None:
    when = datetime(2026, 3, 29, 3, 30, tzinfo=timezone(timedelta(hours=2)))
    numbers = dict.fromkeys(("accuracy", "f1", "rmse", "r2", "roc_auc", "log_loss", "mae"))
    rows = [
        {"epoch": epoch, "split": split, "samples": 10, "loss": loss, "seconds": 0.5, "at": at} | numbers
        for epoch, split, loss, at in (
            (1, "training", 0.5, when),
            (1, "validation", 0.75, when.astimezone(UTC)),
            (2, "training", 0.25, when - timedelta(days=1)),
        )
    ]
    made = frame(METRICS, rows)
    losses = made["loss"].unstack()
    assert list(losses.columns) == ["training", "validation"] and list(losses.index) == [1, 2]
    assert losses.loc[1, "validation"] == 0.75 and np.isnan(losses.loc[2, "validation"])
    assert list(made["at"].dt.hour) == [1, 1, 1] and str(made["at"].dt.tz) == "UTC"


def test_events_of_a_plan_are_rows_of_the_view() -> None:
    plan = Plan.build(
        [Event(EventKind.SWAP_OUT, 1, 2, 5), Event(EventKind.SWAP_IN, 1, 7, 9), Event(EventKind.RECOMPUTE, 0, 8, 9, 1)]
    )
    row = {
        "generation": 4,
        "events": plan.rows.tobytes(),
        "plan_order": b"",
        "tensors": {"1": ["convolutions.0", "activation"]},
        "operators": {"2": "aten.relu.default", "7": "aten.mm.default"},
    }
    made = frame(PLAN, events_of(row))
    assert list(made["event"]) == ["swap_out", "swap_in", "recompute"]
    assert list(made["trigger_operator"]) == [2, 7, 8] and list(made["version"]) == [0, 0, 1]
    assert list(made["tensor_name"])[:2] == ["convolutions.0"] * 2 and made["tensor_name"].isna().sum() == 1
    assert made.loc[0, "trigger_name"] == "aten.relu.default" and set(made["generation"]) == {4}
    assert not events_of(row | {"events": b"", "tensors": None, "operators": None})
    ordered = Plan.build(plan.events, order=[0, 1, 3, 4, 5, 2, 6, 7, 9, 8])
    made = frame(PLAN, events_of(row | {"plan_order": ordered.order_bytes}))
    assert list(made["trigger_operator"]) == [3, 7, 9] and list(made["deadline_operator"]) == [2, 8, 8]
    assert made.loc[1, "trigger_name"] == "aten.mm.default"


# -- the bar ----------------------------------------------------------------------------------------------------------


def look(**given: Any) -> dict[str, Any]:
    """A row of tensile.progress, of a job in its second epoch of ten."""
    usual = {"state": "running", "reason": None, "phase": "training", "epoch": 2, "epochs": 10, "step": 5, "steps": 20}
    return usual | {"loss": 0.123456, "samples_per_s": 5000.4, "time_left_s": None, "least_time_left_s": None} | given


@pytest.mark.parametrize(
    ("row", "done", "told"),
    [
        (look(), 0.125, "training, epoch 2 of 10, loss 0.1235, step 5 of 20, 5,000 rows/s"),
        (look(phase="validating", step=20), 0.2, "validating, epoch 2 of 10, loss 0.1235, step 20 of 20, 5,000 rows/s"),
        (look(epoch=10, step=20), 0.99, "training, epoch 10 of 10, loss 0.1235, step 20 of 20, 5,000 rows/s"),
        (look(state="finished", phase=None, epoch=None, step=None, steps=None), 1.0, "finished"),
        (look(state="failed", phase=None), 0.125, "failed"),
        (
            look(state="waiting", reason="needs 8 MB", phase="waiting", epoch=None, step=None, steps=None),
            0.0,
            "waiting: needs 8 MB",
        ),
        (look(state="interrupted", reason="the server stopped", phase=None), 0.125, "interrupted: the server stopped"),
        (look(state="queued", phase=None, epoch=None, step=None, steps=None), 0.0, "queued"),
        (look(phase=None, epoch=None, step=None, steps=None), 0.0, "running"),
        (
            look(phase="loading", epoch=None, step=None, steps=None, loss=None, samples_per_s=None),
            0.0,
            "loading",
        ),
        (
            look(phase="calibrating", epoch=None, epochs=1, step=30, steps=120, loss=None, samples_per_s=None),
            0.25,
            "calibrating, step 30 of 120",
        ),
    ],
)
def test_the_bar_says_how_far_a_job_is(row: dict[str, Any], done: float, told: str) -> None:
    assert share(row) == pytest.approx(done)
    assert note(row) == told


@pytest.mark.parametrize(
    ("most", "least", "told"), [(None, None, ""), (44.2, 44.2, "44s left"), (270.0, 9.0, "at most 4:30 left")]
)
def test_the_bar_says_how_long_a_job_still_takes(most: float | None, least: float | None, told: str) -> None:
    row = look(time_left_s=most, least_time_left_s=least)
    assert left(row) == told
    written = io.StringIO()
    with Bar("job 5", console=Console(file=written, width=160)) as bar:
        bar.show(row)
    assert told in written.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_the_bar_ends_with_the_last_state(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    monkeypatch.setenv("TERM", "xterm")
    written = io.StringIO()
    with Bar("job 5 [red]odd[/red]", console=Console(file=written, width=160, force_terminal=terminal)) as bar:
        bar.show(look())
        bar.show(look(state="finished"))
    shown = written.getvalue()
    assert "job 5 [red]odd[/red]" in shown and "100%" in shown and "finished" in shown
    assert ("\x1b[" in shown) == terminal


def test_a_narrow_terminal_cuts_the_texts_and_nothing_else() -> None:
    written = io.StringIO()
    with Bar("job 5 \x1b[31m" + "long " * 20, console=Console(file=written, width=80)) as bar:
        bar.show(look(state="waiting", reason="it needs\nmore " * 9))
    (line,) = written.getvalue().splitlines()
    assert len(line) == 80 and "\x1b" not in line
    assert "job 5 " in line and "waiting: it needs more" in line and line.count("…") == 2
    assert " 12% " in line


def test_no_bar_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with Bar("job 5", False) as bar:
        bar.show(look())
    written = capsys.readouterr()
    assert not written.out and not written.err


# -- reports and failures ---------------------------------------------------------------------------------------------


class Frames(HTMLParser):
    """The attributes of the iframes of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[dict[str, str | None]] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag == "iframe":
            self.found.append(dict(attributes))


def test_a_report_is_shown_in_a_frame_of_its_own(tmp_path: Path) -> None:
    page = """<!doctype html><p title="a 'quoted' one">&lt;b&gt; </iframe><script>alert(1)</script>é</p>"""
    report = Report(5, page)
    (found,) = Frames(report._repr_html_()).found
    assert found["srcdoc"] == page and found["sandbox"] == "allow-scripts"
    assert "job 5" in repr(report) and page not in repr(report)
    report.save(tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == page
    with pytest.raises(ArgumentError, match="cannot be written: No such file"):
        report.save(tmp_path / "nowhere" / "page.html")


def test_a_failure_is_told_as_the_job_tells_it() -> None:
    row = {"error": "the loss became nan", "hint": "Use less.", "detail": None, "sqlstate": "22003", "traceback": "…"}
    error = noted(TrainingFailed(5, row))
    assert (error.message, error.hint, error.detail) == ("the loss became nan", "Use less.", None)
    assert (error.job, error.sqlstate, error.traceback) == (5, "22003", "…")
    assert "hint: Use less." in "".join(traceback.format_exception_only(error))
