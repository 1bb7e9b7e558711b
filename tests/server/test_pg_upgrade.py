"""pg_upgrade from 15 to 17, with models, jobs and a schedule in place.

The old server is taken as a copy that works anywhere (scripts/gpu_bundle/server.py) into a folder with the new one's
Debian, where pg_upgrade.py does the rest. From 17 to 18 the packages at hand cannot: PostgreSQL 17.12, of Debian 13,
stores an option of columns, pg_attver, that 18.6, of the Debian after it, does not know.

Long: it makes a folder of Debian 13, if it is not there, and compiles the extension in it.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from scripts.cluster import REPOSITORY
from scripts.gpu_bundle import server

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]  # makes a Debian, and compiles

OLD, NEW = "15", "17"


def test_models_jobs_and_schedules_are_in_place_after_pg_upgrade(tmp_path: Path) -> None:
    assert re.findall(r"\d+", server.Server().version)[0] == OLD, "Debian 12's server is needed"
    server.copy(tmp_path / "old")
    archive = tmp_path / "old.tar"
    subprocess.run(["tar", "-c", "-f", archive, "-C", tmp_path / "old", "."], check=True)
    programs = f"/opt/old/usr/lib/postgresql/{OLD}/bin"
    command = f"mkdir -p /opt/old && tar -x -C /opt/old && exec .venv/bin/python -m tests.server.pg_upgrade {programs}"
    with archive.open("rb") as stdin:
        folder = [str(REPOSITORY / "scripts" / "debian_folder.sh"), NEW]
        done = subprocess.run([*folder, "bash", "-c", command], stdin=stdin, capture_output=True)
    assert done.returncode == 0, done.stderr.decode(errors="replace")[-3000:]
    assert done.stdout.decode().splitlines()[-1] == f"{OLD} to {NEW}: everything is in place"
