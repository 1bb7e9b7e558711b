"""A plan that swaps with room: for every gap between two uses, out after the one and in well before the other."""

from __future__ import annotations

import numpy as np

from pg_tensile.planning.plan.execution import validate
from pg_tensile.planning.plan.plan import Event, EventKind, Plan
from pg_tensile.planning.trace.trace import Kind, Mode, Trace


def delayed_swaps(trace: Trace, longest_delay_us: int, seed: int = 0) -> Plan:
    """Swaps activations over gaps of at least 6 operators; the copies in are delayed by 0 … `longest_delay_us`."""
    generator = np.random.default_rng(seed)
    events = []
    for tensor in np.flatnonzero(trace.tensor_kind == Kind.ACTIVATION).tolist():
        used = np.flatnonzero(trace.access_tensor == tensor)
        uses, modes = trace.access_operator[used].tolist(), trace.access_mode[used].tolist()
        for one, two, mode in zip(uses, uses[1:], modes[1:], strict=False):
            if two - one < 6 or mode == Mode.CREATE:
                continue
            delay_us = int(generator.integers(longest_delay_us + 1))
            events.append(Event(EventKind.SWAP_OUT, tensor, one, one + 2))
            events.append(Event(EventKind.SWAP_IN, tensor, one + 3, two, delay_us=delay_us))
    plan = Plan.build(events)
    validate(trace, plan)
    return plan
