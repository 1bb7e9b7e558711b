"""The tuner: values within their domains, and the same for the same trials before."""

from __future__ import annotations

import json
import math
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from pyworker.children.tuner import applies, derived_seed, suggest

Domain = dict[str, Any]
RATE: Domain = {"name": "learning_rate", "types": None, "low": 1e-4, "high": 1e-1, "log": True, "integer": False}
BATCH: Domain = {"name": "batch_size", "types": None, "low": 32, "high": 500, "step": 32, "integer": True}
HIDDEN: Domain = {"name": "hidden", "types": ["mlp", "tabular"], "choices": [64, [128, 64], []]}
MEMBERS = {"name": "members", "types": ["tabular"], "low": 1, "high": 8, "integer": True}
ARCHITECTURE = {"name": "architecture", "types": None, "choices": ["mlp", "tabular"]}
SCALARS = st.one_of(st.booleans(), st.integers(-5, 5), st.floats(-5, 5), st.text(max_size=3), st.none())


def request(domains: list[dict[str, Any]], known: list[dict[str, Any]] | None = None, **fields: Any) -> dict[str, Any]:
    number = len(known or [])
    made = {"tuning": 1, "number": number, "seed": 0, "trials": 20, "maximize": False, "architecture": "mlp"}
    return made | {"domains": domains, "known": known or []} | fields


def history(domains: list[dict[str, Any]], number: int, score: Any, **fields: Any) -> list[dict[str, Any]]:
    """Return trials that were chosen one after the other, with what `score` returns for their values."""
    known: list[dict[str, Any]] = []
    for _ in range(number):
        params = suggest(request(domains, known, **fields))
        known.append({"params": params, "least_bytes": 1000} | score(params))
    return known


def finished(value: float) -> dict[str, Any]:
    return {"state": "finished", "value": value}


def test_each_value_lies_in_its_domain() -> None:
    for trial in history([ARCHITECTURE, RATE, BATCH, HIDDEN], 15, lambda params: finished(params["learning_rate"])):
        params = trial["params"]
        assert 1e-4 <= params["learning_rate"] <= 1e-1
        assert params["batch_size"] in range(32, 501, 32) and type(params["batch_size"]) is int
        assert params["hidden"] in (64, [128, 64], [])


def test_keys_of_other_architectures_have_no_value() -> None:
    trials = history([ARCHITECTURE, HIDDEN, MEMBERS], 12, lambda params: finished(1.0))
    assert {trial["params"]["architecture"] for trial in trials} == {"mlp", "tabular"}
    for trial in trials:
        assert ("members" in trial["params"]) == (trial["params"]["architecture"] == "tabular")
    assert applies(MEMBERS, "tabular") and not applies(MEMBERS, "mlp") and applies(RATE, "cnn")
    assert "members" not in suggest(request([HIDDEN, MEMBERS]))  # the model's own architecture is an mlp


def test_the_same_trials_before_give_the_same_values() -> None:
    domains = [RATE, BATCH, HIDDEN]

    def score(params: dict[str, Any]) -> dict[str, Any]:
        return finished(abs(params["learning_rate"] - 0.01))

    first, second = (history(domains, 12, score) for _ in range(2))
    assert first == second
    assert history(domains, 12, score, seed=1) != first
    sent = json.loads(json.dumps(request(domains, first)))
    assert suggest(sent) == suggest(request(domains, first))


def test_the_sampler_learns() -> None:
    """Of trials whose loss is their distance from 0.003, later ones are closer."""
    domains = [RATE]
    trials = history(domains, 40, lambda params: finished(abs(math.log10(params["learning_rate"]) + 2.5)), trials=40)
    distances = [trial["value"] for trial in trials]
    assert sum(distances[30:]) < sum(distances[:10])
    larger = history(domains, 40, lambda params: finished(params["learning_rate"]), trials=40, maximize=True)
    smaller = history(domains, 40, lambda params: finished(params["learning_rate"]), trials=40, maximize=False)
    assert sum(t["value"] for t in larger[30:]) > sum(t["value"] for t in smaller[30:])


def test_trials_that_do_not_fit_are_avoided() -> None:
    domain = {"name": "hidden", "types": ["mlp"], "low": 1, "high": 1000, "integer": True}

    def score(params: dict[str, Any]) -> dict[str, Any]:
        if params["hidden"] > 300:
            return {"state": "infeasible", "value": None, "least_bytes": params["hidden"]}
        return finished(-float(params["hidden"]))

    trials = history([domain], 40, score, trials=40)
    infeasible = [trial["state"] == "infeasible" for trial in trials]
    assert sum(infeasible[20:]) < sum(infeasible[:20])


def test_every_state_of_a_trial_is_understood() -> None:
    params = {"learning_rate": 0.01}
    known = [
        {"params": params, "state": state, "value": value, "least_bytes": None}
        for state in ("finished", "pruned", "infeasible", "failed", "cancelled")
        for value in (None, 1.0, "Infinity")
    ]
    known.append({"params": params, "state": "running"})
    assert 1e-4 <= suggest(request([RATE], known))["learning_rate"] <= 1e-1


@given(st.lists(SCALARS, min_size=1, max_size=6, unique_by=lambda value: json.dumps(value)))
def test_any_list_of_values_comes_back_unchanged(choices: list[Any]) -> None:
    domain = {"name": "x", "types": None, "choices": choices}
    chosen = suggest(request([domain]))["x"]
    assert json.dumps(chosen) in {json.dumps(choice) for choice in choices}
    again = suggest(request([domain], [{"params": {"x": chosen}, "state": "finished", "value": 1.0}]))["x"]
    assert json.dumps(again) in {json.dumps(choice) for choice in choices}


@given(st.floats(1e-6, 1e3), st.floats(0, 1e3), st.floats(1e-3, 10) | st.none(), st.integers())
def test_any_range_is_kept(low: float, width: float, step: float | None, seed: int) -> None:
    domain: dict[str, Any] = {"name": "x", "types": None, "low": low, "high": low + width, "integer": False}
    if step is not None:
        domain["step"] = step
    known = [{"params": {"x": suggest(request([domain]))["x"]}, "state": "finished", "value": 0.5}]
    assert low <= known[0]["params"]["x"] <= low + width  # type: ignore[index]
    assert low <= suggest(request([domain], known, seed=seed))["x"] <= low + width


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, -(2**63)])
def test_each_trial_has_a_seed_of_its_own(seed: int) -> None:
    seeds = {derived_seed(seed, number) for number in range(100)}
    assert len(seeds) == 100 and min(seeds) >= 0 and max(seeds) < 2**32
