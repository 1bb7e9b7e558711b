"""The default of train_model on tables that were not looked at when it was chosen."""

from __future__ import annotations

from benchmarks.answers.answers import checks_of, rows_about, scenarios_of, tables
from benchmarks.answers.problems import OTHERS
from benchmarks.checks import Check
from benchmarks.results import Results
from benchmarks.runner import Section

MEAN = 0.98  # goal: geometric mean of the ratios


def checks(results: Results) -> list[Check]:
    return checks_of("other-tables", results, MEAN)


NAMES = [*OTHERS]
BENCHMARK = Section("Answers on other tables", rows_about(NAMES), tables, checks, lambda _: [*scenarios_of(NAMES)])
