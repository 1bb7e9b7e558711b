"""The Debian packages, built and used in clean folders, and the commands of docs/install.md (scripts/install_guide.sh).

Long: it compiles, installs servers, trains and upgrades 0.1.0; the first run makes the folders, which needs a network.
While the packages are looked at, the environment is that of the tests; the page's commands make one, out of wheels in a
folder. `make test-install` runs the other two ways.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.repository import REPOSITORY

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]


def script(name: str, *arguments: str, **variables: str) -> str:
    """Run one of the scripts and return its output."""
    command = [str(REPOSITORY / "scripts" / name), *arguments]
    done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def packages() -> str:
    """Build the packages for PostgreSQL 15 and use them in Debian 12; return the output."""
    return script("packages.sh", "15", PG_TENSILE_ENVIRONMENT=sys.prefix)


def test_packages_are_built_and_used_and_leave_nothing(packages: str) -> None:
    assert "lintian: nothing to complain of" in packages
    assert "everything works and is gone" in packages
    made = {path.name.partition("_")[0] for path in (REPOSITORY / "build" / "packages" / "bookworm").glob("*.deb")}
    assert {"pg-tensile-common", "postgresql-15-pg-tensile"} <= made


def test_the_commands_of_the_guide_install_predict_and_remove_packages(packages: str) -> None:
    found = json.loads(script("install_guide.sh", "packages", "15"))
    assert 15 < found["prediction"] < 40, "miles of a light car on a gallon"
    assert found["commands"] <= 10


def test_the_commands_of_the_guide_install_predict_and_remove_from_source() -> None:
    found = json.loads(script("install_guide.sh", "source", "17"))
    assert 15 < found["prediction"] < 40
