"""Clusters of Debian that preload the library: `python3 clusters.py MAJOR` names them, and exits with 1 if any does.

The package of a major version asks before it is removed, because such a cluster would not start any more.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

CONFIGURATION = Path("/etc/postgresql")
DATA = Path("/var/lib/postgresql")
LIBRARY = "pg_tensile"
# name = value, name 'value', name value # comment
SETTING = re.compile(r"\s*([A-Za-z_][\w.]*)\s*(?:=\s*|\s)('(?:[^'\\]|''|\\.)*'|[^\s#']+)\s*(?:#.*)?$")
DEEPEST = 10  # inclusion of files in files, as in PostgreSQL


class Setting(NamedTuple):
    """A line of a configuration file."""

    path: Path
    line: int
    name: str
    value: str


def unquoted(value: str) -> str:
    if not value.startswith("'"):
        return value
    return re.sub(r"''|\\(.)", lambda match: match[1] or "'", value[1:-1])


def settings(path: Path, depth: int = 0) -> Iterator[Setting]:
    """Yield the settings of a configuration file and of those that it includes, in the order in which they hold."""
    try:
        lines = path.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return
    for number, line in enumerate(lines, 1):
        if not (match := SETTING.match(line)):
            continue
        name, value = match[1].lower(), unquoted(match[2])
        if name not in ("include", "include_if_exists", "include_dir"):
            yield Setting(path, number, name, value)
        elif depth < DEEPEST:
            place = path.parent / value
            found = sorted(place.glob("[!.]*.conf")) if name == "include_dir" else [place]
            for included in found:
                yield from settings(included, depth + 1)


def libraries(value: str) -> set[str]:
    """Return the names of the libraries in a list of them, without folders and endings."""
    words = (re.sub(r'^"(.*)"$', r"\1", word.strip()) for word in value.split(","))
    return {word.rpartition("/")[2].removesuffix(".so") for word in words}


def preloading(folder: Path, data: Path) -> Setting | None:
    """Return the line that makes a cluster preload the library, if one does.

    `folder` is that of its configuration, `data` that of its data unless the configuration names another.
    """
    found = [*settings(folder / "postgresql.conf")]
    places = [setting.value for setting in found if setting.name == "data_directory"]
    found += settings(Path(places[-1] if places else data) / "postgresql.auto.conf")
    lists = [setting for setting in found if setting.name == "shared_preload_libraries"]
    return lists[-1] if lists and LIBRARY in libraries(lists[-1].value) else None


def main(major: str) -> int:
    status = 0
    for configuration in sorted(CONFIGURATION.glob(f"{major}/*/postgresql.conf")):
        cluster = configuration.parent.name
        if setting := preloading(configuration.parent, DATA / major / cluster):
            print(
                f"pg_tensile: the cluster {major}/{cluster} preloads the library: {setting.path}, line {setting.line}\n"
                f"hint: Take pg_tensile out of shared_preload_libraries there and restart the cluster, or it will not"
                " start again; then remove the package.",
                file=sys.stderr,
            )
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
