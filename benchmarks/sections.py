"""The sections of the three commands; a module is imported when its section is used."""

from __future__ import annotations

import importlib
from typing import NamedTuple

from benchmarks.runner import Section


class Place(NamedTuple):
    """The command of a section, and its module."""

    command: str
    module: str


PLANS = (
    *("methods", "papers", "tensile", "core", "cold", "busy", "finetuning", "gpu", "systems", "planner", "prices"),
    *("rounds", "allocator", "memory-flow", "parallel", "devices"),
)
SERVER = (
    *("db", "feed", "predict", "select", "serving", "drift", "training", "jobs", "recovery", "flowing", "time-left"),
    *("tuning", "soak", "sharing", "install"),
)
ANSWERS = ("answers", "other-tables", "small-tables", "tables", "digits", "series", "texts")
COMMANDS = {"plans": PLANS, "server": SERVER, "answers": ANSWERS}
SECTIONS = {
    name: Place(command, f"benchmarks.{command}.{name.replace('-', '_')}")
    for command, names in COMMANDS.items()
    for name in names
}


def load(name: str) -> Section:
    section: Section = importlib.import_module(SECTIONS[name].module).BENCHMARK
    return section
