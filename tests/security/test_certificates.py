"""Whom a certificate lets in: the names in it, its change while a job runs, and its revocation."""

from __future__ import annotations

import contextlib
import datetime as dt
import logging
import os
import queue
import shutil
import socket
import stat
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from cryptography import x509
from support.loops import loop
from support.waiting import PATIENCE_S
from support.worlds import free_port, on_threads

import oneaccord as oa
from oneaccord.cli import certs as certs_
from oneaccord.cli.certs import made, new_authority
from oneaccord.cli.main import main
from oneaccord.contract.deadline import Deadline
from oneaccord.net.credentials import Credentials
from oneaccord.net.loop import Loop
from oneaccord.net.network import Listener, bind, dial
from oneaccord.net.proven import ProvenSocket
from oneaccord.net.tls import Tls
from oneaccord_tcp.backend import _HELLO, _LINK

__all__ = ["loop"]

YEAR = dt.timedelta(days=365)
ELSEWHERE = "127.0.0.2"
"""An address of loopback that connections come to from 127.0.0.1, so that it stands for another host."""


def certs(*words: object) -> object:
    """Make certificates by the command; return its exit code."""
    try:
        return main(["certs", *map(str, words)])
    except SystemExit as left:
        return left.code


def put(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
        (folder / name).chmod(0o600)
    return folder


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with certificates of one authority: of hosts, and one for all."""
    folder = tmp_path_factory.mktemp("hosts")
    authority = new_authority(YEAR)
    named = {"node1": ["node1", ELSEWHERE], "node2": ["node2"], "pods": ["*.job.svc"], "all": []}
    for host, files in made(named, YEAR, authority).items():
        put(folder / host, files)
    return folder


class Connecting:
    """Makes connections to a listener that stands for another host; tells what came of each."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop

    def __call__(self, server: Credentials, client: Credentials, host: str = ELSEWHERE) -> tuple[str, str]:
        """Return the names in both certificates, the client's first, as the other end knows them."""
        came: queue.Queue[ProvenSocket] = queue.Queue()
        sock = bind(ELSEWHERE, 0)
        port = sock.getsockname()[1]
        listener = Listener(self._loop, sock, server, lambda sock, _: came.put(sock))
        try:
            with dial((host, port), client, b"hello", Deadline(PATIENCE_S)) as ours, came.get(timeout=PATIENCE_S) as theirs:
                return theirs.certificate, ours.certificate
        finally:
            listener.close()


@pytest.fixture
def connect(loop: Loop) -> Connecting:
    return Connecting(loop)


def with_tls(tls: Tls) -> Credentials:
    return Credentials(b"secret", tls)


# Names


@pytest.mark.parametrize(
    ("server", "client", "host", "fits"),
    [
        ("node1", "node2", ELSEWHERE, True),
        ("node1", "node2", "node1", True),
        ("node1", "node2", "NODE1.", True),
        ("node2", "node1", "node1", False),  # a stolen one
        ("node2", "node2", "node1", False),  # even where the thief has stolen it from this very host
        ("all", "node2", "node1", False),
        ("node2", "node2", ELSEWHERE, False),
        ("pods", "node1", "rank-0.job.svc", True),
        ("pods", "node1", "job.svc", False),
        ("node2", "all", "node1", True),  # where one is for all ranks there is nothing to compare
    ],
)
def test_where_ranks_meet_the_certificate_names_the_host_that_was_dialled(
    hosts: Path, connect: Connecting, monkeypatch: pytest.MonkeyPatch, server: str, client: str, host: str, fits: bool
) -> None:
    if host != ELSEWHERE:
        find = socket.getaddrinfo
        monkeypatch.setattr(socket, "getaddrinfo", lambda _, *rest, **more: find(ELSEWHERE, *rest, **more))
    credentials = [with_tls(Tls(hosts / name)) for name in (server, client)]
    if fits:
        names = {"node1": f"DNS:node1, IP Address:{ELSEWHERE}", "node2": "DNS:node2", "pods": "DNS:*.job.svc", "all": ""}
        assert connect(*credentials, host) == (names[client], names[server])
        return
    with pytest.raises(oa.AuthenticationError, match="HOST=NAME,NAME") as caught:
        connect(*credentials, host)
    assert f"does not name {host!r}, the dialled host" in str(caught.value)


def test_names_are_not_compared_where_the_configuration_says_so(hosts: Path, connect: Connecting) -> None:
    assert connect(with_tls(Tls(hosts / "node2", False)), with_tls(Tls(hosts / "node1", False))) == ("", "")


def test_a_rank_that_is_dialled_shows_the_names_with_which_it_came(hosts: Path, connect: Connecting) -> None:
    one, two = (with_tls(Tls(hosts / name)) for name in ("node1", "node2"))
    names = ("DNS:node2", f"DNS:node1, IP Address:{ELSEWHERE}", "")
    dialler = two.of_job(b"job", names).towards("rank 1 (tcp)", 1)
    listening = [each.of_job(b"job", names).towards("rank 1 (tcp)") for each in (one, two, with_tls(Tls(hosts / "all")))]
    assert connect(listening[0], dialler) == names[:2]
    for thief in listening[1:]:
        with pytest.raises(oa.AuthenticationError, match="another process answers in its place") as caught:
            connect(thief, dialler)
        assert f"but the certificate of the dialled rank names {names[1]} (security.tls_names)" in str(caught.value)
    nameless = two.of_job(b"job", names).towards("rank 1 (tcp)", 2)
    assert connect(listening[2], nameless) == ("DNS:node2", "")


def test_another_hosts_certificate_makes_no_connection_in_a_ranks_name(hosts: Path, caplog: pytest.LogCaptureFixture) -> None:
    port = free_port()

    def body(rank: int) -> object:
        config = {
            "backend": "tcp",
            "rendezvous": {"address": f"127.0.0.1:{port}"},
            "security": {"tls": str(hosts / ("node1", "node1", "node2")[rank])},
        }
        with oa.init(config=config, rank=rank, world_size=3, timeout_s=PATIENCE_S) as group:
            group.barrier()
            if rank == 2:  # says that it is rank 0, of another host
                job, channel = group._job, 7
                hello = _HELLO.pack(b"tcp", _LINK, 0, 1, channel, 0, 0)
                with job.dial(1, job.backend._addresses[1], hello, Deadline(PATIENCE_S), "rank 1 (tcp)", 1) as sock:  # type: ignore[union-attr]
                    sock.setblocking(True)
                    assert sock.recv(1) == b""
            return group.all_reduce(np.ones(1))[0]

    with caplog.at_level(logging.WARNING, "oneaccord.security"):
        assert on_threads(body, 3) == [3.0] * 3
    assert [record.getMessage() for record in caplog.records if record.name == "oneaccord.security"] == [
        (
            f"oneaccord: a connection claims to be rank 0, whose certificate names DNS:node1, IP Address:{ELSEWHERE}, but shows a certificate "
            "that names DNS:node2: it was refused"
        )
    ]


# Other files while a job runs


def links(folder: Path, files: dict[str, bytes], version: str) -> Path:
    """Let a folder hold these files, as Kubernetes does: by links that are exchanged at once."""
    put(folder.parent / f"{folder.name}-{version}", files)
    unfinished = folder.parent / "unfinished"
    unfinished.symlink_to(f"{folder.name}-{version}")
    unfinished.replace(folder)
    return folder


def test_connections_take_the_certificates_that_the_folder_holds_by_then(tmp_path: Path, connect: Connecting) -> None:
    old, new = new_authority(YEAR), new_authority(YEAR)
    of_old, of_new = (made({"one": [], "other": []}, YEAR, authority) for authority in (old, new))
    both = {"ca.crt": of_old["one"]["ca.crt"] + of_new["one"]["ca.crt"]}
    one, other = (Tls(links(tmp_path / name, of_old[name], "0")) for name in ("one", "other"))
    digests = []
    # First the ranks trust both authorities, then each gets a certificate of the new one, and then they trust that one alone.
    steps: Sequence[tuple[str, dict[str, bytes]]] = [
        ("one", of_old["one"] | both),
        ("other", of_old["other"] | both),
        ("one", of_new["one"] | both),
        ("other", of_new["other"] | both),
        ("other", of_new["other"]),
        ("one", of_new["one"]),
    ]
    for version, (name, files) in enumerate(steps, 1):
        links(tmp_path / name, files, str(version))
        assert connect(with_tls(one), with_tls(other)) == connect(with_tls(other), with_tls(one)) == ("", "")
        digests.append((one.current().digest, other.current().digest))
    assert digests[0] == digests[1] != digests[2] != digests[3] == digests[4] == digests[5]
    with pytest.raises(oa.AuthenticationError):
        connect(with_tls(one), with_tls(Tls(put(tmp_path / "late", of_old["one"]))))


def test_half_a_change_of_certificates_changes_nothing(
    tmp_path: Path, connect: Connecting, caplog: pytest.LogCaptureFixture
) -> None:
    authority = new_authority(YEAR)
    old, new = (made({"all": []}, YEAR, authority)["all"] for _ in range(2))
    tls = Tls(put(tmp_path / "job", old))
    before = tls.current()
    for name, data in (("tls.key", None), ("tls.key", new["tls.key"]), ("tls.crt", new["tls.crt"][:100])):
        with contextlib.suppress(FileNotFoundError):
            (tmp_path / "job" / name).unlink()
        if data is not None:
            put(tmp_path / "job", {name: data})
        caplog.clear()
        with caplog.at_level(logging.WARNING, "oneaccord.security"):
            assert [tls.current() is before for _ in range(3)] == [True] * 3
        assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["oneaccord"]
        assert "the new certificates cannot be used, so the old ones remain in use" in caplog.text
        assert connect(with_tls(tls), with_tls(tls)) == ("", "")
    put(tmp_path / "job", {"tls.crt": new["tls.crt"]})
    assert tls.current().digest != before.digest
    assert connect(with_tls(tls), with_tls(tls)) == ("", "")


@pytest.mark.parametrize(
    ("names", "lifetime", "authority", "words"),
    [
        (["node1"], dt.timedelta(seconds=-1), 0, "certificate has expired"),
        (["node1"], YEAR, 1, "unable to get local issuer certificate"),
    ],
)
def test_a_certificate_that_nobody_trusts_is_refused_by_its_own_rank(
    tmp_path: Path, names: list[str], lifetime: dt.timedelta, authority: int, words: str
) -> None:
    authorities = [new_authority(YEAR), new_authority(YEAR)]
    files = made({"node1": names}, lifetime, authorities[authority])["node1"]
    files["ca.crt"] = made({"node1": names}, YEAR, authorities[0])["node1"]["ca.crt"]
    with pytest.raises(oa.ConfigError, match=r"whose certificate its own ca\.crt does not trust") as caught:
        Tls(put(tmp_path / "job", files))
    assert words in str(caught.value)


# Revocation


def test_a_revoked_certificate_makes_no_connection_from_then_on(tmp_path: Path, connect: Connecting) -> None:
    job = tmp_path / "job"
    assert certs(job, "node1", "node2", f"node3={ELSEWHERE}", "--keep-authority") == 0
    one, two = (with_tls(Tls(job / name, False)) for name in ("node1", "node2"))
    assert connect(one, two) == ("", "")
    shutil.copytree(job / "node2", tmp_path / "stolen")
    stolen = with_tls(Tls(tmp_path / "stolen", False))
    assert certs(job, "--revoke", "node2") == 0
    for ends in ((one, stolen), (stolen, one)):
        with pytest.raises(oa.AuthenticationError, match="certificate"):
            connect(*ends)
    with pytest.raises(oa.ConfigError, match="certificate revoked"):
        Tls(job / "node2")
    three = with_tls(Tls(job / "node3", False))
    assert connect(one, three) == ("", "")
    shutil.rmtree(job / "node2")
    assert certs(job, "node2") == 0  # a new one of the same authority
    assert certs(job, "--revoke", "node3") == 0  # those that were revoked before stay so
    assert connect(one, with_tls(Tls(job / "node2", False))) == ("", "")
    for revoked in (stolen, three):
        with pytest.raises(oa.AuthenticationError, match="certificate"):
            connect(one, revoked)
    assert len(x509.load_pem_x509_crl((job / "node1" / "crl.pem").read_bytes())) == 2


def test_each_of_two_authorities_revokes_its_own(tmp_path: Path, connect: Connecting) -> None:
    for name in ("old", "new"):
        assert certs(tmp_path / name, "a", "b", "--keep-authority") == 0
        assert certs(tmp_path / name, "--revoke", "b") == 0
    both = {name: b"".join((tmp_path / of / name).read_bytes() for of in ("old", "new")) for name in ("ca.crt", "crl.pem")}
    shown = {}
    for of in ("old", "new"):
        shown[of] = with_tls(Tls(put(tmp_path / of / "a", both), False))
        (tmp_path / of / "b" / "crl.pem").unlink()
        shown[f"{of} revoked"] = with_tls(Tls(put(tmp_path / of / "b", {"ca.crt": both["ca.crt"]}), False))
    assert connect(shown["old"], shown["new"]) == connect(shown["new"], shown["old"]) == ("", "")
    for of in ("old revoked", "new revoked"):
        for other in ("old", "new"):
            with pytest.raises(oa.AuthenticationError, match="certificate"):
                connect(shown[other], shown[of])


# The command


def names_in(path: Path) -> list[str]:
    try:
        found = x509.load_pem_x509_certificate(path.read_bytes()).extensions.get_extension_for_class(
            x509.SubjectAlternativeName
        )
    except x509.ExtensionNotFound:
        return []
    return [f"{type(name).__name__} {name.value}" for name in found.value]


def test_a_certificate_has_all_names_of_its_host_and_one_for_all_has_none(tmp_path: Path) -> None:
    assert certs(tmp_path / "job", "node1=10.0.0.1,node1.example.org,fd00::1", "*.job.svc", "10.0.0.2") == 0
    assert names_in(tmp_path / "job" / "node1" / "tls.crt") == [
        "DNSName node1",
        "IPAddress 10.0.0.1",
        "DNSName node1.example.org",
        "IPAddress fd00::1",
    ]
    assert names_in(tmp_path / "job" / "*.job.svc" / "tls.crt") == ["DNSName *.job.svc"]
    assert names_in(tmp_path / "job" / "10.0.0.2" / "tls.crt") == ["IPAddress 10.0.0.2"]
    assert certs(tmp_path / "all") == 0
    assert names_in(tmp_path / "all" / "tls.crt") == []


def test_keys_are_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        assert certs(tmp_path / "new" / "job", "node1", "--keep-authority") == 0
        assert certs(tmp_path / "new" / "job", "--revoke", "node1") == 0
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "new").rglob("*")}
    files = dict.fromkeys(("ca.crt", "ca.key", "crl.pem", "tls.crt", "tls.key"), 0o600)
    assert modes == files | {"job": 0o700, "node1": 0o700}


def linked(path: Path) -> None:
    (path / "other").mkdir()
    (path / "job").symlink_to("other")


def dangling(path: Path) -> None:
    (path / "job").symlink_to("other")


def writable(path: Path) -> None:
    (path / "job").mkdir()
    (path / "job").chmod(0o777)


def full(path: Path) -> None:
    (path / "job").mkdir()
    (path / "job" / "tls.key").symlink_to("/dev/null")


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (linked, "job is a link: name the folder itself"),
        (dangling, "job is a link: name the folder itself"),
        (writable, "other users can write to"),
        (full, "there is something in"),
    ],
)
def test_certificates_go_to_no_folder_that_others_prepared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], prepare: Callable[[Path], None], words: str
) -> None:
    prepare(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    assert certs(tmp_path / "job") == 2
    assert words in " ".join(capsys.readouterr().err.split())
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["node1=", "node2"], "'' in 'node1=' is no name of a host"),
        (["node1=a..b"], "'a..b' in 'node1=a..b' is no name of a host"),
        (["node1", "node1=b"], "'node1' was given twice"),
        (["--keep-authority"], "--keep-authority needs the names of hosts"),
        (["--revoke", "node1"], "without it, make all certificates anew"),
        (["node9"], "holds certificates of an authority whose key is not in"),
    ],
)
def test_what_the_command_cannot_do_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], told: str
) -> None:
    assert certs(tmp_path / "job", "node0") == 0
    before = sorted(tmp_path.rglob("*"))
    assert certs(tmp_path / "job", *words) == 2
    assert told in " ".join(capsys.readouterr().err.split())
    assert sorted(tmp_path.rglob("*")) == before


def test_a_file_that_appears_meanwhile_is_neither_followed_nor_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "target").write_bytes(b"whole")
    mkdir = Path.mkdir

    def prepared(path: Path, *given: object, **more: object) -> None:
        mkdir(path, *given, **more)  # type: ignore[arg-type]
        with contextlib.suppress(FileExistsError):
            (path / "tls.key").symlink_to(tmp_path / "target")

    monkeypatch.setattr(Path, "mkdir", prepared)
    monkeypatch.setattr(certs_, "_check_place", lambda *_, **__: None)  # which has looked before
    assert certs(tmp_path / "job") == 2
    assert "tls.key cannot be read or written: File exists" in " ".join(capsys.readouterr().err.split())
    assert (tmp_path / "target").read_bytes() == b"whole"


def test_a_key_that_others_can_read_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    put(tmp_path / "job", made({"all": []}, YEAR, new_authority(YEAR))["all"])
    with caplog.at_level(logging.WARNING, "oneaccord.security"):
        Tls(tmp_path / "job")
        assert caplog.records == []
        (tmp_path / "job" / "tls.key").chmod(0o644)
        Tls(tmp_path / "job")
    assert f"oneaccord: the key in {tmp_path / 'job' / 'tls.key'} can be read or changed by other users" in caplog.text
