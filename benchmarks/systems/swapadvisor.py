"""Models eight times the budget (SwapAdvisor, section 6.2), and whether plans rank as they are simulated (Figure 11).

A wide ResNet, and a deep LSTM unrolled over time, whose layers share their weights over the sequence: within an eighth
of the vanilla device peak, or the minimum of any plan, if that is more. `lru`, `joint` and `swapadvisor` (the policy,
and a search with more time) are executed in turns with vanilla on the host device, whose link keeps an RTX A6000's
balance. A row is a plain dictionary: `ideal` is vanilla's time over the policy's.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch

from benchmarks.checks import Check, Timing, fidelity_checks, simulator_checks
from benchmarks.command import Row
from benchmarks.experiments.networks import CV, SMALL_IMAGE, SMALL_RESNET, TEN, Network
from pg_tensile.errors import TensileError
from pg_tensile.execution.runtime.host import HostDevice
from pg_tensile.planning.building_blocks.shares import least_bytes
from pg_tensile.planning.device.profile import DeviceProfile
from pg_tensile.planning.plan.memory import footprint
from pg_tensile.planning.plan.plan import NO_EVENTS, Plan
from pg_tensile.planning.policies import POLICIES
from pg_tensile.planning.policies.swapadvisor.individuals import Breeder
from pg_tensile.planning.policies.swapadvisor.plan_search import search_plan
from pg_tensile.planning.simulator.simulator import SimulatedJob, simulate
from pg_tensile.planning.trace.trace import Trace
from pg_tensile.tools.bench.contenders import PlanStepper, Turn, difference, take_turn
from pg_tensile.tools.bench.measured import MeasuredBench
from pg_tensile.tools.bench.options import BenchOptions
from pg_tensile.tools.bench.progress import Progress
from pg_tensile.tools.bench.run import default_threads
from pg_tensile.tools.bench.workload import Batch
from pg_tensile.tools.cli.bench import parse

PART = 8  # of the vanilla device peak
FASTER = 2.0  # than lru
BALANCE_STEPS = 9  # of vanilla, whose median sets the link, because single steps are disturbed now and then
OF_IDEAL = 0.9
RANKED, IN_RANK = 20, 19  # plans
PARTS = 6  # budgets that the ranked plans are for
NOISE = 0.02  # relative: times that differ by less count as ordered either way
SECTION = "SwapAdvisor"


def networks(quick: bool) -> list[Network]:
    width, layers, times, batch = (32, 3, 4, 4) if quick else (512, 8, 16, 64)
    lstm, inputs = "benchmarks.experiments.recurrent:UnrolledLSTM", (f"float32:{times}x{width}",)
    unrolled = Network("unrolled LSTM", lstm, inputs, TEN, batch, json.dumps({"width": width, "layers": layers}))
    if quick:
        return [unrolled, SMALL_RESNET._replace(title="wide ResNet")]
    kwargs = json.dumps({"blocks": 76, "width_factor": 6, "num_classes": 10})
    return [unrolled, Network("wide ResNet", f"{CV}.wrn_cifar:get_wrn_cifar", SMALL_IMAGE, TEN, 16, kwargs)]


# ---- measuring ----


class Bed:
    """A network on this machine: its trace with measured operators, the scaled link, and vanilla's results."""

    def __init__(self, network: Network, steps: int) -> None:
        self.title = network.title
        step = ("--optimizer", "momentum", "--policies", "none")
        self.options: BenchOptions = parse(["bench", *network.arguments(), *step])
        torch.set_num_threads(default_threads("host"))
        with Progress() as progress:
            self.session = MeasuredBench(self.options, progress)
            self.session.calibrate()
            self.captured = self.session.workload.vanilla
            self.batches = self.session.workload.batches(1 + steps)
            self.profile: DeviceProfile = self.session.profile
            vanilla = self.turn(NO_EVENTS, None, self.session.workload.batches(1) * (1 + BALANCE_STEPS))
            vanilla_ms = statistics.median(vanilla.step_ms)
            self.session.set_link(vanilla_ms)
        self.profile = self.session.profile
        # Operators timed one by one take longer than together, because timing takes time, too.
        us = self.captured.trace.latency_us
        self.trace: Trace = self.captured.trace.with_latencies(us * (vanilla_ms * 1e3 / us.sum()))
        self.vanilla_bytes = footprint(self.trace).device_peak_bytes
        self.budget = max(self.vanilla_bytes // PART, least_bytes(self.trace))

    def turn(self, plan: Plan, budget: int | None, batches: Sequence[Batch] = ()) -> Turn:
        """Take a turn from the initial weights; the first step does not count."""
        device = HostDevice(self.profile, budget)
        try:
            stepper = PlanStepper(self.session.workload, self.captured, device, plan)
            try:
                return take_turn(stepper, batches or self.batches, 1, self.options.seed)
            finally:
                stepper.close()
        finally:
            device.close()

    def simulated_us(self, plan: Plan) -> float:
        return simulate([SimulatedJob(self.trace, plan)], self.profile)[0].iteration_us


def run(quick: bool = False, seconds: float = 60.0, rounds: int = 3, only: str = "", part: str = "") -> Iterator[Row]:
    """Yield each policy's row and the ranking's for every case; `part`: only "policies" or only "ranking"."""
    for network in networks(quick):
        if only in network.title:
            bed = Bed(network, 1 if quick else 2)
            if part != "ranking":
                yield from compare(bed, 2.0 if quick else seconds, 1 if quick else rounds)
            if part != "policies":
                yield rank(bed, 6 if quick else RANKED)


def compare(bed: Bed, seconds: float, rounds: int) -> Iterator[Row]:
    """Yield the rows of vanilla without a budget, and of the policies within it."""
    planned = {name: attempt(make) for name, make in makers(bed, seconds).items()}
    turns: dict[str, list[Turn]] = {name: [] for name in planned}
    for number in range(rounds):
        order = list(planned.items())
        for name, (plan, _, error) in reversed(order) if number % 2 else order:
            if error is None:
                turns[name].append(bed.turn(plan, None if name == "none" else bed.budget))
    vanilla_ms = step_ms(turns["none"])
    for name, (plan, planning_s, error) in planned.items():
        row: Row = {
            "case": bed.title, "policy": name, "budget_bytes": bed.budget, "vanilla_bytes": bed.vanilla_bytes,
            "operators": bed.trace.operator_count, "link_gbps": bed.profile.out_bytes_per_s / 1e9, "error": error,
        }  # fmt: skip
        if error is None:
            ms = step_ms(turns[name])
            differs = [difference(turns["none"][0], turn) for turn in turns[name]]
            row |= {
                "step_ms": ms, "simulated_ms": bed.simulated_us(plan) / 1e3, "ideal": vanilla_ms / ms,
                "planning_s": planning_s, "device_peak_bytes": footprint(bed.trace, plan).device_peak_bytes,
                "bit_identical": not any(differs),
            }  # fmt: skip
        yield row


def makers(bed: Bed, seconds: float) -> dict[str, Callable[[], Plan]]:
    def policy(name: str) -> Callable[[], Plan]:
        return lambda: POLICIES[name]({0: bed.trace}, bed.profile, bed.budget)[0]

    def searched() -> Plan:
        joint, _, error = attempt(policy("joint"))
        start = None if error else joint
        return search_plan(bed.trace, bed.profile, bed.budget, seconds=seconds, start=start).plan

    policies = {name: policy(name) for name in ("lru", "joint", "swapadvisor")}
    return {"none": lambda: NO_EVENTS, **policies, "search": searched}


def attempt(make: Callable[[], Plan]) -> tuple[Plan, float, str | None]:
    """Return a plan, the seconds of planning, and the error if there is no plan."""
    began = time.perf_counter()
    try:
        return make(), time.perf_counter() - began, None
    except TensileError as error:
        return NO_EVENTS, time.perf_counter() - began, error.message


def step_ms(turns: Iterable[Turn]) -> float:
    return statistics.median(statistics.median(turn.step_ms) for turn in turns)


# ---- ranking ----


def rank(bed: Bed, count: int) -> Row:
    """Simulate and execute plans from good to bad."""
    plans = spread_plans(bed, count)
    simulated = [bed.simulated_us(plan) / 1e3 for plan in plans]
    measured = [step_ms([bed.turn(plan, bed.budget)]) for plan in plans]
    return {
        "case": bed.title, "policy": "ranking", "plans": len(plans), "in_rank": in_rank(simulated, measured),
        "simulated_ms": simulated, "measured_ms": measured, "error": None,
    }  # fmt: skip


def spread_plans(bed: Bed, count: int) -> list[Plan]:
    """Return plans as far apart in time as possible.

    They are lru's and individuals of first generations, some for less than the budget.
    """
    plans = [POLICIES["lru"]({0: bed.trace}, bed.profile, bed.budget)[0]]
    for budget in np.linspace(bed.budget, least_bytes(bed.trace), PARTS, endpoint=False):
        breeder = Breeder(bed.trace, bed.profile, int(budget))
        bred = [breeder.make(individual) for individual in breeder.first(count, 1, None)]
        plans += [individual.plan for individual in bred if individual is not None]
    distinct = list(dict.fromkeys(plans))
    timed = sorted((bed.simulated_us(plan), index) for index, plan in enumerate(distinct))
    levels = np.geomspace(timed[0][0], timed[-1][0], count)
    chosen: dict[int, None] = {}
    for level in levels:
        unchosen = [pair for pair in timed if pair[1] not in chosen]
        if unchosen:
            chosen[min(unchosen, key=lambda pair: abs(pair[0] - level))[1]] = None
    return [distinct[index] for index in chosen]


def in_rank(simulated: Sequence[float], measured: Sequence[float]) -> int:
    """Return the largest number of plans that are in the same order by both times."""
    times = [measured[index] for index in np.argsort(simulated)]
    longest: list[int] = []
    for index, ms in enumerate(times):
        before = [longest[earlier] for earlier in range(index) if times[earlier] <= ms * (1 + NOISE)]
        longest.append(1 + max(before, default=0))
    return max(longest, default=0)


# ---- checks ----


def checks(rows: Sequence[Row]) -> list[Check]:
    checked = [*simulator_checks(SECTION, timings(rows))]
    for title in dict.fromkeys(row["case"] for row in rows):
        of = {row["policy"]: row for row in rows if row["case"] == title}
        for name, row in of.items():
            if name == "ranking":
                wanted = round(row["plans"] * IN_RANK / RANKED)
                text = f"{row['in_rank']} of {row['plans']}"
                checked.append(
                    Check(SECTION, f"{title}: plans ranked as simulated", text, f"{wanted}", row["in_rank"] >= wanted)
                )
            elif row["error"] is None:
                checked.append(
                    Check(
                        SECTION,
                        f"{title}: {name}: results",
                        str(row["bit_identical"]),
                        "the same bits",
                        row["bit_identical"],
                    )
                )
            for timing in timings([row]):
                checked += fidelity_checks(SECTION, *timing)
        if "none" in of:
            checked += _speed(title, of)
    return checked


def timings(rows: Iterable[Row]) -> Iterator[Timing]:
    """Yield the times of every policy's step, and of each ranked plan."""
    for row in rows:
        if row["error"] is not None:
            continue
        if row["policy"] == "ranking":
            pairs = zip(row["simulated_ms"], row["measured_ms"], strict=True)
            for number, times in enumerate(pairs, 1):
                yield Timing(f"{row['case']}: ranked plan {number}", *times)
        else:
            yield Timing(f"{row['case']}: {row['policy']}", row["simulated_ms"], row["step_ms"])


def _speed(title: str, of: dict[str, Row]) -> Iterator[Check]:
    best, lru = of.get("search", {}), of.get("lru", {})
    if best.get("error") is not None or not best:
        yield Check(SECTION, f"{title}: search", str(best.get("error")), "a plan", False)
        return
    if lru and lru["error"] is None:
        times = lru["step_ms"] / best["step_ms"]
        yield Check(SECTION, f"{title}: faster than lru", f"{times:.2f}×", f"{FASTER}×", times >= FASTER)
    yield Check(SECTION, f"{title}: of ideal", f"{best['ideal']:.0%}", f"{OF_IDEAL:.0%}", best["ideal"] >= OF_IDEAL)
