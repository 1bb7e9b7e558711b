"""The tests share their cores: one thread each, set before torch starts any."""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import pytest


@pytest.fixture
def start():
    """Makes executors of the small model; they are closed after the test."""
    from tests.unit.executing import starting

    with starting() as make:
        yield make
