"""A copy of PostgreSQL's programs with another revision of the extension, to measure two revisions side by side.

PostgreSQL's programs find their library and share folders relative to their own, so a copy of the three is an
installation of its own. The revision is exported, compiled and installed there.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from scripts.cluster import REPOSITORY, server_bin


@contextmanager
def installation(revision: str) -> Iterator[Path]:
    """Yield the folder of the programs (`Cluster.bin`) of a copy with this revision, which is removed at the end."""
    folder = Path(tempfile.mkdtemp(prefix="pgt-revision-", dir="/tmp"))
    folder.chmod(0o755)
    try:
        bin = _copy_programs(folder)
        _install(revision, folder / "source", bin)
        yield bin
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _copy_programs(folder: Path) -> Path:
    """Copy the folders that pg_config names to the same places below `folder`; return that of the programs."""
    bin, share, packages, headers = map(_pg_config, ("bindir", "sharedir", "pkglibdir", "includedir-server"))
    for path in {bin, share, packages}:
        shutil.copytree(path, _below(folder, path), symlinks=True, dirs_exist_ok=True)
    link = _below(folder, headers)
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(headers)
    return _below(folder, bin)


def _pg_config(name: str) -> Path:
    program = server_bin() / "pg_config"
    done = subprocess.run([program, f"--{name}"], check=True, capture_output=True, text=True)
    return Path(done.stdout.strip())


def _below(folder: Path, path: Path) -> Path:
    return folder / path.relative_to("/")


def _install(revision: str, source: Path, bin: Path) -> None:
    exported = subprocess.run(["git", "archive", revision], cwd=REPOSITORY, check=True, capture_output=True).stdout
    source.mkdir()
    subprocess.run(["tar", "-x", "-C", str(source)], input=exported, check=True)
    (source / ".venv").symlink_to((REPOSITORY / ".venv").resolve())
    shutil.rmtree(_share(bin) / "pg_tensile", ignore_errors=True)  # the files of the revision that was copied
    command = ["make", "-s", "-C", str(source), f"PG_CONFIG={bin / 'pg_config'}"]
    for goal in ("all", "install"):
        subprocess.run([*command, goal], check=True, stdout=subprocess.DEVNULL)


def _share(bin: Path) -> Path:
    done = subprocess.run([bin / "pg_config", "--sharedir"], check=True, capture_output=True, text=True)
    return Path(done.stdout.strip())
