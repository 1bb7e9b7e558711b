"""Which idle models a predictor drops for jobs, and when."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pyworker.children.idle_models import PATIENCE, IdleModels
from pyworker.children.model_cache import Key, ModelCache

IDLE_S = 10.0


class Models:
    """A cache of models on a clock that the test turns, and those that were dropped for jobs."""

    def __init__(self) -> None:
        self.now = 0.0
        self.busy: set[int] = set()
        self.dropped: list[int] = []
        self.cache = ModelCache(1 << 40, self._drop, lambda: self.now)
        self.idle = IdleModels(self.cache, lambda key: key.version in self.busy, lambda: self.now)

    def _drop(self, key: Key, model: Any) -> None:
        self.dropped.append(key.version)
        self.cache.closed(model.device, model.nbytes)

    def load(self, number: int, nbytes: int, device: str = "cpu") -> None:
        model: Any = SimpleNamespace(device=device, nbytes=nbytes, host_bytes=0)
        self.cache.add(Key(number), model)

    def use(self, number: int) -> None:
        assert self.cache.get(Key(number)) is not None

    def lack(
        self, *waiting: int, running: int = 0, device: str = "cpu", closed_bytes: int | None = None
    ) -> float | None:
        """`closed_bytes`: what the ledger knows of the dropped models; by default it knows of all."""
        closed = self.cache.closed_bytes[device] if closed_bytes is None else closed_bytes
        header = {"device": device, "waiting": list(waiting), "running": running, "idle_s": IDLE_S}
        self.idle.tell(header | {"closed_bytes": closed})
        return self.idle.give_way()


@pytest.fixture
def models() -> Models:
    """Three models of 100 bytes, of which the first was used last, and one elsewhere."""
    models = Models()
    for number in (1, 2, 3):
        models.load(number, 100)
    models.load(4, 1000, "cuda:0")
    models.use(1)
    return models


def test_models_give_way_once_they_are_idle_and_no_more_of_them_than_a_job_lacks(models: Models) -> None:
    models.now = 4.0
    models.use(3)
    assert models.lack(101) == IDLE_S - 4.0, "when the first two are idle"
    models.now = IDLE_S
    assert models.idle.give_way() is None and models.dropped == [2, 1]
    models.now = 100.0
    assert models.idle.give_way() is None and models.dropped == [2, 1], "until the scheduler has decided anew"
    models.lack(1)
    assert models.dropped == [2, 1, 3]


def test_nothing_is_dropped_that_helps_no_job(models: Models) -> None:
    models.now = IDLE_S
    assert models.lack(301) is None and models.dropped == []
    assert models.lack(301, 200, 1) is None and models.dropped == [2, 3], "the first job that they suffice for"
    assert models.lack(device="cuda:0") is None and models.lack(1001, device="cuda:0") is None
    models.lack(1000, device="cuda:0")
    assert models.dropped == [2, 3, 4]


def test_models_whose_memory_the_ledger_does_not_know_to_be_free_count_as_dropped(models: Models) -> None:
    models.now = 100.0
    models.lack(150)
    assert models.dropped == [2, 3]
    models.lack(50, closed_bytes=100)
    models.lack(150, 50, closed_bytes=0)
    models.lack(running=200, closed_bytes=0)
    assert models.dropped == [2, 3]
    models.lack(110, closed_bytes=100)
    assert models.dropped == [2, 3, 1], "10 bytes more than are becoming free"


def test_models_that_compute_are_not_idle_however_long_they_take(models: Models) -> None:
    models.now = 1000.0
    models.busy = {1, 2, 3}
    assert models.lack(1) is None and models.dropped == []
    models.busy = {2}
    models.idle.give_way()
    assert models.dropped == [3]


def test_what_jobs_lack_no_more_is_forgotten(models: Models) -> None:
    models.lack(100, running=1)
    models.lack()
    models.now = 1000.0
    assert models.idle.give_way() is None and models.dropped == []


def test_running_jobs_have_the_memory_of_models_that_have_been_idle_for_longer(models: Models) -> None:
    """As much as there is: whatever they get lets them lose less time."""
    models.now = IDLE_S
    models.use(1)
    assert models.lack(running=1000) == PATIENCE - IDLE_S and models.dropped == []
    models.now = PATIENCE
    assert models.idle.give_way() is None and models.dropped == [2, 3]
    models.now = PATIENCE + IDLE_S
    models.lack(running=-1)
    assert models.dropped == [2, 3]
    models.lack(running=1)
    assert models.dropped == [2, 3, 1]
