"""Installation of the emulated accelerator for the children of a test's server.

A child's environment is the server's without the variables of another Python, so the children find the emulator by
their interpreter: `pg_tensile.python` is a script that adds a folder to the path. The folder holds copies, because the
server's user may not be able to read the checkout.
"""

from __future__ import annotations

import os
import runpy
import shutil
from pathlib import Path

from scripts.cluster import child_python, server_user
from tests.repository import REPOSITORY

EMULATED = Path("tests", "emulated")


def install_emulator(folder: Path) -> Path:
    """Create `folder` with the emulator, compiled, and return the script in it that replaces the children's Python.

    A folder that exists is one that an earlier call has made."""
    script = folder / "python"
    if folder.exists():
        return script
    # Importing its package would make the device known to this process, in which other tests run.
    library: Path = runpy.run_path(str(REPOSITORY / EMULATED / "emulated" / "build.py"))["build"]()
    ignored = shutil.ignore_patterns("__pycache__", "conftest.py", "test_*")
    shutil.copytree(REPOSITORY / EMULATED, folder / EMULATED, ignore=ignored)
    shutil.copy(REPOSITORY / "tests" / "__init__.py", folder / "tests")
    built = folder / "build" / library.parent.name
    built.mkdir(parents=True)
    shutil.copy(library, built)
    path = f"$PYTHONPATH:{folder}:{folder / EMULATED}"  # the package, and the metadata that name its entry point
    script.write_text(f'#!/bin/sh\nPYTHONPATH="{path}" exec "{child_python()}" "$@"\n')
    script.chmod(0o755)
    if os.geteuid() == 0:
        for copied in (folder, *folder.rglob("*")):
            shutil.chown(copied, server_user())
    return script
