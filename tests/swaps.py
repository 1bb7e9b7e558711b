"""A plan that swaps with slack: in each long idle interval, out after the first use and in before the second."""

from __future__ import annotations

import numpy as np

from pg_tensile.planning.plan.plan import Event, EventKind, Plan
from pg_tensile.planning.plan.validation import validate
from pg_tensile.planning.trace.trace import Kind, Mode, Trace


def delayed_swaps(trace: Trace, longest_delay_us: int, seed: int = 0) -> Plan:
    """Swap activations over idle intervals of at least 6 operators; swap-ins are delayed by 0 to `longest_delay_us`."""
    generator = np.random.default_rng(seed)
    events = []
    for tensor in np.flatnonzero(trace.tensor_kind == Kind.ACTIVATION).tolist():
        used = np.flatnonzero(trace.access_tensor == tensor)
        uses, modes = trace.access_operator[used].tolist(), trace.access_mode[used].tolist()
        for first, second, mode in zip(uses, uses[1:], modes[1:], strict=False):
            if second - first < 6 or mode == Mode.CREATE:
                continue
            delay_us = int(generator.integers(longest_delay_us + 1))
            events.append(Event(EventKind.SWAP_OUT, tensor, first, first + 2))
            events.append(Event(EventKind.SWAP_IN, tensor, first + 3, second, delay_us=delay_us))
    plan = Plan.build(events)
    validate(trace, plan)
    return plan
