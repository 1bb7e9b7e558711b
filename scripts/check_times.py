"""Wall and CPU time of what checks a change, phase by phase, in one clone or several in turn.

    python -m scripts.check_times RESULTS.json --in before=../before --in after=. lint tests long

Runs each phase in each clone, in the order given, in a control group of its own (see control_group.py), and adds a row
to RESULTS.json as soon as it has ended. Rows that are there are not measured again, so a run that was stopped goes on
where it was. `--rounds N` measures everything N times.

Columns: revision, clone, phase, round; wall (seconds); cpu (CPU seconds of all processes, detached ones included); idle
(share of the machine's processor time that nothing used); status (exit status: 1 when tests have failed).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import time
from pathlib import Path

from scripts.control_group import ControlGroup

PYTEST = ".venv/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -q"
PHASES = {
    "venv": "make -s venv",
    "deploy": "make -s deploy",
    "headers": "make -s test-headers",
    "lint": "rm -rf .mypy_cache .ruff_cache && make -s lint",
    "emulator": "rm -rf build/emulated-* && make -s emulator",
    "tests": f"make -s deploy && {PYTEST} -m 'not long' tests",
    # a revision without parts of the long tests has no profile for them either
    "long": f"make -s deploy && {PYTEST} $([ ! -e tests/parts.py ] || echo --hypothesis-profile long) -m long tests",
    "major": "make -s test-major",
    "image": "make -s test-docker",
    "make test": "make -s test",
    "make test-long": "make -s test-long",
    "ci": "bash .ci/run",
    "demo": "make -s demo; status=$?; make -s demo-remove; exit $status",
}


def processor_times() -> tuple[int, int]:
    """Return the idle and all processor time since the machine has started, in ticks."""
    fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return fields[3] + fields[4], sum(fields)


def measure(command: str, folder: Path, log: Path) -> dict[str, float]:
    """Run a shell command in a folder, its output in a log, and return its times and exit status."""
    group = ControlGroup(f"pg_tensile-check-{os.getpid()}")
    try:
        idle, total = processor_times()
        start = time.monotonic()
        with log.open("w") as output:
            process = subprocess.run(
                ["bash", "-c", f"echo $$ > {group.folder}/cgroup.procs && {command}"],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                check=False,
            )
        wall = time.monotonic() - start
        idle_now, total_now = processor_times()
        return {
            "wall": round(wall, 1),
            "cpu": round(group.cpu_seconds(), 1),
            "idle": round((idle_now - idle) / (total_now - total), 3),
            "status": process.returncode,
        }
    finally:
        group.remove()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--in", dest="clones", action="append", required=True, metavar="NAME=FOLDER")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--logs", type=Path, default=Path("/tmp"))
    parser.add_argument("phases", nargs="+", choices=PHASES)
    arguments = parser.parse_args()
    rows = json.loads(arguments.results.read_text()) if arguments.results.exists() else []
    for turn in range(1, arguments.rounds + 1):
        for phase in arguments.phases:
            for name, folder in (clone.split("=", 1) for clone in arguments.clones):
                revision = subprocess.check_output(["git", "-C", folder, "rev-parse", "--short=8", "HEAD"], text=True)
                key = {"revision": revision.strip(), "clone": name, "phase": phase, "round": turn}
                if any(key.items() <= row.items() for row in rows):
                    continue
                log = arguments.logs / f"{name}-{phase.replace(' ', '-')}-{turn}.log"
                rows.append(key | measure(PHASES[phase], Path(folder), log))
                arguments.results.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
                print(json.dumps(rows[-1]), flush=True)


if __name__ == "__main__":
    main()
