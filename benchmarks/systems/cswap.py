"""Compressed swaps on the host device (CSWAP, section V): no compression, compression where it pays, and always.

Networks train with vDNN's plans and with `joint`'s, each without compression, with `auto` and with ZVC for every tensor
that it makes smaller. The paper's vDNN moves the inputs of convolutions, vDNN_conv. The link keeps an RTX A6000's
balance, at which a step hardly waits for the transfers of vDNN_conv, so vDNN_conv has a fourth of that link. A row is a
plain dictionary; ratios are over the same policy without compression.

`oracle_ratio` is the ratio of swap times if every tensor had the codec that makes it smallest and coding took no time
(the paper's Orac): no compression of the transfers of the plan without compression does better.

`decision_accuracy` is the share of the tensors swapped by the plan without compression for which the cost model and the
measured times of their transfers, raw and coded, agree about compressing them (V-C); if these times are equal within
TIE, they agree with either decision.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from benchmarks.checks import Check, Timing, simulator_checks
from benchmarks.command import Row
from benchmarks.experiments.networks import ALEXNET, INCEPTION3, RESNET50, SQUEEZENET, TEN, TINY, VGG16, Network
from pg_tensile.errors import TensileError
from pg_tensile.execution.runtime.host import HostDevice
from pg_tensile.execution.runtime.record import IterationRecord, Transfer
from pg_tensile.planning.building_blocks.keep import least_bytes
from pg_tensile.planning.compression.codec import Codec
from pg_tensile.planning.compression.coding import Coding
from pg_tensile.planning.compression.sparsity import coded_bytes
from pg_tensile.planning.device.profile import DeviceProfile, Direction
from pg_tensile.planning.plan.access_sequence import AccessSequence
from pg_tensile.planning.plan.codecs import with_codecs
from pg_tensile.planning.plan.memory import footprint
from pg_tensile.planning.plan.plan import NO_EVENTS, EventKind, Plan
from pg_tensile.planning.policies import POLICIES
from pg_tensile.planning.policies.compression.advisor import coding_with, word_bytes
from pg_tensile.planning.policies.compression.cost import Window, coded_cost_us, plain_cost_us, swap_cost_us, windows
from pg_tensile.planning.simulator.simulator import SimulatedJob, simulate
from pg_tensile.planning.trace.trace import Trace
from pg_tensile.tools.bench.compression import STEPS as SPARSITY_STEPS
from pg_tensile.tools.bench.compression import Sparsity, measure_sparsity, plan_compressed
from pg_tensile.tools.bench.contenders import PlanStepper, Turn, difference, take_turn
from pg_tensile.tools.bench.measured import MeasuredBench
from pg_tensile.tools.bench.planned import codecs_of
from pg_tensile.tools.bench.progress import Progress
from pg_tensile.tools.bench.run import default_threads
from pg_tensile.tools.cli.bench import parse

CONV_LINK = 0.25  # of an RTX A6000's balance
COMPRESSIONS = ("none", "auto", "zvc")
ROOM = 0.3  # joint's budget, from the least peak (0) to the vanilla peak (1)
SLOWER = 1.02  # auto over none
SWAP_TIME = 0.7  # auto over none, where activations are sparse
DECISIONS = 0.94
TIE = 0.02  # of the raw transfers' time: if compression saves or costs less, both decisions are right
MODEL_ERROR = 0.05
STEPS = 2  # with each plan, after the transition to it
CODED = "coded"  # the plan made without compression, executed with every tensor coded
SECTION = "CSWAP"
SPARSE = ("AlexNet", "VGG-16", "SqueezeNet", "plain ReLU net")


class Setting(NamedTuple):
    """A policy, and its share of the link."""

    policy: str
    options: Mapping[str, Any]
    link: float = 1.0


SETTINGS = {
    "vdnn_all": Setting("vdnn", {"which": "all"}),
    "vdnn_conv": Setting("vdnn", {"which": "conv"}, CONV_LINK),
    "joint": Setting("joint", {}),
}

Way = tuple[int, Direction]  # a tensor's transfer


def networks(quick: bool) -> list[tuple[Network, int]]:
    """Return the networks and their batches, with images small enough for two cores."""
    if quick:
        return [(TINY[3]._replace(title="plain ReLU net"), 128)]
    larger = ("float32:3x128x128",)
    plain = Network(
        "plain ReLU net", "benchmarks.experiments.tiny:cnn", larger, TEN, kwargs='{"channels": 32, "layers": 20}'
    )
    return [(ALEXNET, 16), (VGG16, 1), (SQUEEZENET, 8), (plain, 4), (RESNET50, 2), (INCEPTION3, 2)]


class Prepared(NamedTuple):
    """A network on this machine."""

    title: str
    session: MeasuredBench
    trace: Trace  # with measured operators
    profile: DeviceProfile  # with the link
    sparsity: Sparsity


def prepared(network: Network, batch: int, quick: bool) -> Prepared:
    options = parse(["bench", *network.arguments(batch), "--optimizer", "momentum", "--policies", "none"])
    torch.set_num_threads(default_threads("host"))
    with Progress() as progress:
        session = MeasuredBench(options, progress)
        vanilla_ms = session.calibrate()
        captured = session.workload.vanilla
        sparsity = measure_sparsity(session.workload, captured, session.free, 1.0 if quick else 60.0)
        session.set_link(vanilla_ms)
    return Prepared(network.title, session, captured.trace, session.profile, sparsity)


def run(quick: bool = False, rounds: int = 3, only: str = "") -> Iterator[Row]:
    """Compare every network with each policy."""
    for network, batch in networks(quick):
        if only in network.title:
            case = prepared(network, batch, quick)
            for name in SETTINGS:
                yield from compare(case, name, 1 if quick else rounds)


def compare(case: Prepared, name: str, rounds: int) -> Iterator[Row]:
    """Yield a row for each compression with one of SETTINGS."""
    policy, options, share = SETTINGS[name]
    case = case._replace(profile=case.profile.with_share(share))
    least, vanilla = least_bytes(case.trace), footprint(case.trace).device_peak_bytes
    budget = None if policy == "vdnn" else int(least + ROOM * (vanilla - least))

    def make(trace: Trace) -> Plan:
        return POLICIES[policy]({0: trace}, case.profile, budget, **options)[0]

    common: Row = {
        "case": case.title, "policy": name, "budget_bytes": budget, "vanilla_bytes": vanilla,
        "link_gbps": case.profile.out_bytes_per_s / 1e9, "model_error": case.sparsity.error,
    }  # fmt: skip
    try:
        plain = make(case.trace)
        packed = {how: plan_compressed(make, case.trace, case.profile, how, case.sparsity) for how in ("auto", "zvc")}
    except TensileError as error:
        yield {**common, "compression": "none", "error": error.message}
        return
    codings: dict[str, Coding | None] = {"none": None, **{name: coding for name, (_, coding) in packed.items()}}
    plans = {"none": plain, **{name: plan for name, (plan, _) in packed.items()}}
    base = turn(case, NO_EVENTS, None)
    turns = {name: turn(case, plan, budget) for name, plan in plans.items()}
    coding = coding_with(Codec.ZVC, case.trace, case.sparsity.statistics, case.sparsity.times)
    coded = case.trace.with_coding(coding)
    records = recorded(case, {**plans, CODED: with_codecs(coded, plain)}, rounds)
    accuracy = decision_accuracy(case, plain, coded, records["none"], records.pop(CODED))
    measured = {name: measures(own) for name, own in records.items()}
    oracle = oracle_ratio(case.trace, case.profile, plain, case.sparsity)
    for compression, plan in plans.items():
        (timeline,) = simulate([SimulatedJob(case.trace.with_coding(codings[compression]), plan)], case.profile)
        mine = measured[compression]
        ratios = {f"{what}_ratio": ratio(mine[what], measured["none"][what]) for what in mine}
        yield {
            **common, "compression": compression, "error": None, **mine, **ratios, **accuracy,
            "oracle_ratio": oracle,
            "vanilla_ms": statistics.median(base.step_ms), "simulated_ms": timeline.iteration_us / 1e3,
            "codecs": codecs_of(plan), "bit_identical": difference(base, turns[compression]) is None,
        }  # fmt: skip


def turn(case: Prepared, plan: Plan, budget: int | None) -> Turn:
    """Take some steps from the initial weights, whose results are compared to the bit."""
    workload = case.session.workload
    with device_of(case, budget) as device:
        stepper = PlanStepper(workload, workload.vanilla, device, plan)
        try:
            return take_turn(stepper, workload.batches(3), 1, case.session.options.seed)
        finally:
            stepper.close()


def recorded(case: Prepared, plans: Mapping[str, Plan], rounds: int) -> dict[str, list[IterationRecord]]:
    """Return the records of some steps of each plan, after as many steps as before sparsity was measured.

    One executor alternates between the plans, for a transition and STEPS more steps each, so that other load of the
    machine affects all of them.
    """
    workload = case.session.workload
    records: dict[str, list[IterationRecord]] = {name: [] for name in plans}
    with device_of(case, None) as device:
        stepper = PlanStepper(workload, workload.vanilla, device, NO_EVENTS)
        try:
            executor = stepper.executor
            for batch in workload.batches(SPARSITY_STEPS):
                stepper.step(batch)
            executor.recording = True
            first, *batches = workload.batches(1 + STEPS)
            for number in range(rounds):
                for name in reversed([*plans]) if number % 2 else plans:
                    executor.change_plan(plans[name])
                    stepper.step(first)
                    for batch in batches:
                        stepper.step(batch)
                        assert executor.record is not None
                        records[name].append(executor.record)
        finally:
            stepper.close()
    return records


@contextmanager
def device_of(case: Prepared, budget: int | None) -> Iterator[HostDevice]:
    device = HostDevice(case.profile, budget)
    try:
        yield device
    finally:
        device.close()


def measures(records: Sequence[IterationRecord]) -> dict[str, float]:
    """Return medians; `swap_ms` is the time of all transfers, hidden or not."""
    return {
        "step_ms": statistics.median(record.step_us / 1e3 for record in records),
        "swap_ms": statistics.median(sum(map(duration_us, record.transfers)) / 1e3 for record in records),
        "stall_ms": statistics.median(record.stall_us / 1e3 for record in records),
        "moved_bytes": statistics.median(record.bytes_out + record.bytes_in for record in records),
        "raw_bytes": statistics.median(record.raw_bytes_out + record.raw_bytes_in for record in records),
    }


def duration_us(transfer: Transfer) -> float:
    return transfer.end_us - transfer.start_us


def oracle_ratio(trace: Trace, profile: DeviceProfile, plan: Plan, sparsity: Sparsity) -> float | None:
    """Return the link's time for the plan's transfers with coding that takes no time, over that without compression."""
    smallest, raw = 0.0, 0.0
    kinds = plan.rows["kind"].tolist()
    for event, tensor, size in zip(*(column.tolist() for column in AccessSequence(trace, plan).copies), strict=True):
        direction = Direction.OUT if kinds[event] == EventKind.SWAP_OUT else Direction.IN
        statistics, width = sparsity.statistics.get(tensor), word_bytes(trace.tensor_dtype[tensor])
        sizes = [coded_bytes(codec, size, width, statistics) for codec in sparsity.times.codecs] if statistics else []
        smallest += profile.transfer_us(min([size, *sizes]), direction)
        raw += profile.transfer_us(size, direction)
    return ratio(smallest, raw)


def ratio(value: float, reference: float) -> float | None:
    return value / reference if reference else None


# ---- decisions ----


def decision_accuracy(
    case: Prepared, plan: Plan, coded: Trace, without: Sequence[IterationRecord], packed: Sequence[IterationRecord]
) -> Row:
    """Compare the cost model's decisions with the measured gains.

    They concern the tensors that the plan swaps and `coded` makes smaller. `without` and `packed` are records of the
    plan without and with coding.
    """
    coding = coded.coding
    assert coding is not None
    (timeline,) = simulate([SimulatedJob(case.trace, plan)], case.profile)
    swaps: dict[int, list[Window]] = {}
    for window in windows(case.trace, plan, timeline, case.profile):
        if coding.codec[window.tensor]:
            swaps.setdefault(window.tensor, []).append(window)
    raw_transfers, packed_transfers = transfers_of(without), transfers_of(packed)
    gains = {tensor: gain(swapped, raw_transfers, packed_transfers, case.profile) for tensor, swapped in swaps.items()}
    ties = [tensor for tensor in swaps if abs(gains[tensor]) < TIE]
    compressed = {tensor for tensor, swapped in swaps.items() if decided(coded, swapped, case.profile)}
    right = [tensor for tensor in swaps if (tensor in compressed) == (gains[tensor] > 0)]
    accuracy = ratio(len({*ties, *right}), len(swaps))
    return {"decisions": len(swaps), "ties": len(ties), "decision_accuracy": accuracy}


def transfers_of(records: Sequence[IterationRecord]) -> dict[Way, Transfer]:
    """Return the transfer of median duration for each way."""
    seen: dict[Way, list[Transfer]] = {}
    for record in records:
        for transfer in record.transfers:
            seen.setdefault((transfer.tensor, transfer.direction), []).append(transfer)
    return {way: sorted(transfers, key=duration_us)[len(transfers) // 2] for way, transfers in seen.items()}


def decided(coded: Trace, swaps: Sequence[Window], profile: DeviceProfile) -> bool:
    """Return whether the cost model decides to compress the tensor."""
    with_codec_us = sum(swap_cost_us(coded, window, Codec.ZVC, profile) for window in swaps)
    return with_codec_us < sum(swap_cost_us(coded, window, 0, profile) for window in swaps)


def gain(
    swaps: Sequence[Window], raw: Mapping[Way, Transfer], packed: Mapping[Way, Transfer], profile: DeviceProfile
) -> float:
    """Return the saving of compression by the measured transfers, as a share of their raw time."""
    with_codec = without = raw_us = 0.0
    for window in swaps:
        way = window.tensor, window.direction
        if way not in raw or way not in packed:
            continue
        link_us = profile.transfer_us(packed[way].bytes, window.direction)
        coding_us = max(0.0, duration_us(packed[way]) - link_us * window.stretch)
        with_codec += coded_cost_us(coding_us, link_us * window.stretch, window.hidden_us)
        without += plain_cost_us(duration_us(raw[way]), window.hidden_us)
        raw_us += duration_us(raw[way])
    return (without - with_codec) / raw_us if raw_us else 0.0


# ---- checks ----


def checks(rows: Sequence[Row]) -> list[Check]:
    timings = [Timing(title_of(row), row["simulated_ms"], row["step_ms"]) for row in rows if row["error"] is None]
    checked = [*simulator_checks(SECTION, timings)]
    for row in rows:
        title = title_of(row)
        if row["error"] is not None:
            checked.append(Check(SECTION, title, row["error"], "a plan", False))
            continue
        same = row["bit_identical"]
        checked.append(Check(SECTION, f"{title}: results", "the same" if same else "others", "the same bits", same))
        if row["compression"] != "auto":
            continue
        checked.append(at_most(f"{title}: step over that without", row["step_ms_ratio"], SLOWER))
        checked.append(at_most(f"{title}: error of the codecs' times", row["model_error"], MODEL_ERROR))
        if row["case"] in SPARSE and row["policy"] != "joint":
            swaps = at_most(f"{title}: swap time over that without", row["swap_ms_ratio"], SWAP_TIME)
            checked.append(swaps._replace(found=f"{swaps.found} (Orac: {row['oracle_ratio']:.3f})"))
    return checked + [right_on_average(name, rows) for name in SETTINGS if decided_in(name, rows)]


def title_of(row: Row) -> str:
    return f"{row['case']}, {row['policy']}, {row['compression']}"


def decided_in(name: str, rows: Sequence[Row]) -> list[float]:
    """Return the decision accuracies of the networks with one of SETTINGS."""
    of = [row for row in rows if row["policy"] == name and row["compression"] == "auto" and row["error"] is None]
    return [row["decision_accuracy"] for row in of if row["decisions"]]


def right_on_average(name: str, rows: Sequence[Row]) -> Check:
    """Check the mean accuracy over the networks, as the paper reports it (Figure 11)."""
    share = statistics.mean(decided_in(name, rows))
    what = f"{name}: decisions that are right, mean of networks"
    return Check(SECTION, what, f"{share:.1%}", f"{DECISIONS:.0%}", share >= DECISIONS)


def at_most(what: str, value: float | None, limit: float) -> Check:
    return Check(SECTION, what, f"{value:.3f}" if value is not None else "–", f"≤ {limit}", (value or 0.0) <= limit)
