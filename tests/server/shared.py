"""The worker's cluster, lent to a test module, with a schema and settings of which nothing is left behind."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import psycopg
from psycopg import sql

from tests.conftest import TestCluster, sweep
from tests.server.support import Connection, Wait, value

ROLES = "SELECT rolname FROM pg_roles"
SCHEMAS = "SELECT nspname FROM pg_namespace WHERE nspname !~ '^pg_'"


class SharedServer:
    """The worker's cluster in which `schema` is where names without a schema are looked up and made."""

    def __init__(self, cluster: TestCluster, schema: str) -> None:
        self.cluster = cluster
        self.schema = schema

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cluster, name)

    def dsn(self, database: str = "postgres", user: str = "postgres") -> str:
        return f"{self.cluster.dsn(database, user)} options='-c search_path={self.schema},public'"

    def connect(
        self, database: str = "postgres", user: str = "postgres", *, autocommit: bool = True, **options: Any
    ) -> Connection:
        return psycopg.connect(self.dsn(database, user), autocommit=autocommit, **options)


@contextlib.contextmanager
def lent(cluster: TestCluster, schema: str, settings: Mapping[str, object], wait_until: Wait) -> Iterator[SharedServer]:
    """A context with the cluster that has these settings of pg_tensile, all of which a reload changes.

    At the end, jobs and models are deleted, roles and schemas that are new dropped, and the settings as before."""
    server = SharedServer(cluster, schema)
    with cluster.connect() as conn:
        sweep(conn)
        roles, schemas = names(conn, ROLES), names(conn, SCHEMAS)
        before = {name: value(conn, "SELECT current_setting(%s)", name) for name in settings}
        conn.execute(f"CREATE SCHEMA {schema}; GRANT ALL ON SCHEMA {schema} TO PUBLIC")
        configure(cluster, conn, settings, wait_until)
    try:
        yield server
    finally:
        with cluster.connect() as conn:
            sweep(conn)
            for name in names(conn, SCHEMAS) - schemas:
                conn.execute(sql.SQL("DROP SCHEMA {} CASCADE").format(sql.Identifier(name)))
            for name in names(conn, ROLES) - roles:
                conn.execute(sql.SQL("DROP OWNED BY {0} CASCADE; DROP ROLE {0}").format(sql.Identifier(name)))
            configure(cluster, conn, before, wait_until)
        cluster.close_log()


def names(conn: Connection, query: str) -> set[str]:
    return {name for (name,) in conn.execute(query).fetchall()}


def unload(conn: Connection, wait_until: Wait) -> None:
    """End the predictor, which the next prediction starts anew: without models, and with the settings of now."""
    inference = "SELECT pid FROM pg_stat_activity WHERE backend_type = 'pg_tensile inference'"
    pid = value(conn, inference)
    conn.execute("SELECT pg_terminate_backend(%s)", (pid,))
    wait_until(lambda: pid is None or value(conn, inference) != pid, what="the predictor's supervisor ends")
    wait_until(lambda: not value(conn, "SELECT sum(inference_bytes) FROM tensile.devices"))


def configure(cluster: TestCluster, conn: Connection, settings: Mapping[str, object], wait_until: Wait) -> None:
    """Change settings by a reload and wait until this session has them."""
    if not settings:
        return
    loaded = "SELECT pg_conf_load_time()"
    before = value(conn, loaded)
    cluster.configure(settings)
    cluster.reload()
    wait_until(lambda: value(conn, loaded) > before, what="the settings are read")
