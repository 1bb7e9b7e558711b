"""The small model's executors, and one thread for every test."""

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """Whatever tests before did with the number of threads: sums depend on it."""
    torch.set_num_threads(1)


@pytest.fixture
def start():
    """Makes executors of the small model; they are closed after the test."""
    from tests.unit.executing import starting

    with starting() as make:
        yield make
