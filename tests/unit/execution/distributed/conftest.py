"""Processes for the ranks of a job."""

from collections.abc import Iterator

import pytest

from tests.unit.ranked import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    started = Ranks(4)
    yield started
    started.close()
