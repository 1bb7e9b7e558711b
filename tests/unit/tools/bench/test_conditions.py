"""What is recorded around the steps that count."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pg_tensile.tools.bench import conditions
from pg_tensile.tools.bench.conditions import SHORTEST_S, TurnConditions, TurnWatch
from pg_tensile.tools.bench.contenders import take_turn
from pg_tensile.tools.bench.workload import Batch

CPU = torch.device("cpu")


class Steps:
    """A stepper that writes down what is done with it."""

    def __init__(self, done: list[str]) -> None:
        self.done = done

    def step(self, batch: Batch) -> torch.Tensor:
        self.done.append("step")
        return torch.zeros(())

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self.done.append(name)


class Watch(TurnWatch):
    def __init__(self, done: list[str]) -> None:
        super().__init__(CPU)
        self.done = done

    def start(self) -> None:
        self.done.append("watch")

    def stop(self) -> None:
        self.done.append("watched")


def test_only_the_steps_that_count_are_watched() -> None:
    """Copying the state takes memory and time that no step does."""
    done: list[str] = []
    take_turn(Steps(done), [Batch((), ())] * 3, warmup=1, seed=0, watch=Watch(done))
    assert [name for name in done if name != "synchronize"] == [
        *("step", "count", "watch", "step", "step", "totals", "watched", "state"),
    ]


def test_the_load_of_the_host_is_that_of_the_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conditions.LoadMeter, "read", lambda meter: 0.4)

    def watched(seconds: float) -> TurnWatch:
        times: Iterator[float] = iter((5.0, 5.0 + seconds))
        watch = TurnWatch(CPU, lambda: next(times))
        watch.start()
        watch.stop()
        return watch

    long, short = watched(2 * SHORTEST_S), watched(SHORTEST_S / 2)
    assert long.conditions == TurnConditions(host_load=0.4) and long.allocator is None
    assert short.conditions == TurnConditions()  # the kernel counts too coarsely for it
