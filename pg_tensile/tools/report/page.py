"""`pg-tensile report`: one HTML page about a job, which opens offline and loads nothing.

Its numbers are included as JSON, too (`#facts`). Everything from the database is inserted as text, never as markup or
code.
"""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING, Any

from pg_tensile.tools.report import sections
from pg_tensile.tools.report.facts import Facts, facts_of
from pg_tensile.tools.report.figures import embedded, latency_charts, learning_charts, plan_charts
from pg_tensile.tools.report.iteration import Iteration, NoIterationError, iteration_of
from pg_tensile.tools.report.iteration_charts import iteration_charts
from pg_tensile.tools.report.tables import escape, script_data

if TYPE_CHECKING:
    from pg_tensile.client.record import JobRecord

# Allows no external resource, even if a text from the database were taken for markup
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; img-src data: blob:;"
    " font-src data:"
)


def render(record: JobRecord) -> str:
    """Return the page. For a job without a plan it has the other sections, and says why the iteration is missing."""
    why: NoIterationError | None = None
    iteration: Iteration | None = None
    try:
        iteration = iteration_of(record)
    except NoIterationError as error:
        why = error
    facts = facts_of(record, iteration)
    drawn: dict[str, Any] = {}
    notes: list[str] = []
    if iteration is not None:
        drawn, notes = iteration_charts(iteration, sections.limits_of(facts))
    measured, left_out = latency_charts(record.latency, facts["latency"])
    learnt = learning_charts(facts["metrics"])
    charts = embedded({**drawn, **measured, **learnt, **plan_charts(facts)})
    places = charts.places
    parts = {
        "Summary": sections.summary(facts),
        "What went wrong": sections.error(facts),
        "Memory and link over one iteration": (
            sections.missing(why) if why else sections.iteration(facts, places, notes)
        ),
        "Tensors that move": "" if why else sections.tensors(facts),
        "Latency, predicted and measured": sections.latency(facts, places, left_out),
        "Learning curves": sections.learning(facts, places, list(learnt)),
        "Plans over the job’s life": sections.plans(facts, places),
        "Settings and versions": sections.settings(facts),
    }
    body = [f"<section>\n<h2>{title}</h2>\n{content}\n</section>" for title, content in parts.items() if content]
    return _page(facts, "\n".join([*body, script_data("facts", facts), charts.scripts]))


def _page(facts: Facts, body: str) -> str:
    job = facts["job"]
    title = f"Job {job['id']}: {job['model_name']}"
    subtitle = f"pg_tensile; a job of {job['owner_name']}, as it was at {sections.moment(facts['read_at'])}"
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)}</title>
<link rel="icon" href="data:,">
<style>
{_own("page.css")}</style>
</head>
<body>
<header>
<h1>{escape(title)}</h1>
<p>{escape(subtitle)}</p>
</header>
<main>
{body}
</main>
<script>
{_own("page.js")}</script>
</body>
</html>
"""


def _own(name: str) -> str:
    """Return the text of a file next to this module."""
    return files("pg_tensile.tools.report").joinpath(name).read_text("utf-8")
