"""Latency models of a device on which load makes operators slower, for tests."""

from __future__ import annotations

import numpy as np

from pg_tensile.planning.device.profile import DeviceProfile
from pg_tensile.planning.latency import mlp, roofline
from pg_tensile.planning.latency.features import Sample, caches_of
from pg_tensile.planning.latency.mlp import LatencyModels
from pg_tensile.planning.trace.trace import Trace


def slowed_by_load(trace: Trace, profile: DeviceProfile) -> LatencyModels:
    """Return models of the trace's operators, trained on latencies that full load doubles."""
    us = roofline.estimate(trace, profile)
    reuse, before = (np.asarray(column, np.float64) for column in caches_of(trace))
    columns = (trace.flops, trace.operator_bytes, us, reuse, before)
    work = zip(*(column.tolist() for column in columns), strict=True)
    samples = [
        Sample(trace.target[n], trace.signature[n], flops, traffic, load, us * (1 + load), far, near)
        for n, (flops, traffic, us, far, near) in enumerate(work)
        for load in (0.0, 0.5, 1.0)
    ]
    return mlp.train(samples, profile)
