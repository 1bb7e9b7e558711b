"""Capture of a training step: forward, loss, backward, clipping and optimizer as one static graph.

An evaluation (forward and loss) and a prediction (forward) are captured in the same way.

`capture` runs the step on fake tensors, so nothing is computed and no memory is allocated, and records every call of a
PyTorch operator below autograd. It does so twice and raises CaptureError if the two recordings differ. The calls become
the operators of a `Trace`, their storages its tensors.

Limits: a model that checks for fake tensors may take another path (transformers' Llama then builds an explicit mask,
with the same numbers up to rounding). What `forward` prints, and attributes that it sets, appear in the capture only.
Packed sequences, CTC loss, and sparse or nested tensors are refused.
"""

from pg_tensile.execution.capture.capture import capture, capture_evaluation, capture_inference
from pg_tensile.execution.capture.captured import (
    Call,
    Captured,
    CapturedOperator,
    Persistent,
    Slot,
    Value,
    copy_into,
    empty_like_value,
    fill,
    flat_results,
    value_of,
)
from pg_tensile.execution.capture.spec import OptimizerSpec, RankSpec, StepSpec

__all__ = [
    "Call",
    "Captured",
    "CapturedOperator",
    "OptimizerSpec",
    "Persistent",
    "RankSpec",
    "Slot",
    "StepSpec",
    "Value",
    "capture",
    "capture_evaluation",
    "capture_inference",
    "copy_into",
    "empty_like_value",
    "fill",
    "flat_results",
    "value_of",
]
