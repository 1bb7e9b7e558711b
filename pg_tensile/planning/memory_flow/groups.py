"""Groups of a job's steps, between which the memory that it holds may go to another job (Waterwave, section 4.1).

On the way to its largest footprint a job takes memory, after that it gives memory back. The paper cuts the graph where
the net allocation reaches a given size. Here the exact footprint of the job's plan is cut where it first exceeds a
multiple of that size before the peak, and where it last does after the peak, so that small ups and downs make no
groups, and a plan may swap or recompute as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from pg_tensile.errors import PlanError
from pg_tensile.planning.plan.access_sequence import AccessSequence
from pg_tensile.planning.plan.codecs import staging_bytes
from pg_tensile.planning.trace.trace import Floats, Int64s

# A group as it is stored and sent, as large as an event of a plan (plan.py, EVENT_ROW).
GROUP_ROW = np.dtype(
    [
        ("first", "<i4"),  # step
        ("last", "<i4"),  # step
        ("first_operator", "<i4"),
        ("last_operator", "<i4"),
        ("most_bytes", "<i8"),
        ("rest_bytes", "<i8"),
    ]
)
GROUP_FIELDS = ("first", "last", "most_bytes", "rest_bytes")
MOST_GROUPS = 64  # of a job


class Group(NamedTuple):
    """Consecutive steps of an iteration that a job executes without a pause."""

    first: int  # step
    last: int  # step
    most_bytes: int  # that the job takes during the group
    rest_bytes: int  # that it keeps from its last step on, until its next group begins
    us: float = 0.0


def groups_to_bytes(groups: Sequence[Group], sequence: AccessSequence) -> bytes:
    """Return the groups of `sequence` as rows of GROUP_ROW."""
    operators = sequence.operators
    rows = [
        (group.first, group.last, operators[group.first], operators[group.last], group.most_bytes, group.rest_bytes)
        for group in groups
    ]
    return np.array(rows, GROUP_ROW).tobytes()


def bytes_to_groups(data: bytes) -> tuple[Group, ...]:
    """Return the groups that `groups_to_bytes` has encoded, without their times.

    Raises PlanError if they are not groups of consecutive steps, or have impossible sizes."""
    if len(data) % GROUP_ROW.itemsize:
        raise PlanError(f"groups of {len(data)} bytes are not rows of {GROUP_ROW.itemsize} bytes")
    rows = np.frombuffer(data, GROUP_ROW)
    groups = tuple(Group(*row) for row in zip(*(rows[name].tolist() for name in GROUP_FIELDS), strict=True))
    follow = all(group.first == before.last + 1 for before, group in pairwise(groups))
    if groups and not (groups[0].first == 0 and follow and all(_possible(group) for group in groups)):
        raise PlanError("the groups are not consecutive, or have impossible sizes")
    return groups


def _possible(group: Group) -> bool:
    return group.first <= group.last and 0 <= group.rest_bytes <= group.most_bytes


def groups_of(
    sequence: AccessSequence, split_bytes: int, split_us: float | None = None, stalled_us: Floats | None = None
) -> list[Group]:
    """Return the groups of an iteration of `sequence`, in execution order.

    `split_bytes`: what a job gains or gives back in a group, at most. `split_us`: the time of a group, at most, if it
    has more than one step. `stalled_us`: float64[s + 1], the time that the job waits for transfers after each number of
    steps (simulator/alone.py); None if it never does.
    """
    if split_bytes <= 0:
        raise ValueError("split_bytes is to be positive")
    us = _step_us(sequence, stalled_us)
    return _groups(sequence, _starts(_levels(step_bytes(sequence), split_bytes), us, split_us), us)


def counted_groups(sequence: AccessSequence, count: int, stalled_us: Floats | None = None) -> list[Group]:
    """Return the groups of an iteration, at most `count` of them for what it takes on the way to its peak."""
    split_bytes = -(-int(np.ptp(step_bytes(sequence))) // count)
    return groups_of(sequence, max(1, split_bytes), stalled_us=stalled_us)


def cut_alike(groups: Sequence[Group], sequence: AccessSequence, stalled_us: Floats | None = None) -> list[Group]:
    """Return groups of the same steps, with the bytes and times of `sequence`.

    Raises PlanError if it has another number of steps."""
    if not groups or groups[-1].last != len(sequence.steps) - 1:
        raise PlanError(f"the groups do not end with the last of {len(sequence.steps)} steps")
    first = np.array([group.first for group in groups], np.int64)
    return _groups(sequence, first, _step_us(sequence, stalled_us))


def _step_us(sequence: AccessSequence, stalled_us: Floats | None) -> Floats:
    """Return float64[s]: the time of each step, with the time that the job waits before it, and after the last."""
    us = sequence.trace.latency_us[sequence.steps]
    if stalled_us is not None:
        us = us + stalled_us[:-1]
        us[-1] += stalled_us[-1]
    return us


def _groups(sequence: AccessSequence, first: Int64s, us: Floats) -> list[Group]:
    """Return the groups that begin at the steps `first`."""
    footprint, rest = step_bytes(sequence), resting_bytes(sequence)
    last = np.append(first[1:], len(footprint)) - 1
    return [
        Group(begin, end, int(footprint[begin : end + 1].max()), int(rest[end]), float(us[begin : end + 1].sum()))
        for begin, end in zip(first.tolist(), last.tolist(), strict=True)
    ]


def step_bytes(sequence: AccessSequence) -> Int64s:
    """Return int64[s]: the device memory in bytes that each step takes, with its workspace and what codecs stage."""
    workspace = sequence.trace.workspace_bytes[sequence.steps]
    return sequence.footprint + workspace + staging_bytes(sequence.trace, sequence.plan)


def resting_bytes(sequence: AccessSequence) -> Int64s:
    """Return int64[s]: the bytes of the tensors that stay on the device between each step and the next one.

    After the last step these are those with which the next iteration begins."""
    tensor, first, last = sequence.interval_tensor, sequence.interval_first, sequence.interval_last
    steps = len(sequence.steps)
    change = np.zeros(steps + 1, np.int64)
    np.add.at(change, first, sequence.trace.tensor_bytes[tensor])
    np.subtract.at(change, last, sequence.trace.tensor_bytes[tensor])
    resting = np.cumsum(change[:-1])
    resting[-1] = sequence.trace.tensor_bytes[sorted(sequence.boundary.device)].sum()
    return resting


def _levels(footprint: Int64s, split_bytes: int) -> Int64s:
    """Return int64[s]: numbers that differ between neighbouring steps where a group begins."""
    peak = int(np.argmax(footprint))
    rising = np.maximum.accumulate(footprint[: peak + 1])
    falling = np.maximum.accumulate(footprint[:peak:-1])[::-1]
    lowest = int(footprint.min())
    levels = -(-(np.append(rising, falling) - lowest) // split_bytes)
    levels[peak + 1 :] = -1 - levels[peak + 1 :]  # a group ends at the peak, even if the next step takes as much
    return levels


def _starts(levels: Int64s, us: Floats, split_us: float | None) -> Int64s:
    """Return the first steps of groups: where the level changes, or where a group would take more than `split_us`."""
    changes = np.flatnonzero(np.diff(levels)) + 1
    starts = [0]
    for begin, end in zip([0, *changes.tolist()], [*changes.tolist(), len(levels)], strict=True):
        if begin:
            starts.append(begin)
        elapsed = 0.0
        for step in range(begin, end) if split_us is not None else ():
            if step > starts[-1] and elapsed + us[step] > split_us:
                starts.append(step)
                elapsed = 0.0
            elapsed += float(us[step])
    return np.array(starts, np.int64)
