"""`make gpu-bundle`: make the bundle for a machine without a network.

    python -m scripts.gpu_bundle [--python 3.12] [--at-hand FILE] [--output FOLDER] [--limit MIB]

Needs a network, and what compiles the extension (make setup); no GPU. An earlier bundle in the folder is replaced.
"""

from __future__ import annotations

import argparse
import lzma
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from scripts.cluster import REPOSITORY
from scripts.gpu_bundle import packages, server
from scripts.gpu_bundle.manifest import PACKAGES, SERVER, BundleError, File, Manifest, describe, refuse_foreign

MIB = 1 << 20
LIMIT_MIB = 45
USUAL = Path(__file__).with_name("at_hand.txt")
# Machine code compresses better with the first of these filters.
FILTERS = [{"id": lzma.FILTER_X86}, {"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": 64 * MIB}]


def owned_by_root(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = "root"
    member.mode |= 0o444 | (member.mode & 0o100) // 0o100 * 0o111  # the server's user reads it
    return member


def archive(folder: Path, path: Path) -> File:
    """Pack the contents of a folder, and return what the manifest says of the archive."""
    with (
        lzma.open(path, "wb", filters=FILTERS) as compressed,
        tarfile.open(fileobj=compressed, mode="w|", format=tarfile.PAX_FORMAT) as tar,
    ):
        for entry in sorted(folder.iterdir()):
            tar.add(entry, entry.name, filter=owned_by_root)
    return describe(path)


def refuse_large(files: Mapping[str, File], limit_mib: int) -> None:
    """Raise BundleError if the archives have more than `limit_mib` MiB together; 0 allows any size."""
    total = sum(file.size for file in files.values())
    if limit_mib and total > limit_mib * MIB:
        raise BundleError(
            f"the bundle has {total / MIB:.1f} MiB, more than {limit_mib}",
            "Install large packages there and name them with --at-hand, or give --limit 0 if size does not matter.",
        )


def revision() -> str:
    command = ["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def make(output: Path, python: str, at_hand: Path, limit_mib: int) -> Manifest:
    """Make the bundle in the folder `output`, instead of one that is there, and return its manifest."""
    refuse_foreign(output, "--output")
    glibc = os.confstr("CS_GNU_LIBC_VERSION").split()[1]  # type: ignore[union-attr]
    with tempfile.TemporaryDirectory(prefix="gpu-bundle-") as scratch, ThreadPoolExecutor() as pool:
        made = Path(scratch, "bundle")
        made.mkdir()
        folders = {PACKAGES: Path(scratch, "packages"), SERVER: Path(scratch, "server")}
        print("gpu-bundle: choosing the packages", flush=True)
        chosen = packages.install(folders[PACKAGES], python, glibc, packages.read_at_hand(at_hand))
        print("gpu-bundle: copying the server", flush=True)
        found = server.copy(folders[SERVER])
        print("gpu-bundle: compressing", flush=True)
        packed = {name: pool.submit(archive, folder, made / name) for name, folder in folders.items()}
        files = {name: file.result() for name, file in packed.items()}
        for name, file in files.items():
            print(f"gpu-bundle: {file.size / MIB:5.1f} MiB {name}")
        refuse_large(files, limit_mib)
        manifest = Manifest(
            python=python,
            glibc=glibc,
            revision=revision(),
            postgresql=found.version.removeprefix("PostgreSQL "),
            bin=found.bin[1:],
            library=found.library[1:],
            share=found.share[1:],
            zones=found.zones(),
            minimum={name: packages.minimum(requirement) for name, requirement in packages.required().items()},
            packages=chosen,
            files=files,
        )
        manifest.write(made)
        shutil.rmtree(output, ignore_errors=True)
        shutil.copytree(made, output)
    return manifest


def main() -> int:
    parser = argparse.ArgumentParser(prog="gpu_bundle", description="Make the bundle for a machine without a network.")
    parser.add_argument("--python", default="3.12", metavar="3.N", help="version of the interpreter there")
    parser.add_argument(
        "--at-hand", type=Path, default=USUAL, metavar="FILE", help="output of pip freeze there, instead of the usual"
    )
    parser.add_argument("--output", type=Path, default=REPOSITORY / "gpu-bundle", metavar="FOLDER")
    parser.add_argument("--limit", type=int, default=LIMIT_MIB, metavar="MIB", help="of the size; 0 allows any")
    options = parser.parse_args()
    try:
        manifest = make(options.output, options.python, options.at_hand, options.limit)
    except BundleError as error:
        print(f"gpu-bundle: {error}", file=sys.stderr)
        return 1
    print("gpu-bundle: packages: " + ", ".join(f"{name} {version}" for name, version in manifest.packages.items()))
    print(
        f"gpu-bundle: {sum(file.size for file in manifest.files.values()) / MIB:.1f} MiB are in {options.output}, for"
        f" Python {manifest.python}; there, run python3 -m scripts.gpu_bundle.unpack"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
