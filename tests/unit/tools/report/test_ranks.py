"""The ranks of a job in its report: how many, where they are, and how many there were."""

from __future__ import annotations

from typing import Any

import pytest

from pg_tensile.tools.report.page import render
from tests.unit.handmade import network
from tests.unit.records import HOSTILE, RANK, facts_in, planned_of, record, reduced

OPEN: dict[str, Any] = {"ended_at": None, "state": "running"}


def ranked(asked: object, *ranks: dict[str, Any], **changes: Any) -> str:
    """The page about a job that asks for ranks, of which some report."""
    reports = [RANK | rank | {"rank": number} for number, rank in enumerate(ranks)]
    return render(record(options={"ranks": asked}, ranks=reports, **changes))


def card(page: str) -> str:
    """The card of the ranks."""
    found = [line for line in page.splitlines() if "<dt>Ranks</dt>" in line]
    assert len(found) == 1
    return found[0]


@pytest.mark.parametrize(
    ("asked", "ranks", "number", "note"),
    [
        (2, [{}, {"device": "cuda:1"}], 2, "cuda:0, cuda:1 on 10.0.0.4"),
        ([2, 4], [{}, {"node": "10.0.0.5"}, {}], 3, "cuda:0 on 2 machines; 2 to 4 asked for"),
        (1, [{"device": None, "state": "starting", "step": None}], 1, "on 10.0.0.4"),
    ],
)
def test_an_open_job_says_where_its_ranks_are(
    asked: object, ranks: list[dict[str, Any]], number: int, note: str
) -> None:
    page = ranked(asked, *ranks, **OPEN)
    assert f'data-fact="ranks.number" data-value="{number}">{number}</b><small>{note}</small>' in card(page)
    facts = facts_in(page)["ranks"]
    assert facts["number"] == number and [report["rank"] for report in facts["reports"]] == [*range(number)]
    assert page.count('<th scope="row">rank ') == number


def test_each_rank_has_a_line() -> None:
    page = ranked(2, {"step": 12_345}, {"device": None, "state": "starting", "step": None}, **OPEN)
    assert '<th scope="row">rank 0</th><td>cuda:0 of 10.0.0.4, training, step 12,345</td>' in page
    assert '<th scope="row">rank 1</th><td>10.0.0.4, starting</td>' in page


def test_an_ended_job_has_the_number_of_its_trace() -> None:
    page = ranked([2, 4], planned=planned_of(reduced(network(8), ranks=3)))
    assert 'data-fact="ranks.number" data-value="3">3</b><small>of a Ray cluster; 2 to 4 asked for<' in card(page)
    assert "Its ranks" not in page and facts_in(page)["ranks"]["reports"] == []


def test_without_reports_and_trace_it_says_what_was_asked_for() -> None:
    page = ranked([2, 4])
    assert 'data-fact="ranks.most" data-value="4">4</b><small>of a Ray cluster; 2 to 4 asked for<' in card(page)
    assert facts_in(page)["ranks"] == {"least": 2, "most": 4, "number": None, "reports": []}


def test_a_job_without_ranks_has_none() -> None:
    page = render(record(planned_of(network(8))))
    assert "<dt>Ranks</dt>" not in page and "Its ranks" not in page and facts_in(page)["ranks"] is None


def test_what_a_cluster_reports_stays_text() -> None:
    hostile = dict.fromkeys(("node", "device", "state"), HOSTILE)
    assert "<b id=evil" not in ranked(1, hostile, **OPEN)
