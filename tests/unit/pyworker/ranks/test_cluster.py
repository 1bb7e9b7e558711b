"""What is checked before a job connects to a Ray cluster, and how it is said."""

from __future__ import annotations

import importlib.metadata
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pyworker.child import error_header
from pyworker.children.channel import Stopped
from pyworker.ranks import cluster, rank
from pyworker.ranks.cluster import Access
from pyworker.ranks.errors import RayConnectionError, RayMissingError, RayTokenError, RayVersionError

NOWHERE = Access("ray://127.0.0.1:1", "/dev/null", 0.0)


def installed(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    """Have these packages be installed in these versions, and no others."""

    def version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(cluster.importlib.metadata, "version", version)


@pytest.mark.parametrize(
    ("versions", "error", "sqlstate", "message"),
    [
        ({}, RayMissingError, "0A000", 'the package "ray" is not installed'),
        ({"ray": "2.60.0"}, RayMissingError, "0A000", 'the package "grpcio" is not installed'),
        ({"ray": "2.58.1", "grpcio": "1.74.0"}, RayVersionError, "55000", "Ray 2.58.1 is too old"),
        ({"ray": "1.99", "grpcio": "1.74.0"}, RayVersionError, "55000", "Ray 1.99 is too old"),
        ({"ray": "2.59.0rc1", "grpcio": "1.74.0"}, RayTokenError, "28000", "has no token"),
        ({"ray": "3.0", "grpcio": "1.74.0"}, RayTokenError, "28000", "has no token"),
    ],
)
def test_versions_are_checked_first(
    monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], error: type[Exception], sqlstate: str, message: str
) -> None:
    installed(monkeypatch, **versions)
    with pytest.raises(error, match=message) as raised:
        cluster.connect(NOWHERE, lambda: None)
    header = error_header(raised.value)
    assert header["sqlstate"] == sqlstate and header["hint"]


@pytest.mark.parametrize(
    ("token_file", "message"),
    [("", "ray_token_file is not set"), ("/nowhere", "cannot be read"), ("/dev/null", "has no token")],
)
def test_a_job_needs_a_file_with_a_token(monkeypatch: pytest.MonkeyPatch, token_file: str, message: str) -> None:
    installed(monkeypatch, ray="2.60.0", grpcio="1.74.0")
    with pytest.raises(RayTokenError, match=message) as raised:
        cluster.connect(NOWHERE._replace(token_file=token_file), lambda: None)
    header = error_header(raised.value)
    assert header["sqlstate"] == "28000" and header["hint"]


def test_a_token_that_the_head_refuses_is_told_at_once() -> None:
    import grpc

    class Refusing(grpc.GenericRpcHandler):
        def service(self, details: object) -> object:
            return grpc.unary_unary_rpc_method_handler(
                lambda request, context: context.abort(grpc.StatusCode.UNAUTHENTICATED, "")
            )

    server = grpc.server(ThreadPoolExecutor(1), handlers=[Refusing()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with pytest.raises(RayTokenError, match="does not accept the token") as raised:
            cluster._check_token(NOWHERE._replace(address=f"ray://127.0.0.1:{port}", timeout_s=60.0), "t", lambda: None)
        assert error_header(raised.value)["sqlstate"] == "28000"
    finally:
        server.stop(None)


@pytest.mark.parametrize("text", ["", " \n", "two words", "line\nline", "ключ", "a\x00b"])
def test_a_token_is_one_word(tmp_path: Path, text: str) -> None:
    path = tmp_path / "token"
    path.write_text(text)
    with pytest.raises(RayTokenError, match=r"has no token|cannot be read"):
        cluster._read_token(str(path))
    path.write_text("  a1~\n")
    assert cluster._read_token(str(path)) == "a1~"


def test_a_cluster_that_does_not_answer_is_waited_for_until_the_time_out_or_a_stop() -> None:
    pytest.importorskip("grpc")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and does not listen
        access = NOWHERE._replace(address=f"ray://127.0.0.1:{closed.getsockname()[1]}", timeout_s=0.3)
        signs: list[None] = []
        with pytest.raises(RayConnectionError, match="cannot be reached") as raised:
            cluster._check_token(access, "token", lambda: signs.append(None))
        assert signs and raised.value.detail == "no answer within 0 s"

        def stop() -> None:
            raise Stopped(False)

        with pytest.raises(Stopped):
            cluster._check_token(access._replace(timeout_s=60.0), "token", stop)


@pytest.mark.parametrize(
    ("bundle", "ranks", "free", "text"),
    [
        ({"GPU": 1.0}, 4, 2, "4 GPUs of the Ray cluster, 2 are free"),
        ({"CPU": 3.0}, 2, 1, "6 CPUs of the Ray cluster, 3 are free"),
    ],
)
def test_what_a_job_waits_for_is_said_in_processors(bundle: dict[str, float], ranks: int, free: int, text: str) -> None:
    assert cluster._waiting_for(bundle, ranks, free) == text


def test_a_network_interface_is_found_by_its_address() -> None:
    assert rank._interface("127.0.0.1") in {name for _, name in socket.if_nameindex()}
    assert rank._interface("192.0.2.1") is None  # reserved for documentation (RFC 5737)


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer"), True),
        (RuntimeError("the model is wrong"), False),
        (ValueError("gloo"), False),
    ],
)
def test_the_loss_of_other_ranks_is_known_from_its_error(error: Exception, lost: bool) -> None:
    assert rank._has_lost_others(error) is lost
