"""Members of a model that a library fits: what remains of them when the time is up."""

from __future__ import annotations

from typing import Any

import numpy as np

from pyworker.children import prepared as children
from pyworker.children.members import FittedMembers
from tests.unit.execution.training.test_fitted import prepared

SPEC: dict[str, Any] = {
    "fitted": [{"type": "boosted"}],
    "network": {"type": "tabular"},
    "options": {},
    "epochs": 5,
    "batch_size": 32,
    "optimizer": "adamw",
    "learning_rate": 0.01,
    "learning_rate_schedule": "constant",
    "patience": 5,
    "average_weights": False,
    "refit": True,
    "seed": 1,
    "threads": 1,
    "most_threads": 1,
    "ranks": None,
    "max_time_s": 600.0,
    "checkpoint_interval_s": 0.0,
    "has_version": False,
}


class Channel:
    """Channel of a job that nobody stops, to a ledger that is not asked."""

    spec = SPEC

    def send(self, *_: Any) -> None: ...

    def poll(self, *_: Any) -> None: ...


def test_trees_for_a_first_look_remain_if_the_time_is_up_before_better_ones() -> None:
    rows = prepared("number")
    data: Any = children.Prepared(rows.fitted, rows.dataset, None)  # type: ignore[arg-type]
    members = FittedMembers(Channel(), data)  # type: ignore[arg-type]
    members._is_claimed = True
    members.fit(is_quick=True)
    quick = members.members[0]
    assert len(quick.notes["rounds"]) == 1 and quick.notes["rounds"][0] > 20
    members._began -= 1e6  # the time is up
    members.fit()
    assert members.is_out_of_time and members.members == [quick]
    members._began += 1e6
    members.is_out_of_time = False
    members.fit()
    assert members.members[0] is not quick and not members.is_out_of_time
    target = rows.dataset.validation.target
    errors = [np.square(member.validation[:, 0] - target).mean() for member in (quick, *members.members)]
    assert errors[1] < 1.1 * errors[0]
