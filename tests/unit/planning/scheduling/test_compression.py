"""Plans of jobs whose swaps may be compressed: where it pays they are, and they do not change for nothing."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from pg_tensile.planning.building_blocks.keep import least_bytes
from pg_tensile.planning.compression.codec import Codec
from pg_tensile.planning.compression.codec_times import CodecTimes, Sample, fit
from pg_tensile.planning.compression.coding import STAGING_BYTES
from pg_tensile.planning.compression.sparsity import Statistics
from pg_tensile.planning.device.profile import RTX_A6000
from pg_tensile.planning.plan.memory import footprint
from pg_tensile.planning.plan.plan import EventKind, Plan
from pg_tensile.planning.plan.validation import validate
from pg_tensile.planning.scheduling.decisions import DeviceState, Given, JobState, Kept, Planned, Schedule
from pg_tensile.planning.scheduling.device_scheduler import DeviceScheduler
from pg_tensile.planning.trace.trace import Trace
from tests.unit.handmade import network

LINK = RTX_A6000.with_link(2e9)  # a tensor of 8 MiB takes 4 ms each way, a layer 1 ms
NETWORK = network(10, activation_bytes=8 << 20, latency_us=1000.0)
BUDGET = (least_bytes(NETWORK) + footprint(NETWORK).device_peak_bytes) // 2
SPARSE, DENSE = Statistics(0.8, 0.01), Statistics(0.0, 0.0)


def codec_times(us_per_mib: float = 2.0) -> CodecTimes:
    """Every codec takes so long for a MiB, either way."""
    codecs = [codec for codec in Codec if codec != Codec.NONE]
    kinds = product(codecs, (1 << 20, 2 << 20, 8 << 20), (0.1, 0.4, 0.7, 0.95), (0.02, 0.2))
    samples = [
        Sample(codec, nbytes, 4, zeros, runs, *2 * [us_per_mib * nbytes / (1 << 20)])
        for codec, nbytes, zeros, runs in kinds
    ]
    return fit(samples)


def device(budget: int = BUDGET, times: CodecTimes | None = None) -> DeviceState:
    return DeviceState("cpu", LINK, budget, codec_times=times or codec_times())


def job(number: int = 1, statistics: Statistics | None = SPARSE, compression: str = "auto", **fields) -> JobState:
    known = {} if statistics is None else dict.fromkeys(range(NETWORK.tensor_count), statistics)
    return JobState(number, NETWORK, least_bytes(NETWORK), compression=compression, statistics=known, **fields)


def planned(schedule: Schedule, number: int = 1) -> Planned:
    decision = schedule.decisions[number]
    assert isinstance(decision, Planned), decision
    return decision


def codecs(plan: Plan) -> set[Codec]:
    """Those that its copies use."""
    return {Codec(codec) for codec in plan.rows["codec"].tolist() if codec}


def check(trace: Trace, decision: Planned) -> None:
    validate(trace, decision.plan)
    assert footprint(trace, decision.plan).device_peak_bytes == decision.planned_bytes <= decision.granted_bytes
    outs = decision.plan.rows["kind"] == EventKind.SWAP_OUT
    assert not decision.plan.rows["codec"][~outs].any()


def test_sparse_tensors_are_compressed_and_the_plan_takes_less_time():
    plain = planned(DeviceScheduler().schedule(device(), [job(statistics=None)]))
    schedule = DeviceScheduler().schedule(device(), [job()])
    coded = planned(schedule)
    assert not codecs(plain.plan) and codecs(coded.plan)
    check(NETWORK, coded)
    assert coded.iteration_us is not None and plain.iteration_us is not None
    assert coded.iteration_us < plain.iteration_us and coded.granted_bytes <= BUDGET
    listed = {each.tensor: each for each in schedule.codings[1]}
    swapped = set(plain.plan.rows["tensor"][plain.plan.rows["kind"] == EventKind.SWAP_OUT].tolist())
    assert swapped <= listed.keys() == set(range(NETWORK.tensor_count))
    for each in listed.values():
        assert each.coded_us is not None and each.compressed == (each.coded_us < each.plain_us)
        assert 0 < each.coded_bytes < NETWORK.tensor_bytes[each.tensor] / 2


@pytest.mark.parametrize(
    ("statistics", "times"), [(DENSE, codec_times()), (SPARSE, codec_times(1e6)), (None, codec_times())]
)
def test_what_does_not_pay_is_not_compressed(statistics, times):
    found = planned(DeviceScheduler().schedule(device(times=times), [job(statistics=statistics)]))
    plain = planned(DeviceScheduler().schedule(device(), [job(compression="none")]))
    assert found.plan == plain.plan and found.iteration_us == plain.iteration_us


def test_without_measured_codecs_nothing_is_compressed():
    schedule = DeviceScheduler().schedule(replace(device(), codec_times=None), [job()])
    assert not codecs(planned(schedule).plan) and not schedule.codings


@pytest.mark.parametrize("name", ["zvc", "rle", "csr"])
def test_one_codec_only(name):
    found = planned(DeviceScheduler().schedule(device(), [job(statistics=Statistics(0.95, 0.01), compression=name)]))
    assert codecs(found.plan) == {Codec[name.upper()]}


def test_plans_follow_zeros_but_not_every_change_of_them():
    scheduler, running = DeviceScheduler(), job(statistics=None)
    first = planned(scheduler.schedule(device(), [running]))
    running = job(given=Given(first.plan, first.granted_bytes, first.link_share))
    second = planned(scheduler.schedule(device(), [running]))
    assert codecs(second.plan)
    given = Given(second.plan, second.granted_bytes, second.link_share)
    for zeros in (0.8, 0.79, 0.81, 0.805):
        schedule = scheduler.schedule(device(), [job(statistics=Statistics(zeros, 0.01), given=given)])
        assert schedule.decisions == {1: Kept()} and schedule.codings[1]
    dense = planned(scheduler.schedule(device(), [job(statistics=DENSE, given=given)]))
    assert not codecs(dense.plan)


def test_jobs_share_a_link_and_each_is_compressed_as_it_asked_for():
    jobs = [job(1), job(2, compression="none"), job(3, DENSE)]
    schedule = DeviceScheduler().schedule(device(3 * BUDGET), jobs)
    for number in (1, 2, 3):
        check(NETWORK, planned(schedule, number))
        assert bool(codecs(planned(schedule, number).plan)) == (number == 1)
    assert schedule.codings.keys() == {1, 3}


def test_a_budget_with_no_room_for_staging_has_plans_all_the_same():
    least = least_bytes(NETWORK)
    found = planned(DeviceScheduler().schedule(device(least), [job()]))
    check(NETWORK, found)
    assert found.planned_bytes <= least


def test_a_gain_that_coding_takes_of_the_processors_again_is_none():
    """On the host device; a GPU codes beside its compute."""
    slow = device(times=codec_times(15.0))
    assert not codecs(planned(DeviceScheduler().schedule(slow, [job()])).plan)
    elsewhere = replace(NETWORK, device="cuda")
    gpu = replace(slow, name="cuda:0", budget_bytes=BUDGET + STAGING_BYTES["cuda"] - STAGING_BYTES["cpu"])
    found = planned(DeviceScheduler().schedule(gpu, [replace(job(), trace=elsewhere)]))
    assert codecs(found.plan)
