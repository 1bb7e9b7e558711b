"""Types of the memory scheduling: the state of a device and of its jobs, the decisions, and a schedule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np

from pg_tensile.planning.compression.codec_times import CodecTimes
from pg_tensile.planning.compression.sparsity import Statistics
from pg_tensile.planning.device.profile import DeviceProfile
from pg_tensile.planning.plan.plan import Plan
from pg_tensile.planning.policies.compression.advisor import TensorCoding
from pg_tensile.planning.trace.trace import Int32s, Int64s, Trace


@dataclass(frozen=True)
class DeviceState:
    """A device and its limits in bytes.

    Of `budget_bytes`, models for prediction occupy `inference_bytes`, and jobs that are ending and need no decision
    occupy `ending_bytes`. A prediction that waits needs `wanted_bytes` for all models, and one that has waited in vain,
    for the first time `claimed_s` ago, `claimed_bytes`: no job that came later starts before it. `host_bytes` limits
    the host memory for the copies of all jobs of the device. With `memory_flow`, memory may flow between jobs
    (memory_flow.py) instead of being divided among them.
    """

    name: str
    profile: DeviceProfile
    budget_bytes: int
    inference_bytes: int = 0
    wanted_bytes: int = 0
    claimed_bytes: int = 0
    claimed_s: float = 0.0
    host_bytes: int = 1 << 62
    most_events: int | None = None
    ageing_s: float = 0.0  # waiting time after which no job may pass a waiting job any more; 0 means never
    ending_bytes: int = 0
    codec_times: CodecTimes | None = None  # None if not measured; then nothing is compressed
    memory_flow: bool = False


@dataclass(frozen=True)
class Given:
    """The published grant of a job. `plan` is None if it is unknown or was made for another trace.

    `groups` are those of a job whose memory flows, rows of `memory_flow.groups.GROUP_ROW`; empty for a constant grant.
    `granted_bytes` of a flowing job is the most that it may take at any time."""

    plan: Plan | None
    granted_bytes: int
    link_share: float = 1.0
    groups: bytes = b""


@dataclass(frozen=True)
class JobState:
    """A job that has a trace or, if executed eagerly, a claim (`least_bytes`).

    `rank` is its priority among waiting jobs, raised by the time that it has waited. `given` is its grant, None if it
    is not yet admitted. A `stuck` job's trainer pauses until it receives another plan. A `pinned` job keeps its grant,
    because its trainer rejects any other. `compression` is none, auto, or the only codec permitted; `statistics` are
    those of the tensors whose zeros have been counted. A `choosing` job may return with a smaller batch, so it is
    refused rather than kept waiting for others to end. `swap_share` limits the swaps of policy tensile (its `Limits`).
    """

    job: int
    trace: Trace | None  # of the training step; None if executed eagerly
    least_bytes: int  # the least memory with which all of its graphs have plans
    operator: str = ""  # label of the one that needs the most memory
    policy: str = "joint"
    priority: float = 0.0
    rank: float = 0.0
    waited_s: float = 0.0
    overhead_bytes: int = 0  # of device memory outside the plan
    most_bytes: int | None = None  # the job's own budget
    given: Given | None = None
    stuck: bool = False
    pinned: bool = False
    compression: str = "none"
    statistics: Mapping[int, Statistics] = field(default_factory=dict)
    choosing: bool = False
    found: Plan | None = None  # result of a search for a better plan than the policy joint's
    max_slowdown: float | None = None  # promised factor on the time without a plan, by the plan alone; None: no promise
    swap_share: float = 1.0

    @property
    def limit_bytes(self) -> int:
        """The job's own budget, or more than any device has."""
        return 1 << 62 if self.most_bytes is None else self.most_bytes


class Planned(NamedTuple):
    """A new plan, with what it needs and the iteration that it gives.

    `footprint` and `vanilla` are bytes at each executed operator, workspaces included, with the plan and without any.
    Times are in µs; None for a job that is executed eagerly. A job whose memory flows has `groups`, rows of
    `memory_flow.groups.GROUP_ROW`; `granted_bytes` is the most that it takes at any time, `iteration_us` includes the
    requests for its groups, and `stall_us` the time that it waits for memory.
    """

    plan: Plan
    planned_bytes: int
    granted_bytes: int
    link_share: float
    host_bytes: int = 0
    iteration_us: float | None = None
    vanilla_us: float | None = None
    stall_us: float = 0.0
    out_bytes: int = 0
    in_bytes: int = 0
    recomputes: int = 0
    operators: Int32s = np.zeros(0, np.int32)
    footprint: Int64s = np.zeros(0, np.int64)
    vanilla: Int64s = np.zeros(0, np.int64)
    room_bytes: int = 0  # device memory that another plan of the job could use beside the other jobs
    groups: bytes = b""


class Kept(NamedTuple):
    """The job keeps its grant."""


class Waits(NamedTuple):
    """The job is not admitted for now."""

    reason: str


class Refused(NamedTuple):
    """The job can never be admitted: it needs more than the budget, of the device or its own.

    `max_slowdown`: the job's, if it needs as much because of that."""

    budget_bytes: int
    least_bytes: int
    operator: str
    max_slowdown: float | None = None


class Failed(NamedTuple):
    """No plan can be made; the job's grant, if any, stays in force."""

    reason: str


Decision: TypeAlias = Planned | Kept | Waits | Refused | Failed


class Note(NamedTuple):
    """A remark for users in addition to the decisions."""

    job: int
    reason: str


class Schedule(NamedTuple):
    """The decision for each job, by number.

    `totals_us` holds, for jobs with a trace, the sum of the latencies that they were planned with, in µs. `codings`
    holds, for jobs with compression, the choice for each tensor with statistics, given plans without compression.
    `brief`: memory was divided in few passes. `lacking`: bytes that running jobs lack to continue, and each waiting
    job, those first that start first; `slowed_bytes` are those that the running ones lack so that none loses time.
    Models for prediction that are idle may give way to both.
    """

    decisions: dict[int, Decision]
    totals_us: dict[int, float]
    notes: list[Note]
    codings: dict[int, list[TensorCoding]]
    brief: bool = False
    lacking: tuple[int, ...] = ()
    slowed_bytes: int = 0
