"""Graphs of a job: training step and evaluation, one for each batch size that its data requires.

An epoch has batches of one size and a last one of another size (batches.py), validation likewise. A job is admitted,
planned and executed as these graphs, which share its parameters, buffers and optimizer state. If several ranks train
together, the graphs are those of this process's part of the rows.

Batches of validation are larger than those of training as long as their memory does not exceed the least memory of any
plan for training, so that validation fits whatever the plan of the job. Their size depends on model and data alone,
never on plan or budget, because the sums of another batch size differ in their last bits.
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

from pg_tensile.errors import ArchitectureError, CaptureError, TrainingError
from pg_tensile.execution.capture import Captured, OptimizerSpec, RankSpec, StepSpec, capture, capture_evaluation
from pg_tensile.execution.data.batches import division
from pg_tensile.execution.data.dataset import Dataset
from pg_tensile.execution.data.preprocessing import Features, Preprocessing, Task
from pg_tensile.execution.distributed.group import check_alike, is_grouped, rows_here
from pg_tensile.execution.training.quantile_loss import with_quantiles
from pg_tensile.execution.training.settings import Settings, check_model
from pg_tensile.planning.building_blocks.keep import least_bytes
from pg_tensile.planning.latency.collectives import exchanged_names, exchanges
from pg_tensile.planning.plan.allocator import plan_bytes
from pg_tensile.planning.trace.trace import Trace

EVALUATION_ROWS = 4096  # limits of an evaluation batch, unless the training batch is larger
EVALUATION_BYTES = 4 << 20
AVERAGING = 7  # power of the averages of weights: after many steps, the last eighth of them has most of the weight


class Sizes(NamedTuple):
    """Sizes of a job's data: numbers of rows for training and validation, and the layout of a row.

    `row`: shape and type of each array of features, the target last. `weighted`: rows have weights."""

    training_rows: int
    validation_rows: int
    row: tuple[tuple[tuple[int, ...], DTypeLike], ...]
    weighted: bool = False

    @staticmethod
    def of(dataset: Dataset, preprocessing: Preprocessing) -> Sizes:
        training, validation = dataset.training, dataset.validation
        return Sizes(training.rows, validation.rows, tuple(preprocessing.layout()), training.weight is not None)


class Graphs(NamedTuple):
    """Graphs of one job; a field is None if the data has no such batch.

    Training graphs return the loss and the model's outputs [rows, outputs], with updates moved up (early_update.py);
    evaluations return the same, in eval mode. `others` are training steps with other numbers of rows, which occur only
    in the first epoch."""

    train: Captured
    train_last: Captured | None
    evaluate: Captured | None
    evaluate_last: Captured | None
    others: tuple[Captured, ...] = ()

    def named(self) -> dict[str, Captured]:
        """Return the existing graphs by name, `train` first."""
        graphs = dict(zip(self._fields[:4], self[:4], strict=True))
        graphs |= {f"train_{rows_of(graph)}": graph for graph in self.others}
        return {name: graph for name, graph in graphs.items() if graph is not None}

    def traces(self) -> dict[str, Trace]:
        return {name: graph.trace for name, graph in self.named().items()}

    def with_traces(self, traces: Mapping[str, Trace]) -> Graphs:
        """Return the graphs with other traces (other sizes, latencies and workspaces) for those named."""
        graphs = self.named()
        graphs |= {name: replace(graphs[name], trace=trace) for name, trace in traces.items()}
        first = {name: graphs.pop(name) for name in self._fields[:4] if name in graphs}
        return self._replace(**first, others=tuple(graphs.values()))

    @property
    def evaluation_rows(self) -> int | None:
        """Rows of an evaluation batch, or None if there is no evaluation."""
        return None if self.evaluate is None else rows_of(self.evaluate)

    @property
    def least_bytes(self) -> int:
        """Smallest device memory (bytes) for which all graphs have plans."""
        return max(least_bytes(graph.trace) for graph in self.named().values())


def rows_of(captured: Captured) -> int:
    """Return the number of rows in a graph's batch."""
    return captured.values[captured.inputs[0]].shape[0]


def capture_graphs(model: nn.Module, settings: Settings, task: Task, sizes: Sizes, device: torch.device) -> Graphs:
    """Capture every graph of the job for a device of this type; nothing is computed and the model stays unchanged.

    All ranks do so at the same time; outside a process group, the graphs are rank 0's. Raises ArchitectureError,
    TrainingError, CaptureError and DeviceError."""
    graphs = _capture_graphs(model, settings, task, sizes, device)
    check_collectives(graphs)
    return graphs


def _capture_graphs(model: nn.Module, settings: Settings, task: Task, sizes: Sizes, device: torch.device) -> Graphs:
    spec = step_spec(settings, task)
    first, last = _training_rows(sizes, settings)
    check_model(model, least_rows(sizes.training_rows, settings))
    with taking_tensors(model):
        train = _train(model, spec, sizes, first, device)
        train_last = _train(model, spec, sizes, last, device) if last != first else None
        rows = {rows_here(count, settings.ranks) for count in lead_rest(sizes, settings)} - {first, last}
        others = tuple(_train(model, spec, sizes, count, device) for count in sorted(rows))
        sizes, batch_size = _here(sizes, settings)
        if not sizes.validation_rows:
            return Graphs(train, train_last, None, None, others)
        smallest, *larger = evaluation_sizes(sizes, batch_size)
        evaluate = _largest_evaluation(model, spec, sizes, larger, least_bytes(train.trace), device)
        evaluate = evaluate or _evaluate(model, spec, sizes, smallest, device)
        rest = sizes.validation_rows % rows_of(evaluate)
        last_of_all = _evaluate(model, spec, sizes, rest, device) if rest else None
        return Graphs(train, train_last, evaluate, last_of_all, others)


def capture_lead(model: nn.Module, settings: Settings, task: Task, sizes: Sizes, device: torch.device) -> Graphs:
    """Capture only the training steps of `settings.lead`, the largest one as `train`.

    Raises the errors of `capture_graphs`."""
    spec = step_spec(settings, task)
    rows = sorted({rows_here(count, settings.ranks) for count in settings.lead}, reverse=True)
    check_model(model, min(settings.lead) // settings.ranks)
    with taking_tensors(model):
        train, *others = (_train(model, spec, sizes, count, device) for count in rows)
    return Graphs(train, None, None, None, tuple(others))


def lead_rest(sizes: Sizes, settings: Settings) -> set[int]:
    """Return the numbers of rows of the first epoch's batches after its lead; empty without a lead."""
    if not settings.lead:
        return set()
    steps, last = division(sizes.training_rows - sum(settings.lead), settings.batch_size, settings.ranks)
    return {settings.batch_size, last} if steps > 1 else {last} if steps else set()


def evaluation_rows(model: nn.Module, settings: Settings, task: Task, sizes: Sizes, device: torch.device) -> int:
    """Return the rows of an evaluation batch for a run without plans: as in `capture_graphs`, for the same metrics.

    For a model that cannot be captured, which never has a plan, it is the largest size allowed. Nothing is captured
    where there is only one. Raises DeviceError."""
    first = _training_rows(sizes, settings)[0]
    sizes, batch_size = _here(sizes, settings)
    if not sizes.validation_rows:
        return batch_size
    smallest, *larger = evaluation_sizes(sizes, batch_size)
    if not larger:
        return smallest
    spec = step_spec(settings, task)
    with taking_tensors(model):
        try:
            train = _train(model, spec, sizes, first, device)
            evaluate = _largest_evaluation(model, spec, sizes, larger, least_bytes(train.trace), device)
        except CaptureError:
            return larger[-1]
    return smallest if evaluate is None else rows_of(evaluate)


def capture_step(model: nn.Module, settings: Settings, task: Task, sizes: Sizes, device: torch.device) -> Captured:
    """Capture only the training step of a whole batch of `settings.batch_size`. Raises CaptureError, DeviceError."""
    rows = rows_here(settings.batch_size, settings.ranks)
    with taking_tensors(model):
        return _train(model, step_spec(settings, task), sizes, rows, device)


def state_bytes(model: nn.Module, settings: Settings) -> int:
    """Return the bytes of parameters, buffers, gradients and optimizer state.

    A run without a plan holds these besides its activations."""
    tensors = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    copies = 3 if settings.optimizer != "sgd" else 2 if settings.momentum else 1
    copies += settings.average_weights
    return tensors + copies * sum(parameter.nbytes for parameter in trained)


def lasting_bytes(model: nn.Module, settings: Settings) -> int:
    """Return the part of `state_bytes` that is there between two steps of a run without a plan: no gradients."""
    trained = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    return state_bytes(model, settings) - trained


def step_spec(settings: Settings, task: Task) -> StepSpec:
    """Return the specification of the training step with these settings."""
    momentum = settings.momentum
    optimizer = OptimizerSpec(
        settings.optimizer,
        settings.learning_rate,
        weight_decay=settings.weight_decay,
        averaging=AVERAGING if settings.average_weights else 0,
    )
    if settings.optimizer == "sgd":
        optimizer = optimizer._replace(momentum=momentum or 0.0)
    elif momentum is not None:
        optimizer = optimizer._replace(betas=(momentum, 0.999))
    loss = loss_function(task)
    if settings.quantiles:
        loss = with_quantiles(loss, settings.quantiles)
    autocast = "bf16" if settings.precision == "bfloat16" else None
    return StepSpec(
        loss,
        optimizer,
        clip=settings.clip,
        autocast=autocast,
        accumulation=settings.accumulate,
        returns_outputs=True,
        ranks=RankSpec(settings.ranks) if settings.ranks > 1 else None,
    )


def micro_batched(spec: StepSpec, rows: int) -> StepSpec:
    """Return the specification for a batch of `rows` rows, which has to be cut into equal parts.

    They are as many as the specification says, or the next smaller number, and have at least two rows each, because
    batch normalisation cannot train on one."""
    counts = range(spec.accumulation, 0, -1)
    count = next(count for count in counts if count == 1 or (rows % count == 0 and rows >= 2 * count))
    return spec if count == spec.accumulation else replace(spec, accumulation=count)


def loss_function(task: Task) -> Callable[..., Tensor]:
    """Return the loss function of outputs, the encoded target [rows] and, if rows have weights, these [rows].

    It is the mean of the rows' losses times their weights. Outputs are [rows, outputs] or, of an ensemble in training,
    [rows, members, outputs]: each member has a loss of its own, and the result is their mean."""

    def loss(outputs: Tensor, target: Tensor, weight: Tensor | None = None) -> Tensor:
        if outputs.dim() == 3:
            members = outputs.shape[1]
            outputs, target = outputs.flatten(0, 1), _for_members(target, members)
            weight = None if weight is None else _for_members(weight, members)
        if task != Task.MULTICLASS:
            outputs = outputs.squeeze(1)
        if weight is None:
            return _LOSSES[task](outputs, target)
        losses: Tensor = _LOSSES[task](outputs, target, reduction="none")
        return (losses * weight).mean()

    return loss


_LOSSES: dict[Task, Callable[..., Tensor]] = {
    Task.REGRESSION: F.mse_loss,
    Task.BINARY: F.binary_cross_entropy_with_logits,
    Task.MULTICLASS: F.cross_entropy,
}


def _for_members(values: Tensor, members: int) -> Tensor:
    """Return the values [rows], repeated for each member: [rows · members]."""
    return values.unsqueeze(1).expand(-1, members).reshape(-1)


def _training_rows(sizes: Sizes, settings: Settings) -> tuple[int, int]:
    """Return the numbers of this rank's rows of an epoch's first batch and of its last one."""
    steps, last = division(sizes.training_rows, settings.batch_size, settings.ranks)
    first = settings.batch_size if steps > 1 else last
    return rows_here(first, settings.ranks), rows_here(last, settings.ranks)


def least_rows(training_rows: int, settings: Settings) -> int:
    """Return the fewest rows that a rank has of any batch of an epoch."""
    steps, last = division(training_rows, settings.batch_size, settings.ranks)
    return (min(settings.batch_size, last) if steps > 1 else last) // settings.ranks


def _here(sizes: Sizes, settings: Settings) -> tuple[Sizes, int]:
    """Return the sizes with this rank's rows for validation, and its rows of a whole batch."""
    rows = rows_here(sizes.validation_rows, settings.ranks)
    return sizes._replace(validation_rows=rows), rows_here(settings.batch_size, settings.ranks)


def check_collectives(graphs: Graphs) -> None:
    """Raise TrainingError unless all ranks' training steps exchange the same gradients in the same order."""
    if graphs.train.spec.ranks is None:
        return
    exchanged = {_exchanged(graph) for graph in graphs.named().values() if graph.trains}
    if is_grouped():
        check_alike("the gradients that they exchange", " or ".join(sorted(exchanged)))
    if len(exchanged) > 1:
        hint = "Train it as a single process."
        raise TrainingError("the order of the gradients depends on the number of rows", hint=hint)


def _exchanged(captured: Captured) -> str:
    """Return the names of the gradients in each collective of a training step, in order."""
    return str([exchanged_names(captured.trace, exchange) for exchange in exchanges(captured.trace)])


def _train(model: nn.Module, spec: StepSpec, sizes: Sizes, rows: int, device: torch.device) -> Captured:
    inputs, targets = _example(sizes, rows)
    return capture(model, inputs, targets, micro_batched(spec, rows), early_update=True, device=device)


def _evaluate(model: nn.Module, spec: StepSpec, sizes: Sizes, rows: int, device: torch.device) -> Captured:
    inputs, targets = _example(sizes, rows)
    return capture_evaluation(model, inputs, targets, spec, device=device)


def _largest_evaluation(
    model: nn.Module, spec: StepSpec, sizes: Sizes, larger: Sequence[int], least: int, device: torch.device
) -> Captured | None:
    """Capture the evaluation of the largest batch that needs at most `least` bytes without a plan.

    `larger`: ascending sizes of batches, without the smallest, which is accepted whatever it needs. Returns None if
    none of them is small enough."""
    chosen: Captured | None = None
    for rows in larger:
        captured = _evaluate(model, spec, sizes, rows, device)
        if plan_bytes(captured.trace) > least:
            break
        chosen = captured
    return chosen


def evaluation_sizes(sizes: Sizes, batch_size: int) -> Iterator[int]:
    """Yield the batch sizes that evaluation may have, ascending; none exceeds the number of validation rows."""
    row_bytes = sum(tensor.nbytes for tensors in _example(sizes, 1) for tensor in tensors)
    limit = min(EVALUATION_ROWS, EVALUATION_BYTES // max(row_bytes, 1))
    rows, before = batch_size, 0
    while before < sizes.validation_rows and rows <= max(limit, batch_size):
        yield min(rows, sizes.validation_rows)
        rows, before = 2 * rows, rows


def _example(sizes: Sizes, rows: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return uninitialised tensors in the layout of a batch: features, and what the loss takes besides the outputs."""
    *features, target = (torch.from_numpy(np.empty((rows, *shape), dtype)) for shape, dtype in sizes.row)
    return features, [target, torch.empty(rows)] if sizes.weighted else [target]


@contextmanager
def taking_tensors(model: nn.Module) -> Iterator[None]:
    """Make the model accept the tensors of its features one by one, as capturing passes them.

    Replacing `forward` rather than wrapping the model keeps the names of its parameters."""
    forward = model.forward

    def flat(*tensors: Tensor) -> Tensor:
        try:
            outputs: Tensor = forward(Features.from_flat(tensors))
            return outputs
        except ArchitectureError as error:  # of a user's model: capturing explains its cause
            raise error.__cause__ or error from None

    vars(model)["forward"] = flat
    try:
        yield
    finally:
        del vars(model)["forward"]
