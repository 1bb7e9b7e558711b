"""Errors of children as those of the server."""

from __future__ import annotations

import pytest
import torch

from pg_tensile.errors import DeviceError, DeviceFaultError
from pyworker.child import error_header
from pyworker.supervisors.failures import ChildDied, Failure, end_of_trainer, failure_of_frame


@pytest.mark.parametrize(
    ("sent", "kept"),
    [("22023", "22023"), *((bad, "XX000") for bad in ("00000", "01000", "ab!{}", "42", "22023\n", "", 5, None))],
)
def test_an_sqlstate_that_cannot_be_raised_becomes_an_internal_error(sent: object, kept: str) -> None:
    failure = failure_of_frame({"sqlstate": sent, "message": "no", "hint": "perhaps"})
    assert (failure.sqlstate, failure.message, failure.hint) == (kept, "no", "perhaps")


@pytest.mark.parametrize("error", [DeviceFaultError("it has failed"), torch.AcceleratorError("it has failed\nat once")])
def test_a_trainer_whose_device_has_failed_is_as_good_as_dead(error: Exception) -> None:
    end = end_of_trainer(error_header(error))
    assert isinstance(end, ChildDied) and end.reason == "trainer has lost its device: it has failed"
    assert end.traceback and "it has failed" in end.traceback


def test_a_device_that_is_not_there_fails_the_job() -> None:
    end = end_of_trainer(error_header(DeviceError("it is not there")))
    assert isinstance(end, Failure) and end.sqlstate == "55000"


@pytest.mark.parametrize("sqlstate", ["08006", "08000"])
def test_a_trainer_that_has_lost_its_cluster_is_as_good_as_dead(sqlstate: str) -> None:
    message = "the Ray cluster at head:10001 cannot be reached"
    end = end_of_trainer({"sqlstate": sqlstate, "message": f"{message}\nfor some reason", "traceback": "line 1"})
    assert isinstance(end, ChildDied) and (end.reason, end.traceback) == (message, "line 1")
    end = end_of_trainer({"sqlstate": sqlstate, "message": message, "detail": "no answer"})
    assert isinstance(end, ChildDied) and end.traceback == "no answer"


@pytest.mark.parametrize("sqlstate", ["08P01", "28000", "55000", "0A000"])
def test_what_another_attempt_would_meet_again_fails_the_job(sqlstate: str) -> None:
    end = end_of_trainer({"sqlstate": sqlstate, "message": "no", "hint": "change a setting"})
    assert isinstance(end, Failure) and (end.sqlstate, end.hint) == (sqlstate, "change a setting")
