"""The archive for PGXN: META.json as the specification wants it, and the same bytes for the same commit.

The specification is https://pgxn.org/spec/, version 1.0.0.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import zipfile
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.repository import REPOSITORY

META: dict[str, Any] = json.loads((REPOSITORY / "META.json").read_text())
REQUIRED = {"name", "abstract", "version", "maintainer", "license", "provides", "meta-spec"}
OPTIONAL = {"description", "generated_by", "tags", "no_index", "prereqs", "release_status", "resources"}
TERM = re.compile(r"[^\s/\\\x00-\x1f]{2,}")
TAG = re.compile(r"[^/\\\x00-\x1f]{1,255}")
VERSION = re.compile(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)([-A-Za-z][-0-9A-Za-z]*)?")
LICENSES = {"postgresql", "bsd", "mit", "apache_2_0", "open_source", "restricted", "unrestricted", "unknown"}
PHASES, RELATIONS = (
    {"configure", "build", "test", "runtime", "develop"},
    {"requires", "recommends", "suggests", "conflicts"},
)


def is_version(value: Any) -> bool:
    """True for a semantic version, or 0 for any."""
    return value == 0 or (isinstance(value, str) and bool(VERSION.fullmatch(value)))


def test_the_keys_are_those_of_the_specification():
    assert META.keys() >= REQUIRED
    assert all(key in REQUIRED | OPTIONAL or key.lower().startswith("x_") for key in META)


def test_the_values_have_the_forms_of_the_specification():
    assert TERM.fullmatch(META["name"])
    assert VERSION.fullmatch(META["version"])
    assert META["license"] in LICENSES
    for key in ("abstract", "description", "maintainer", "generated_by"):
        assert isinstance(META[key], str) and META[key].strip(), key
    assert META["meta-spec"]["version"] == "1.0.0"
    assert urlsplit(META["meta-spec"]["url"]).netloc
    assert META["release_status"] in {"stable", "testing", "unstable"}
    assert all(TAG.fullmatch(tag) for tag in META["tags"])
    assert META["prereqs"].keys() <= PHASES
    for relations in META["prereqs"].values():
        assert relations.keys() <= RELATIONS
        for packages in relations.values():
            assert all(TERM.fullmatch(name) and is_version(version) for name, version in packages.items())


def test_the_extension_is_the_one_that_is_installed():
    (name,) = META["provides"]
    extension = META["provides"][name]
    control = (REPOSITORY / extension["file"]).read_text()
    assert Path(extension["file"]).stem == name == META["name"]
    assert extension["version"] == META["version"]
    assert f"default_version = '{META['version']}'" in control
    (required,) = re.findall(r"^requires = '(.*)'$", control, re.MULTILINE)
    assert META["prereqs"]["runtime"]["requires"].keys() == {"PostgreSQL", *required.split(", ")}


# ---- the archive ----------------------------------------------------------------------------------------------------


def committed() -> set[str]:
    """Return the names of all files of the last commit."""
    command = ["git", "-c", "safe.directory=*", "ls-tree", "-r", "-z", "--name-only", "HEAD"]
    return set(subprocess.check_output(command, cwd=REPOSITORY, text=True).split("\0")) - {""}


def archive(folder: Path, umask: int = 0o022, **environment: str) -> Path:
    """Make the archive in a folder and return its path."""
    command = [REPOSITORY / "scripts" / "dist.sh", folder]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, umask=umask)
    assert done.returncode == 0, done.stderr
    (path,) = folder.iterdir()
    return path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return archive(tmp_path_factory.mktemp("dist"), TZ="UTC")


@pytest.fixture(scope="module")
def unpacked(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in the archive. (zipfile gives files no modes, as some unzip programs do not.)"""
    folder = tmp_path_factory.mktemp("unpacked")
    subprocess.run(["/usr/bin/python3", "-m", "zipfile", "-e", made, folder], check=True)
    (top,) = folder.iterdir()
    return top


def test_the_same_commit_has_the_same_bytes(made: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / ".gitconfig").write_text("[core]\n\tautocrlf = true\n\tcompression = 0\n")
    again = archive(tmp_path / "dist", 0o077, TZ="Asia/Kathmandu", LC_ALL="C.UTF-8", HOME=str(home))
    assert again.name == made.name == f"pg_tensile-{META['version']}.zip"
    assert again.read_bytes() == made.read_bytes()
    assert again.stat().st_mode & 0o444 == 0o444


def test_a_failed_run_leaves_the_archive_of_before(tmp_path: Path) -> None:
    """The script in a folder that is no repository."""
    (tmp_path / "scripts").mkdir()
    script = tmp_path / "scripts" / "dist.sh"
    script.write_bytes((REPOSITORY / "scripts" / "dist.sh").read_bytes())
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist" / "pg_tensile-0.1.0.zip").write_bytes(b"before")
    done = subprocess.run(["bash", script], capture_output=True, text=True)
    assert done.returncode != 0 and "not a git repository" in done.stderr
    assert [path.read_bytes() for path in (tmp_path / "dist").iterdir()] == [b"before"]


def test_the_archive_has_one_folder_with_what_the_commit_has(made: Path) -> None:
    with zipfile.ZipFile(made) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
    prefix = f"pg_tensile-{META['version']}/"
    assert all(name.startswith(prefix) for name in names)
    left_out = committed() - {name.removeprefix(prefix) for name in names}
    assert {name.split("/")[0] for name in left_out} <= {".ci", ".github", ".gitattributes"}
    provided = META["provides"]["pg_tensile"]
    assert {"META.json", "README.md", "LICENSE", provided["file"], provided["docfile"]} <= committed() - left_out


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_archive_installs(made: Path, unpacked: Path, tmp_path: Path) -> None:
    """`make` and `make install`, as `pgxn install` runs them; long, because it compiles everything."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))}
    for words in (["-j", str(os.cpu_count()), "all"], ["install", f"DESTDIR={tmp_path}"]):
        done = subprocess.run(["make", "-s", *words], cwd=unpacked, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
    installed = [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    (python,) = (path for path in tmp_path.rglob("python") if path.parent.name == "pg_tensile")
    names = {path.name for path in installed if not path.is_relative_to(python)}
    scripts = {f"pg_tensile--{versions}.sql" for versions in ("0.1.0", "0.1.0--0.2.0", META["version"])}
    libraries = {"pg_tensile.so", "pg_tensile_evaluator.so"}
    assert {name for name in names if not name.endswith(".bc")} == {"pg_tensile.control"} | scripts | libraries
    packages = {str(path.relative_to(python)) for path in installed if path.is_relative_to(python)}
    there = {name for name in committed() if name.startswith(("pg_tensile/", "pyworker/"))}
    assert packages == {name for name in there if name.endswith((".py", ".css", ".js", ".json", ".j2"))}
