"""Processes that measure the device while another thread imports modules: they do so after that."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from pg_tensile.execution.measuring import device
from pg_tensile.planning.device.profile import RTX_A6000
from pyworker.children import evaluate, explain


@pytest.mark.parametrize(
    "measured_profile", [lambda channel: explain._target_device(channel).profile, evaluate._profile]
)
def test_the_device_is_measured_after_the_imports(
    monkeypatch: pytest.MonkeyPatch, measured_profile: Callable[[Any], Any]
) -> None:
    order, waited_for = [], threading.Event()

    def measure(_device: object) -> object:
        order.append("measured")
        return RTX_A6000

    def imports() -> None:
        waited_for.wait()
        order.append("imported")

    def wait_for(future: Future[Any], _phase: str) -> Any:
        waited_for.set()
        return future.result()

    monkeypatch.setattr(device, "measure", measure)
    with ThreadPoolExecutor(1) as background:
        background.submit(imports)
        spec = {"device": "cpu", "profiles": {}, "memory_budget": 1, "ranks": None, "network": None}
        spec |= {"role_memory": None, "overheads": []}
        assert measured_profile(SimpleNamespace(spec=spec, background=background, wait_for=wait_for)) == RTX_A6000
        waited_for.set()
    assert order == ["imported", "measured"]
