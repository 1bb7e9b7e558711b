"""Preprocessing of column values to model inputs.

It is fitted once on the training rows (fitting.py) and applied in the same way in training and prediction.
`Preprocessing` holds the fitted values and is stored as JSON with the model's version. Its `apply` is the only way from
`Inputs` to `Features`: the trainer and the predictor both call it with the same float64 inputs, so a model gets the
same bits in both. All arithmetic is float64 (float32 cannot hold epoch seconds); only the result is float32.

    numeric     limited (`Feature.limits`) and standardised; nulls and non-finite numbers become the mean, plus an
                indicator column of such values if the training rows have any
                With ranks (ranks.py): robustly scaled instead, nulls as the median, plus a column of ranks
    timestamp   the same, plus sine and cosine of the day in the week and in the year, and of the time of day unless
                all are midnight
    category    code of the string from 1, the most frequent one first; 0 = null; rare strings share a code or, of a
                column with too many strings, are hashed to codes
    text        a category for requests, whose strings become vectors (text_vectors.py) or tokens of a pretrained model
                (texts.py); nulls become the empty text, plus an indicator column of nulls if the training rows have any
    array       standardised by the mean and deviation over all elements; nulls become the mean, plus an indicator
                column of null arrays if the training rows have any
                With `Feature.means`: by those of each element, of long arrays the means of segments, and for a series
                with what it adds (series.py)
    tokens      code of the number in sorted order from 2; 1 = unknown or null, 0 = padding; the same indicator column
    target      transformed (targets.py) and standardised for regression, position in sorted labels for classification

Needs numpy only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from pg_tensile.errors import DataError
from pg_tensile.execution.data.baseline import Baseline
from pg_tensile.execution.data.calibration import Calibration
from pg_tensile.execution.data.conformal import Conformal
from pg_tensile.execution.data.cycles import cycle_width, cycles
from pg_tensile.execution.data.hashing import string_hash
from pg_tensile.execution.data.ranks import RankScale, RankScales
from pg_tensile.execution.data.series import numbers_of
from pg_tensile.execution.data.stored_numbers import floats, with_floats
from pg_tensile.execution.data.targets import Target
from pg_tensile.execution.data.text_vectors import TextVectors
from pg_tensile.execution.data.texts import TextEncoder, TextSource

# Standardised training values are never larger (at most the square root of the number of rows). The limit only prevents
# an extreme value at prediction time from becoming infinite in float32.
LIMIT = 1e6
HUGE = 1e300
PADDING, UNKNOWN_TOKEN, FIRST_TOKEN = 0, 1, 2


class Task(StrEnum):
    REGRESSION = "regression"
    BINARY = "binary"
    MULTICLASS = "multiclass"


class Kind(StrEnum):
    NUMERIC = "numeric"
    TIMESTAMP = "timestamp"
    CATEGORY = "category"
    ARRAY = "array"


class TokenLimits(NamedTuple):
    """Limits for integer arrays that are tokens.

    Rows have the length of the longest training row, but at most `length` (None means 512); only the `vocabulary` most
    frequent tokens have codes of their own."""

    length: int | None
    vocabulary: int


class ArrayInput(NamedTuple):
    """One array input of a model: float32 [rows, length] if `vocabulary` is 0, else int64 codes below `vocabulary`."""

    length: int
    vocabulary: int


class ModelInputs(NamedTuple):
    """Sizes of a model's features: numeric columns, codes of each category (0 included), arrays.

    `bins` are the edges of bins for each of the last numeric columns, which are ranks (ranks.py). The last `vectors`
    arrays are those of texts (text_vectors.py)."""

    numeric: int
    cardinalities: tuple[int, ...]
    arrays: tuple[ArrayInput, ...]
    bins: tuple[tuple[float, ...], ...] = ()
    vectors: int = 0


class Features(NamedTuple):
    """Inputs of a model: numpy arrays here, tensors in training.

    numeric: float32 [rows, numeric]; categories: int64 [rows, categories]; each array: float32 or int64 [rows, length].
    """

    numeric: Any
    categories: Any
    arrays: tuple[Any, ...]

    def flat(self) -> list[Any]:
        return [self.numeric, self.categories, *self.arrays]

    @staticmethod
    def from_flat(flat: Sequence[Any]) -> Features:
        return Features(flat[0], flat[1], tuple(flat[2:]))


def row_layout(inputs: ModelInputs, task: Task) -> list[tuple[tuple[int, ...], DTypeLike]]:
    """Return the shape of a row and the dtype of each flat feature, and of the target."""
    layout: list[tuple[tuple[int, ...], DTypeLike]] = [((inputs.numeric,), np.float32)]
    layout.append(((len(inputs.cardinalities),), np.int64))
    layout.extend(((array.length,), np.int64 if array.vocabulary else np.float32) for array in inputs.arrays)
    return [*layout, ((), np.int64 if task == Task.MULTICLASS else np.float32)]


class CategoryInput(NamedTuple):
    """Strings of one category: indices `places` [rows] into `table`, −1 = null.

    `table` holds the code of each string and a 0 at its end, which −1 selects. For a text feature it holds the vector
    or the tokens [strings + 1, width] of each string and, at its end, those of the empty text."""

    places: NDArray[Any]
    table: NDArray[Any]


class ArraysInput(NamedTuple):
    """Arrays of one feature: lengths [rows], −1 = null; float64 elements of all rows, NaN = null."""

    lengths: NDArray[Any]
    elements: NDArray[np.float64]


class Inputs(NamedTuple):
    """Raw values by kind, as in a PREDICT frame.

    numeric: float64 [numeric and timestamp features, rows], timestamps in microseconds since 2000-01-01, NaN = null."""

    rows: int
    numeric: NDArray[np.float64]
    categories: list[CategoryInput]
    arrays: list[ArraysInput]


class Scaling(NamedTuple):
    """The map x ↦ (x · unit − center) / scale; its fields are numbers or columns of numbers.

    An infinite scale maps every value of a feature that was constant in training to 0; a unit of ¼ (exact in binary)
    keeps differences of the largest numbers from overflowing."""

    unit: Any  # None means 1
    center: Any
    scale: Any

    @staticmethod
    def of(mean: float, std: float) -> Scaling:
        if std == 0:
            return Scaling(None, 0.0, np.inf)
        return Scaling(None, mean, std) if std < HUGE else Scaling(0.25, mean * 0.25, std * 0.25)

    @staticmethod
    def of_each(means: Sequence[float], stds: Sequence[float]) -> Scaling:
        """Return the scaling of several numbers; its fields are [numbers], the unit None if it is 1 for all."""
        scalings = [Scaling.of(mean, std) for mean, std in zip(means, stds, strict=True)]
        units = np.array([scaling.unit or 1.0 for scaling in scalings])
        centers, scales = (np.array(values, np.float64) for values in zip(*(s[1:] for s in scalings), strict=True))
        return Scaling(None if (units == 1.0).all() else units, centers, scales)


@dataclass(frozen=True)
class Feature:
    """One fitted feature.

    `nulls` is the number of training rows that are null (or not finite, for numbers); a `std` of 0 means constant.
    `categories` have the codes from 1; the codes behind theirs are `buckets`, over which all other strings are divided
    by a hash. Without buckets, as if no string of the training rows was rare, other strings have the code of null."""

    name: str
    kind: Kind
    type: str
    nulls: int = 0
    mean: float = 0.0
    std: float = 0.0
    hour: bool = False  # timestamps: whether some are not at midnight
    length: int | None = None  # arrays: elements per row; text features: numbers or tokens per row
    categories: tuple[str, ...] | None = None
    mode: str | None = None  # categories: the most frequent one, None if that is null
    tokens: tuple[int, ...] | None = None
    low: float | None = None  # numbers and timestamps: range of the training rows
    high: float | None = None
    buckets: int = 0
    ranks: RankScale | None = None  # numbers and timestamps that a model takes as ranks, too
    vocabulary: int | None = None  # text features, of kind category: numbers of different tokens, padding included
    means: tuple[float, ...] | None = None  # arrays each number of which has a scale of its own: as mean and std
    stds: tuple[float, ...] | None = None
    segment: int | None = None  # of these arrays: neighbours that are one number (series.py), None: one
    series: bool | None = None  # whether they have the numbers that a series adds
    sql_type: str | None = None  # None: a version of an earlier release
    vectors: TextVectors | None = None  # text features, of kind category, that are not tokenised

    def to_json(self) -> dict[str, Any]:
        value = {key: value for key, value in vars(self).items() if value is not None}
        objects = {"ranks": self.ranks, "vectors": self.vectors}
        return value | {key: item.to_json() for key, item in objects.items() if item is not None}

    @staticmethod
    def from_json(value: dict[str, Any]) -> Feature:
        lists = {key: tuple(value[key]) for key in ("categories", "tokens") if value.get(key) is not None}
        ranks = RankScale.from_json(value["ranks"]) if value.get("ranks") else None
        vectors = TextVectors(**value["vectors"]) if value.get("vectors") else None
        objects = {"kind": Kind(value["kind"]), "ranks": ranks, "vectors": vectors}
        return Feature(**{**with_floats(Feature, value), **lists, **objects})

    @property
    def scaling(self) -> Scaling:
        if self.means is None or self.stds is None:
            return Scaling.of(self.mean, self.std)
        return Scaling.of_each(self.means, self.stds)

    @property
    def fill(self) -> float | NDArray[np.float64]:
        """Number in place of a null one, or of each number of an array [width]."""
        return self.mean if self.means is None else np.array(self.means)

    @property
    def width(self) -> int:
        """Numbers or tokens that a model takes of an array."""
        return self.length or 0 if self.means is None else len(self.means)

    @property
    def limits(self) -> tuple[float, float]:
        """Range to which numbers are limited: that of the training rows, widened by its width on both sides."""
        if self.low is None or self.high is None:
            return -np.inf, np.inf
        return self.low - (self.high - self.low), self.high + (self.high - self.low)

    @property
    def is_text(self) -> bool:
        """True for a category whose strings are texts, which have no codes."""
        return self.vocabulary is not None or self.vectors is not None

    @property
    def cardinality(self) -> int:
        """Number of codes of a category."""
        return len(self.categories or ()) + 1 + self.buckets


@dataclass(frozen=True)
class Preprocessing:
    """A fitted preprocessing: features in the query's order; `calibration` and `conformal` follow from validation."""

    task: Task
    target: Target
    labels: tuple[str, ...] | None
    label_values: tuple[float, ...] | None  # those of integers are int, for float64 has not all of them
    features: tuple[Feature, ...]
    calibration: Calibration | None = None
    conformal: Conformal | None = None
    quantiles: tuple[float, ...] = ()  # of a regression's target that are learned besides the mean
    text: TextSource | None = None  # of the text features
    baseline: Baseline | None = None  # None: a version of an earlier release, or an imported model

    # Cached, because `apply` would otherwise compute these again for every single row that is predicted.
    @cached_property
    def numbers(self) -> tuple[Feature, ...]:
        """Numeric and timestamp features: the rows of `Inputs.numeric`."""
        return tuple(f for f in self.features if f.kind in (Kind.NUMERIC, Kind.TIMESTAMP))

    @cached_property
    def categories(self) -> tuple[Feature, ...]:
        """Categories and text features, both of which a request gives as strings."""
        return tuple(f for f in self.features if f.kind == Kind.CATEGORY)

    @cached_property
    def arrays(self) -> tuple[Feature, ...]:
        return tuple(f for f in self.features if f.kind == Kind.ARRAY)

    @cached_property
    def model_inputs(self) -> ModelInputs:
        cycle_columns = sum(cycle_width(feature.hour) for _, feature in self._timestamps)
        texts = [f for f in self.categories if f.is_text]
        indicators = len(self._indicated) + sum(f.nulls > 0 for f in (*self.arrays, *texts))
        cardinalities = tuple(f.cardinality for f in self.categories if not f.is_text)
        arrays = [ArrayInput(f.width, 0 if f.tokens is None else len(f.tokens) + FIRST_TOKEN) for f in self.arrays]
        arrays += [ArrayInput(f.length or 0, f.vocabulary or 0) for f in texts]
        bins = tuple(f.ranks.bins for f in self.numbers if f.ranks is not None)
        numeric = len(self.numbers) + cycle_columns + indicators + len(bins)
        vectors = sum(f.vectors is not None for f in texts)
        return ModelInputs(numeric, cardinalities, tuple(arrays), bins, vectors)

    @cached_property
    def _ranked(self) -> NDArray[np.intp]:
        """Indices of the numbers that are taken as ranks, too."""
        return np.array([i for i, f in enumerate(self.numbers) if f.ranks is not None], np.intp)

    @cached_property
    def _rank_scales(self) -> RankScales:
        return RankScales([feature.ranks for feature in self.numbers if feature.ranks is not None])

    @cached_property
    def encoder(self) -> TextEncoder:
        """Encoder of the text features.

        Raises ArchitectureError if the folder of its tokenizer is missing or is another one than in training."""
        assert self.text is not None
        return self.text.encoder()

    @cached_property
    def _means(self) -> NDArray[np.float64]:
        """Means of the numbers, [numbers, 1]."""
        return np.array([feature.mean for feature in self.numbers], np.float64).reshape(-1, 1)

    @cached_property
    def _scaling(self) -> Scaling:
        """Scaling of the numbers; each field is [numbers, 1]."""
        units, centers, scales = (
            np.array(
                [[s.unit or 1.0, s.center, s.scale] for s in (feature.scaling for feature in self.numbers)], np.float64
            )
            .reshape(-1, 3, 1)
            .transpose(1, 0, 2)
        )
        return Scaling(None if (units == 1.0).all() else units, centers, scales)

    @cached_property
    def _array_scalings(self) -> tuple[tuple[Scaling, Any], ...]:
        """Scaling of each array feature, and what is in place of its nulls."""
        return tuple((feature.scaling, feature.fill) for feature in self.arrays)

    @cached_property
    def _limits(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Least and largest of the numbers, [numbers, 1] each."""
        limits = np.array([feature.limits for feature in self.numbers], np.float64).reshape(-1, 2, 1)
        return limits[:, 0], limits[:, 1]

    @cached_property
    def _indicated(self) -> NDArray[np.intp]:
        return np.array([i for i, f in enumerate(self.numbers) if f.nulls], np.intp)

    @cached_property
    def _timestamps(self) -> tuple[tuple[int, Feature], ...]:
        return tuple((i, f) for i, f in enumerate(self.numbers) if f.kind == Kind.TIMESTAMP)

    @cached_property
    def _codes(self) -> tuple[dict[str, int], ...]:
        return tuple({text: code for code, text in enumerate(f.categories or (), 1)} for f in self.categories)

    @cached_property
    def _largest_known(self) -> tuple[int, ...]:
        """Largest code of a string that does not count as unknown, for each category."""
        return tuple(f.cardinality - 1 - (f.buckets == 1) for f in self.categories)

    @cached_property
    def label_numbers(self) -> NDArray[np.float64] | None:
        """Numbers that the labels stand for, [labels]; None if they are not numbers."""
        return None if self.label_values is None else np.array(self.label_values, np.float64)

    @property
    def outputs(self) -> int:
        """Width of the model's output."""
        return len(self.labels or ()) if self.task == Task.MULTICLASS else 1 + len(self.quantiles)

    def layout(self) -> list[tuple[tuple[int, ...], DTypeLike]]:
        """Return the shape of a row and the dtype of each flat feature, and of the target."""
        return row_layout(self.model_inputs, self.task)

    def codes(self, category: int, strings: Iterable[str]) -> list[int]:
        """Return the codes of `strings` for the category with that index."""
        feature, get = self.categories[category], self._codes[category].get
        if not feature.buckets:
            return [get(text, 0) for text in strings]
        first = len(feature.categories or ()) + 1
        return [get(text) or first + string_hash(text) % feature.buckets for text in strings]

    def unknown(self, category: int, codes: Sequence[int]) -> list[bool]:
        """Return whether each code of a string stands for strings that were rare or absent in the training rows.

        Where strings are hashed because there are so many, none counts as unknown."""
        largest = self._largest_known[category]
        return [not 0 < code <= largest for code in codes]

    def table(self, category: int, strings: Sequence[str], padded: bool = True) -> NDArray[Any]:
        """Return the table of a CategoryInput for the category or text feature with that index.

        `padded`: tokens have the feature's whole length, as the graph of a captured model needs it; otherwise only the
        length of the longest text, which gives the same outputs but for rounding. Raises ArchitectureError."""
        feature = self.categories[category]
        if feature.vectors is not None:
            return feature.vectors.encode([*strings, ""])
        if not feature.vocabulary:
            return np.array([*self.codes(category, strings), 0], np.int64)
        return self.encoder.encode([*strings, ""], feature.length or 1, padded)

    def apply(self, inputs: Inputs) -> Features:
        """Return the features [rows, …] of raw values. Raises DataError if an array has the wrong length."""
        numeric = np.empty((inputs.rows, self.model_inputs.numeric), np.float32)
        x = inputs.numeric
        valid = np.isfinite(x)
        count = len(x)
        if len(self._ranked) < count:
            limited = np.where(valid, x, self._means)
            low, high = self._limits
            np.maximum(np.minimum(limited, high, out=limited), low, out=limited)
            numeric[:, :count] = standardise(limited, self._scaling).T
        if len(self._indicated):
            numeric[:, count : count + len(self._indicated)] = ~valid[self._indicated].T
            count += len(self._indicated)
        for row, feature in self._timestamps:
            width = cycle_width(feature.hour)
            numeric[:, count : count + width] = cycles(x[row], valid[row], feature.hour)
            count += width
        for feature, array in zip(self.arrays, inputs.arrays, strict=True):
            if feature.nulls:
                numeric[:, count] = array.lengths < 0
                count += 1
        if len(self._ranked):
            self._apply_ranks(x, valid, numeric)
        categories = np.empty((inputs.rows, len(self.model_inputs.cardinalities)), np.int64)
        arrays = [
            _apply_array(f, a, *scaling)
            for f, a, scaling in zip(self.arrays, inputs.arrays, self._array_scalings, strict=True)
        ]
        column = 0
        for feature, category in zip(self.categories, inputs.categories, strict=True):
            if not feature.is_text:
                categories[:, column] = category.table[category.places]
                column += 1
                continue
            chosen = category.table[category.places]
            arrays.append(chosen if feature.vocabulary is None else chosen.astype(np.int64))
            if feature.nulls:
                numeric[:, count] = category.places < 0
                count += 1
        return Features(numeric, categories, tuple(arrays))

    def _apply_ranks(self, x: NDArray[np.float64], valid: NDArray[np.bool_], numeric: NDArray[np.float32]) -> None:
        """Fill the last columns with ranks and, for the same features, those of standardised numbers with robust ones.

        Nulls are 0, the median, in both."""
        scales = self._rank_scales
        ranked: Any = slice(len(x)) if len(self._ranked) == len(x) else self._ranked  # a slice is faster
        present = valid[ranked]
        chosen = np.where(present, x[ranked], 0.0)
        numeric[:, ranked] = (scales.robust(chosen) * present).T
        numeric[:, -len(chosen) :] = (scales.ranks(chosen) * present).T

    def to_json(self) -> dict[str, Any]:
        """Return the JSON that is stored with the version; docs/internals.md, "Features (PREDICT)"."""
        return {
            "task": self.task,
            "target": self.target.to_json(),
            "labels": self.labels,
            "label_values": self.label_values,
            "features": [feature.to_json() for feature in self.features],
            "calibration": None if self.calibration is None else self.calibration._asdict(),
            "conformal": None if self.conformal is None else self.conformal.to_json(),
            "quantiles": self.quantiles,
            "baseline": None if self.baseline is None else self.baseline.to_json(),
        } | ({} if self.text is None else {"text": self.text._asdict()})

    @staticmethod
    def from_json(value: dict[str, Any]) -> Preprocessing:
        target, label_values = Target.from_json(value["target"]), value["label_values"]
        return Preprocessing(
            Task(value["task"]),
            target,
            None if value["labels"] is None else tuple(value["labels"]),
            None if label_values is None else tuple(label_values),
            tuple(Feature.from_json(feature) for feature in value["features"]),
            Calibration(**with_floats(Calibration, value["calibration"])) if value.get("calibration") else None,
            Conformal.from_json(value["conformal"]) if value.get("conformal") else None,
            floats(value.get("quantiles", ())),
            None if value.get("text") is None else TextSource(**value["text"]),
            Baseline.from_json(value["baseline"]) if value.get("baseline") else None,
        )


def standardise(x: NDArray[np.float64], scaling: Scaling) -> NDArray[np.float64]:
    """Return the scaled numbers, limited to ±LIMIT; x must be finite and is overwritten."""
    unit, center, scale = scaling
    if unit is not None:
        x *= unit
    with np.errstate(over="ignore"):
        x -= center
        x /= scale
    np.minimum(x, LIMIT, out=x)  # for one row, both together are faster than np.clip
    return np.maximum(x, -LIMIT, out=x)


def _apply_array(feature: Feature, array: ArraysInput, scaling: Scaling, fill: Any) -> NDArray[Any]:
    length = feature.length or 0
    if feature.tokens is not None:
        return _apply_tokens(feature, array, length)
    present = array.lengths >= 0
    wrong = present & (array.lengths != length)
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        raise wrong_array(feature, array.lengths[row], row)
    x = numbers_of(array.elements.reshape(-1, length), feature.segment or 1, bool(feature.series))
    x = standardise(np.where(np.isfinite(x), x, fill), scaling)
    if present.all():
        return x.astype(np.float32)
    result = np.zeros((len(array.lengths), feature.width), np.float32)
    result[present] = x
    return result


def wrong_array(feature: Feature, length: int, row: int) -> DataError:
    """Return the error of an array of a wrong length in a row, counted from 0."""
    return DataError(
        f'feature "{feature.name}" has an array of {length} elements in row {row + 1}, not {feature.length}',
        hint=f"The model was trained with arrays of {feature.length} elements.",
    )


def _apply_tokens(feature: Feature, array: ArraysInput, length: int) -> NDArray[np.int64]:
    tokens = np.array(feature.tokens, np.float64)
    codes = np.full(len(array.elements), UNKNOWN_TOKEN, np.int64)
    if len(tokens):
        places = np.searchsorted(tokens, array.elements)
        places[places == len(tokens)] = 0
        codes[tokens[places] == array.elements] = 0
        codes = np.where(codes == 0, places + FIRST_TOKEN, codes)
    lengths = np.maximum(array.lengths, 0).astype(np.int64)
    rows = np.repeat(np.arange(len(lengths)), lengths)
    position = np.arange(len(codes)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    result = np.full((len(lengths), length), PADDING, np.int64)
    inside = position < length
    result[rows[inside], position[inside]] = codes[inside]
    result[lengths == 0, 0] = UNKNOWN_TOKEN  # attention needs at least one token that is not padding
    return result
