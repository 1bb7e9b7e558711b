"""The Debian packages, built and used in clean folders of Debian 12: scripts/packages.sh, which says what it looks at.

Long: it compiles, installs a server, trains and upgrades 0.1.0; the first run makes the folders, which needs a network.
The environment is that of the tests: tests/unit/project/test_pg_tensile_setup_runs.py makes others.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.repository import REPOSITORY

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]


def test_packages_are_built_and_used_and_leave_nothing() -> None:
    command = [str(REPOSITORY / "scripts" / "packages.sh"), "15"]
    variables = {**os.environ, "PG_TENSILE_ENVIRONMENT": sys.prefix}
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "lintian: nothing to complain of" in done.stdout
    assert "everything works and is gone" in done.stdout
    made = {path.name.partition("_")[0] for path in (REPOSITORY / "build" / "packages" / "bookworm").glob("*.deb")}
    assert {"pg-tensile-common", "postgresql-15-pg-tensile"} <= made
