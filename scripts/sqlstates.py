"""SQLSTATEs of the errors that pg_tensile raises: causes and remedies for docs/sql.md."""

from __future__ import annotations

import re

import psycopg

# SQLSTATE: cause, remedy
ERRORS = {
    "08000": ("The predictor cannot be reached.", "The message ends with the operating system's reason."),
    "08006": (
        "The predictor, or a job's trainer, ended during a request, or a job has lost the Ray cluster or one of its"
        " ranks.",
        "Try again: it is restarted, and such a job is tried again. The server's log says why it ended.",
    ),
    "08P01": (
        "Two processes of pg_tensile do not understand each other.",
        "Run `make install` and restart the server, so that both have the same version.",
    ),
    "0A000": (
        "A type of a column, a temporary table, `PREPARE TRANSACTION` or a model that cannot be captured as a graph is"
        " not supported; Ray is not installed for a job with ranks; a model file is of a newer format; or a model"
        " cannot be written as an ONNX graph.",
        "Cast or leave out the column; use an ordinary table; train the model with `policy => 'none'` and predict"
        " without `memory_budget`; leave out the option `ranks`, or install Ray; update pg_tensile;"
        " export in the format `tensile`.",
    ),
    "21000": (
        "Rows of the query of `materialize_predictions` have the same key.",
        "Add columns to the key until it identifies a row.",
    ),
    "22000": (
        "The rows cannot be used: no rows, too few for a batch, only one class, or arrays of different lengths.",
        "Change the query as the hint says.",
    ),
    "22003": (
        "The loss or a weight became infinite or not a number.",
        "Lower `learning_rate`, set the option `clip`, or look for extreme values in the data.",
    ),
    "22004": ("An argument is null that must not be null.", "Pass a value, or leave the argument out."),
    "22021": (
        "A text in a database with the encoding SQL_ASCII is not in UTF-8.",
        "Convert the texts, or leave the column out.",
    ),
    "22023": (
        "An argument, an option or a key is unknown or out of range, or an architecture does not fit the columns.",
        "The hint has the range, the known names, or the nearest one.",
    ),
    "2202E": (
        "`predict` got an array with more or fewer elements than the model has features.",
        "The hint has the features in their order.",
    ),
    "22P02": (
        "A row that was given to a function as text or `json` is not a JSON object.",
        "Pass an object with a key for each feature, or cast an array of numbers to `float8[]`.",
    ),
    "22P03": (
        "`import_model` got something that is not a model file, a damaged one, or one whose model cannot be trained.",
        "Transfer the file again, in binary, or export the model again.",
    ),
    "40001": (
        "Another version of the model was deployed while `materialize_predictions` predicted with the one before.",
        "Call it again.",
    ),
    "25006": (
        "The query changes something: a CTE that writes, `FOR UPDATE`, or a function that writes.",
        "Use a query that only reads.",
    ),
    "28000": (
        "The Ray cluster of a job with ranks does not accept the token, or none is set.",
        "Set `pg_tensile.ray_token_file` to a file with the token of the cluster's head.",
    ),
    "38000": (
        "Code of the model, or of a library, raised an error without an SQLSTATE of its own.",
        "The traceback is in the job's row, or in the error's detail.",
    ),
    "3D000": (
        "The database in `pg_tensile.database` does not exist (in the server's log only).",
        "Create it, or change the setting and reload.",
    ),
    "42501": (
        "The role has no privilege on the model, the job, the tables of the query or code in a model file, or may not"
        " log in.",
        "The hint says which role can grant it.",
    ),
    "42601": ("The query is empty, is not a single SELECT, or has a syntax error.", "Use one SELECT."),
    "42701": (
        "The query returns two columns of the same name, or a key has the name of a column for predictions.",
        "Give each column its own name with `AS`.",
    ),
    "42702": (
        "A row to predict for has two columns with the name of a feature.",
        "Give each column its own name with `AS`.",
    ),
    "42703": (
        "The target, or the argument `by`, is not a column of the query, or a feature is missing in the row to predict"
        " for.",
        "The hint has the nearest name, or all names.",
    ),
    "42704": (
        "The model, version, job or role does not exist, or was dropped while the job waited.",
        "`tensile.models` and `tensile.jobs` list what the role may see.",
    ),
    "42710": (
        "A model of that name, or a schedule of the model, exists already.",
        "Choose another name, or use `replace => true`; remove the schedule first.",
    ),
    "42804": (
        "The type of a value does not fit the feature, or the function does not fit the task.",
        "Cast the value; use `predict` for numbers and `predict_class` for classes.",
    ),
    "42809": (
        "`embed` got a model that is not a pretrained transformer.",
        "Register one with the architecture `pretrained`.",
    ),
    "42P01": (
        "The table `source` of `predict_rows` was dropped meanwhile.",
        "Name another one.",
    ),
    "53000": (
        "No background worker is free for the predictor, no job slot for `explain_training`, `evaluate_model`,"
        " `feature_importance`, `import_model` or `export_model`, or a session has too many open files.",
        "Raise `max_worker_processes`, `pg_tensile.max_jobs` or `max_files_per_process`, or try again later.",
    ),
    "53100": (
        "The disk has no space for training data that exceeds `pg_tensile.dataset_cache`.",
        "Free space in the data directory, raise the setting, or select less.",
    ),
    "53200": (
        "A job, or a model used to predict, needs more device memory than is allowed or available, or its process more"
        " host memory than `pg_tensile.child_memory`.",
        "Use the batch size of the hint or a larger `memory_budget`, or raise `pg_tensile.device_memory` or"
        " `pg_tensile.child_memory`.",
    ),
    "54000": (
        "A text column has more than a million distinct values, a row or a model to export exceeds 1 GB, a plan has too"
        " many events, or a job's checkpoint or weights are larger than `pg_tensile.max_state_size`.",
        "Leave the column out or group its values; copy the database with pg_dump; raise `pg_tensile.plan_events` or"
        " `pg_tensile.max_state_size`.",
    ),
    "55000": (
        "A prerequisite is missing: the library is not preloaded, the database is another one or a standby, versions"
        " differ, also on a Ray cluster, there is no device, no Ray cluster, or no version to predict with or to return"
        " to, or the job to wait for is not committed.",
        "The hint says what to do first.",
    ),
    "55006": (
        "The model is being trained, the device is being calibrated, or the version is deployed.",
        "Wait with `wait_for_job`, stop the job with `cancel_job`, or deploy another version.",
    ),
    "57014": (
        "`wait_for_job` or a prediction took longer than allowed, or the query was canceled.",
        "Wait longer, or raise `pg_tensile.predict_timeout`; the job continues in any case.",
    ),
    "58000": (
        "The trainer died, hung or lost its device more often than `pg_tensile.max_retries` allows.",
        "See the traceback in the job's row and the server's log, or the kernel's log if it was killed.",
    ),
    "58P01": (
        "`pg_tensile.python` cannot be started, or has no PyTorch.",
        "Set it to an interpreter that the server's operating-system user can run, and reload.",
    ),
    "XX000": ("An internal error of pg_tensile.", "Report it, with the traceback in the job's row."),
    "XX001": (
        "Stored weights or a checkpoint are damaged, or do not fit the model.",
        "Train the model again; if the error recurs, check disk and memory.",
    ),
}


def condition(code: str) -> str:
    """Return the SQLSTATE's name in PL/pgSQL: "invalid_parameter_value"."""
    name = psycopg.errors.lookup(code).__name__
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).rstrip("_").lower()
