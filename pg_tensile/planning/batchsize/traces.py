"""Traces of a model for all batch sizes, derived from those of a few (AccUDNN, section 3.2).

This is the paper's static information: the operators and their accesses do not depend on the batch size, and the bytes
of a tensor and the operations of an operator are affine in it (a + b·k: weights have b = 0, feature maps a = 0). The
law is not assumed but checked: it is fitted at two sizes and must reproduce all numbers of the others, shapes and
signatures included. If it does not, because the step depends on its batch size in another way, every size is traced.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pg_tensile.errors import CaptureError
from pg_tensile.planning.plan.following import has_structure
from pg_tensile.planning.trace.trace import Int64s, Strings, Trace

SIZES = (3, 8, 23)  # traced by default; with 1 or 2 rows some steps take another path
REMEMBERED = 64  # most traces kept
NUMBERS = ("flops", "operator_bytes", "tensor_bytes", "shape_sizes")  # columns that may change with the batch
SAME = ("target", "module", "source", "tensor_name", "tensor_dtype")  # string columns that may not
INTEGER = re.compile(r"(?<![\w.+-])(-?\d+)(?![\w.])")  # excludes those in names ("f32") and fractions


@dataclass(frozen=True, eq=False)
class Affine:
    """Affine law start + size · slope for c numbers of one column."""

    start: Int64s
    slope: Int64s

    def at(self, size: int) -> Int64s:
        return self.start + size * self.slope

    @staticmethod
    def through(sizes: Sequence[int], values: Sequence[Int64s], what: str) -> Affine:
        """Fit the law to the values at all sizes. Raises CaptureError if a number is not affine or decreases."""
        low, high = values[0], values[-1]
        slope = (high - low) // (sizes[-1] - sizes[0])
        law = Affine(low - sizes[0] * slope, slope)
        if np.any(slope < 0) or any(np.any(law.at(size) != row) for size, row in zip(sizes, values, strict=True)):
            raise CaptureError(f"{what} of the step do not grow evenly with the batch")
        return law


@dataclass(frozen=True, eq=False)
class BatchLaw:
    """Law of the traces of one model for all batch sizes from `sizes[0]`, the smallest that was traced, upwards."""

    sizes: tuple[int, ...]
    trace: Trace  # of the smallest size
    columns: Mapping[str, Affine]
    signature_codes: np.ndarray  # [n]: index of the operator's template
    signature_texts: tuple[tuple[str, ...], ...]  # text around the numbers of each template
    signature_numbers: tuple[Affine, ...]

    @classmethod
    def fit(cls, traces: Mapping[int, Trace]) -> BatchLaw:
        """Fit the law to traces of at least three sizes.

        Raises CaptureError if the traces follow no such law, and ValueError if there are fewer than three.
        """
        sizes = tuple(sorted(traces))
        if len(sizes) < 3:
            raise ValueError("a law needs two sizes and a third to be held against")
        of_sizes = [traces[size] for size in sizes]
        first = of_sizes[0]
        for trace in of_sizes[1:]:
            if not has_structure(first, trace) or not _same_strings(first, trace):
                raise CaptureError("the step takes another way with another batch size")
        columns = {
            name: Affine.through(sizes, [getattr(trace, name) for trace in of_sizes], name.replace("_", " "))
            for name in NUMBERS
        }
        codes, texts, numbers = _signatures(sizes, [trace.signature for trace in of_sizes])
        return cls(sizes, first, columns, codes, texts, numbers)

    def trace_at(self, size: int) -> Trace:
        """Return the trace of a batch of `size` rows, without latencies and workspaces.

        Raises ValueError if `size` is below `sizes[0]`.
        """
        if size < self.sizes[0]:
            raise ValueError(f"the law holds from {self.sizes[0]} rows on")
        templates = zip(self.signature_texts, self.signature_numbers, strict=True)
        texts = [_filled(parts, law.at(size).tolist()) for parts, law in templates]
        columns: dict[str, Any] = {name: law.at(size) for name, law in self.columns.items()}
        none = np.zeros(self.trace.operator_count)
        return replace(
            self.trace,
            **columns,
            signature=Strings.build(texts[code] for code in self.signature_codes.tolist()),
            latency_us=none,
            workspace_bytes=none.astype(np.int64),
        )


class BatchTraces:
    """Traces of a model for every batch size, where `capture(size)` traces one.

    `law` is None if each size has to be traced, and `lawless` then gives the reason. Raises what `capture` raises.
    """

    def __init__(self, capture: Callable[[int], Trace], sizes: Sequence[int] = SIZES) -> None:
        self._capture = capture
        self._known = {size: capture(size) for size in sorted(set(sizes))}
        self._workspaces: dict[int, Int64s] = {}
        self.law: BatchLaw | None = None
        self.lawless = ""
        try:
            self.law = BatchLaw.fit(self._known)
        except CaptureError as error:
            self.lawless = error.message

    @property
    def traced(self) -> tuple[int, ...]:
        """Sizes that were actually traced, ascending."""
        return tuple(sorted(self._known))

    def trace_at(self, size: int) -> Trace:
        """Return the trace of a batch of `size` rows with its expected workspaces, if any are known, and no latencies.

        Below the smallest size of the law, and where there is no law, the step is captured, which raises what `capture`
        raises.
        """
        if size in self._known:
            trace = self._known[size]
        elif self.law is not None and size >= self.law.sizes[0]:
            trace = self.law.trace_at(size)
        else:
            while len(self._known) >= REMEMBERED:
                self._known.pop(next(iter(self._known)))
            trace = self._known[size] = self._capture(size)
        none = np.zeros(trace.operator_count)
        return trace.with_latencies(none, self._workspaces_at(size, trace))

    def add_workspaces(self, size: int, workspace_bytes: Int64s) -> None:
        """Record the measured workspaces of a batch of `size` rows, int64[n] bytes."""
        self._workspaces[size] = np.array(workspace_bytes, np.int64)

    def _workspaces_at(self, size: int, trace: Trace) -> Int64s:
        """Estimate the workspaces at a size from the measured ones.

        Linear between two measured sizes, in proportion to the batch above the largest, constant below the smallest.
        Measurements with a different number of operators are ignored; without any, the trace's own workspaces are
        returned.
        """
        usable = {rows: nbytes for rows, nbytes in self._workspaces.items() if len(nbytes) == trace.operator_count}
        if not usable or size in usable:
            return usable.get(size, trace.workspace_bytes)
        below = max((rows for rows in usable if rows < size), default=0)
        above = min((rows for rows in usable if rows > size), default=0)
        if not above:
            return -(-usable[below] * size // below)
        if not below:
            return usable[above]
        low, high = usable[below], usable[above]
        return low + -(-(high - low) * (size - below) // (above - below))


def _same_strings(trace: Trace, other: Trace) -> bool:
    for name in SAME:
        strings, others = getattr(trace, name), getattr(other, name)
        if strings.values != others.values or not np.array_equal(strings.codes, others.codes):
            return False
    return np.array_equal(trace.shape_start, other.shape_start) and trace.device == other.device


def _signatures(
    sizes: Sequence[int], columns: Sequence[Strings]
) -> tuple[np.ndarray, tuple[tuple[str, ...], ...], tuple[Affine, ...]]:
    """Fit the numbers in the operators' signatures: the text around them must agree, the numbers must be affine.

    Two signatures that are equal at one size may differ at another (64 rows, 64 channels), so there is one template for
    each combination.
    """
    combinations, codes = np.unique(np.stack([column.codes for column in columns], axis=1), axis=0, return_inverse=True)
    texts, numbers = [], []
    for combination in combinations.tolist():
        parts = [INTEGER.split(column.values[code]) for column, code in zip(columns, combination, strict=True)]
        if any(part[::2] != parts[0][::2] for part in parts):
            raise CaptureError("the operators' arguments are different with another batch size")
        texts.append(tuple(parts[0][::2]))
        values = [np.array(part[1::2], np.int64) for part in parts]
        numbers.append(Affine.through(sizes, values, "the operators' arguments"))
    return codes.reshape(-1), tuple(texts), tuple(numbers)


def _filled(parts: Sequence[str], numbers: Sequence[int]) -> str:
    return "".join(text + str(number) for text, number in zip(parts, numbers, strict=False)) + parts[-1]
