"""The commands `pg-tensile export` and `import`: export_model and import_model with files of the client.

The file is one value of PostgreSQL, which goes over the connection in binary.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from pg_tensile.errors import OptionError
from pg_tensile.tools.cli import server
from pg_tensile.tools.cli.output import writing
from pg_tensile.tools.cli.parser import count

FORMATS = ("tensile", "onnx", "torch")


def add(commands: Any) -> None:
    """Add the commands to the parsers of `pg-tensile`; each sets `run`, which takes the parsed arguments."""
    parser = server.add_command(commands, "export", "a model as a file", "", verb="Writes")
    parser.add_argument("model", metavar="MODEL", help="the model's name")
    parser.add_argument("-v", "--version", type=count(1), metavar="N", help="its version (the deployed one)")
    parser.add_argument("-f", "--format", choices=FORMATS, default="tensile", help="of the file (tensile)")
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="the file to write; - is stdout")
    parser.set_defaults(run=_export)
    parser = server.add_command(commands, "import", "a file of export as a version of a model", "", verb="Adds")
    parser.add_argument("file", metavar="FILE", help="the file that export has written")
    parser.add_argument("model", metavar="MODEL", help="the model's name; one that does not exist is registered")
    what = "the file has weights only (format torch), for the architecture and columns of this model"
    parser.add_argument("--like", metavar="MODEL", help=what)
    parser.set_defaults(run=_import)


def _export(arguments: argparse.Namespace) -> int:
    from psycopg import sql

    from pg_tensile.client.connection import extension_schema, refusals

    with writing(arguments.output, binary=True) as file, server.connected(arguments) as connection:
        with refusals():
            function = sql.Identifier(extension_schema(connection), "export_model")
            statement = sql.SQL("SELECT {}(%s, %s, %s) AS contents").format(function)
            given = (arguments.model, arguments.version, arguments.format)
            row = connection.execute(statement, given, binary=True).fetchone()
        assert row is not None
        size = file.write(row["contents"])
    if arguments.output != "-":
        print(f"{arguments.output}: {size:,} bytes")
    return 0


def _import(arguments: argparse.Namespace) -> int:
    from psycopg import sql

    from pg_tensile.client.connection import extension_schema, refusals

    try:
        contents = Path(arguments.file).read_bytes()
    except OSError as error:
        raise OptionError(f"{arguments.file} cannot be read: {error.strerror}", "Check the path.") from None
    with server.connected(arguments) as connection, refusals():
        function = sql.Identifier(extension_schema(connection), "import_model")
        statement = sql.SQL("SELECT {}(%b, %s, %s) AS version").format(function)
        row = connection.execute(statement, (contents, arguments.model, arguments.like)).fetchone()
    assert row is not None
    print(f'version {row["version"]} of model "{arguments.model}"')
    return 0
