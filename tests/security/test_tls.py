"""Connections that are encrypted: what passes, who is let in, and what happens to what was changed on its way."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import shutil
import signal
import socket
import ssl
import struct
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from security.test_certificates import certs
from security.test_wire_tampering import LINK, PROGRAM
from support.active_proxy import MEANS, VIA_PROXY, Tampering, active_proxy
from support.fault_tools import Nursery
from support.loops import loop
from support.worlds import free_port, on_threads

import oneaccord as oa
from oneaccord.cli.certs import made, new_authority
from oneaccord.config.resolve import Resolved
from oneaccord.contract.deadline import Deadline
from oneaccord.contract.seal import Seal
from oneaccord.net import tls as tls_
from oneaccord.net.credentials import Credentials
from oneaccord.net.handshake import CLIENT_BYTES, GREETING_BYTES, KNOCK_BYTES, REPLY_BYTES
from oneaccord.net.loop import Loop
from oneaccord.net.network import Listener, bind, dial
from oneaccord.net.proven import ProvenSocket
from oneaccord.net.tls import Tls, TlsHandshake

__all__ = ["loop"]

MARKER = b"a text that nobody else shall read"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with certificates of one authority, and of another one."""
    folder = tmp_path_factory.mktemp("tls")
    assert certs(folder / "job") == 0
    assert certs(folder / "hosts", "node1", "10.0.0.2") == 0
    return folder


def meeting(folders: Sequence[Path | None], timeout_s: float = 30.0, backend: str = "tcp", **more: Any) -> list[object]:
    """Let ranks with these certificates meet; return what each got or raised."""
    port = free_port()

    def body(rank: int) -> object:
        config = {
            "backend": backend,
            "rendezvous": {"address": f"127.0.0.1:{port}"},
            "security": {} if folders[rank] is None else {"tls": str(folders[rank])},
            **more,
        }
        with oa.init(config=config, rank=rank, world_size=len(folders), timeout_s=timeout_s) as group:
            for n in (0, 1, 5_000, 300_000):
                mine = np.arange(n) + 1.0 * group.rank
                assert np.array_equal(group.all_reduce(mine), np.arange(n) * 3 + 3.0)
                assert np.array_equal(group.sendrecv(mine, (rank + 1) % 3, (rank - 1) % 3), mine + ((rank - 1) % 3 - rank))
                assert np.array_equal(group.reduce_scatter(np.tile(mine, 3)), np.arange(n) * 3 + 3.0)
            with group.split(0) as part:
                return part.all_gather_object(rank)

    return on_threads(body, len(folders))


@pytest.mark.parametrize("streams", [1, 3])
def test_calls_give_the_same_over_encrypted_connections(folder: Path, streams: int) -> None:
    folders = [folder / "hosts" / "node1", folder / "hosts" / "10.0.0.2", folder / "hosts" / "node1"]
    assert meeting(folders, backends={"tcp": {"streams": streams}}) == [[0, 1, 2]] * 3


def test_seals_go_within_tls(folder: Path) -> None:
    security = {"tls": str(folder / "job"), "checksum": True}
    assert meeting([folder / "job"] * 3, security=security) == [[0, 1, 2]] * 3


def test_backends_within_a_host_need_not_encrypt(folder: Path) -> None:
    assert meeting([folder / "job"] * 3, backend="shm") == [[0, 1, 2]] * 3
    routes = {"intra": "shm", "inter": "tcp"}
    assert meeting([folder / "job"] * 3, backend="hybrid", backends={"hybrid": {"routes": routes}}) == [[0, 1, 2]] * 3


def test_a_backend_that_cannot_encrypt_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runnable = Resolved.runnable
    monkeypatch.setattr(Resolved, "runnable", lambda *given: dataclasses.replace(runnable(*given), tls=False))
    for error in meeting([folder / "job"] * 3):
        assert isinstance(error, oa.ConfigError)
        assert "the backend 'tcp' cannot encrypt its messages" in str(error)


READ = """
def work():
    with oa.init(timeout_s=30) as group:
        group.broadcast(np.frombuffer(MARKER, np.uint8) if rank == 0 else np.zeros(len(MARKER), np.uint8), 0)
        group.all_gather_object(MARKER)
attempt(work)
"""


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_who_listens_reads_nothing(nursery: Nursery, folder: Path, is_encrypted: bool) -> None:
    tls = {"ONEACCORD_SECURITY__TLS": str(folder / "job")} if is_encrypted else {}
    program = VIA_PROXY + f"MARKER = {MARKER!r}\n" + READ
    with active_proxy(Tampering(b"nothing", "up", 0, "flip")) as proxy:
        with nursery.ranks(program, 2, PROXY=str(proxy.port), **tls) as ranks:
            assert ranks.start().raised() == {}, ranks.output()
        assert (MARKER in proxy.passed()) is not is_encrypted


def tampered(nursery: Nursery, folder: Path, tampering: Tampering, within_s: str = "30") -> dict[int, str]:
    """Return what each rank was told; no result was wrong, and each error is a typed one."""
    tls = str(folder / "job")
    with (
        active_proxy(tampering) as proxy,
        nursery.ranks(PROGRAM, 2, PROXY=str(proxy.port), WITHIN_S=within_s, ONEACCORD_SECURITY__TLS=tls) as ranks,
    ):
        raised = ranks.start().raised()
        assert [fact["typed"] for fact in ranks.await_facts("ended")] == [True, True], (tampering, raised, ranks.output())
        assert [fact for fact in ranks.facts if fact["what"] == "wrong"] == [], tampering
        return {rank: f"{fact['type']}: {fact['text']}" for rank, fact in raised.items()}


@pytest.mark.parametrize(
    ("kind", "direction", "place"), [(LINK, "up", 200_000), (LINK, "down", 3_000), (b"control", "up", 1_700)]
)
def test_a_changed_byte_ends_the_job_on_both_ranks(
    nursery: Nursery, folder: Path, kind: bytes, direction: str, place: int
) -> None:
    told = tampered(nursery, folder, Tampering(kind, direction, place, "flip"))
    assert len(told) == 2
    for words in told.values():
        assert words.startswith("ProtocolError")
        assert "the connection was tampered with" in words


@pytest.mark.long
@pytest.mark.parametrize("direction", ["up", "down"])
@pytest.mark.parametrize("means", MEANS)
def test_whatever_is_done_each_result_is_right_and_each_error_typed(
    nursery: Nursery, folder: Path, means: str, direction: str
) -> None:
    for kind, place in [(LINK, 700), (LINK, 30_000), (b"control", 100), (b"control", 2_000), (b"reserve", 300)]:
        tampered(nursery, folder, Tampering(kind, direction, place, means, count=16), "4")


def test_a_certificate_of_another_authority_is_refused(folder: Path) -> None:
    zeroth, first = meeting([folder / "job", folder / "hosts" / "node1"], timeout_s=3)
    assert isinstance(zeroth, oa.DeadlineError)
    assert "from 127.0.0.1 with TLS that failed (the other end does not trust this rank's certificate" in str(zeroth)
    assert isinstance(first, oa.AuthenticationError)
    assert "give all ranks certificates of one authority" in str(first)


@pytest.mark.parametrize("which", [0, 1])
def test_ranks_of_which_one_does_not_encrypt_do_not_meet(folder: Path, which: int) -> None:
    folders = [folder / "job", None] if which else [None, folder / "job"]
    zeroth, first = meeting(folders, timeout_s=3)
    assert isinstance(zeroth, oa.DeadlineError)
    assert f"from 127.0.0.1 with{'out' if which else ''} TLS" in str(zeroth)
    assert isinstance(first, oa.AuthenticationError)
    assert "set security.tls on all ranks or on none" in str(first)


def test_a_certificate_that_has_run_out_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls_, "_shown", lambda *_: {})  # it ran out later
    files = made({"all": []}, dt.timedelta(seconds=-1), new_authority(dt.timedelta(days=1)))["all"]
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    _, first = meeting([tmp_path, tmp_path], timeout_s=3)
    assert isinstance(first, oa.AuthenticationError)
    assert "certificate has expired" in str(first)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("tls.key", None, "where tls.key cannot be read: No such file or directory"),
        ("ca.crt", "", "whose files do not make a certificate"),
        ("tls.crt", "-----BEGIN CERTIFICATE-----\nnone\n-----END CERTIFICATE-----\n", "whose files do not make a certificate"),
        ("tls.key", "another", "whose files do not make a certificate"),
    ],
)
def test_files_that_make_no_certificate(folder: Path, tmp_path: Path, name: str, text: str | None, words: str) -> None:
    shutil.copytree(folder / "job", tmp_path / "bad")
    if text is None:
        (tmp_path / "bad" / name).unlink()
    elif text == "another":
        shutil.copy(folder / "hosts" / "node1" / name, tmp_path / "bad" / name)
    else:
        (tmp_path / "bad" / name).write_text(text)
    with pytest.raises(oa.ConfigError, match="`oneaccord certs` makes one") as caught:
        Tls(tmp_path / "bad")
    assert caught.value.key == "security.tls"
    assert words in str(caught.value)


class Between:
    """Somebody on the path who lets the proof of the secret pass, and has a certificate of the same authority."""

    def __init__(self, folder: Path, target: tuple[str, int]) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listener.getsockname()
        self._folder = folder
        self._target = target
        self.heard = b""
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _context(self, side: int) -> ssl.SSLContext:
        context = ssl.SSLContext(side)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        context.load_cert_chain(self._folder / "tls.crt", self._folder / "tls.key")
        return context

    def _serve(self) -> None:
        try:
            client, _ = self._listener.accept()
            with client, socket.create_connection(self._target) as server:
                for source, target, count in (
                    (client, server, KNOCK_BYTES),
                    (server, client, GREETING_BYTES),
                    (client, server, CLIENT_BYTES),
                    (server, client, REPLY_BYTES),
                ):
                    target.sendall(source.recv(count, socket.MSG_WAITALL))
                with (
                    self._context(ssl.PROTOCOL_TLS_SERVER).wrap_socket(client, server_side=True) as one,
                    self._context(ssl.PROTOCOL_TLS_CLIENT).wrap_socket(server) as other,
                ):
                    other.sendall(one.recv(32))
                    one.sendall(other.recv(32))
                    self.heard = one.recv(100)
        except OSError:
            pass

    def close(self) -> None:
        self._listener.close()
        self._thread.join(30)


def test_a_certificate_without_the_secret_is_no_good_on_the_path(folder: Path, loop: Loop) -> None:
    credentials = Credentials(b"secret", Tls(folder / "hosts" / "node1"))
    came: list[object] = []
    refused: list[str] = []
    sock = bind("127.0.0.1", 0)
    address = sock.getsockname()[:2]
    listener = Listener(loop, sock, credentials, lambda *given: came.append(given), lambda _, why: refused.append(why))
    between = Between(folder / "hosts" / "10.0.0.2", address)
    try:
        with pytest.raises(oa.AuthenticationError, match="an attacker on the path has a certificate of the same authority"):
            dial(between.address, credentials, b"hello", Deadline(30))
    finally:
        between.close()
        listener.close()
    assert came == []
    assert between.heard == b""


def test_a_connection_that_ends_before_tls_is_lost_and_no_more(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        sock, _ = server.accept()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
        proven = ProvenSocket.over(sock, (Seal(b"one"), Seal(b"other")))
        with contextlib.closing(proven), pytest.raises(OSError, match="not connected"):
            TlsHandshake(Tls(folder / "job"), proven, True, b"secret", b"words")


GO_ON = """
os.environ["ONEACCORD_SECURITY__TLS"] += ("/node1", "/10.0.0.2")[rank % 2]
group = oa.init(timeout_s=30)
tell("ready")
until_failed(group)
with group.shrink() as rest:
    tell("sum", value=float(rest.all_reduce(np.ones(1))[0]))
"""


def test_survivors_meet_again_over_encrypted_connections(nursery: Nursery, folder: Path) -> None:
    with nursery.ranks(GO_ON, 4, ONEACCORD_SECURITY__TLS=str(folder / "hosts")) as ranks:
        ranks.start().await_facts("ready")
        ranks.signal(0, signal.SIGKILL)
        ranks.wait()
        assert [fact["value"] for fact in ranks.await_facts("sum", 3)] == [3.0] * 3


def test_certificates_are_never_overwritten(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.read_bytes() for path in folder.rglob("*.*") if path.is_file()}
    for words, told in (
        (["job"], "there is something in"),
        (["hosts", "node2", "node1"], "there is something in"),
        (["new", "a/b"], "'a/b' is no name of a host"),
        (["new", ".."], "'..' is no name of a host"),
        (["new", ""], "'' is no name of a host"),
        (["new", "a..b"], "'a..b' is no name of a host"),
        (["new", "x" * 64], "is no name of a host"),
        (["job/tls.crt"], "there is something in"),
    ):
        assert certs(folder / words[0], *words[1:]) == 2
        assert told in capsys.readouterr().err
    assert {path: path.read_bytes() for path in folder.rglob("*.*") if path.is_file()} == before
