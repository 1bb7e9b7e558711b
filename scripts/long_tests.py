"""Run all long tests in parts, and note the result in docs/verification.md: `make test-long`.

Each part that has run to its end is kept in build/long-tests (scripts/kept.py): a run that was stopped goes on with the
next part. With uncommitted changes nothing is kept, and nothing noted. `--parts 1,2` runs these parts only.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from scripts.kept import DOCUMENT, REPOSITORY, state_of

PARTS = 4
CHOSEN = ("--hypothesis-profile", "long", "-m", "long")
RESULT = re.compile(r"(?<=<!-- long tests -->\n).*?(?=<!-- end -->)", re.DOTALL)


def run_part(part: int, pytest: list[str], summary: Path) -> bool:
    """Run one part, which writes its summary, and return whether it has run to its end."""
    summary.unlink(missing_ok=True)
    command = [*pytest, *CHOSEN, "--long-part", f"{part}/{PARTS}", "--summary", str(summary), "tests"]
    subprocess.run(command, cwd=REPOSITORY, check=False)
    return summary.exists()


def note(revision: str, summaries: list[dict[str, Any]]) -> None:
    """Write the result into the document."""
    passed, seconds = (sum(summary[key] for summary in summaries) for key in ("passed", "seconds"))
    failed = [test for summary in summaries for test, _ in summary["failed"]]
    text = f"{time.strftime('%Y-%m-%d')}, revision {revision}: {passed} passed, {len(failed)} failed"
    text += f", {seconds / 60:.0f} minutes.\n" + "".join(f"\n- `{test}`" for test in failed)
    document = REPOSITORY / DOCUMENT
    document.write_text(RESULT.sub(lambda _: text.rstrip() + "\n", document.read_text()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(map(str, range(PARTS))))
    parser.add_argument("--pytest", required=True, type=shlex.split, help="the command that runs pytest")
    arguments = parser.parse_args()
    state = state_of()
    folder = state.folder("long-tests")
    chosen = [folder / f"{int(part)}.json" for part in arguments.parts.split(",")]
    for part in chosen:
        if not state.keeps(part) and not run_part(int(part.stem), arguments.pytest, part):
            return 1
    whole = [folder / f"{part}.json" for part in range(PARTS)]
    if all(state.keeps(part) for part in whole):
        note(state.revision, [json.loads(part.read_text()) for part in whole])
    return int(any(json.loads(part.read_text())["failed"] for part in chosen))


if __name__ == "__main__":
    sys.exit(main())
