"""Latencies under another load of the device than the one that they were predicted or measured under.

When a job comes or goes, plans have to count with the load as it is then (TENSILE, section IV-F), but averages of
measurements follow it only after some iterations. Until then the device's models say by how much: each latency is
multiplied by the ratio of the predictions for the load now and for the load that the latency stands for. What was never
measured, a prediction for that load, thereby becomes the prediction for the load now; what was measured keeps what
measurements have corrected. Under a load similar to the present one, latencies stay as they are.
"""

from __future__ import annotations

import numpy as np

from pg_tensile.planning.device.profile import DeviceProfile
from pg_tensile.planning.latency.load import BUSY
from pg_tensile.planning.latency.mlp import LatencyModels
from pg_tensile.planning.trace.trace import Floats, Trace

SIMILAR = BUSY  # loads that differ by less count as equal


class CurrentLoad:
    """One device's models, and their predictions for the traces of its jobs, which are cached by load.

    Loads are rounded to steps of `SIMILAR`, so that a plan does not follow every fluctuation.
    """

    def __init__(self, models: LatencyModels) -> None:
        self._models = models
        self._predictions: dict[tuple[str, int], Floats] = {}  # by fingerprint and steps of load

    def at(self, trace: Trace, profile: DeviceProfile, before: float, now: float) -> Trace:
        """Return the trace, whose latencies stand for the load `before`, with those under the load `now` (0 … 1).

        More load makes no operator faster, whatever the models say.
        """
        before, now = (min(1.0, max(0.0, load)) for load in (before, now))
        steps = round(before / SIMILAR), round(now / SIMILAR)
        if abs(now - before) < SIMILAR or steps[0] == steps[1]:
            return trace
        latency_before, latency_now = (self._predicted(trace, profile, step) for step in steps)
        ratio = np.divide(latency_now, latency_before, out=np.ones_like(latency_now), where=latency_before > 0)
        ratio = np.maximum(ratio, 1.0) if now > before else np.minimum(ratio, 1.0)
        return trace.with_latencies(trace.latency_us * ratio)

    def keep(self, traces: set[str]) -> None:
        """Drop the predictions of all traces but those of these fingerprints."""
        self._predictions = {key: latency for key, latency in self._predictions.items() if key[0] in traces}

    def _predicted(self, trace: Trace, profile: DeviceProfile, steps: int) -> Floats:
        key = trace.fingerprint, steps
        if key not in self._predictions:
            self._predictions[key] = self._models.predict(trace, profile, steps * SIMILAR)
        return self._predictions[key]
