"""pg-tensile-setup: which build of PyTorch, which machines are refused, which environments and clusters are in use."""

from __future__ import annotations

import io
import json
import mmap
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts import lock
from scripts.pg_tensile_setup import __main__ as command
from scripts.pg_tensile_setup import choice, clusters, environments, pip
from scripts.pg_tensile_setup.common import SetupError
from tests.repository import REPOSITORY

SIZES = (119, 2730)


def refused(action: Callable[[], object]) -> str:
    with pytest.raises(SetupError) as caught:
        action()
    message, hint = str(caught.value).rsplit("\nhint: ", 1)
    assert hint
    return message


# ---- what is installed ----------------------------------------------------------------------------------------------


def test_the_lock_file_is_split() -> None:
    read = choice.read_lock(lock.LOCK)
    packages = [package for package in lock.read() if package.name != "torch"]
    assert read.torch == next(package.version for package in lock.read() if package.name == "torch")
    assert read.packages.count("--hash=") == sum(len(package.hashes) for package in packages)
    lines = [line for line in read.constraints.splitlines() if not line.startswith("#")]
    assert sorted(lines) == sorted(
        f"{package.name}=={package.version}" + (f"; {package.marker}" if package.marker else "") for package in packages
    )
    assert tuple(read.sizes) == lock.PYTHONS


def test_what_is_no_lock_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert "no lock file" in refused(lambda: choice.read_lock(path))
    path.write_text("numpy==2.4.6\n")
    assert "no lock file" in refused(lambda: choice.read_lock(path))


@pytest.mark.parametrize(
    ("arguments", "has_driver", "kind", "requirement"),
    [
        (["--cpu"], True, "cpu", "torch==2.13.0+cpu"),
        (["--cuda"], False, "cuda", "torch==2.13.0"),
        (["--torch-index", "https://x/whl/cu130/"], False, "cuda", "torch==2.13.0+cu130"),
        (["--torch-index", "https://x/whl/cpu"], True, "cpu", "torch==2.13.0+cpu"),
        (["--torch-index", "https://x/simple"], False, "cuda", "torch==2.13.0"),
        (["--find-links", "/"], True, "cpu", "torch==2.13.0"),
        (["--find-links", "/", "--cpu"], True, "cpu", "torch==2.13.0+cpu"),
        ([], True, "cuda", "torch==2.13.0"),
        ([], False, "cpu", "torch==2.13.0+cpu"),
    ],
)
def test_the_build(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], has_driver: bool, kind: str, requirement: str
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())  # no terminal
    build = choice.choose_build(command.parse(arguments), SIZES, has_driver)
    assert (build.kind, build.requirement("2.13.0")) == (kind, requirement)


def test_a_terminal_is_asked(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    answers = iter(["what?", "CUDA"])
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda _: next(answers))
    assert choice.choose_build(command.parse([]), SIZES, False).kind == "cuda"
    assert "311 MB to fetch" in (said := capsys.readouterr().out) and "2.8 GB" in said


def test_choices_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--cpu", "--cuda"], ["--remove", "--find-links", "/"], ["--find-links", "/never/heard/of"]):
        with pytest.raises(SystemExit) as caught:
            command.parse(arguments)
        assert caught.value.code == 2


def test_complaints_of_pip_have_their_hints() -> None:
    failed = str(pip.failure("fetch", "WARNING: slow\nERROR: No matching distribution found for torch==2.13.0"))
    assert "slow" not in failed and "--python names another interpreter" in failed
    damaged = str(pip.failure("install", "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE"))
    assert "damaged" in damaged
    assert "network" in str(pip.failure("fetch", "ERROR: no route"))


# ---- where ----------------------------------------------------------------------------------------------------------


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_other_interpreters_are_refused(tmp_path: Path) -> None:
    read = choice.read_lock(lock.LOCK)
    version = environments.python_version("/usr/bin/python3", read)
    assert version in lock.PYTHONS
    none, old = tmp_path / "none", script(tmp_path / "old", "echo 3.9")
    assert "cannot be run" in refused(lambda: environments.python_version(str(none), read))
    assert "is Python 3.9, and the packages are for 3.11" in refused(lambda: environments.python_version(old, read))
    lacking = script(tmp_path / "lacking", "echo 3.12; exit 1")
    assert "no module ensurepip or venv" in refused(lambda: environments.python_version(lacking, read))
    broken = script(tmp_path / "broken", "exit 1")
    assert "no working Python" in refused(lambda: environments.python_version(broken, read))


def test_a_small_disk_is_refused(tmp_path: Path) -> None:
    environments.refuse_small_disk(tmp_path, 0)
    assert "are needed" in refused(lambda: environments.refuse_small_disk(tmp_path, 1e12))


def test_one_run_at_a_time(tmp_path: Path) -> None:
    with environments.alone(tmp_path):
        assert "another pg-tensile-setup" in refused(lambda: environments.alone(tmp_path).__enter__())
    with environments.alone(tmp_path):
        pass
    (tmp_path / "venv").mkdir()
    assert "and no link" in refused(lambda: environments.alone(tmp_path).__enter__())
    (tmp_path / "file").touch()
    assert "cannot be written" in refused(lambda: environments.alone(tmp_path / "file" / "below").__enter__())


def test_what_is_used_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The old environment is in use by this process, scratch is of a run that was killed."""
    for name in ("venv-1", "venv-2", "venv-9", "scratch-x"):
        (tmp_path / name).mkdir()
    environments.switch(tmp_path, tmp_path / "venv-2")
    library = tmp_path / "venv-1" / "library.so"
    library.write_bytes(b"text")
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ):
        assert environments.processes_of(tmp_path / "venv-1") == [os.getpid()]
        environments.remove_unused(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"venv", "venv-1", "venv-2"}
    assert f"still used by process {os.getpid()}" in capsys.readouterr().out
    environments.remove_unused(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"venv", "venv-2"}
    assert environments.next_environment(tmp_path).name == "venv-3"
    environments.switch(tmp_path, tmp_path / "venv-3")
    assert os.readlink(tmp_path / "venv") == "venv-3"


def test_what_is_removed_leaves_no_folder(tmp_path: Path) -> None:
    folder = tmp_path / "pg-tensile"
    (folder / "venv-1").mkdir(parents=True)
    environments.switch(folder, folder / "venv-1")
    command.remove(folder)
    assert not folder.exists()
    folder.mkdir()
    (folder / "notes.txt").touch()
    command.remove(folder)
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]


def test_an_environment_that_is_not_there_is_said_to_be_missing(tmp_path: Path) -> None:
    options = command.parse(["--check", "--folder", str(tmp_path), "--lock", str(lock.LOCK)])
    assert "has no environment" in refused(lambda: command.look(options))
    (tmp_path / "venv-1").mkdir()
    environments.switch(tmp_path, tmp_path / "venv-1")
    made = {"lock": "other", "kind": "cpu", "url": "", "python": "/usr/bin/python3 3.11"}
    (tmp_path / "venv-1" / environments.STAMP).write_text(json.dumps(made))
    assert "is not the one of" in refused(lambda: command.look(options))
    made |= {"lock": choice.read_lock(lock.LOCK).digest, "python": "/usr/bin/python3 3.0"}
    (tmp_path / "venv-1" / environments.STAMP).write_text(json.dumps(made))
    assert "made for Python 3.0" in refused(lambda: command.look(options))


def test_the_command_needs_the_standard_library_only() -> None:
    arguments = ["/usr/bin/python3", "-S", "-m", "scripts.pg_tensile_setup", "--help"]
    done = subprocess.run(arguments, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0 and "--find-links" in done.stdout, done.stderr


# ---- clusters -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "preloads"),
    [
        ("shared_preload_libraries = 'pg_tensile'", True),
        ("shared_preload_libraries = 'pg_stat_statements, pg_tensile'   # why", True),
        ("Shared_Preload_Libraries 'pg_tensile,auto_explain'", True),
        ("shared_preload_libraries = pg_tensile", True),
        ("shared_preload_libraries='\"pg_tensile\"'", True),
        ("shared_preload_libraries = '$libdir/pg_tensile.so'", True),
        ("#shared_preload_libraries = 'pg_tensile'", False),
        ("shared_preload_libraries = ''  # pg_tensile", False),
        ("shared_preload_libraries = 'pg_tensile_other'", False),
        ("pg_tensile.database = 'pg_tensile'", False),
        ("shared_preload_libraries = 'pg_tensile'\nshared_preload_libraries = 'auto_explain'", False),
        ("", False),
    ],
)
def test_clusters_that_preload_the_library(tmp_path: Path, line: str, preloads: bool) -> None:
    (tmp_path / "postgresql.conf").write_text(f"port = 5432\n{line}\n")
    found = clusters.preloading(tmp_path, tmp_path / "data")
    assert bool(found) == preloads
    if found:
        assert (found.path, found.line) == (tmp_path / "postgresql.conf", 2)


def test_files_that_a_configuration_includes_are_read(tmp_path: Path) -> None:
    data = tmp_path / "the 'data'"
    for folder in (data, tmp_path / "conf.d"):
        folder.mkdir()
    doubled = str(data).replace("'", "''")
    text = (
        f"data_directory = '{doubled}'\ninclude_dir = 'conf.d'\ninclude_if_exists = 'none.conf'\ninclude 'more.conf'\n"
    )
    (tmp_path / "postgresql.conf").write_text(text)
    (tmp_path / "more.conf").write_text("include 'more.conf'\n")  # itself, for ever
    inside = tmp_path / "conf.d" / "b.conf"
    inside.write_text("\nshared_preload_libraries = 'pg_tensile'\n")
    for ignored in (".a.conf", "b.conf.dpkg-old"):
        (tmp_path / "conf.d" / ignored).write_text("shared_preload_libraries = 'other'\n")
    assert clusters.preloading(tmp_path, tmp_path) == (inside, 2, "shared_preload_libraries", "pg_tensile")
    automatic = data / "postgresql.auto.conf"
    automatic.write_text("shared_preload_libraries = 'auto_explain'\n")
    assert clusters.preloading(tmp_path, tmp_path) is None
    inside.unlink()
    automatic.write_text("shared_preload_libraries = 'pg_tensile'\n")
    assert clusters.preloading(tmp_path, tmp_path) == (automatic, 1, "shared_preload_libraries", "pg_tensile")


def test_the_clusters_of_one_version_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(clusters, "CONFIGURATION", tmp_path)
    for name, value in (("15/main", "pg_tensile"), ("15/other", ""), ("17/main", "")):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "postgresql.conf").write_text(f"shared_preload_libraries = '{value}'\n")
    assert [clusters.main(major) for major in ("15", "17", "18")] == [1, 0, 0]
    said = capsys.readouterr().err
    assert f"15/main preloads the library: {tmp_path}/15/main/postgresql.conf, line 1" in said and "other" not in said
