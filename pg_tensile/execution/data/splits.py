"""Division of a training query's rows into a training and a validation part.

random  by a hash of the row's content, its number among equal rows and the seed; of a classification, each class has
        its share
time    by a column of times: the newest rows validate
group   by a column of another scalar type: whole groups, in the order of a hash of the group's value and the seed
query   by the flag of rows that come from a query of their own

In all of them but the last, every row has a 64-bit key, and a threshold divides the keys. The threshold is an order
statistic of the keys, found digit by digit in a few passes over the rows. So the division depends on the rows' content
alone and never on their order, and takes the same memory for any number of rows and groups. It is exact, but for the
random one of many rows, which is within a thousandth.

Needs numpy only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from pg_tensile.errors import DataError
from pg_tensile.execution.data.columns import Chunk, Column
from pg_tensile.execution.data.fitters import MAX_LABELS, class_values
from pg_tensile.execution.data.hashing import mix, number_hashes, salt, string_hashes
from pg_tensile.execution.data.roles import Roles, without_value

DIVISION = 2  # number of these rules; a checkpoint that was made under others is not continued
DIGIT_BITS = 16
MOST_COUNTS = 1 << 22  # of a random division: digits of all classes, of which each pass counts the rows
CLOSE = 1e-3  # part of a class's rows for validation by which a random division may miss their number
ATTEMPTS = 8  # orders of the groups that are tried, if the first one misses the share by far
SIGN = np.uint64(1 << 63)
EPOCH = np.datetime64("2000-01-01", "us")

Keys = Callable[[], Iterable[NDArray[np.uint64]]]


class Rows(Protocol):
    """Interface of the rows that are fitted and divided; `dataset.RowStore` implements it."""

    columns: tuple[Column, ...]
    rows: int
    dictionaries: list[list[str] | None]

    poll: Callable[[], None]  # called between steps of what takes long; may raise

    def blocks(self) -> Iterable[Chunk]: ...


class Split(NamedTuple):
    """Requested division of the rows; about `fraction` of them (0 ≤ fraction < 1) are for validation.

    `by` is the name of a split column, `flagged` says that the rows carry a flag; with neither it is random."""

    seed: int
    fraction: float
    by: str | None = None
    flagged: bool = False

    @staticmethod
    def of(spec: dict[str, Any]) -> Split:
        """Return the split of a job's spec."""
        return Split(spec["seed"], spec["validation"], spec.get("split_by"), bool(spec.get("validation_query")))


class Division(Protocol):
    """Division that has been made: `by` is random, time, group or query."""

    @property
    def by(self) -> str: ...

    @property
    def column(self) -> str | None: ...

    @property
    def threshold(self) -> str | None:
        """Time of the oldest rows that validate, as ISO text, if there are such rows."""

    def validation_rows(self, block: Chunk) -> NDArray[np.bool_]:
        """Return whether each row [rows] belongs to validation; only rows with a target are to be asked for."""


def described(division: Division, training_rows: int, validation_rows: int) -> dict[str, Any]:
    """Return the division as the JSON object that is stored with a version."""
    return {
        "by": division.by,
        "column": division.column,
        "threshold": division.threshold,
        "training_rows": training_rows,
        "validation_rows": validation_rows,
    }


def divide(rows: Rows, split: Split, roles: Roles, classify: bool = False) -> Division:
    """Return the division of all rows with a target; `classify`: its values are classes.

    Raises DataError if the split column has nulls, or if there is only one time or group."""
    if roles.flag is not None:
        return FlagDivision(roles.flag)
    if roles.split is None:
        return _at_random(rows, split, roles, classify)
    column = rows.columns[roles.split]
    by_time = column.type == "timestamp"
    if split.fraction <= 0.0:
        return KeyDivision("time" if by_time else "group", column.name, _no_keys, np.uint64(2**64 - 1))
    known_rows = _count_known(rows, roles, column.name)
    if known_rows == 1:
        hint = "Select more rows, or set validation to 0."
        raise DataError("there is only one row with a target, so no row is left to validate", hint=hint)
    wanted = min(max(round(split.fraction * known_rows), 1), known_rows - 1)
    if by_time:
        return _by_time(rows, roles, known_rows, wanted)
    return _by_group(rows, roles, split.seed, known_rows, wanted)


# ---- divisions -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RandomDivision:
    """Division by keys: rows validate whose key is below that of their class; `classes` returns a row's class."""

    seed: int
    classes: Callable[[Chunk], NDArray[np.intp]]
    least: NDArray[np.uint64]  # keys of training, by class
    by: str = "random"
    column: str | None = None
    threshold: str | None = None

    def validation_rows(self, block: Chunk) -> NDArray[np.bool_]:
        validation: NDArray[np.bool_] = _random_keys(block, self.seed) < self.least[self.classes(block)]
        return validation


@dataclass(frozen=True)
class FlagDivision:
    """Division by the boolean column with that index."""

    index: int
    by: str = "query"
    column: str | None = None
    threshold: str | None = None

    def validation_rows(self, block: Chunk) -> NDArray[np.bool_]:
        values = block.columns[self.index]
        return (values.data != 0) & ~values.nulls


@dataclass(frozen=True)
class KeyDivision:
    """Division by keys: rows validate whose key is at least `least`."""

    by: str
    column: str
    keys: Callable[[Chunk], NDArray[np.uint64]]
    least: np.uint64
    threshold: str | None = None

    def validation_rows(self, block: Chunk) -> NDArray[np.bool_]:
        validation: NDArray[np.bool_] = self.keys(block) >= self.least
        return validation


def _no_keys(block: Chunk) -> NDArray[np.uint64]:
    return np.zeros(block.rows, np.uint64)


def _count_known(rows: Rows, roles: Roles, name: str) -> int:
    """Return the number of rows with a target. Raises DataError if there is none, or if the split column has nulls."""
    assert roles.split is not None
    known_rows = nulls = 0
    for block in rows.blocks():
        has_target = roles.has_target(block)
        known_rows += int(has_target.sum())
        nulls += int((block.columns[roles.split].nulls & has_target).sum())
    if nulls:
        test, what = f'"{name}" IS NOT NULL', "null"
        if rows.columns[roles.split].type == "timestamp":  # the server sends infinite times as nulls
            test, what = f'isfinite("{name}")', "null or infinite"
        hint = f"Add WHERE {test} to the query, or replace such values."
        raise DataError(f'the split column "{name}" is {what} in {nulls} of {known_rows} rows', hint=hint)
    if known_rows == 0:
        raise no_target(rows, roles)
    return known_rows


def no_target(rows: Rows, roles: Roles) -> DataError:
    """Return the error for rows none of which has a target."""
    name = rows.columns[roles.target].name
    nulls, not_finite = np.sum([roles.without_target(block) for block in rows.blocks()], axis=0).tolist()
    where = "," if nulls and not_finite else " in"
    message = f'the target "{name}" is {without_value(nulls, not_finite)}{where} all {rows.rows} rows'
    return DataError(message, hint="Choose another target.")


def _keys_of(rows: Rows, roles: Roles, key: Callable[[Chunk], NDArray[np.uint64]]) -> Keys:
    """Return a function that yields the keys of all rows with a target, block by block."""

    def keys() -> Iterable[NDArray[np.uint64]]:
        for block in rows.blocks():
            yield key(block)[roles.has_target(block)]

    return keys


def _one_side(name: str, what: str, known_rows: int, hint: str) -> DataError:
    message = f'all {known_rows} rows have the same {what} "{name}", so they cannot be divided by it'
    return DataError(message, hint=hint)


# ---- random ----------------------------------------------------------------------------------------------------------


def _random_keys(block: Chunk, seed: int) -> NDArray[np.uint64]:
    return mix(block.hashes ^ salt(seed))


def _at_random(rows: Rows, split: Split, roles: Roles, classify: bool) -> RandomDivision:
    """Return the division with about the share of each class on the validation side.

    Of two rows or more of a class, both sides have at least one. A regression is a single class."""
    if split.fraction <= 0.0:
        return RandomDivision(split.seed, _one_class, np.zeros(1, np.uint64))
    count, classes = _classes(rows, roles) if classify else (1, _one_class)

    def keys() -> Iterable[tuple[NDArray[np.intp], NDArray[np.uint64]]]:
        for block in rows.blocks():
            known = roles.with_target(block)
            yield classes(known), _random_keys(known, split.seed)

    return RandomDivision(split.seed, classes, _least_of_training(keys, count, split.fraction))


def _one_class(block: Chunk) -> NDArray[np.intp]:
    return np.zeros(block.rows, np.intp)


def _classes(rows: Rows, roles: Roles) -> tuple[int, Callable[[Chunk], NDArray[np.intp]]]:
    """Return the number of classes, and a function that returns the class of each row [rows].

    Without a target, a row has any class. More than MAX_LABELS, which are refused later, are one."""
    target, strings = roles.target, rows.dictionaries[roles.target]
    column = rows.columns[target]
    if strings is not None:
        if len(strings) > MAX_LABELS:
            return 1, _one_class
        return max(len(strings), 1), lambda block: np.maximum(block.columns[target].data, 0).astype(np.intp)
    values: NDArray[Any] = np.empty(0, class_values(column, next(iter(rows.blocks())).columns[target]).dtype)
    for block in rows.blocks():
        values = np.union1d(values, class_values(column, roles.with_target(block).columns[target]))
        if len(values) > MAX_LABELS:
            return 1, _one_class
    if not len(values):
        return 1, _one_class

    def classes(block: Chunk) -> NDArray[np.intp]:
        return np.minimum(np.searchsorted(values, class_values(column, block.columns[target])), len(values) - 1)

    return len(values), classes


def _least_of_training(
    keys: Callable[[], Iterable[tuple[NDArray[np.intp], NDArray[np.uint64]]]], count: int, fraction: float
) -> NDArray[np.uint64]:
    """Return the key of each class below which rows validate. `keys` yields the classes and keys of all rows."""
    least = np.zeros(count, np.uint64)
    prefix, below = np.zeros(count, np.uint64), np.zeros(count, np.int64)
    wanted: NDArray[np.int64] | None = None
    bits = min(DIGIT_BITS, max(1, MOST_COUNTS.bit_length() - 1 - (count - 1).bit_length()))
    missing, shift = np.ones(count, np.bool_), 64
    while shift and missing.any():
        bits = min(bits, shift)
        high, shift = shift, shift - bits
        counts = np.zeros(count << bits, np.int64)
        for classes, part in keys():
            if high < 64:
                within = missing[classes] & (part >> np.uint64(high) == prefix[classes])
                classes, part = classes[within], part[within]
            digits = (part >> np.uint64(shift)) & np.uint64((1 << bits) - 1)
            counts += np.bincount((classes << bits) + digits.astype(np.intp), minlength=len(counts))
        ends = below[:, None] + np.cumsum(counts.reshape(count, -1), 1)
        if wanted is None:
            rows = ends[:, -1]
            wanted = np.clip(np.rint(fraction * rows), 1, np.maximum(rows - 1, 1)).astype(np.int64) * (rows > 1)
        digit = np.minimum((ends <= wanted[:, None]).sum(1), (1 << bits) - 1)
        equal = counts.reshape(count, -1)[np.arange(count), digit]
        below = np.where(missing, ends[np.arange(count), digit] - equal, below)
        prefix = prefix << np.uint64(bits) | digit.astype(np.uint64)
        least = np.where(missing, prefix << np.uint64(shift), least)
        missing &= (equal > 1) & (equal > CLOSE * wanted)
    return least


# ---- time ------------------------------------------------------------------------------------------------------------


def _by_time(rows: Rows, roles: Roles, known_rows: int, wanted: int) -> KeyDivision:
    """Return the division with the newest `wanted` rows on the validation side.

    Rows of one time stay together: those at the boundary train, unless no row would be left to validate."""
    assert roles.split is not None
    index, name = roles.split, rows.columns[roles.split].name

    def key(block: Chunk) -> NDArray[np.uint64]:
        return block.columns[index].data.astype(np.int64).view(np.uint64) ^ SIGN

    keys = _keys_of(rows, roles, key)
    boundary = known_rows - wanted
    least, older, equal = _select(keys, boundary)
    if older < boundary and older + equal < known_rows:
        least, older = _next(keys, least), older + equal
    if older == 0:
        raise _one_side(name, "time", known_rows, "Select rows of more than one time, or leave split_by out.")
    time = EPOCH + np.array(least ^ int(SIGN), np.uint64).astype(np.int64).astype("timedelta64[us]")
    return KeyDivision("time", name, key, np.uint64(least), _iso(time))


def _iso(time: Any) -> str:
    text = str(np.datetime_as_string(time, unit="us"))
    return text.rstrip("0").rstrip(".") if "." in text else text


# ---- groups ----------------------------------------------------------------------------------------------------------


def _by_group(rows: Rows, roles: Roles, seed: int, known_rows: int, wanted: int) -> KeyDivision:
    """Return the division with whole groups of about `wanted` rows on the validation side.

    If a large group misses the share by far, other orders of the groups are tried, and the best one is used."""
    assert roles.split is not None
    column, strings = rows.columns[roles.split], rows.dictionaries[roles.split]
    hashes = string_hashes(strings or ())
    best: tuple[int, KeyDivision] | None = None
    for attempt in range(ATTEMPTS):
        key = _group_key(roles.split, hashes, salt(seed + (attempt << 32)))
        keys = _keys_of(rows, roles, key)
        boundary = known_rows - wanted
        least, smaller, equal = _select(keys, boundary)
        larger = smaller + equal
        if equal == known_rows:
            raise _one_side(column.name, "group", known_rows, "Select rows of more than one group.")
        # the group at the boundary goes to the side that leaves the shares closer to what is wanted
        if smaller == 0 or (larger < known_rows and larger - boundary <= boundary - smaller):
            least, smaller = _next(keys, least), larger
        error = abs(known_rows - smaller - wanted)
        if best is None or error < best[0]:
            best = error, KeyDivision("group", column.name, key, np.uint64(least))
        if 2 * error <= wanted:
            break
    assert best is not None
    return best[1]


def _group_key(
    index: int, hashes: NDArray[np.uint64], seed: NDArray[np.uint64]
) -> Callable[[Chunk], NDArray[np.uint64]]:
    """Return the function of the keys of groups; `hashes` are those of a text column's strings."""

    def key(block: Chunk) -> NDArray[np.uint64]:
        values = block.columns[index]
        if len(hashes):
            of_values = np.where(values.nulls, np.uint64(0), hashes[np.where(values.nulls, 0, values.data)])
        else:
            of_values = number_hashes(values.data)
        return mix(of_values ^ seed)

    return key


# ---- order statistics ------------------------------------------------------------------------------------------------


def _select(keys: Keys, rank: int) -> tuple[int, int, int]:
    """Return the key of that rank (from 0, ascending), the number of smaller keys and that of equal keys."""
    prefix = below = equal = 0
    for shift in range(64 - DIGIT_BITS, -1, -DIGIT_BITS):
        counts = np.zeros(1 << DIGIT_BITS, np.int64)
        for part in keys():
            if shift < 64 - DIGIT_BITS:
                part = part[(part >> np.uint64(shift + DIGIT_BITS)) == np.uint64(prefix)]
            digits = (part >> np.uint64(shift)) & np.uint64((1 << DIGIT_BITS) - 1)
            counts += np.bincount(digits.astype(np.intp), minlength=len(counts))
        ends = below + np.cumsum(counts)
        digit = int(np.searchsorted(ends, rank, side="right"))
        equal = int(counts[digit])
        below = int(ends[digit]) - equal
        prefix = prefix << DIGIT_BITS | digit
    return prefix, below, equal


def _next(keys: Keys, key: int) -> int:
    """Return the smallest key above `key`, which must exist."""
    return min(int(larger.min()) for part in keys() if len(larger := part[part > np.uint64(key)]))
