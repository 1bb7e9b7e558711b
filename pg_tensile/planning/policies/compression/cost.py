"""Cost of a swap with and without compression (CSWAP, section IV-B, equations 1 to 4).

Both costs are the time by which the swap lengthens the iteration: the part of its transfers that does not hide behind
the compute, plus, with compression, the time that coding adds to them. The equations are the paper's, with two changes
that reflect our executor. It codes one chunk while another is on the link, so Time_c and Time_dc are the time that they
add to a transfer, which is all of it for a tensor of one chunk. And the swaps of a lane queue: a transfer hides until
its memory is needed or until the link is needed by later ones, so a late transfer is charged to all that delay it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pg_tensile.planning.device.link import copy_us, moved_bytes
from pg_tensile.planning.device.profile import DeviceProfile, Direction
from pg_tensile.planning.plan.access_sequence import AccessSequence
from pg_tensile.planning.plan.plan import Plan
from pg_tensile.planning.simulator.simulator import Timeline
from pg_tensile.planning.trace.trace import Trace


class Window(NamedTuple):
    """Position of one transfer of a plan relative to the compute.

    `hidden_us` is the compute that it can hide behind (Hidden_f for a swap-out, Hidden_b for a swap-in), `stretch` the
    factor by which traffic on the other lane lengthens it.
    """

    tensor: int
    direction: Direction
    hidden_us: float
    stretch: float


def plain_cost_us(link_us: float, hidden_us: float) -> float:
    """Return one direction of T′ (equation 1)."""
    return max(link_us - hidden_us, 0.0)


def coded_cost_us(coding_us: float, link_us: float, hidden_us: float) -> float:
    """Return one direction of T (equations 2 to 4).

    `link_us` is the time to move the coded bytes, `coding_us` the time that coding adds to it.
    """
    return coding_us + max(link_us - hidden_us, 0.0)


def swap_cost_us(trace: Trace, window: Window, codec: int, profile: DeviceProfile) -> float:
    """Return the cost of a transfer with a codec for which `trace.coding` has times; 0 means no codec."""
    tensor, direction, hidden_us, stretch = window
    link_us = profile.transfer_us(moved_bytes(trace, tensor, codec), direction)
    if codec == 0:
        return plain_cost_us(link_us * stretch, hidden_us)
    coding_us = copy_us(trace, tensor, codec, direction, profile) - link_us
    return coded_cost_us(coding_us, link_us * stretch, hidden_us)


def windows(trace: Trace, plan: Plan, timeline: Timeline, profile: DeviceProfile) -> list[Window]:
    """Return the window of every transfer of the plan, whose timeline is given. Raises InvalidPlanError."""
    ends_us = np.append(0.0, timeline.step_end_us)  # by steps executed
    # When the compute reaches the point where it waits for each transfer.
    latest_us: list[float] = ends_us[AccessSequence(trace, plan).transfers.executed_before_wait].tolist()
    for direction in Direction:
        lane = [index for index, transfer in enumerate(timeline.transfers) if transfer.direction == direction]
        lane.sort(key=lambda index: timeline.transfers[index].start_us)
        for index, following in zip(lane[-2::-1], lane[:0:-1], strict=True):
            behind = timeline.transfers[following]
            latest_us[index] = min(latest_us[index], latest_us[following] - (behind.end_us - behind.start_us))
    starts_us = np.array([transfer.start_us for transfer in timeline.transfers])
    hidden_us = np.maximum(_compute_until(timeline, np.array(latest_us)) - _compute_until(timeline, starts_us), 0.0)
    codecs = _codecs(trace, plan)
    listed = []
    for transfer, hidden in zip(timeline.transfers, hidden_us.tolist(), strict=True):
        alone_us = copy_us(trace, transfer.tensor, codecs.get(transfer.tensor, 0), transfer.direction, profile)
        stretch = (transfer.end_us - transfer.start_us) / alone_us if alone_us else 1.0
        listed.append(Window(transfer.tensor, transfer.direction, hidden, max(stretch, 1.0)))
    return listed


def _compute_until(timeline: Timeline, us: np.ndarray) -> np.ndarray:
    """Return the compute time up to each of these times, excluding stalls."""
    edges = np.stack((timeline.step_start_us, timeline.step_end_us), axis=1).reshape(-1)
    done = np.cumsum(np.diff(edges, prepend=0.0) * (np.arange(len(edges)) % 2))
    return np.interp(us, edges, done)


def _codecs(trace: Trace, plan: Plan) -> dict[int, int]:
    coded = plan.rows[plan.rows["codec"] > 0]
    return dict(zip(coded["tensor"].tolist(), coded["codec"].tolist(), strict=True))
