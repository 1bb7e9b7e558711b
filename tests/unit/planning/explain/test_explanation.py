"""The explanation of a job: its numbers are those of the plan that the scheduler would make, its text says them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pg_tensile.planning.bounds import least_us
from pg_tensile.planning.building_blocks.keep import least_bytes
from pg_tensile.planning.device.profile import RTX_A6000, DeviceProfile
from pg_tensile.planning.explain.beside import MemoryFlowSpeeds
from pg_tensile.planning.explain.numbers import SHOWN, Explanation, explain
from pg_tensile.planning.explain.request import Admission, Ahead, Request
from pg_tensile.planning.explain.start import LaterStart
from pg_tensile.planning.explain.text import render
from pg_tensile.planning.job_planner.planner import JobPlanner
from pg_tensile.planning.plan.allocator import plan_bytes
from pg_tensile.planning.plan.memory import floor_bytes, footprint
from pg_tensile.planning.plan.plan import EventKind
from pg_tensile.planning.policies.joint import policy as joint
from pg_tensile.planning.scheduling.decisions import DeviceState, Given, JobState, Planned
from pg_tensile.planning.scheduling.device_scheduler import DeviceScheduler
from pg_tensile.planning.simulator.simulator import SimulatedJob, simulate
from pg_tensile.planning.trace.trace import Trace
from pg_tensile.text import duration, size
from tests.unit.handmade import network
from tests.unit.planning.policies.test_joint_allocator import with_huge_operator

MB = 1 << 20
ROOMY = Admission(1 << 40)
SLOW = RTX_A6000.with_link(2e9)  # swapping an activation takes five times as long as making it


def request(**changes: Any) -> Request:
    usual = Request("late", "mlp", "cpu", "joint", 10, 64, 25, 1600, 400, 0, 1000, 16 * MB, 16 * MB)
    return usual._replace(**changes)


@pytest.fixture(scope="module")
def net() -> Trace:
    return network(12)


@pytest.fixture(scope="module")
def short() -> Trace:
    return network(4)


def half(trace: Trace) -> int:
    return (least_bytes(trace) + footprint(trace).device_peak_bytes) // 2


def explained(trace: Trace, profile: DeviceProfile = SLOW, admission: Admission = ROOMY, **changes: Any) -> Explanation:
    return explain(request(**changes), {"train": trace}, profile, admission)


def numbers(
    trace: Trace, profile: DeviceProfile = SLOW, admission: Admission = ROOMY, **changes: Any
) -> dict[str, Any]:
    """The explanation as it travels."""
    numbers: dict[str, Any] = json.loads(json.dumps(explained(trace, profile, admission, **changes).to_json()))
    return numbers


# ---- numbers ----


def test_what_the_allocators_pages_take_of_the_budget_is_known_before() -> None:
    trace = with_huge_operator(3)
    budget = (least_bytes(trace) * 7 + plan_bytes(trace) * 3) // 10
    explanation = explained(trace, admission=Admission(budget), device="cuda:0")
    memory = explanation.memory
    plan = JobPlanner(trace, SLOW).within(budget).plan
    lost = plan_bytes(trace, plan) - footprint(trace, plan).device_peak_bytes
    assert lost > MB
    assert memory is not None and memory.tensor_bytes == budget - lost
    assert numbers(trace, admission=Admission(budget), device="cuda:0")["memory"]["tensor_bytes"] == budget - lost
    (line,) = (line for line in render(explanation) if "for tensors" in line)
    assert f"{size(budget - lost)}  of the {size(budget)}: under this plan, the allocator's pages take the rest" in line


def test_without_such_an_allocator_all_of_the_budget_is_for_tensors(net: Trace) -> None:
    assert "tensor_bytes" not in numbers(net, admission=Admission(half(net)))["memory"]
    assert not any("for tensors" in line for line in render(explained(net, admission=Admission(half(net)))))


def test_what_fits_is_left_as_it_is(net: Trace) -> None:
    result = numbers(net)
    vanilla = footprint(net).device_peak_bytes
    assert result["memory"]["vanilla_bytes"] == result["memory"]["planned_bytes"] == vanilla
    assert result["memory"]["least_bytes"] == least_bytes(net)
    assert result["memory"]["floor_bytes"] == floor_bytes(net)
    assert result["swapped"]["tensors"] == result["recomputed"]["tensors"] == 0
    assert result["time"]["planned_us"] == result["time"]["vanilla_us"]
    assert result["start"]["when"] == "now"


def test_numbers_are_those_of_the_plan_in_the_jobs_own_budget(net: Trace) -> None:
    budget = half(net)
    plan = joint.plan({0: net}, SLOW, budget)[0]
    (timeline,) = simulate([SimulatedJob(net, plan)], SLOW)
    result = numbers(net, memory_budget=budget)
    assert result["memory"]["planned_bytes"] == timeline.device_peak_bytes <= budget
    assert result["time"]["planned_us"] == pytest.approx(timeline.iteration_us)
    assert result["time"]["stall_us"] == pytest.approx(timeline.stall_us)
    assert result["link"]["out"]["bytes"] == timeline.bytes_out > 0
    assert result["link"]["in"]["load"] == pytest.approx(timeline.bytes_in / 2e9 / timeline.iteration_us * 1e6)
    swapped = {event.tensor for event in plan.events if event.kind == EventKind.SWAP_OUT}
    remade = {event.tensor for event in plan.events if event.kind == EventKind.RECOMPUTE}
    assert result["swapped"]["tensors"] == len(swapped) > 0
    assert result["recomputed"]["tensors"] == len(remade) > 0
    assert result["swapped"]["bytes"] == net.tensor_bytes[list(swapped)].sum()
    assert {row["tensor"] for row in result["swapped"]["largest"]} <= swapped


def test_a_bound_tells_how_good_the_plan_is(net: Trace) -> None:
    budget = half(net)
    asked = request(memory_budget=budget)
    explanation = explain(asked, {"train": net}, SLOW, ROOMY, bound_limit_s=60.0)
    time = explanation.to_json()["time"]
    assert time["bound_us"] == least_us(net, SLOW, budget)
    assert time["vanilla_us"] < time["bound_us"] < time["planned_us"]
    (line,) = (line for line in render(explanation) if "no plan below" in line)
    within = re.search(r"the plan is within (\d+)% of the best there can be$", line)
    assert within and time["planned_us"] <= time["bound_us"] * (1 + int(within[1]) / 100)
    assert duration(time["bound_us"]) in line
    assert explanation.time is not None
    best = replace(explanation, time=replace(explanation.time, planned_us=time["bound_us"] * 1.0001))
    assert any(line.endswith("no other plan is faster") for line in render(best))


def test_there_is_no_bound_without_a_plan_or_the_time_for_it(net: Trace) -> None:
    tight = request(memory_budget=half(net))
    for asked, limit_s in ((request(), 60.0), (tight, 0.0), (tight, 1e-9)):
        explanation = explain(asked, {"train": net}, SLOW, ROOMY, bound_limit_s=limit_s)
        assert "bound_us" not in explanation.to_json()["time"]
        assert not any("no plan below" in line for line in render(explanation))


@pytest.mark.parametrize(("device", "told"), [("cpu", True), ("ray:cpu", True), ("cuda:0", False)])
def test_on_the_cpu_it_says_that_swaps_save_no_memory_of_the_machine(short: Trace, device: str, told: bool) -> None:
    within = explained(short, device=device, memory_budget=half(short))
    assert within.memory is not None and within.memory.host_bytes
    assert ("swaps save none on cpu" in "\n".join(render(within))) == told
    assert within.to_json()["memory"].get("saves_machine_memory") == (False if told else None)
    assert "swaps save none" not in "\n".join(render(explained(short, device=device)))  # there are none


def test_a_promised_slowdown_is_told_with_the_memory_that_it_needs() -> None:
    net = network(8)
    budget = half(net)
    lost = numbers(net, memory_budget=budget)["time"]["slowdown"]
    (line,) = (line for line in render(explained(net, memory_budget=budget)) if "slowdown" in line)
    assert f" {lost:.2f}x  by the plan; any is accepted: option max_slowdown" in line
    kept = explained(net, memory_budget=budget, max_slowdown=2 * lost)
    memory = kept.to_json()["memory"]
    assert least_bytes(net) <= memory["promised_bytes"] < budget
    text = "\n".join(render(kept))
    assert f"at most {2 * lost:.4g}x (max_slowdown)" in text
    assert f"{size(memory['promised_bytes'], True)}  for a plan that costs at most {2 * lost:.4g}x" in text
    never = explained(net, memory_budget=budget, max_slowdown=1.0)
    assert never.start.when == "never" and "for its max_slowdown of 1, more than its memory_budget" in never.start.why
    small = explained(net, memory_budget=least_bytes(net) - 1, max_slowdown=1.0)
    assert small.start.when == "never" and "max_slowdown" not in small.start.why  # no promise would fit


def test_the_largest_tensors_come_first_and_are_away_between_their_uses(net: Trace) -> None:
    shown = numbers(net, RTX_A6000, memory_budget=least_bytes(net))["swapped"]["largest"]
    assert len(shown) == SHOWN
    assert [row["bytes"] for row in shown] == sorted((row["bytes"] for row in shown), reverse=True)
    for row in shown:
        users = net.access_operator[net.access_tensor == row["tensor"]]
        for out, back in row["away"]:
            assert not np.any((users > out["operator"]) & (users < back["operator"]))
            assert back["operator"] in users


def test_the_device_is_the_budget_where_the_job_has_none(net: Trace) -> None:
    result = numbers(net, admission=Admission(half(net) + 100), overhead_bytes=100)
    assert result["memory"]["budget_bytes"] == half(net)
    assert result["memory"]["budget_of"] == "device"
    assert result["memory"]["planned_bytes"] <= half(net)


def test_the_hungriest_graph_decides_what_is_possible(net: Trace) -> None:
    large = network(4, 8 * MB)
    explanation = explain(request(), {"train": net, "evaluate": large}, SLOW, ROOMY)
    assert explanation.memory is not None
    assert explanation.memory.least_graph == "evaluate"
    assert explanation.memory.least_bytes == least_bytes(large)
    assert explanation.memory.floor_bytes == floor_bytes(large)
    assert any("least possible" in line and "for validation" in line for line in render(explanation))


# ---- whether it would start ----


def test_a_job_starts_while_its_least_fits_beside_the_least_of_others(net: Trace) -> None:
    need, others = least_bytes(net), 100 * MB
    fits = Admission(need + others + MB, MB, 2, 0, others)
    assert numbers(net, admission=fits)["start"]["when"] == "now"
    full = fits._replace(budget_bytes=fits.budget_bytes - 1)
    start = numbers(net, admission=full)["start"]
    assert start["when"] == "later"
    assert f"2 running jobs at least {size(others)}" in start["why"]
    assert f"predictions {size(MB)}" in start["why"]


def test_an_overhead_counts_against_the_device_and_not_against_the_jobs_budget(net: Trace) -> None:
    need = least_bytes(net)
    assert numbers(net, memory_budget=need, overhead_bytes=MB)["start"]["when"] == "now"
    assert numbers(net, admission=Admission(need + MB - 1), overhead_bytes=MB)["start"]["when"] == "never"


@pytest.mark.parametrize("of_the_job", [True, False])
def test_what_cannot_fit_never_starts_and_says_which_operator_is_too_large(net: Trace, of_the_job: bool) -> None:
    short = least_bytes(net) - 1
    result = numbers(net, memory_budget=short) if of_the_job else numbers(net, admission=Admission(short))
    assert result["start"]["when"] == "never"
    assert "the most is needed by operator" in result["start"]["why"]
    assert ("memory_budget" in result["start"]["why"]) == of_the_job
    assert "planned_bytes" not in result["memory"]
    assert "swapped" not in result


def test_a_model_in_training_waits_for_its_job(net: Trace) -> None:
    start = numbers(net, open_job=7, open_job_s=30.0)["start"]
    assert start == {"when": "later", "why": "the model is being trained by job 7", "wait_s": 30.0}


@pytest.mark.parametrize(
    ("ahead", "expected"),
    [
        ([Ahead(True, 40 * MB, 100.0)], 100.0),
        ([Ahead(True, 40 * MB, None)], None),
        # as soon as enough of the running ones have ended
        ([Ahead(True, 20 * MB, 300.0), Ahead(True, 20 * MB, 100.0)], 100.0),
        ([Ahead(True, 39 * MB, 300.0), Ahead(True, MB, 100.0)], 300.0),
        ([Ahead(True, 20 * MB, None), Ahead(True, 20 * MB, 100.0)], 100.0),
        # after those that wait already, where there is not room for all
        ([Ahead(True, 40 * MB, 100.0), Ahead(False, 20 * MB, 50.0)], 100.0),
        ([Ahead(True, 40 * MB, 100.0), Ahead(False, 40 * MB, 50.0)], 150.0),
        ([Ahead(True, 40 * MB, 100.0), Ahead(False, 40 * MB, None)], None),
        ([Ahead(True, 40 * MB, 100.0), Ahead(False, 40 * MB, 50.0), Ahead(False, 40 * MB, 25.0)], 175.0),
    ],
)
def test_how_long_it_waits_at_most(net: Trace, ahead: list[Ahead], expected: float | None) -> None:
    """The device has 40 MB; the job needs 20 MB of them."""
    running = [job for job in ahead if job.running]
    held = sum(job.least_bytes for job in running)
    admission = Admission(40 * MB, 0, len(running), len(ahead) - len(running), held, ahead=tuple(ahead))
    explanation = explained(net, policy="none", claim_bytes=20 * MB, admission=admission)
    result = explanation.to_json()
    assert (result["start"]["when"], result["start"]["wait_s"]) == ("later", expected)
    assert "ahead" not in result["admission"]
    said = "at an unknown time" if expected is None else "in at most "
    assert said in render(explanation)[-1]


# ---- beside running jobs ----


def beside(
    trace: Trace, promise: float | None, budget: int, over: Callable[[], bool] = lambda: False, **changes: Any
) -> Explanation:
    """The explanation of a second job of the same kind, where one with this promise runs."""
    least = least_bytes(trace)
    running = JobState(7, trace, least, max_slowdown=promise, given=Given(None, least))
    admission = Admission(budget, 0, 1, 0, least, ahead=(Ahead(True, least, 60.0, job=7),))
    return explain(request(**changes), {"train": trace}, SLOW, admission, running=[running], over=over)


def promised_bytes(trace: Trace, promise: float) -> int:
    return JobPlanner(trace, SLOW).saving(promise).device_peak_bytes


def test_memory_that_running_jobs_were_promised_is_not_free(short: Trace) -> None:
    kept = promised_bytes(short, 1.0)
    assert least_bytes(short) < kept
    budget = least_bytes(short) + kept - 1
    start = beside(short, 1.0, budget).start
    assert isinstance(start, LaterStart)
    assert start.wait_s == 60.0 and start.why.endswith(f"1 running job at least {size(kept)}")
    assert beside(short, None, budget).start.when == "now"


def test_the_slowdown_beside_running_jobs_is_that_of_the_schedulers_plan(short: Trace) -> None:
    budget = 2 * half(short)
    explanation = beside(short, 1.05, budget)
    jobs = [
        JobState(7, short, least_bytes(short), max_slowdown=1.05, given=Given(None, least_bytes(short))),
        JobState(8, short, least_bytes(short)),
    ]
    planned = DeviceScheduler().schedule(DeviceState("cpu", SLOW, budget), jobs).decisions[8]
    assert isinstance(planned, Planned) and planned.iteration_us is not None and planned.vanilla_us is not None
    result = explanation.to_json()["beside"]
    assert result["planned_us"] == planned.iteration_us and result["link_share"] == planned.link_share
    assert result["slowdown"] == planned.iteration_us / planned.vanilla_us > explanation.to_json()["time"]["slowdown"]
    (line,) = (line for line in render(explanation) if "beside others" in line)
    assert f"{duration(planned.iteration_us)}  {result['slowdown']:.2f}x with {size(planned.planned_bytes)}" in line
    free = beside(short, None, budget).to_json()["beside"]
    assert free["slowdown"] < result["slowdown"]  # nothing keeps the memory and the link from it


def test_a_job_waits_beside_running_ones_whose_link_it_would_need() -> None:
    """Both promises fit into the memory, if each has the whole link; they cannot share it."""
    short = network(6)
    promise = 1.1
    budget = 2 * promised_bytes(short, promise)
    start = beside(short, promise, budget, max_slowdown=promise).start
    assert isinstance(start, LaterStart) and start.wait_s == 60.0
    assert "job 7 and this job would get plans that cost more than max_slowdown allows" in start.why


def test_memory_that_flows_is_explained() -> None:
    """Jobs whose least does not fit beside each other: one would wait if memory could not flow."""
    trace = network(9, [MB] * 4 + [8 * MB] + [MB] * 4, latency_us=5000.0)
    least, rest = least_bytes(trace), int(trace.tensor_bytes[trace.persistent].sum())
    running = [JobState(7, trace, least, given=Given(None, least))]
    admission = Admission(least + rest, 0, 1, 0, least, ahead=(Ahead(True, least, 60.0, job=7),))
    profile = replace(SLOW, kind="host")

    def beside_another(memory_flow: bool) -> Explanation:
        return explain(request(), {"train": trace}, profile, admission, running=running, memory_flow=memory_flow)

    assert beside_another(False).start.when == "later"
    explanation = beside_another(True)
    assert explanation.start.when == "now" and explanation.beside is not None
    flow = explanation.beside.flow
    assert flow is not None and flow.others.keys() == {"7"}
    assert 0 < flow.speed < 1 and 0 < flow.others["7"] < 1
    assert explanation.start.why.endswith(f"it would run {flow}")
    assert explanation.to_json()["beside"]["flow"] == {"speed": flow.speed, "others": flow.others}
    assert sum(f"would run {flow}" in line for line in render(explanation)) == 2


def test_speeds_of_jobs_whose_memory_flows_are_told_in_words() -> None:
    one = MemoryFlowSpeeds(0.938, {"3": 0.941})
    assert str(one) == "beside job 3: their memory flows, each at 94% of its own speed"
    two = MemoryFlowSpeeds(0.5, {"3": 0.9, "4": 0.5})
    assert str(two) == (
        "beside jobs 3 and 4: their memory flows, this one at 50%, job 3 at 90%, job 4 at 50% of its own speed"
    )


def test_what_takes_too_long_to_plan_is_left_out(short: Trace) -> None:
    explanation = beside(short, 1.05, 2 * half(short), over=lambda: True)
    assert explanation.start.when == "now" and "beside" not in explanation.to_json()


def test_the_promised_memory_is_computed_once(short: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    saving = JobPlanner.saving

    def counted(planner: JobPlanner, slowdown: float) -> Any:
        asked.append(slowdown)
        return saving(planner, slowdown)

    monkeypatch.setattr(JobPlanner, "saving", counted)
    memory = numbers(short, max_slowdown=1.5)["memory"]
    assert asked == [1.5]
    assert memory["promised_bytes"] == promised_bytes(short, 1.5)


def test_the_swap_share_of_a_job_of_policy_tensile_counts(net: Trace) -> None:
    slow = net.with_latencies(100 * net.latency_us)
    budget = footprint(net).device_peak_bytes * 9 // 10
    swapped = [
        numbers(slow, policy="tensile", memory_budget=budget, swap_share=share)["swapped"]["bytes"]
        for share in (None, 0.2)
    ]
    assert 0 < swapped[1] < 0.5 * swapped[0]


def test_an_eager_job_needs_what_it_claims(net: Trace) -> None:
    result = numbers(net, policy="none", claim_bytes=2 * MB, admission=Admission(2 * MB))
    assert result["start"]["when"] == "now"
    assert "planned_bytes" not in result["memory"]
    assert numbers(net, policy="none", claim_bytes=2 * MB, admission=Admission(MB))["start"]["when"] == "never"


# ---- text ----


def test_text_says_what_the_plan_does(net: Trace) -> None:
    text = render(explained(net, memory_budget=half(net), skipped_rows=3))
    whole = "\n".join(text)
    assert text[0] == 'Train "late" (mlp) on cpu, policy joint: 10 epochs of 25 steps of 64 rows'
    assert "1,600 to train on, 400 to validate with, 3 without a target" in whole
    assert f"within the {size(half(net))} of memory_budget" in whole
    assert "recomputing" in whole
    assert "calibrate_device()" in whole
    assert text[-1].startswith("  Start       now: it needs at least")
    assert whole.isascii()


def test_numbers_of_memory_and_time_stand_under_each_other(net: Trace) -> None:
    text = render(explained(net, memory_budget=half(net)))
    ends = [match.end() for line in text[4:9] if (match := re.search(r"\d (?=MB|ms)", line))]
    assert len(ends) == 5
    assert len(set(ends)) == 1
    table = [line for line in text if line.startswith("    ")]
    assert len({line.index(" out after") for line in table if " out after" in line}) == 1


def test_a_job_that_cannot_be_captured_says_why() -> None:
    explanation = explain(request(policy="none", uncaptured="the model reads a value"), {}, SLOW, ROOMY)
    text = "\n".join(render(explanation))
    assert "not captured: the model reads a value" in text
    assert "not known before it runs" in text
    assert "Time" not in text


@pytest.mark.parametrize(
    ("by", "column", "line"),
    [
        ("random", None, "Split       random, by a hash of each row"),
        ("time", "at", 'Split       by time: rows validate from 2024-01-01T00:00:00 on (column "at")'),
        ("group", "shop", 'Split       by group: all rows of a group are on one side (column "shop")'),
        ("query", None, "Split       the rows of the validation query validate"),
    ],
)
def test_text_says_how_rows_are_divided_and_what_is_wrong_with_them(
    net: Trace, by: str, column: str | None, line: str
) -> None:
    split = {"by": by, "column": column, "threshold": "2024-01-01T00:00:00"}
    text = render(explained(net, split=split, warnings=('column "a" is constant', "no time")))
    assert text[2:5] == [f"  {line}", '  Warning     column "a" is constant', "  Warning     no time"]
    assert not any("Split" in line for line in render(explained(net, split=split, validation_rows=0)))
    assert numbers(net, split=split)["split"] == split


def test_text_warns_of_what_is_not_known(net: Trace) -> None:
    text = "\n".join(render(explained(net, approximate="cuda:0 is not there", workspaces=False, calibrated=True)))
    assert "approximate: cuda:0 is not there" in text
    assert "workspaces" in text
    assert "predicted by calibrated models" in text


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 kB"),
        (1536 * 1024, "1.5 MB"),
        (MB * 1023.99, "1.0 GB"),
        (3 << 50, "3072.0 TB"),
    ],
)
def test_sizes_are_written_as_memory_budget_takes_them(nbytes: int, text: str) -> None:
    assert size(nbytes) == text


def test_what_is_needed_is_not_rounded_down() -> None:
    assert size(100 * MB + 1) == "100.0 MB"
    assert size(100 * MB + 1, up=True) == "100.1 MB"
    assert size(100 * MB, up=True) == "100.0 MB"


@pytest.mark.parametrize(
    ("us", "text"), [(5, "0.01 ms"), (1234, "1.23 ms"), (123_456, "123.5 ms"), (12_345_678, "12.35 s")]
)
def test_durations_have_three_digits_or_more(us: float, text: str) -> None:
    assert duration(us) == text
