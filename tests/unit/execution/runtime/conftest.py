"""The simple policies, under each of which a test runs that takes `policy`."""

import pytest

from tests.unit.executing import SIMPLE


@pytest.fixture(params=SIMPLE)
def policy(request: pytest.FixtureRequest) -> str:
    return request.param
