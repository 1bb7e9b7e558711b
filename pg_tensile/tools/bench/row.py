"""A row of a benchmark: the results of one policy, and its JSON object."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from pg_tensile.tools.bench.conditions import TurnConditions


@dataclass(frozen=True)
class Row:
    """One policy's result: sizes in bytes, times in milliseconds, both of one iteration in steady state.

    None means not known, because the policy failed or nothing was executed. msr, eor and cbr are those of TENSILE,
    section V-A. `budget` is the requested one, `latencies` the source of the latencies in planning, `latency_error`
    their median relative error against those measured before the rounds. `bytes_out` and `bytes_in` are moved over the
    link, the raw ones are the tensors'; `transfer_ms` is the sum of all transfers' times, `codecs` the number of
    swap-outs of each codec. `passive_swap_ins` is rounded up. `gradient_difference` is a peer's, of its first step
    (peers.gradient_difference). `planned_ms`: the plan's simulated time with the latencies that it was planned with;
    `simulated_ms`: with those of its own rounds. `least_eor`: bounds.least_us for this graph and `device_peak_bytes`
    over the sum of the graph's latencies, both as known before the rounds; measured times may lie below. `timeline`:
    memory over time (timeline.timeline), if requested.

    What explains the numbers, besides: `step_ms` are all steps that count, by round, `scatter` their relative spread
    (scatter.scatter), and `scatter_causes` what can explain one of more than 5 %. `conditions` are those of each round.
    Of an accelerator's memory, in the steps that count of all rounds: `reserved_peak_bytes` is the most that PyTorch's
    allocator had taken from the device, `allocated_peak_bytes` the most that was in use of it (`allocator_peak_bytes`
    counts from before the contender was created), `allocator_retries` how often it gave cached memory back because the
    device refused more; `context_bytes` is the process's memory outside the allocator, after the last round. Of one
    recorded step's transfers: `out_gbps` and `in_gbps` are their bytes over the sum of their durations, `overlap` is
    the share of their time in which the compute did not wait for one (transfers.overlap); `simulated_stall_ms`,
    `simulated_transfer_ms` and `simulated_overlap` belong to `simulated_ms`. `rounds_taken` may be less than `rounds`
    with `--seconds` or `--light`, whose reason is `light`.
    """

    model: str
    policy: str
    device: str
    batch: int
    label: str = ""
    keywords: dict[str, Any] | None = None
    budget: str | None = None
    early_update: bool = False
    latencies: str = ""
    operators: int | None = None
    tensors: int | None = None
    vanilla_peak_bytes: int | None = None
    peak_bytes: int | None = None
    predicted_peak_bytes: int | None = None
    device_peak_bytes: int | None = None
    allocator_peak_bytes: int | None = None
    reserved_peak_bytes: int | None = None
    allocated_peak_bytes: int | None = None
    allocator_retries: int | None = None
    context_bytes: int | None = None
    workspace_peak_bytes: int | None = None
    floor_bytes: int | None = None
    budget_bytes: int | None = None
    host_arena_bytes: int | None = None
    msr: float | None = None
    eor: float | None = None
    cbr: float | None = None
    least_eor: float | None = None
    step_ms_median: float | None = None
    step_ms_min: float | None = None
    step_ms_max: float | None = None
    step_ms: list[list[float]] | None = None
    round_ms: list[float] | None = None
    scatter: float | None = None
    scatter_causes: list[str] | None = None
    conditions: list[TurnConditions] | None = None
    first_step_ms: float | None = None
    planned_ms: float | None = None
    simulated_ms: float | None = None
    simulated_stall_ms: float | None = None
    simulated_transfer_ms: float | None = None
    simulated_overlap: float | None = None
    vanilla_step_ms_median: float | None = None
    vanilla_first_step_ms: float | None = None
    eager_step_ms_median: float | None = None
    eager_peak_bytes: int | None = None
    stall_ms: float | None = None
    link_gbps: float | None = None
    bytes_out: int | None = None
    bytes_in: int | None = None
    raw_bytes_out: int | None = None
    raw_bytes_in: int | None = None
    out_gbps: float | None = None
    in_gbps: float | None = None
    overlap: float | None = None
    transfer_ms: float | None = None
    compression: str = "none"
    codecs: dict[str, int] | None = None
    passive_swap_ins: int | None = None
    recomputes: int | None = None
    planning_ms: float | None = None
    latency_error: float | None = None
    capture_ms: float | None = None
    bit_identical: bool | None = None
    gradient_difference: float | None = None
    timeline: dict[str, list[float]] | None = None
    optimizer: str = ""
    rounds: int = 0
    rounds_taken: int = 0
    light: str | None = None
    iterations: int = 0
    warmup: int = 0
    seed: int = 0
    threads: int = 0
    versions: dict[str, str | None] | None = None
    machine: dict[str, Any] | None = None
    error: str | None = None

    @property
    def title(self) -> str:
        """The policy as it was requested."""
        return (self.label or self.policy) + (f" at {self.budget}" if self.budget else "")

    def with_values(self, **values: Any) -> Row:
        return replace(self, **values)

    def to_json(self) -> str:
        """Return the row as one line; numbers that JSON cannot express become null."""
        return json.dumps(json_value(asdict(self)), allow_nan=False)


def json_value(value: Any) -> Any:
    """Return a value as JSON types: floats with six digits after the point, NaN and infinities as None."""
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: json_value(item) for key, item in value.items()}
    return [json_value(item) for item in value] if isinstance(value, list) else value
