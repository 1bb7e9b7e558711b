"""Whole runs of several ranks, for tests: functions that each rank's process executes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from pg_tensile.errors import NotFiniteError
from pg_tensile.execution import models
from pg_tensile.execution.data.batches import Batch
from pg_tensile.execution.runtime.host import HostDevice
from pg_tensile.execution.training import agreement, checkpoint
from pg_tensile.execution.training.checkpoint import Checkpoint
from pg_tensile.execution.training.graphs import Sizes, capture_graphs, evaluation_rows
from pg_tensile.execution.training.observer import EpochMetrics, Outcome
from pg_tensile.execution.training.run_steps import StepResult, Steps
from pg_tensile.execution.training.settings import Settings
from pg_tensile.execution.training.steps import EagerSteps, Grant, PlannedSteps
from pg_tensile.execution.training.trainer import Trainer
from pg_tensile.planning.job_planner.planner import JobPlanner
from pg_tensile.planning.plan.memory import footprint
from tests.unit.execution.training.test_training import Recorder
from tests.unit.ranked import FAST
from tests.unit.rows import every_type

CPU = torch.device("cpu")
MLP = {"type": "mlp", "hidden": [16], "dropout": 0.2, "norm": "batch", "embedding": 4}
PLAIN = {"type": "mlp", "hidden": [16]}
_made: dict[tuple[Any, ...], Any] = {}  # what is captured, by what it depends on


@dataclass(frozen=True)
class Run:
    """A run of all ranks. `parts`: of the memory between the least and what there is without a plan, for each rank;
    none means the policy none. `stop_after`: polls of each rank's observer, after which it asks to stop, or None."""

    settings: dict[str, Any] = field(default_factory=dict)
    architecture: dict[str, Any] = field(default_factory=lambda: MLP)
    rows: int = 397
    validation: float = 0.2
    parts: tuple[float, ...] = ()
    stop_after: tuple[int | None, ...] = (None,)
    nan_at: tuple[int | None, ...] = (None,)  # step of a rank, from 0, whose loss is not a number
    slow: bool = False  # rank 0 writes checkpoints at once, the others for ever
    hurried: bool = False  # each reading of rank 0's clock is a second after the last one


class Result(NamedTuple):
    """What a rank has at the end. `weights` are those of the model, `epochs` without times."""

    outcome: Outcome | None
    weights: bytes
    epochs: list[EpochMetrics]
    checkpoints: list[tuple[bytes, dict[str, Any]]]
    error: str = ""


def here(values: Sequence[Any]) -> Any:
    """Return the value of this rank; a single one is for all."""
    return values[dist.get_rank() % len(values)] if dist.is_initialized() else values[0]


def run(described: Run, checkpoints: Sequence[tuple[bytes, dict[str, Any]]] = ()) -> Result:
    """Train, from this rank's checkpoint if there are any."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    prepared = every_type(described.rows).prepare(described.validation)
    preprocessing = prepared.fitted.preprocessing
    defaults = {"epochs": 2, "batch_size": 32, "seed": 5, "checkpoint_interval_s": 0.0, "ranks": size}
    settings = Settings(**{**defaults, **described.settings})
    checkpoint.seed_generators(here((7, 8)) if size > 1 else 7)  # the ranks' first weights differ: rank 0's count
    architecture = models.parse(described.architecture)
    model = models.build(architecture, preprocessing.model_inputs, preprocessing.outputs)
    checkpoint.seed_generators(7)  # where the trainer does not seed them
    parts = settings, preprocessing.task, Sizes.of(prepared.dataset, preprocessing), CPU
    recorder = Recorder(here(described.stop_after), free=described.slow)
    if described.slow and here((False, True)):
        recorder.checkpoint = lambda state, written: recorder.checkpoints.append((b"", state.meta))  # type: ignore[method-assign]
    if described.hurried and here((True, False)):
        agreement.time = SimpleNamespace(monotonic=itertools.count().__next__)  # type: ignore[assignment]
    key = (repr(settings), repr(architecture), described.rows, described.validation)
    with closing(HostDevice(FAST)) as device:
        steps: Steps
        if described.parts:
            graphs = _once(("graphs", *key), lambda: capture_graphs(model, *parts))
            least, vanilla = graphs.least_bytes, footprint(graphs.train.trace).device_peak_bytes
            budget = int(least + here(described.parts) * (vanilla - least))
            grant = Grant(JobPlanner(graphs.train.trace, FAST).within(budget).plan, budget)
            steps = PlannedSteps(model, graphs, device, grant, _refuse)
        else:
            at_once = _once(("rows", *key), lambda: evaluation_rows(model, *parts))
            steps = EagerSteps(model, settings, preprocessing.task, CPU, at_once)
        if here(described.nan_at) is not None:
            _spoil(steps, here(described.nan_at))
        trainer = Trainer(settings, steps, prepared.dataset, preprocessing, recorder)
        if checkpoints:
            assert trainer.resume(Checkpoint.from_bytes(*here(checkpoints))) is None
        outcome, error = None, ""
        try:
            outcome = trainer.run()
        except NotFiniteError as refused:
            error = str(refused)
        finally:
            steps.close()
    weights = checkpoint.to_bytes(checkpoint.model_tensors(model))
    outcome = outcome and outcome._replace(validation={})
    return Result(outcome, weights, recorder.without_seconds(), recorder.checkpoints, error)


def _once(key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
    """Return what `make` returns, or returned in this process for the same key; all ranks have had the same calls."""
    if key not in _made:
        _made[key] = make()
    return _made[key]


def _refuse(error: Exception) -> None:
    raise error


def _spoil(steps: Steps, at: int) -> None:
    """Make the loss of a step not a number."""
    train, numbers = steps.train, itertools.count()

    def spoilt(batch: Batch, learning_rate: float | None = None) -> StepResult:
        result = train(batch, learning_rate)
        return result._replace(loss=float("nan")) if next(numbers) == at else result

    steps.train = spoilt  # type: ignore[method-assign]


def drawn() -> list[float]:
    """Return random numbers that a rank draws after a run of one step, which draws none."""
    run(Run({"epochs": 1, "max_time_s": 0.0}, PLAIN, hurried=True))
    return torch.rand(3).tolist()


def run_with_a_seed_of_its_own() -> Result:
    return run(Run({"seed": dist.get_rank()}))


def run_with_a_model_of_its_own(parts: tuple[float, ...]) -> Result:
    return run(Run(architecture={"type": "mlp", "hidden": [16 + dist.get_rank()]}, parts=parts))
