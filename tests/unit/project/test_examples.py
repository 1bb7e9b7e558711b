"""Property tests draw few examples, always the same ones, and more in the long tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples, register_profiles
from tests.repository import REPOSITORY


@pytest.fixture(autouse=True)
def restored_profile() -> Iterator[None]:
    before = settings.get_current_profile_name()
    yield
    register_profiles()
    settings.load_profile(before)


def drawn(decorate: Callable[[Callable[..., None]], Callable[..., None]]) -> tuple[list[int], bool]:
    """Return what a property test draws, and whether it is long."""
    numbers: list[int] = []

    @given(st.integers(0, 1 << 60))
    @decorate
    def test(number: int) -> None:
        numbers.append(number)

    test()
    return numbers, "long" in {mark.name for mark in getattr(test, "pytestmark", ())}


def test_the_short_profile_always_draws_the_same_few_examples() -> None:
    settings.load_profile("short")
    numbers, long = drawn(examples(5, long=50))
    assert len(numbers) == 5 and not long
    assert drawn(examples(5, long=50)) == (numbers, False)


def test_the_long_profile_draws_more_examples_in_tests_that_have_them() -> None:
    settings.load_profile("long")
    numbers, long = drawn(examples(5, long=50))
    assert len(numbers) == 50 and long
    assert not drawn(examples(5))[1]


@pytest.mark.parametrize("variable", [None, "CI"])
def test_the_long_profile_draws_new_ones_but_in_continuous_integration(
    variable: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CI", raising=False)
    if variable:
        monkeypatch.setenv(variable, "true")
    register_profiles()
    settings.load_profile("long")
    decorate = examples(5, long=50)
    assert (drawn(decorate) == drawn(decorate)) == (variable is not None)


def test_no_property_test_has_other_settings() -> None:
    helpers = ("examples.py", "test_examples.py")
    files = [path for path in (REPOSITORY / "tests").rglob("*.py") if path.name not in helpers]
    assert [path for path in files if "max_examples" in path.read_text()] == []
