"""Command lines: argparse with our errors, and options whose parsers name the flag that they complain about."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from pg_tensile.errors import OptionError
from pg_tensile.tools.bench import options


class Parser(argparse.ArgumentParser):
    """argparse, with errors in the house's form: one line, then a hint."""

    def error(self, message: str) -> Any:
        raise OptionError(message, f"{self.prog} --help lists the options.")


def add(group: Any, flag: str, parse: Callable[[str], Any] | None = None, **settings: Any) -> None:
    """One option; what `parse` complains about names the flag."""

    def value(text: str) -> Any:
        try:
            return parse(text) if parse else text
        except OptionError as error:
            raise OptionError(f"{flag}: {error.message}", error.hint) from None

    group.add_argument(flag, type=value, **settings)


def count(low: int, high: int = 2**31 - 1) -> Callable[[str], int]:
    return lambda text: options.parse_count(text, low, high)


def number(above: float | None, what: str) -> Callable[[str], float]:
    return lambda text: options.parse_number(text, above, what)
