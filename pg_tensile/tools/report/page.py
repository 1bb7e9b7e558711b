"""`pg-tensile report`: one HTML page about a job, which opens offline and loads nothing.

The markup and the sentences are in page.html.j2; this module collects what they show. The numbers are included as JSON,
too (`#facts`). Everything from the database is inserted as text, never as markup or code.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from pg_tensile.text import duration, size
from pg_tensile.tools.report.chart_style import BLUE, GREEN, GREY, ORANGE, PHASES, PURPLE, RED
from pg_tensile.tools.report.evaluation_charts import MOST_FEATURES, evaluation_charts
from pg_tensile.tools.report.facts import Facts, Summary, facts_of
from pg_tensile.tools.report.figures import SPLITS, embedded, latency_charts, learning_charts, plan_charts
from pg_tensile.tools.report.iteration import Iteration, NoIterationError, is_eager, iteration_of
from pg_tensile.tools.report.iteration_charts import Limit, iteration_charts
from pg_tensile.tools.report.markup import clean, script_json
from pg_tensile.tools.report.memory_flow import legend_of, memory_flow_chart
from pg_tensile.tools.report.ranks import about_ranks, ranks_note
from pg_tensile.tools.report.submission import submission_of
from pg_tensile.tools.report.tables import importance_table, log_table, metric_table, moment, score_table, tensor_table

if TYPE_CHECKING:
    from pg_tensile.client.record import JobRecord

# Allows no external resource, even if a text from the database were taken for markup
POLICY = Markup(
    "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; img-src data: blob:;"
    " font-src data:"
)
SHOWN_EPOCHS = 20
CHOSEN = ("chosen_batch_size", "chosen_learning_rate")  # columns of tensile.jobs
SHOWN_LINES = 300  # of the scheduler's log
PROFILE = {  # titles of the numbers of a device profile
    "memory_bytes": "memory",
    "out_bytes_per_s": "link out, as far as the job has it",
    "in_bytes_per_s": "link in, as far as the job has it",
    "duplex_factor": "speed of each direction while both are busy",
    "flops_per_s": "operations a second",
    "bytes_per_s": "memory bandwidth",
    "transfer_latency_us": "latency of a transfer",
    "launch_us": "launch of an operator",
    "handover_us": "handing a transfer over to the compute",
}


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
    notes: dict[str, list[str]] = {"iteration": [], "metrics": [], "log": []}
    if iteration is not None:
        drawn, notes["iteration"] = iteration_charts(iteration, _limits(facts))
    measured, notes["latency"] = latency_charts(record.latency, facts.latency)
    curves = learning_charts(facts.metrics, facts.job.get("baseline"))
    charts = embedded(
        {
            **drawn,
            **measured,
            **curves,
            **evaluation_charts(facts.evaluation),
            **plan_charts(facts),
            **memory_flow_chart(facts.memory_flow),
        }
    )
    epochs = sorted({row["epoch"] for row in facts.metrics})
    if len(epochs) < facts.epochs:
        notes["metrics"].append(f"Of {facts.epochs:,} epochs some are shown, equally far from each other.")
    if len(facts.log) > SHOWN_LINES:
        notes["log"].append(f"The last {SHOWN_LINES:,} of {len(facts.log):,} lines are shown.")
    job, eager = facts.job, is_eager(facts.job)
    page: str = _template().render(
        title=f"Job {job['job']}: {job['model']}",
        policy=POLICY,
        style=_own("page.css"),
        script=_own("page.js"),
        facts=facts,
        data=script_json(facts.as_json()),
        job=job,
        progress=facts.progress,
        eager=eager,
        plan=Summary(granted_bytes=facts.summary.granted_bytes) if eager else facts.summary,
        why=why,
        failure=[(name, job[name]) for name in ("sqlstate", "error", "detail", "hint") if job[name] is not None],
        places=charts.places,
        scripts=charts.scripts,
        curves=list(curves),
        notes=notes,
        legends=_legends(facts),
        tables={
            "tensors": tensor_table(facts.tensors),
            "metrics": metric_table(
                [
                    row
                    for row in facts.metrics
                    if row["epoch"] in (*epochs[-SHOWN_EPOCHS:], facts.job.get("kept_epoch"))
                ],
                [*curves],
                job.get("baseline"),
            ),
            "log": log_table(facts.log[-SHOWN_LINES:]),
            "scores": None if facts.evaluation is None else score_table(facts.evaluation),
            "importances": None if facts.evaluation is None else importance_table(facts.evaluation),
        },
        most_features=MOST_FEATURES,
        submission=submission_of(job),
        about_job=_about_job(job),
        about_ranks=[] if facts.ranks is None else about_ranks(facts.ranks),
        about_device=[] if facts.profile is None else _about_device(facts.profile),
    )
    return page


def _template() -> Any:
    environment = Environment(
        loader=FunctionLoader(_own),
        autoescape=True,
        finalize=lambda value: value if isinstance(value, Markup) else clean(value),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.globals |= {
        "count": lambda number, noun: f"{number:,} {noun}{'' if number == 1 else 's'}",
        "duration": duration,
        "moment": moment,
        "number": lambda number: f"{number:,}",
        "percent": lambda share: f"{share:.1%}",
        "ranks_note": ranks_note,
        "size": size,
        "state_note": _state_note,
        "str": str,
    }
    return environment.get_template("page.html.j2")


def _own(name: str) -> str:
    """Return the text of a file next to this module."""
    return files("pg_tensile.tools.report").joinpath(name).read_text("utf-8")


def _limits(facts: Facts) -> list[Limit]:
    """Return the lines of the memory chart that limit the job: its grant and its budget."""
    granted, budget = facts.summary.granted_bytes, facts.job["memory_budget"]
    limits = [] if granted is None else [Limit(granted, RED, "dashed")]
    return limits if budget is None else [*limits, Limit(budget, PURPLE, "dotted")]


def _legends(facts: Facts) -> dict[str, Iterable[tuple[str, str]]]:
    """Return (name, colour) of what is drawn, for each legend."""
    memory = [("planned", BLUE), ("without a plan", GREY)]
    memory += [("granted", RED)] if facts.summary.granted_bytes is not None else []
    memory += [("memory_budget", PURPLE)] if facts.job["memory_budget"] is not None else []
    lanes = list(PHASES.items())
    if facts.iteration is not None:
        lanes += [("computed again", ORANGE)] if facts.iteration.repeated_steps else []
        lanes += [("waits", RED)] if facts.iteration.stall_us else []
        moves = facts.iteration.out.transfers + facts.iteration.in_.transfers
        lanes += [("transfers and their requests", GREEN)] if moves else []
    splits = {row["split"] for row in facts.metrics}
    baseline = [("without a model", GREY)] if facts.job.get("baseline") is not None else []
    return {
        "memory": memory,
        "lanes": lanes,
        "phases": PHASES.items(),
        "splits": [(name, colour) for name, colour in SPLITS.items() if name in splits] + baseline,
        "memory_flow": [] if facts.memory_flow is None else legend_of(facts.memory_flow),
        "plans": [("planned", BLUE), ("granted", RED), ("without a plan", GREY)],
    }


def _state_note(facts: Facts) -> str:
    """Return why the job is in its state, or how far it is."""
    job, progress = facts.job, facts.progress
    if job["error"]:
        return str(job["error"])
    if job["reason"]:
        return str(job["reason"])
    if progress is not None and progress["epoch"] is not None:
        step = f"step {progress['step'] or 0:,} of {progress['steps'] or 0:,}"
        return f"epoch {progress['epoch']:,} of {job['epochs']:,}, {step}"
    last = max((row["epoch"] for row in facts.metrics), default=0)
    epochs = f"{last:,} of {job['epochs']:,} epochs"
    if job.get("kept_epoch") is None:
        return epochs
    return f"{epochs}, ended by {job['stopped']}; the weights are those after epoch {job['kept_epoch']:,}"


def _about_job(job: Mapping[str, Any]) -> list[tuple[str, object]]:
    dates = ("submitted_at", "started_at", "ended_at", "captured_at")
    return [
        ("owner", job["owner"]),
        ("policy that planned", job["planned_policy"]),
        ("device", job["device"] or None),
        ("parameters of the model", None if job["parameters"] is None else f"{job['parameters']:,}"),
        ("rows", None if job["rows"] is None else f"{job['rows']:,}"),
        *((name.replace("_", " "), job[name]) for name in CHOSEN if job.get(name) is not None),
        ("fingerprint of the rows", job["fingerprint"]),
        ("attempts", job["attempts"]),
        *([("tuning", f"trial {job['trial']} of tuning {job['tuning']}")] if job.get("trial") is not None else []),
        ("version of the model that it made", job["version"]),
        ("epoch whose weights it has", job.get("kept_epoch")),
        ("warnings", "; ".join(job.get("warnings") or ())),
        *([("most drift of rows that it predicts", job["drift"])] if job.get("drift") else []),
        *((name, job[name] and moment(job[name])) for name in dates),
    ]


def _about_device(profile: Mapping[str, Any]) -> list[tuple[str, object]]:
    rates = [(title, _rate(name, profile[name])) for name, title in PROFILE.items()]
    return [("name", profile["name"]), ("kind", profile["kind"]), *rates]


def _rate(name: str, number: float) -> str:
    """Return a number of a device profile with its unit, which its name ends with."""
    if name.endswith("bytes"):
        return size(number)
    if name.endswith("bytes_per_s"):
        return f"{size(number)}/s"
    return f"{number:,.4g} µs" if name.endswith("_us") else f"{number:,.4g}"
