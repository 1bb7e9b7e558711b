"""The parts of `make first-gpu-run` on the emulated accelerator: each ends by itself, and nothing in it fails."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.first_gpu_run.parts import PARTS, Where
from tests.repository import REPOSITORY

SECONDS = 90


@pytest.mark.long
@pytest.mark.timeout(4 * SECONDS)
@pytest.mark.parametrize("part", PARTS, ids=lambda part: str(part.number))
def test_a_part_ends_by_itself(part, tmp_path: Path) -> None:
    """Long: 90 seconds of each part, which is what comes out of so much of it."""
    words = (str(part.number), "--device", "emulated", "--quick", "--seconds", str(SECONDS), "--folder", str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-m", "scripts.first_gpu_run", *words], cwd=REPOSITORY, capture_output=True, text=True
    )
    steps = json.loads((tmp_path / f"part-{part.number}.json").read_text())["steps"]
    log = (tmp_path / f"part-{part.number}.log").read_text()[-4000:]
    assert [step["name"] for step in steps] == [step.name for step in part.steps(Where("emulated", True))], done.stderr
    assert all(step["status"] in (0, None) for step in steps), log
    assert all(step["rows"] for step in steps if step["status"] == 0), log
    assert not [row for step in steps for row in step["rows"] if row.get("outcome") == "failed"], log
    rows = [row for step in steps if step["status"] == 0 for row in step["rows"]]
    assert not [row for row in rows if row.get("error")], log
    assert all(row["bit_identical"] for row in rows if row.get("policy") in ("none", "joint")), log
    assert f"# Part {part.number}: " in (tmp_path / f"part-{part.number}.md").read_text()
