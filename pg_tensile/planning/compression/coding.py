"""Effect of compressing the swaps of each tensor of a trace, and the codecs of a plan (CSWAP, section IV).

A coding is made by advisor.py and travels with a trace (`Trace.with_coding`): link.copy_us, and through it the
simulator and the policies, take a tensor's coded bytes and times from it. In a plan, the swap-out specifies the codec
of its host copy. Each chunk of a tensor is coded by itself, so that one chunk is on the link while the next is coded.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pg_tensile.errors import TraceError
from pg_tensile.planning.compression import codec
from pg_tensile.planning.plan.plan import CODECS, EventKind, Plan

if TYPE_CHECKING:
    from pg_tensile.planning.trace.trace import Trace

# Raw bytes of a chunk: on the host device small enough for a cache, on CUDA large enough to keep a kernel busy.
CHUNK_BYTES = {"cpu": codec.CHUNK_MULTIPLE, "cuda": codec.CHUNK_BYTES}
# Device memory reserved while a plan has codecs: two chunks for each lane, one being coded and one on the link.
STAGING_BYTES = {device: 4 * size for device, size in CHUNK_BYTES.items()}


class Coding(NamedTuple):
    """Codec and times for swapping each of m tensors; a tensor whose `codec` is 0 is swapped uncompressed."""

    codec: NDArray[np.uint8]  # [m]: compression.codec.Codec
    moved_bytes: NDArray[np.int64]  # [m]: over the link when coded
    encode_us: NDArray[np.float64]  # [m]: of the whole tensor
    decode_us: NDArray[np.float64]  # [m]
    waking_us: NDArray[np.float64]  # [m]: before the first chunk, in either direction

    @classmethod
    def none(cls, trace: Trace) -> Coding:
        """Return the coding that compresses nothing."""
        zero = np.zeros(trace.tensor_count)
        return cls(zero.astype(np.uint8), trace.tensor_bytes.copy(), zero, zero.copy(), zero.copy())

    def take(self, tensor: int, other: Coding) -> None:
        """Code a tensor as another coding of the same trace does."""
        self.codec[tensor], self.moved_bytes[tensor] = other.codec[tensor], other.moved_bytes[tensor]
        self.encode_us[tensor], self.decode_us[tensor] = other.encode_us[tensor], other.decode_us[tensor]
        self.waking_us[tensor] = other.waking_us[tensor]

    @property
    def compresses(self) -> bool:
        return bool(self.codec.any())


def check_coding(coding: Coding, tensors: int) -> None:
    """Raise TraceError unless `coding` is valid for a trace of `tensors` tensors."""
    if any(column.shape != (tensors,) for column in coding):
        raise TraceError(f"a coding has one entry for each of the {tensors} tensors of its trace")
    if np.any(coding.codec >= len(CODECS)):
        raise TraceError(f"a coding has the unknown codec {int(coding.codec.max())}")
    if any(not np.all((column >= 0) & np.isfinite(column)) for column in coding[1:]):
        raise TraceError("a coding has bytes or times below zero, or none at all")


def chunk_count(trace: Trace, tensor: int) -> int:
    """Return the number of chunks of a coded tensor, at least 1."""
    return max(1, -(-int(trace.tensor_bytes[tensor]) // CHUNK_BYTES[trace.device]))


def has_codecs(plan: Plan) -> bool:
    return bool(plan.rows["codec"].any())


def staging_bytes(trace: Trace, plan: Plan) -> int:
    """Return the device memory that coded transfers of a plan take besides its tensors."""
    return STAGING_BYTES[trace.device] if has_codecs(plan) else 0


def reserved_bytes(trace: Trace) -> int:
    """Return the bytes of a budget that plans on this trace have to leave for staging."""
    return STAGING_BYTES[trace.device] if trace.coding is not None and trace.coding.compresses else 0


def host_coding_us(trace: Trace, plan: Plan) -> float:
    """Return the µs in an iteration for which coding the plan's swaps occupies the host's processors.

    It is 0 where a GPU codes. Simulated transfers hide this time behind the step. But the step needs the same caches,
    memory and cores, so a plan is worth its coding only if it gains more than this.
    """
    if trace.coding is None or trace.device != "cpu":
        return 0.0
    coded = plan.rows["tensor"][plan.rows["codec"] > 0]
    return float(trace.coding.encode_us[coded].sum() + trace.coding.decode_us[coded].sum())


def with_codecs(trace: Trace, plan: Plan) -> Plan:
    """Return the plan with the codecs of `trace.coding` at the swap-outs that copy.

    Without a coding the plan is returned unchanged. Raises InvalidPlanError if the plan is not valid on the trace.
    """
    from pg_tensile.planning.plan.execution import (
        AccessSequence,  # imports the trace, which imports this module
    )

    if trace.coding is None:
        return plan
    rows = plan.rows.copy()
    rows["codec"] = 0
    copies = AccessSequence(trace, replace(plan, rows=rows)).copies
    out = rows["kind"][copies.event] == EventKind.SWAP_OUT
    rows["codec"][copies.event[out]] = trace.coding.codec[copies.tensor[out]]
    return replace(plan, rows=rows)
