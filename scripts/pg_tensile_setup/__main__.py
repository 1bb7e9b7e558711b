"""The command pg-tensile-setup.

The environment is made beside the one that is in use, tried as the server's user, and then takes its place by one
rename. A run that fails changes nothing; what a killed one leaves, the next run removes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from scripts.pg_tensile_setup.choice import (
    CPU_INDEX,
    TORCH_FOR_CPU_MB,
    Build,
    Lock,
    choose_build,
    has_nvidia_driver,
    read_lock,
)
from scripts.pg_tensile_setup.common import FOLDER, LOCK, SetupError, amount, say, size_of
from scripts.pg_tensile_setup.environments import (
    LOCK_FILE,
    STAMP,
    alone,
    check,
    compile_modules,
    is_current,
    make_venv,
    next_environment,
    processes_of,
    python_version,
    refuse_small_disk,
    remove_unused,
    switch,
)
from scripts.pg_tensile_setup.pip import Pip, unpacked_size

UNPACKED = {"cpu": 4.8, "cuda": 2.5}  # bytes on the disk, with bytecode, for each byte of wheels


def announce(lock: Lock, build: Build, version: str, options: argparse.Namespace) -> None:
    """Say what is fetched and how much of the disk is used, and refuse a disk without that much room."""
    others, cuda = lock.sizes[version]
    wheels = others + (TORCH_FOR_CPU_MB if build.kind == "cpu" else cuda)
    fetched = 0 if options.find_links else wheels
    disk = 0 if options.download else wheels * UNPACKED[build.kind]
    folder = options.download or options.folder
    kind = "" if options.find_links else " for the CPU" if build.kind == "cpu" else " with CUDA"
    source = ", ".join(map(str, options.find_links)) or build.url or "pip's index"
    say(f"PyTorch {lock.torch}{kind} from {source}, and the other packages, for Python {version}")
    uses = [f"fetches about {amount(fetched)}"] if fetched else []
    uses += [f"uses about {amount(disk)} of {folder}"] if disk else []
    say(f"this {' and '.join(uses)}")
    refuse_small_disk(folder, fetched + disk)


def fill(target: Path, scratch: Path, options: argparse.Namespace, lock: Lock, build: Build) -> str:
    """Make an environment with all packages in the new folder `target`; return what PyTorch says of itself."""
    python = make_venv(options.python, target)
    pip = Pip(python, lock, scratch)
    places = options.find_links
    if not places:
        places = [scratch / "wheels"]
        places[0].mkdir()
        pip.fetch(build, places[0])
        refuse_small_disk(target, unpacked_size(places[0]))
    say("unpacking the packages")
    pip.install(build, places, target)
    say("compiling them to bytecode")
    compile_modules(python, target)
    return check(python)


def make(options: argparse.Namespace) -> None:
    """Make the environment, unless the one that is there is the wanted one."""
    folder, lock = options.folder, read_lock(options.lock)
    version = python_version(options.python, lock)
    with alone(folder):
        remove_unused(folder)
        build = choose_build(options, lock.sizes[version], has_nvidia_driver())
        wanted = {"lock": lock.digest, **build._asdict(), "python": f"{options.python} {version}"}
        if is_current(folder, wanted):
            say(f"{folder / 'venv'} is up to date")
            return
        announce(lock, build, version, options)
        target = next_environment(folder)
        scratch = Path(tempfile.mkdtemp(prefix="scratch-", dir=folder))
        try:
            found = fill(target, scratch, options, lock, build)
            (target / STAMP).write_text(json.dumps(wanted) + "\n")
            switch(folder, target)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
            if (folder / "venv").resolve() != target.resolve():
                shutil.rmtree(target, ignore_errors=True)
        remove_unused(folder)
        say(f"{folder / 'venv'} is ready: {found}, {amount(size_of(target))}")
    print_settings(folder)


def look(options: argparse.Namespace) -> None:
    """Raise SetupError unless the environment is made from this lock file, fits its interpreter, and works."""
    folder, lock = options.folder, read_lock(options.lock)
    again = "Run pg-tensile-setup as root."
    try:
        made = json.loads((folder / "venv" / STAMP).read_text())
    except (OSError, ValueError):
        raise SetupError(f"{folder} has no environment", again) from None
    interpreter, _, version = made["python"].rpartition(" ")
    if made["lock"] != lock.digest:
        raise SetupError(f"the environment in {folder} is not the one of {options.lock}", again)
    if python_version(interpreter, lock) != version:
        raise SetupError(f"the environment in {folder} was made for Python {version}", again)
    say(f"{folder / 'venv'} works: {check(folder / 'venv' / 'bin' / 'python')}")


def print_settings(folder: Path) -> None:
    print("Lines for postgresql.conf of the server, which has to be restarted after that:")
    print(Path(__file__).with_name("postgresql.conf.sample").read_text(), end="")
    if folder != FOLDER:
        print(f"pg_tensile.python = '{folder / 'venv' / 'bin' / 'python'}'")


def download(options: argparse.Namespace) -> None:
    """Fetch the wheels for a machine without a network, which has the same version of Python."""
    lock = read_lock(options.lock)
    version = python_version(options.python, lock)
    build = choose_build(options, lock.sizes[version], False)
    options.download.mkdir(parents=True, exist_ok=True)
    announce(lock, build, version, options)
    with tempfile.TemporaryDirectory(prefix="scratch-", dir=options.download) as scratch:
        Pip(make_venv(options.python, Path(scratch, "venv")), lock, Path(scratch)).fetch(build, options.download)
    say(f"on the other machine, run: pg-tensile-setup --find-links {options.download}")


def remove(folder: Path) -> None:
    """Remove all environments, and the folder if nothing else is in it. Raises SetupError while a server uses one."""
    with alone(folder):
        if running := [pid for path in folder.glob("venv-*") for pid in processes_of(path.resolve())]:
            raise SetupError(f"the environment is used by process {running[0]}", "Stop the servers that use it.")
        (folder / "venv").unlink(missing_ok=True)
        remove_unused(folder)
        (folder / LOCK_FILE).unlink()
        with suppress(OSError):  # other files are in it
            folder.rmdir()
    say(f"{folder} has no environment any more")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="pg-tensile-setup", description="Make the environment of pg_tensile's child processes."
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--cpu", action="store_true", help=f"PyTorch for the CPU, from {CPU_INDEX}")
    which.add_argument("--cuda", action="store_true", help="PyTorch with CUDA, from pip's index")
    which.add_argument("--torch-index", metavar="URL", help="PyTorch from another index")
    what = parser.add_mutually_exclusive_group()
    links = "take all packages from this folder and ask no network; may be repeated"
    what.add_argument("--find-links", type=Path, action="append", default=[], metavar="WHEELS", help=links)
    what.add_argument("--download", type=Path, metavar="WHEELS", help="only fetch the packages into this folder")
    what.add_argument("--check", action="store_true", help="only say whether the environment is up to date and works")
    what.add_argument("--remove", action="store_true", help="remove the environment")
    parser.add_argument("--python", default="/usr/bin/python3", help="the interpreter (default: %(default)s)")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the environment is (default: %(default)s)")
    parser.add_argument("--lock", type=Path, default=LOCK, help="default: %(default)s")
    options = parser.parse_args(arguments)
    for place in options.find_links:
        if not place.is_dir():
            parser.error(f"--find-links: {place} is no folder")
    options.find_links = [place.absolute() for place in options.find_links]
    options.folder = options.folder.absolute()
    options.download = options.download and options.download.absolute()
    return options


def leave(number: int, _: object) -> NoReturn:
    """End as after an error, so that what is half made is removed."""
    sys.exit(128 + number)


def main() -> int:
    options = parse(sys.argv[1:])
    os.umask(0o022)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, leave)
    try:
        if options.remove:
            remove(options.folder)
        elif options.check:
            look(options)
        elif options.download:
            download(options)
        else:
            make(options)
    except (SetupError, OSError) as error:
        print(f"pg-tensile-setup: {error}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, EOFError):
        print("pg-tensile-setup: interrupted; nothing has changed", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
