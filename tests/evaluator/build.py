"""Compilation of the evaluator (pg_tensile/csrc/evaluator) without a server, once for each version of its sources."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shlex
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.repository import REPOSITORY

CSRC = REPOSITORY / "pg_tensile" / "csrc"
FOLDER = Path(__file__).parent
SOURCES = sorted((CSRC / "evaluator").glob("*.c"))
HEADERS = sorted([*(CSRC / "evaluator").glob("*.h"), CSRC / "base" / "compat.h", *FOLDER.glob("*.h")])
WARNINGS = ["-Wall", "-Wextra", "-Wshadow", "-Wno-unused-parameter", "-Wno-missing-field-initializers"]
FLAGS = [*WARNINGS, "-Wno-sign-compare", "-Werror", "-O2", "-g", "-fno-strict-aliasing", "-fwrapv"]
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer"]
# As in the Makefile
SCALING = ["-O3", "-ffp-contract=off", "-fno-trapping-math", "-fno-math-errno"]
OWN_FLAGS = {"dense.c": ["-O3"], "scaling.c": SCALING}


def library() -> Path:
    """Return the path of the evaluator as a shared library."""
    return _built("evaluator.so", [FOLDER / "memory.c"], ["-fPIC"], ["-shared"])


def fuzzer() -> Path:
    """Return the path of a program that mutates stored versions and images, with sanitizers (fuzz.c)."""
    return _built("fuzz", [FOLDER / "memory.c", FOLDER / "fuzz.c"], SANITIZERS, SANITIZERS)


def _built(name: str, sources: Sequence[Path], flags: Sequence[str], link_flags: Sequence[str]) -> Path:
    """Return the path of a file in build/, in a folder named by what it is made of.

    Several processes may build at once: one compiles, the others wait."""
    everything = [*SOURCES, *sources]
    digest = hashlib.sha256(f"{FLAGS} {flags} {OWN_FLAGS} {_configured('--version')}".encode())
    for path in sorted([*everything, *HEADERS]):
        digest.update(path.name.encode() + path.read_bytes())
    folder = REPOSITORY / "build" / f"{name.removesuffix('.so')}-{digest.hexdigest()[:16]}"
    built = folder / name
    if built.exists():
        return built
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            _compile(everything, flags, link_flags, folder, built)
    return built


def _compile(
    sources: Sequence[Path], flags: Sequence[str], link_flags: Sequence[str], folder: Path, built: Path
) -> None:
    includes = ["-I", str(CSRC), "-I", _configured("--includedir-server"), "-I", _configured("--includedir")]
    command = ["gcc", "-c", "-DFRONTEND", "-D_GNU_SOURCE", *FLAGS, *flags, *includes]
    objects = [folder / f"{source.stem}.o" for source in sources]
    commands = [
        [*command, *OWN_FLAGS.get(source.name, []), str(source), "-o", str(target)]
        for source, target in zip(sources, objects, strict=True)
    ]
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        codes = list(threads.map(subprocess.call, commands))
    if any(codes):
        raise RuntimeError("the evaluator does not compile: see the messages above")
    libraries = [f"-L{_configured('--pkglibdir')}", f"-L{_configured('--libdir')}"]
    libraries += ["-lpgcommon_shlib", "-lpgport_shlib", "-lm"]
    unfinished = built.with_suffix(".new")
    subprocess.run(["gcc", *link_flags, *map(str, objects), *libraries, "-o", str(unfinished)], check=True)
    unfinished.rename(built)


def _configured(what: str) -> str:
    command = [*shlex.split(os.environ.get("PG_CONFIG", "pg_config")), what]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
