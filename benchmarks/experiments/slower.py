"""How much slower operators have to be for TENSILE's algorithm to save as much as the paper reports.

It plans no waiting, so what it saves depends on the time that the link has while operators run. The paper's platform
synchronises after each operator (TENSILE, section V-A), so that its operators take longer while its link is as fast.
Each row is a network whose operators take a multiple of the roofline's latencies, as the paper's policy plans for it:
one lane, no budget, no early updates. `enough` is the smallest multiple at which it saves the paper's share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from benchmarks.checks import Check
from benchmarks.command import Row
from benchmarks.experiments.networks import PAPER, Network, named
from benchmarks.experiments.paper import PUBLISHED
from benchmarks.together.simulated import slowed
from pg_tensile.planning.device.profile import RTX_A6000, DeviceProfile
from pg_tensile.planning.plan.memory import footprint
from pg_tensile.planning.policies.tensile import rounds
from pg_tensile.planning.trace.trace import Trace
from pg_tensile.tools.bench.simulated import captured, with_estimates
from pg_tensile.tools.cli.bench import parse

BATCH = 16
TIMES = (1, 2, 3, 5, 10)
MOST, PRECISION = 256.0, 0.02  # of `enough`


def saved_share(trace: Trace, profile: DeviceProfile) -> float:
    """Return the share of the peak that the paper's policy saves where it may cost nothing."""
    plan = rounds.plan({0: trace}, profile, None, lanes=1)[0]
    return 1 - footprint(trace, plan).peak_bytes / footprint(trace).peak_bytes


def smallest(reaches: Callable[[float], bool], most: float = MOST, precision: float = PRECISION) -> float | None:
    """Return the smallest number from 1 to `most` that reaches, at most `precision` of it too large; None if none does.

    Numbers above one that reaches are taken to reach, too.
    """
    low = high = 1.0
    while not reaches(high):
        if high >= most:
            return None
        low, high = high, min(2 * high, most)
    while high - low > precision * high:
        middle = (low + high) / 2
        low, high = (low, middle) if reaches(middle) else (middle, high)
    return high


def rows_of(network: Network, batch: int, profile: DeviceProfile, papers: float) -> Iterator[Row]:
    """Yield a row for each of TIMES. `papers`: the share of the peak that the paper's TENSILE saves."""
    trace = with_estimates(captured(parse(["bench", *network.arguments(batch)])), profile).vanilla.trace
    saved = {times: saved_share(slowed(trace, times), profile) for times in TIMES}
    enough = smallest(lambda times: saved_share(slowed(trace, times), profile) >= papers)
    published = PUBLISHED.get(("table2", network.title, "tensile"))
    for times, share in saved.items():
        yield {
            "experiment": "slower",
            "case": network.title,
            "times": times,
            "msr": share,
            "papers_msr": papers,
            "enough": enough,
            "step_ms": float(trace.latency_us.sum()) / 1e3,
            "papers_step_ms": None if published is None or not published.vanilla_s else 1e3 * published.vanilla_s,
        }


def checks(rows: Sequence[Row]) -> list[Check]:
    """Check that slower operators never save less."""
    checked = []
    for case in dict.fromkeys(row["case"] for row in rows):
        shares = [row["msr"] for row in rows if row["case"] == case]
        least = min(after - before for before, after in pairwise(shares))
        checked.append(Check("slower", f"{case}: saved more", f"{least:+.1%}", "≥ 0", least >= 0))
    return checked


TITLES = [network.title for network in PAPER]


def measure(title: str) -> Iterator[Row]:
    """Yield the rows of a network."""
    saved = PUBLISHED["table3", title, "tensile"].msr
    assert saved is not None
    for row in rows_of(named(PAPER, title), BATCH, RTX_A6000, saved):
        yield {"experiment": "slower"} | row
