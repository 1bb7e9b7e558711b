"""This machine's configuration of pip as mounts for the build of an image: the index, local wheels, the CA bundle.

    python docker/tests/host_pip.py FOLDER

Writes FOLDER/pip.conf out of all that pip reads (`pip config list`: its configuration files and PIP_* variables), puts
copies of files that it names beside that, and prints a line SOURCE:TARGET for everything to mount. Folders keep their
paths; files are found in TARGET, because a package may want to write where they lie (the CA bundle).
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

TARGET = Path("/mnt/pip")
INDEXES = ("index-url", "extra-index-url")
# Sections in the order in which later ones win; a build knows nothing but `pip install`.
SECTIONS = ("global", "install", ":env:")


def settings() -> dict[str, str]:
    """pip's settings for `pip install`; raises CalledProcessError when pip does not run."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found: dict[str, dict[str, str]] = {section: {} for section in SECTIONS}
    for line in listed.splitlines():
        name, _, value = line.partition("=")
        section, _, key = name.rpartition(".")
        if section in found and key != "config-file":
            found[section][key] = str(ast.literal_eval(value))
    merged = {key: value for section in SECTIONS for key, value in found[section].items()}
    bundle = os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("SSL_CERT_FILE")
    return merged if bundle is None else {"cert": bundle} | merged


def translate(key: str, word: str, folder: Path, mounts: set[Path]) -> str:
    """One word of a setting's value, as it reads in the container. Files go to `folder`, folders to `mounts`."""
    path = Path(unquote(urlsplit(word).path) if word.startswith("file:") else word)
    if not path.is_absolute() or not path.exists():
        return word
    if path.is_dir():
        mounts.add(path.parent if key in INDEXES else path)  # the files of an index lie beside it
        return word
    copy = f"{len(list(folder.iterdir()))}-{path.name}"
    shutil.copyfile(path, folder / copy)
    return word.replace(str(path), str(TARGET / copy))


def main(folder: Path) -> None:
    folder.mkdir(parents=True)
    mounts: set[Path] = set()
    lines = ["[global]"]
    for key, value in sorted(settings().items()):
        words = [translate(key, word, folder, mounts) for word in value.split()]
        lines.append(f"{key} = {' '.join(words)}")
    (folder / "pip.conf").write_text("\n".join(lines) + "\n")
    print(f"{folder / 'pip.conf'}:/etc/pip.conf")
    print(f"{folder}:{TARGET}")
    for path in sorted(mounts):
        print(f"{path}:{path}")


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
