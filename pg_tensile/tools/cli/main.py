"""The command `pg-tensile`: `bench` compares memory policies on one model's training step, `predict` uses a model
file; the other subcommands use a server (tools/cli/server.py, model_files.py, sql.py).

Exit status: 0 on success, 1 when a policy or a peer failed or a policy's results differ from eager PyTorch's, 2 when
the command line or the model it names cannot be used, 130 when interrupted; any other TensileError is 1. Errors are one
line on stderr, with detail and hint below it.

What a command needs besides the client's own dependencies (extras.py) is imported when it runs, torch after the command
line has been parsed.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from pg_tensile import __version__
from pg_tensile.errors import OptionError, TensileError
from pg_tensile.extras import needing
from pg_tensile.tools.cli import model_files, predict, server, sql
from pg_tensile.tools.cli.parser import BENCH, Parser


def read(arguments: list[str]) -> argparse.Namespace:
    """Parse the command line; the result's `run` takes the result and returns the exit status."""
    description = "Training in PostgreSQL, looked at; predictions with model files; memory plans for training steps."
    parser = Parser(prog="pg-tensile", description=description, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"pg-tensile {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    if arguments[:1] == ["bench"]:
        with needing("server", "benchmarks need"):
            from pg_tensile.tools.cli.bench import add_bench
        add_bench(commands)
    else:
        commands.add_parser("bench", help=BENCH)  # its options need numpy
    server.add(commands)
    model_files.add(commands)
    predict.add(commands)
    sql.add(commands)
    return parser.parse_args(arguments)


def complain(error: TensileError) -> None:
    print(f"pg-tensile: {error.message}", file=sys.stderr)
    for word, text in (("detail", error.detail), ("hint", error.hint)):
        if text:
            print(f"{word}: {text}", file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # its warnings are for developers; read once, at import
    try:
        given = list(sys.argv[1:] if arguments is None else arguments)
        if given[:1] == ["bench"] and given[1:2] and not given[1].startswith("-"):
            with needing("server", "benchmarks need"):
                from pg_tensile.tools.bench.clone import from_clone

            status: int = from_clone("experiments.suite").main(given[1:])
            return status
        parsed = read(given)
        status = parsed.run(parsed)
        return status
    except OptionError as error:
        complain(error)
        return 2
    except TensileError as error:
        complain(error)
        return 1
    except KeyboardInterrupt:
        print("pg-tensile: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has exited, as head does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
