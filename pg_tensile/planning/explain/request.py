"""Input of an explanation: the requested job, and the load of its device by others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Request(NamedTuple):
    """The requested job.

    `parameters` is the number of the model's parameters; `state_bytes` counts parameters, gradients and optimizer
    state, `claim_bytes` is the grant of an eager job, and `overhead_bytes` the device memory of the job's process.
    `open_job` is a job that trains the model at present, for at most `open_job_s` more seconds (None if unknown).
    `uncaptured` is the reason why there are no graphs. `calibrated` means that latencies come from the device's models,
    `workspaces` that the traces have them, and `approximate` is the reason why the numbers are not the device's.
    `choice` is that of the batch size, if it was left open: `batch_size, learning_rate, law, base_rate, candidates`
    (fields of choose.Candidate, the chosen one first). `compression` of swaps is auto or a codec; None means none.
    `swap_share` is the option of policy tensile, None if it is not given.
    `patience` is that of early stopping in epochs, None without it.
    `split` describes the division of the rows: `by, column, threshold, training_rows, validation_rows`.
    `max_slowdown` is the promised factor on the time of a step without a plan.
    `ranks`, of a job that a Ray cluster would train: `count` of them, between `least` and `most`, what each `takes` of
    a `node`, the `nodes` with room for one when they are idle, and what the job `waits_for` (None: nothing); None for
    others. Graphs, memory and times are then those of rank 0.
    `warnings` are sentences about the data, None if there are none. `architecture_reason` is why the job would choose
    its architecture, None if it has one.
    """

    model: str
    architecture: str
    device: str
    policy: str
    epochs: int
    batch_size: int
    steps: int  # per epoch
    training_rows: int
    validation_rows: int
    skipped_rows: int
    parameters: int
    state_bytes: int
    claim_bytes: int
    overhead_bytes: int = 0
    memory_budget: int | None = None
    budget_name: str | None = None  # setting that `memory_budget` is from; None: the argument of that name
    open_job: int | None = None
    open_job_s: float | None = None
    uncaptured: str | None = None
    calibrated: bool = False
    workspaces: bool = True
    approximate: str | None = None
    choice: Mapping[str, Any] | None = None
    compression: str | None = None
    swap_share: float | None = None
    learning_rate: float | None = None
    patience: int | None = None
    split: Mapping[str, Any] | None = None
    warnings: tuple[str, ...] | None = None
    max_slowdown: float | None = None
    ranks: Mapping[str, Any] | None = None
    architecture_reason: str | None = None


class Ahead(NamedTuple):
    """A running or waiting job for which another one may have to wait.

    `remaining_s` is an upper bound, counted from now if the job runs, from its start if it waits; None if unknown.
    """

    running: bool
    least_bytes: int
    remaining_s: float | None
    job: int = 0


class Admission(NamedTuple):
    """The state of a device on which the admission of a job depends.

    Of the device's memory, `budget_bytes` are for all jobs together, `inference_bytes` of them for predictions, and
    `least_bytes` is the least that the `running` jobs need. `host_bytes` limits the copies on the host, `most_events`
    a plan. `ahead` lists the running jobs, and the waiting ones that come first, in their order.
    """

    budget_bytes: int
    inference_bytes: int = 0
    running: int = 0
    waiting: int = 0
    least_bytes: int = 0
    host_bytes: int = 1 << 62
    most_events: int | None = None
    ahead: tuple[Ahead, ...] = ()

    def totals(self) -> dict[str, Any]:
        """Return the fields without the details of other jobs (`ahead`)."""
        return {name: value for name, value in self._asdict().items() if name != "ahead"}

    def has_room_for(self, need_bytes: int) -> bool:
        """Return whether `need_bytes`, overhead included, fit beside the least that the running jobs need."""
        return self.least_bytes + self.inference_bytes + need_bytes <= self.budget_bytes
