"""The SQL that submits a job again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def submission_of(job: Mapping[str, Any]) -> str:
    """Return the statements that register the model of a job, given as its row in tensile.jobs, and submit the job."""
    if job["kind"] == "calibrate":
        return f"SELECT calibrate_device(seconds => {job['options'].get('seconds', 240)});"
    budget, policy = job["memory_budget"], job["policy"] or job["planned_policy"]
    arguments: dict[str, object] = {
        "target": _literal(job["target"]),
        **{name: job[name] for name in ("epochs", "batch_size")},
        "optimizer": _literal(job["optimizer"]),
        **{name: job[name] for name in ("learning_rate", "validation", "seed")},
        "policy": None if policy is None else _literal(policy),
        "memory_budget": None if budget is None else _literal(f"{budget}B"),
        "priority": job["priority"],
        "options": _literal(json.dumps(job["options"], ensure_ascii=False)),
        **{name: _optional(job.get(name)) for name in ("split_by", "validation_query", "max_time")},
    }
    named = "".join(f",\n    {name} => {value}" for name, value in arguments.items() if value is not None)
    model = _literal(job["model"])
    registration = ""
    if job.get("architecture") is not None:
        architecture = _literal(json.dumps(job["architecture"], ensure_ascii=False))
        registration = f"SELECT register_model({model}, {architecture});\n"
    return f"{registration}SELECT train_model({model},\n    {_literal(job['query'])}{named});"


def _optional(value: object) -> str | None:
    return None if value is None else _literal(str(value))


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
