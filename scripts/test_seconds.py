"""Write tests/seconds.json, which tests/conftest.py orders the test files by, from the times of a run.

    python -m scripts.test_seconds --short FOLDER --long FOLDER

FOLDER is what scripts/test_times.py has written in a run of `-m 'not long'` or `-m long`. What is not given stays.
Files that took less than SHORTEST seconds are left out: which of them is last makes no difference.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path

SECONDS = Path(__file__).resolve().parent.parent / "tests" / "seconds.json"
SHORTEST = 2.0


def read_seconds(folder: Path) -> dict[str, float]:
    """Return the seconds of each test file, the longest first."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for path in folder.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            file, separator, _ = row["test"].partition("::")
            if separator:
                seconds[file] += row["wall"]
    longest = sorted(seconds.items(), key=lambda item: item[1], reverse=True)
    return {file: round(wall, 1) for file, wall in longest if wall >= SHORTEST}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", type=Path)
    parser.add_argument("--long", type=Path)
    arguments = parser.parse_args()
    stored = json.loads(SECONDS.read_text()) if SECONDS.exists() else {}
    for kind in ("short", "long"):
        folder = getattr(arguments, kind)
        if folder is not None:
            stored[kind] = read_seconds(folder)
    SECONDS.write_text(json.dumps(stored, indent=1) + "\n")


if __name__ == "__main__":
    main()
