"""Tell failures that a change has caused from those of before: `python -m scripts.failures SUMMARY`.

SUMMARY is what `pytest -p tests.parts --summary SUMMARY` has written. A short test that fails is always a failure of
the change. Long tests that fail run again at the first parent of this revision: those that pass there, or are not
there, are failures of the change, too. The others are printed, to be named in docs/verification.md until they are
mended.

The parent tells about one commit. Of a change of several commits, a test that an earlier one has broken fails in the
parent, too: a line "failed before this change" is to be read with that in mind.

Exit status 0 if the change has caused no failure, else 1.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from scripts.cluster import REPOSITORY

PARENT = "HEAD~1"
PYTEST = (".venv/bin/python", "-m", "pytest", "-q", "-p", "tests.parts")
DOCUMENT = REPOSITORY / "docs" / "verification.md"


def failed_at_parent(tests: list[str]) -> set[str]:
    """Run tests at the parent revision and return those that are there and fail."""
    with tempfile.TemporaryDirectory() as folder:
        summary = Path(folder) / "summary.json"
        command = ["scripts/at_revision.sh", PARENT, *PYTEST, "--summary", str(summary), *tests]
        subprocess.run(command, cwd=REPOSITORY, check=False)
        return {test for test, _ in json.loads(summary.read_text())["failed"]} if summary.exists() else set()


def verdict(long: list[str], before: set[str], document: str) -> list[str]:
    """Return a line for each long test that failed; `before`: those that fail at the parent, too."""
    lines = []
    for test in long:
        named = "named in" if test in document else "to be named in"
        cause = (
            f"failed before this change, {named} docs/verification.md" if test in before else "failed by this change"
        )
        lines.append(f"{cause}: {test}")
    return lines


def main() -> int:
    path = Path(sys.argv[1])
    if not path.exists():
        print("The tests did not run to their end.")
        return 1
    failed = json.loads(path.read_text())["failed"]
    long = [test for test, is_long in failed if is_long]
    if not long or len(long) < len(failed):
        print(f"{len(failed) - len(long)} tests of `make test` failed.")
        return 1
    print(f"{len(long)} long tests failed; they run again at the parent revision.", flush=True)
    before = failed_at_parent(long)
    print(*verdict(long, before, DOCUMENT.read_text()), sep="\n")
    return int(not before.issuperset(long))


if __name__ == "__main__":
    sys.exit(main())
