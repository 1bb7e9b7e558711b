"""AccUDNN's table 1, simulated: the largest batch that 12 GB hold at (nearly) the speed of unlimited memory.

The paper's batch is the largest at which its plan does not stall; here it is the largest at which a step takes at most
COST times as long as without a plan and without a limit. Policies: `none`, which is our executor without a plan, where
the paper has Caffe; the paper's own (`accudnn`), and `joint`, all on the same traces (planning/batchsize/traces.py),
with SGD and momentum. Latencies are the roofline's on the profile of the paper's GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from benchmarks.checks import Check
from benchmarks.command import Row
from benchmarks.experiments.gpus import M40
from benchmarks.experiments.networks import ALEXNET, CV, GOOGLENET, RESNET50, VGG16, Network, named
from pg_tensile.errors import BudgetError
from pg_tensile.planning.batchsize.traces import BatchTraces
from pg_tensile.planning.device.profile import GB
from pg_tensile.planning.latency import roofline
from pg_tensile.planning.plan.memory import footprint
from pg_tensile.planning.policies import named_policy
from pg_tensile.planning.trace.trace import Trace
from pg_tensile.tools.bench.planned import predicted
from pg_tensile.tools.bench.simulated import captured
from pg_tensile.tools.cli.bench import parse

BUDGET_BYTES = 12 * GB
COST = 1.02
POLICIES = ("none", "accudnn", "joint")
MOST, GRAIN = 4096, 0.02  # rows; relative distance below which nothing is tried


class Published(NamedTuple):
    """A row of the paper's table 1: batches, and images per second."""

    batch: int
    rate: float
    caffe_batch: int
    caffe_rate: float


def resnet(depth: int) -> Network:
    return RESNET50._replace(title=f"ResNet-{depth}", model=f"{CV}.resnet:resnet{depth}")


TABLE = {
    ALEXNET: Published(1032, 853, 848, 865),
    GOOGLENET: Published(286, 245, 150, 263),
    VGG16: Published(192, 50, 80, 51),
    resnet(34): Published(276, 99, 91, 99),
    RESNET50: Published(112, 66, 33, 66),
    resnet(101): Published(74, 34, 20, 29),
    resnet(152): Published(54, 24, 13, 19),
}


def largest(holds: Callable[[int], bool], least: int = 1, most: int = MOST, grain: float = GRAIN) -> int:
    """Return the largest number from `least` to `most` that holds, at most `grain` of it too small.

    0 if `least` does not hold. Numbers between it and one that holds are taken to hold, too.
    """
    if not holds(least):
        return 0
    low, high = least, 2 * least
    while high <= most and holds(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > max(1, grain * low):
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


class Bed:
    """A network's steps of all batch sizes."""

    def __init__(self, network: Network) -> None:
        def capture(size: int) -> Trace:
            return captured(parse(["bench", *network.arguments(size), "--optimizer", "momentum"])).vanilla.trace

        self._traces = BatchTraces(capture)

    def us(self, policy: str, size: int) -> float | None:
        """Return the µs of a step within the budget; None if the batch does not fit, or costs more than COST."""
        trace = roofline.timed(self._traces.trace_at(size), M40)
        vanilla_us = float(trace.latency_us.sum())
        try:
            plan = named_policy(policy)({0: trace}, M40, BUDGET_BYTES)[0]
        except BudgetError:
            return None
        if footprint(trace, plan).device_peak_bytes > BUDGET_BYTES:
            return None
        us = predicted(trace, plan, M40).iteration_us
        return us if us <= COST * vanilla_us else None

    def fits(self, policy: str, size: int) -> bool:
        return self.us(policy, size) is not None


def rows_of(network: Network, published: Published) -> Iterator[Row]:
    """Yield a row for each policy."""
    bed = Bed(network)
    # A small batch's copies may take longer than its operators, so plans are tried from vanilla's largest batch on.
    batches = {"none": largest(partial(bed.fits, "none"))}
    for policy in POLICIES[1:]:
        batches[policy] = largest(partial(bed.fits, policy), max(batches["none"], 1)) or largest(
            partial(bed.fits, policy)
        )
    for policy, batch in batches.items():
        us = bed.us(policy, batch) if batch else None
        of_paper = {
            "none": (published.caffe_batch, published.caffe_rate),
            "accudnn": (published.batch, published.rate),
        }
        papers_batch, papers_rate = of_paper.get(policy, (None, None))
        yield {
            "experiment": "accudnn",
            "case": network.title,
            "policy": policy,
            "batch": batch,
            "rate": None if us is None else batch / us * 1e6,
            "papers_batch": papers_batch,
            "papers_rate": papers_rate,
            "caffe_batch": published.caffe_batch,
            "none_batch": batches["none"],
            "error": None,
        }


def checks(rows: Sequence[Row]) -> list[Check]:
    """Check that plans allow larger batches, `joint` the largest."""
    checked = []
    for case in dict.fromkeys(row["case"] for row in rows):
        batch = {row["policy"]: row["batch"] for row in rows if row["case"] == case}
        for more, less in (("accudnn", "none"), ("joint", "accudnn")):
            asked = f"≥ {batch[less]} ({less})"
            checked.append(Check("accudnn", f"{case}: {more}", f"{batch[more]}", asked, batch[more] >= batch[less]))
    return checked


TITLES = [network.title for network in TABLE]


def measure(title: str) -> Iterator[Row]:
    """Yield the rows of a network."""
    network = named(TABLE, title)
    return rows_of(network, TABLE[network])
