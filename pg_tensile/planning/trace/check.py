"""Invariants of every trace: lengths and ranges of its columns, and accesses that can have happened."""

from __future__ import annotations

import numpy as np

from pg_tensile.errors import TraceError
from pg_tensile.planning.device_types import DEVICE_TYPES
from pg_tensile.planning.trace.columns import Bools, TraceColumns
from pg_tensile.planning.trace.rows import OUTPUT, PLACEHOLDER, Kind, Mode, Phase

MAX_BYTES = 1 << 60  # total of all tensors, so that no sum of bytes overflows
MAX_COUNT = 1 << 26  # of operators, tensors, accesses and dimensions, each


def check(trace: TraceColumns) -> None:
    """Raise TraceError for the first violated invariant."""
    _check_shapes(trace)
    _check_numbers(trace)
    _check_ends(trace)
    _check_accesses(trace)
    if trace.coding is not None:
        trace.coding.check(trace.tensor_count)


def _check_shapes(trace: TraceColumns) -> None:
    operators, tensors = trace.operator_count, trace.tensor_count
    for length, names in (
        (
            operators,
            "target signature module source random flops operator_bytes latency_us workspace_bytes captured_operator",
        ),
        (tensors, "tensor_kind tensor_name tensor_dtype"),
    ):
        for name in names.split():
            if getattr(trace, name).shape != (length,):
                raise TraceError(f"column {name} of the trace has the wrong length")
    for start, rows, items in (
        (trace.access_start, operators, trace.access_tensor),
        (trace.shape_start, tensors, trace.shape_sizes),
    ):
        if len(start) != rows + 1 or start[0] != 0 or start[-1] != len(items) or np.any(np.diff(start) < 0):
            raise TraceError("the operators' accesses or the tensors' shapes do not fit together")
    if len(trace.access_mode) != len(trace.access_tensor):
        raise TraceError("the accesses of the trace do not fit together")
    if max(operators, tensors, len(trace.access_tensor), len(trace.shape_sizes)) > MAX_COUNT:
        raise TraceError(f"a trace has at most {MAX_COUNT} operators, tensors and accesses")


def _check_numbers(trace: TraceColumns) -> None:
    if trace.device not in DEVICE_TYPES:
        raise TraceError(f"a trace is of one of the devices {', '.join(DEVICE_TYPES)}, not of {trace.device!r}")
    if np.any(trace.phase > max(Phase)) or np.any(trace.tensor_kind > max(Kind)):
        raise TraceError("the trace has an operator of unknown phase or a tensor of unknown kind")
    for name in ("flops", "operator_bytes", "latency_us", "workspace_bytes", "tensor_bytes", "shape_sizes"):
        values = getattr(trace, name)
        wrong = np.flatnonzero(~((values >= 0) & (values <= MAX_BYTES)))
        if wrong.size:
            row = int(wrong[0])
            label = {"tensor_bytes": trace.tensor_label, "shape_sizes": "dimension {}".format}.get(
                name, trace.operator_label
            )
            raise TraceError(f"{label(row)} cannot have {name} = {values[row]}")
    if float(np.sum(trace.tensor_bytes, dtype=np.float64)) > MAX_BYTES:
        raise TraceError("the tensors of the trace have more bytes together than can be counted")


def _check_ends(trace: TraceColumns) -> None:
    last = trace.operator_count - 1
    if last < 1 or trace.target[0] != PLACEHOLDER or trace.target[last] != OUTPUT:
        raise TraceError("a trace begins with the operator placeholder and ends with the operator output")
    if trace.tensor_count == 0:
        raise TraceError("a trace has at least one tensor: what the iteration returns")


def _check_accesses(trace: TraceColumns) -> None:
    """Check the accesses: known tensors, each at most once per operator, and CREATE exactly where it is required."""
    if np.any((trace.access_tensor < 0) | (trace.access_tensor >= trace.tensor_count)):
        raise _access_error(trace, (trace.access_tensor < 0) | (trace.access_tensor >= trace.tensor_count), "unknown")
    order = trace.access_by_tensor
    tensor, operator, mode = trace.access_tensor[order], trace.access_operator[order], trace.access_mode[order]
    first = np.diff(tensor, prepend=-1) != 0
    creates = mode == Mode.CREATE
    persistent, by_placeholder = trace.persistent[tensor], operator == 0
    for wrong, what in (
        (mode > max(Mode), "accesses {} in an unknown mode"),
        (~first & (np.diff(operator, prepend=-1) == 0), "accesses {} twice"),
        (creates & persistent, "creates {}, which is persistent"),
        (~creates & ~persistent & first, "accesses {} before it is created"),
        (creates & ~persistent & ~first, "creates {}, which exists already"),
        (by_placeholder & ~creates, "(the placeholder) accesses {} without creating it"),
        (creates & (by_placeholder != (trace.tensor_kind[tensor] == Kind.INPUT)),
         "creates {}, but the placeholder creates inputs, all inputs and nothing else"),
        ((operator == trace.operator_count - 1) & (mode != Mode.READ), "(the output) does more than read {}"),
    ):  # fmt: skip
        if wrong.any():
            unsorted = np.zeros(len(order), np.bool_)
            unsorted[order] = wrong
            raise _access_error(trace, unsorted, what)
    unused = np.flatnonzero((np.diff(trace.tensor_start) == 0) & ~trace.persistent)
    if unused.size:
        raise TraceError(f"no operator of the trace creates {trace.tensor_label(int(unused[0]))}")


def _access_error(trace: TraceColumns, wrong: Bools, what: str) -> TraceError:
    access = int(np.flatnonzero(wrong)[0])
    operator, tensor = int(trace.access_operator[access]), int(trace.access_tensor[access])
    if what == "unknown":
        return TraceError(f"{trace.operator_label(operator)} accesses tensor {tensor}, which the trace does not have")
    return TraceError(f"{trace.operator_label(operator)} {what.format(trace.tensor_label(tensor))}")
