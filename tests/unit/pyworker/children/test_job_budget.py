"""The memory that a job asks for and may have, by its memory_budget and the limit of its role."""

from __future__ import annotations

import pytest

from pyworker.children.job_budget import ROLE_SETTING, claimed_bytes, limiting, most_bytes


@pytest.mark.parametrize(
    ("budget", "role", "claimed", "most", "name"),
    [
        (None, None, None, None, "memory_budget"),
        (5, None, 5, 5, "memory_budget"),
        (None, 7, None, 7, ROLE_SETTING),
        (5, 7, 5, 5, "memory_budget"),
        (9, 7, 7, 7, ROLE_SETTING),
    ],
)
def test_the_less_of_both_counts(
    budget: int | None, role: int | None, claimed: int | None, most: int | None, name: str
) -> None:
    spec = {"memory_budget": budget, "role_memory": role}
    assert (claimed_bytes(spec), most_bytes(spec), limiting(spec)) == (claimed, most, name)
