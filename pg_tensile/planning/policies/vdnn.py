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

from collections.abc import Mapping
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np

from pg_tensile.planning.device.profile import DeviceProfile
from pg_tensile.planning.plan.plan import Event, EventKind, Plan
from pg_tensile.planning.policies.coded import coded
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


class _Input(NamedTuple):
    """A layer's input feature map between forward and backward."""

    layer: int  # the first operator of the last layer that reads it in forward
    end: int  # the last operator of that layer
    tensor: int
    written: int  # the operator that wrote the version that is read
    needed: int  # the operator that reads it first in backward


def _plan(trace: Trace, which: Which) -> Plan:
    first, last = _layers(trace)
    layers: dict[int, list[_Input]] = {}
    for each in sorted(_inputs(trace, which, first, last)):
        layers.setdefault(each.layer, []).append(each)
    begins = {layer: min(first[each.needed] for each in inputs) for layer, inputs in layers.items()}
    events = []
    for layer, following in pairwise([*layers, None]):
        assert layer is not None
        begin = begins[layer]
        if following is not None and following < begin:
            launch = min(begin, begins[following])
        else:  # the last layer before this backward pass
            launch = layer + int(np.argmax(trace.phase[layer:] == Phase.BACKWARD))
        for each in layers[layer]:
            requested = max(layer - 1, each.written)
            events.append(Event(EventKind.SWAP_OUT, each.tensor, requested, each.end))
            events.append(Event(EventKind.SWAP_IN, each.tensor, launch - 1, min(last[launch] + 1, each.needed)))
    return Plan.build(events)


def _layers(trace: Trace) -> tuple[list[int], list[int]]:
    """Return the first and the last operator of each operator's layer."""
    count, phase = trace.operator_count, trace.phase.tolist()
    named = [(trace.module[at], phase[at]) for at in range(count)]
    together = [at > 0 and named[at][0] != "" and named[at] == named[at - 1] for at in range(count)]
    first, last = list(range(count)), list(range(count))
    for at in range(1, count):
        first[at] = first[at - 1] if together[at] else at
    for at in reversed(range(count - 1)):
        last[at] = last[at + 1] if together[at + 1] else at
    return first, last


def _inputs(trace: Trace, which: Which, first: list[int], last: list[int]) -> list[_Input]:
    """Return the feature maps that layers read but did not create themselves, and that backward reads again."""
    columns, phase = Columns(trace), trace.phase.tolist()
    convolved = {
        use.tensor
        for operator, uses in enumerate(columns.uses)
        if phase[operator] == Phase.FORWARD and "convolution" in trace.target[operator]
        for use in uses
        if use.mode == Mode.READ
    }
    found = []
    for tensor, accesses in enumerate(columns.accesses):
        if columns.persistent[tensor] or not columns.bytes[tensor] or (which == "conv" and tensor not in convolved):
            continue
        for read, needed in pairwise(accesses):
            made_outside = accesses[0] < first[read]
            if (phase[read], phase[needed]) == (Phase.FORWARD, Phase.BACKWARD) and made_outside:
                written = max(maker for maker in columns.makers[tensor] if maker <= read)
                found.append(_Input(first[read], last[read], tensor, written, needed))
    return found
