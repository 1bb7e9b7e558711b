"""rules.json is the source of what the code has: keys and defaults of architectures, options, names of all kinds."""

from __future__ import annotations

import json
import re
from dataclasses import MISSING, Field, fields
from typing import Any

import pytest

from pg_tensile.errors import OptionError
from pg_tensile.execution.models.layers import ACTIVATIONS, NORMS_1D
from pg_tensile.execution.models.registry import TYPES
from pg_tensile.execution.training.settings import COMPRESSIONS, KEPT, SCHEDULES, EarlyStopping, Settings
from pg_tensile.planning.batchsize.learning_rate import RATE_LAWS
from pg_tensile.planning.plan.plan import CODECS, EventKind
from pg_tensile.rules import ARCHITECTURES, OPTIONS, RULES, check_architecture, check_options, resolved
from pyworker.children.job import job_settings
from tests.repository import REPOSITORY

TERMS = {
    *("type", "enum", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "not", "minLength", "pattern"),
    *("minItems", "maxItems", "items", "properties", "required", "default", "description", "examples"),
    *("$ref", "divisibleBy", "ascending", "orRange", "orBoolean", "code"),
}


def default(field: Field[Any]) -> Any:
    value = field.default if field.default_factory is MISSING else field.default_factory()
    return list(value) if isinstance(value, tuple) else value


def rules() -> list[dict[str, Any]]:
    """Return all rules, nested ones included."""
    collected: list[dict[str, Any]] = []
    pending = [*ARCHITECTURES.values(), OPTIONS, *RULES["shared"].values()]
    while pending:
        collected.append(rule := pending.pop())
        pending += [*rule.get("properties", {}).values(), *([rule["items"]] if "items" in rule else [])]
    return collected


@pytest.mark.parametrize("name", TYPES)
def test_an_architecture_has_the_fields_and_defaults_of_its_rules(name: str) -> None:
    properties = ARCHITECTURES[name]["properties"]
    default_values = {field.name: default(field) for field in fields(TYPES[name])}
    required = [key for key, value in default_values.items() if value is MISSING]
    assert required == ARCHITECTURES[name].get("required", [])
    assert {key: rule.get("default") for key, rule in properties.items() if key not in required} == {
        key: value for key, value in default_values.items() if key not in required
    }


def test_every_architecture_of_the_rules_can_be_built() -> None:
    assert set(ARCHITECTURES) == set(TYPES)


def test_choices_are_what_the_library_has() -> None:
    shared, options = RULES["shared"], OPTIONS["properties"]
    assert shared["activation"]["enum"] == list(ACTIVATIONS)
    assert shared["norm"]["enum"] == ["none", *NORMS_1D]
    assert options["compression"]["enum"] == list(COMPRESSIONS)
    assert options["learning_rate_scaling"]["enum"] == list(RATE_LAWS)
    assert options["keep"]["enum"] == list(KEPT) and options["keep"]["default"] == Settings(1, 1).keep
    assert options["learning_rate_schedule"]["enum"] == list(SCHEDULES)
    stopping = options["early_stopping"]["properties"]
    assert tuple(stopping) == EarlyStopping._fields
    assert stopping["min_delta"]["default"] == EarlyStopping(1).min_delta


def test_rules_use_known_terms_and_refer_to_shared_ones() -> None:
    assert set(RULES) == {"architectures", "options", "shared"}
    for rule in rules():
        assert set(rule) <= TERMS, rule
        assert rule.get("$ref", "hidden") in RULES["shared"], rule
        bounds = {"minimum", "exclusiveMinimum"} & set(rule), {"maximum", "exclusiveMaximum"} & set(rule)
        assert resolved(rule).get("type") not in ("integer", "number") or "$ref" in rule or all(bounds), rule


def test_every_default_is_a_value_that_may_be_given() -> None:
    for name, architecture in ARCHITECTURES.items():
        rules = architecture["properties"]
        given = {key: rules[key].get("examples", ["a.b:c"])[0] for key in architecture.get("required", ())}
        for key, rule in architecture["properties"].items():
            check_architecture({"type": name, **given, **({key: rule["default"]} if "default" in rule else {})})
    for key, rule in OPTIONS["properties"].items():
        if "default" in rule:
            check_options({key: rule["default"]})


def test_wrong_options_name_the_key() -> None:
    with pytest.raises(
        OptionError, match=r'invalid value for key "early_stopping\.patience" in the options: -1'
    ) as error:
        check_options({"early_stopping": {"patience": -1}})
    assert error.value.hint == "Use an integer from 0 to 1000000."
    with pytest.raises(OptionError, match='key "batch_size_range" in the options is empty: from 9 to 8'):
        check_options({"batch_size_range": [9, 8]})


def test_a_number_may_be_a_range() -> None:
    for ranks in (1, 1024, 4.0, [2, 4], [3, 3]):
        check_options({"ranks": ranks})
    message = r'invalid value for key "ranks" in the options: '
    for ranks, hint in (
        (0, "Use an integer from 1 to 1024, or an array of the least and the most."),
        ([4], "Use an array of 2 values, each an integer from 1 to 1024."),
    ):
        with pytest.raises(OptionError, match=message) as error:
            check_options({"ranks": ranks})
        assert error.value.hint == hint
    with pytest.raises(OptionError, match=r'key "ranks\[1\]" in the options: 1025'):
        check_options({"ranks": [1, 1025]})
    with pytest.raises(OptionError, match='key "ranks" in the options is empty: from 4 to 2'):
        check_options({"ranks": [4, 2]})


def test_the_file_is_plain_text() -> None:
    """The file is compiled into the library and must be valid in every server encoding."""
    text = (REPOSITORY / "pg_tensile" / "rules.json").read_bytes()
    assert text.isascii() and json.loads(text) == RULES


def test_the_reference_lists_every_architecture_and_option() -> None:
    text = (REPOSITORY / "docs" / "sql.md").read_text()
    types = text.partition("\n## Architectures\n")[2].partition("\n## ")[0]
    assert set(re.findall(r"^### (\w+)$", types, re.MULTILINE)) == set(ARCHITECTURES)
    options = text.partition("\n## Options of a job\n")[2].partition("\n## ")[0]
    keys = {name.partition(".")[0] for name in re.findall(r"^\| `([\w.]+)` \|", options, re.MULTILINE)}
    assert keys == set(OPTIONS["properties"])


def test_events_and_codecs_are_those_of_the_shim() -> None:
    """Kinds of events and codecs have the same names by number in C and in the library."""
    source = (REPOSITORY / "pg_tensile" / "csrc" / "processes" / "plan_sql.c").read_text()

    def names(array: str) -> list[str]:
        definition = re.search(rf"{array}\[\] = {{NULL, (.+?)}};", source)
        assert definition is not None
        return [name.strip('"') for name in definition[1].split(", ")]

    assert names("event_kinds") == [kind.label for kind in EventKind]
    assert names("codecs") == list(CODECS[1:])


def test_a_child_checks_the_options_of_its_job() -> None:
    """Stored options may come from another version."""
    with pytest.raises(OptionError, match='key "momentum" in the options: 1'):
        job_settings({"options": {"momentum": 1}})
