"""The DataFrames that the client returns: columns, types and index of each, which do not depend on the rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from pg_tensile.extras import needing

if TYPE_CHECKING:
    import pandas as pd

INTEGER, OPTIONAL, REAL, TEXT, TIME = "int64", "Int64", "float64", "string", "datetime64[us, UTC]"


class Shape(NamedTuple):
    """Shape of a DataFrame: the columns that form its index, and the type of every column, index included."""

    key: tuple[str, ...]
    columns: dict[str, str]


METRICS = Shape(
    ("epoch", "split"),
    {"epoch": INTEGER, "split": TEXT, "samples": OPTIONAL}
    | dict.fromkeys(("loss", "accuracy", "f1", "rmse", "r2", "seconds"), REAL)
    | {"at": TIME}
    | dict.fromkeys(("roc_auc", "log_loss", "mae"), REAL),
)
PLAN = Shape(
    ("sequence",),
    {"sequence": INTEGER, "generation": INTEGER, "event": TEXT, "tensor": INTEGER, "tensor_name": TEXT}
    | {"tensor_kind": TEXT, "bytes": INTEGER, "trigger_operator": INTEGER, "trigger_name": TEXT}
    | {"delay_us": INTEGER, "deadline_operator": INTEGER, "version": INTEGER, "codec": TEXT},
)
LATENCY = Shape(
    ("operator",),
    {"operator": INTEGER, "phase": TEXT, "target": TEXT, "predicted_us": REAL, "measured_us": REAL}
    | {"average_us": REAL, "samples": OPTIONAL, "relative_error": REAL},
)
FOOTPRINT = Shape(
    ("sequence",),
    {"sequence": INTEGER, "operator": INTEGER, "target": TEXT, "planned_bytes": INTEGER, "vanilla_bytes": INTEGER},
)
RANKS = Shape(
    ("rank",),
    {"rank": INTEGER, "node": TEXT, "device": TEXT, "state": TEXT, "step": OPTIONAL, "samples_per_s": REAL}
    | {"device_bytes": OPTIONAL},
)
PREDICTIONS = Shape(("row_number",), {"row_number": INTEGER, "prediction": REAL, "label": TEXT, "probability": REAL})
PROBABILITIES = Shape(("label",), {"label": TEXT, "probability": REAL})
EVALUATION = Shape(
    ("metric",),
    {"metric": TEXT, "group_value": TEXT, "label": TEXT, "predicted": TEXT, "quantile": REAL, "value": REAL}
    | {"baseline": REAL},
)
IMPORTANCE = Shape(("feature",), {"feature": TEXT, "importance": REAL, "deviation": REAL, "metric_used": TEXT})
JOBS = Shape(
    ("job",),
    {"job": INTEGER, "kind": TEXT, "model": TEXT, "owner": TEXT, "state": TEXT, "reason": TEXT, "priority": INTEGER}
    | {"submitted_at": TIME, "started_at": TIME, "ended_at": TIME, "version": OPTIONAL, "error": TEXT},
)
SCHEDULES = Shape(
    ("model",),
    {"model": TEXT, "owner": TEXT, "every": TEXT, "rows": OPTIONAL, "source": TEXT, "drift": REAL, "next_run": TIME}
    | {"last_run": TIME, "last_reason": TEXT, "last_job": OPTIONAL, "last_state": TEXT, "decision": TEXT}
    | {"last_error": TEXT},
)
DRIFT = Shape(
    ("model", "version", "column_name"),
    {"model": TEXT, "version": INTEGER, "column_name": TEXT, "kind": TEXT, "rows": INTEGER, "since": TIME, "psi": REAL}
    | {"ks": REAL, "threshold": REAL, "drifted": "boolean"},
)
EVALUATIONS = Shape(
    ("at", "metric"),
    {"at": TIME, "metric": TEXT, "model": TEXT, "version": INTEGER, "rows": INTEGER, "value": REAL, "baseline": REAL},
)
TRIALS = Shape(
    ("trial",),
    {"trial": INTEGER, "state": TEXT, "value": REAL, "params": "object", "job": OPTIONAL, "epochs": OPTIONAL}
    | {"least_bytes": OPTIONAL, "version": OPTIONAL, "started_at": TIME, "ended_at": TIME, "error": TEXT},
)
MODELS = Shape(
    ("model",),
    {"model": TEXT, "owner": TEXT, "type": TEXT, "description": TEXT, "versions": INTEGER}
    | {"deployed_version": OPTIONAL, "task": TEXT, "metric": TEXT, "value": REAL, "baseline": REAL, "split": TEXT}
    | {"rows": OPTIONAL}
    | {"deployed_at": TIME, "job": OPTIONAL, "next_training": TIME, "schedule": TEXT, "drifted_column": TEXT}
    | {"drift": REAL, "warnings": TEXT, "created_at": TIME, "updated_at": TIME},
)


def frame(shape: Shape, rows: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """Return the rows as a DataFrame of that shape.

    Columns that the shape does not name are left out; None becomes NaN, NaT or <NA>. Raises MissingPackageError if
    pandas is not installed."""
    with needing("frames", "methods that return a DataFrame need"):
        import pandas as pd
    kept = list(rows)
    frame = pd.DataFrame(
        {name: pd.Series([row[name] for row in kept], dtype=kind) for name, kind in shape.columns.items()}
    )
    return frame.set_index(list(shape.key))
