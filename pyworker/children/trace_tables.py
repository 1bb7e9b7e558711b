"""A trace as rows of the catalogue's tables operators and tensors, for people."""

from __future__ import annotations

from typing import Any

from pg_tensile.planning.trace.trace import Trace


def trace_tables(trace: Trace) -> dict[str, Any]:
    """Return the rows of both tables as JSON objects, in lists by the table's name."""
    start = trace.access_start.tolist()
    operators = [
        {
            "operator": number,
            "target": operator.target,
            "phase": operator.phase.name.lower(),
            "module": operator.module,
            "source": operator.source,
            "signature": operator.signature,
            "flops": operator.flops,
            "bytes": operator.bytes,
            "random": operator.random,
            "tensors": trace.access_tensor[start[number] : start[number + 1]].tolist(),
        }
        for number, operator in enumerate(trace.operators)
    ]
    tensors = [
        {
            "tensor": number,
            "name": tensor.name,
            "kind": tensor.kind.name.lower(),
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "bytes": tensor.bytes,
            "first_operator": int(trace.tensor_first[number]),
            "last_operator": int(trace.tensor_last[number]),
        }
        for number, tensor in enumerate(trace.tensors)
    ]
    return {"operators": operators, "tensors": tensors}
