"""Access to a server with the extension from outside: the Python client (training.py), and the modules that the
commands `pg-tensile top`, `report` and `trace` are built on (connection.py, record.py).

Names are imported on first use, so that importing this package needs no psycopg: `pg-tensile bench` works without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pg_tensile.client.calls import ArgumentError
    from pg_tensile.client.connection import ServerError
    from pg_tensile.client.job import Job, JobTimeout, JobWarning, Report, TrainingFailed
    from pg_tensile.client.session import ConnectionLost
    from pg_tensile.client.training import Client, connect
    from pg_tensile.client.tuning import Tuning, TuningFailed
    from pg_tensile.extras import MissingPackageError

__all__ = [
    "ArgumentError",
    "Client",
    "ConnectionLost",
    "Job",
    "JobTimeout",
    "JobWarning",
    "MissingPackageError",
    "Report",
    "ServerError",
    "TrainingFailed",
    "Tuning",
    "TuningFailed",
    "connect",
]
HOMES = {
    "client.calls": ("ArgumentError",),
    "client.connection": ("ServerError",),
    "client.job": ("Job", "JobTimeout", "JobWarning", "Report", "TrainingFailed"),
    "client.session": ("ConnectionLost",),
    "client.training": ("Client", "connect"),
    "client.tuning": ("Tuning", "TuningFailed"),
    "extras": ("MissingPackageError",),
}


def __getattr__(name: str) -> Any:
    for module, names in HOMES.items():
        if name in names:
            return getattr(import_module(f"pg_tensile.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
