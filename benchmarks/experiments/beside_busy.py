"""Run the command `pg-tensile bench` beside two processes that keep all cores busy, and print its rows.

The arguments are the command's. The plans are made with latencies that were measured beside them, too.
"""

from __future__ import annotations

import json
import sys

from benchmarks.command import run_bench
from pg_tensile.execution.measuring.busy_processes import BusyProcesses

PROCESSES = 2


def main(arguments: list[str]) -> int:
    with BusyProcesses(PROCESSES, "cpu"):
        done, rows = run_bench(arguments)
    print(done.stderr, file=sys.stderr, end="")
    for row in rows:
        print(json.dumps(row))
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
