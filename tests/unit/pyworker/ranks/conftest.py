"""A Ray cluster of two nodes, and trainers whose jobs are trained there."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from pyworker.child import FD_VARIABLE, PARENT_VARIABLE
from pyworker.version import VERSION
from pyworker.wire import FrameType
from scripts.ray_cluster import RayCluster
from tests.repository import REPOSITORY
from tests.unit.pyworker.children.test_trainer import Child
from tests.unit.ray_cluster import ray_cluster
from tests.unit.rows import every_type

SILENCE_S = 60  # of a trainer, at most


class RankedChild(Child):
    """A trainer in a process in the cluster's network; it trains by `ranks`."""

    def __init__(self, cluster: RayCluster, rows: Any, ranks: list[int], **spec: Any) -> None:
        self._cluster = cluster
        access = {"address": cluster.address, "token_file": str(cluster.token_file), "timeout_s": 30}
        super().__init__(rows, ranks=ranks, ray=access | spec.pop("ray", {}), **spec)

    def _start(self, theirs: socket.socket) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
        environment |= {"PYTHONPATH": str(REPOSITORY), FD_VARIABLE: str(theirs.fileno())}
        with theirs:
            self.process = subprocess.Popen(
                self._cluster.command(sys.executable, "-m", "pyworker", "trainer"),
                env=environment | {PARENT_VARIABLE: str(os.getpid())},
                pass_fds=(theirs.fileno(),),
            )
        self.connection.send(FrameType.HELLO, header={"version": VERSION})
        hello = self.connection.recv(SILENCE_S)
        assert hello is not None and hello.type == FrameType.HELLO

    def close(self) -> None:
        self.connection.close()
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="session")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster(nodes=1) as started:
        yield started


Begin = Callable[..., RankedChild]


@contextmanager
def beginning(cluster: RayCluster) -> Iterator[Begin]:
    """Yield a function that starts a job; all are ended afterwards."""
    children: list[RankedChild] = []

    def begin(ranks: tuple[int, int] = (2, 2), rows: Any = None, **options: Any) -> RankedChild:
        children.append(RankedChild(cluster, rows or every_type(300), list(ranks), **options))
        return children[-1]

    yield begin
    for child in children:
        child.close()
    while cluster.ranks():  # the next job would find their processors taken
        time.sleep(0.1)


@pytest.fixture
def begin(cluster: RayCluster) -> Iterator[Begin]:
    with beginning(cluster) as function:
        yield function
