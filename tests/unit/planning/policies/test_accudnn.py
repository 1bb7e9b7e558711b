"""AccUDNN's own scheme: ready times by hand, pinned feature maps, the largest batch without a stall, and the policy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pg_tensile.errors import BatchSizeError, BudgetError
from pg_tensile.planning.batchsize.choose import choose
from pg_tensile.planning.batchsize.no_stall import largest_without_stall
from pg_tensile.planning.batchsize.predict import Predictor
from pg_tensile.planning.building_blocks.idle import IdleInterval
from pg_tensile.planning.device.profile import RTX_A6000, DeviceProfile
from pg_tensile.planning.plan.memory import footprint
from pg_tensile.planning.plan.plan import EventKind
from pg_tensile.planning.plan.validation import validate
from pg_tensile.planning.policies import accudnn
from pg_tensile.planning.policies.accudnn import Layerwise, feature_maps
from pg_tensile.planning.simulator.simulator import SimulatedJob, simulate
from pg_tensile.planning.trace.trace import Access, Kind, Mode, Operator, Phase, Tensor, Trace
from tests.unit.graphs import traces
from tests.unit.handmade import network

MB = 1_000_000
EVEN = DeviceProfile("even", "sim", 1 << 40, 10 * MB, 10 * MB, 1.0, 1e12, 1e12, 0.0, 0.0)  # 10 bytes a µs each way
X, A, B, C, G, H, I = range(7)  # noqa: E741


def linear() -> Trace:
    """Operators of 10 µs: 1 x → a, 2 a → b, 3 b → c, 4 c → loss g; backward: 5 reads b, g → h, 6 reads a, h → i."""
    kinds = [Kind.INPUT, Kind.ACTIVATION, Kind.ACTIVATION, *[Kind.TEMPORARY] * 4]
    sizes = [10, 100, 100, 10, 10, 10, 10]
    forward, backward = Phase.FORWARD, Phase.BACKWARD
    rows = [
        (forward, [X], A), (forward, [A], B), (forward, [B], C), (forward, [C], G),
        (backward, [B, G], H), (backward, [A, H], I),
    ]  # fmt: skip
    operators = [Operator("placeholder", forward, (Access(X, Mode.CREATE),))]
    for phase, reads, made in rows:
        accesses = (*(Access(tensor, Mode.READ) for tensor in reads), Access(made, Mode.CREATE))
        operators.append(Operator("op", phase, accesses, latency_us=10.0))
    operators.append(Operator("output", Phase.OPTIMIZER, (Access(I, Mode.READ),)))
    return Trace.build(operators, [Tensor(size, kind) for size, kind in zip(sizes, kinds, strict=True)])


def test_feature_maps_are_activations_that_backward_reads_again() -> None:
    assert feature_maps(linear()) == [IdleInterval(A, 2 * 2, 2 * 6), IdleInterval(B, 2 * 3, 2 * 5)]
    assert len(feature_maps(network(5))) == 4  # what the last layer makes is read at once


def test_ready_times_by_hand() -> None:
    """a is on the host at 30, b at 40. With room for everything b comes back from 40 to 50, a to 60. With 225 bytes the
    loss waits until x is gone, 5 until a has left, and a comes back when b, which 5 has read, is gone."""
    job = Layerwise(linear(), EVEN)
    assert job.least_memory.tolist() == [10, 110, 200, 110, 20, 120, 120, 10]
    free = job.ready(1000)
    assert free.start_us.tolist() == [0, 0, 10, 20, 30, 40, 50, 60]
    assert free.ready_us.tolist() == [0, 0, 0, 0, 0, 50, 60, 60]
    assert free.stalled == (5, 6)
    tight = job.ready(225)
    assert tight.ready_us.tolist() == [0, 0, 0, 0, 10, 50, 60, 60]
    assert job.ready(1000, {B}).ready_us.tolist() == [0, 0, 0, 0, 0, 0, 40, 40]
    assert job.ready(199).ready_us.tolist()[2:] == [np.inf] * 6  # a and b do not fit together


def test_what_stalls_is_pinned_where_there_is_room() -> None:
    job = Layerwise(linear(), EVEN)
    free, tight, least = job.pinning(1000), job.pinning(225), job.pinning(200)
    assert free is not None and free.pinned == {B} and not free.ready.stalled
    assert tight is not None and tight.pinned == {A, B} and not tight.ready.stalled
    assert least is not None and least.pinned == {B} and least.ready.stalled
    assert job.pinning(199) is None


def scaled(size: int) -> Trace:
    """A network whose activations and times grow with the batch."""
    return network(10, size << 10, 10.0 + size)


@pytest.mark.parametrize("gigabytes", [2, 4, 8])
def test_largest_batch_without_a_stall(gigabytes: int) -> None:
    profile, budget = RTX_A6000.with_link(gigabytes * 1e9), 2 << 20
    found = largest_without_stall(scaled, profile, budget, 1, 500)
    assert found is not None
    assert Layerwise(scaled(found.largest), profile).least_bytes <= budget
    assert Layerwise(scaled(found.largest + 1), profile).least_bytes > budget
    unstalled = []
    for size in range(1, found.largest + 1):
        pinning = Layerwise(scaled(size), profile).pinning(budget)
        if pinning is not None and not pinning.ready.stalled:
            unstalled.append(size)
    assert found.batch_size == max(unstalled)  # on this network it is monotone
    assert largest_without_stall(scaled, profile, 1000, 1, 500) is None


@given(traces(most_operators=20, most_tensors=20), st.floats(0.3, 1.1))
def test_plans_are_valid_and_within_the_budget(trace: Trace, share: float) -> None:
    budget = int(share * footprint(trace).device_peak_bytes)
    least = Layerwise(trace, RTX_A6000).least_bytes
    if least > budget:
        with pytest.raises(BudgetError) as error:
            accudnn.plan({0: trace}, RTX_A6000, budget)
        assert error.value.smallest_bytes == least
        budget = least
    plan = accudnn.plan({0: trace}, RTX_A6000, budget)[0]
    validate(trace, plan)
    assert footprint(trace, plan).device_peak_bytes <= budget
    assert {event.kind for event in plan.events} <= {EventKind.SWAP_OUT, EventKind.SWAP_IN}
    assert {event.tensor for event in plan.events} <= {each.tensor for each in feature_maps(trace)}


@pytest.mark.parametrize("share", [0.95, 0.8, 0.65])
@pytest.mark.parametrize("gigabytes", [10, 20, 40])
def test_a_plan_without_stalls_hardly_stalls_when_it_is_simulated(gigabytes: int, share: float) -> None:
    trace, profile = network(40), RTX_A6000.with_link(gigabytes * 1e9)
    budget = int(share * footprint(trace).device_peak_bytes)
    pinning = Layerwise(trace, profile).pinning(budget)
    assert pinning is not None and not pinning.ready.stalled and len(pinning.pinned) < 5
    (timeline,) = simulate([SimulatedJob(trace, accudnn.plan({0: trace}, profile, budget)[0])], profile)
    assert timeline.stall_us < 0.01 * timeline.iteration_us
    assert timeline.bytes_out == timeline.bytes_in >= 34 << 20


def test_jobs_share_the_budget() -> None:
    jobs = {1: network(8), 2: network(16)}
    with pytest.raises(BudgetError) as error:
        accudnn.plan(jobs, RTX_A6000, 1000)
    plans = accudnn.plan(jobs, RTX_A6000, error.value.smallest_bytes)
    peaks = [footprint(jobs[job], plan).device_peak_bytes for job, plan in plans.items()]
    assert sum(peaks) <= error.value.smallest_bytes
    with pytest.raises(BudgetError):
        accudnn.plan(jobs, RTX_A6000, error.value.smallest_bytes - 1)


# ---- chosen with our own plans ----


def test_chosen_batch_is_the_fastest_of_all_and_within_the_budget() -> None:
    profile, budget = RTX_A6000.with_link(2e9), 2 << 20
    predict = Predictor(scaled, profile, budget)
    first = predict.largest_without_stall(1, 1000)
    assert first is not None and first.batch_size
    choice = choose(predict, 1000, most=1000, budget_bytes=budget, first=[first.batch_size])
    chosen = choice.candidates[0]
    assert chosen.device_bytes <= budget
    everything = [predict(size) for size in range(2, 1000, 17)]
    assert chosen.samples_per_s >= 0.97 * max(one.samples_per_s for one in everything)
    assert any(one.batch_size == first.batch_size for one in choice.candidates)
    assert {one.feasible for one in everything} == {True, False}
    assert all(one.device_bytes > budget for one in everything if not one.feasible)


def test_no_batch_fits() -> None:
    with pytest.raises(BatchSizeError, match=r"a batch of 1 needs at least \d.* bytes .*; the budget is 1,000"):
        choose(Predictor(scaled, RTX_A6000, 1000), 400, budget_bytes=1000)
