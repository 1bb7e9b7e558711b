"""The small model's executors, and one thread for every test."""

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """Whatever a test does with the number of threads, the next one computes with one: sums depend on it."""
    yield
    if torch.get_num_threads() != 1:
        torch.set_num_threads(1)


@pytest.fixture
def start():
    """Makes executors of the small model; they are closed after the test."""
    from tests.unit.executing import starting

    with starting() as make:
        yield make
