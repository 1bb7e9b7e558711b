"""The files of the Debian packages agree with each other and with the release."""

from __future__ import annotations

import re

import pg_tensile
from tests.repository import REPOSITORY

DEBIAN = REPOSITORY / "debian"
NEWEST = "17"  # of the newest Debian release: other Debians' builds write debian/control again


def test_the_version_is_that_of_the_release() -> None:
    version = pg_tensile.__version__
    assert re.match(rf"pg-tensile \({re.escape(version)}-\d+\) ", (DEBIAN / "changelog").read_text())
    for page in DEBIAN.glob("*.1"):
        assert f'"pg_tensile {version}"' in page.read_text(), page


def test_control_is_written_from_its_template() -> None:
    template = (DEBIAN / "control.in").read_text().strip()
    assert (DEBIAN / "control").read_text().strip() == template.replace("PGVERSION", NEWEST)


def test_scripts_name_no_version() -> None:
    for name in ("postinst", "prerm"):
        text = (DEBIAN / f"server.{name}.in").read_text()
        assert not re.search(r"postgresql/\d", text) and "@VERSION@" in text and "#DEBHELPER#" in text
