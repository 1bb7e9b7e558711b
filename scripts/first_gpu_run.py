"""`make first-gpu-run`: tests and short benchmarks of the GPU path on this machine's GPU, and a page of the results.

Needs one GPU, PyTorch for it and pytest; PostgreSQL is not needed. It runs, in less than 15 minutes:

- the tests of the accelerator (tests/accelerator), which otherwise run on an emulated one;
- those of the device by itself with PyTorch's sanitizer of CUDA, which looks for work that is not ordered;
- the benchmark's command on two networks, with `none` and `joint` at several budgets, once as device graphs.

`make first-gpu-run-server` needs PostgreSQL, too, and runs jobs and the demo in a server on the GPU.

Each part has a time limit and a log, and one that fails does not keep the next from running. The folder first-gpu-run
has the page, the logs and the results as JSON: send all of it back, whatever came out.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
NEEDED = ("torch", "triton", "numpy", "scipy", "pytest", "hypothesis", "safetensors", "rich", "nvidia-ml-py")
TINY = "benchmarks.experiments.tiny"
POLICIES = "none,joint:budget=100%,joint:budget=60%,joint:budget=40%,joint:device_graphs=true:budget=60%"


class Part(NamedTuple):
    """One part of the run: a command below `python -m`, and its seconds at most."""

    name: str
    arguments: tuple[str, ...]
    limit_s: int
    environment: Mapping[str, str]


def bench(name: str, model: str, kwargs: str, sizes: str, rows: int) -> tuple[str, tuple[str, ...]]:
    """Return a name, and the arguments of the benchmark's command about one network of benchmarks/experiments."""
    network = ("--model", f"{TINY}:{model}", "--kwargs", kwargs, "--input", f"float32:{sizes}", "--batch", str(rows))
    return name, (
        "pg_tensile",
        "bench",
        *network,
        "--classes",
        "10",
        "--early-update",
        "--light",
        "--policies",
        POLICIES,
    )


NETWORKS = (
    bench("cnn", "cnn", '{"channels": 64, "layers": 8, "norm": true}', "3x64x64", 64),
    bench("attention", "Attention", '{"width": 512}', "256x512", 64),
)
SMALL_NETWORKS = (bench("cnn", "cnn", '{"norm": true}', "3x16x16", 8),)  # for the emulated device


def parts(device: str, folder: Path) -> list[Part]:
    """Return the parts of a run on `device`: cuda, or emulated to try this program itself."""
    tests = ("pytest", "-q", "-p", "no:cacheprovider", "--confcutdir", "tests/accelerator")
    environment = {"PG_TENSILE_ACCELERATOR": device}
    if device == "emulated":
        environment["PYTHONPATH"] = f"{ROOT}{os.pathsep}{ROOT / 'tests' / 'emulated'}"
    sanitised = environment | {"TORCH_CUDA_SANITIZER": "1"}
    sanitizer = Part("sanitizer", (*tests, "tests/accelerator/test_device.py"), 180, sanitised)
    return [
        Part("tests", (*tests, "tests/accelerator"), 300 if device == "cuda" else 1200, environment),
        *([sanitizer] if device == "cuda" else []),
        *(
            Part(name, (*arguments, "--device", device, "--json", str(folder / f"{name}.json")), 180, environment)
            for name, arguments in (NETWORKS if device == "cuda" else SMALL_NETWORKS)
        ),
    ]


def server_parts(device: str) -> list[Part]:
    """Return the parts of a run with a server: its tests on the device, and the demo on the device that `auto` is."""
    tests = ("pytest", "-q", "-p", "no:cacheprovider", "tests/server/test_accelerator.py")
    return [
        Part("server", tests, 600, {"PG_TENSILE_ACCELERATOR": device}),
        Part("demo", ("scripts.demo",), 600, {"DEMO_DIR": tempfile.mkdtemp(prefix="first-gpu-run.")}),
    ]


class Outcome(NamedTuple):
    """Result of a part: its exit status, None after the time limit, and the last line of its log that is not empty."""

    part: Part
    status: int | None
    seconds: float
    last: str


def run(part: Part, folder: Path) -> Outcome:
    log = folder / f"{part.name}.log"
    began = time.monotonic()
    with log.open("w") as output:
        try:
            done = subprocess.run(
                [sys.executable, "-m", *part.arguments], cwd=ROOT, stdout=output, stderr=subprocess.STDOUT,
                env=os.environ | dict(part.environment), timeout=part.limit_s,
            )  # fmt: skip
            status = done.returncode
        except subprocess.TimeoutExpired:
            status = None
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return Outcome(part, status, time.monotonic() - began, lines[-1] if lines else "")


def machine(device: str) -> dict[str, str]:
    """Return what the results depend on."""
    import torch

    facts = {"python": platform.python_version(), "system": platform.platform()}
    facts |= {name: version for name in NEEDED if (version := installed(name))}
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        facts |= {
            "gpu": properties.name,
            "compute capability": f"{properties.major}.{properties.minor}",
            "memory": f"{properties.total_memory / 2**30:.1f} GiB",
            "cuda": str(torch.version.cuda),
            "driver": driver(),
        }
    return facts


def installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"


def bench_rows(path: Path) -> Iterator[tuple[str, ...]]:
    """Yield policy, budget, peak and step of each row that the benchmark's command wrote."""
    if not path.exists():
        return
    for line in path.read_text().splitlines():
        row: dict[str, Any] = json.loads(line)
        start = (row["label"], row["budget"] or "")
        if row["error"] is not None:
            yield (*start, row["error"], "", "")
            continue
        same = {True: "identical", False: "different", None: ""}[row["bit_identical"]]
        yield (*start, f"{row['device_peak_bytes'] / 2**20:.0f} MiB", f"{row['step_ms_median']:.2f} ms", same)


def page(facts: Mapping[str, str], outcomes: Sequence[Outcome], folder: Path) -> str:
    lines = ["# First run on a GPU", "", *(f"- {name}: {value}" for name, value in facts.items()), ""]
    lines += ["| part | exit status | seconds | last line |", "| --- | --- | --- | --- |"]
    for part, status, seconds, last in outcomes:
        shown = "time limit" if status is None else str(status)
        lines.append(f"| {part.name} | {shown} | {seconds:.0f} | {last[:200].replace('|', '/')} |")
    for outcome in outcomes:
        rows = list(bench_rows(folder / f"{outcome.part.name}.json"))
        if rows:
            lines += [
                "",
                f"## {outcome.part.name}",
                "",
                "| policy | budget | peak | step | results |",
                "| --- | --- | --- | --- | --- |",
            ]
            lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="first_gpu_run", description="Try the GPU path on this machine.")
    parser.add_argument("--device", choices=("cuda", "emulated"), default="cuda")
    parser.add_argument("--server", action="store_true", help="jobs and the demo in a server, which must be installed")
    parser.add_argument("--folder", type=Path, default=ROOT / "first-gpu-run")
    options = parser.parse_args()
    missing = [name for name in NEEDED if installed(name) is None]
    if missing:
        sys.exit(
            f"first-gpu-run: these packages are missing: {' '.join(missing)}\nhint: pip install {' '.join(missing)}"
        )
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("first-gpu-run: PyTorch sees no CUDA device: check nvidia-smi, and that torch is built for CUDA")
    options.folder.mkdir(parents=True, exist_ok=True)
    facts, outcomes = machine(options.device), []
    for part in server_parts(options.device) if options.server else parts(options.device, options.folder):
        print(f"{part.name} …", flush=True)
        outcomes.append(run(part, options.folder))
        (options.folder / "page.md").write_text(page(facts, outcomes, options.folder))
        print(f"{part.name}: {outcomes[-1].last}", flush=True)
    print(f"Please send back the folder {options.folder}, from page.md on.")
    return 0 if all(outcome.status == 0 for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
