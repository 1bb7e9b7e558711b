"""Weights that all ranks of a run have alike: rank 0's at its start, and rank 0's statistics at the end of an epoch."""

from __future__ import annotations

from collections.abc import Iterable

from pg_tensile.execution.distributed.group import Group
from pg_tensile.execution.training.run_steps import Steps, StepsState


def take_over_model(steps: Steps, group: Group) -> None:
    """Replace all parameters and buffers by rank 0's. Raises TrainingError if the ranks' models differ."""
    if group.size > 1:
        layout = [(name, tuple(tensor.shape)) for name, tensor in steps.state().model.items()]
        group.check_alike("the model's weights", layout)
        _take_over(steps, group, [name for name, _ in layout])


def take_over_buffers(steps: Steps, group: Group) -> None:
    """Replace the buffers by rank 0's: each rank's are statistics of its own rows."""
    if group.size > 1 and next(steps.model.buffers(), None) is not None:
        parameters = {name for name, _ in steps.model.named_parameters()}
        _take_over(steps, group, (name for name in steps.state().model if name not in parameters))


def _take_over(steps: Steps, group: Group, names: Iterable[str]) -> None:
    state = steps.state()
    tensors = group.tensors_of_first({name: state.model[name] for name in names})
    steps.load(StepsState({**state.model, **tensors}, state.optimizer))
