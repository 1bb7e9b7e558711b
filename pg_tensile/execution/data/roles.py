"""Roles of a training query's columns: the target, the split column, the weight and the validation flag.

Columns without a role are features. A split column of times is a feature as well, because later rows have a time, too;
the group of a row, its weight and its flag are not properties from which the target could be predicted. Needs numpy
only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pg_tensile.errors import DataError
from pg_tensile.execution.data.columns import INTEGER_TYPES, Chunk, Column, take

FLAG = "tensile_validation"  # column that says whether a row comes from the validation query
WEIGHT_TYPES = INTEGER_TYPES | {"float4", "float8"}


class Roles(NamedTuple):
    """Indices of columns by role; None if no column has it."""

    target: int
    features: tuple[int, ...]
    split: int | None = None
    weight: int | None = None
    flag: int | None = None

    @staticmethod
    def of(
        columns: Sequence[Column], split_by: str | None = None, weight: str | None = None, flagged: bool = False
    ) -> Roles:
        """Return the roles of columns, one of which is the target.

        `split_by` and `weight` are names; `flagged`: there is a column FLAG. Raises DataError if a column is missing,
        has two roles or a type that its role excludes, or if no feature is left."""
        target = next(index for index, column in enumerate(columns) if column.target)
        split = None if split_by is None else _index(columns, split_by, "split")
        heavy = None if weight is None else _index(columns, weight, "weight")
        flag = _index(columns, FLAG, "validation") if flagged else None
        if split is not None and columns[split].is_array:
            hint = "Split by a time, a number, a boolean or a text."
            raise DataError(f'the split column "{split_by}" is an array of type {columns[split].type}', hint=hint)
        if heavy is not None and columns[heavy].type not in WEIGHT_TYPES:
            hint = "Use a column of numbers that are 0 or larger."
            raise DataError(f'the weight column "{weight}" has the type {columns[heavy].type}', hint=hint)
        if split is not None and split == heavy:
            hint = "Use two columns."
            raise DataError(f'the column "{weight}" cannot be both the weight and the split column', hint=hint)
        grouped = split if split is not None and columns[split].type != "timestamp" else None
        others = {target, heavy, flag, grouped}
        features = tuple(index for index in range(len(columns)) if index not in others)
        if not features:
            hint = "Select at least one feature column."
            raise DataError("the query has no feature besides the target and the columns with a role", hint=hint)
        return Roles(target, features, split, heavy, flag)

    def has_target(self, block: Chunk) -> NDArray[np.bool_]:
        """Return whether each row [rows] has a target: not null and, if it is a float, finite."""
        values = block.columns[self.target]
        if values.data.dtype.kind == "f":
            return ~values.nulls & np.isfinite(values.data)
        return ~values.nulls

    def without_target(self, block: Chunk) -> NDArray[np.int64]:
        """Return the numbers of rows whose target is null, and of those whose target is not finite, [2]."""
        nulls = int(block.columns[self.target].nulls.sum())
        return np.array([nulls, int((~self.has_target(block)).sum()) - nulls])

    def with_target(self, block: Chunk) -> Chunk:
        """Return the block without the rows that have no target."""
        has_target = self.has_target(block)
        return block if has_target.all() else take(block, np.flatnonzero(has_target))


def without_value(nulls: int, not_finite: int) -> str:
    """Return what is wrong with rows that have no usable value, of these numbers, one of which is positive."""
    if not not_finite:
        return "null"
    return f"null in {nulls} rows, NaN or infinite in {not_finite}" if nulls else "NaN or infinite"


def _index(columns: Sequence[Column], name: str, role: str) -> int:
    for index, column in enumerate(columns):
        if column.name == name:
            if column.target:
                hint = "Select it twice under different names, or use another column."
                raise DataError(f'the {role} column "{name}" is the target', hint=hint)
            return index
    raise DataError(f'the query has no {role} column "{name}"', hint="Add the column to the query.")
