"""The default of train_model on tables that were not looked at when it was chosen; the goals are about others."""

from __future__ import annotations

from benchmarks.answers.answers import OTHERS, rows_about, tables
from benchmarks.runner import Section

BENCHMARK = Section("Answers on other tables", rows_about([*OTHERS]), tables, expected=lambda _: [*OTHERS])
