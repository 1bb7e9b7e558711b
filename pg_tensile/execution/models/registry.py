"""Construction of models from the JSON of an architecture.

`pg_tensile/rules.json` defines the keys and their values; each type in that file is a dataclass here, with a field for
each key.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import nn

from pg_tensile.errors import ArchitectureError
from pg_tensile.execution.data.preprocessing import Features, ModelInputs, TokenLimits
from pg_tensile.execution.data.texts import TextColumns
from pg_tensile.execution.models import boosted, ensemble, linear, mlp, tabular
from pg_tensile.execution.models.boosted import Boosted, BoostedArchitecture, FusedBoosted
from pg_tensile.execution.models.cnn import CNNArchitecture
from pg_tensile.execution.models.ensemble import Ensemble
from pg_tensile.execution.models.imported import ImportArchitecture, PythonArchitecture
from pg_tensile.execution.models.linear import Linear, LinearArchitecture
from pg_tensile.execution.models.mlp import MLP, MLPArchitecture
from pg_tensile.execution.models.pretrained import PretrainedArchitecture
from pg_tensile.execution.models.tabular import FusedTabular, Tabular, TabularArchitecture
from pg_tensile.execution.models.transformer import TransformerArchitecture
from pg_tensile.rules import check_architecture


class Architecture(Protocol):
    def build(self, inputs: ModelInputs, outputs: int) -> nn.Module: ...


@dataclass(frozen=True)
class EnsembleArchitecture:
    """Architecture `ensemble`: types of its members, with their defaults, and a weight for each.

    Without members they depend on the rows, and without weights these are found by training."""

    members: tuple[str, ...] | None = None
    weights: tuple[float, ...] | None = None

    def build(self, inputs: ModelInputs, outputs: int) -> nn.Module:
        if self.members is None or self.weights is None or len(self.members) != len(self.weights):
            hint = "Only a trained version has them: train the model."
            raise ArchitectureError("the ensemble has not a weight for each of its members", hint)
        return Ensemble([TYPES[name]().build(inputs, outputs) for name in self.members], self.weights)


TYPES: dict[str, Any] = {
    "ensemble": EnsembleArchitecture,
    "tabular": TabularArchitecture,
    "boosted": BoostedArchitecture,
    "linear": LinearArchitecture,
    "mlp": MLPArchitecture,
    "cnn": CNNArchitecture,
    "transformer": TransformerArchitecture,
    "pretrained": PretrainedArchitecture,
    "import": ImportArchitecture,
    "python": PythonArchitecture,
}


def _whole(value: Any) -> Any:
    """Convert floats without a fraction to integers: JSON's 16.0 is the integer 16."""
    if isinstance(value, list):
        return [_whole(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def parse(architecture: dict[str, Any]) -> Architecture:
    """Return the architecture with its defaults. Raises ArchitectureError, which names the wrong key."""
    check_architecture(architecture)
    given = {key: _whole(value) for key, value in architecture.items() if key != "type"}
    built: Architecture = TYPES[architecture["type"]](
        **{key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
    )
    return built


def token_limits(architecture: Architecture) -> TokenLimits | None:
    """Return the limits for turning integer arrays into tokens, or None if the architecture takes them as numbers."""
    return architecture.token_limits if isinstance(architecture, TransformerArchitecture) else None


def text_columns(architecture: Architecture) -> TextColumns | None:
    """Return the text columns that the architecture takes as texts, or None if it takes all as categories.

    Raises ArchitectureError if the folder of a pretrained model cannot be used."""
    return architecture.text_columns() if isinstance(architecture, PretrainedArchitecture) else None


def takes_ranks(architecture: Architecture) -> bool:
    """Return whether numbers are to be given as ranks, too."""
    types = (TabularArchitecture, BoostedArchitecture, LinearArchitecture, EnsembleArchitecture)
    return isinstance(architecture, types)


def fused(model: nn.Module) -> nn.Module:
    """Return the trained model in the form that predicts fastest, equal to it but for float32 rounding."""
    if isinstance(model, Ensemble):
        return Ensemble([fused(member) for member in model.members], model.weights)
    if isinstance(model, Boosted):
        return FusedBoosted(model)
    return FusedTabular(model) if isinstance(model, Tabular) else model


def derived_bytes(model: nn.Module) -> int:
    """Return the memory that a loaded model takes beside its weights: what trees are evaluated with."""
    trees = [module for module in model.modules() if isinstance(module, Boosted)]
    return sum(module.scorer.nbytes + sum(buffer.nbytes for buffer in module.buffers()) for module in trees)


def few_rows(model: nn.Module) -> Callable[[Features], NDArray[np.float32]] | None:
    """Return the trained model as a function of numpy features, equal to it but for float32 rounding, or None.

    Features [n, 1, …] are n single rows: each output [1, outputs] has the bits that its row has alone."""
    if isinstance(model, Ensemble):
        members = [few_rows(member) for member in model.members]
        quick = [member for member in members if member is not None]
        return ensemble.few_rows(quick, model.weights) if len(quick) == len(members) else None
    if isinstance(model, Boosted):
        return boosted.few_rows(model)
    if isinstance(model, Linear):
        return linear.few_rows(model)
    if isinstance(model, Tabular):
        return tabular.few_rows(model)
    return mlp.few_rows(model) if isinstance(model, MLP) else None


def build(architecture: Architecture, inputs: ModelInputs, outputs: int) -> nn.Module:
    """Return the model, initialised from torch's random numbers. Raises ArchitectureError."""
    return architecture.build(inputs, outputs)
