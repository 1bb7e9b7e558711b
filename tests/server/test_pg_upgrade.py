"""pg_upgrade to the next versions of PostgreSQL, with models, jobs and a schedule in place.

The old server is taken as a copy that works anywhere (scripts/gpu_bundle/server.py) into a folder with the new one's
Debian, where pg_upgrade.py does the rest.

Long: each makes a folder of a Debian, if it is not there, and compiles the extension in it.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from scripts.cluster import REPOSITORY
from scripts.gpu_bundle import server

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]  # makes a Debian, and compiles

COPY = """
from pathlib import Path
from scripts.gpu_bundle import server
server.copy(Path("/opt/old"))
"""


def in_folder(major: int, *command: str, **files: object) -> subprocess.CompletedProcess[bytes]:
    done = subprocess.run(
        [REPOSITORY / "scripts" / "debian_folder.sh", str(major), *command], stderr=subprocess.PIPE, **files
    )
    assert done.returncode == 0, done.stderr.decode(errors="replace")[-3000:]
    return done


def pack_old_server(major: int, folder: Path) -> Path:
    """Return an archive of a server of this version with the extension."""
    path = folder / "old.tar"
    with path.open("wb") as archive:
        if re.search(r"\d+", server.Server().version)[0] == str(major):
            server.copy(folder / "old")
            subprocess.run(["tar", "-c", "-C", folder / "old", "."], stdout=archive, check=True)
        else:
            # not by pip, which may find no certificates there
            patchelf = "apt-get update -q && apt-get install -y -q --no-install-recommends patchelf"
            copied = f"exec 3>&1 >&2; {patchelf} && .venv/bin/python -c '{COPY}' && exec tar -c -C /opt/old . >&3"
            in_folder(major, "bash", "-c", copied, stdout=archive)
    return path


@pytest.mark.parametrize(("old", "new"), [(15, 17), (17, 18)])
def test_models_jobs_and_schedules_are_in_place_after_pg_upgrade(old: int, new: int, tmp_path: Path) -> None:
    programs = f"/opt/old/usr/lib/postgresql/{old}/bin"
    unpacked = f"mkdir -p /opt/old && tar -x -C /opt/old && exec .venv/bin/python -m tests.server.pg_upgrade {programs}"
    with pack_old_server(old, tmp_path).open("rb") as archive:
        done = in_folder(new, "bash", "-c", unpacked, stdin=archive, stdout=subprocess.PIPE)
    assert done.stdout.decode().splitlines()[-1].startswith(f"{old} to {new}: everything is in place")
