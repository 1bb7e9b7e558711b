"""Latencies of twins: closer to the truth than an operator's own, whatever disturbs the readings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pg_tensile.planning.building_blocks.keep import least_bytes
from pg_tensile.planning.device.profile import RTX_A6000
from pg_tensile.planning.job_planner.planner import JobPlanner
from pg_tensile.planning.latency.twins import bursts, steepness, twins_of, typical_us
from pg_tensile.planning.plan.memory import footprint
from pg_tensile.planning.simulator.simulator import SimulatedJob, simulate
from pg_tensile.planning.trace.trace import Access, Floats, Kind, Mode, Operator, Phase, Tensor, Trace
from tests.unit.handmade import network
from tests.unit.planning.latency import noise
from tests.unit.unrolled import unrolled

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


def errors(draw: Noise, rounds: int = ROUNDS, follow: bool = False) -> tuple[float, float]:
    """Errors of the medians of each operator's own readings, and of the latencies of twins, over all seeds."""
    own, pooled = [], []
    for seed in SEEDS:
        random = np.random.default_rng(seed)
        true_us, twins = noise.iteration(random)
        readings = draw(random, true_us, rounds)
        own.append(error(np.median(readings, axis=0), true_us))
        pooled.append(error(typical_us(readings, twins, follow), true_us))
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


@pytest.mark.parametrize(("share", "part"), [(0.2, 0.5), (0.3, 0.5), (0.4, 0.3), (0.5, 0.1), (0.6, 0.1), (0.7, 0.1)])
def test_a_busy_neighbour_is_a_smaller_error_with_twins(share: float, part: float) -> None:
    own, pooled = errors(busy(share))
    assert pooled < part * own


@pytest.mark.parametrize("follow", [False, True])
@pytest.mark.parametrize("draw", [log_normal(0.5), log_normal(1.0), busy(0.3), busy(0.5)])
def test_rounds_that_are_compared_have_a_smaller_error_too(draw: Noise, follow: bool) -> None:
    own, pooled = errors(draw, follow=follow)
    assert pooled < 0.6 * own


def test_bursts_are_told_from_noise():
    """The constants' own experiment. What lies between is right with either kind of median."""
    spread, struck = [], []
    for seed in range(60):
        random = np.random.default_rng(seed)
        for sizes in ((450, 58), (120, 30), (60, 20)):
            true_us, twins = noise.iteration(random, *sizes)
            spread += [bursts(noise.spread(random, true_us, 3, of), twins) for of in (noise.QUIET, 0.25, 0.5, 1.0)]
        true_us, twins = noise.iteration(random)
        struck += [bursts(noise.bursts(random, true_us, 3, of), twins) for of in (0.5, 0.6, 0.7)]
    assert np.mean(spread) < 0.01
    assert np.mean(struck) > 0.95


def test_steepness_is_the_place_of_the_shortest_fifth():
    readings = np.exp([[0.0, 1.0, 4.0, 6.0, 9.0, 3.0, 3.0]])
    assert steepness(readings, np.array([0, 0, 0, 0, 0, 1, 1], np.int32)) == pytest.approx([0.25])
    assert steepness(np.full((1, 6), 2.0), np.zeros(6, np.int32)).size == 0


def test_few_twins_are_no_bursts():
    random = np.random.default_rng(0)
    true_us, twins = noise.iteration(random)
    readings = noise.bursts(random, true_us, ROUNDS)
    assert bursts(readings, twins)
    few = np.isin(twins, np.argsort(-np.bincount(twins))[:2])
    assert not bursts(readings[:, few], np.unique(twins[few], return_inverse=True)[1].astype(np.int32))


@pytest.mark.parametrize("follow", [False, True])
def test_a_change_of_all_operators_between_two_rounds_is_no_burst(follow: bool) -> None:
    random = np.random.default_rng(0)
    true_us, twins = noise.iteration(random)
    readings = noise.spread(random, true_us, 7)
    readings[3:] *= 5
    assert not bursts(readings, twins)
    assert error(typical_us(readings, twins, follow), 5 * true_us) < 0.1


def test_bursts_do_not_hide_a_lasting_change_that_is_followed():
    random = np.random.default_rng(0)
    true_us, twins = noise.iteration(random)
    readings = noise.bursts(random, true_us, ROUNDS)
    readings[1:] *= 5
    assert error(typical_us(readings, twins), true_us) < 0.2
    assert error(typical_us(readings, twins, follow=True), 5 * true_us) < 0.2


@pytest.mark.parametrize("follow", [False, True])
def test_a_round_that_is_slow_as_a_whole_has_little_effect(follow: bool) -> None:
    random = np.random.default_rng(0)
    true_us, twins = noise.iteration(random)
    readings = noise.spread(random, true_us, ROUNDS)
    readings[1] *= 20
    assert error(typical_us(readings, twins, follow), true_us) < 0.1


# ---- odd groups and readings ----


def test_an_operator_without_twins_has_the_median_of_its_rounds():
    alone = np.array([0], np.int32)
    for follow in (False, True):
        assert typical_us(np.array([[10.0], [90.0], [20.0]]), alone, follow) == [20.0]
        assert typical_us(np.array([[90.0]]), alone, follow) == [90.0]
    assert typical_us(np.array([[90.0], [10.0]]), alone, follow=True) == [10.0]  # of two, the smaller one


def test_twins_share_their_readings():
    readings = np.array([[10.0, 12.0, 500.0, 7.0], [10.0, 12.0, 11.0, 8.0], [10.0, 900.0, 11.0, 9.0]])
    assert typical_us(readings, np.array([0, 0, 0, 1], np.int32), follow=True).tolist() == [11.0, 11.0, 11.0, 8.0]
    assert typical_us(readings, np.array([0, 0, 0, 1], np.int32)).tolist() == [11.0, 11.0, 11.0, 8.0]


def test_what_no_operator_can_take_is_ignored():
    twins = np.array([0, 0, 0, 0, 0, 0, 0, 1, 2], np.int32)
    readings = np.array([[*ABSURD, 10.0, 0.0, 3.0], [20.0] * 7 + [0.0, 0.0], [10.0] * 7 + [float("nan"), 5.0]])
    latency = typical_us(readings, twins)
    assert latency[:7].tolist() == [10.0] * 7
    assert np.isnan(latency[7])
    assert latency[8] == 4.0
    assert typical_us(readings, twins, follow=True)[8] == 3.0


def test_no_operators_have_no_latencies():
    assert typical_us(np.zeros((3, 0)), np.zeros(0, np.int32)).shape == (0,)


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

MIB = 1 << 20
NETWORKS = (network(12), RTX_A6000.with_link(8e9)), (unrolled(2, 5, MIB // 4, MIB // 2), RTX_A6000.with_link(5e9))


def drawn_latencies(random: np.random.Generator, trace: Trace) -> Floats:
    """Draw true latencies: in proportion to the bytes that an operator accesses, and otherwise different by group."""
    twins = twins_of(trace)
    pace = 30 * random.lognormal(0, 0.7, twins.max() + 1)[twins]
    return np.maximum(1.0, trace.accessed_bytes / MIB * pace)


def test_plans_made_with_latencies_of_twins_are_no_slower():
    """Plans of joint, made with noisy latencies and executed under the true ones."""
    slowdown: dict[bool, list[float]] = {False: [], True: []}
    for trace, profile in NETWORKS:
        twins = twins_of(trace)
        least, most = least_bytes(trace), footprint(trace).device_peak_bytes
        for seed in range(3):
            random = np.random.default_rng(seed)
            true_us = drawn_latencies(random, trace)
            for draw in (log_normal(1.0), busy(0.5)):
                readings = draw(random, true_us, ROUNDS)
                for budget in ((least + most) // 2, least + (most - least) * 2 // 3):
                    for pooled, latency_us in enumerate((np.median(readings, axis=0), typical_us(readings, twins))):
                        plan = JobPlanner(trace.with_latencies(latency_us), profile).within(budget).plan
                        timeline = simulate([SimulatedJob(trace.with_latencies(true_us), plan)], profile)[0]
                        slowdown[bool(pooled)].append(timeline.iteration_us / true_us.sum())
    assert np.mean(slowdown[True]) < np.mean(slowdown[False])
