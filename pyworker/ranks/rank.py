"""A rank of a job: an actor on a node of the Ray cluster, which trains as a job's process on the server's machine does.

It trains as a trainer does, with frames of the driver in place of a supervisor's, and with the rows and the spec that
the driver has stored in the cluster. torch.distributed connects it to the other ranks.

Ray calls the methods in threads of the actor, and training has one of its own.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import threading
import traceback
from typing import TYPE_CHECKING, Any, NamedTuple

from pyworker.child import error_header
from pyworker.children.channel import Stopped
from pyworker.children.prepared import Begun
from pyworker.ranks.frame_queue import FrameQueue, Sent
from pyworker.wire import FrameType

if TYPE_CHECKING:
    from torch.distributed import TCPStore

ADDRESS_OF_INTERFACE = 0x8915  # SIOCGIFADDR (netdevice(7))
OF_OTHERS = (FrameType.PROGRESS, FrameType.DONE, FrameType.ERROR)  # that ranks but the first send


class Group(NamedTuple):
    """The ranks of a job: their number, where rank 0 waits for the others, and the limit of collectives in seconds."""

    size: int
    host: str
    port: int
    timeout_s: float


class RankActor:
    """One rank. The driver calls `node`, `load`, `open` of rank 0, `start`, then `frames` and `deliver` to the end."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._frames = FrameQueue(tuple(FrameType) if rank == 0 else OF_OTHERS)
        self._store: TCPStore | None = None

    def node(self) -> str:
        """Return the address of the machine."""
        import ray

        return str(ray.util.get_node_ip_address())

    def load(self) -> None:
        """Import the libraries, which takes seconds, and on a busy machine longer than the ranks may wait."""
        from pyworker.children.libraries import import_libraries

        import_libraries()
        import pyworker.ranks.rank_training  # noqa: F401

    def open(self, ranks: int) -> tuple[str, int]:
        """Begin to wait for the other ranks; return host and port."""
        host = self.node()
        if ranks > 1:
            from torch.distributed import TCPStore

            self._store = TCPStore(host, 0, ranks, is_master=True, wait_for_workers=False)
        return host, 0 if self._store is None else self._store.port

    def start(self, group: Group, begun: Begun) -> None:
        """Begin to train, in a thread."""
        threading.Thread(target=self._run, args=(group, begun), daemon=True).start()

    def frames(self, seconds: float) -> list[Sent]:
        """Return what the rank has sent, waiting `seconds` for it."""
        return self._frames.take(seconds)

    def deliver(self, sent: Sent) -> None:
        """Pass a frame to the rank."""
        self._frames.deliver(sent)

    # ---- the thread that trains ----

    def _run(self, group: Group, begun: Begun) -> None:
        try:
            self._frames.send(FrameType.PROGRESS, header={"phase": "building", "device": _device_label()})
            if group.size > 1:
                self._join(group, begun.spec["device"])
            from pyworker.ranks.rank_training import RankTraining

            RankTraining(self._frames, begun, self._rank, group.size).train()
        except Stopped:
            self._frames.send(FrameType.DONE, header={"stopped": True})
        except BaseException as error:  # also SystemExit, of a model's code: the driver must learn of it
            traceback.print_exc()
            self._frames.send(FrameType.ERROR, header=error_header(error) | {"lost": _has_lost_others(error)})

    def _join(self, group: Group, device: str) -> None:
        """Join the process group, over the network interface with this node's address."""
        interface = _interface(self.node())
        if interface is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = interface
        from datetime import timedelta

        import torch.distributed as dist

        limit = timedelta(seconds=group.timeout_s)
        store = self._store or dist.TCPStore(group.host, group.port, group.size, timeout=limit)
        store.set_timeout(limit)
        backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, store=store, rank=self._rank, world_size=group.size, timeout=limit)


def _device_label() -> str:
    import ray

    gpus = ray.get_gpu_ids()
    return f"cuda:{gpus[0]}" if gpus else "cpu"


def _interface(address: str) -> str | None:
    """Return the name of this machine's network interface with the address, or None."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe, ADDRESS_OF_INTERFACE, request)
            except OSError:
                continue  # it has no IPv4 address
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


def _has_lost_others(error: BaseException) -> bool:
    """Return whether a collective has failed, because another rank is gone or late, or the network is cut."""
    import torch.distributed as dist

    known: Any = (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)
    return isinstance(error, known) or (isinstance(error, RuntimeError) and "gloo" in str(error).lower())
