"""Errors, messages and the variables of child processes."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

FOLDER = Path("/var/lib/pg-tensile")
# Of this source tree, or of the installation in /usr/share/pg-tensile
LOCK = Path(__file__).resolve().parents[2] / "requirements.lock"
MB = 1_000_000


class SetupError(Exception):
    """An error that the user can act upon: one sentence, and a hint."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(f"{message}\nhint: {hint}")


def say(text: str) -> None:
    print(f"pg-tensile-setup: {text}", flush=True)


def amount(megabytes: float) -> str:
    return f"{megabytes / 1000:.1f} GB" if megabytes >= 1000 else f"{megabytes:.0f} MB"


def size_of(folder: Path) -> float:
    """Return the megabytes of a folder's files on the disk."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):  # pip moves files
                total += os.lstat(os.path.join(place, name)).st_blocks * 512
    return total / MB


def variables() -> dict[str, str]:
    """Return the variables for interpreters: pip's settings stay, those of Python would change what is installed."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
