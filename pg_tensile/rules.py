"""Rules for the keys of an architecture and the options of a job (rules.json).

The server checks user input against the same file (`tensile_internal._check_value` in sql/) and reports the same
errors; the checks here protect jobs whose models were stored by another version.

The file uses a subset of JSON Schema with these definitions and additions:

- `$ref`: the name of the entry of `shared` whose rule applies;
- `divisibleBy`: for an integer, the key of the same object that must divide it; an omitted key has its default value;
- `ascending`: for an array of two numbers, the first must not be larger than the second;
- `orRange`: for an integer, an array of the least and the largest one is valid as well;
- `orBoolean`: true and false are valid as well;
- `code`: for an architecture, whether it executes code of the user.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pg_tensile.errors import ArchitectureError, OptionError, TensileError

RULES: dict[str, Any] = json.loads((Path(__file__).parent / "rules.json").read_text("ascii"))
ARCHITECTURES: dict[str, Any] = RULES["architectures"]
OPTIONS: dict[str, Any] = RULES["options"]
TYPES: dict[str, type | tuple[type, ...]] = {
    "integer": (int, float),
    "number": (int, float),
    "boolean": bool,
    "string": str,
    "array": list,
    "object": dict,
}
MOST_SHOWN = 60  # most characters of a value that a message quotes


def check_architecture(architecture: Any) -> None:
    """Raise ArchitectureError, which names the wrong key by its path, unless the architecture follows the rules."""
    types = f"The types are {_names(ARCHITECTURES)}."
    if not isinstance(architecture, dict):
        hint = """For example '{"type": "mlp", "hidden": [128, 64]}'."""
        raise ArchitectureError("architecture must be a JSON object", hint)
    name = architecture.get("type")
    if not isinstance(name, str):
        raise ArchitectureError('key "type" is missing in the architecture, or not a text', types)
    if name not in ARCHITECTURES:
        raise ArchitectureError(f'unknown architecture type "{name}"', types)
    keys = {key: value for key, value in architecture.items() if key != "type"}
    _Check(f'architecture "{name}"', ArchitectureError).object(keys, ARCHITECTURES[name], "")


def check_options(options: Any) -> None:
    """Raise OptionError, which names the wrong key by its path, unless the options follow the rules."""
    if not isinstance(options, dict):
        hint = """For example '{"early_stopping": {"patience": 3}}'."""
        raise OptionError("options must be a JSON object", hint)
    _Check("options", OptionError).object(options, OPTIONS, "")


def resolved(rule: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rule merged with the shared rule that it refers to."""
    return RULES["shared"].get(rule.get("$ref"), {}) | rule


def describe(rule: Mapping[str, Any]) -> str:
    """Return what a value must be, in words for a hint: "an integer from 1 to 100"."""
    if "enum" in rule:
        return f"one of {_names(rule['enum'])}{', or true or false' if 'orBoolean' in rule else ''}"
    kind = rule["type"]
    if kind == "integer":
        described = f"an {'odd ' if 'not' in rule else ''}integer from {rule['minimum']} to {rule['maximum']}"
        return f"{described}, or an array of the least and the most" if "orRange" in rule else described
    if kind == "number":
        least = f"of at least {rule['minimum']}" if "minimum" in rule else f"greater than {rule['exclusiveMinimum']}"
        most = f"at most {rule['maximum']}" if "maximum" in rule else f"less than {rule['exclusiveMaximum']}"
        return f"a number {least} and {most}"
    if kind == "boolean":
        return "true or false"
    if kind == "string":
        return f'a text such as "{rule["examples"][0]}"' if "examples" in rule else "a text that is not empty"
    if kind == "array":
        sizes = dict.fromkeys((str(rule["minItems"]), str(rule["maxItems"])))
        return f"an array of {' to '.join(sizes)} values, each {describe(rule['items'])}"
    return "an object {...}"


class _Check:
    """Check of one JSON object against its rules.

    `what` names the object in messages ('architecture "mlp"'); `error` is the class of the errors raised.
    """

    def __init__(self, what: str, error: type[TensileError]) -> None:
        self._what = what
        self._error = error

    def object(self, value: Mapping[str, Any], rules: Mapping[str, Any], prefix: str) -> None:
        """Raise an error for the first key that is unknown, missing or has a wrong value.

        `prefix` precedes the keys in messages, for example "early_stopping.".
        """
        properties = rules["properties"]
        for key, item in value.items():
            if key not in properties:
                message = f'unknown key "{prefix}{key}" in the {self._what}'
                raise self._error(message, f"The keys are {_names(properties)}.")
            self._value(item, resolved(properties[key]), prefix + key)
        for key in rules.get("required", ()):
            if key not in value:
                message = f'key "{key}" is missing in the {self._what}'
                raise self._error(message, f"It must be {describe(resolved(properties[key]))}.")
        for key, rule in properties.items():
            if "divisibleBy" in rule:
                self._divisible(value, properties, key, rule["divisibleBy"])

    def _divisible(self, value: Mapping[str, Any], properties: Mapping[str, Any], key: str, other: str) -> None:
        number, divisor = (int(value.get(name, properties[name]["default"])) for name in (key, other))
        if number % divisor:
            message = f'key "{key}" in the {self._what} is not divisible by "{other}": {number}, {divisor}'
            multiple = divisor * max(1, number // divisor)
            raise self._error(message, f'Use a multiple of "{other}", for example {multiple}.')

    def _value(self, value: Any, rule: Mapping[str, Any], path: str) -> None:
        if "orRange" in rule and isinstance(value, list):
            rule = _range_of(rule)
        if not _fits(value, rule):
            message = f'invalid value for key "{path}" in the {self._what}: {_shown(value)}'
            raise self._error(message, f"Use {describe(rule)}.")
        if isinstance(value, list):
            for place, item in enumerate(value):
                self._value(item, rule["items"], f"{path}[{place}]")
            if "ascending" in rule and value[0] > value[1]:
                message = f'key "{path}" in the {self._what} is empty: from {value[0]} to {value[1]}'
                raise self._error(message, f"The first number is the least, the second the most: {value[::-1]}.")
        elif "properties" in rule:
            self.object(value, rule, f"{path}.")


def _fits(value: Any, rule: Mapping[str, Any]) -> bool:
    """Return whether the value itself follows the rule; the items and keys that it contains are not checked."""
    kind = rule["type"]
    if "orBoolean" in rule and isinstance(value, bool):
        return True
    if not _is_a(kind, value):
        return False
    if kind in ("integer", "number"):
        return _number_fits(_double(value), rule)
    if kind == "string":
        pattern = rule.get("pattern", ".*")
        return (
            len(value) >= rule.get("minLength", 0)
            and re.fullmatch(pattern, value, re.DOTALL) is not None
            and value in rule.get("enum", (value,))
        )
    return kind != "array" or rule["minItems"] <= len(value) <= rule["maxItems"]


def _range_of(rule: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rule of an array of the least and the largest of the values that follow the rule."""
    items = {key: term for key, term in rule.items() if key != "orRange"}
    return {"type": "array", "minItems": 2, "maxItems": 2, "ascending": True, "items": items}


def _is_a(kind: str, value: Any) -> bool:
    return isinstance(value, TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))


def _number_fits(number: float, rule: Mapping[str, Any]) -> bool:
    return (
        rule.get("minimum", -math.inf) <= number <= rule.get("maximum", math.inf)
        and number > rule.get("exclusiveMinimum", -math.inf)
        and number < rule.get("exclusiveMaximum", math.inf)
        and (rule["type"] == "number" or number.is_integer())
        and ("not" not in rule or number % rule["not"]["multipleOf"] != 0)
    )


def _double(number: float) -> float:
    """Return the number as a double, infinite where it overflows, as JSON readers treat it."""
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MOST_SHOWN else text[: MOST_SHOWN - 3] + "..."


def _names(names: Any) -> str:
    return ", ".join(f'"{name}"' for name in names)
