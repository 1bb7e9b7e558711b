"""Prediction of operators' latency before any execution: a small neural network for each kind (TENSILE, section IV-A).

Each network has four layers and predicts the logarithm of latency over roofline, so that 0, where nothing is known,
means the roofline. Predictions also fade to the roofline away from the measurements: features are clipped to the range
seen in training, and the network's output shrinks with the distance of sizes and arguments from it. Training and
prediction need numpy only; a device's models fit into a few hundred kilobytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from pg_tensile.errors import MeasurementError
from pg_tensile.planning.device.profile import DeviceProfile
from pg_tensile.planning.latency import roofline
from pg_tensile.planning.latency.features import REUSE, Described, Sample, describe, describe_samples, roofline_us
from pg_tensile.planning.trace.trace import Trace

Floats32 = NDArray[np.float32]

HIDDEN = 16  # units of each of the three hidden layers
LAYERS = 4
FADING = 2.0  # distance of a feature from its range (in factors of 2) that halves the network's output
STEPS = 600  # of training, on at most BATCH samples each
BATCH = 256
LEARNING_RATE = 1e-2
WEIGHT_DECAY = 1.0  # strong, because measurements are noisy and few
DOUBT = 0.1  # the Huber loss is linear in residuals (of logarithms) above it, because some samples were disturbed
_MOST_RESIDUAL = 20.0  # e²⁰: no operator is that far from its roofline


@dataclass(frozen=True, eq=False)
class KindModel:
    """Network of one kind, over the c features that varied in its measurements. All floats are float32."""

    low: Floats32  # [FEATURES]: the range of all features in training
    high: Floats32
    columns: NDArray[np.uint16]  # [c]
    mean: Floats32  # [c]
    deviation: Floats32  # [c]
    weights: tuple[Floats32, ...]  # LAYERS matrices [inputs, outputs]: c → HIDDEN → HIDDEN → HIDDEN → 1
    biases: tuple[Floats32, ...]

    def residual(self, features: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return log(latency / roofline), float64[n], for features [n, FEATURES]."""
        inside = np.clip(features, self.low, self.high)
        distance = np.abs(features - inside)[:, :REUSE].max(1)  # the maximum, because many features grow with one size
        with np.errstate(all="ignore"):  # models from elsewhere may overflow; NaN then counts as 0
            hidden = ((inside[:, self.columns] - self.mean) / self.deviation).astype(np.float32)
            for weight, bias in zip(self.weights[:-1], self.biases[:-1], strict=True):
                hidden = np.tanh(hidden @ weight + bias)
            output = (hidden @ self.weights[-1] + self.biases[-1])[:, 0].astype(np.float64)
        residual = np.clip(np.nan_to_num(output), -_MOST_RESIDUAL, _MOST_RESIDUAL)
        return residual / (1.0 + np.square(distance / FADING))


@dataclass(frozen=True, eq=False)
class LatencyModels:
    """Models of one device.

    The rates are those of the profile used in training. Another measurement of the same device gives other rates, with
    which the residuals would be meaningless.
    """

    flops_per_s: float
    bytes_per_s: float
    launch_us: float
    kinds: Mapping[str, KindModel]

    def predict(self, trace: Trace, profile: DeviceProfile, load: float = 0.0) -> NDArray[np.float64]:
        """Return float64[operators], µs, on a device of which other processes use the share `load` (0 … 1).

        Placeholder, output and kinds without a model have the roofline's latency on `profile`.
        """
        latency = roofline.estimate(trace, profile)
        rates = self._rates(profile)
        factor = self._factors(describe(trace, rates, load))
        modelled = np.isfinite(factor)
        latency[modelled] = roofline_us(trace.flops, trace.operator_bytes, rates)[modelled] * factor[modelled]
        return latency

    def predict_samples(self, samples: Sequence[Sample], profile: DeviceProfile) -> NDArray[np.float64]:
        """Return float64[samples], µs, each under its own load."""
        rates = self._rates(profile)
        factor = self._factors(describe_samples(samples, rates))
        flops, traffic = np.array([(sample.flops, sample.bytes) for sample in samples], np.float64).reshape(-1, 2).T
        return roofline_us(flops, traffic, rates) * np.where(np.isfinite(factor), factor, 1.0)

    def _factors(self, described: Described) -> NDArray[np.float64]:
        """Return the networks' latency as a multiple of the roofline; NaN for kinds without a model."""
        factor = np.full(len(described.codes), np.nan)
        for code, kind in enumerate(described.kinds):
            model = self.kinds.get(kind)
            if model is not None:
                rows = np.flatnonzero(described.codes == code)
                factor[rows] = np.exp(model.residual(described.features[rows]))
        return factor

    def _rates(self, profile: DeviceProfile) -> DeviceProfile:
        return replace(profile, flops_per_s=self.flops_per_s, bytes_per_s=self.bytes_per_s, launch_us=self.launch_us)


# ---- training --------------------------------------------------------------------------------------------------------


def train(samples: Sequence[Sample], profile: DeviceProfile, seed: int = 0) -> LatencyModels:
    """Train the models for the calibrated device, in seconds for tens of thousands of samples.

    Equal samples and seeds give equal models. Raises MeasurementError if there are no samples.
    """
    samples = [sample for sample in samples if math.isfinite(sample.latency_us) and sample.latency_us > 0]
    if not samples:
        raise MeasurementError("latency models cannot be trained without samples", hint="Calibrate the device first.")
    described = describe_samples(samples, profile)
    flops, traffic, measured = np.array([(s.flops, s.bytes, s.latency_us) for s in samples], np.float64).T
    target = np.log(measured / roofline_us(flops, traffic, profile))
    kinds = {}
    for code, kind in enumerate(described.kinds):
        rows = np.flatnonzero(described.codes == code)
        kinds[kind] = _train_kind(described.features[rows], target[rows], np.random.default_rng([seed, code]))
    return LatencyModels(profile.flops_per_s, profile.bytes_per_s, profile.launch_us, kinds)


def _train_kind(features: NDArray[np.float64], target: NDArray[np.float64], random: np.random.Generator) -> KindModel:
    columns = np.flatnonzero(np.ptp(features, 0) > 1e-6)
    inputs = features[:, columns]
    mean, deviation = inputs.mean(0), np.maximum(inputs.std(0), 1e-6)
    parameters = _initial(len(columns), float(np.median(target)), random)
    _fit(parameters, ((inputs - mean) / deviation).astype(np.float32), target.astype(np.float32), random)
    kept = tuple(parameter.astype(np.float16).astype(np.float32) for parameter in parameters)  # stored precision
    return KindModel(
        low=features.min(0).astype(np.float32),
        high=features.max(0).astype(np.float32),
        columns=columns.astype(np.uint16),
        mean=mean.astype(np.float32),
        deviation=deviation.astype(np.float32),
        weights=kept[:LAYERS],
        biases=kept[LAYERS:],
    )


def _initial(inputs: int, output: float, random: np.random.Generator) -> list[Floats32]:
    """Return initial weights, then biases; the network's output is `output` for all inputs."""
    sizes = [inputs, HIDDEN, HIDDEN, HIDDEN, 1]
    shapes = list(pairwise(sizes))
    weights = [random.standard_normal(shape) / np.sqrt(max(1, shape[0])) for shape in shapes]
    weights[-1][:] = 0.0
    biases = [np.zeros(size) for size in sizes[1:]]
    biases[-1][:] = output
    return [array.astype(np.float32) for array in (*weights, *biases)]


def _fit(parameters: list[Floats32], inputs: Floats32, target: Floats32, random: np.random.Generator) -> None:
    """Train `parameters` in place: Adam, decoupled weight decay, and a rate that decays to 0 as a cosine."""
    first = [np.zeros_like(parameter) for parameter in parameters]
    second = [np.zeros_like(parameter) for parameter in parameters]
    for step in range(1, STEPS + 1):
        rate = LEARNING_RATE * (1 + np.cos(np.pi * step / STEPS)) / 2
        chosen = random.integers(0, len(target), BATCH) if len(target) > BATCH else slice(None)
        for index, gradient in enumerate(_gradients(parameters, inputs[chosen], target[chosen])):
            first[index] += 0.1 * (gradient - first[index])
            second[index] += 0.01 * (gradient * gradient - second[index])
            moved = (first[index] / (1 - 0.9**step)) / (np.sqrt(second[index] / (1 - 0.99**step)) + 1e-8)
            decay = WEIGHT_DECAY if index < LAYERS else 0.0
            parameters[index] -= (rate * (moved + decay * parameters[index])).astype(np.float32)


def _gradients(parameters: list[Floats32], inputs: Floats32, target: Floats32) -> list[Floats32]:
    """Return the gradients of the mean Huber loss, in the order of the parameters."""
    weights, biases = parameters[:LAYERS], parameters[LAYERS:]
    values = [inputs]
    for weight, bias in zip(weights[:-1], biases[:-1], strict=True):
        values.append(np.tanh(values[-1] @ weight + bias))
    error = values[-1] @ weights[-1] + biases[-1] - target[:, None]
    above = np.clip(error / DOUBT, -1.0, 1.0) / len(target)
    gradients: list[Floats32] = [np.empty(0, np.float32)] * (2 * LAYERS)
    for layer in reversed(range(LAYERS)):
        gradients[layer], gradients[LAYERS + layer] = values[layer].T @ above, above.sum(0)
        if layer:
            above = (above @ weights[layer].T) * (1 - np.square(values[layer]))
    return gradients
