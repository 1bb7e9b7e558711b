"""Workflows of GitHub run nothing but parts of the check of a release, with the least rights."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts.release_check import PARTS
from tests.repository import REPOSITORY

WORKFLOWS = sorted((REPOSITORY / ".github" / "workflows").iterdir())
MATRIX = re.compile(r"\$\{\{ *matrix\.(\w+) *\}\}")


def jobs(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text())["jobs"]
    return found


def value_of(case: dict[str, Any], match: re.Match[str]) -> str:
    return str(case[match[1]])


def commands(job: dict[str, Any]) -> Iterator[str]:
    """Yield what the steps of a job run, for each case of its matrix."""
    for case in job.get("strategy", {}).get("matrix", {}).get("include", [{}]):
        for step in job["steps"]:
            if "run" in step:
                yield MATRIX.sub(partial(value_of, case), step["run"])


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_steps_run_parts_of_the_check_of_a_release(path: Path) -> None:
    for job in jobs(path).values():
        ran = list(commands(job))
        assert ran and set(ran) <= set(PARTS.values())


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_jobs_may_read_the_repository_only_and_actions_have_a_version(path: Path) -> None:
    assert yaml.safe_load(path.read_text())["permissions"] == {"contents": "read"}
    for job in jobs(path).values():
        assert "permissions" not in job
        actions = [step["uses"] for step in job["steps"] if "uses" in step]
        assert actions and all(re.fullmatch(r"[\w-]+/[\w-]+@(v\d+(\.\d+)*|[0-9a-f]{40})", action) for action in actions)
        assert all("${{ github" not in step.get("run", "") for step in job["steps"])


def test_every_version_of_postgresql_is_tested() -> None:
    (job,) = jobs(REPOSITORY / ".github" / "workflows" / "matrix.yml").values()
    cases = {case["postgresql"]: case["command"] for case in job["strategy"]["matrix"]["include"]}
    assert cases.keys() == {15, 16, 17, 18, 19}
    assert all(cases[major] == f"make test-majors MAJORS={major}" for major in (17, 18, 19))
