"""The Python client: models, jobs and predictions of a server that has the extension, without writing SQL.

    from pg_tensile.client import connect

    with connect("dbname=mydb") as client:
        client.register("late", {"type": "mlp", "hidden": [128, 64]})
        job = client.train("late", "SELECT * FROM departures", "late", epochs=20)
        job.wait()
        job.metrics()["loss"].unstack().plot()

The docstring of each method names the SQL function that it calls; docs/sql.md describes them. Arguments that are None
are left to the function's defaults. Errors are TensileErrors with message, hint and detail: ServerError if the server
has refused the call, ConnectionLost if the connection is closed or broken, ArgumentError if an argument has a wrong
type, DialectError (a ValueError, too) if a query cannot be read in the dialect `read`, TrainingFailed if a job has
failed.
"""

from __future__ import annotations

from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any

from pg_tensile.client.calls import ArgumentError
from pg_tensile.client.connection import Connection, ServerError
from pg_tensile.client.connection import connect as open_connection
from pg_tensile.client.dialects import in_postgres
from pg_tensile.client.frames import JOBS, MODELS, SCHEDULES, frame
from pg_tensile.client.job import Job
from pg_tensile.client.predictions import Json, Predictions
from pg_tensile.client.session import Session
from pg_tensile.client.tuning import Tuning
from pg_tensile.errors import noted

if TYPE_CHECKING:
    import pandas as pd

SETTINGS = (
    *("epochs", "batch_size", "optimizer", "learning_rate", "validation", "seed", "policy", "memory_budget"),
    *("priority", "options", "split_by", "validation_query", "max_time"),
)

JOBS_OF_ROLE = """
    SELECT job, kind, model, owner, state, reason, priority, submitted_at, started_at, ended_at, version, error
    FROM tensile.jobs ORDER BY job
"""
SCHEDULES_OF_ROLE = """
    SELECT model, owner, every::text AS every, rows, source::text AS source, drift, next_run, last_run, last_reason,
           last_job, last_state, decision, last_error
    FROM tensile.schedules ORDER BY model
"""
MODELS_OF_ROLE = """
    SELECT m.model, m.owner, m.architecture->>'type' AS type, m.description,
           (SELECT count(*) FROM tensile.model_versions v WHERE v.model_id = m.model_id) AS versions,
           s.deployed_version, s.task, s.metric, s.value, s.baseline, s.split, s.rows, s.deployed_at, s.job,
           s.next_training, s.schedule, s.drifted_column, s.drift, array_to_string(s.warnings, '; ') AS warnings,
           m.created_at, m.updated_at
    FROM tensile.models m JOIN tensile.model_status s ON s.model = m.model ORDER BY m.model
"""


def connect(conninfo: str = "", **parameters: Any) -> Client:
    """Return a client of the server that `conninfo` and `parameters` name.

    `conninfo` is a connection string or URI, `parameters` are those of libpq (host, port, user, dbname, …). Settings
    that both leave out come from PGSERVICE, PGHOST, PGPORT, PGUSER, PGDATABASE or ~/.pgpass.

    Raises ServerError if no server answers, if it refuses the login, or if the database does not have pg_tensile in
    this version.
    """
    try:
        return Client(open_connection(conninfo, **parameters))
    except ServerError as error:
        raise noted(error) from error.__cause__


class Client(Predictions):
    """A connection to a server with the extension, and a context that closes it. Jobs continue without it.

    Threads may share a client: a lock serialises their statements.
    """

    def __init__(self, connection: Connection) -> None:
        """Take over `connection`, one that pg_tensile.client.connection.connect has opened; the client closes it."""
        super().__init__(Session(connection))

    @property
    def connection(self) -> Connection:
        """The psycopg connection, for SQL of your own: statements commit at once, rows are dicts. To be used by one
        thread at a time."""
        return self._session.connection

    def close(self) -> None:
        self._session.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # -- models -------------------------------------------------------------------------------------------------------

    def register(
        self, name: str, architecture: Json | None = None, description: str | None = None, replace: bool = False
    ) -> None:
        """Register a model, or with `replace` give one of yours another architecture (SQL: register_model).

        Without an architecture the first `train` chooses one."""
        optional = {"architecture": architecture, "description": description, "replace": replace}
        self._session.answer("register_model", {"name": name}, optional)

    def deploy(self, model: str, version: int, reason: str | None = None) -> None:
        """Use `version` for predictions from now on; keep the reason (SQL: deploy_model)."""
        self._session.answer("deploy_model", {"model": model, "version": version}, {"reason": reason})

    def rollback(self, model: str, reason: str | None = None) -> int:
        """Return to the version that was deployed before, and return its number (SQL: rollback_model)."""
        (version,) = self._session.answer("rollback_model", {"model": model}, {"reason": reason})
        return int(version)

    def drop(self, model: str) -> None:
        """Remove a model with its versions, and end its job (SQL: drop_model)."""
        self._session.answer("drop_model", {"name": model})

    def drop_version(self, model: str, version: int) -> None:
        """Remove a version that is not deployed (SQL: drop_model_version)."""
        self._session.answer("drop_model_version", {"model": model, "version": version})

    def keep_versions(self, model: str, count: int | None) -> None:
        """Keep only the newest `count` versions and the deployed one at the end of each job (SQL: set_model_retention).

        0 means all, None as the setting pg_tensile.version_retention says."""
        self._session.answer("set_model_retention", {"model": model, "keep_versions": count})

    def models(self) -> pd.DataFrame:
        """Return the models of tensile.model_status that you may see, with their types and numbers of versions."""
        return frame(MODELS, self._session.rows(MODELS_OF_ROLE))

    # -- training -----------------------------------------------------------------------------------------------------

    def train(
        self,
        model: str,
        query: str,
        target: str,
        *,
        epochs: int | None = None,
        batch_size: int | None = None,
        optimizer: str | None = None,
        learning_rate: float | None = None,
        validation: float | None = None,
        seed: int | None = None,
        policy: str | None = None,
        memory_budget: str | int | None = None,
        priority: int | None = None,
        options: Json | None = None,
        split_by: str | None = None,
        validation_query: str | None = None,
        max_time: timedelta | float | str | None = None,
        read: str | None = None,
    ) -> Job:
        """Submit a job that trains the model on the rows of a query, and return at once (SQL: train_model).

        `memory_budget` is a size such as "2GB", or a number of bytes; `max_time` an interval, or seconds. `read` names
        the dialect of SQL in which the queries are written, such as "snowflake"; None means the server's own."""
        settings = {
            "epochs": epochs,
            "batch_size": batch_size,
            "optimizer": optimizer,
            "learning_rate": learning_rate,
            "validation": validation,
            "seed": seed,
            "policy": policy,
            "memory_budget": memory_budget,
            "priority": priority,
            "options": options,
            "split_by": split_by,
            "validation_query": validation_query,
            "max_time": max_time,
        }
        return Job(self._session, self._submitted("train_model", model, query, target, settings, read)[0])

    def explain(self, model: str, query: str, target: str, *, read: str | None = None, **settings: Any) -> str:
        """Return the cost and the memory plan of `train` with the same arguments, and whether the job would start
        (SQL: explain_training).

        The answer is lines of text, or JSON with `options={"format": "json"}`. Trains nothing. Raises ArgumentError if
        `train` does not have one of the `settings`."""
        self._check_settings("explain", settings)
        return "\n".join(self._submitted("explain_training", model, query, target, settings, read))

    def _submitted(
        self, function: str, model: str, query: str, target: str, settings: dict[str, Any], read: str | None
    ) -> list[Any]:
        if settings.get("validation_query") is not None:
            settings = settings | {"validation_query": in_postgres(settings["validation_query"], read)}
        required = {"model": model, "query": in_postgres(query, read), "target": target}
        return self._session.answer(function, required, settings)

    def tune(
        self,
        model: str,
        query: str,
        target: str,
        space: Json | None = None,
        *,
        trials: int | None = None,
        max_time: timedelta | float | str | None = None,
        metric: str | None = None,
        parallel: int | None = None,
        halving: Json | None = None,
        read: str | None = None,
        **settings: Any,
    ) -> Tuning:
        """Search for the hyperparameters with which `train` trains the best model, and return at once (SQL:
        tune_model).

        `read` and the `settings` are those of `train`, and the same for all trials; the option "max_time" limits
        each of them, `max_time` all together: an interval, or seconds. Raises ArgumentError if `train` does not have
        one of the settings."""
        own = {
            "space": space,
            "trials": trials,
            "max_time": max_time,
            "metric": metric,
            "parallel": parallel,
            "halving": halving,
        }
        self._check_settings("tune", settings)
        return Tuning(self._session, self._submitted("tune_model", model, query, target, own | settings, read)[0])

    def tuning(self, number: int) -> Tuning:
        """Return the tuning of that number. Raises ServerError if it does not exist, or if your role may not see it."""
        return Tuning(self._session, number)

    @staticmethod
    def _check_settings(method: str, settings: dict[str, Any]) -> None:
        for name in settings:
            if name not in SETTINGS:
                hint = f"It takes the arguments of train: {', '.join(SETTINGS)}."
                raise noted(ArgumentError(f'{method} has no argument "{name}"', hint))

    def job(self, number: int) -> Job:
        """Return the job of that number. Raises ServerError if it does not exist, or if your role may not see it."""
        return Job(self._session, number)

    def jobs(self) -> pd.DataFrame:
        """Return the jobs of tensile.jobs that you may see, ended ones included."""
        return frame(JOBS, self._session.rows(JOBS_OF_ROLE))

    def schedule_training(
        self,
        model: str,
        query: str,
        target: str,
        *,
        every: timedelta | float | str | None = None,
        rows: int | None = None,
        source: str | None = None,
        drift: float | None = None,
        read: str | None = None,
        **settings: Any,
    ) -> int:
        """Train the model again and again; return the id of the schedule (SQL: schedule_training).

        A training starts when the time `every` has passed, when the table `source` has that many new `rows`, or when
        predicted rows have drifted by more than `drift`: whichever comes first. `read` and the `settings` are those of
        `train`; raises ArgumentError for others."""
        self._check_settings("schedule_training", settings)
        when = {"every": every, "rows": rows, "source": source, "drift": drift}
        return int(self._submitted("schedule_training", model, query, target, settings | when, read)[0])

    def unschedule_training(self, model: str) -> bool:
        """Remove the model's schedule (SQL: unschedule_training). Return False if it has none."""
        return bool(self._session.answer("unschedule_training", {"model": model})[0])

    def schedules(self) -> pd.DataFrame:
        """Return the schedules of tensile.schedules that you may see."""
        return frame(SCHEDULES, self._session.rows(SCHEDULES_OF_ROLE))

    def calibrate(self, seconds: int | None = None) -> Job:
        """Submit a job that measures the device, so that times are predicted well (SQL: calibrate_device)."""
        return Job(self._session, self._session.answer("calibrate_device", {}, {"seconds": seconds})[0])
