"""Parsing of command lines: argparse with OptionError, and options whose errors name their flag."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from pg_tensile.errors import OptionError
from pg_tensile.tools import numbers

BENCH = "measure memory policies on a model's training step"  # what `pg-tensile bench` does


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises OptionError, with a hint, instead of exiting."""

    def error(self, message: str) -> Any:
        raise OptionError(message, f"{self.prog} --help lists the options.")


def add(group: Any, flag: str, parse: Callable[[str], Any] | None = None, **settings: Any) -> None:
    """Add an option to the group; an OptionError of `parse` is raised again with the flag in its message."""

    def value(text: str) -> Any:
        try:
            return parse(text) if parse else text
        except OptionError as error:
            raise OptionError(f"{flag}: {error.message}", error.hint) from None

    group.add_argument(flag, type=value, **settings)


def count(low: int, high: int = 2**31 - 1) -> Callable[[str], int]:
    return lambda text: numbers.parse_count(text, low, high)


def number(above: float | None, what: str) -> Callable[[str], float]:
    return lambda text: numbers.parse_number(text, above, what)
