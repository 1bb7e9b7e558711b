"""Model files read without a server, and the command line's errors about them."""

from __future__ import annotations

import hashlib
import json
import struct
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pg_tensile.errors import ModelFileError
from pg_tensile.execution import models
from pg_tensile.execution.exchange.reading import ModelFile
from pg_tensile.execution.training import checkpoint
from pg_tensile.tools.cli.main import main
from tests.unit.rows import every_type


@cache
def file(architecture: str = '{"type": "mlp", "hidden": [4]}', **metadata: str) -> bytes:
    """Return a model file, as export_model writes it."""
    preprocessing = every_type(100).prepare().fitted.preprocessing
    module = models.build(
        models.parse({"type": "mlp", "hidden": [4]}), preprocessing.model_inputs, preprocessing.outputs
    )
    weights = checkpoint.to_bytes(module.state_dict())
    length = struct.unpack("<Q", weights[:8])[0]
    described = {"architecture": json.loads(architecture), "preprocessing": preprocessing.to_json()}
    fields = {"format": "pg_tensile", "format_version": "1", "sha256": "0" * 64, "description": json.dumps(described)}
    header = json.dumps(json.loads(weights[8 : 8 + length]) | {"__metadata__": fields | metadata}).encode()
    header = struct.pack("<Q", len(header)) + header
    digest = hashlib.sha256(header + hashlib.sha256(weights[8 + length :]).digest()).hexdigest()
    return header.replace(b"0" * 64, digest.encode(), 1) + weights[8 + length :]


def test_a_whole_file_is_read() -> None:
    assert ModelFile.read(file()).description["architecture"] == {"type": "mlp", "hidden": [4]}


@given(st.integers(0, 1 << 30), st.integers(1, 255), st.sampled_from(["change", "cut", "insert", "append"]))
def test_a_damaged_file_is_refused(place: int, other: int, damage: str) -> None:
    contents = file()
    place %= len(contents)
    byte = bytes([contents[place] ^ other])
    damaged = {
        "change": contents[:place] + byte + contents[place + 1 :],
        "cut": contents[:place],
        "insert": contents[:place] + byte + contents[place:],
        "append": contents + byte,
    }[damage]
    with pytest.raises(ModelFileError, match="not a usable model file") as caught:
        ModelFile.read(damaged)
    assert caught.value.hint


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused(contents: bytes) -> None:
    with pytest.raises(ModelFileError):
        ModelFile.read(contents)
    with pytest.raises(ModelFileError):
        ModelFile.read(struct.pack("<Q", len(contents)) + contents)


@pytest.mark.parametrize(
    ("contents", "reason"),
    [
        (b"\x80\x04pickle", "pickle"),
        (struct.pack("<Q", 200_000) + b"[" * 200_000, "header is damaged"),
        (struct.pack("<Q", 1 << 40), "larger than 16 MB"),
    ],
)
def test_hostile_bytes_are_refused(contents: bytes, reason: str) -> None:
    with pytest.raises(ModelFileError, match=reason):
        ModelFile.read(contents)


def test_a_newer_format_is_refused() -> None:
    with pytest.raises(ModelFileError, match="format version is '2'") as caught:
        ModelFile.read(file(format_version="2"))
    assert "Update" in (caught.value.hint or "")


# -- pg-tensile predict -----------------------------------------------------------------------------------------------

HEADER = "bool,int2,int4,int8,float4,float8,date,time,text,doubles,bytes"


def predict(tmp_path: Path, rows: str, contents: bytes | None = None, *options: str) -> int:
    (tmp_path / "model").write_bytes(file() if contents is None else contents)
    (tmp_path / "rows.csv").write_bytes(rows.encode("latin-1"))
    return main(["predict", str(tmp_path / "model"), str(tmp_path / "rows.csv"), *options])


def test_rows_of_nulls_are_predicted(tmp_path: Path, capsys: Any) -> None:
    assert predict(tmp_path, f"{HEADER},more\n" + ",,,,,,,,,,,x\n" * 3 + "\n") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "row_number,prediction,label,probability" and len(lines) == 4
    assert lines[1].startswith("1,0.") and lines[1].split(",")[2] in ("yes", "no")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("", "the CSV file is empty"),
        ("bool\n", 'feature "int2" is missing'),
        (f"{HEADER},bool\n", 'feature "bool" is there more than once'),
        (f"{HEADER}\n1,2\n", "row 1 has 2 values for 11 columns"),
        (f"{HEADER}\n,,x,,,,,,,,\n", 'feature "int4" is not a number in row 1'),
        (f"{HEADER}\n,,,,,,,,,{{1}},\n", 'feature "doubles" has an array of 1 elements'),
        (f'{HEADER}\n"a', "the CSV file cannot be read"),
        (f"{HEADER}\n,,,,,,,,\xff,,\n", "the CSV file cannot be read"),
    ],
)
def test_rows_that_cannot_be_used_are_refused(tmp_path: Path, capsys: Any, rows: str, message: str) -> None:
    assert predict(tmp_path, rows) == 1
    error = capsys.readouterr().err
    assert message in error and "hint: " in error


def test_an_error_leaves_the_output_as_it_was(tmp_path: Path, capsys: Any) -> None:
    output = tmp_path / "predictions.csv"
    output.write_text("before")
    rows = f"{HEADER}\n" + ",,,,,,,,,,\n" * 9000
    assert predict(tmp_path, rows + ",,x,,,,,,,,\n", None, "-o", str(output)) == 1
    assert "in row 9001" in capsys.readouterr().err and output.read_text() == "before"
    assert predict(tmp_path, rows, None, "-o", str(output)) == 0
    assert len(output.read_text().splitlines()) == 9001
    assert predict(tmp_path, rows, None, "-o", str(tmp_path / "no" / "file")) == 2
    assert {entry.name for entry in tmp_path.iterdir()} == {"model", "rows.csv", "predictions.csv"}


def test_files_that_are_missing_or_no_models_are_refused(tmp_path: Path, capsys: Any) -> None:
    assert main(["predict", str(tmp_path / "none"), "-"]) == 2
    assert "cannot be read: No such file" in capsys.readouterr().err
    assert predict(tmp_path, HEADER, b"a file") == 1
    assert "not a usable model file" in capsys.readouterr().err


def test_code_is_run_only_if_it_is_allowed(tmp_path: Path, capsys: Any) -> None:
    trace = tmp_path / "trace"
    source = f"open({str(trace)!r}, 'w').close()\ndef build(inputs, outputs):\n    raise ValueError('built')\n"
    contents = file(json.dumps({"type": "python", "source": source}))
    assert predict(tmp_path, HEADER, contents) == 1
    assert "--allow-code" in capsys.readouterr().err and not trace.exists()
    assert predict(tmp_path, HEADER, contents, "--allow-code") == 1
    assert "built" in capsys.readouterr().err and trace.exists()
