"""A bundle installed where there is neither a network nor PostgreSQL, beside an interpreter that has PyTorch.

Long: the bundle is made, which needs a network and compresses for a minute.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts.gpu_bundle.packages import read_at_hand
from scripts.gpu_bundle.server import Server, loaded
from tests.repository import REPOSITORY

pytestmark = pytest.mark.long


def commands_to_hide(server: Server) -> str:
    """Return commands for a shell after which nothing of the server is here: its folders and some of its libraries."""
    folders = {server.bin, server.library, server.share, "/usr/share/zoneinfo"}
    libraries = loaded(Path(server.bin, "postgres")) | loaded(server.plpython)
    hidden = {str(path.resolve()) for name, path in libraries.items() if name.startswith(("libpython", "libicu"))}
    return "\n".join(
        [
            *(f"mount -t tmpfs -o mode=755 tmpfs {folder}" for folder in sorted(folders)),
            *(f"mount --bind /dev/null {library}" for library in sorted(hidden)),
        ]
    )


def copy_checkout(target: Path) -> None:
    """Copy what git would have, and not .venv."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=REPOSITORY, check=True, capture_output=True).stdout
    packed = ["tar", "-c", "--null", "--ignore-failed-read", "-T", "-"]
    archive = subprocess.run(packed, cwd=REPOSITORY, input=names, check=True, capture_output=True).stdout
    target.mkdir()
    subprocess.run(["tar", "-x", "--no-same-owner"], cwd=target, input=archive, check=True)


def at_hand() -> Iterator[metadata.Distribution]:
    """Yield what PyTorch's image has, as far as it is here, and what that needs."""
    waiting = [*read_at_hand(REPOSITORY / "scripts" / "gpu_bundle" / "at_hand.txt")]
    seen = set()
    while waiting:
        name = canonicalize_name(waiting.pop())
        with contextlib.suppress(metadata.PackageNotFoundError):
            if name not in seen:
                seen.add(name)
                distribution = metadata.distribution(name)
                requirements = [Requirement(line) for line in distribution.requires or ()]
                waiting += [r.name for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})]
                yield distribution


def make_interpreter(folder: Path) -> Path:
    """Make an environment with links to what is at hand; return the list of it."""
    subprocess.run(["/usr/bin/python3", "-m", "venv", "--without-pip", str(folder)], check=True)
    (packages,) = folder.glob("lib/python3*/site-packages")
    lines = []
    for distribution in at_hand():
        lines.append(f"{distribution.name}=={distribution.version}\n")
        for top in {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")}:
            link = packages / top
            if not link.exists():
                link.symlink_to(str(distribution.locate_file(top)))
    listed = folder / "list.txt"
    listed.write_text("".join(lines))
    return listed


@pytest.mark.timeout(900)
def test_a_bundle_works_without_network_and_postgresql(clusters_folder):
    folder = clusters_folder / "bundle"
    folder.mkdir()
    try:
        copy_checkout(folder / "checkout")
        listed = make_interpreter(folder / "interpreter")
        command = [sys.executable, "-m", "scripts.gpu_bundle", f"--python=3.{sys.version_info.minor}"]
        subprocess.run([*command, "--at-hand", listed, "--output", folder / "made"], cwd=REPOSITORY, check=True)
        program = f"""
        set -eu
        {commands_to_hide(Server())}
        cd {folder}/checkout
        {folder}/interpreter/bin/python -m scripts.gpu_bundle.unpack --folder {folder}/there --bundle {folder}/made
        . {folder}/there/environment
        pg-tensile --help
        exec python -m pytest -q -p no:cacheprovider -m 'not long' tests/server/test_jobs.py
        """
        environment = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8"}
        command = ["unshare", "--mount", "--net", "sh", "-c", program]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        checked = json.loads((folder / "there" / "check.json").read_text())["found"]
        found = {entry["name"]: entry["found"] for entry in checked}
        assert found["training in a server"] == "finished" and found["lightgbm"] and found["torch"]
        assert not any(entry["problem"] for entry in checked)
    finally:
        shutil.rmtree(folder)
