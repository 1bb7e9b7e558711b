"""The commands of docs/install.md as a script, for a clean Debian (scripts/install_guide.sh), and the script's result.

    python3 scripts/install_guide.py script packages|source MAJOR PYTHON
    python3 scripts/install_guide.py result FOLDER WHEELS

The first prints a bash script with the commands of one way to install, to predict and to remove, in the page's order.
It differs from the page in the major version of PostgreSQL, and in where PyTorch comes from: the folder /wheels, whose
wheels are for the interpreter PYTHON. The second reads the script's trace and output, and the sizes of the wheels, and
prints an object of JSON.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "install.md"
# Headings, each with the numbers of its blocks, or None for all
WAYS = {
    "packages": (("Packages for Debian", None), ("Try it", None), ("Remove it", 0)),
    "source": (("From source", None), ("Try it", None), ("Remove it", None)),
}
PAGES_MAJOR = "17"
SETUP = re.compile(r"^(pg-tensile-setup|python3 -m scripts\.pg_tensile_setup) --cpu$", re.MULTILINE)
HEREDOC = re.compile(r"<<'(\w+)'$")


def blocks(page: str, heading: str) -> list[str]:
    """Return the blocks of commands below a heading, up to the next one."""
    section = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#+ |\Z)", page, re.MULTILINE | re.DOTALL)
    if section is None:
        raise ValueError(f"{PAGE} has no heading {heading!r}")
    return re.findall(r"^```sh\n(.*?)^```$", section[1], re.MULTILINE | re.DOTALL)


def commands(block: str) -> Iterator[str]:
    """Yield the commands of a block, one of them perhaps with the lines of a here-document."""
    lines = iter(block.splitlines())
    for line in lines:
        command = [line]
        if found := HEREDOC.search(line):
            for more in lines:
                command.append(more)
                if more == found[1]:
                    break
        yield "\n".join(command)


def chosen(page: str, way: str) -> list[str]:
    """Return all commands of a way."""
    found = []
    for heading, number in WAYS[way]:
        of_heading = blocks(page, heading)
        found += of_heading if number is None else [of_heading[number]]
    if way == "source":  # instead of the packages' removal
        found = [re.sub(r"^apt-get purge .*\n", "", block, flags=re.MULTILINE) for block in found]
    return [command for block in found for command in commands(block)]


def script(page: str, way: str, major: str, python: str) -> str:
    """Return the script; it runs in the folder of the release's files."""
    lines = ["set -eu -o pipefail", "exec 3>/out/trace", "BASH_XTRACEFD=3", "PS4='+$EPOCHREALTIME '", "set -x"]
    for command in chosen(page, way):
        words = command if "\n" in command else re.sub(rf"\b{PAGES_MAJOR}\b", major, command)
        lines.append(SETUP.sub(rf"\1 --cpu --find-links /wheels --python {python}", words))
    return "\n".join([*lines, ":"]) + "\n"


def times(trace: str) -> list[tuple[str, float]]:
    """Return each command of a trace and its seconds."""
    marks = re.findall(r"^\+(\d+\.\d+) (.*)", trace, re.MULTILINE)
    ends = [float(when) for when, _ in marks[1:]]
    return [(command, round(end - float(when), 1)) for (when, command), end in zip(marks, ends, strict=False)]


def megabytes(output: str) -> float:
    """Return what apt has fetched, by its own words, such as `Need to get 61.2 MB of archives`."""
    units = {"kB": 0.001, "MB": 1.0, "GB": 1000.0}
    found = re.findall(r"^Need to get ([\d.,]+) ([kMG]B)(?:/\S+ \S+)? of archives", output, re.MULTILINE)
    return round(sum(float(number.replace(",", "")) * units[unit] for number, unit in found), 1)


def wheel_megabytes(wheels: Path) -> dict[str, float]:
    """Return what the folder's wheels would be as a download: PyTorch's own, and all others."""
    sizes = {path.name: path.stat().st_size for path in wheels.glob("*.whl")}
    torch = sum(size for name, size in sizes.items() if name.startswith("torch-"))
    return {"torch_mb": round(torch / 1e6, 1), "other_wheels_mb": round((sum(sizes.values()) - torch) / 1e6, 1)}


def result(folder: Path, wheels: Path) -> dict[str, Any]:
    """Return what a run of the script in `folder` has shown: `commands` and `seconds` until the prediction,
    `command_seconds` of each command, the removal's included, and megabytes by where they come from."""
    spent, output = times((folder / "trace").read_text()), (folder / "log").read_text()
    predicting = next(number for number, (command, _) in enumerate(spent, 1) if command.endswith("psql -d mydb"))
    prediction = re.search(r"^ +miles +\n-+\n +([\d.]+)$", output, re.MULTILINE)
    if prediction is None:
        raise ValueError(f"{folder / 'log'} has no prediction")
    return {
        "commands": predicting,
        "seconds": round(sum(seconds for _, seconds in spent[:predicting]), 1),
        "debian_mb": megabytes(output),
        **wheel_megabytes(wheels),
        "prediction": float(prediction[1]),
        "command_seconds": dict(spent),
    }


if __name__ == "__main__":
    if sys.argv[1] == "script":
        print(script(PAGE.read_text(), *sys.argv[2:]), end="")
    else:
        print(json.dumps(result(*map(Path, sys.argv[2:])), indent=1))
