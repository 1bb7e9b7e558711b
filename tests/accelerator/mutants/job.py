"""A small training job for the scenarios, captured and planned without the device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from pg_tensile.execution.capture import Captured, OptimizerSpec, StepSpec, capture
from pg_tensile.planning.compression.codec import Codec
from pg_tensile.planning.compression.coding import Coding
from pg_tensile.planning.device.profile import A100_40GB
from pg_tensile.planning.plan.codecs import with_codecs
from pg_tensile.planning.plan.memory import footprint
from pg_tensile.planning.plan.plan import NO_EVENTS, Plan
from pg_tensile.planning.policies import POLICIES
from pg_tensile.planning.trace.trace import Trace


class Prepared(NamedTuple):
    captured: Captured
    model: nn.Module  # on the CPU, never trained
    batches: list[tuple[torch.Tensor, torch.Tensor]]  # on the CPU
    plans: dict[str, Plan]


def coded_plan(trace: Trace) -> Plan:
    """Return the plan of swap_all with every copy compressed."""
    coding = Coding.none(trace.tensor_bytes)
    coding.codec[:] = Codec.ZVC
    return with_codecs(trace.with_coding(coding), POLICIES["swap_all"]({0: trace}, A100_40GB, None)[0])


def prepare() -> Prepared:
    """Capture a network with dropout, and plan it under several policies; "moving" swaps weights between their uses."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 64), nn.ReLU(inplace=True), nn.Linear(64, 4)
    )  # fmt: skip
    batches = [(torch.randn(8, 16), torch.randint(0, 4, (8,))) for _ in range(8)]
    spec = StepSpec(nn.functional.cross_entropy, OptimizerSpec("adamw", 1e-2))
    captured = capture(model, batches[0][:1], batches[0][1:], spec, device="emulated:0")
    trace = captured.trace
    plans = {name: POLICIES[name]({0: trace}, A100_40GB, None)[0] for name in ("none", "swap_all", "recompute_all")}
    plans["moving"] = POLICIES["lru"]({0: trace}, A100_40GB, footprint(trace, NO_EVENTS).device_peak_bytes * 8 // 10)[0]
    return Prepared(captured, model, batches, plans | {"coded": coded_plan(captured.trace)})
