"""Latencies of twins: closer to the truth than an operator's own, whatever disturbs the readings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pg_tensile.planning.latency.twins import STEEP, STRETCHES, bursts, steepness, twins_of, typical_us
from pg_tensile.planning.policies.joint.planner import JobPlanner
from pg_tensile.planning.simulator.simulator import SimulatedJob, simulate
from pg_tensile.planning.trace.trace import Access, Floats, Kind, Mode, Operator, Phase, Tensor, Trace
from tests.unit.handmade import network
from tests.unit.planning.latency import noise

Noise = Callable[[np.random.Generator, Floats, int], Floats]
SEEDS = range(20)
ROUNDS = 3

ABSURD = (0.0, -5.0, float("nan"), float("inf"), 1e300, 1e-9)


def log_normal(deviation: float) -> Noise:
    return lambda random, true_us, rounds: noise.spread(random, true_us, rounds, deviation)


def busy(share: float) -> Noise:
    return lambda random, true_us, rounds: noise.bursts(random, true_us, rounds, share)


def error(latency_us: Floats, true_us: Floats) -> float:
    """Mean of the distance from the truth, in logarithms."""
    return float(np.abs(np.log(latency_us / true_us)).mean())


def errors(draw: Noise, rounds: int = ROUNDS) -> tuple[float, float]:
    """Errors of the medians of each operator's own readings, and of the latencies of twins, over all seeds."""
    own, pooled = [], []
    for seed in SEEDS:
        random = np.random.default_rng(seed)
        true_us, twins = noise.iteration(random)
        readings = draw(random, true_us, rounds)
        own.append(error(np.median(readings, axis=0), true_us))
        pooled.append(error(typical_us(readings, twins), true_us))
    return float(np.mean(own)), float(np.mean(pooled))


# ---- groups ----


def operators_of(*calls: tuple[str, str, Sequence[int]]) -> Trace:
    """Build operators of these targets and signatures, each of which reads parameters of these sizes."""
    tensors = [Tensor(8, Kind.INPUT)]
    rows = [Operator("placeholder", Phase.FORWARD, (Access(0, Mode.CREATE),))]
    for target, signature, sizes in calls:
        accesses = tuple(Access(len(tensors) + number, Mode.READ) for number in range(len(sizes)))
        tensors += [Tensor(size, Kind.PARAMETER) for size in sizes]
        rows.append(Operator(target, Phase.FORWARD, accesses, signature=signature))
    rows.append(Operator("output", Phase.OPTIMIZER, ()))
    persistent_first = sorted(range(len(tensors)), key=lambda tensor: tensors[tensor].kind != Kind.PARAMETER)
    number = {old: new for new, old in enumerate(persistent_first)}
    rows = [
        row._replace(accesses=tuple(Access(number[access.tensor], access.mode) for access in row.accesses))
        for row in rows
    ]
    return Trace.build(rows, [tensors[old] for old in persistent_first])


def test_twins_have_the_same_target_signature_and_sizes():
    trace = operators_of(
        ("mm", "f32[4,4] f32[4,4]", (64, 64)),
        ("mm", "f32[4,4] f32[4,4]", (64, 64)),
        ("mm", "f32[4,4] f32[4,4]", (64, 32)),
        ("mm", "f32[4,4] f32[4,4]@1,4", (64, 64)),
        ("bmm", "f32[4,4] f32[4,4]", (64, 64)),
        ("mm", "f32[4,4] f32[4,4]", (64, 64)),
    )
    assert twins_of(trace).tolist() == [0, 1, 1, 2, 3, 4, 1, 5]


def test_layers_of_one_width_are_twins():
    trace = network(20)
    of_target = {target: twins_of(trace)[trace.target.codes == code] for code, target in enumerate(trace.target.values)}
    assert len(set(of_target["layer"].tolist())) == 1
    assert len(set(of_target["adam"].tolist())) == 1
    assert of_target["layer"][0] != of_target["adam"][0]
    wide = network(20, [1 << 20] * 10 + [1 << 19] * 10)
    assert len(set(twins_of(wide)[wide.target.codes == wide.target.values.index("layer")].tolist())) == 3


# ---- errors ----


@pytest.mark.parametrize("rounds", [3, 7])
@pytest.mark.parametrize("draw", [log_normal(noise.QUIET), log_normal(0.5), log_normal(1.0)])
def test_noise_is_a_smaller_error_with_twins(draw: Noise, rounds: int) -> None:
    own, pooled = errors(draw, rounds)
    assert pooled < 0.5 * own


@pytest.mark.parametrize(("share", "part"), [(0.2, 0.5), (0.3, 0.5), (0.4, 0.25), (0.5, 0.1), (0.6, 0.1), (0.7, 0.2)])
def test_a_busy_neighbour_is_a_smaller_error_with_twins(share: float, part: float) -> None:
    own, pooled = errors(busy(share))
    assert pooled < part * own


def test_bursts_are_told_from_noise():
    """The constants' own experiment."""
    spread, struck = [], []
    for seed in range(60):
        random = np.random.default_rng(seed)
        true_us, twins = noise.iteration(random)
        spread += [steepness(noise.spread(random, true_us, ROUNDS, of), twins).mean() for of in (0.07, 0.25, 0.5, 1.0)]
        struck += [steepness(noise.bursts(random, true_us, ROUNDS, of), twins).mean() for of in (0.5, 0.6, 0.7)]
    assert min(spread) > STEEP + 0.02
    assert np.mean(np.array(struck) < STEEP) > 0.97


def test_too_few_groups_are_no_bursts():
    random = np.random.default_rng(0)
    true_us, twins = noise.iteration(random)
    readings = noise.bursts(random, true_us, ROUNDS)
    assert bursts(readings, twins)
    largest = np.argsort(-np.bincount(twins))[: STRETCHES // ROUNDS - 1]
    few = np.isin(twins, largest)
    assert not bursts(readings[:, few], np.unique(twins[few], return_inverse=True)[1].astype(np.int32))


def test_a_change_of_all_operators_between_two_rounds_is_no_burst():
    random = np.random.default_rng(0)
    true_us, twins = noise.iteration(random)
    readings = noise.spread(random, true_us, 7)
    readings[3:] *= 5
    assert not bursts(readings, twins)
    assert error(typical_us(readings, twins), 5 * true_us) < 0.05


def test_a_round_that_is_slow_as_a_whole_has_no_effect():
    random = np.random.default_rng(0)
    true_us, twins = noise.iteration(random)
    readings = noise.spread(random, true_us, ROUNDS)
    readings[1] *= 20
    assert error(typical_us(readings, twins), true_us) < 0.05


# ---- odd groups and readings ----


def test_an_operator_without_twins_has_the_median_of_its_rounds():
    alone = np.array([0], np.int32)
    assert typical_us(np.array([[10.0], [90.0], [20.0]]), alone) == [20.0]
    assert typical_us(np.array([[90.0], [10.0]]), alone) == [10.0]  # of two, the smaller one
    assert typical_us(np.array([[90.0]]), alone) == [90.0]


def test_twins_share_their_readings():
    readings = np.array([[10.0, 12.0, 500.0, 7.0], [10.0, 12.0, 11.0, 8.0], [10.0, 900.0, 11.0, 9.0]])
    assert typical_us(readings, np.array([0, 0, 0, 1], np.int32)).tolist() == [11.0, 11.0, 11.0, 8.0]


def test_what_no_operator_can_take_is_ignored():
    twins = np.array([0, 0, 0, 0, 0, 0, 0, 1, 2], np.int32)
    readings = np.array([[*ABSURD, 10.0, 0.0, 3.0], [20.0] * 7 + [0.0, 0.0], [10.0] * 7 + [float("nan"), 5.0]])
    latency = typical_us(readings, twins)
    assert latency[:7].tolist() == [10.0] * 7
    assert np.isnan(latency[7])
    assert latency[8] == 3.0


def test_no_operators_have_no_latencies():
    assert typical_us(np.zeros((3, 0)), np.zeros(0, np.int32)).shape == (0,)


@settings(deadline=None)
@given(st.integers(0, 1 << 32), st.integers(1, 4), st.floats(0, 1))
def test_a_latency_lies_between_the_readings_of_its_twins(seed, rounds, lost):
    random = np.random.default_rng(seed)
    true_us, twins = noise.iteration(random, 60, 12)
    readings = noise.bursts(random, true_us, rounds)
    readings[random.random(readings.shape) < lost] = random.choice(ABSURD)
    latency = typical_us(readings, twins)
    for group in range(twins.max() + 1):
        members = readings[:, twins == group]
        members = members[(members >= 1e-3) & (members <= 1e12)]
        (of_group,) = np.unique(latency[twins == group])
        assert members.min() <= of_group <= members.max() if members.size else np.isnan(of_group)


# ---- plans ----
