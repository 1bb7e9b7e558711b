"""The commands of docs/install.md as a script, for a clean Debian (scripts/install_guide.sh).

    python3 scripts/install_guide.py packages|source MAJOR PYTHON

prints a bash script with the commands of one way to install, to predict and to remove, in the page's order. It differs
from the page in the major version of PostgreSQL, and in where PyTorch comes from: the folder /wheels, whose wheels are for
the interpreter PYTHON. Its trace goes to /out/trace, with the time of each command.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

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


def times(trace: str) -> list[tuple[float, str]]:
    """Return the seconds of each command of a trace, and the command."""
    marks = re.findall(r"^\+(\d+\.\d+) (.*)", trace, re.MULTILINE)
    following = [float(when) for when, _ in marks[1:]]
    return [(end - float(when), command) for (when, command), end in zip(marks, following, strict=False)]


if __name__ == "__main__":
    print(script(PAGE.read_text(), *sys.argv[1:]), end="")
