"""What works on the machine: each package is imported, a server is started, the GPU is named.

`run` starts the parts at the same time, each in a process of the environment that unpack.py has made; a process prints
a line of JSON for each thing that it has found.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from scripts.gpu_bundle.manifest import Manifest

REPOSITORY = Path(__file__).resolve().parents[2]
# Packages that import PyTorch, together: one process imports it once.
WITH_TORCH = ("torch", "tabm", "rtdl-num-embeddings", "transformers", "peft", "pytorchcv")
# Modules whose name is not their package's
MODULES = {"scikit-learn": "sklearn", "nvidia-ml-py": "pynvml", "pytest-xdist": "xdist", "lz4": "lz4.frame"}
TRAINING = "training in a server"
LIMIT_S = 120
GRACE_S = 15  # from the interrupt until a process is killed


class Finding(NamedTuple):
    """A thing, its version or the like, and what is wrong with it, if anything."""

    name: str
    found: str
    problem: str = ""


def numbers(version: str) -> list[int]:
    """Return the release of a version: [2, 11, 0] of 2.11.0+cu130."""
    return [int(part) for part in re.match(r"\d+(\.\d+)*", version)[0].split(".")]  # type: ignore[index]


# ---- in the processes ------------------------------------------------------------------------------------------------


def look_at_package(name: str, minimum: str) -> Finding:
    """Import a package and compare its version."""
    try:
        importlib.import_module(MODULES.get(name, name.replace("-", "_")))
        version = metadata.version(name)
    except Exception as error:
        return Finding(name, "", f"{type(error).__name__}: {error}".splitlines()[0])
    old = numbers(version) < numbers(minimum)
    return Finding(name, version, f"older than {minimum}" if old else "")


def look_at_gpu() -> Finding:
    """Name the GPU that PyTorch sees; that there is none is no problem."""
    import torch

    if not torch.cuda.is_available():
        return Finding("GPU", "none")
    properties = torch.cuda.get_device_properties(0)
    memory = f"{properties.total_memory / 2**30:.0f} GiB"
    return Finding("GPU", f"{properties.name}, {memory}, CUDA {torch.version.cuda}")


def look_at_packages(minimum: Mapping[str, str]) -> Iterator[Finding]:
    for name, version in minimum.items():
        yield look_at_package(name, version)
    if "torch" in minimum:
        yield look_at_gpu()


def look_at_server() -> Iterator[Finding]:
    """Start a server with the extension and train a small model in it, as its user."""
    from scripts.cluster import temporary_cluster

    folder = Path(tempfile.gettempdir(), f"pg_tensile-check-{os.getpid()}")
    with temporary_cluster(folder) as cluster:
        yield Finding("PostgreSQL", cluster.version().removeprefix("postgres (PostgreSQL)").strip())
        try:
            with cluster.connect() as conn:
                yield Finding(TRAINING, train(conn))
        except Exception as error:
            yield Finding(TRAINING, "", f"{error}\n{cluster.log()[-2000:]}")


def train(conn: Any) -> str:
    """Train a small model, and return the state in which the job ended."""
    conn.execute("CREATE EXTENSION pg_tensile CASCADE")
    conn.execute("CREATE TABLE points AS SELECT x, 2 * x AS y FROM generate_series(1, 100) x")
    conn.execute("""SELECT register_model('line', '{"type": "linear"}')""")
    ((job,),) = conn.execute("SELECT train_model('line', 'SELECT * FROM points', 'y')")
    ((state,),) = conn.execute("SELECT wait_for_job(%s, %s)", (job, f"{LIMIT_S // 2} s"))
    return str(state)


# ---- before them -----------------------------------------------------------------------------------------------------


def start(python: Path, environment: Mapping[str, str], minimum: Mapping[str, str] | None) -> subprocess.Popen[str]:
    """Start a process that looks at packages or, without any, at the server."""
    command = [str(python), "-m", "scripts.gpu_bundle.check", json.dumps(minimum)]
    return subprocess.Popen(
        command,
        cwd=REPOSITORY,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def findings(process: subprocess.Popen[str], expected: Sequence[str]) -> Iterator[Finding]:
    """Yield what a process has found, and as missing what it has not come to."""
    try:
        output, errors = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)  # it removes its server
        try:
            output, errors = process.communicate(timeout=GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            output, errors = process.communicate()
    found = [Finding(*json.loads(line)) for line in output.splitlines() if line.startswith("[")]
    yield from found
    last = ([line for line in errors.splitlines() if line.strip()] or [f"exit status {process.returncode}"])[-1]
    yield from (Finding(name, "", last) for name in expected if name not in {finding.name for finding in found})


def look(manifest: Manifest, folder: Path) -> list[Finding]:
    python = folder / "venv" / "bin" / "python"
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PG", "PYTHON"))}
    environment["PG_CONFIG"] = str(folder / "server" / manifest.bin / "pg_config")
    if user := os.environ.get("PG_TENSILE_USER"):
        environment["PG_TENSILE_USER"] = user
    with_torch = {name: manifest.minimum[name] for name in WITH_TORCH if name in manifest.minimum}
    others = {name: version for name, version in manifest.minimum.items() if name not in with_torch}
    started = [
        (start(python, environment, with_torch), [*with_torch, "GPU"]),
        (start(python, environment, None), ["PostgreSQL", TRAINING]),
        (start(python, environment, others), [*others]),
    ]
    return [finding for process, expected in started for finding in findings(process, expected)]


def run(manifest: Manifest, folder: Path) -> bool:
    """Print a table of what was found, write it as check.json, and return whether everything works."""
    began = time.monotonic()
    found = [Finding("Python", sys.version.split()[0]), *look(manifest, folder)]
    for name, version, problem in sorted(found, key=lambda finding: bool(finding.problem)):
        print(f"{name:22} {version}" if not problem else f"{name:22} {version} FAILED: {problem}", flush=True)
    facts = {"revision": manifest.revision, "executable": sys.executable, "seconds": time.monotonic() - began}
    facts["found"] = [finding._asdict() for finding in found]
    (folder / "check.json").write_text(json.dumps(facts, indent=1) + "\n")
    return not any(finding.problem for finding in found)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background jobs of a shell
    asked = json.loads(sys.argv[1])
    for finding in look_at_server() if asked is None else look_at_packages(asked):
        print(json.dumps(finding), flush=True)
