"""The number of examples of property tests, and which ones are drawn.

A property test says how many examples each of the two targets draws:

    @given(traces())
    @examples(50, long=400)
    def test_a_valid_plan_changes_no_value(trace: Trace) -> None: ...

`make test` draws 50. `make test-long` (pytest --hypothesis-profile long -m long) loads the profile `long`, under which
a test with a number `long` carries the mark `long` and draws that many. Without that number, its examples are all in
`make test`. A test without the decorator draws EXAMPLES. `long` is for properties whose faults are rare: those that
random plans, files and interleavings find.

The examples of `make test` are derived from each test's source, so that the same commit is always judged by the same
ones: a check that fails does so because of what has changed. The long tests draw new ones each time, but not in
continuous integration (CI=…), which is such a check; a failure prints the line that repeats it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings

EXAMPLES = 25
LONG = "long"  # a profile, and the mark of the tests that it has more examples for

Test = TypeVar("Test", bound=Callable[..., Any])


def register_profiles() -> None:
    """Register the profiles and load the short one; pytest's option loads another one later.

    No profile asserts durations: the machine may be busy.
    """
    settings.register_profile(
        "short",
        max_examples=EXAMPLES,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.register_profile(LONG, settings.get_profile("short"), derandomize="CI" in os.environ, print_blob=True)
    settings.load_profile("short")


def examples(number: int, *, long: int | None = None, suppress: Collection[HealthCheck] = ()) -> Callable[[Test], Test]:
    """Decorate a property test with its number of examples.

    suppress: health checks that do not apply to the test, such as that of fixtures which its examples share.
    """
    repeated = long is not None and settings.get_current_profile_name().startswith(LONG)
    profile = settings.get_profile(settings.get_current_profile_name())
    chosen = settings(
        profile,
        max_examples=(long if repeated else None) or number,
        suppress_health_check={*profile.suppress_health_check, *suppress},
    )

    def decorate(test: Test) -> Test:
        test = chosen(test)
        return pytest.mark.long(test) if repeated else test

    return decorate
