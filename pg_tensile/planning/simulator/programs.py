"""Programs of a simulated job: its iterations, and its changes of plan, in the form that the simulator executes.

A change of plan takes place between two iterations: tensors that the new plan expects on the host but that have no
current copy there are copied out while the job waits; the rest is swapped in passively in its first iteration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np

from pg_tensile.errors import InvalidPlanError, SimulationError
from pg_tensile.planning.device.link import Copy, copy_stretch, copy_us, moved_bytes
from pg_tensile.planning.device.profile import DeviceProfile, Direction
from pg_tensile.planning.latency import roofline
from pg_tensile.planning.plan.access_sequence import AccessSequence
from pg_tensile.planning.plan.plan import Boundary, EventKind, Plan
from pg_tensile.planning.trace.trace import Trace


class Meeting(NamedTuple):
    """Point at which an iteration requests a copy or waits for one. Between two of them there are only steps."""

    compute_us: float  # of the steps since the previous one
    executed: int  # number of steps before it
    copy: int  # index into the copies; −1 for the end of the iteration
    waits: bool  # for the copy; else requests it


class Role(Enum):
    CHANGE = 0  # a change of plan between two iterations
    FIRST = 1  # the first iteration after a change
    STEADY = 2


@dataclass(frozen=True, eq=False)
class Program:
    """An iteration, or the copies of a change of plan, in the form that the simulator executes."""

    role: Role
    sequence: AccessSequence  # of the iteration; for a change, of the following iteration
    meetings: tuple[Meeting, ...]  # the last one is the end
    copies: tuple[Copy, ...]  # in order of request
    repeat: int | None = 1  # number of executions; None means without end


def build_programs(
    trace: Trace,
    plan: Plan,
    changes: Sequence[tuple[int, Plan]],
    initial_state: Boundary | None,
    profile: DeviceProfile,
) -> list[Program]:
    """Return the programs of a job: for each plan the change to it and the first iteration after that, if the state
    differs, then the steady iteration.

    `changes` are plans that take over, each after a number of iterations with the previous one. Raises InvalidPlanError
    and SimulationError as `simulate` does.
    """
    programs: list[Program] = []
    trace, state = roofline.timed(trace, profile), initial_state
    plans = [plan, *(later for _, later in changes)]
    repeats = [*(iterations for iterations, _ in changes), None]
    coded: dict[int, int] = {}  # tensor → codec of its host copy between two iterations
    for plan, repeat in zip(plans, repeats, strict=True):
        if repeat is not None and repeat < 1:
            raise SimulationError(f"a plan cannot change after {repeat} iterations", hint="Use 1 or more.")
        steady = AccessSequence(trace, plan)
        steady.check()
        if state is not None and state != steady.boundary:
            copied, after = _change(trace, state, steady.boundary)
            first = AccessSequence(trace, plan, after, passive=True)
            programs.append(_change_program(first, copied, profile))
            coded |= dict.fromkeys(copied, 0)
            programs.append(_iteration_program(Role.FIRST, first, profile, 1, coded))
            coded |= _host_codecs(first)
            repeat = repeat and repeat - 1
        coded = coded | _host_codecs(steady)
        if repeat != 0:
            programs.append(_iteration_program(Role.STEADY, steady, profile, repeat, coded))
        state = steady.boundary  # host copies left over from the previous state are dropped
    return programs


def _change(trace: Trace, state: Boundary, wanted: Boundary) -> tuple[list[int], Boundary]:
    """Return the tensors to copy out for a change from `state` to `wanted` between two iterations, and the state then.

    The new plan's first iteration swaps in the rest passively. Raises InvalidPlanError if a tensor has no data left.
    """
    copied = wanted.host - state.host
    lost = sorted(copied - state.device)
    if lost:
        label = trace.tensor_label(lost[0])
        raise InvalidPlanError(
            f"{label} is neither on the device nor on the host when the plan changes", tensor=lost[0]
        )
    return sorted(copied), Boundary(state.device & wanted.device, state.host | wanted.host)


def _change_program(sequence: AccessSequence, copied: list[int], profile: DeviceProfile) -> Program:
    copies = tuple(_copy(sequence.trace, tensor, 0, Direction.OUT, profile, -1, 0) for tensor in copied)
    requests = [Meeting(0.0, 0, copy, waits=False) for copy in range(len(copies))]
    waits = [Meeting(0.0, 0, copy, waits=True) for copy in range(len(copies))]
    return Program(Role.CHANGE, sequence, (*requests, *waits, Meeting(0.0, 0, -1, waits=False)), copies)


def _iteration_program(
    role: Role, sequence: AccessSequence, profile: DeviceProfile, repeat: int | None, host_codecs: dict[int, int]
) -> Program:
    """Return the program of an iteration; `host_codecs` holds the codecs of existing host copies, 0 if it lacks one."""
    trace, transfers = sequence.trace, sequence.transfers
    codecs, delays = (sequence.plan.rows[column].tolist() for column in ("codec", "delay_us"))
    coded = dict(host_codecs)
    copies: list[Copy] = []
    for event, tensor, inward in zip(*(column.tolist() for column in transfers[:3]), strict=True):
        if not inward:
            coded[tensor] = codecs[event]
        delay_us = delays[event] if event >= 0 else 0
        copies.append(_copy(trace, tensor, coded.get(tensor, 0), Direction(inward), profile, event, delay_us))
    return Program(role, sequence, _meetings(sequence), tuple(copies), repeat)


def _meetings(sequence: AccessSequence) -> tuple[Meeting, ...]:
    """Return the requests and the waits of an iteration, and its end."""
    steps, meetings = sequence.steps, sequence.transfers.meetings
    executed = np.append(meetings.executed, len(steps))
    reached_us = np.concatenate(([0.0], np.cumsum(sequence.trace.latency_us[steps])))[executed]
    copy, waits = np.append(meetings.transfer, -1), np.append(meetings.waits, False)
    columns = np.diff(reached_us, prepend=0.0), executed, copy, waits
    return tuple(map(Meeting, *(column.tolist() for column in columns)))


def _copy(
    trace: Trace, tensor: int, codec: int, direction: Direction, profile: DeviceProfile, event: int, delay_us: int
) -> Copy:
    raw = int(trace.tensor_bytes[tensor])
    if codec == 0:
        us, stretch = profile.transfer_us(raw, direction), 1 / profile.duplex_factor
        return Copy(tensor, direction, raw, event, delay_us, us, raw, stretch)
    kind, moved = (trace, tensor, codec, direction, profile), moved_bytes(trace, tensor, codec)
    return Copy(tensor, direction, moved, event, delay_us, copy_us(*kind), raw, copy_stretch(*kind))


def _host_codecs(sequence: AccessSequence) -> dict[int, int]:
    """Return, for each tensor that the iteration copies out, the codec of its host copy at the end."""
    rows, copies = sequence.plan.rows, sequence.copies
    out = copies.event[rows["kind"][copies.event] == EventKind.SWAP_OUT.value]  # in plan order
    return dict(zip(rows["tensor"][out].tolist(), rows["codec"][out].tolist(), strict=True))
