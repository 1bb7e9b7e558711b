"""From the JSON of an architecture to a model: types, keys, defaults, ranges (docs/internals.md, "Architectures").

`csrc/check.c` makes the same checks when a model is registered; here they protect jobs of models that were stored by
another version.
"""

from __future__ import annotations

import math
import re
from dataclasses import MISSING, fields
from typing import Any, NamedTuple, Protocol

from torch import nn

from pg_tensile.errors import ArchitectureError
from pg_tensile.models.cnn import CNNArchitecture
from pg_tensile.models.imported import ImportArchitecture, PythonArchitecture
from pg_tensile.models.layers import ACTIVATIONS, NORMS_1D
from pg_tensile.models.mlp import MLPArchitecture
from pg_tensile.models.transformer import TransformerArchitecture
from pg_tensile.preprocessing import ModelInputs, TokenLimits


class Architecture(Protocol):
    def build(self, inputs: ModelInputs, outputs: int) -> nn.Module: ...


TYPES: dict[str, Any] = {
    "mlp": MLPArchitecture,
    "cnn": CNNArchitecture,
    "transformer": TransformerArchitecture,
    "import": ImportArchitecture,
    "python": PythonArchitecture,
}


class Rule(NamedTuple):
    """What a key's value must be."""

    what: str
    holds: Any  # (value) -> bool


def _integer(low: int, high: int) -> Rule:
    def holds(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high

    return Rule(f"an integer from {low} to {high}", holds)


def _integers(low: int, high: int, fewest: int, most: int) -> Rule:
    item = _integer(low, high)

    def holds(value: Any) -> bool:
        return isinstance(value, list) and fewest <= len(value) <= most and all(map(item.holds, value))

    return Rule(f"{fewest} to {most} integers from {low} to {high}", holds)


def _one_of(*values: str) -> Rule:
    return Rule("one of " + ", ".join(values), lambda value: value in values)


def _fraction(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and 0 <= value < 1


def _odd(value: Any) -> bool:
    return _integer(1, 15).holds(value) and value % 2 == 1


def _path(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[^\W\d][\w.]*:[^\W\d][\w.]*", value) is not None


RULES = {
    "hidden": _integers(1, 65_536, 0, 64),
    "activation": _one_of(*ACTIVATIONS),
    "dropout": Rule("a number from 0 to below 1", _fraction),
    "norm": _one_of("none", *NORMS_1D),
    "embedding": _integer(1, 1024),
    "channels": _integers(1, 4096, 1, 16),
    "kernel": Rule("an odd integer from 1 to 15", _odd),
    "shape": _integers(1, 65_536, 2, 3),
    "dim": _integer(1, 8192),
    "heads": _integer(1, 128),
    "layers": _integer(1, 64),
    "feedforward": _integer(1, 65_536),
    "length": _integer(1, 65_536),
    "vocabulary": _integer(1, 1_000_000),
    "callable": Rule("text like package.module:function", _path),
    "kwargs": Rule("an object", lambda value: isinstance(value, dict)),
    "source": Rule("text", lambda value: isinstance(value, str)),
}


def _whole(value: Any) -> Any:
    """JSON's 16.0 is the integer 16."""
    if isinstance(value, list):
        return [_whole(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def parse(architecture: dict[str, Any]) -> Architecture:
    """The architecture with its defaults. Raises ArchitectureError naming the key that is wrong."""
    kind = TYPES.get(architecture.get("type", ""))
    if kind is None:
        message = f'unknown architecture type "{architecture.get("type")}"'
        raise ArchitectureError(message, hint="Known types: " + ", ".join(TYPES) + ".")
    known = {item.name: item for item in fields(kind)}
    given = {key: _whole(value) for key, value in architecture.items() if key != "type"}
    for key, value in given.items():
        if key not in known:
            hint = "Known keys: " + ", ".join(known) + "."
            raise ArchitectureError(f'unknown key "{key}" in an architecture of type {architecture["type"]}', hint=hint)
        if not RULES[key].holds(value):
            raise ArchitectureError(f'"{key}" in the architecture must be {RULES[key].what}')
    for key, item in known.items():
        if key not in given and item.default is MISSING and item.default_factory is MISSING:
            raise ArchitectureError(f'an architecture of type {architecture["type"]} needs the key "{key}"')
    return kind(**{key: tuple(value) if isinstance(value, list) else value for key, value in given.items()})


def token_limits(architecture: Architecture) -> TokenLimits | None:
    """How integer arrays become tokens; None: the architecture takes them as numbers."""
    return architecture.token_limits if isinstance(architecture, TransformerArchitecture) else None


def build(architecture: Architecture, inputs: ModelInputs, outputs: int) -> nn.Module:
    """The model, initialised from torch's random numbers. Raises ArchitectureError."""
    return architecture.build(inputs, outputs)
