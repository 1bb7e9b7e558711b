"""HTML pieces: text, safely escaped, and tables that page.js makes sortable."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

# Characters of names that must not reach a page: controls, lone surrogates, marks that change the text direction
UNPRINTABLE = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069\ufffe\uffff]")


class Column(NamedTuple):
    """A column of a table. `hint` is the tooltip of its title."""

    title: str
    is_number: bool = False
    hint: str = ""


class Cell(NamedTuple):
    """A cell of a table. `value` is the exact number, by which rows are sorted; None for text and unknown numbers."""

    text: str
    value: float | None = None


def clean(text: object) -> str:
    """Return the text with U+FFFD for unprintable characters; it has to be escaped before it is put into a page."""
    return UNPRINTABLE.sub("\ufffd", str(text))


def escape(text: object) -> str:
    """Return the text for the content of elements and for quoted attributes, cleaned and escaped."""
    return html.escape(clean(text), quote=True)


def script_data(identifier: str, content: Any) -> str:
    """Return a script element with JSON, in which <, > and & are escaped so that no content can close it."""
    text = json.dumps(content, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return f'<script type="application/json" id="{identifier}">{text}</script>'


def table(identifier: str, columns: Sequence[Column], rows: Iterable[Sequence[Cell]]) -> str:
    """Return a table that can be sorted by each column, in a box that scrolls sideways."""
    heads = "".join(_head(column) for column in columns)
    lines = "\n".join(f"<tr>{''.join(map(_cell, row, columns))}</tr>" for row in rows)
    return (
        f'<div class="wide"><table class="sortable" id="{identifier}">\n'
        f"<thead><tr>{heads}</tr></thead>\n<tbody>\n{lines}\n</tbody></table></div>"
    )


def _head(column: Column) -> str:
    number = ' class="number"' if column.is_number else ""
    hint = f' title="{escape(column.hint)}"' if column.hint else ""
    return f'<th scope="col"{number}{hint}><button type="button">{escape(column.title)}</button></th>'


def _cell(cell: Cell, column: Column) -> str:
    number = ' class="number"' if column.is_number else ""
    value = "" if cell.value is None else repr(cell.value)
    data = f' data-value="{value}"' if column.is_number else ""
    return f"<td{number}{data}>{escape(cell.text)}</td>"


def pairs(identifier: str, rows: Iterable[tuple[str, object]]) -> str:
    """Return a table of names and values; None is shown as a dash."""
    lines = "\n".join(
        f'<tr><th scope="row">{escape(name)}</th><td>{"–" if text is None else escape(text)}</td></tr>'
        for name, text in rows
    )
    return f'<div class="wide"><table class="pairs" id="{identifier}"><tbody>\n{lines}\n</tbody></table></div>'
