"""Histograms of features and predictions: of the rows that a version was trained on, and of rows that it predicts.

A `Reference` has the bins of each column and the counts of the training rows; it is stored with the version. A
`Counter` counts other rows into the same bins. The server compares both (sql/drift/drift.sql).

    number      quantiles of the training rows are the edges of bins; a value that is many of them has a bin of its
                own; nulls and non-finite numbers have one as well
    time        the same
    category    a bin for each of the most frequent strings, one for all other strings, one for nulls
    prediction  as a number: a regression's prediction, or the probability of the second of two labels; else a bin for
                each of the most frequent labels and one for all others. Its reference are validation rows.

    text        as two numbers, its length and the share of its words that are known (text_vectors.py)

Arrays and texts that are tokenised have no histogram. Needs numpy only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pg_tensile.errors import DataError
from pg_tensile.execution.data.answers import Answers
from pg_tensile.execution.data.columns import Chunk
from pg_tensile.execution.data.fitting import FittedPreprocessing
from pg_tensile.execution.data.preprocessing import Inputs, Kind, Preprocessing, Task
from pg_tensile.execution.data.text_vectors import KNOWN, LENGTH

BINS = 20  # of a number
MOST_CATEGORIES = 50  # strings or labels with a bin of their own
SAMPLE_ROWS = 50_000  # training rows that are counted; they come in hash order, so the first ones are a random sample
MEASURED = {"length": LENGTH, "known words": KNOWN}  # of a text, and the columns of its vector
FEATURE, TIME, PREDICTION = "feature", "time", "prediction"
LARGEST_COUNT = 1 << 53


class Sample(NamedTuple):
    """Rows to be counted.

    numbers: float64 [numbers, rows], the measures of texts behind those of columns; codes: int64 [categories that are
    not texts, rows], −1 = null; answers: those to the rows, or None."""

    numbers: NDArray[np.float64]
    codes: NDArray[np.int64]
    answers: Answers | None = None


def sample(preprocessing: Preprocessing, inputs: Inputs, rows: Any, answers: Answers | None = None) -> Sample:
    """Return the rows of `inputs` with these indices, or in this slice; `answers` are theirs."""
    pairs = zip(preprocessing.categories, inputs.categories, strict=True)
    chosen = [(feature, given.places[rows], given.table) for feature, given in pairs]
    codes = [np.where(places < 0, -1, table[places]) for feature, places, table in chosen if not feature.is_text]
    measures = [
        np.where(places < 0, np.nan, table[places, column])
        for feature, places, table in chosen
        if feature.vectors is not None
        for column in MEASURED.values()
    ]
    numbers = np.concatenate([inputs.numeric[:, rows], *(x[None].astype(np.float64) for x in measures)])
    return Sample(numbers, np.array(codes, np.int64).reshape(len(codes), numbers.shape[1]), answers)


@dataclass(frozen=True)
class Histogram:
    """Bins of a column and the counts of the reference rows in them.

    Bins of a number: null, then those that `edges` divide (ascending; an edge belongs to the bin below it, and one that
    is there twice is a bin of its own). Bins of categories: null, codes from 1, others. Bins of labels: `labels`,
    others."""

    name: str
    kind: str
    counts: tuple[int, ...]
    edges: tuple[float, ...] | None = None
    labels: tuple[int, ...] | None = None

    def to_json(self) -> dict[str, Any]:
        lists = {"counts": self.counts, "edges": self.edges, "labels": self.labels}
        given = {key: list(items) for key, items in lists.items() if items is not None}
        return {"name": self.name, "kind": self.kind} | given

    @cached_property
    def _cuts(self) -> NDArray[np.float64]:
        """Edges of which none is there twice: the first of two equal ones is the next smaller number."""
        cuts = np.array(self.edges, np.float64)
        twice = np.flatnonzero(cuts[:-1] == cuts[1:])
        with np.errstate(over="ignore"):  # below the smallest number is −infinity
            cuts[twice] = np.nextafter(cuts[twice], -np.inf)
        return cuts

    def number_bins(self, x: NDArray[np.float64]) -> NDArray[np.intp]:
        """Return the bin of each number."""
        return np.where(np.isfinite(x), np.searchsorted(self._cuts, x) + 1, 0)

    def code_bins(self, codes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the bin of each category's code, −1 = null."""
        other = len(self.counts) - 1
        return np.where(codes < 0, 0, np.where((codes > 0) & (codes < other), codes, other))

    def label_bins(self, label: NDArray[np.int32]) -> NDArray[np.intp]:
        """Return the bin of each label's index."""
        labels = self.labels or ()
        equal = label[:, None] == np.array(labels, np.int64)
        return np.where(equal.any(axis=1), equal.argmax(axis=1) if labels else 0, len(labels))


@dataclass(frozen=True)
class Reference:
    """Histograms of a version's features, in their order but texts last, and of its predictions for validation rows."""

    histograms: tuple[Histogram, ...]

    def to_json(self) -> dict[str, Any]:
        return {"columns": [histogram.to_json() for histogram in self.histograms]}

    @staticmethod
    def from_json(value: Any, preprocessing: Preprocessing) -> Reference:
        """Return the reference with this JSON. Raises DataError unless a version with the preprocessing may have it."""
        columns = value.get("columns") if isinstance(value, dict) else None
        if not isinstance(columns, list) or not all(isinstance(column, dict) for column in columns):
            raise _wrong("columns")
        expected = _empty(preprocessing).histograms
        given = [_histogram(column) for column in columns]
        if len(given) == len(expected) + 1:
            expected += (_prediction(preprocessing),)
        if len(given) != len(expected):
            raise _wrong("columns")
        for histogram, model in zip(given, expected, strict=True):
            _check(histogram, model, len(preprocessing.labels or ()))
        return Reference(tuple(given))

    @cached_property
    def starts(self) -> list[int]:
        """First bin of each histogram among the bins of all; at the end, the number of all bins."""
        return np.cumsum([0] + [len(histogram.counts) for histogram in self.histograms]).tolist()


class Counter:
    """Counts of rows in the bins of a reference."""

    def __init__(self, reference: Reference) -> None:
        self._reference = reference
        self.rows = 0
        self.counts = np.zeros(reference.starts[-1], np.int64)

    def add(self, sample: Sample) -> None:
        """Count rows, which have answers if the reference has a histogram of predictions."""
        numbers, codes = iter(sample.numbers), iter(sample.codes)
        places = []
        for histogram, start in zip(self._reference.histograms, self._reference.starts, strict=False):
            if histogram.kind == PREDICTION:
                assert sample.answers is not None
                answers = sample.answers
                number = histogram.edges is not None
                bins = histogram.number_bins(answers.prediction) if number else histogram.label_bins(answers.label)
            elif histogram.edges is None:
                bins = histogram.code_bins(next(codes))
            else:
                bins = histogram.number_bins(next(numbers))
            places.append(bins + start)
        if places:
            self.counts += np.bincount(np.concatenate(places), minlength=len(self.counts))
        self.rows += sample.numbers.shape[1]


def reference_of(fitted: FittedPreprocessing, blocks: Iterable[Chunk]) -> Reference:
    """Return the reference of a preprocessing's features, from the first training rows among `blocks`."""
    samples: list[Sample] = []
    rows = 0
    for block in blocks:
        part = fitted.training_part(block)
        chosen = slice(SAMPLE_ROWS - rows)
        samples.append(sample(fitted.preprocessing, fitted.inputs(part), chosen))
        rows += samples[-1].numbers.shape[1]
        if rows == SAMPLE_ROWS:
            break
    whole = joined(samples)
    numbers = iter(whole.numbers)
    histograms = [
        histogram if histogram.edges is None else _with_edges(histogram, next(numbers))
        for histogram in _empty(fitted.preprocessing).histograms
    ]
    return _counted(Reference(tuple(histograms)), whole)


def with_predictions(reference: Reference, preprocessing: Preprocessing, answers: Answers) -> Reference:
    """Return the reference with a histogram of the answers, those to validation rows."""
    histogram = _prediction(preprocessing)
    if histogram.edges is not None:
        histogram = _with_edges(histogram, answers.prediction)
    else:
        frequency = np.bincount(answers.label, minlength=len(preprocessing.labels or ()))
        labels = np.argsort(-frequency, kind="stable")[:MOST_CATEGORIES]
        histogram = replace(histogram, labels=tuple(labels.tolist()))
    empty = np.empty((0, len(answers.label)))
    (counted,) = _counted(Reference((histogram,)), Sample(empty, empty.astype(np.int64), answers)).histograms
    return Reference((*reference.histograms, counted))


def joined(samples: Sequence[Sample]) -> Sample:
    """Return the rows of several samples, at least one; all of them have answers, or none."""
    if len(samples) == 1:
        return samples[0]
    given = [item.answers for item in samples if item.answers is not None]
    answers = Answers(*map(np.concatenate, zip(*given, strict=True))) if given else None
    numbers = np.concatenate([item.numbers for item in samples], axis=1)
    return Sample(numbers, np.concatenate([item.codes for item in samples], axis=1), answers)


def _counted(reference: Reference, rows: Sample) -> Reference:
    """Return the reference with the counts of these rows."""
    if not reference.histograms:  # of arrays and texts only
        return reference
    counter = Counter(reference)
    counter.add(rows)
    parts = np.split(counter.counts, reference.starts[1:-1])
    pairs = zip(reference.histograms, parts, strict=True)
    return Reference(tuple(replace(histogram, counts=tuple(counts.tolist())) for histogram, counts in pairs))


def _empty(preprocessing: Preprocessing) -> Reference:
    """Return the histograms of the features, those of texts last; numbers have no edges yet."""
    histograms = []
    for feature in preprocessing.features:
        if feature.kind in (Kind.NUMERIC, Kind.TIMESTAMP):
            kind = TIME if feature.kind == Kind.TIMESTAMP else FEATURE
            histograms.append(Histogram(feature.name, kind, (0, 0), edges=()))
        elif feature.kind == Kind.CATEGORY and not feature.is_text:
            bins = min(len(feature.categories or ()), MOST_CATEGORIES) + 2
            histograms.append(Histogram(feature.name, FEATURE, (0,) * bins))
    for feature in preprocessing.categories:
        if feature.vectors is not None:
            names = (f"{feature.name}: {measure}" for measure in MEASURED)
            histograms += [Histogram(name, FEATURE, (0, 0), edges=()) for name in names]
    return Reference(tuple(histograms))


def _prediction(preprocessing: Preprocessing) -> Histogram:
    """Return the histogram of predictions, without edges or labels yet."""
    name = preprocessing.target.name
    if preprocessing.task != Task.MULTICLASS:
        return Histogram(name, PREDICTION, (0, 0), edges=())
    bins = min(len(preprocessing.labels or ()), MOST_CATEGORIES) + 1
    return Histogram(name, PREDICTION, (0,) * bins, labels=())


def _with_edges(histogram: Histogram, x: NDArray[np.float64]) -> Histogram:
    """Return the histogram of a number with edges between its quantiles."""
    finite = x[np.isfinite(x)]
    edges: NDArray[np.float64] = np.empty(0)
    if len(finite):
        shares = np.arange(1, BINS) / BINS
        values, times = np.unique(np.quantile(finite, shares, method="inverted_cdf"), return_counts=True)
        edges = np.repeat(values, np.minimum(times, 2))
    return replace(histogram, edges=tuple(edges.tolist()), counts=(0,) * (len(edges) + 2))


# ---- checks ----


def _wrong(what: str) -> DataError:
    return DataError(f'the statistics of the training rows cannot be used: "{what}"', hint="Train the model again.")


def _histogram(column: dict[str, Any]) -> Histogram:
    """Return the histogram with this JSON, as far as its types are right."""
    if not {"name", "kind", "counts"} <= column.keys() <= {"name", "kind", "counts", "edges", "labels"}:
        raise _wrong("columns")
    lists = {key: column[key] for key in ("counts", "edges", "labels") if key in column}
    if not all(isinstance(items, list) for items in lists.values()):
        raise _wrong("counts")
    for key, items in lists.items():
        number = int | float if key == "edges" else int
        if any(isinstance(item, bool) or not isinstance(item, number) for item in items):
            raise _wrong(key)
    return Histogram(column["name"], column["kind"], **{key: tuple(items) for key, items in lists.items()})


def _check(given: Histogram, expected: Histogram, labels: int) -> None:
    """Raise DataError unless a histogram has the form of the expected one."""
    if (given.name, given.kind) != (expected.name, expected.kind):
        raise _wrong("name")
    if not all(0 <= count <= LARGEST_COUNT for count in given.counts):
        raise _wrong("counts")
    bins = len(expected.counts)
    if (given.edges is None) != (expected.edges is None) or (given.labels is None) != (expected.labels is None):
        raise _wrong("edges")
    if given.edges is not None:
        bins = len(given.edges) + 2
        thrice = any(a == b for a, b in zip(given.edges, given.edges[2:], strict=False))
        if bins > 2 * BINS or thrice or not _ascending(given.edges):
            raise _wrong("edges")
    if given.labels is not None and (
        len(given.labels) != bins - 1
        or len(set(given.labels)) != len(given.labels)
        or not all(0 <= label < labels for label in given.labels)
    ):
        raise _wrong("labels")
    if len(given.counts) != bins:
        raise _wrong("counts")


def _ascending(edges: Sequence[float]) -> bool:
    try:
        return all(math.isfinite(edge) for edge in edges) and all(a <= b for a, b in pairwise(edges))
    except OverflowError:
        return False
