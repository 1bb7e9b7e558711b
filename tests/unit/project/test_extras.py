"""What the client needs: the dependencies of the distribution and no more. A missing extra is named in one sentence."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from pg_tensile import __version__
from pg_tensile.extras import EXTRAS, MissingPackageError, needing
from tests.repository import REPOSITORY

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
CLIENT = """
from pg_tensile import client
from pg_tensile.client.frames import JOBS, frame
from pg_tensile.client.job import renderer
for name in client.__all__:
    getattr(client, name)
for method in (lambda: frame(JOBS, []), renderer):
    try:
        method()
    except client.MissingPackageError as error:
        print(error, *error.__notes__)
"""


def needed(requirements: list[str]) -> Iterator[str]:
    """Yield the names of packages with those that they need, in this environment."""
    for requirement in map(Requirement, requirements):
        yield requirement.name
        for text in metadata.requires(requirement.name) or ():
            marker = Requirement(text).marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *requirement.extras)):
                yield from needed([text.partition(";")[0]])


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the client's dependencies and pg_tensile only, as links."""
    folder = tmp_path_factory.mktemp("packages")
    (folder / "pg_tensile").symlink_to(REPOSITORY / "pg_tensile")
    for name in {*needed(PROJECT["dependencies"])}:
        distribution = metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            (folder / top).symlink_to(Path(str(distribution.locate_file(top))))
    return folder


def run(packages: Path, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program with these packages and the standard library only; no server answers."""
    text = f"import sys; sys.path.append({str(packages)!r})\n{program}"
    command = [sys.executable, "-I", "-S", "-c", text, *arguments]
    environment = {"PGHOST": str(packages), "PATH": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=packages)
    assert "Traceback" not in done.stderr, done.stderr
    return done


def command(packages: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run(packages, "from pg_tensile.tools.cli.main import main; sys.exit(main(sys.argv[1:]))", *arguments)


def test_extras_are_those_of_the_distribution() -> None:
    optional = PROJECT["optional-dependencies"]
    assert {extra: list(packages) for extra, packages in EXTRAS.items()} == {name: optional[name] for name in EXTRAS}
    heavy = {"torch", "numpy", "pandas", "bokeh", "onnxruntime"}
    assert not heavy & {Requirement(text).name for text in PROJECT["dependencies"]}


def test_the_folder_lacks_what_the_client_does_not_need(packages: Path) -> None:
    """Check that the tests below can fail."""
    for name in ("numpy", "torch", "pandas"):
        assert f"No module named '{name}'" in subprocess.run(
            [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.append({str(packages)!r}); import {name}"],
            capture_output=True,
            text=True,
        ).stderr  # fmt: skip


def test_the_client_is_imported_without_extras_and_names_those_that_methods_need(packages: Path) -> None:
    done = run(packages, CLIENT)
    assert done.returncode == 0, done.stderr
    frames, report = done.stdout.splitlines()
    wanted = 'methods that return a DataFrame need the extra "frames" of pg_tensile, of which pandas is not installed'
    assert frames == f"{wanted} hint: pip install 'pandas>=2.2' installs it."
    assert report.startswith('reports need the extra "report" of pg_tensile, of which ')
    assert report.endswith(" hint: pip install 'bokeh>=3.9,<4' 'jinja2>=3.1' 'numpy>=2' installs it.")


def test_help_and_version_need_no_extra(packages: Path) -> None:
    assert command(packages, "--version").stdout == f"pg-tensile {__version__}\n"
    listed = command(packages, "--help").stdout
    for name in ("bench", "top", "plan", "report", "trace", "export", "import", "predict", "sql"):
        assert f"    {name} " in listed, name


@pytest.mark.parametrize(
    "arguments",
    [
        ("top", "--once"),
        ("sql", "SELECT * FROM ML.PREDICT(MODEL m, (SELECT 1 AS x))"),
        ("export", "m", "-o", "-"),
        ("import", "rules.json", "m"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_commands_of_the_client_need_no_extra(packages: Path, arguments: tuple[str, ...]) -> None:
    """They look for a server."""
    (packages / "rules.json").write_text("{}")
    done = command(packages, *arguments)
    assert (done.returncode, done.stdout) == (1, "") and done.stderr.startswith("pg-tensile: cannot connect: ")


@pytest.mark.parametrize(
    ("arguments", "extra"),
    [
        (("report", "1", "-o", "-"), "report"),
        (("trace", "1", "-o", "-"), "report"),
        (("plan", "1"), "report"),
        (("predict", "rules.json", "-"), "server"),
        (("bench", "--help"), "server"),
        (("bench", "table1"), "server"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_commands_that_need_an_extra_name_it(packages: Path, arguments: tuple[str, ...], extra: str) -> None:
    (packages / "rules.json").write_text("{}")
    done = command(packages, *arguments)
    assert (done.returncode, done.stdout) == (1, "")
    message, hint = done.stderr.splitlines()
    assert message.startswith("pg-tensile: ") and f' need the extra "{extra}" of pg_tensile, of which ' in message
    assert message.endswith(" is not installed")
    assert hint.startswith("hint: pip install ") and hint.endswith(" installs it.")
    assert all(Requirement(text).name in hint for text in EXTRAS[extra])


def test_an_error_of_our_own_is_no_missing_extra() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_module"), needing("report", "reports need"):
        import pg_tensile.no_such_module  # type: ignore[import-not-found]  # noqa: F401
    with pytest.raises(MissingPackageError), needing("report", "reports need"):
        import no_such_package  # type: ignore[import-not-found]  # noqa: F401
