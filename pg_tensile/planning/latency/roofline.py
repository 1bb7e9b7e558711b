"""Analytic latency of every operator: the roofline, which gives estimates before anything has been measured.

An operator takes as long as its arithmetic or its traffic, whichever is slower, plus a launch. TENSILE, section IV-A
requires a latency for every access before the first iteration. Placeholder and output cross the link, and collectives
the network.
"""

from __future__ import annotations

import numpy as np

from pg_tensile.planning.device.profile import DeviceProfile, Direction
from pg_tensile.planning.latency.collectives import with_network_us
from pg_tensile.planning.trace.trace import Trace

SMALLEST_US = 0.01  # of an operator that neither computes nor moves a byte, on a device without launch overhead


def work_us(trace: Trace, profile: DeviceProfile) -> np.ndarray:
    """Return float64[operators], µs: the larger of flops / rate and bytes / bandwidth; 0 for placeholder and output."""
    arithmetic = trace.flops / profile.flops_per_s
    traffic = trace.operator_bytes / profile.bytes_per_s
    work = np.maximum(arithmetic, traffic) * 1e6
    work[[0, -1]] = 0.0
    return work


def total_us(trace: Trace, profile: DeviceProfile) -> float:
    """Return the µs of one iteration's operators without launches and transfers, for `DeviceProfile.scaled_link`."""
    return float(work_us(trace, profile).sum())


def estimate(trace: Trace, profile: DeviceProfile) -> np.ndarray:
    """Return float64[operators], µs: the latency on the device, and of waits for collectives what is left of the time
    on the network. Never zero for an operator that is executed, and never NaN."""
    return with_network_us(trace, on_device_us(trace, profile))


def on_device_us(trace: Trace, profile: DeviceProfile) -> np.ndarray:
    """Return float64[operators], µs: `work_us` and the launch; of placeholder and output, the transfers."""
    latency = np.maximum(work_us(trace, profile) + profile.launch_us, SMALLEST_US)
    latency[0] = profile.transfer_us(_accessed_bytes(trace, 0), Direction.IN)
    latency[-1] = profile.transfer_us(_accessed_bytes(trace, trace.operator_count - 1), Direction.OUT)
    return latency


def _accessed_bytes(trace: Trace, operator: int) -> int:
    first, last = trace.access_start[operator : operator + 2]
    return int(trace.tensor_bytes[trace.access_tensor[first:last]].sum())


def timed(trace: Trace, profile: DeviceProfile) -> Trace:
    """Return the trace with estimated latencies if it has none yet."""
    return trace if trace.latency_us.any() else trace.with_latencies(estimate(trace, profile))
