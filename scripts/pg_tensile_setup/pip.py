"""Wheels: pip fetches them, and installs them from a folder."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path

from scripts.pg_tensile_setup.choice import Build, Lock
from scripts.pg_tensile_setup.common import MB, SetupError, amount, say, size_of, variables

LARGE = re.compile(r"(?:Downloading|Using cached|Processing) (\S+\.whl)(?: \(([\d.]+ [MG]B)\))?$")
LOOK_S = 10  # between messages while packages are unpacked


class Pip:
    """The pip of an environment. Its temporary files lie in `scratch`: /tmp may be in memory."""

    def __init__(self, python: Path, lock: Lock, scratch: Path) -> None:
        self.python, self.lock = python, lock
        self.variables = variables() | {"TMPDIR": str(scratch)}
        self.packages, self.constraints = scratch / "packages.txt", scratch / "constraints.txt"
        self.packages.write_text(lock.packages)
        self.constraints.write_text(lock.constraints)

    def fetch(self, build: Build, wheels: Path) -> None:
        """Download the locked packages, whose hashes pip compares, then PyTorch and what else it needs."""
        self.download(wheels, "--require-hashes", "--no-deps", "--requirement", str(self.packages))
        index = ("--index-url", build.url) if build.url else ()
        others = ("--find-links", str(wheels), "--constraint", str(self.constraints))
        self.download(wheels, *index, *others, build.requirement(self.lock.torch))

    def install(self, build: Build, places: Iterable[Path], folder: Path) -> None:
        """Install all packages from folders with wheels; says how large `folder` becomes."""
        links = [f"--find-links={place}" for place in places]
        self.unpack(folder, *links, "--require-hashes", "--no-deps", "--requirement", str(self.packages))
        self.unpack(folder, *links, "--constraint", str(self.constraints), build.requirement(self.lock.torch))

    def download(self, wheels: Path, *arguments: str) -> None:
        """Run pip download: a terminal gets pip's bars, a log a line for each wheel of a megabyte or more."""
        command = self.command("download", "--no-cache-dir", "--dest", str(wheels), *arguments)
        if sys.stdout.isatty():
            with subprocess.Popen(command, env=self.variables, stderr=subprocess.PIPE, text=True) as process:
                self.finish(process, "fetch")
            return
        command.append("--progress-bar=off")
        pipe = subprocess.PIPE
        with subprocess.Popen(command, env=self.variables, stdout=pipe, stderr=subprocess.STDOUT, text=True) as process:
            complaints = []
            for line in process.stdout or ():
                if (match := LARGE.search(line.rstrip())) and match[2]:
                    say(f"fetching {match[1].rpartition('/')[2]} ({match[2]})")
                complaints.append(line)
            if process.wait() != 0:
                raise failure("fetch", "".join(complaints[-25:]))

    def unpack(self, folder: Path, *arguments: str) -> None:
        command = self.command("install", "--quiet", "--no-index", "--no-compile", *arguments)
        with subprocess.Popen(command, env=self.variables, stderr=subprocess.PIPE, text=True) as process:
            self.finish(process, "install", folder)

    def command(self, name: str, *arguments: str) -> list[str]:
        pip = [str(self.python), "-m", "pip", "--disable-pip-version-check", name]
        return [*pip, "--only-binary=:all:", *arguments]

    def finish(self, process: subprocess.Popen[str], what: str, folder: Path | None = None) -> None:
        """Wait for pip, and raise SetupError with its complaints if it fails."""
        while True:
            try:
                _, errors = process.communicate(timeout=LOOK_S)
                break
            except subprocess.TimeoutExpired:
                if folder is not None:
                    say(f"{amount(size_of(folder))} are unpacked")
        if process.returncode != 0:
            raise failure(what, errors)


def failure(what: str, output: str) -> SetupError:
    """Return the error with what pip has complained of, and what helps."""
    complaints = [line for line in output.splitlines() if line.strip() and not line.startswith("WARNING:")]
    if "THESE PACKAGES DO NOT MATCH THE HASHES" in output:
        hint = "A file is damaged or another one than was tested: fetch it again, or ask where it comes from."
    elif "No matching distribution found" in output:
        hint = (
            "There is no wheel for this Python, or none at this place: --python names another interpreter,"
            " --torch-index and --find-links name other places."
        )
    else:
        hint = "Is the network reachable, and is there room on the disk? Then run it again."
    return SetupError(f"pip could not {what} the packages:\n" + "\n".join(complaints[-12:]), hint)


def unpacked_size(wheels: Path) -> float:
    """Return the megabytes of what is in the wheels of a folder."""
    total = 0
    for path in wheels.glob("*.whl"):
        with zipfile.ZipFile(path) as wheel:
            total += sum(member.file_size for member in wheel.infolist())
    return total / MB
