"""What a swap costs with and without compression (CSWAP, section IV-B, equations 1 to 4).

Both costs are what the iteration is longer for the swap: what of its transfers does not hide behind the compute, and
with compression what coding adds to them. The equations are the paper's but for two things that our executor does.
It codes a chunk while another one is on the link, so Time_c and Time_dc count as what they add to a transfer: all of
them for a tensor of one chunk. And the swaps of a lane queue: a transfer hides until its memory is needed, or until the
link is needed by those behind it, so that all who keep a late one waiting are to blame.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pg_tensile.planning.device.link import copy_us, moved_bytes
from pg_tensile.planning.device.profile import DeviceProfile, Direction
from pg_tensile.planning.plan.execution import AccessSequence, ActionKind
from pg_tensile.planning.plan.plan import Plan
from pg_tensile.planning.simulator.simulator import Timeline
from pg_tensile.planning.trace.trace import Trace

ARRIVING = (ActionKind.COPY_IN, ActionKind.PASSIVE_IN)


class Window(NamedTuple):
    """Where one transfer of a plan is: `hidden_us` is the compute that it can hide behind (Hidden_f of one that goes
    out, Hidden_b of one that comes in), `stretch` how much longer it takes for what the other lane moves."""

    tensor: int
    direction: Direction
    hidden_us: float
    stretch: float


def plain_cost_us(link_us: float, hidden_us: float) -> float:
    """One direction of T′ (equation 1)."""
    return max(link_us - hidden_us, 0.0)


def coded_cost_us(coding_us: float, link_us: float, hidden_us: float) -> float:
    """One direction of T (equations 2 to 4). `coding_us`: what coding adds to moving the coded bytes in `link_us`."""
    return coding_us + max(link_us - hidden_us, 0.0)


def swap_cost_us(trace: Trace, window: Window, codec: int, profile: DeviceProfile) -> float:
    """What a transfer costs with a codec that `trace.coding` knows; 0: without one."""
    tensor, direction, hidden_us, stretch = window
    link_us = profile.transfer_us(moved_bytes(trace, tensor, codec), direction)
    if codec == 0:
        return plain_cost_us(link_us * stretch, hidden_us)
    coding_us = copy_us(trace, tensor, codec, direction, profile) - link_us
    return coded_cost_us(coding_us, link_us * stretch, hidden_us)


def windows(trace: Trace, plan: Plan, timeline: Timeline, profile: DeviceProfile) -> list[Window]:
    """Of every transfer of the plan, whose Timeline this is. Raises InvalidPlanError."""
    needed_us = _needed_us(AccessSequence(trace, plan), timeline)
    latest_us = list(needed_us)
    for direction in Direction:
        lane = [place for place, one in enumerate(timeline.transfers) if one.direction == direction]
        lane.sort(key=lambda place: timeline.transfers[place].start_us)
        for place, following in zip(lane[-2::-1], lane[:0:-1], strict=True):
            behind = timeline.transfers[following]
            latest_us[place] = min(latest_us[place], latest_us[following] - (behind.end_us - behind.start_us))
    starts_us = np.array([one.start_us for one in timeline.transfers])
    hidden_us = np.maximum(_compute_until(timeline, np.array(latest_us)) - _compute_until(timeline, starts_us), 0.0)
    codecs = _codecs(trace, plan)
    found = []
    for one, hidden in zip(timeline.transfers, hidden_us.tolist(), strict=True):
        alone_us = copy_us(trace, one.tensor, codecs.get(one.tensor, 0), one.direction, profile)
        stretch = (one.end_us - one.start_us) / alone_us if alone_us else 1.0
        found.append(Window(one.tensor, one.direction, hidden, max(stretch, 1.0)))
    return found


def _needed_us(sequence: AccessSequence, timeline: Timeline) -> list[float]:
    """When the compute gets to the point where it waits for each transfer."""
    under_way: dict[int, int] = {}  # tensor → its transfer
    needed_us = [0.0] * len(timeline.transfers)
    ends_us = np.append(0.0, timeline.step_end_us).tolist()  # by steps executed
    copies = 0
    for kind, step, tensor, _ in sequence.actions():
        if kind is ActionKind.COPY_OUT or kind in ARRIVING:
            under_way[tensor], copies = copies, copies + 1
        if kind is ActionKind.WAIT_OUT:
            needed_us[under_way[tensor]] = ends_us[step + 1]
        elif kind in (ActionKind.WAIT_IN, ActionKind.PASSIVE_IN):
            needed_us[under_way[tensor]] = ends_us[step]
    return needed_us


def _compute_until(timeline: Timeline, us: np.ndarray) -> np.ndarray:
    """The compute up to these times, stalls left out."""
    edges = np.stack((timeline.step_start_us, timeline.step_end_us), axis=1).reshape(-1)
    done = np.cumsum(np.diff(edges, prepend=0.0) * (np.arange(len(edges)) % 2))
    return np.interp(us, edges, done)


def _codecs(trace: Trace, plan: Plan) -> dict[int, int]:
    coded = plan.rows[plan.rows["codec"] > 0]
    return dict(zip(coded["tensor"].tolist(), coded["codec"].tolist(), strict=True))
