"""`make` compiles again what depends on its variables."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.repository import REPOSITORY

SETTINGS = "pg_tensile/csrc/base/guc.o"  # has the default of pg_tensile.python


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A copy of what the library is compiled from."""
    for name in ("Makefile", "pg_tensile.control", "sql", "pg_tensile/csrc"):
        target = tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["cp", "-r", str(REPOSITORY / name), str(target)], check=True)
    for compiled in tmp_path.glob("pg_tensile/csrc/**/*.o"):
        compiled.unlink()
    return tmp_path


def compiled(sources: Path, *variables: str) -> bytes:
    subprocess.run(["make", "-s", "-C", str(sources), SETTINGS, *variables], check=True)
    return (sources / SETTINGS).read_bytes()


def test_another_interpreter(sources: Path) -> None:
    """As built by a user and installed by root, who gives the interpreter; and back."""
    for interpreter in ("/opt/one/python", "/opt/two/python", "/opt/one/python"):
        assert f"\0{interpreter}\0".encode() in compiled(sources, f"PYTHON={interpreter}")


def test_another_server(sources: Path) -> None:
    compiled(sources)
    (sources / SETTINGS).write_bytes(b"for another server")
    assert compiled(sources) == b"for another server"
    assert compiled(sources, "VERSION=15.0") != b"for another server"
