"""The small model's executors, and one thread for every test."""

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """Set one thread, whatever earlier tests set: sums depend on the number of threads."""
    torch.set_num_threads(1)


@pytest.fixture
def start():
    """Create executors of the small model, which are closed after the test."""
    from tests.unit.executing import starting

    with starting() as make:
        yield make
