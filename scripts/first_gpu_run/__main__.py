"""Run one part; see the package."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

from scripts.cluster import REPOSITORY
from scripts.first_gpu_run import LIMIT_S

FOLDER = REPOSITORY / "first-gpu-run"
NEEDED = ("torch", "triton", "numpy", "scipy", "pytest", "hypothesis", "safetensors", "rich", "pynvml", "psycopg")


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="first_gpu_run", description="Try the GPU path on this machine, in parts.")
    parser.add_argument("part", type=int, nargs="?", help="1 to 6; without it, the next one without results")
    parser.add_argument("--device", choices=("cuda", "emulated"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="small networks")
    parser.add_argument("--seconds", type=float, default=LIMIT_S, metavar="S", help="time limit (%(default)s)")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of pages and results (first-gpu-run)")
    return parser.parse_args(arguments)


def check(device: str) -> None:
    """Check that what the parts need is there. Exits with a hint if something is missing."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        hint = "Install them, or on a machine without a network a bundle: docs/without-network.md."
        sys.exit(f"first-gpu-run: modules are missing: {' '.join(missing)}\nhint: {hint}")
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        sys.exit(
            "first-gpu-run: PyTorch sees no CUDA device\nhint: Check nvidia-smi, and that torch is built for CUDA."
        )


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    check(options.device)
    from scripts.first_gpu_run import page
    from scripts.first_gpu_run.machine import machine
    from scripts.first_gpu_run.parts import PARTS, Where
    from scripts.first_gpu_run.steps import run_steps

    options.folder.mkdir(parents=True, exist_ok=True)
    facts = machine(options.device, options.quick)
    left = page.remaining(options.folder, facts)
    if options.part is None and not left:
        print("first-gpu-run: all parts have run; PART=N runs one again")
        return 0
    wanted = options.part if options.part is not None else left[0].number
    part = next((part for part in PARTS if part.number == wanted), None)
    if part is None:
        sys.exit(f"first-gpu-run: there is no part {wanted}\nhint: Parts are 1 to {len(PARTS)}.")
    log = options.folder / f"part-{part.number}.log"
    log.write_text("")
    print(f"part {part.number}: {part.title}", flush=True)
    outcomes = []
    for outcome in run_steps(part.steps(Where(options.device, options.quick)), options.seconds, log):
        outcomes.append(outcome)
        page.write(options.folder, part, facts, outcomes, part.checks(outcomes, options.device == "cuda"))
        print(f"{outcome.name}: {outcome.verdict}, {outcome.seconds:.0f} s, {len(outcome.rows)} results", flush=True)
    print(f"The page is {options.folder / f'part-{part.number}.md'}.")
    return int(any(outcome.status != 0 for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
