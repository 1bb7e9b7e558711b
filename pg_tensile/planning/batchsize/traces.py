"""What changes with the batch: the traces of a model for all batch sizes, from those of a few (AccUDNN, section 3.2).

The paper's static information: which operators there are and what they access does not depend on the batch size, the
bytes of a tensor and the operations of an operator are affine in it (a + b·k: weights have no b, feature maps no a).
That is not taken on trust: the law is fitted at two sizes and has to give all numbers of the others, shapes and
signatures included. Where it does not, a step that looks at its batch size, every size is traced itself.
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

SIZES = (3, 8, 23)  # traced by default; with 1 row, or 2, some steps take another way
REMEMBERED = 64  # traces of other sizes
NUMBERS = ("flops", "operator_bytes", "tensor_bytes", "shape_sizes")  # columns that may change with the batch
SAME = ("target", "module", "source", "tensor_name", "tensor_dtype")  # strings that may not
INTEGER = re.compile(r"(?<![\w.+-])(-?\d+)(?![\w.])")  # not those in names ("f32") and fractions


@dataclass(frozen=True, eq=False)
class Affine:
    """start + size · slope, for numbers [c] of one column."""

    start: Int64s
    slope: Int64s

    def at(self, size: int) -> Int64s:
        return self.start + size * self.slope

    @staticmethod
    def through(sizes: Sequence[int], values: Sequence[Int64s], what: str) -> Affine:
        """Raises CaptureError where one number is not affine in the size, or falls."""
        low, high = values[0], values[-1]
        slope = (high - low) // (sizes[-1] - sizes[0])
        law = Affine(low - sizes[0] * slope, slope)
        if np.any(slope < 0) or any(np.any(law.at(size) != each) for size, each in zip(sizes, values, strict=True)):
            raise CaptureError(f"{what} of the step do not grow evenly with the batch")
        return law


@dataclass(frozen=True, eq=False)
class BatchLaw:
    """The traces of one model for all batch sizes from `sizes[0]`, the smallest that was traced, on."""

    sizes: tuple[int, ...]
    trace: Trace  # of the smallest
    columns: Mapping[str, Affine]
    signature_codes: np.ndarray  # [n]: which of the templates
    signature_texts: tuple[tuple[str, ...], ...]  # what stands around the numbers of each template
    signature_numbers: tuple[Affine, ...]

    @classmethod
    def fit(cls, traces: Mapping[int, Trace]) -> BatchLaw:
        """The law of the traces of three sizes or more. Raises CaptureError if there is none, ValueError for fewer."""
        sizes = tuple(sorted(traces))
        if len(sizes) < 3:
            raise ValueError("a law needs two sizes and a third to be held against")
        of_sizes = [traces[size] for size in sizes]
        first = of_sizes[0]
        for other in of_sizes[1:]:
            if not has_structure(first, other) or not _same_strings(first, other):
                raise CaptureError("the step takes another way with another batch size")
        columns = {
            name: Affine.through(sizes, [getattr(trace, name) for trace in of_sizes], name.replace("_", " "))
            for name in NUMBERS
        }
        codes, texts, numbers = _signatures(sizes, [trace.signature for trace in of_sizes])
        return cls(sizes, first, columns, codes, texts, numbers)

    def trace_at(self, size: int) -> Trace:
        """The trace of a batch of `size` rows, without latencies and workspaces. Raises ValueError below `sizes[0]`."""
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
    """The traces of a model for every batch size; `capture(size)` traces one. `law` is None, and `lawless` says why,
    where each size is traced itself. Raises what `capture` raises."""

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
        """The sizes that were really traced."""
        return tuple(sorted(self._known))

    def trace_at(self, size: int) -> Trace:
        """The trace of a batch of `size` rows, with the workspaces that it will have as far as any are known, without
        latencies. Below the smallest size of the law, and where there is none, the step is captured: raises what that
        raises."""
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
        """What a batch of `size` rows was measured to take, int64[n] bytes."""
        self._workspaces[size] = np.array(workspace_bytes, np.int64)

    def _workspaces_at(self, size: int, trace: Trace) -> Int64s:
        """Between two measured sizes on the line through both; above the largest in proportion to the batch; below the
        smallest as much as there. Nothing is known of traces with other operators than those measured."""
        known = {at: each for at, each in sorted(self._workspaces.items()) if len(each) == trace.operator_count}
        if not known or size in known:
            return known.get(size, trace.workspace_bytes)
        below, above = (
            max((at for at in known if at < size), default=0),
            min((at for at in known if at > size), default=0),
        )
        if not above:
            return -(-known[below] * size // below)
        if not below:
            return known[above]
        low, high = known[below], known[above]
        return low + -(-(high - low) * (size - below) // (above - below))


def _same_strings(trace: Trace, other: Trace) -> bool:
    for name in SAME:
        one, two = getattr(trace, name), getattr(other, name)
        if one.values != two.values or not np.array_equal(one.codes, two.codes):
            return False
    return np.array_equal(trace.shape_start, other.shape_start) and trace.device == other.device


def _signatures(
    sizes: Sequence[int], columns: Sequence[Strings]
) -> tuple[np.ndarray, tuple[tuple[str, ...], ...], tuple[Affine, ...]]:
    """Signatures differ in numbers only, and those are affine. Two that are equal for one size need not be for another
    (64 rows, 64 channels), so that there is a template for each combination."""
    combinations, codes = np.unique(np.stack([column.codes for column in columns], axis=1), axis=0, return_inverse=True)
    texts, numbers = [], []
    for combination in combinations.tolist():
        parts = [INTEGER.split(column.values[code]) for column, code in zip(columns, combination, strict=True)]
        if any(each[::2] != parts[0][::2] for each in parts):
            raise CaptureError("the operators' arguments are others with another batch size")
        texts.append(tuple(parts[0][::2]))
        values = [np.array(each[1::2], np.int64) for each in parts]
        numbers.append(Affine.through(sizes, values, "the operators' arguments"))
    return codes.reshape(-1), tuple(texts), tuple(numbers)


def _filled(parts: Sequence[str], numbers: Sequence[int]) -> str:
    return "".join(text + str(number) for text, number in zip(parts, numbers, strict=False)) + parts[-1]
