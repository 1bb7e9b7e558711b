"""The graphs of a job: the training step and the evaluation, one for each batch size that its data makes.

An epoch has batches of one size and a smaller last one (batches.py), validation likewise. A job is admitted, planned
and executed as these graphs; they share its parameters, buffers and optimizer state.

Validation takes larger batches than training where it may: as large as its memory stays below what any plan for
training needs, so that whatever plan a job gets, validation fits. That depends on model and data alone, never on plan
or budget, because the sums of another batch size differ in their last bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import DTypeLike
from torch import Tensor, nn
from torch.nn import functional as F

from pg_tensile.errors import ArchitectureError, CaptureError
from pg_tensile.execution.capture import Captured, OptimizerSpec, StepSpec, capture, capture_evaluation
from pg_tensile.execution.data.batches import division
from pg_tensile.execution.data.dataset import Dataset
from pg_tensile.execution.data.preprocessing import Features, Preprocessing, Task
from pg_tensile.execution.training.trainer import Settings, check_model
from pg_tensile.planning.plan.memory import footprint
from pg_tensile.planning.policies.building_blocks.keep import least_bytes
from pg_tensile.planning.trace.trace import Trace

EVALUATION_ROWS = 4096  # a batch for evaluation, if that many rows are small
EVALUATION_BYTES = 4 << 20


class Sizes(NamedTuple):
    """What a job's batches look like: rows to train on and to validate with, and what one row is. `row`: shape and type
    of each array of features, the target last."""

    training_rows: int
    validation_rows: int
    row: tuple[tuple[tuple[int, ...], DTypeLike], ...]

    @staticmethod
    def of(dataset: Dataset, preprocessing: Preprocessing) -> Sizes:
        return Sizes(dataset.training.rows, dataset.validation.rows, tuple(preprocessing.layout()))


class Graphs(NamedTuple):
    """The graphs of one job. None: its data makes no such batch. Training graphs return loss and outputs [rows,
    outputs] of the model, with updates moved up (early_update.py); evaluations the same, in eval mode. `others`: steps
    of other numbers of rows, which only the first epoch has."""

    train: Captured
    train_last: Captured | None
    evaluate: Captured | None
    evaluate_last: Captured | None
    others: tuple[Captured, ...] = ()

    def named(self) -> dict[str, Captured]:
        """Those that there are, `train` first."""
        graphs = dict(zip(self._fields[:4], self[:4], strict=True))
        graphs |= {f"train_{rows_of(graph)}": graph for graph in self.others}
        return {name: graph for name, graph in graphs.items() if graph is not None}

    def traces(self) -> dict[str, Trace]:
        return {name: graph.trace for name, graph in self.named().items()}

    def with_traces(self, traces: Mapping[str, Trace]) -> Graphs:
        """The same with other latencies and workspaces."""
        graphs = self.named()
        graphs |= {name: replace(graphs[name], trace=trace) for name, trace in traces.items()}
        first = {name: graphs.pop(name) for name in self._fields[:4] if name in graphs}
        return self._replace(**first, others=tuple(graphs.values()))

    @property
    def evaluation_rows(self) -> int | None:
        """Rows of a batch for evaluation."""
        return None if self.evaluate is None else rows_of(self.evaluate)

    @property
    def least_bytes(self) -> int:
        """The smallest device memory that there are plans for all of them with."""
        return max(least_bytes(graph.trace) for graph in self.named().values())


def rows_of(captured: Captured) -> int:
    """Rows of a graph's batch."""
    return captured.values[captured.inputs[0]].shape[0]


def capture_graphs(model: nn.Module, settings: Settings, task: Task, sizes: Sizes, device: torch.device) -> Graphs:
    """Captures every graph of the job for a device of this type; nothing is computed and the model stays as it is.
    Raises ArchitectureError, TrainingError, CaptureError, each with a hint, and DeviceError."""
    spec = step_spec(settings, task)
    first, last = _training_rows(sizes, settings)
    check_model(model, first)
    with _taking_tensors(model):
        train = _train(model, spec, sizes, first, device)
        train_last = _train(model, spec, sizes, last, device) if last != first else None
        rows = lead_rest(sizes, settings) - {first, last}
        others = tuple(_train(model, spec, sizes, count, device) for count in sorted(rows))
        evaluate = _largest_evaluation(model, spec, sizes, settings.batch_size, least_bytes(train.trace), device)
        if evaluate is None:
            return Graphs(train, train_last, None, None, others)
        rest = sizes.validation_rows % rows_of(evaluate)
        last_of_all = _evaluate(model, spec, sizes, rest, device) if rest else None
        return Graphs(train, train_last, evaluate, last_of_all, others)


def capture_lead(model: nn.Module, settings: Settings, task: Task, sizes: Sizes, device: torch.device) -> Graphs:
    """The graphs of the steps of `settings.lead` alone, the largest first. Raises as `capture_graphs` does."""
    spec = step_spec(settings, task)
    rows = sorted(set(settings.lead), reverse=True)
    check_model(model, rows[-1])
    with _taking_tensors(model):
        train, *others = (_train(model, spec, sizes, count, device) for count in rows)
    return Graphs(train, None, None, None, tuple(others))


def lead_rest(sizes: Sizes, settings: Settings) -> set[int]:
    """Rows of the batches that the first epoch has after its lead; none without a lead."""
    if not settings.lead:
        return set()
    steps, last = division(sizes.training_rows - sum(settings.lead), settings.batch_size)
    return {settings.batch_size, last} if steps > 1 else {last} if steps else set()


def evaluation_rows(model: nn.Module, settings: Settings, task: Task, sizes: Sizes, device: torch.device) -> int:
    """Rows of a batch for evaluation: those of `capture_graphs`, for a run without plans, too, so that its metrics are
    the same. Of a model that cannot be captured, which never has a plan: as many as may be. Raises DeviceError."""
    if not sizes.validation_rows:
        return settings.batch_size
    spec = step_spec(settings, task)
    with _taking_tensors(model):
        try:
            train = _train(model, spec, sizes, _training_rows(sizes, settings)[0], device)
            evaluate = _largest_evaluation(model, spec, sizes, settings.batch_size, least_bytes(train.trace), device)
        except CaptureError:
            return max(evaluation_sizes(sizes, settings.batch_size))
    assert evaluate is not None
    return rows_of(evaluate)


def capture_step(model: nn.Module, settings: Settings, task: Task, sizes: Sizes, device: torch.device) -> Captured:
    """The training step alone, of a whole batch of `settings.batch_size`. Raises as `capture_graphs` does."""
    with _taking_tensors(model):
        return _train(model, step_spec(settings, task), sizes, settings.batch_size, device)


def state_bytes(model: nn.Module, settings: Settings) -> int:
    """Of parameters, buffers, gradients and optimizer state: what a run without a plan holds besides activations."""
    tensors = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    copies = 3 if settings.optimizer != "sgd" else 2 if settings.momentum else 1
    return tensors + copies * sum(parameter.nbytes for parameter in trained)


def step_spec(settings: Settings, task: Task) -> StepSpec:
    """The training step that the settings mean."""
    momentum = settings.momentum
    optimizer = OptimizerSpec(settings.optimizer, settings.learning_rate, weight_decay=settings.weight_decay)
    if settings.optimizer == "sgd":
        optimizer = optimizer._replace(momentum=momentum or 0.0)
    elif momentum is not None:
        optimizer = optimizer._replace(betas=(momentum, 0.999))
    return StepSpec(loss_function(task), optimizer, settings.clip, returns_outputs=True)


def loss_function(task: Task) -> Callable[[Tensor, Tensor], Tensor]:
    """Mean loss of outputs [rows, outputs] against the encoded target [rows]."""
    if task == Task.MULTICLASS:
        return F.cross_entropy
    function = F.mse_loss if task == Task.REGRESSION else F.binary_cross_entropy_with_logits
    return lambda outputs, target: function(outputs.squeeze(1), target)


def _training_rows(sizes: Sizes, settings: Settings) -> tuple[int, int]:
    """Rows of an epoch's first batch and of its last one."""
    steps, last = division(sizes.training_rows, settings.batch_size)
    return settings.batch_size if steps > 1 else last, last


def _train(model: nn.Module, spec: StepSpec, sizes: Sizes, rows: int, device: torch.device) -> Captured:
    *inputs, target = _example(sizes, rows)
    return capture(model, inputs, [target], spec, early_update=True, device=device)


def _evaluate(model: nn.Module, spec: StepSpec, sizes: Sizes, rows: int, device: torch.device) -> Captured:
    *inputs, target = _example(sizes, rows)
    return capture_evaluation(model, inputs, [target], spec, device=device)


def _largest_evaluation(
    model: nn.Module, spec: StepSpec, sizes: Sizes, batch_size: int, least: int, device: torch.device
) -> Captured | None:
    """Of the largest doubling of the batch size that takes at most `least` bytes without a plan; None without rows."""
    chosen: Captured | None = None
    for rows in evaluation_sizes(sizes, batch_size):
        captured = _evaluate(model, spec, sizes, rows, device)
        if chosen is not None and footprint(captured.trace).device_peak_bytes > least:
            break
        chosen = captured
    return chosen


def evaluation_sizes(sizes: Sizes, batch_size: int) -> Iterator[int]:
    """The batch sizes that evaluation may have, ascending; none larger than there are rows."""
    row_bytes = sum(tensor.nbytes for tensor in _example(sizes, 1))
    limit = min(EVALUATION_ROWS, EVALUATION_BYTES // max(row_bytes, 1))
    rows, before = batch_size, 0
    while before < sizes.validation_rows and rows <= max(limit, batch_size):
        yield min(rows, sizes.validation_rows)
        rows, before = 2 * rows, rows


def _example(sizes: Sizes, rows: int) -> Sequence[Tensor]:
    """Tensors in the layout of a batch: features, then the target."""
    return [torch.from_numpy(np.empty((rows, *shape), dtype)) for shape, dtype in sizes.row]


@contextmanager
def _taking_tensors(model: nn.Module) -> Iterator[None]:
    """The model takes the arrays of its features one by one, as capturing gives them, under its own names."""
    forward = model.forward

    def flat(*tensors: Tensor) -> Tensor:
        try:
            outputs: Tensor = forward(Features.from_flat(tensors))
            return outputs
        except ArchitectureError as error:  # of a user's model: capturing explains what is behind it
            raise error.__cause__ or error from None

    vars(model)["forward"] = flat
    try:
        yield
    finally:
        del vars(model)["forward"]
