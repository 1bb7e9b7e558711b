"""Safe insertion of texts and data into HTML."""

from __future__ import annotations

import json
import re
from typing import Any

# Characters of names that must not reach a page: controls, lone surrogates, marks that change the text direction
UNPRINTABLE = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069\ufffe\uffff]")


def clean(text: object) -> str:
    """Return the text with U+FFFD for unprintable characters; it has to be escaped before it is put into a page."""
    return UNPRINTABLE.sub("\ufffd", str(text))


def script_json(content: Any) -> str:
    """Return JSON for a script element; <, > and & are escaped so that no content can close the element."""
    text = json.dumps(content, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text
