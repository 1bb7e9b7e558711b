"""Damaged versions and images do not end a session."""

from __future__ import annotations

import os
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.evaluator import build
from tests.evaluator.versions import corpus

VERSIONS = 300
# What is lost ends with the memory context in a server.
OPTIONS = {"ASAN_OPTIONS": "detect_leaks=0:handle_abort=1", "UBSAN_OPTIONS": "print_stacktrace=1"}


def survived(path: Path, seed: int, cases: int) -> tuple[int, int]:
    """Run cases; return how many versions and how many damaged images were evaluated."""
    command = ["nice", str(build.fuzzer()), str(path), str(seed), str(cases)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **OPTIONS})
    assert done.returncode == 0, f"seed {seed}: {done.stderr[-4000:]}"
    found = re.match(r"(\d+) versions and (\d+) damaged images", done.stdout)
    assert found is not None
    return int(found[1]), int(found[2])


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fuzz") / "corpus"
    path.write_bytes(corpus(range(VERSIONS)))
    return path


def test_a_thousand_damaged_versions(stored: Path) -> None:
    versions, images = survived(stored, 1, 1000)
    assert versions > 300 and images > 300


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_million_damaged_versions(stored: Path) -> None:
    """It takes minutes on all processors."""
    cores, cases = os.cpu_count() or 1, 10_000
    first = int.from_bytes(os.urandom(4), "little") if "CI" not in os.environ else 1
    build.fuzzer()
    with ThreadPoolExecutor(cores) as threads:
        list(threads.map(lambda seed: survived(stored, seed, cases), range(first, first + 100)))
