"""Runs of pg-tensile-setup: environments of two small packages, made, made again, damaged, interrupted and removed.

Long: each environment is a real one, with pip.
"""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.repository import REPOSITORY

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

# The command, which tries other packages than the real ones
PROGRAM = """
import sys
from scripts.pg_tensile_setup import __main__, environments
environments.CHECK = sys.argv.pop(1)
sys.exit(__main__.main())
"""
CHECK = "import one, torch; print('PyTorch', torch.version, 'one', one.version)"


def write_wheel(folder: Path, name: str, version: str, requirement: str = "") -> str:
    """Write a wheel with a module that knows its version, and return the wheel's hash."""
    path = folder / f"{name}-{version}-py3-none-any.whl"
    inside = f"{name}-{version}.dist-info"
    needs = f"Requires-Dist: {requirement}\n" if requirement else ""
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{name}.py", f"version = {version!r}\n")
        wheel.writestr(f"{inside}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}")
        wheel.writestr(f"{inside}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{inside}/RECORD", "")
    return hashlib.sha256(path.read_bytes()).hexdigest()


class Site:
    """A folder with wheels and a lock file, and one for environments."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.wheels, self.lock = folder / "environments", folder / "wheels", folder / "lock"
        self.wheels.mkdir()
        write_wheel(self.wheels, "torch", "2.0+cpu", "one")
        self.write_lock("1.0")

    def write_lock(self, version: str) -> None:
        digest = write_wheel(self.wheels, "one", version)
        python = f"3.{sys.version_info.minor}"
        self.lock.write_text(f"#   {python}: 1 1\none=={version} \\\n    --hash=sha256:{digest}\ntorch==2.0\n")

    def start(self, *arguments: str, check: str = CHECK) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", PROGRAM, check, "--folder", str(self.folder), "--lock", str(self.lock)]
        command += arguments or ("--find-links", str(self.wheels))
        pipe = subprocess.PIPE
        return subprocess.Popen(command, cwd=REPOSITORY, stdout=pipe, stderr=pipe, stdin=subprocess.DEVNULL, text=True)

    def run(self, *arguments: str) -> tuple[int, str]:
        process = self.start(*arguments)
        output, errors = process.communicate()
        return process.returncode, output + errors

    def state(self) -> set[str]:
        """Return the names of what is in the folder, and that of the environment in use."""
        names = {path.name for path in self.folder.iterdir() if path.name != ".lock"}
        return names | ({f"-> {os.readlink(self.folder / 'venv')}"} if (self.folder / "venv").is_symlink() else set())


@pytest.fixture
def site() -> Iterator[Site]:
    """A site that the server's user can read: the folders of pytest are closed to it."""
    with tempfile.TemporaryDirectory(prefix="pgt-setup-") as folder:
        Path(folder).chmod(0o755)
        yield Site(Path(folder))


USED = {"venv", "venv-1", "-> venv-1"}


def test_an_environment_is_made_replaced_and_removed(site: Site) -> None:
    status, output = site.run()
    assert status == 0 and "is ready: PyTorch 2.0+cpu one 1.0" in output, output
    assert site.state() == USED
    assert f"pg_tensile.python = '{site.folder}/venv/bin/python'" in output
    assert "this uses about" in output and "shared_preload_libraries = 'pg_tensile'" in output
    compiled = [*site.folder.glob("venv-1/lib/python3*/site-packages/__pycache__/one*.pyc")]
    assert compiled and all(path.stat().st_mode & 0o004 for path in compiled)
    status, output = site.run()
    assert status == 0 and "up to date" in output
    assert site.run("--check")[0] == 0
    site.write_lock("1.1")
    status, output = site.run("--check")
    assert status == 1 and "hint: Run pg-tensile-setup" in output
    status, output = site.run()
    assert status == 0 and "one 1.1" in output
    assert site.state() == {"venv", "venv-2", "-> venv-2"}
    # what runs keeps its own modules
    shown = "import one; print(one.__file__)"
    python = site.folder / "venv" / "bin" / "python"
    assert "/venv-2/" in subprocess.run([python, "-c", shown], capture_output=True, text=True, check=True).stdout
    assert site.run("--remove")[0] == 0
    assert not site.folder.exists()


def test_a_failure_changes_nothing(site: Site) -> None:
    assert site.run()[0] == 0
    site.write_lock("1.1")
    (site.wheels / "one-1.1-py3-none-any.whl").write_bytes((site.wheels / "one-1.0-py3-none-any.whl").read_bytes())
    status, output = site.run()
    assert status == 1 and "hint: A file is damaged" in output, output
    assert site.state() == USED
    (site.wheels / "one-1.1-py3-none-any.whl").unlink()
    status, output = site.run()
    assert status == 1 and "hint: There is no wheel for this Python" in output, output
    assert site.state() == USED
    site.write_lock("1.1")
    process = site.start(check="raise OSError('no such library')")
    errors = process.communicate()[1]
    assert process.returncode == 1 and "does not work: OSError: no such library" in errors, errors
    assert site.state() == USED


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_run_changes_nothing(site: Site, number: signal.Signals) -> None:
    assert site.run()[0] == 0
    site.write_lock("1.1")
    reached = site.wheels.parent / "reached"
    os.mkfifo(reached, mode=0o666)
    reached.chmod(0o666)
    check = f"import os, signal; file = open({str(reached)!r}, 'w'); print(os.getpid(), file=file, flush=True)"
    process = site.start(check=f"{check}; signal.pause()")
    with reached.open() as file:
        trying = int(file.readline())
        assert "venv-2" in site.state()
        process.send_signal(number)
        process.communicate()
        assert process.returncode != 0
        if number == signal.SIGKILL:
            os.kill(trying, signal.SIGKILL)
        assert file.read() == ""  # it has ended, too
    if number == signal.SIGKILL:
        assert "venv-2" in site.state()
        assert site.run()[0] == 0
        assert site.state() == {"venv", "venv-2", "-> venv-2"}
    else:
        assert site.state() == USED
