"""The lock file `requirements.lock`: every package of the children's environment, with the hashes of its wheels.

    .venv/bin/python -m scripts.lock

Resolves the pins of requirements.txt that the server needs for Linux and each Python of PYTHONS, with uv, from PyPI;
requirements-test.txt says which of several possible versions is tested. pg-tensile-setup installs from the file, and
the bundle for machines without a network takes its versions from it.

PyTorch's own line has no hash: there is a build for each index, and pg-tensile-setup asks which. The libraries of CUDA,
which PyPI's build of it needs, are left out for the same reason.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import canonicalize_name, parse_wheel_filename

from scripts.cluster import REPOSITORY

LOCK = REPOSITORY / "requirements.lock"
EXTRAS = ("server", "compression", "pretrained")
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
MACHINES = ("x86_64", "aarch64")
GLIBC = 36  # of Debian 12: 2.36
UV = "uv==0.13.9"
# Packages of CUDA that PyTorch brings: those of NVIDIA, and the compiler of kernels
OF_CUDA = re.compile(r"(nvidia|cuda)-|triton$")
MB = 1_000_000


class Locked(NamedTuple):
    """A package in the lock file. `marker` is empty if every Python needs it; PyTorch has no `hashes`."""

    name: str
    version: str
    marker: str = ""
    hashes: tuple[str, ...] = ()


# ---- reading ---------------------------------------------------------------------------------------------------------


def pins(path: Path) -> dict[str, Requirement]:
    """Return the requirements of a file whose lines pin a version, by name."""
    lines = [line.partition("#")[0].strip() for line in path.read_text().splitlines()]
    found = [Requirement(line) for line in lines if line and not line.startswith("-")]
    return {canonicalize_name(requirement.name): requirement for requirement in found}


def wanted() -> dict[str, Requirement]:
    """Return the pins of requirements.txt that the client's base and the server's extras name, by name."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    lines = project["dependencies"] + [line for extra in EXTRAS for line in optional[extra]]
    tested = pins(REPOSITORY / "requirements.txt")
    return {name: tested[name] for name in sorted(canonicalize_name(Requirement(line).name) for line in lines)}


def read(path: Path = LOCK) -> list[Locked]:
    """Return the packages of a lock file."""
    found = []
    for entry in re.sub(r"\\\n", "", path.read_text()).splitlines():
        if entry and not entry.startswith("#"):
            text, *hashes = entry.split(" --hash=")
            requirement = Requirement(text.strip())
            (clause,) = requirement.specifier
            name, marker = canonicalize_name(requirement.name), str(requirement.marker or "")
            found.append(Locked(name, clause.version, marker, tuple(part.strip() for part in hashes)))
    return found


# ---- resolving -------------------------------------------------------------------------------------------------------


def resolve(requirements: Sequence[Requirement], constraints: Sequence[Requirement]) -> list[dict[str, Any]]:
    """Return the packages that uv chooses from PyPI, as entries of a pylock.toml (PEP 751)."""
    with tempfile.TemporaryDirectory(prefix="lock-") as scratch:
        folder = Path(scratch)
        pip = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--target",
            scratch,
            UV,
        ]
        subprocess.run(pip, check=True)
        (folder / "wanted").write_text("".join(f"{requirement}\n" for requirement in requirements))
        (folder / "tested").write_text("".join(f"{constraint}\n" for constraint in constraints))
        uv = [
            str(folder / "bin" / "uv"),
            "pip",
            "compile",
            "--quiet",
            "--no-config",
            "--universal",
            "--only-binary=:all:",
        ]
        uv += ["--python-version", PYTHONS[0], "--constraint", str(folder / "tested"), "--format", "pylock.toml"]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("UV_")}
        subprocess.run(
            [*uv, "--output-file", str(folder / "pylock.toml"), str(folder / "wanted")], check=True, env=environment
        )
        return tomllib.loads((folder / "pylock.toml").read_text())["packages"]


def is_needed(marker: str | None, python: str, machine: str = MACHINES[0]) -> bool:
    """Return whether a marker holds under Linux."""
    environment = {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "implementation_name": "cpython",
        "os_name": "posix",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": machine,
    }
    return marker is None or Marker(marker).evaluate(environment)


def shortened(marker: str | None) -> str | None:
    """Return a marker for the Pythons that need a package under Linux: empty if all do, None if none does."""
    needing = [python for python in PYTHONS if any(is_needed(marker, python, machine) for machine in MACHINES)]
    if needing == [*PYTHONS]:
        return ""
    if not needing:
        return None
    first, last = PYTHONS.index(needing[0]), PYTHONS.index(needing[-1])
    parts = [f'python_version >= "{needing[0]}"'] if first else []
    parts += [f'python_version < "{PYTHONS[last + 1]}"'] if needing[-1] != PYTHONS[-1] else []
    if needing != [*PYTHONS[first : last + 1]]:
        raise ValueError(f"the Pythons {', '.join(needing)} are no range: {marker}")
    return " and ".join(parts)


def tags(python: str) -> dict[Tag, int]:
    """Return the tags of wheels that an interpreter of Debian accepts on x86-64, the best first."""
    version = tuple(map(int, python.split(".")))
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in range(GLIBC, 4, -1)]
    platforms += [f"manylinux{old}_x86_64" for old in ("2014", "2010", "1")] + ["linux_x86_64"]
    accepted = [
        *cpython_tags(version, platforms=platforms),
        *compatible_tags(version, f"cp{version[0]}{version[1]}", platforms),
    ]
    return {tag: rank for rank, tag in enumerate(accepted)}


def size(entry: Mapping[str, Any], python: str) -> int:
    """Return the bytes of the wheel that pip would take. Raises ValueError if there is none for this Python."""
    accepted = tags(python)
    ranked = []
    for wheel in entry["wheels"]:
        ranks = [accepted[tag] for tag in parse_wheel_filename(wheel["url"].rpartition("/")[2])[3] if tag in accepted]
        ranked += [(min(ranks), wheel["size"])] if ranks else []
    if not ranked:
        raise ValueError(f"{entry['name']} {entry['version']} has no wheel for Python {python}")
    return min(ranked)[1]


# ---- writing ---------------------------------------------------------------------------------------------------------


def is_of_torch(name: str) -> bool:
    """Return whether a package comes with PyTorch, from the index that PyTorch is taken from."""
    return name == "torch" or (bool(OF_CUDA.match(name)) and name not in wanted())


def sizes(entries: Sequence[Mapping[str, Any]], python: str) -> tuple[int, int]:
    """Return the megabytes to fetch for a Python: of the locked packages, and of PyTorch with CUDA."""
    sums = [0, 0]
    for entry in entries:
        if is_needed(entry.get("marker"), python):
            sums[is_of_torch(entry["name"])] += size(entry, python)
    return round(sums[0] / MB), round(sums[1] / MB)


def locked(entries: Sequence[Mapping[str, Any]]) -> Iterator[Locked]:
    for entry in entries:
        marker = shortened(entry.get("marker"))
        if marker is not None and (entry["name"] == "torch" or not is_of_torch(entry["name"])):
            hashes = sorted(f"sha256:{wheel['hashes']['sha256']}" for wheel in entry["wheels"])
            yield Locked(entry["name"], entry["version"], marker, () if entry["name"] == "torch" else tuple(hashes))


def text(entries: Sequence[Mapping[str, Any]]) -> str:
    """Return the lock file."""
    lines = [
        "# The packages of the children's environment, from the pins of requirements.txt (`python -m scripts.lock`).",
        "# pg-tensile-setup installs them. PyTorch has no hash, because each index has a build of its own.",
        "#",
        "# Megabytes to fetch on x86-64, for each Python: the packages with hashes; PyTorch with CUDA from PyPI",
    ]
    for python in PYTHONS:
        others, cuda = sizes(entries, python)
        lines.append(f"#   {python}: {others} {cuda}")
    for package in sorted(locked(entries)):
        line = f"{package.name}=={package.version}" + (f"; {package.marker}" if package.marker else "")
        lines.append(" \\\n    ".join([line, *(f"--hash={digest}" for digest in package.hashes)]))
    return "\n".join(lines) + "\n"


def main() -> None:
    tested = [pin for name, pin in pins(REPOSITORY / "requirements-test.txt").items() if not is_of_torch(name)]
    LOCK.write_text(text(resolve([*wanted().values()], tested)))


if __name__ == "__main__":
    main()
