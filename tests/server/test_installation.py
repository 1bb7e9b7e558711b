"""Where the installation lies: a folder of its own, another folder of packages, packages that pip has installed."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest

from scripts.cluster import REPOSITORY
from tests.server.refusals import refused
from tests.server.support import MLP, ROWS, Connection, finish, submit, value

# The folder from which a session has imported the packages
IMPORTED = """
CREATE FUNCTION pg_temp.imported() RETURNS text LANGUAGE plpython3u AS $$
import os, pyworker
return os.path.dirname(os.path.dirname(pyworker.__file__))
$$
"""
EXPLAIN = "SELECT count(*) FROM explain_training('m', %s, 'y', epochs => 1)"
# A pg_tensile of another version for PL/Python's interpreter, of which a function of the session imports a module
PIPS = """
import sys
sys.path.append({folder!r})
import pyworker.supervisors
assert pyworker.__file__.startswith({folder!r})
"""


def install(folder: Path) -> tuple[Path, Path]:
    """Install the extension below `folder`, and return its folders of libraries and of data."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))}
    command = ["make", "-s", "-C", str(REPOSITORY), "install", f"DESTDIR={folder}"]
    subprocess.run(command, check=True, env=environment, capture_output=True)
    program = os.environ.get("PG_CONFIG", "pg_config")
    paths = subprocess.run([program, "--pkglibdir", "--sharedir"], check=True, capture_output=True, text=True)
    library, data = (folder / path[1:] for path in paths.stdout.split())
    return library, data


def test_it_works_in_a_folder_of_its_own(
    fresh_cluster: Callable[..., Any], clusters_folder: Path, cluster: Any
) -> None:
    library, data = install(clusters_folder / "own")
    settings = {"dynamic_library_path": f"{library}:$libdir"}
    with cluster.connect() as conn:
        finds_extensions = conn.info.server_version >= 180000
    if finds_extensions:
        settings["extension_control_path"] = f"{data}:$system"
        control = data / "extension" / "pg_tensile.control"
        control.write_text(control.read_text().replace("comment = '", "comment = 'of the folder: "))
    own = fresh_cluster(settings, extension=False)
    with own.connect() as conn:
        conn.execute("CREATE EXTENSION pg_tensile CASCADE")
        if finds_extensions:
            comment = value(conn, "SELECT comment FROM pg_available_extensions WHERE name = 'pg_tensile'")
            assert comment.startswith("of the folder: ")
            loaded = "SELECT module_name, version FROM pg_get_loaded_modules() WHERE module_name = 'pg_tensile'"
            assert conn.execute(loaded).fetchone() == ("pg_tensile", value(conn, "SELECT tensile_worker._version()"))
        finish(conn, submit(conn, "m", MLP))
        conn.execute("CREATE VIEW rows AS " + ROWS)
        assert value(conn, "SELECT predict_class('m', r) FROM rows r LIMIT 1") in ("yes", "no")
        assert value(conn, "SELECT count(*) FROM evaluate_model('m', 'TABLE rows')") > 0
        assert imported(conn) == f"{library}/pg_tensile/python"


def imported(conn: Connection) -> str:
    conn.execute(IMPORTED)
    folder = str(value(conn, "SELECT pg_temp.imported()"))
    conn.execute("DROP FUNCTION pg_temp.imported")
    return folder


@pytest.fixture
def model(db: Connection) -> Connection:
    db.execute("SELECT register_model('m', '{\"type\": \"mlp\"}')")
    return db


def packages_of_another_version(folder: Path) -> str:
    shutil.copytree(REPOSITORY / "pyworker", folder / "pyworker")
    version = folder / "pyworker" / "version.py"
    version.write_text('VERSION = "0.0.1"\n')
    for path in (folder, *folder.rglob("*")):
        path.chmod(path.stat().st_mode | 0o055 if path.is_dir() else 0o644)
    return str(folder)


def test_packages_that_pip_has_installed_are_not_used(model: Connection, clusters_folder: Path) -> None:
    folder = packages_of_another_version(clusters_folder / "pip")
    model.execute(f"DO LANGUAGE plpython3u $${PIPS.format(folder=folder)}$$")
    assert imported(model) == folder
    assert value(model, EXPLAIN, ROWS) > 0
    assert imported(model) != folder


def test_a_folder_of_packages_of_another_version_is_refused(
    model: Connection, alter: Callable[..., None], clusters_folder: Path
) -> None:
    folder = packages_of_another_version(clusters_folder / "other")
    alter({"pg_tensile.python_path": folder})
    refused("55000", "have version 0.0.1, the server's library", folder, lambda: model.execute(EXPLAIN, (ROWS,)))
    alter({"pg_tensile.python_path": ""})
    assert value(model, EXPLAIN, ROWS) > 0
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="python_path") as caught:
        model.execute("ALTER SYSTEM SET pg_tensile.python_path = 'packages'")
    assert "absolute" in (caught.value.diag.message_detail or "")
