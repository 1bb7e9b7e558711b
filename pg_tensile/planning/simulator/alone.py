"""Fast simulation of a job that has the link to itself: the iteration time as in simulator.py, without a timeline.

A search evaluates thousands of plans. A job alone repeats one iteration, so a single pass over the points at which it
requests or awaits copies is enough; the state for several jobs, changes of plan and timelines is left out.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pg_tensile.planning.device.link import Copy, Link, Request
from pg_tensile.planning.device.profile import DeviceProfile, Direction
from pg_tensile.planning.plan.access_sequence import AccessSequence
from pg_tensile.planning.trace.trace import Floats, Int64s


class Evaluation(NamedTuple):
    iteration_us: float
    stalled_us: Floats  # [s + 1]: time that the job waits, by number of steps executed before


class _Meetings(NamedTuple):
    """Points at which the iteration requests a copy or waits for one, in execution order."""

    steps: Int64s  # number of steps executed before
    tensor: list[int]
    asks: list[bool]  # requests the copy; else waits for it
    out: list[bool]  # whether the copy goes to the host
    delay_us: list[int]


def evaluate(sequence: AccessSequence, profile: DeviceProfile) -> Evaluation:
    """Return the time of an iteration in the steady state of the sequence's plan, at the latencies of its trace.

    The sequence starts from the boundary state. Codecs are ignored: transfers move the whole tensors. Raises
    InvalidPlanError if the plan is not valid.
    """
    trace = sequence.trace
    meetings = _meetings(sequence)
    reached = np.concatenate(([0.0], np.cumsum(trace.latency_us[sequence.steps])))
    us = [(profile.transfer_latency_us + trace.tensor_bytes / rate * 1e6).tolist()
          for rate in (profile.out_bytes_per_s, profile.in_bytes_per_s)]  # fmt: skip
    walk = _alone if profile.duplex_factor == 1.0 else _sharing
    stalls = walk(meetings, reached[meetings.steps].tolist(), us, profile)
    stalled = np.zeros(len(reached))
    np.add.at(stalled, meetings.steps, stalls)
    return Evaluation(float(reached[-1] + stalled.sum()), stalled)


def _meetings(sequence: AccessSequence) -> _Meetings:
    transfers = sequence.transfers
    executed, transfer, waits = transfers.meetings
    delay_us = sequence.plan.rows["delay_us"][transfers.event]
    columns = transfers.tensor[transfer], ~waits, ~transfers.inward[transfer], delay_us[transfer]
    return _Meetings(executed, *(column.tolist() for column in columns))


def _alone(meetings: _Meetings, reached: list[float], us: list[list[float]], profile: DeviceProfile) -> list[float]:
    """Return the µs that each meeting waits, with independent lanes: a copy's end is known when it is requested."""
    handover, (out_us, in_us) = profile.handover_us, us
    out_ready = in_ready = out_free = in_free = late = 0.0
    ends: dict[int, float] = {}
    stalls = []
    for reached_us, tensor, asks, out, delay in zip(reached, *meetings[1:], strict=True):
        now, stall = reached_us + late, 0.0
        if not asks:
            stall = max(0.0, ends[tensor] + handover - now)
            late += stall
        elif out:
            out_ready = max(now + delay, out_ready)
            ends[tensor] = out_free = max(out_ready, out_free) + out_us[tensor]
        else:
            in_ready = max(now + delay, in_ready)
            ends[tensor] = in_free = max(in_ready, in_free) + in_us[tensor]
        stalls.append(stall)
    return stalls


def _sharing(meetings: _Meetings, reached: list[float], us: list[list[float]], profile: DeviceProfile) -> list[float]:
    """Return the µs that each meeting waits, with lanes that slow each other down, as simulated by link.py."""
    link, late, ready = Link(), 0.0, [0.0, 0.0]
    requests: dict[int, Request] = {}
    stalls = []
    for reached_us, tensor, asks, out, delay in zip(reached, *meetings[1:], strict=True):
        now, stall = reached_us + late, 0.0
        while link.advance(now) is not None:
            pass
        direction = Direction.OUT if out else Direction.IN
        if asks:
            ready[direction] = max(now + delay, ready[direction])
            copy = Copy(tensor, direction, 0, -1, delay, us[direction][tensor], 0, 1 / profile.duplex_factor)
            requests[tensor] = link.request(copy, ready[direction])
        else:
            while not requests[tensor].ended:
                link.advance(np.inf)
            stall = max(0.0, requests[tensor].end_us + profile.handover_us - now)
            late += stall
        stalls.append(stall)
    return stalls
