"""What a calibration measures: training steps of models in the catalogue, and a standard set.

Of a model that was trained, the step is the one of its last training. Of one that was only registered, it is what its
architecture says: the sizes of an image, of tokens or of texts. Models whose number of features only the data tells are
left out; the standard set has steps like theirs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple

from pg_tensile.execution.data.preprocessing import ArrayInput, ModelInputs, Task, row_layout
from pg_tensile.execution.training.recipe import AVERAGED, CLIPS, Subject, recipe

if TYPE_CHECKING:
    import torch

    from pg_tensile.execution.capture import Captured

ROWS = 10_000  # for which the recipe chooses the batch size of a model that has seen no data
OPTIONS = ("weight_decay", "momentum", "clip", "precision", "accumulate", "average_weights")  # that change the step
WEIGHTS = ("weight", "class_weight")  # options with which rows have weights


class Workload(NamedTuple):
    """Training step to measure."""

    architecture: dict[str, Any]
    inputs: ModelInputs
    outputs: int
    task: Task
    batch_size: int
    optimizer: str
    options: dict[str, Any]

    @staticmethod
    def from_json(value: dict[str, Any]) -> Workload:
        """Return the workload of a trained model as tensile_worker._calibration_workloads() returns it."""
        inputs = value["inputs"]
        arrays = tuple(ArrayInput(*array) for array in inputs["arrays"])
        bins = tuple(tuple(map(float, range(edges))) for edges in inputs["edges"])  # only their number matters
        sizes = ModelInputs(inputs["numeric"], tuple(inputs["cardinalities"]), arrays, bins, inputs["vectors"])
        return Workload(**(value | {"inputs": sizes, "task": Task(value["task"])}))

    @staticmethod
    def untrained(architecture: dict[str, Any]) -> Workload | None:
        """Return the workload of a model that was not trained, or None if its architecture does not give the sizes.

        Only the layers behind the image, the tokens or the texts depend on the columns besides them and on the target,
        which is taken for two classes. Raises ArchitectureError.
        """
        from pg_tensile.execution.models import parse

        array = _array_of(parse(architecture))
        if array is None:
            return None
        batch_size = recipe(Subject(architecture["type"], ROWS)).batch_size
        return Workload(architecture, ModelInputs(0, (), (array,)), 1, Task.BINARY, batch_size, "adamw", {})


def _array_of(architecture: Any) -> ArrayInput | None:
    """Return the array that an architecture reads, as far as it says itself how large that is."""
    from pg_tensile.execution.models.cnn import CNNArchitecture
    from pg_tensile.execution.models.pretrained import PretrainedArchitecture
    from pg_tensile.execution.models.transformer import TransformerArchitecture

    match architecture:
        case CNNArchitecture(shape=tuple() as shape):
            return ArrayInput(math.prod(shape), 0)
        case TransformerArchitecture(length=int() as length):
            return ArrayInput(length, architecture.vocabulary)
        case PretrainedArchitecture():
            source = architecture.text_columns().source
            return ArrayInput(source.length, source.encoder().vocabulary)
    return None


def workloads(registered: list[Workload]) -> Iterator[Workload]:
    """Yield the workloads of models, then variants of these and the standard ones, in turns.

    A variant has half or twice the batch size.
    """
    yield from registered
    variants = [
        workload._replace(batch_size=size)
        for factor in (0.5, 2.0)
        for workload in registered
        if (size := int(workload.batch_size * factor)) > 0
    ]
    for pair in zip_longest(variants, standard_workloads()):
        yield from filter(None, pair)


def capture_workload(workload: Workload, device: torch.device) -> Captured:
    """Return the workload's training step, captured for the device. Raises ArchitectureError, CaptureError."""
    from pg_tensile.execution import models
    from pg_tensile.execution.training.graphs import Sizes, capture_step
    from pg_tensile.execution.training.settings import Settings

    kind, given = workload.architecture["type"], workload.options
    quantiles = tuple(given.get("quantiles", ()))
    model = models.build(models.parse(workload.architecture), workload.inputs, workload.outputs + len(quantiles))
    defaults = {"average_weights": kind in AVERAGED, "clip": CLIPS.get(kind)}
    options = defaults | {key: given[key] for key in OPTIONS if key in given}
    settings = Settings(1, workload.batch_size, workload.optimizer, quantiles=quantiles, **options)
    weighted = any(key in given for key in WEIGHTS)
    sizes = Sizes(workload.batch_size, 0, tuple(row_layout(workload.inputs, workload.task)), weighted)
    return capture_step(model, settings, workload.task, sizes, device)


def standard_workloads() -> Iterator[Workload]:
    """Yield the built-in architectures over a range of widths and batch sizes, in turns."""
    for workload in chain.from_iterable(zip(_tables(), _ensembles(), _images(), _texts(), strict=True)):
        yield from (workload, workload._replace(batch_size=workload.batch_size // 2))


def _tables() -> Iterator[Workload]:
    table = ModelInputs(24, (50, 200, 1000), ())
    wide = ModelInputs(200, (), ())
    shapes: list[tuple[list[int], str, ModelInputs, int, int, str]] = [
        ([128, 64], "relu", table, 1, 256, "adamw"),
        ([512, 256], "gelu", wide, 10, 256, "adamw"),
        ([64], "tanh", table, 1, 64, "sgd"),
        ([1024, 1024], "relu", wide, 1, 128, "adam"),
        ([256, 128, 64], "silu", table, 5, 1024, "adamw"),
        ([32, 16], "relu", table, 1, 32, "adamw"),
        ([2048, 512], "relu", wide, 100, 512, "adamw"),
        ([128, 64], "relu", table, 3, 4096, "adamw"),
    ]
    for index, (hidden, activation, inputs, outputs, batch, optimizer) in enumerate(shapes):
        norm = ("none", "batch", "layer")[index % 3]
        architecture = {"type": "mlp", "hidden": hidden, "activation": activation, "norm": norm, "dropout": 0.1}
        yield _workload(architecture, inputs, outputs, batch, optimizer)


def _ensembles() -> Iterator[Workload]:
    """Yield steps of the architecture that train_model chooses for tables."""
    shapes: list[tuple[int, int, tuple[int, ...], int, int]] = [
        (8, 8, (8, 30), 1, 128),
        (32, 8, (), 1, 512),
        (16, 8, (200, 1000), 5, 256),
        (64, 8, (50,), 1, 1024),
        (4, 8, (10, 10, 10), 1, 32),
        (128, 4, (), 10, 256),
        (24, 16, (12,), 1, 64),
        (12, 8, (5000,), 1, 1024),
    ]
    for numbers, members, cardinalities, outputs, batch in shapes:
        inputs = ModelInputs(2 * numbers, cardinalities, (), (tuple(map(float, range(33))),) * numbers)
        yield _workload({"type": "tabular", "members": members}, inputs, outputs, batch)


def _images() -> Iterator[Workload]:
    shapes: list[tuple[list[int], list[int], str, int, int]] = [
        ([16, 32], [1, 28, 28], "none", 10, 64),
        ([32, 64, 128], [3, 32, 32], "batch", 10, 32),
        ([16, 32], [1, 8, 8], "batch", 10, 128),
        ([64, 128], [3, 32, 32], "none", 100, 16),
        ([16, 32, 64], [3, 64, 64], "batch", 2, 16),
        ([8, 16], [1, 28, 28], "none", 10, 256),
        ([64, 128, 256, 256], [3, 64, 64], "batch", 10, 8),
        ([32, 32], [1, 16, 16], "layer", 10, 512),
    ]
    for channels, shape, norm, outputs, batch in shapes:
        architecture = {"type": "cnn", "channels": channels, "shape": shape, "norm": norm}
        yield _workload(architecture, ModelInputs(0, (), (ArrayInput(math.prod(shape), 0),)), outputs, batch)


def _texts() -> Iterator[Workload]:
    shapes = [
        (64, 2, 32, 1000, 2, 32),
        (128, 2, 64, 5000, 5, 16),
        (32, 1, 16, 500, 2, 128),
        (256, 2, 64, 5000, 2, 8),
        (64, 4, 128, 2000, 10, 16),
        (128, 1, 32, 20000, 2, 64),
        (256, 1, 128, 1000, 2, 32),
        (64, 2, 32, 1000, 2, 256),
    ]
    for dim, layers, length, vocabulary, outputs, batch in shapes:
        architecture = {"type": "transformer", "dim": dim, "layers": layers, "heads": 4, "dropout": 0.1}
        yield _workload(architecture, ModelInputs(4, (), (ArrayInput(length, vocabulary),)), outputs, batch)


def _workload(
    architecture: dict[str, Any], inputs: ModelInputs, outputs: int, batch: int, optimizer: str = "adamw"
) -> Workload:
    task = Task.MULTICLASS if outputs > 2 else Task.BINARY
    return Workload(architecture, inputs, outputs if outputs > 2 else 1, task, batch, optimizer, {})
