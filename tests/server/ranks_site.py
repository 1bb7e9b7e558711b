"""A server in the network of a Ray cluster, for tests of jobs with ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from scripts.ray_cluster import RayCluster
from tests.server.support import MLP, Connection, Wait, reason, state, steps, submit, value
from tests.unit.ray_cluster import ray_cluster

TRAINS = 120  # seconds within which a job begins to train again, beside others


class Site:
    """A server in the network of a Ray cluster of two nodes with two CPUs each."""

    def __init__(self, ray: RayCluster, server: Any, wait_until: Wait) -> None:
        self.ray = ray
        self.server = server
        self.conn: Connection = server.connect()
        self.wait_until = wait_until
        self._numbers = iter(range(1, 1000))

    def submit(self, ranks: object, architecture: dict[str, Any] = MLP, **arguments: Any) -> int:
        options = {"ranks": ranks, **arguments.pop("options", {})} if ranks else arguments.pop("options", {})
        arguments = {"policy": "joint"} | arguments
        return submit(self.conn, f"m{next(self._numbers)}", architecture, options=options, **arguments)

    def await_steps(self, job: int, more: int = 20) -> None:
        """Wait until the job has trained for `more` steps."""
        before = steps(self.conn, job)
        self.wait_until(lambda: steps(self.conn, job) >= before + more, TRAINS, lambda: self.told(job))

    def told(self, job: int) -> str:
        return f"job {job} is {state(self.conn, job)}: {reason(self.conn, job)}"

    def set_timeout(self, text: str) -> None:
        self.server.configure({"pg_tensile.ray_timeout": text})
        self.server.reload()
        self.wait_until(lambda: value(self.conn, "SHOW pg_tensile.ray_timeout") == text)

    def await_no_ranks(self) -> None:
        self.wait_until(lambda: not self.ray.ranks(), what="the ranks end")


@contextmanager
def making_site(new_cluster: Callable[..., Any], wait_until: Wait, **settings: Any) -> Iterator[Site]:
    with ray_cluster(nodes=1) as ray:
        settings = {
            **settings,
            "pg_tensile.ray_address": ray.address,
            "pg_tensile.ray_token_file": ray.token_file,
            "pg_tensile.checkpoint_interval": 1,
            "pg_tensile.max_retries": 5,
        }
        server = new_cluster(settings, extension=False, start=False)
        server.launcher = ray.command()
        server.start()
        with server.connect() as conn:
            conn.execute("CREATE EXTENSION pg_tensile CASCADE")
        made = Site(ray, server, wait_until)
        yield made
        made.conn.close()
        server.end()
