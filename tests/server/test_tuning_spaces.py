"""Spaces: whatever is accepted gives trials that train_model accepts, and all else is refused with a hint."""

from __future__ import annotations

import json
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, example, given
from hypothesis import strategies as st
from psycopg.types.json import Jsonb

from pyworker.children.tuner import suggest
from tests.examples import examples
from tests.server.support import Connection, value

TYPES = ("tabular", "mlp", "cnn", "transformer", "boosted", "linear", "pretrained", "import", "python", "svm")
KEYS = (
    *("learning_rate", "batch_size", "optimizer", "epochs", "weight_decay", "clip", "early_stopping", "precision"),
    *("hidden", "layers", "dropout", "members", "norm", "channels", "kernel", "dim", "heads", "length", "kwargs"),
    *("deploy", "seed", "low"),
)
NUMBERS = st.integers(-2, 600) | st.floats(-1, 2, allow_nan=False) | st.sampled_from([0, 1, 1e-3, 10**7, 10**30])
SCALARS = NUMBERS | st.booleans() | st.none() | st.sampled_from(["adam", "layer", "none", "bfloat16", "", "x"])
VALUES = SCALARS | st.lists(NUMBERS, max_size=3) | st.just({"patience": 3})
RANGES = st.fixed_dictionaries(
    {"low": NUMBERS, "high": NUMBERS}, optional={"log": st.booleans(), "step": NUMBERS, "steps": NUMBERS}
)
DOMAINS = RANGES | st.lists(VALUES, max_size=4) | VALUES
SPACES = st.builds(
    lambda types, domains: domains | ({} if types is None else {"architecture": types}),
    st.none() | st.lists(st.sampled_from(TYPES), max_size=3),
    st.dictionaries(st.sampled_from(KEYS), DOMAINS, max_size=3),
)


@given(space=SPACES, type=st.sampled_from(TYPES[:4]), seed=st.integers(0, 5))
@example(space={"hidden": {"low": 4, "high": 64, "log": True}}, type="mlp", seed=0)
@example(space={"architecture": ["mlp", "tabular"], "hidden": [64, 128]}, type="cnn", seed=1)
@example(space={"dim": [8, 12], "heads": [2, 8]}, type="transformer", seed=2)
@examples(25, long=150, suppress=[HealthCheck.function_scoped_fixture])
def test_accepted_spaces_give_valid_trials(db: Connection, space: dict[str, Any], type: str, seed: int) -> None:
    try:
        db.execute("SELECT tensile_internal._check_space(%s, %s)", (Jsonb(space), type))
    except psycopg.Error as error:
        assert error.sqlstate == "22023" and error.diag.message_hint, error
        return
    domains = value(db, "SELECT tensile_internal._space_domains(%s, %s)", Jsonb(space), type)
    request = {"number": 0, "seed": seed, "trials": 4, "maximize": False, "architecture": type, "domains": domains}
    params = suggest(json.loads(json.dumps(request | {"known": []})))
    made = value(db, "SELECT tensile_internal._trial_architecture(%s, %s)", Jsonb({"type": type}), Jsonb(params))
    assert made["type"] == params.get("architecture", type)
    try:
        db.execute("SELECT tensile_internal._check_architecture(%s)", (Jsonb(made),))
    except psycopg.Error as error:
        assert "divisible" in str(error) or "is missing" in str(error)
    arguments = {"options": {"keep": "last"}, "epochs": 7}
    merged = value(db, "SELECT tensile_internal._trial_arguments(%s, %s)", Jsonb(arguments), Jsonb(params))
    db.execute("SELECT tensile_internal._check_options(%s)", (Jsonb(merged["options"]),))
    assert merged["options"]["keep"] == "last"


@pytest.mark.parametrize("type", TYPES[:-1])
def test_the_default_space_is_accepted(db: Connection, type: str) -> None:
    db.execute("SELECT tensile_internal._check_space(tensile_internal._default_space(%s), %s)", (type, type))
