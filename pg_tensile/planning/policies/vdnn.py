"""vDNN (Rhu et al., MICRO 2016): layers' inputs are swapped out in forward, and in one layer ahead in backward.

A baseline for comparisons (TENSILE, section V-A). It has the static policies of the paper's section III-C, vDNN_conv
and vDNN_all; the paper's dynamic one chooses convolution algorithms as well. Neither considers sizes, times or a
budget.

*Layers.* Consecutive operators in the same module and phase are one layer; outside of modules each operator is one.
*Offload.* An input feature map is swapped out while the last layer in forward that reads it runs, after which nothing
in forward refers to it. That layer ends with the copy, so the next one finds the memory free.
*Prefetch.* While a layer runs in backward, the nearest earlier layer with feature maps on the host has them swapped in;
the search ends at the nearest convolution, so nothing comes sooner. That layer ends with the copy, too. The last
layer's inputs are swapped in with the first operator of backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Literal

import numpy as np

from pg_tensile.planning.building_blocks.coded import coded
from pg_tensile.planning.building_blocks.idle import IdleInterval, idle_intervals
from pg_tensile.planning.device.profile import DeviceProfile
from pg_tensile.planning.plan.plan import Event, EventKind, Plan
from pg_tensile.planning.trace.lists import Columns
from pg_tensile.planning.trace.trace import Mode, Phase, Trace

Which = Literal["conv", "all"]


@coded
def plan(
    traces: Mapping[int, Trace], profile: DeviceProfile, budget_bytes: int | None, which: Which = "conv"
) -> dict[int, Plan]:
    """Return plans for jobs that are planned independently of each other and of the budget.

    `which`: "conv" (vDNN_conv) moves the inputs of convolutions, "all" (vDNN_all) those of every layer. Raises
    ValueError for anything else.
    """
    if which not in ("conv", "all"):
        raise ValueError(f'vDNN moves the inputs of "conv" or "all" layers, not of "{which}"')
    return {job: _plan(trace, which) for job, trace in traces.items()}


def _plan(trace: Trace, which: Which) -> Plan:
    first, last = _layers(trace)
    maps = [(first[idle.last_user], last[idle.last_user], idle) for idle in _inputs(trace, which, first)]
    layers: dict[int, list[IdleInterval]] = {}  # by the first operator of the last layer that reads them in forward
    for reader, _, idle in sorted(maps):
        layers.setdefault(reader, []).append(idle)
    begins = {layer: min(first[idle.next_user] for idle in inputs) for layer, inputs in layers.items()}
    columns = Columns(trace)
    events = []
    for layer, following in pairwise([*layers, None]):
        assert layer is not None
        begin = begins[layer]
        if following is not None and following < begin:
            launch = min(begin, begins[following])
        else:  # the last layer before this backward pass
            launch = layer + int(np.argmax(trace.phase[layer:] == Phase.BACKWARD))
        for idle in layers[layer]:
            written = max(maker for maker in columns.makers[idle.tensor] if maker <= idle.last_user)
            out = Event(EventKind.SWAP_OUT, idle.tensor, max(layer - 1, written), last[layer])
            back = Event(EventKind.SWAP_IN, idle.tensor, launch - 1, min(last[launch] + 1, idle.next_user))
            events += [out, back]
    return Plan.build(events)


def _layers(trace: Trace) -> tuple[list[int], list[int]]:
    """Return the first and the last operator of each operator's layer."""
    count, phase = trace.operator_count, trace.phase.tolist()
    named = [(trace.module[operator], phase[operator]) for operator in range(count)]
    together = [i > 0 and named[i][0] != "" and named[i] == named[i - 1] for i in range(count)]
    first, last = list(range(count)), list(range(count))
    for operator in range(1, count):
        first[operator] = first[operator - 1] if together[operator] else operator
    for operator in reversed(range(count - 1)):
        last[operator] = last[operator + 1] if together[operator + 1] else operator
    return first, last


def _inputs(trace: Trace, which: Which, first: list[int]) -> Iterator[IdleInterval]:
    """Yield the feature maps that layers read but did not create themselves, and that backward reads again.

    Each is idle from its last use in forward to its first in backward.
    """
    columns, phase = Columns(trace), trace.phase.tolist()
    convolved = {
        use.tensor
        for operator, uses in enumerate(columns.uses)
        if phase[operator] == Phase.FORWARD and "convolution" in trace.target[operator]
        for use in uses
        if use.mode == Mode.READ
    }
    for interval in idle_intervals(trace).tolist():
        idle = IdleInterval(*interval)
        if columns.persistent[idle.tensor] or (which == "conv" and idle.tensor not in convolved):
            continue
        is_created_outside = columns.accesses[idle.tensor][0] < first[idle.last_user]
        if (phase[idle.last_user], phase[idle.next_user]) == (Phase.FORWARD, Phase.BACKWARD) and is_created_outside:
            yield idle
