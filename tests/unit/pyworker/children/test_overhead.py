"""The device memory that a job's process is expected to take besides its tensors, and what it reports of it."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from pg_tensile.execution.backends.cuda import CudaBackend
from pg_tensile.execution.runtime import allocator_limit
from pg_tensile.planning.allocator_rules import MARGIN_BYTES
from pg_tensile.planning.device.profile import A100_40GB
from pyworker.children.overhead import UNMEASURED_BYTES, Overhead, earlier_overhead, expected_overhead
from pyworker.wire import FrameType

GPU = torch.device("cuda", 0)
TORCH = version("torch")


def entry(nbytes: int, network: str = "mlp", device: str = "cuda:0", torch: str = TORCH) -> dict[str, Any]:
    return {"device": device, "torch": torch, "network": network, "bytes": nbytes}


class Scheduler:
    """The channel of a job, which keeps what was reported; `overheads` are those of earlier jobs."""

    def __init__(self, *overheads: dict[str, Any]) -> None:
        self.spec = {"network": {"type": "mlp"}, "overheads": list(overheads)}
        self.reported: list[int] = []

    def send(self, kind: FrameType, header: dict[str, Any]) -> None:
        assert kind == FrameType.PROGRESS
        self.reported.append(header["overhead"]["overhead_bytes"])


def overhead_of(scheduler: Scheduler) -> Overhead:
    return Overhead(cast(Any, scheduler), GPU, A100_40GB)


def device(nbytes: int | None) -> Any:
    return SimpleNamespace(overhead_bytes=lambda: nbytes)


# ---- expected --------------------------------------------------------------------------------------------------------


def test_the_most_that_jobs_alike_have_measured_is_expected() -> None:
    others = [entry(900, "tabular"), entry(901, device="cuda:1"), entry(902, torch="1.0")]
    measured = [entry(500), entry(600), *others]
    assert earlier_overhead(measured, "cuda:0", "mlp") == 600
    assert earlier_overhead(measured, "cuda:0") == 900
    assert earlier_overhead(others, "cuda:0", "mlp") is None


@pytest.mark.parametrize(("process_bytes", "expected"), [(700 << 20, 700 << 20), (0, UNMEASURED_BYTES)])
def test_without_such_jobs_it_is_what_the_device_was_measured_with(process_bytes: int, expected: int) -> None:
    profile = replace(A100_40GB, process_bytes=process_bytes)
    spec: dict[str, Any] = {"network": {"type": "mlp"}, "overheads": [entry(900, "tabular")]}
    assert expected_overhead(spec, "cuda:0", profile) == expected + CudaBackend.code_bytes + MARGIN_BYTES
    assert expected_overhead(spec, "cpu", profile) == 0


# ---- measured --------------------------------------------------------------------------------------------------------


def test_what_is_measured_is_reported_once() -> None:
    scheduler = Scheduler(entry(600))
    overhead = overhead_of(scheduler)
    assert overhead.header() == {"overhead_bytes": 600, "overhead_measured": False, "limited_by": None}
    assert not overhead.measure(device(500))
    overhead.report()
    overhead.report()
    assert scheduler.reported == [500]
    assert overhead.header() == {"overhead_bytes": 500, "overhead_measured": True, "limited_by": None}


def test_it_grows_with_the_code_that_libraries_load() -> None:
    """After the first step and after the first epoch; later it is not looked at."""
    scheduler = Scheduler(entry(600))
    overhead = overhead_of(scheduler)
    sizes = iter([610, 620])
    growing = cast(Any, SimpleNamespace(overhead_bytes=lambda: next(sizes)))
    for _ in range(3):
        overhead.tick(growing)
    assert scheduler.reported == [610]
    for _ in range(3):
        overhead.epoch_ended(growing)
    assert scheduler.reported == [610, 620]


def test_what_the_driver_does_not_tell_stays_as_expected() -> None:
    scheduler = Scheduler(entry(600))
    overhead = overhead_of(scheduler)
    assert not overhead.measure(device(None))
    overhead.report()
    assert (overhead.bytes, overhead.is_measured, scheduler.reported) == (600, False, [])


def test_what_limits_the_process_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator_limit, "limit_enforced_by", lambda device: "allocator and driver")
    scheduler = Scheduler(entry(600))
    overhead = overhead_of(scheduler)
    overhead.measure(device(None))
    overhead.report()
    assert scheduler.reported == [600]
    assert overhead.header()["limited_by"] == "allocator and driver"


def test_a_growth_is_told_once() -> None:
    overhead = overhead_of(Scheduler(entry(600)))
    assert overhead.measure(device(700))
    assert not overhead.measure(device(700))
