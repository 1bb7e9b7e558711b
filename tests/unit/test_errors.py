"""Errors that pass from one process to another, as those of a process pool do."""

from __future__ import annotations

import copy
import pickle

import pytest

from pg_tensile.errors import BudgetError, InvalidPlanError, OutOfDeviceMemoryError, TensileError, TrainingError


@pytest.mark.parametrize(
    "error",
    [
        BudgetError(10, 20, "operator 3"),
        OutOfDeviceMemoryError("operator 3", 1, 2, None),
        TrainingError("the loss is not finite", "Lower the rate.", None, step=7),
        InvalidPlanError("the plan is wrong", operator=4, tensor=5, event=6),
        TensileError("no"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_is_the_same_in_another_process(error: TensileError) -> None:
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(other) is type(error)
        assert (str(other), other.__dict__) == (str(error), error.__dict__)
