"""Model files as `export_model` writes them; sql/files/description.sql has their layout.

Needs the standard library only.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import Any, NoReturn

from pg_tensile.errors import ModelFileError

MOST_HEADER = 16 << 20  # bytes
FORMAT, FORMAT_VERSION = "pg_tensile", "1"
PICKLES = (b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
HINT = "Transfer the file again, in binary, or export the model again."


@dataclass(frozen=True)
class ModelFile:
    """A whole model file: what it says about its model, and its bytes, a safetensors file."""

    description: dict[str, Any]
    contents: bytes

    @staticmethod
    def read(contents: bytes) -> ModelFile:
        """Return the file with these bytes, whose checksum is right. Raises ModelFileError."""
        length = _header_length(contents)
        header = _object(contents[8 : 8 + length], "header")
        metadata = header.get("__metadata__")
        if not isinstance(metadata, dict) or metadata.get("format") != FORMAT:
            hint = "Weights alone do not say of which columns a model makes predictions."
            _refuse("it is a safetensors file that export_model did not write", hint)
        if metadata.get("format_version") != FORMAT_VERSION:
            hint = "Update pg_tensile to the version that wrote the file, or a newer one."
            _refuse(f"its format version is {metadata.get('format_version')!r:.20}, not {FORMAT_VERSION}", hint)
        _check_hash(contents[: 8 + length], memoryview(contents)[8 + length :], metadata.get("sha256"))
        description = metadata.get("description")
        if not isinstance(description, str):
            _refuse("its description is damaged")
        fields = _object(description.encode("utf-8", "surrogatepass"), "description")
        for key in ("architecture", "preprocessing"):
            if not isinstance(fields.get(key), dict):
                _refuse(f'its description has no usable "{key}"')
        return ModelFile(fields, contents)


def _header_length(contents: bytes) -> int:
    if contents.startswith(PICKLES):
        _refuse(
            "it is a pickle or an archive of pickles",
            "Pickles are never read, because they can contain code: use export_model.",
        )
    if len(contents) < 8:
        _refuse(f"it has {len(contents)} bytes")
    length = int.from_bytes(contents[:8], "little")
    if length > MOST_HEADER:
        _refuse("its header would be larger than 16 MB")
    if length < 2 or 8 + length > len(contents):
        _refuse(f"it ends within its header, of {length} bytes")
    return length


def _check_hash(head: bytes, tensors: memoryview, digest: Any) -> None:
    if not isinstance(digest, str) or not re.fullmatch("[0-9a-f]{64}", digest):
        _refuse("it has no checksum")
    zeroed = head.replace(digest.encode(), b"0" * 64, 1)
    if hashlib.sha256(zeroed + hashlib.sha256(tensors).digest()).hexdigest() != digest:
        _refuse("its checksum is wrong, so it was damaged or changed")


def _object(text: bytes, what: str) -> dict[str, Any]:
    try:
        value = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        _refuse(f"its {what} is damaged")
    return value


def _refuse(reason: str, hint: str = HINT) -> NoReturn:
    raise ModelFileError(f"this is not a usable model file: {reason}", hint=hint)
