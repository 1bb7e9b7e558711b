"""The command `pg-tensile predict`: predictions with a model file for the rows of a CSV file, without a server."""

from __future__ import annotations

import argparse
import contextlib
import csv
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from pg_tensile.errors import DataError, OptionError
from pg_tensile.extras import needing
from pg_tensile.tools.cli.output import writing

ONNX = b"\x08"  # begins a graph: the field ir_version
EXAMPLES = """\
The CSV file has a header with the names of the columns that the model was trained on; others are ignored. An empty
value is null. Values are written as PostgreSQL prints them: COPY (SELECT ...) TO ... (FORMAT csv, HEADER) does. Times
without an offset are in UTC.

examples:
  pg-tensile predict late.tensile rows.csv -o predictions.csv
  psql -c "COPY departures TO STDOUT (FORMAT csv, HEADER)" | pg-tensile predict late.onnx -
"""


def add(commands: Any) -> None:
    """Add the command to the parsers of `pg-tensile`; it sets `run`, which takes the parsed arguments."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "predict",
        help="predictions of a model file for a CSV file, without a server",
        description="Predicts with a file of export_model, in the format tensile or onnx: one line for each row, as\n"
        "predict_rows returns them. The format onnx needs no PyTorch.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="FILE", help="the file that export_model has returned")
    parser.add_argument("rows", metavar="ROWS", help="the CSV file with the rows; - is stdin")
    parser.add_argument("-o", "--output", default="-", metavar="FILE", help="the CSV file to write (stdout)")
    what = "run the code of a model whose architecture is import or python, as you"
    parser.add_argument("--allow-code", action="store_true", help=what)
    parser.set_defaults(run=_predict)


def _predict(arguments: argparse.Namespace) -> int:
    try:
        contents = Path(arguments.model).read_bytes()
    except OSError as error:
        raise OptionError(f"{arguments.model} cannot be read: {error.strerror}", "Check the path.") from None
    predictor = _predictor(contents, arguments.allow_code)
    from pg_tensile.execution.exchange.predictor import COLUMNS

    with _opened(arguments.rows) as rows, writing(arguments.output) as output:
        lines = _lines(rows)
        header = next(lines, None)
        if header is None:
            raise DataError("the CSV file is empty", hint="Its first line has the names of the columns.")
        writer = csv.writer(output, lineterminator="\n")
        writer.writerow(COLUMNS)
        given = (line or [""] for line in lines if line or len(header) == 1)  # an empty line of one column is a null
        writer.writerows(predictor.predict(header, given))
    return 0


def _predictor(contents: bytes, allow_code: bool) -> Any:
    """Return the predictor of a file of the format onnx or tensile."""
    if contents[:1] == ONNX and contents[8:9] != b"{":  # the first byte of safetensors' header
        with needing("onnx", "predictions with an ONNX file need"):
            from pg_tensile.execution.exchange.onnx_predicting import GraphPredictor
        return GraphPredictor(contents)
    with needing("server", "predictions with a file of the format tensile need"):
        from pg_tensile.execution.exchange.predicting import FilePredictor
        from pg_tensile.execution.exchange.reading import ModelFile
    return FilePredictor(ModelFile.read(contents), allow_code)


def _lines(file: IO[str]) -> Iterator[list[str]]:
    """Yield the lines of a CSV file. Raises DataError for what is none."""
    csv.field_size_limit(1 << 30)
    try:
        yield from csv.reader(file, strict=True)
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"the CSV file cannot be read: {error}", hint="It must be UTF-8, with commas.") from None


@contextlib.contextmanager
def _opened(path: str) -> Iterator[IO[str]]:
    if path == "-":
        yield sys.stdin
        return
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(open(path, encoding="utf-8-sig", newline=""))
        except OSError as error:
            raise OptionError(f"{path} cannot be read: {error.strerror}", "Check the path.") from None
        yield file
