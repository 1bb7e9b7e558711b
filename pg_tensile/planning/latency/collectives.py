"""Time of collectives on the network between the ranks of a job, before it has been measured.

A message of b bytes between neighbours takes α + β · b. In an all-reduce on a ring of N ranks, every rank passes
2 (N − 1) messages of an N-th of the bytes to its neighbour, so that β counts 2 (N − 1) / N times the bytes, which no
algorithm can undercut (Patarasuk and Yuan 2009; Thakur et al. 2005).

The network is not known when a job starts; measured steps replace the estimate, as they do for all operators.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np

from pg_tensile.planning.trace.trace import Floats, Mode, Trace

ALL_REDUCE = "pg_tensile.all_reduce_.default"  # begins; its last argument is the number of ranks
BUCKET = "aten.cat.default"  # makes a tensor of several gradients
WAIT = "pg_tensile.wait_.default"  # ends those that have begun, in their order

# of a message of TCP between neighbouring machines: at least 10 µs (Larsen et al. 2009), often several times that
LATENCY_US = 25.0
BYTES_PER_S = 1.25e9  # of Ethernet with 10 Gbit/s, in each of both directions at once


def ring_us(nbytes: float, ranks: int) -> float:
    """Return the time in µs of an all-reduce of `nbytes` on a ring of `ranks`; 0 for a single one."""
    return 2 * (ranks - 1) * (LATENCY_US + nbytes / ranks / BYTES_PER_S * 1e6)


def with_network_us(trace: Trace, latency_us: Floats) -> Floats:
    """Return float64[operators], µs: the latencies, and what each wait for a collective takes longer because of it.

    A collective is under way while the operators between its beginning and its wait are executed, and the network has
    one at a time. The ranks are taken to be on machines of their own, on a ring of 10 Gbit/s Ethernet.
    """
    waited_us = latency_us.copy()
    under_way = {exchange.wait: exchange for exchange in exchanges(trace)}
    begins = {exchange.begin: exchange for exchange in under_way.values()}
    now = free = 0.0
    ends: deque[float] = deque()
    for operator, us in enumerate(latency_us.tolist()):
        now += us
        if operator in begins:
            nbytes, ranks = reduced_bytes(trace, operator), rank_count(trace, operator)
            free = max(now, free) + ring_us(nbytes, ranks)
            ends.append(free)
        elif operator in under_way:
            longer = max(0.0, ends.popleft() - now)
            waited_us[operator] += longer
            now += longer
    return waited_us


class Exchange(NamedTuple):
    """A collective: the operators that begin it and wait for it, and the tensor that it changes meanwhile."""

    begin: int
    wait: int
    tensor: int


def exchanges(trace: Trace) -> list[Exchange]:
    """Return the collectives in their order."""
    return [
        Exchange(begin, wait, int(trace.access_tensor[trace.access_start[begin]]))
        for begin, wait in zip(collectives(trace), _with_target(trace, WAIT), strict=True)
    ]


def exchanged_names(trace: Trace, exchange: Exchange) -> list[str]:
    """Return the names of the gradients that are exchanged: of those in the bucket, or of the tensor itself."""
    made = trace.operators[int(trace.tensor_first[exchange.tensor])]
    sources = [tensor for tensor, mode in made.accesses if mode == Mode.READ] if made.target == BUCKET else []
    return [trace.tensor_name[tensor] for tensor in sources or [exchange.tensor]]


def collectives(trace: Trace) -> list[int]:
    """Return the operators that begin collectives."""
    return _with_target(trace, ALL_REDUCE)


def _with_target(trace: Trace, target: str) -> list[int]:
    codes = [code for code, value in enumerate(trace.target.values) if value == target]
    found: list[int] = np.flatnonzero(np.isin(trace.target.codes, codes)).tolist()
    return found


def rank_count(trace: Trace, operator: int) -> int:
    """Return the number of ranks that take part in a collective."""
    return int(trace.signature[operator].rpartition(", ")[2])


def reduced_bytes(trace: Trace, operator: int) -> int:
    """Return the bytes of all tensors that a collective changes."""
    accesses = slice(*trace.access_start[operator : operator + 2])
    changed = trace.access_tensor[accesses][trace.access_mode[accesses] == Mode.WRITE]
    return int(trace.tensor_bytes[changed].sum())
