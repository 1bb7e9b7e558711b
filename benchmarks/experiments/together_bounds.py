"""Lower bounds on the time of several jobs within one budget, whatever the policy and however memory is divided.

For each job, `bounds.least_us` is computed for budgets m₁ < … < m_K, from the least that any plan needs to vanilla's
peak, with operators that take as many times as long as there are jobs, and the whole link. A plan with a device peak in
(m_k, m_k+1] is one for m_k+1 as well, so it takes at least what m_k+1 does: that step function b is valid for every
peak, also where nothing was computed, and other jobs on the link only make the job slower.

Jobs with peaks of M bytes together take at least the minimum of Σ b(pᵢ) over all divisions Σ pᵢ ≤ M. For every λ ≥ 0
that is at least Σ min_p (b(p) + λ·p) − λ·M (weak duality), where the minimum of a step is that at its lower end. The
largest over λ is the bound; with equal jobs it is the convex hull of b at an equal share. A job's time is the mean of
its iterations. As the linear program is the same in each of them, the mean of their solutions is one as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, pairwise
from typing import NamedTuple

import numpy as np

from benchmarks.checks import Check
from benchmarks.command import Row
from benchmarks.experiments.networks import PAPER, Network, named
from benchmarks.together.simulated import slowed
from pg_tensile.planning import bounds
from pg_tensile.planning.device.profile import RTX_A6000, DeviceProfile
from pg_tensile.planning.plan.memory import floor_bytes, footprint
from pg_tensile.planning.trace.trace import Trace
from pg_tensile.tools.bench.simulated import captured, with_estimates
from pg_tensile.tools.cli.bench import parse

BATCH = 16
JOBS = (2, 3, 4, 5)  # fig6's, and table4's
BUDGETS = 12  # of a job
SAVED = (0.4, 0.6, 0.8)  # of the device peak, in the table


class Curve(NamedTuple):
    """A job's step function: with a peak above above_bytes[k], up to the next, it takes at least least_us[k] µs.

    The last is the sum of latencies, for all larger peaks.
    """

    above_bytes: tuple[int, ...]
    least_us: tuple[float, ...]


def curve_of(trace: Trace, profile: DeviceProfile, budgets: int = BUDGETS) -> Curve:
    """Return the step function of a job with this trace."""
    floor, vanilla = floor_bytes(trace), footprint(trace).device_peak_bytes
    above = np.unique(np.linspace(floor, vanilla, budgets).astype(np.int64)).tolist()
    least = [bounds.least_us(trace, profile, budget) for budget in above[1:]]
    return Curve((floor - 1, *above[1:]), (*least, float(trace.latency_us.sum())))


def least_sum_us(curves: Sequence[Curve], total_bytes: int) -> float:
    """Return a lower bound, in µs, on the sum of the jobs' iterations if the sum of their peaks is `total_bytes`."""
    points = [list(zip(*curve, strict=True)) for curve in curves]
    slopes = {
        (us - later_us) / (later - nbytes)
        for listed in points
        for (nbytes, us), (later, later_us) in combinations(listed, 2)
    }
    # Between two slopes the dual is linear in the price, so its largest value is at one of them.
    return max(
        sum(min(us + price * nbytes for nbytes, us in listed) for listed in points) - price * total_bytes
        for price in {0.0, *(slope for slope in slopes if slope > 0)}
    )


def rows_of(
    network: Network, batch: int = BATCH, profile: DeviceProfile = RTX_A6000, together: Sequence[int] = JOBS
) -> Iterator[Row]:
    """Yield the curve of one of `together` jobs."""
    trace = with_estimates(captured(parse(["bench", *network.arguments(batch)])), profile).vanilla.trace
    for jobs in together:
        curve = curve_of(slowed(trace, jobs), profile)
        yield {
            "experiment": "bounds",
            "case": network.title,
            "jobs": jobs,
            "vanilla_bytes": footprint(trace).device_peak_bytes,
            "vanilla_us": jobs * float(trace.latency_us.sum()),
            **curve._asdict(),
        }


def least_eor(row: Row, curves: Mapping[tuple[str, int], Row], networks: Sequence[str]) -> float | None:
    """Return the bound for a row of `networks` at once and its memory; None if it was not computed for its graph.

    `curves`: the rows of this module, by network and jobs.
    """
    mine = [curves.get((network, len(networks))) for network in networks]
    if row.get("error") or row["early_update"] or len(networks) == 1:
        return None
    found = [curve for curve in mine if curve is not None]
    return eor_within(found, row["device_peak_bytes"]) if len(found) == len(networks) else None


def eor_within(rows: Sequence[Row], total_bytes: int) -> float:
    """Return the least EOR of the jobs with these curves if the sum of their peaks is `total_bytes`."""
    curves = [Curve(tuple(row["above_bytes"]), tuple(row["least_us"])) for row in rows]
    return least_sum_us(curves, total_bytes) / sum(row["vanilla_us"] for row in rows)


def table_eors(row: Row) -> list[float]:
    """Return the least EORs of as many jobs as the row has if they save SAVED."""
    total = row["jobs"] * row["vanilla_bytes"]
    return [eor_within([row] * row["jobs"], int((1 - share) * total)) for share in SAVED]


def checks(rows: Sequence[Row]) -> list[Check]:
    """Check that less memory never has a lower bound, and that no bound is above what takes no plan."""
    checked = []
    for row in rows:
        what, least = f"{row['case']}, {row['jobs']} jobs: bound", row["least_us"]
        rise = max(after - before for before, after in pairwise(least)) / row["vanilla_us"]
        checked.append(Check("bounds", f"{what}, with more memory", f"{rise:+.2%}", "≤ 0.1%", rise <= 1e-3))
    return checked


TITLES = [network.title for network in PAPER]


def measure(title: str) -> Iterator[Row]:
    """Yield the rows of a network."""
    return rows_of(named(PAPER, title))
