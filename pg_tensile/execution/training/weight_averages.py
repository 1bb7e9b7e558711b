"""Exchange of a model's weights and of their moving averages, which the optimizer's state has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pg_tensile.execution.capture.optimizers import AVERAGE
from pg_tensile.execution.training.run_steps import Steps, StepsState
from pg_tensile.execution.training.settings import Settings


class WeightAverages:
    """Averages of the weights of `steps`; does nothing if the settings average none."""

    def __init__(self, steps: Steps, settings: Settings) -> None:
        self._steps = steps
        self._is_on = settings.average_weights
        self._trainable = [name for name, parameter in steps.model.named_parameters() if parameter.requires_grad]

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Give the model the averages inside."""
        self.exchange()
        try:
            yield
        finally:
            self.exchange()

    def exchange(self) -> None:
        """Exchange the weights and their averages."""
        if not self._is_on:
            return
        state = self._steps.state()
        model, optimizer = dict(state.model), dict(state.optimizer)
        for number, name in enumerate(self._trainable):
            average = f"{number}.{AVERAGE}"
            if average in optimizer:  # it has had a gradient
                model[name], optimizer[average] = optimizer[average].clone(), model[name].clone()
        self._steps.load(StepsState(model, optimizer))
