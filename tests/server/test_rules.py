"""The server and the library refuse the same architectures and options with the same messages."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, example, given
from hypothesis import strategies as st

from pg_tensile.errors import TensileError
from pg_tensile.planning.policies import POLICIES
from pg_tensile.rules import ARCHITECTURES, OPTIONS, RULES, check_architecture, check_options, resolved
from tests.examples import examples
from tests.server.refusals import refused
from tests.server.support import Connection, value

# jsonb takes no NUL and no surrogates
TEXTS = st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=12)
NAMES = st.from_regex(r"[A-Za-z_.:0-9 \nä]{1,12}", fullmatch=True)
VALUE = re.compile(r'(?<=")( in the options)?: .*', re.DOTALL)  # a value quoted in a message
NUMBERS = st.integers(-(10**40), 10**40) | st.floats(allow_nan=False, allow_infinity=False) | st.integers(-2, 20)
ANYTHING = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)


def fitting(rule: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Generate valid values and neighbouring ones: ends of ranges and a step beyond, arrays that are too short."""
    rule = resolved(rule)
    kind = rule["type"]
    if kind in ("integer", "number"):
        least = rule["minimum"] if "minimum" in rule else rule["exclusiveMinimum"]
        most = rule["maximum"] if "maximum" in rule else rule["exclusiveMaximum"]
        whole = st.integers(int(least), int(most)) | st.sampled_from([least, most, least - 1, most + 1])
        number = whole | whole.map(float) | st.floats(least, most) | st.floats(0, 1)
        return number | st.lists(whole, min_size=1, max_size=3) if "orRange" in rule else number
    if kind == "boolean":
        return st.booleans()
    if kind == "string":
        texts = st.sampled_from([*rule.get("enum", ["a.b:c"]), "", "ReLU"]) | NAMES | TEXTS
        return texts | st.booleans() if "orBoolean" in rule else texts
    if kind == "array":
        sizes = {"min_size": max(0, rule["minItems"] - 1), "max_size": min(rule["maxItems"] + 1, 5)}
        return st.lists(fitting(rule["items"]), **sizes)
    return objects(rule) if "properties" in rule else st.dictionaries(TEXTS, ANYTHING, max_size=3)


def objects(rules: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Generate objects with keys of the rules, mostly with valid values, sometimes with an unknown key."""
    keys = {key: st.one_of(*[fitting(rule)] * 9, ANYTHING) for key, rule in rules["properties"].items()}
    required = {key: keys.pop(key) for key in rules.get("required", ())}
    complete = st.fixed_dictionaries(required, optional=keys)
    some = st.builds(lambda given, chosen: {key: given[key] for key in given if key in required or key in chosen},
                     complete, st.sets(st.sampled_from([*keys, ""]), max_size=3))  # fmt: skip
    stray = st.builds(lambda given, name, content: given | {name: content}, some, NAMES, ANYTHING)
    lacking = some.map(lambda given: {key: given[key] for key in given if key not in required})
    return st.one_of(*[some] * 8, stray, lacking)


def architectures() -> st.SearchStrategy[Any]:
    typed: list[st.SearchStrategy[Any]] = [
        st.builds(dict, objects(rules), type=st.just(name)) for name, rules in ARCHITECTURES.items()
    ]
    return st.one_of(*typed * 3, st.fixed_dictionaries({"type": NAMES}), ANYTHING)


def said(attempt: Callable[[], object]) -> tuple[str, str] | None:
    """Return message and hint of a refusal, None without one. Printed values and nearest names are
    omitted: the server prints as jsonb does and searches names in its own way."""
    try:
        attempt()
    except psycopg.Error as error:
        assert error.sqlstate == "22023", error
        message, hint = error.diag.message_primary or "", error.diag.message_hint or ""
    except TensileError as error:
        message, hint = error.message, error.hint or ""
    else:
        return None
    assert hint
    if message.startswith("unknown"):
        return message, ""
    return VALUE.sub("", message, count=1), hint


def agreed(conn: Connection, function: str, check: Callable[[Any], None], text: str) -> tuple[str, str] | None:
    """Check that server and library both accept the stored JSON, or refuse it alike."""
    stored = value(conn, "SELECT %s::jsonb", text)
    server = said(lambda: conn.execute(f"SELECT tensile_internal.{function}(%s::jsonb)", (text,)))
    assert server == said(lambda: check(stored)), text
    return server


@examples(50, long=400, suppress=[HealthCheck.function_scoped_fixture])
@given(architecture=architectures())
def test_random_architectures(db: Connection, architecture: Any) -> None:
    agreed(db, "_check_architecture", check_architecture, json.dumps(architecture))


@examples(50, long=400, suppress=[HealthCheck.function_scoped_fixture])
@given(options=st.one_of(*[objects(OPTIONS)] * 9, ANYTHING))
@example(options={"search_time": [2.1255059605588164e-124]})  # jsonb prints it with all zeros
def test_random_options(db: Connection, options: Any) -> None:
    agreed(db, "_check_options", check_options, json.dumps(options))


@pytest.mark.parametrize(
    ("key", "number", "accepted"),
    [
        ("dropout", "0.99999999999999999999999999", False),  # readers of JSON round it to 1
        ("dropout", "0.9999999999999999", True),
        ("dropout", "1e-400", True),
        ("dropout", "1e400", False),
        ("dropout", "-0.0", True),
        ("dropout", "-1e-300", False),
        ("embedding", "1024.0", True),
        ("embedding", "10.24e2", True),
        ("embedding", "1024.00000000000000000001", True),  # as above
        ("embedding", "1024.5", False),
    ],
)
def test_numbers_count_as_readers_of_json_see_them(db: Connection, key: str, number: str, accepted: bool) -> None:
    text = f'{{"type": "mlp", "{key}": {number}}}'
    assert (agreed(db, "_check_architecture", check_architecture, text) is None) == accepted


@pytest.mark.parametrize(
    ("text", "accepted"),
    [
        *(("a:b", True), ("a.b_1.c:D.e2", True), ("größe:f", True)),
        *(("a..b:c", False), ("1a:b", False), ("a:1", False), ("a:b\n", False), ("a b:c", False), ("a:b:c", False)),
        *(("a", False), (":b", False), ("a:", False), ("a.:b", False), ("a-b:c", False), ("", False)),
    ],
)
def test_one_rule_says_what_a_callable_is(db: Connection, text: str, accepted: bool) -> None:
    architecture = json.dumps({"type": "import", "callable": text})
    assert (agreed(db, "_check_architecture", check_architecture, architecture) is None) == accepted


def test_a_long_value_is_cut_in_the_message(db: Connection) -> None:
    text = json.dumps({"task": "ä" * 100})
    error = refused(
        "22023", 'key "task"', "regression", lambda: db.execute("SELECT tensile_internal._check_options(%s)", (text,))
    )
    with pytest.raises(TensileError) as caught:
        check_options(json.loads(text))
    assert error.diag.message_primary == caught.value.message
    assert caught.value.message.endswith(": " + '"' + "ä" * 56 + "...")


def test_the_server_has_the_file(db: Connection) -> None:
    assert value(db, "SELECT tensile_internal._rules()") == RULES


def test_code_of_users_is_marked(db: Connection) -> None:
    """register_model asks for pg_execute_server_program where it is (test_ownership.py)."""
    assert {name for name, rules in ARCHITECTURES.items() if rules.get("code")} == {"import", "python"}


# -- policies ---------------------------------------------------------------------------------------------------------


def test_policies_of_jobs_are_those_of_the_setting_and_the_library_has_them(db: Connection) -> None:
    words = value(db, "SELECT enumvals FROM pg_settings WHERE name = 'pg_tensile.policy'")
    assert set(words) <= set(POLICIES)
    check = """
        SELECT tensile_internal._check_training(
            tensile_internal._job_of_arguments(jsonb_build_object('policy', %s::text)))
    """
    for policy in words:
        db.execute(check, (policy,))
    for policy in [name for name in POLICIES if name not in words]:
        error = refused("22023", f'unknown policy "{policy}"', "", partial(db.execute, check, (policy,)))
        assert all(f"'{word}'" in (error.diag.message_hint or "") for word in words)
    db.execute(check, (None,))
