"""Results of the parts of a long run, kept by revision: a run that was stopped goes on with the part it stopped in.

A part has a file in `build/KIND/REVISION/`, which is there once the part has ended. With uncommitted changes nothing is
kept. The note of the long tests in docs/verification.md counts neither as a change nor, committed, as a revision.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parents[1]
DOCUMENT = Path("docs/verification.md")
ALL_ELSE = (".", f":(exclude){DOCUMENT}")


class State(NamedTuple):
    """The last revision of a checkout that changed anything but the note, and whether there are changes since."""

    repository: Path
    revision: str
    changed: bool

    def folder(self, kind: str) -> Path:
        return self.repository / "build" / kind / ("changed" if self.changed else self.revision)

    def keeps(self, part: Path) -> bool:
        """Return whether the part with this file need not run again."""
        return not self.changed and part.exists()


def state_of(repository: Path = REPOSITORY) -> State:
    def git(*arguments: str) -> str:
        return subprocess.check_output(["git", *arguments, "--", *ALL_ELSE], cwd=repository, text=True).strip()

    return State(repository, git("log", "-1", "--format=%h", "--abbrev=8"), bool(git("status", "--porcelain")))
