"""The example notebook: it runs against a server, and the committed one is the result of such a run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts.notebook import NOTEBOOK, SOURCE, cells, without_paths
from tests.repository import REPOSITORY
from tests.server.support import Connection, value


def text_of(lines: str | list[str]) -> str:
    """Return a text of a notebook's JSON, which may be split into lines."""
    return lines if isinstance(lines, str) else "".join(lines)


def shape(cell: dict[str, Any]) -> tuple[str, str, list[tuple[str, Any]]]:
    """Return the parts of a cell that are the same in each run: kind, source, and kind and types of the outputs."""
    outputs = [
        (output["output_type"], sorted(output["data"]) if "data" in output else output["name"])
        for output in cell.get("outputs", [])
    ]
    return cell["cell_type"], text_of(cell["source"]), outputs


def shown(notebook: dict[str, Any], part: str, kind: str) -> str:
    """Return the output of a type of the only cell whose source contains `part`, as one text."""
    (cell,) = (cell for cell in notebook["cells"] if cell["cell_type"] == "code" and part in text_of(cell["source"]))
    if kind == "stream":
        return "".join(text_of(output["text"]) for output in cell["outputs"] if output["output_type"] == "stream")
    return "".join(text_of(output["data"][kind]) for output in cell["outputs"] if kind in output.get("data", {}))


def check(notebook: dict[str, Any]) -> None:
    """Check that all cells ran in order without errors and warnings, and that outputs agree with the texts."""
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error" or output.get("name") == "stderr"]
    assert 'Train "handwriting" (cnn) on cpu' in shown(notebook, "print(client.explain", "stream")
    bar = shown(notebook, "job.wait()", "text/html")
    assert "100%" in bar and "finished" in bar
    assert "15 of 15" in shown(notebook, "client.job(job.number)", "text/html")
    for drawn in ("plt.subplots", "drawstyle"):
        assert len(shown(notebook, drawn, "image/png")) > 5000
    assert re.search("swap_out|recompute", shown(notebook, "job.plan()", "text/html"))
    assert shown(notebook, "job.latency()", "text/html").count("aten.") >= 5  # among the eight slowest
    assert "handwriting.html" in shown(notebook, "job.report(", "stream")
    assert len(json.dumps(notebook)) < 200_000  # no page is embedded
    share = re.search(r"([0-9.]+)% of the images", shown(notebook, "pd.crosstab", "stream"))
    assert share and float(share[1]) > 80
    table = shown(notebook, "pd.crosstab", "text/html")
    assert sum(map(int, re.findall(r"<td>(\d+)</td>", table))) == 297


def committed() -> dict[str, Any]:
    assert NOTEBOOK.exists(), "python -m scripts.notebook writes it"
    contents: dict[str, Any] = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    return contents


def test_the_source_is_cut_into_cells() -> None:
    text = "# of the file\n\n# %% [markdown]\n# # Title\n#\n# A text\n\n"
    text += "# %%\nx = 1\n\n\n# not %% a cell\ny = 2\n\n# %%\nz = 3\n"
    assert cells(text) == [
        ("markdown", "# Title\n\nA text"),
        ("code", "x = 1\n\n\n# not %% a cell\ny = 2"),
        ("code", "z = 3"),
    ]


def test_paths_of_the_machine_are_taken_out() -> None:
    environment = Path(sys.prefix).resolve()
    text = f'"{environment}/bin/python", {REPOSITORY}/docs, /tmp/x/.s.PGSQL.5432'
    assert without_paths(text, "/tmp/x") == '".venv/bin/python", ./docs, server/.s.PGSQL.5432'
    assert without_paths("localhost", "localhost") == "localhost"


def test_the_notebook_in_the_repository_is_a_run_of_its_source() -> None:
    notebook = committed()
    check(notebook)
    contents = [(cell["cell_type"], text_of(cell["source"])) for cell in notebook["cells"]]
    assert contents == cells(SOURCE.read_text(encoding="utf-8"))
    assert str(REPOSITORY) not in json.dumps(notebook)


@pytest.mark.long
@pytest.mark.timeout(400)
def test_the_notebook_runs_and_shows_what_the_one_in_the_repository_shows(
    cluster: Any, db: Connection, tmp_path: Path
) -> None:
    """Takes seconds: it starts a kernel and trains."""
    schema = value(db, "SELECT current_schema")
    server = {"PGHOST": str(cluster.folder), "PGPORT": str(cluster.port), "PGUSER": "postgres"}
    server |= {"PGDATABASE": "postgres", "PGOPTIONS": f"-c search_path={schema},public"}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PG")} | server
    output = tmp_path / "made.ipynb"
    done = subprocess.run(
        [sys.executable, "-m", "scripts.notebook", "--server", str(output)],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    notebook = json.loads(output.read_text(encoding="utf-8"))
    check(notebook)
    assert list(map(shape, notebook["cells"])) == list(map(shape, committed()["cells"]))


@pytest.mark.long
def test_a_failing_cell_is_reported_and_nothing_is_written(tmp_path: Path) -> None:
    """A kernel of Jupyter starts."""
    output = tmp_path / "made.ipynb"
    environment = os.environ | {"PGHOST": str(tmp_path), "PGPORT": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "scripts.notebook", "--server", str(output)],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "a cell has failed" in done.stderr and "cannot connect" in done.stderr and "hint: " in done.stderr
    assert not output.exists()
