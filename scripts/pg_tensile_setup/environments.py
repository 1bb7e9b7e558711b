"""Environments: FOLDER/venv-1, FOLDER/venv-2 and so on, and FOLDER/venv, a link to the one that servers use."""

from __future__ import annotations

import fcntl
import json
import os
import pwd
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from scripts.pg_tensile_setup.choice import Lock
from scripts.pg_tensile_setup.common import MB, SetupError, amount, say, variables

SERVER_USER = "postgres"
STAMP = "pg-tensile-setup.json"
LOCK_FILE = ".lock"  # in the folder
CHECK = """
import lightgbm, lz4.frame, numpy, optuna, peft, psycopg, pynvml, rich, safetensors.torch, sklearn, sqlglot, tabm, torch
torch.ones(2, 2) @ torch.ones(2)
gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no GPU"
print(f"PyTorch {torch.__version__}, {gpu}")
"""
# A process that runs keeps the modules of its own environment when `venv` becomes a link to the next one.
OWN_MODULES = "import os.path, sys; sys.path[:] = map(os.path.realpath, sys.path)\n"


def python_version(python: str, lock: Lock) -> str:
    """Return the version of an interpreter, as in 3.11. Raises SetupError if no environment can be made with it."""
    program = "import sys; print('%d.%d' % sys.version_info[:2], flush=True); import ensurepip, venv"
    other = "--python names another interpreter."
    try:
        done = subprocess.run([python, "-I", "-c", program], capture_output=True, text=True, env=variables())
    except OSError as error:
        raise SetupError(f"{python} cannot be run: {error.strerror}", other) from None
    version = done.stdout.strip()
    if not version:
        raise SetupError(f"{python} is no working Python: {done.stderr.strip()[-200:]}", other)
    if version not in lock.sizes:
        raise SetupError(f"{python} is Python {version}, and the packages are for {', '.join(lock.sizes)}", other)
    if done.returncode != 0:
        raise SetupError(f"{python} has no module ensurepip or venv", f"Run: apt-get install python{version}-venv")
    return version


def make_venv(python: str, folder: Path) -> Path:
    """Make an empty environment and return its interpreter."""
    command = [python, "-I", "-m", "venv", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env=variables())
    if done.returncode != 0:
        complaint = (done.stderr or done.stdout).strip()[-500:]
        raise SetupError(f"{python} could not make an environment: {complaint}", "--python names another interpreter.")
    for modules in folder.glob("lib/python3*/site-packages"):
        (modules / "pg_tensile_setup.pth").write_text(OWN_MODULES)
    return folder / "bin" / "python"


def compile_modules(python: Path, folder: Path) -> None:
    """Compile an environment to bytecode, which the server's user could not write; what cannot be compiled stays."""
    command = [str(python), "-m", "compileall", "-q", "-j", "0", str(folder / "lib")]
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=variables())


def check(python: Path) -> str:
    """Import the packages as the server's user, and return what PyTorch says of itself. Raises SetupError."""
    command = [*as_server_user(), str(python), "-P", "-c", CHECK]
    done = subprocess.run(command, capture_output=True, text=True, env=variables(), cwd="/")
    if done.returncode != 0:
        complaint = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        library = "cannot open shared object file" in complaint
        raise SetupError(
            f"the environment does not work: {complaint}",
            "Install the package that has this library: libgomp1, for libgomp.so.1."
            if library
            else f"All folders above it have to be open to the user {SERVER_USER}; --folder names another one.",
        )
    return done.stdout.strip()


def as_server_user() -> list[str]:
    """Return the beginning of a command that becomes the rest as the server's user, if this is root and it exists."""
    try:
        user = pwd.getpwnam(SERVER_USER)
    except KeyError:
        return []
    change = ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups", "--"]
    return change if os.geteuid() == 0 else []


def is_current(folder: Path, wanted: dict[str, str]) -> bool:
    """Return whether the environment in use is made from what is wanted, and works."""
    try:
        if json.loads((folder / "venv" / STAMP).read_text()) == wanted:
            check(folder / "venv" / "bin" / "python")
            return True
    except (OSError, ValueError, SetupError):
        pass
    return False


def next_environment(folder: Path) -> Path:
    numbers = [int(path.name[5:]) for path in folder.glob("venv-*") if path.name[5:].isdigit()]
    return folder / f"venv-{max(numbers, default=0) + 1}"


def switch(folder: Path, target: Path) -> None:
    """Make a new environment the one that servers use, by one rename."""
    link = folder / "venv.new"
    link.unlink(missing_ok=True)
    link.symlink_to(target.name)
    os.replace(link, folder / "venv")


def processes_of(environment: Path) -> list[int]:
    """Return the processes that have loaded libraries of an environment."""
    inside = f" {environment}/".encode()
    found = []
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            if inside in maps.read_bytes():
                found.append(int(maps.parent.name))
        except OSError:  # it has ended, or is another user's
            continue
    return found


def remove_unused(folder: Path) -> None:
    """Remove earlier environments and what interrupted runs have left, but not what processes use."""
    used = (folder / "venv").resolve()
    for path in [*folder.glob("venv-*"), *folder.glob("scratch-*")]:
        if path.resolve() == used:
            continue
        if running := processes_of(path.resolve()):
            say(f"{path} is still used by process {running[0]}; a later run removes it")
        else:
            shutil.rmtree(path)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Make the folder and keep other runs out of it. Raises SetupError if there is one, or something else is there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / LOCK_FILE, os.O_CREAT | os.O_RDWR, 0o600)
    except OSError as error:
        raise SetupError(f"{folder} cannot be written: {error.strerror}", "Run it as root.") from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if (folder / "venv").exists() and not (folder / "venv").is_symlink():
            raise SetupError(f"{folder / 'venv'} is there, and no link", "Name another folder with --folder.")
        yield
    except BlockingIOError:
        raise SetupError(f"another pg-tensile-setup works in {folder}", "Wait until it has ended.") from None
    finally:
        os.close(handle)


def refuse_small_disk(folder: Path, needed_mb: float) -> None:
    free = shutil.disk_usage(folder).free / MB
    if free < needed_mb:
        raise SetupError(
            f"{folder} has {amount(free)} free, and {amount(needed_mb)} are needed",
            "Make room, or name a folder on another disk.",
        )
