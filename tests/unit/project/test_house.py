"""The house: versions agree, dependencies point one way, installed files are readable, documents are complete."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import pg_tensile
from scripts import long_tests
from tests.repository import REPOSITORY

SUPERVISORS = ["controller", "scheduler", "worker", "inference", "session_run"]


def make(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    """Run make without the flags of a make that may have started the tests."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))}
    command = ["make", "-C", str(REPOSITORY), "--no-print-directory", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, **options)


def imports(path: Path) -> set[str]:
    """Return full names of the modules that a file imports anywhere."""
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return modules


def test_versions_agree():
    version = pg_tensile.__version__
    assert f"default_version = '{version}'" in (REPOSITORY / "pg_tensile.control").read_text()
    assert f"## {version}" in (REPOSITORY / "CHANGELOG.md").read_text()
    assert f'"{version}"' in (REPOSITORY / "pyworker" / "version.py").read_text()
    dynamic = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["setuptools"]["dynamic"]
    assert dynamic == {"version": {"attr": "pg_tensile.__version__"}}


LOOKING = {"cli", "client", "report", "top"}  # at a server, from outside
LIBRARY = [p for p in sorted((REPOSITORY / "pg_tensile").rglob("*.py")) if p.parent.name not in LOOKING]


@pytest.mark.parametrize("path", LIBRARY, ids=lambda path: path.stem)
def test_library_does_not_know_the_server(path):
    server_side = {name for name in imports(path) if name.split(".")[0] in {"pyworker", "psycopg", "plpy"}}
    assert not server_side


def test_planning_does_not_import_torch():
    for path in (REPOSITORY / "pg_tensile" / "planning").rglob("*.py"):
        assert not {module for module in imports(path) if module.split(".")[0] == "torch"}, path


@pytest.mark.parametrize("name", SUPERVISORS)
def test_supervisors_need_the_standard_library_only(name):
    """The system's Python imports them without site-packages, which PL/Python may lack."""
    module = f"pyworker.supervisors.{name}"
    program = f"import sys; sys.path.insert(0, {str(REPOSITORY)!r}); import {module}; print(*sys.modules)"
    done = subprocess.run(["/usr/bin/python3", "-I", "-S", "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    assert not {"torch", "numpy"} & loaded
    assert {name for name in loaded if name.startswith("pg_tensile")} <= {"pg_tensile", "pg_tensile.memory_limit"}


def test_every_setting_is_documented():
    sources = [REPOSITORY / "pg_tensile/csrc/base" / name for name in ("guc.c", "role_limits.c")]
    defined = {name for source in sources for name in re.findall(r'"(pg_tensile\.[a-z_]+)",\n', source.read_text())}
    assert len(defined) >= 10
    reference = (REPOSITORY / "docs" / "sql.md").read_text()
    assert set(re.findall(r"^\| `(pg_tensile\.[a-z_]+)`", reference, re.MULTILINE)) == defined


def test_make_reports_missing_server_headers():
    done = make("all", "PG_CONFIG=/nonexistent/pg_config")
    assert done.returncode != 0
    assert "PostgreSQL's server headers are missing" in done.stderr
    assert make("help", "PG_CONFIG=/nonexistent/pg_config").returncode == 0


def test_the_long_tests_have_more_examples():
    assert "-m scripts.long_tests" in make("-n", "test-long").stdout
    assert long_tests.CHOSEN == ("--hypothesis-profile", "long", "-m", "long")


@pytest.mark.long
def test_tests_that_need_a_gpu_are_not_collected_without_one_and_their_target_says_so(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = make("test-cuda", f"PYTHON={sys.executable}")
    assert done.returncode != 0
    assert "PyTorch sees no CUDA device" in done.stderr
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "tests/accelerator"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)
    assert "test_device.py" in done.stdout
    assert "test_codecs.py" not in done.stdout and "test_times.py" not in done.stdout


def test_install_is_readable_and_has_what_runs_only(tmp_path):
    done = make("install", f"DESTDIR={tmp_path}", umask=0o077)
    assert done.returncode == 0, done.stderr
    scripts = {path.name for path in tmp_path.rglob("extension/*.sql")}
    assert scripts == {f"pg_tensile--{versions}.sql" for versions in ("0.1.0", "0.1.0--0.2.0", "0.2.0")}
    (python,) = tmp_path.rglob("pg_tensile/python")
    installed = {str(path.relative_to(python)) for path in python.rglob("*") if path.is_file()}
    report = {f"pg_tensile/tools/report/page.{kind}" for kind in ("css", "html.j2", "js")}
    data = report | {"pg_tensile/rules.json"}
    assert {"pyworker/wire.py", "pg_tensile/__init__.py", *data} <= installed
    assert {Path(name).suffix for name in installed - data} <= {".py", ".pyc"}
    for path in (python.parent, *python.parent.rglob("*")):
        assert path.stat().st_mode & 0o004, f"{path} cannot be read by the server's user"


@pytest.mark.parametrize("arguments", [(), ("test",)], ids=["demo", "test"])
def test_setup_does_nothing_the_second_time(arguments):
    command = [REPOSITORY / "scripts" / "setup.sh", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


WITHOUT_CHROMIUM = """
command() { [[ $2 != chromium* ]] && builtin command "$@"; }
apt-get() { return 1; }
env() { return 1; }
sudo() { return 1; }
"""


def test_the_demo_is_set_up_without_what_only_tests_need(tmp_path):
    """The machine has no Chromium and no network."""
    missing = tmp_path / "missing.sh"
    missing.write_text(WITHOUT_CHROMIUM)
    environment = {**os.environ, "BASH_ENV": str(missing)}
    command = [REPOSITORY / "scripts" / "setup.sh"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    done = subprocess.run([*command, "test"], capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 1 and "installing the Debian packages chromium" in done.stdout
    demo = make("-n", "demo").stdout
    assert "scripts/setup.sh" in demo and "scripts/setup.sh test" not in demo
    assert "scripts/setup.sh test" in make("-n", "test").stdout


def test_tests_run_in_the_venv_of_the_system_python():
    assert Path(sys.prefix).resolve() == (REPOSITORY / ".venv").resolve()
    assert "home = /usr/bin\n" in (Path(sys.prefix) / "pyvenv.cfg").read_text()
