"""The first command on a machine without a network: install the bundle of this checkout, and say whether it works.

    python3 -m scripts.gpu_bundle.unpack [--folder FOLDER] [--bundle FOLDER]

Run it with the interpreter that has PyTorch. FOLDER (/opt/pg_tensile for root, else ~/.local/share/pg_tensile) gets:

- `venv`: an environment with the packages of the bundle, and those of this interpreter;
- `server`: PostgreSQL with the extension, whose Python files are those of the checkout;
- `environment`: variables for a shell, so that `. FOLDER/environment` makes all commands of the checkout use them;
- `check.json`: what check.py has found. The exit status is 1 if something is missing.

`.venv` of the checkout becomes a link to the environment. For root, the user of the server (`postgres`, or
PG_TENSILE_USER) is made if there is none, and the time zones where the machine has none.
"""

from __future__ import annotations

import argparse
import os
import platform
import pwd
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from scripts.gpu_bundle import check
from scripts.gpu_bundle.manifest import (
    NAME,
    PACKAGES,
    SERVER,
    ZONES,
    BundleError,
    Manifest,
    read,
    refuse_foreign,
    verify,
)

REPOSITORY = Path(__file__).resolve().parents[2]


def refuse_machine(manifest: Manifest) -> None:
    """Raise BundleError if the bundle cannot work on this machine and with this interpreter."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    if python != manifest.python:
        raise BundleError(
            f"the bundle is for Python {manifest.python}, and this is {python} ({sys.executable})",
            f"Run this with a python{manifest.python}, or make the bundle with --python {python}.",
        )
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise BundleError("the bundle is for Linux on x86-64", "On another machine, see docs/install.md.")
    library, version = platform.libc_ver()
    if library != "glibc" or [*map(int, version.split("."))] < [*map(int, manifest.glibc.split("."))]:
        raise BundleError(
            f"the bundle needs glibc {manifest.glibc}, and this machine has {library} {version}",
            "Make the bundle on a machine whose Debian is as old as this one.",
        )


def empty(folder: Path) -> None:
    """Make the folder, or remove what an earlier bundle has left in it."""
    refuse_foreign(folder, "--folder")
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("server", "venv"):
        shutil.rmtree(folder / name, ignore_errors=True)


def extract(archive: Path, folder: Path) -> None:
    with tarfile.open(archive) as tar:
        # the default from Python 3.14 on; the first versions of 3.11 have none
        tar.extraction_filter = getattr(tarfile, "data_filter", None)
        tar.extractall(folder)


def make_venv(folder: Path) -> Path:
    """Make an environment that also has the packages of this interpreter, and return its folder of packages.

    This interpreter may be of an environment itself, whose packages that of the system does not have.
    """
    at_hand = [place for place in sys.path if place.endswith("-packages") and Path(place).is_dir()]
    venv.EnvBuilder(system_site_packages=True, symlinks=True).create(folder)
    packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder), "installed_base": str(folder)}))
    (packages / "at_hand.pth").write_text("".join(f"import site; site.addsitedir({place!r})\n" for place in at_hand))
    return packages


def make_user() -> str:
    """Return the operating-system user of servers, which root makes if there is none."""
    if os.geteuid() != 0:
        return pwd.getpwuid(os.geteuid()).pw_name
    user = os.environ.get("PG_TENSILE_USER", "postgres")
    try:
        pwd.getpwnam(user)
    except KeyError:
        command = ["useradd", "--system", "--home-dir", "/", "--shell", "/usr/sbin/nologin", user]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError) as error:
            reason = getattr(error, "stderr", "").strip() or error
            raise BundleError(f"could not make the user {user}: {reason}", "PG_TENSILE_USER names another.") from None
    return user


def provide_zones(manifest: Manifest, server: Path) -> None:
    """Copy the time zones to where the server reads them, if the machine has none."""
    if manifest.zones is None or Path(manifest.zones, "UTC").exists():
        return
    try:
        shutil.copytree(server / ZONES, manifest.zones, dirs_exist_ok=True)
    except OSError as error:
        raise BundleError(
            f"{manifest.zones} is missing, and could not be made: {error.strerror or error}",
            f"Let root install tzdata, or copy {server / ZONES} there.",
        ) from None


def install_python(manifest: Manifest, server: Path) -> None:
    """Replace the server's Python files by those of the checkout, which may be newer than the bundle."""
    target = server / manifest.library / "pg_tensile" / "python"
    shutil.rmtree(target)
    without = shutil.ignore_patterns("__pycache__", "csrc")
    for package in ("pyworker", "pg_tensile"):
        shutil.copytree(REPOSITORY / package, target / package, ignore=without)


def configure(manifest: Manifest, server: Path, python: Path) -> None:
    """Add the settings of pg_tensile to the file that initdb copies."""
    with (server / manifest.share / "postgresql.conf.sample").open("a") as sample:
        sample.write(f"\nshared_preload_libraries = 'pg_tensile'\npg_tensile.python = '{python}'\n")


def write_environment(manifest: Manifest, folder: Path, user: str) -> None:
    """Write the variables for a shell, and the command pg-tensile."""
    programs, python = folder / "server" / manifest.bin, folder / "venv" / "bin" / "python"
    variables = {"PG_CONFIG": programs / "pg_config", "PYTHON": python, "PG_TENSILE_USER": user}
    lines = [f"export {name}={shlex.quote(str(value))}" for name, value in variables.items()]
    lines.append(f"export PATH={shlex.quote(f'{python.parent}:{programs}')}:$PATH")
    (folder / "environment").write_text("\n".join(lines) + "\n")
    command = python.with_name("pg-tensile")
    command.write_text(
        f"#!/bin/sh\nexport PYTHONPATH={shlex.quote(str(REPOSITORY))}${{PYTHONPATH:+:$PYTHONPATH}}\n"
        f'exec {shlex.quote(str(python))} -P -m pg_tensile "$@"\n'
    )
    command.chmod(0o755)


def link_venv(target: Path) -> None:
    """Make `.venv` of the checkout a link to the environment."""
    link = REPOSITORY / ".venv"
    if link.exists() and not link.is_symlink():
        raise BundleError(f"{link} is there, and no link", "Move it away, and run this again.")
    link.unlink(missing_ok=True)
    link.symlink_to(target)


def unpack(bundle: Path, folder: Path) -> Manifest:
    """Install the bundle in `folder`, an absolute path."""
    manifest = read(bundle)
    if Path(sys.prefix).is_relative_to(folder):
        raise BundleError(f"{sys.executable} is of the bundle itself", "Use the interpreter that has PyTorch.")
    refuse_machine(manifest)
    verify(bundle, manifest)
    empty(folder)
    server, environment = folder / "server", folder / "venv"
    shutil.copy(bundle / NAME, folder / NAME)
    packages = make_venv(environment)
    link_venv(environment)
    with ThreadPoolExecutor() as pool:
        for done in (pool.submit(extract, bundle / PACKAGES, packages), pool.submit(extract, bundle / SERVER, server)):
            done.result()
    install_python(manifest, server)
    provide_zones(manifest, server)
    configure(manifest, server, environment / "bin" / "python")
    write_environment(manifest, folder, make_user())
    return manifest


def default_folder() -> Path:
    return Path("/opt/pg_tensile") if os.geteuid() == 0 else Path.home() / ".local" / "share" / "pg_tensile"


def main() -> int:
    parser = argparse.ArgumentParser(prog="unpack", description="Install the bundle of this checkout and check it.")
    parser.add_argument("--folder", type=Path, default=default_folder(), help="where to (default: %(default)s)")
    parser.add_argument("--bundle", type=Path, default=REPOSITORY / "gpu-bundle", help="default: %(default)s")
    options = parser.parse_args()
    os.umask(0o022)
    folder = options.folder.absolute()
    try:
        manifest = unpack(options.bundle, folder)
    except (BundleError, OSError) as error:
        print(f"unpack: {error}", file=sys.stderr)
        return 1
    complete = check.run(manifest, folder)
    print(f"In a shell: . {shlex.quote(str(folder / 'environment'))}")
    return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(main())
