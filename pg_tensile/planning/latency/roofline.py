"""Analytic latency of every operator: the roofline, so that there is never a cold start without numbers.

An operator takes as long as its arithmetic or its traffic, whichever is slower, and a launch (TENSILE, section IV-A
asks for a latency of every access before anything ran). Placeholder and output cross the link.
"""

from __future__ import annotations

import numpy as np

from pg_tensile.planning.device.profile import DeviceProfile, Direction
from pg_tensile.planning.trace.trace import Trace

SMALLEST_US = 0.01  # of an operator that neither computes nor moves a byte, on a device that launches in no time


def work_us(trace: Trace, profile: DeviceProfile) -> np.ndarray:
    """float64[operators], µs: the larger of flops / rate and bytes / bandwidth; 0 for placeholder and output."""
    arithmetic = trace.flops / profile.flops_per_s
    traffic = trace.operator_bytes / profile.bytes_per_s
    work = np.maximum(arithmetic, traffic) * 1e6
    work[[0, -1]] = 0.0
    return work


def total_us(trace: Trace, profile: DeviceProfile) -> float:
    """µs of one iteration's operators alone, without launches and transfers: what `DeviceProfile.scaled_link` wants."""
    return float(work_us(trace, profile).sum())


def estimate(trace: Trace, profile: DeviceProfile) -> np.ndarray:
    """float64[operators], µs: `work_us` and the launch; placeholder and output take the time that their tensors need on
    the link. Never zero for an operator that is executed, never NaN."""
    latency = np.maximum(work_us(trace, profile) + profile.launch_us, SMALLEST_US)
    latency[0] = profile.transfer_us(_accessed_bytes(trace, 0), Direction.IN)
    latency[-1] = profile.transfer_us(_accessed_bytes(trace, trace.operator_count - 1), Direction.OUT)
    return latency


def _accessed_bytes(trace: Trace, operator: int) -> int:
    first, last = trace.access_start[operator : operator + 2]
    return int(trace.tensor_bytes[trace.access_tensor[first:last]].sum())


def timed(trace: Trace, profile: DeviceProfile) -> Trace:
    """The trace with the estimate where no latency is known yet."""
    return trace if trace.latency_us.any() else trace.with_latencies(estimate(trace, profile))
