"""The default of train_model on small tables: three of those of small_tables, in one order of their rows."""

from __future__ import annotations

import statistics

import pytest

from benchmarks.answers.small_tables import SOURCES, WORST, measure
from tests.server.shared import SharedServer


@pytest.mark.long
@pytest.mark.parametrize("name", ["warpbreaks", "kyphosis", "UCBAdmissions"])
def test_it_is_about_as_good_as_what_one_would_try_first(shared_server: SharedServer, name: str) -> None:
    with shared_server.connect() as conn:
        rows = [*measure(conn, SOURCES[name], 1)]
    assert len(rows) == (1 if name == "UCBAdmissions" else 5)
    own, linear, boosting = (
        statistics.mean(row[side] for row in rows) for side in ("pg_tensile", "linear", "boosting")
    )
    assert own <= WORST * min(linear, boosting)
