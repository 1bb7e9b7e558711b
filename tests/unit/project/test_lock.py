"""The lock file agrees with the pins that everything is tested with, and has all that they need."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts import lock


@pytest.mark.parametrize("python", lock.PYTHONS)
def test_a_python_has_one_version_of_each_package(python: str) -> None:
    names = [package.name for package in lock.read() if lock.is_needed(package.marker or None, python)]
    assert len(names) == len({*names})


def test_the_pins_are_locked() -> None:
    versions = {package.name: package.version for package in lock.read()}
    assert {"torch", "lightgbm", "psycopg", "lz4", "peft"} <= {*lock.wanted()}
    for name, requirement in lock.wanted().items():
        assert requirement.specifier.contains(versions[name]), requirement
    tested = lock.pins(lock.REPOSITORY / "requirements-test.txt")
    for name in tested.keys() & versions.keys():
        assert tested[name].specifier.contains(versions[name]), name


def test_what_the_pins_need_is_locked() -> None:
    """The requirements of packages are those of the environment that the tests run in."""
    locked = {package.name for package in lock.read()}
    waiting = [*lock.wanted().values()]
    seen = set()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if lock.is_of_torch(name) and name != "torch":
            continue
        assert name in locked
        for line in metadata.requires(name) or ():
            needed = Requirement(line)
            extras = requirement.extras or {""}
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras):
                key = (canonicalize_name(needed.name), *sorted(needed.extras))
                waiting += [] if key in seen else [needed]
                seen.add(key)
    assert len(seen) > 40


def test_everything_but_torch_has_hashes_and_nothing_has_an_address() -> None:
    assert {package.name for package in lock.read() if not package.hashes} == {"torch"}
    assert not re.search(r"https?:|file:", lock.LOCK.read_text())


def test_what_is_not_for_linux_is_left_out() -> None:
    assert lock.shortened("sys_platform == 'win32'") is None
    assert lock.shortened("python_full_version >= '3.11' and platform_machine == 'aarch64'") == ""
    assert lock.shortened("python_full_version == '3.11.*'") == 'python_version < "3.12"'
    assert lock.shortened("python_version >= '3.12' and python_version < '3.14'") == (
        'python_version >= "3.12" and python_version < "3.14"'
    )
    with pytest.raises(ValueError, match="no range"):
        lock.shortened("python_version != '3.12'")


def test_a_package_without_a_wheel_is_named() -> None:
    wheel = {"url": "https://x/one-1.0-cp311-cp311-manylinux_2_28_x86_64.whl", "size": 3}
    newer = {"url": "https://x/one-1.0-cp311-cp311-manylinux_2_99_x86_64.whl", "size": 5}
    entry = {"name": "one", "version": "1.0", "wheels": [newer, wheel]}
    assert lock.size(entry, "3.11") == 3
    with pytest.raises(ValueError, match=r"one 1\.0 has no wheel for Python 3\.12"):
        lock.size(entry, "3.12")


def test_a_lock_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    def entry(name: str, marker: str | None = None) -> dict:
        url = f"https://x/{name.replace('-', '_')}-1.0-py3-none-any.whl"
        wheel = {"url": url, "size": 2_000_000, "hashes": {"sha256": name * 8}}
        return {"name": name, "version": "1.0", "wheels": [wheel]} | ({"marker": marker} if marker else {})

    entries = [entry("one"), entry("two", "python_version < '3.12'"), entry("torch"), entry("nvidia-one")]
    path = tmp_path / "lock"
    path.write_text(lock.text(entries))
    assert lock.read(path) == sorted(lock.locked(entries))
    assert [(package.name, package.marker) for package in lock.read(path)] == [
        ("one", ""),
        ("torch", ""),
        ("two", 'python_version < "3.12"'),
    ]
    assert "#   3.11: 4 4\n#   3.12: 2 4\n" in path.read_text()
