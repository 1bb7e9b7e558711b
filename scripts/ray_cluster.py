"""A Ray cluster for tests and benchmarks, in a network namespace of its own: a head and nodes that are processes here.

Ray listens on all interfaces of its machine, so nothing of it runs outside. The namespace has no link to any other: its
addresses are those of its loopback interface. Processes that are to reach the cluster are started by `command`.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

CLIENT_PORT = 10001
STORE_BYTES = 100_000_000
# In the namespace: raises the loopback interface, gives it the addresses, and waits until standard input is closed.
HOLD = """
import fcntl, socket, struct, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
    for number, address in enumerate(["127.0.0.1", *sys.argv[1:]]):
        name = f"lo:{number}" if number else "lo"
        family = struct.pack("=HH4s8x", socket.AF_INET, 0, socket.inet_aton(address))
        fcntl.ioctl(probe, 0x8916, struct.pack("16s16s8x", name.encode(), family))  # SIOCSIFADDR
        fcntl.ioctl(probe, 0x8914, struct.pack("16sH22x", name.encode(), 0x1 | 0x8 | 0x40))  # SIOCSIFFLAGS
print(flush=True)
sys.stdin.read()
"""


class NoNamespaceError(RuntimeError):
    """Network namespaces cannot be made here."""


class RayCluster:
    """A head and `nodes` more, each with `cpus` CPUs, at 10.77.1.1, 10.77.1.2, … Raises NoNamespaceError."""

    def __init__(self, nodes: int = 0, cpus: int = 2) -> None:
        if os.geteuid() != 0 or shutil.which("unshare") is None:
            raise NoNamespaceError("network namespaces need root")
        self._folder = Path(tempfile.mkdtemp(prefix="ray-"))  # short: it has sockets
        self.token_file = self._folder / "token"
        self.token_file.write_text(secrets.token_hex(32))
        self._folder.chmod(0o755)
        self._cpus = cpus
        addresses = [self.node_address(number) for number in range(nodes + 1)]
        self._holder = subprocess.Popen(
            ["unshare", "-n", sys.executable, "-c", HOLD, *addresses], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._holder.stdout is not None
        if not self._holder.stdout.readline():
            self._holder.communicate()
            raise NoNamespaceError("network namespaces cannot be made")
        try:
            options = ("--head", "--port=6379", f"--ray-client-server-port={CLIENT_PORT}", "--include-dashboard=false")
            self._start(0, *options)
            for number in range(1, nodes + 1):
                self.add_node(number)
        except BaseException:
            self.close()
            raise

    @property
    def address(self) -> str:
        return f"ray://{self.node_address(0)}:{CLIENT_PORT}"

    def node_address(self, number: int) -> str:
        return f"10.77.1.{number + 1}"

    def command(self, *command: str) -> list[str]:
        """Return the command that runs `command` in the cluster's network."""
        return ["nsenter", f"--net=/proc/{self._holder.pid}/ns/net", *command]

    def add_node(self, number: int) -> None:
        self._start(number, f"--address={self.node_address(0)}:6379")

    def _start(self, number: int, *options: str) -> None:
        options += (f"--node-ip-address={self.node_address(number)}", f"--num-cpus={self._cpus}", "--num-gpus=0")
        options += (f"--object-store-memory={STORE_BYTES}", "--disable-usage-stats")
        if number == 0:
            options += (f"--temp-dir={self._folder / 'ray'}",)
        self._ray("start", *options)

    def _ray(self, *arguments: str) -> None:
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(self.token_file)}
        niceness = {"RAY_worker_niceness": "0"}  # 15 by default: whatever else runs would go first
        command = self.command(str(Path(sys.executable).parent / "ray"), *arguments)
        done = subprocess.run(
            command,
            env=os.environ | token | niceness,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def processes(self, *words: str) -> list[int]:
        """Return the IDs of the processes in the cluster's network whose command lines contain all of the words."""
        network = os.stat(f"/proc/{self._holder.pid}/ns/net").st_ino
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                inside = (folder / "ns/net").stat().st_ino == network
                line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if inside and line and all(word in line for word in words):
                found.append(int(folder.name))
        return [number for number in found if number != self._holder.pid]

    def ranks(self) -> list[int]:
        """Return the IDs of the processes that are ranks."""
        return self.processes("ray::RankActor")

    def kill(self, *words: str) -> None:
        for number in self.processes(*words):
            os.kill(number, signal.SIGKILL)

    def close(self) -> None:
        """Kill all that runs in the namespace, and with it the namespace."""
        while left := self.processes():
            for number in left:
                try:
                    os.kill(number, signal.SIGKILL)
                except ProcessLookupError:
                    continue
        self._holder.kill()
        self._holder.communicate()
        shutil.rmtree(self._folder, ignore_errors=True)
