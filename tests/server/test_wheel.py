"""The Python client as pip installs it: in an empty environment, what it brings along, and all of it against a server.

The commands that docs/client.md prints are those that run. Long: pip installs packages into four environments.
"""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from pg_tensile import __version__
from tests.documents import blocks
from tests.repository import REPOSITORY

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

CLIENT = {
    *("pg-tensile", "psycopg", "psycopg-binary", "rich", "sqlglot"),
    *("markdown-it-py", "mdurl", "pygments", "typing-extensions"),
}
WHEEL = f"pg_tensile-{__version__}-py3-none-any.whl"
SDIST = f"pg_tensile-{__version__}.tar.gz"
MODEL = """
    CREATE MODEL late OPTIONS(model_type = 'LOGISTIC_REG', input_label_cols = ['late'], max_iterations = 3)
    AS SELECT x, word, late FROM departures
"""


class Environment(NamedTuple):
    """A virtual environment without pip, and the variables with which its programs run."""

    folder: Path
    variables: dict[str, str]

    def install(self, *arguments: str, folder: Path | None = None) -> None:
        self.pip("install", "--quiet", "--no-compile", *arguments, folder=folder)

    def pip(self, *arguments: str, folder: Path | None = None) -> str:
        command = [sys.executable, "-m", "pip", "--python", str(self.folder / "bin" / "python"), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def packages(self) -> set[str]:
        listed = json.loads(self.pip("list", "--format=json", "--disable-pip-version-check"))
        return {re.sub(r"[-_.]+", "-", package["name"]).lower() for package in listed}

    def modules(self) -> set[str]:
        (packages,) = (self.folder / "lib").glob("python3*/site-packages")
        found = (
            path.relative_to(packages) for top in ("pg_tensile", "pyworker") for path in packages.glob(f"{top}/**/*")
        )
        return {str(path) for path in found if path.suffix not in ("", ".pyc")}

    def run(self, *command: str, status: int = 0, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment in its folder."""
        program = [str(self.folder / "bin" / command[0]), *command[1:]]
        done = subprocess.run(program, capture_output=True, text=True, cwd=self.folder, env=self.variables, input=stdin)
        assert done.returncode == status and "Traceback" not in done.stderr, done.stdout + done.stderr
        return done


@pytest.fixture(scope="module")
def server(new_cluster: Any) -> Iterator[dict[str, str]]:
    """The variables that name a server with a table; nothing else of this process's environment but the locale."""
    cluster = new_cluster()
    try:
        with cluster.connect() as conn:
            conn.execute(
                "CREATE TABLE departures AS SELECT sin(i) AS x, 'word ' || i % 3 AS word,"
                " CASE WHEN sin(i) > 0 THEN 'yes' ELSE 'no' END AS late FROM generate_series(1, 400) i"
            )
        where = {"PGHOST": str(cluster.folder), "PGPORT": str(cluster.port), "PGUSER": "postgres"}
        yield where | {"PGDATABASE": "postgres", "LANG": "C.UTF-8", "PATH": os.defpath, "HOME": str(cluster.folder)}
    finally:
        cluster.end()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the wheel and the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    done = subprocess.run([REPOSITORY / "scripts" / "wheel.sh", folder], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [str(folder / name) for name in (SDIST, WHEEL)]
    return folder


def environment(folder: Path, variables: dict[str, str]) -> Environment:
    subprocess.run(["/usr/bin/python3", "-m", "venv", "--without-pip", folder], check=True)
    return Environment(folder, variables)


@pytest.fixture(scope="module")
def client(files: Path, server: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment into which the wheel was installed without extras."""
    made = environment(tmp_path_factory.mktemp("client"), server)
    made.install(str(files / WHEEL))
    return made


def test_the_client_brings_no_pytorch(client: Environment) -> None:
    assert CLIENT - {"typing-extensions"} <= client.packages() <= CLIENT
    assert client.run("pg-tensile", "--version").stdout == f"pg-tensile {__version__}\n"
    assert "top" in client.run("pg-tensile", "--help").stdout


def test_the_sdist_has_what_the_wheel_has(
    client: Environment, files: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = environment(tmp_path_factory.mktemp("sdist"), client.variables)
    other.install(str(files / SDIST))
    assert other.packages() == client.packages() and other.modules() == client.modules()
    data = {"pg_tensile/rules.json", "pg_tensile/py.typed", "pg_tensile/tools/report/page.html.j2"}
    assert data | {"pg_tensile/client/training.py", "pyworker/wire.py"} <= other.modules()
    assert other.run("pg-tensile", "--version").stdout == f"pg-tensile {__version__}\n"


def test_the_client_does_all_that_needs_no_extra(client: Environment) -> None:
    """Train, predict, export, import and look, by the command and from Python."""
    assert 'model "late" was trained by job' in client.run("pg-tensile", "sql", MODEL).stderr
    query = "SELECT * FROM ML.PREDICT(MODEL late, (SELECT 0.5 AS x, 'word 1' AS word))"
    (row,) = csv.DictReader(client.run("pg-tensile", "sql", query).stdout.splitlines())
    assert row["word"] == "word 1" and row["predicted_late"] in ("yes", "no")
    assert (
        client.run("pg-tensile", "sql", "--read", "mysql", "SELECT COUNT(*) AS n FROM `departures`").stdout
        == "n\n400\n"
    )
    assert "bytes" in client.run("pg-tensile", "export", "late", "-o", "late.tensile").stdout
    assert client.run("pg-tensile", "import", "late.tensile", "copy").stdout == 'version 1 of model "copy"\n'
    assert "pg-tensile top" in client.run("pg-tensile", "top", "--once").stdout
    assert json.loads(client.run("pg-tensile", "top", "--once", "--json").stdout)["jobs"] == []
    program = """
from pg_tensile.client import MissingPackageError, connect
with connect() as client:
    client.register("from python", {"type": "mlp", "hidden": [4]})
    job = client.train("from python", "SELECT x, word, late FROM departures", "late", epochs=2)
    print(job.wait(progress=False), client.predict_all("from python", {"x": 0.5, "word": "word 1"})["label"])
    for method in (client.models, job.plan, job.report):
        try:
            method()
        except MissingPackageError as error:
            print(error)
"""
    first, *refused = client.run("python", "-c", program).stdout.splitlines()
    assert first in ("finished yes", "finished no")
    assert [re.findall(r'need the extra "(\w+)"', line) for line in refused] == [["frames"], ["frames"], ["report"]]


@pytest.mark.parametrize(
    ("arguments", "extra"),
    [(("report", "1", "-o", "-"), "report"), (("plan", "1"), "report"), (("predict", "late.tensile", "-"), "server")],
    ids=["report", "plan", "predict"],
)
def test_a_missing_extra_is_named(client: Environment, arguments: tuple[str, ...], extra: str) -> None:
    (client.folder / "late.tensile").touch()
    message, hint = client.run("pg-tensile", *arguments, status=1).stderr.splitlines()
    assert f'the extra "{extra}" of pg_tensile' in message and hint.startswith("hint: pip install ")


def test_a_model_predicts_without_pytorch(
    client: Environment, files: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Export a model as an ONNX graph, and predict with it on a machine with the extra onnx."""
    made = environment(tmp_path_factory.mktemp("onnx"), client.variables)
    made.install(f"{files / WHEEL}[onnx]")
    assert "onnxruntime" in made.packages() and not {"torch", "onnx", "onnxscript"} & made.packages()
    program = """
from pg_tensile.client import connect
with connect() as client:
    client.register("graph", {"type": "mlp", "hidden": [4]})
    client.train("graph", "SELECT x, word, late FROM departures", "late", epochs=2).wait(progress=False)
"""
    made.run("python", "-c", program)
    made.run("pg-tensile", "export", "graph", "-f", "onnx", "-o", "graph.onnx")
    rows = "SELECT x, word FROM departures ORDER BY x LIMIT 50"
    given = made.run("pg-tensile", "sql", "--read", "postgres", rows).stdout
    found = made.run("pg-tensile", "predict", "graph.onnx", "-", stdin=given).stdout
    query = f"SELECT row_number, prediction, label, probability FROM predict_rows('graph', '{rows}') ORDER BY 1"
    expected = made.run("pg-tensile", "sql", "--read", "postgres", query).stdout
    for line, wanted in zip(csv.DictReader(found.splitlines()), csv.DictReader(expected.splitlines()), strict=True):
        assert (line["row_number"], line["label"]) == (wanted["row_number"], wanted["label"])
        assert float(line["prediction"]) == pytest.approx(float(wanted["prediction"]), abs=1e-4)


def test_the_example_runs_as_printed(files: Path, server: dict[str, str], tmp_path: Path) -> None:
    """Run the commands of the document in a folder with the wheel and the example."""
    printed = [block.text for block in blocks(REPOSITORY / "docs" / "client.md", "sh") if "example.py" in block.text]
    install, run = printed[-1].splitlines()
    made = environment(tmp_path / "tensile", server)
    program, command, *arguments = shlex.split(install)
    assert (program, command) == ("~/tensile/bin/pip", "install")
    made.install(*arguments, folder=files)
    assert not {"torch", "lightgbm", "onnxruntime"} & made.packages()
    (made.folder / "example.py").write_bytes((REPOSITORY / "docs" / "example.py").read_bytes())
    assert run == "PGDATABASE=mydb ~/tensile/bin/python example.py"
    shown = made.run("python", "example.py").stdout
    share = re.search(r"([0-9.]+)% of the images", shown)
    assert share and float(share[1]) > 80
    assert "</html>" in (made.folder / "handwriting.html").read_text()


def test_the_example_runs_in_a_clone(server: dict[str, str], tmp_path: Path) -> None:
    """The interpreter of .venv finds the package without PYTHONPATH."""
    command = [REPOSITORY / ".venv" / "bin" / "python", REPOSITORY / "docs" / "example.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=server)
    assert done.returncode == 0, done.stderr
    assert "of the images" in done.stdout
