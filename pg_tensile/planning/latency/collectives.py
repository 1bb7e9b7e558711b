"""Time of collectives on the network between the ranks of a job, before it has been measured.

An all-reduce among N ranks that pass parts around a ring takes α + β · 2 (N − 1) / N · bytes: every rank sends and
receives each part twice, but for those that it begins or ends with (Patarasuk and Yuan 2009). The network is not known
when a job starts; measured steps replace the estimate, as they do for all operators.
"""

from __future__ import annotations

import numpy as np

from pg_tensile.planning.trace.trace import Floats, Mode, Trace

ALL_REDUCE = "pg_tensile.all_reduce_.default"  # its last argument is the number of ranks
LATENCY_US = 50.0  # α: of messages among processes of neighbouring machines, by TCP
BYTES_PER_S = 1.25e9  # 1 / β: Ethernet of 10 Gbit/s


def network_us(trace: Trace) -> Floats:
    """Return float64[operators], µs: the time of each collective on the network; 0 for all other operators."""
    network = np.zeros(trace.operator_count)
    codes = [code for code, target in enumerate(trace.target.values) if target == ALL_REDUCE]
    for operator in np.flatnonzero(np.isin(trace.target.codes, codes)).tolist():
        accesses = slice(*trace.access_start[operator : operator + 2])
        changed = trace.access_tensor[accesses][trace.access_mode[accesses] == Mode.WRITE]
        ranks = int(trace.signature[operator].rpartition(", ")[2])
        sent = 2 * (ranks - 1) / ranks * int(trace.tensor_bytes[changed].sum())
        network[operator] = LATENCY_US + sent / BYTES_PER_S * 1e6
    return network
