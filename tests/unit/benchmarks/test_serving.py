"""Requests to several models within a budget: open arrivals, turns on the device, and checks that can fail."""

from __future__ import annotations

import threading
from itertools import pairwise
from typing import Any

import pytest

from benchmarks.systems import serving


class Connection:
    def close(self) -> None:
        pass


def test_arrivals_are_a_poisson_process_and_the_same_for_all_ways() -> None:
    asked = serving.requests(4, 4000, seed=1)
    assert asked == serving.requests(4, 4000, seed=1) != serving.requests(4, 4000, seed=2)
    gaps = [after - before for (before, *_), (after, *_) in pairwise(asked)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1.0, rel=0.1)
    assert sum((gap - mean) ** 2 for gap in gaps) / len(gaps) == pytest.approx(1.0, rel=0.2)  # as an exponential
    assert {model for _, model, _ in asked} == set(range(4))


def test_latency_counts_from_the_planned_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second request, due at once and served at once, waits for the only client."""
    monkeypatch.setattr(serving, "CLIENTS", 1)

    def serve(_conn: Any, model: int, _image: int) -> None:
        threading.Event().wait(0.05 * model)

    first, second = serving.latencies(Connection, serve, [(0.0, 1, 1), (0.0, 0, 1)], rate=1.0)  # type: ignore[arg-type]
    assert second >= first >= 50.0


def test_turns_wait_for_the_link_when_the_model_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(serving.time, "sleep", slept.append)
    monkeypatch.setattr(serving, "predict", lambda *_: None)
    turns = serving.Turns(0.5)
    for model in (0, 0, 1, 1, 0):
        turns(Connection(), model, 1)  # type: ignore[arg-type]
    assert slept == [0.5] * 3


def row(way: str, **changes: Any) -> dict[str, Any]:
    within = way == "within"
    usual = {"models": 4, "way": way, "rate": 0.3, "requests": 160, "p99_ms": 100.0, "saturated": False}
    usual |= {"identical": within or None, "loaded": 4 if within else 1, "planned_bytes": 90 if within else None}
    return usual | {"budget_bytes": 100, "parameter_bytes": 360} | changes


@pytest.mark.parametrize(
    ("within", "turns", "holding"),
    [
        ({}, {}, [True, True, True]),
        ({"identical": False}, {}, [False, True, True]),
        ({"planned_bytes": 101}, {}, [True, False, True]),
        ({"loaded": 3}, {}, [True, False, True]),
        ({"parameter_bytes": 100}, {}, [True, False, True]),
        ({}, {"p99_ms": 99.0}, [True, True, False]),
        ({}, {"p99_ms": 99.0, "saturated": True}, [True, True]),
        ({"requests": 40}, {"p99_ms": 99.0}, [True, True]),
    ],
)
def test_checks(within: dict[str, Any], turns: dict[str, Any], holding: list[bool]) -> None:
    measured = [row("within", **within), row("turns", **turns), row("whole")]
    assert [check.holds for check in serving.checks(measured)] == holding
