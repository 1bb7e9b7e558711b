"""The sortable tables of the page: tensors that move, metrics, lines of the scheduler's log, the evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from pg_tensile.text import duration, size
from pg_tensile.tools.report.evaluation import Evaluation
from pg_tensile.tools.report.facts import LogLine, MovedTensor


class Column(NamedTuple):
    """A column of a table. `hint` is the tooltip of its title."""

    title: str
    is_number: bool = False
    hint: str = ""


class Cell(NamedTuple):
    """A cell of a table. `value` is the exact number, by which rows are sorted; None for text and unknown numbers."""

    text: str
    value: float | None = None


class Table(NamedTuple):
    """A table and the identifier of its element."""

    identifier: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]


TENSOR_COLUMNS = (
    Column("tensor", True),
    Column("name"),
    Column("kind"),
    Column("type"),
    Column("shape"),
    Column("bytes", True),
    Column("out", True, "times an iteration"),
    Column("in", True, "times an iteration"),
    Column("moved", True, "bytes an iteration, both ways"),
    Column("again", True, "times an iteration that it is computed again"),
    Column("waited for", True, "of an iteration"),
    Column("gone after", True, "operator; the first time"),
    Column("back before", True, "operator; maybe in the next iteration"),
)
LOG_COLUMNS = (
    Column("time"),
    Column("after", True, "seconds since the job was submitted"),
    Column("event"),
    Column("generation", True),
    Column("because"),
    Column("planned", True),
    Column("granted", True),
    Column("iteration", True),
    Column("waits", True),
    Column("out", True),
    Column("in", True),
    Column("again", True, "operators computed again"),
)
COUNTS = ("rows", "skipped_rows", "unseen_labels")  # metrics that are numbers of rows


def tensor_table(tensors: Sequence[MovedTensor]) -> Table:
    rows = [
        [
            _count(tensor.tensor),
            Cell(tensor.name),
            Cell(tensor.kind.replace("_", " ")),
            Cell(tensor.dtype),
            Cell(" × ".join(map(str, tensor.shape))),
            _bytes(tensor.bytes),
            _count(tensor.out),
            _count(tensor.in_),
            _bytes(tensor.moved_bytes),
            _count(tensor.recomputed),
            Cell(duration(tensor.stall_us) if tensor.stall_us else "", tensor.stall_us),
            _count(tensor.gone_after),
            _count(tensor.back_before),
        ]
        for tensor in tensors
    ]
    return Table("tensors", TENSOR_COLUMNS, rows)


def metric_table(metrics: Sequence[dict[str, Any]], names: Sequence[str], baseline: Mapping[str, Any] | None) -> Table:
    """Return the table of rows of tensile.epoch_metrics with the metrics in `names`; below them, the baseline's."""
    numbers = (*names, "seconds")
    columns = [Column("epoch", True), Column("split"), Column("samples", True)]
    columns += [Column(name, True) for name in numbers]
    rows = [
        [_count(row["epoch"]), Cell(row["split"]), _count(row["samples"])]
        + [Cell("" if row[name] is None else f"{row[name]:.4g}", row[name]) for name in numbers]
        for row in metrics
    ]
    if baseline is not None:
        scores = [_score(name, baseline.get(name)) for name in numbers]
        rows.append([_count(None), Cell(f"{baseline['split']}, without a model"), _count(None), *scores])
    return Table("metrics", columns, rows)


def log_table(lines: Sequence[LogLine]) -> Table:
    rows = [
        [
            Cell(moment(line.at)),
            Cell(f"{line.seconds:,.1f} s", line.seconds),
            Cell(line.event),
            _count(line.generation),
            Cell(line.reason or ""),
            _bytes(line.planned_bytes),
            _bytes(line.granted_bytes),
            _time(line.iteration_us),
            _time(line.stall_us),
            _bytes(line.out_bytes),
            _bytes(line.in_bytes),
            _count(line.recomputes),
        ]
        for line in lines
    ]
    return Table("plans", LOG_COLUMNS, rows)


def score_table(evaluation: Evaluation) -> Table:
    columns = (Column("metric"), Column("value", True), Column("baseline", True, "without a model"))
    rows = [
        [Cell(name.replace("_", " ")), _score(name, value), _score(name, evaluation.baselines[name])]
        for name, value in evaluation.metrics.items()
    ]
    return Table("scores", columns, rows)


def _score(name: str, value: float | None) -> Cell:
    if value is None:
        return Cell("")
    return Cell(f"{value:,.0f}" if name in COUNTS else f"{value:.4g}", value)


def importance_table(evaluation: Evaluation) -> Table:
    columns = (Column("feature"), Column("importance", True), Column("deviation", True, "of the repetitions"))
    rows = [
        [Cell(row.feature), Cell(f"{row.importance:.4g}", row.importance), Cell(f"{row.deviation:.2g}", row.deviation)]
        for row in evaluation.importance or ()
    ]
    return Table("importances", columns, rows)


def moment(text: str) -> str:
    """Return a moment without fractions of a second: "2026-05-04 12:00:00+00:00"."""
    return datetime.fromisoformat(text).isoformat(" ", "seconds")


def _count(number: int | None) -> Cell:
    return Cell("" if number is None else f"{number:,}", number)


def _bytes(number: int | None) -> Cell:
    return Cell("" if number is None else size(number), number)


def _time(us: float | None) -> Cell:
    return Cell("" if us is None else duration(us), us)
