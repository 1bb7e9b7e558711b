"""The contents of a bundle: `bundle.json` beside two archives, and the comparison of the archives with it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

NAME = "bundle.json"
PACKAGES = "packages.tar.xz"
SERVER = "server.tar.xz"
ZONES = "zoneinfo"  # in the archive of the server


class BundleError(Exception):
    """An error that the user can act upon: one sentence, and a hint."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(f"{message}\nhint: {hint}")


class File(NamedTuple):
    """Bytes and SHA-256 of an archive."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a bundle is for, and what it has.

    `python`: version of the interpreter there, as in 3.12. `glibc`: the least version of the C library. `revision`:
    that of the checkout. `postgresql`: the server's version; `bin`, `library` and `share`: the folders of its programs,
    modules and data in its archive; `zones`: the folder of time zones that it reads, if it has none itself. `minimum`:
    least versions of all packages that pg_tensile needs, `packages`: versions of those that travel, both by name.
    `files`: the archives.
    """

    python: str
    glibc: str
    revision: str
    postgresql: str
    bin: str
    library: str
    share: str
    zones: str | None
    minimum: Mapping[str, str]
    packages: Mapping[str, str]
    files: Mapping[str, File]

    def write(self, folder: Path) -> None:
        (folder / NAME).write_text(json.dumps(asdict(self), indent=1) + "\n")


def read(folder: Path) -> Manifest:
    """Return the manifest of the bundle in `folder`."""
    try:
        fields = json.loads((folder / NAME).read_text())
        return Manifest(**fields | {"files": {name: File(*file) for name, file in fields["files"].items()}})
    except FileNotFoundError:
        raise BundleError(f"{folder} has no {NAME}", "Copy the whole folder that make gpu-bundle has made.") from None
    except (ValueError, KeyError, TypeError):
        raise BundleError(f"{folder / NAME} is damaged", "Copy the folder of the bundle again.") from None


def refuse_foreign(folder: Path, option: str) -> None:
    """Raise BundleError if a folder that is to be replaced has something, and not from an earlier bundle."""
    if folder.exists() and any(folder.iterdir()) and not (folder / NAME).exists():
        raise BundleError(f"{folder} is not empty, and not of an earlier bundle", f"Name another one with {option}.")


def describe(path: Path) -> File:
    """Return the size and the digest of a file."""
    with path.open("rb") as file:
        return File(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())


def verify(folder: Path, manifest: Manifest) -> None:
    """Raise BundleError unless all archives are there and as they were made."""
    for name, expected in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise BundleError(f"{path} is missing", "Copy the whole folder that make gpu-bundle has made.")
        if describe(path) != expected:
            raise BundleError(f"{path} is damaged", "Copy the folder of the bundle again.")
