"""A Ray cluster for tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from scripts.ray_cluster import NoNamespaceError, RayCluster


@contextmanager
def ray_cluster(nodes: int = 0, cpus: int = 2) -> Iterator[RayCluster]:
    """A cluster for tests, which are skipped without Ray, or where network namespaces cannot be made."""
    pytest.importorskip("ray", reason="the package ray is not installed")
    try:
        cluster = RayCluster(nodes, cpus)
    except NoNamespaceError as error:
        pytest.skip(str(error))
    try:
        yield cluster
    finally:
        cluster.close()
