"""Two ranks on machines of their own, which network namespaces stand for."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.repository import REPOSITORY
from tests.unit.ranked import Ranks, example

BUDGETS = (1_300_000, 1_100_000)
RANK = (
    "import json; from tests.unit import ranked; print(json.dumps(ranked.in_group({!r}, {}, 2, ranked.example, [{}])))"
)


def ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


@pytest.fixture
def machines() -> Iterator[tuple[str, str]]:
    """The names of two namespaces, each with one end of a cable, `cable`."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the command ip")
    first, second = (f"tensile{os.getpid()}{letter}" for letter in "ab")
    try:
        for name in (first, second):
            ip("netns", "add", name)
        ip("link", "add", "cable", "netns", first, "type", "veth", "peer", "name", "cable", "netns", second)
        for number, name in enumerate((first, second), 1):
            ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", "cable")
            ip("-n", name, "link", "set", "cable", "up")
        yield first, second
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces cannot be made: {error.stderr}")
    finally:
        for name in (first, second):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


@pytest.mark.long
def test_two_machines_train_as_one_does(ranks: Ranks, machines: tuple[str, str], tmp_path: Path) -> None:
    """Long: two processes start anew, each in a network namespace."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "GLOO_SOCKET_IFNAME": "cable"}
    processes = [
        subprocess.Popen(
            ["ip", "netns", "exec", name, sys.executable, "-c", RANK.format(str(tmp_path / "group"), rank, BUDGETS)],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=REPOSITORY,
        )
        for rank, name in enumerate(machines)
    ]
    try:
        results = [json.loads(process.communicate()[0]) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert results == ranks.call(2, example, BUDGETS)
    sent = json.loads(ip("-n", machines[0], "-s", "-j", "link", "show", "cable"))[0]["stats64"]["tx"]["bytes"]
    assert sent > 20 * 4 * 76_000  # the gradients of twenty steps
