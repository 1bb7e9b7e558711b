"""The Ray cluster of ranks: the connection of a job's process to it, and processors reserved for the ranks.

The process connects out, by `ray://`, to the cluster's head, and nothing of the cluster runs on its machine. Ray's
client takes half a minute to give up, and does not say why; so address and token are checked first.

`alive` arguments are called repeatedly while something takes long; what they raise ends it.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

import pg_tensile
import pyworker
from pg_tensile.execution.data.pretrained_folder import MODEL_PATH_VARIABLE
from pg_tensile.extras import pip_install
from pyworker.ranks.errors import RayConnectionError, RayMissingError, RayTokenError, RayVersionError

NOT_SHIPPED = ["*.o", "*.so", "*.bc", "csrc"]
OLDEST = (2, 59)  # of Ray: with authentication by token, and the holes of earlier versions closed
GRACE_S = 3  # after which the cluster ends the ranks of a process that is gone
ANSWER_S = 2.0  # for an answer of the head that says whether it accepts a token
PAUSE_S = 0.2

Alive = Callable[[], object]


class Access(NamedTuple):
    """How to reach a cluster: settings of the server, and the limit of the wait for it in seconds."""

    address: str
    token_file: str
    timeout_s: float

    @property
    def target(self) -> str:
        """Host and port."""
        return self.address.removeprefix("ray://")


class Placed(NamedTuple):
    """Actors on reserved processors: Ray's placement group, with one bundle for each actor."""

    group: Any
    actors: list[Any]


def connect(access: Access, alive: Alive, starts_ranks: bool = True) -> list[str]:
    """Connect this process to the cluster, and return warnings about it. Ranks take their code from this process.

    Raises RayMissingError, RayTokenError, RayVersionError and RayConnectionError."""
    _check_version()
    token = _read_token(access.token_file)
    os.environ.update(
        RAY_AUTH_MODE="token",
        RAY_AUTH_TOKEN_PATH=access.token_file,
        RAY_CLIENT_RECONNECT_GRACE_PERIOD=str(GRACE_S),
        RAY_USAGE_STATS_ENABLED="0",
    )
    _check_token(access, token, alive)
    import ray

    def begin() -> None:
        shipped = [module.__path__[0] for module in (pg_tensile, pyworker)]
        folders = {MODEL_PATH_VARIABLE: os.environ.get(MODEL_PATH_VARIABLE, "")}  # are there on all nodes, too
        environment = {"py_modules": shipped, "excludes": NOT_SHIPPED, "env_vars": folders} if starts_ranks else None
        ray.init(access.address, runtime_env=environment, log_to_driver=False)

    try:
        _in_background(begin, access.timeout_s, alive)
    except RuntimeError as error:
        if "ersion" not in str(error):
            raise
        message = f"the Ray cluster at {access.target} has other versions than this server"
        hint = "Install the same versions of Ray and Python on the server and on all nodes."
        raise RayVersionError(message, hint, str(error)) from error
    except (ConnectionError, TimeoutError) as error:
        raise _unreachable(access, str(error)) from error
    return [] if _answer(access, None) == "refused" else ["the Ray cluster accepts clients without a token"]


def disconnect() -> None:
    """Disconnect; what still runs there for this process is ended by the cluster."""
    import ray

    ray.shutdown()


def _check_version() -> None:
    try:
        found = importlib.metadata.version("ray")
        importlib.metadata.version("grpcio")
    except importlib.metadata.PackageNotFoundError as error:
        hint = f"Run {pip_install('ray')} for the Python of pg_tensile.python, or leave out the option ranks."
        raise RayMissingError(
            f'the package "{error.name}" is not installed, which jobs with ranks need', hint
        ) from None
    numbers = tuple(int(number) for number in re.findall(r"\d+", found)[:2])
    if numbers < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise RayVersionError(f"Ray {found} is too old", f"Install version {oldest} or later on all machines.")


def _read_token(path: str) -> str:
    hint = "Set pg_tensile.ray_token_file to a file with the cluster's token that the server's user can read."
    if not path:
        raise RayTokenError("there is no token for the Ray cluster: pg_tensile.ray_token_file is not set", hint)
    try:
        token = Path(path).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise RayTokenError(f'the token file "{path}" cannot be read', hint, str(error)) from None
    if not re.fullmatch(r"[!-~]+", token):
        raise RayTokenError(f'the token file "{path}" has no token', hint)
    return token


def _check_token(access: Access, token: str, alive: Alive) -> None:
    """Wait until the head answers, and raise RayTokenError if it does not accept the token."""
    deadline = time.monotonic() + access.timeout_s
    while (answer := _answer(access, token)) != "accepted":
        if answer == "refused":
            hint = "Copy the token of the cluster's head into the file that pg_tensile.ray_token_file names."
            raise RayTokenError(f"the Ray cluster at {access.target} does not accept the token", hint)
        alive()
        if time.monotonic() > deadline:
            raise _unreachable(access, f"no answer within {access.timeout_s:.0f} s")
        time.sleep(PAUSE_S)


def _answer(access: Access, token: str | None) -> str:
    """Return whether the head has "accepted" or "refused" a request with the token, or is "silent"."""
    import grpc

    metadata = () if token is None else (("authorization", f"Bearer {token}"),)
    with grpc.insecure_channel(access.target) as channel:
        try:  # what is asked does not matter: the token is checked first
            channel.unary_unary("/ray.rpc.RayletDriver/ClusterInfo")(b"", metadata=metadata, timeout=ANSWER_S)
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.UNAUTHENTICATED:
                return "refused"
            if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                return "silent"
    return "accepted"


def _unreachable(access: Access, detail: str) -> RayConnectionError:
    hint = "Check pg_tensile.ray_address, that the cluster runs, and the firewall between the machines."
    return RayConnectionError(f"the Ray cluster at {access.target} cannot be reached", hint, detail)


def _in_background(work: Callable[[], None], seconds: float, alive: Alive) -> None:
    """Do the work in a thread, calling `alive` meanwhile. Raises TimeoutError, and what the work raises."""
    thread = ThreadPoolExecutor(1)
    try:
        future = thread.submit(work)
        deadline = time.monotonic() + seconds
        while not wait([future], timeout=PAUSE_S).done:
            alive()
            if time.monotonic() > deadline:
                raise TimeoutError(f"no connection within {seconds:.0f} s")
        future.result()
    finally:
        thread.shutdown(wait=False)


# ---- processors ------------------------------------------------------------------------------------------------------


def bundle_of(device: str, threads: int) -> dict[str, float]:
    """Return what a rank takes of the cluster: a GPU, or CPUs for its threads. `device`: setting pg_tensile.device."""
    import ray

    kind = device.partition(":")[0]
    if kind == "auto":
        kind = "cuda" if ray.cluster_resources().get("GPU", 0) >= 1 else "cpu"
    return {"CPU": threads} if kind == "cpu" else {"GPU": 1}


def prospect(bundle: Mapping[str, float], least: int, most: int) -> dict[str, Any]:
    """Return how many ranks a job would have now, as fields of an explanation's `ranks` (planning/explain/request.py).

    Those are as many as there is room for, up to `most`; with room for fewer than `least` it would wait for `most`."""
    ((kind, amount),) = bundle.items()
    free = _free(bundle)
    count = min(free, most) if free >= least else most
    nodes = {node["NodeManagerAddress"]: node["Resources"].get(kind, 0) for node in _living_nodes()}
    return {
        "count": count,
        "least": least,
        "most": most,
        "takes": {kind: amount},
        "nodes": [{"node": node, kind: total} for node, total in sorted(nodes.items()) if total >= amount],
        "waits_for": _waiting_for(bundle, most, free) if free < most else None,
    }


def place(
    start: Callable[[Any, int], Any],
    bundle: Mapping[str, float],
    least: int,
    most: int,
    patience_s: float,
    waits: Callable[[str], object],
) -> Placed:
    """Reserve bundles and start the ranks on them: `most`, or after `patience_s` seconds at least `least`.

    `start` makes the actor of a rank in the placement group, and `waits` is called repeatedly with what it waits for.
    Ray's own way to wait for a placement group starts a process for that, which takes longer than the ranks' start."""
    from ray.util import placement_group, remove_placement_group

    deadline = time.monotonic() + patience_s
    wanted = most
    while True:
        group = placement_group([dict(bundle)] * wanted)
        placed = Placed(group, [start(group, rank) for rank in range(wanted)])
        ready = placed.actors[0].node.remote().future()
        while wait([ready], timeout=1).not_done:
            free = _free(bundle)
            waits(_waiting_for(bundle, wanted, free))
            possible = min(free, most)
            if time.monotonic() > deadline and possible >= least and possible != wanted and not _is_reserved(group):
                remove_placement_group(group)
                wanted = possible
                break
        else:
            return placed


def release(placed: Placed) -> None:
    """Give the processors back; processes on them are killed."""
    from ray.util import remove_placement_group

    remove_placement_group(placed.group)


def _is_reserved(group: Any) -> bool:
    from ray.util import placement_group_table

    return bool(placement_group_table(group)["state"] == "CREATED")


def _free(bundle: Mapping[str, float]) -> int:
    """Return the number of bundles for which there is room now, on any nodes."""
    import ray

    ((kind, amount),) = bundle.items()
    alive = sum(node["Resources"].get(kind, 0) for node in _living_nodes())
    return int(min(ray.available_resources().get(kind, 0), alive) // amount)


def _living_nodes() -> list[dict[str, Any]]:
    import ray

    return [node for node in ray.nodes() if node["Alive"]]


def _waiting_for(bundle: Mapping[str, float], ranks: int, free: int) -> str:
    ((kind, amount),) = bundle.items()
    are = "is" if free * amount == 1 else "are"
    return f"{ranks * amount:g} {kind}s of the Ray cluster, {free * amount:g} {are} free"
