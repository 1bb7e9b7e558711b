"""Codecs of a plan's swaps, and what they take besides its tensors (CSWAP, section IV)."""

from __future__ import annotations

from dataclasses import replace

from pg_tensile.planning.compression.coding import STAGING_BYTES
from pg_tensile.planning.plan.access_sequence import AccessSequence
from pg_tensile.planning.plan.plan import EventKind, Plan
from pg_tensile.planning.trace.trace import Trace


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
    if trace.coding is None:
        return plan
    rows = plan.rows.copy()
    rows["codec"] = 0
    copies = AccessSequence(trace, replace(plan, rows=rows)).copies
    out = rows["kind"][copies.event] == EventKind.SWAP_OUT.value
    rows["codec"][copies.event[out]] = trace.coding.codec[copies.tensor[out]]
    return replace(plan, rows=rows)
