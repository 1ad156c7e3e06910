"""Backends that do not do what their classes promise: found, and named, whatever core had believed."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
from support.worlds import thread_world

import oneaccord as oa
from oneaccord.api import BackendSpec, CollectiveRequest, Deadline, Group, Mailbox, Transfer, hookimpl
from oneaccord.config.plugins import get_plugin_manager
from oneaccord_tcp.backend import TcpBackend, TcpTransport
from oneaccord_tcp.plugin import TcpConfig


class Config(TcpConfig):
    fault: str = ""


class Bare(Transfer):
    """A transfer that does not tell."""


class CrookedBox(Mailbox):
    """A mailbox of TCP's with one fault."""

    def __init__(self, box: Mailbox, fault: str) -> None:
        self.box, self.fault = box, fault
        self.outgoing, self.incoming = box.outgoing, () if fault == "mailbox without slots" else box.incoming

    @property
    def next_out(self) -> int:
        return self.box.next_out

    @property
    def next_in(self) -> int:
        return self.box.next_in

    def post(self, header: bytes | bytearray, nbytes: int) -> Any:
        transfer = self.box.post(header, nbytes)
        return Future() if self.fault == "post" else transfer

    def fetch(self, header: bytes | bytearray, nbytes: int) -> Any:
        transfer = self.box.fetch(header, nbytes)
        return "later" if self.fault == "fetch" else transfer


class CrookedTransport(TcpTransport):
    """A transport of TCP with one fault; without mailboxes, unless it is theirs."""

    def __init__(self, backend: CrookedBackend, channel: int, kind: str, fault: str) -> None:
        super().__init__(backend, channel)
        self.kind, self.fault, self.sent = kind, fault, 0
        self.streams = "stream" in kind

    def mailbox(self, peer: int) -> Any:
        if not self.kind.startswith(("mailbox", "post", "fetch", "stream")):
            return None
        box = super().mailbox(peer)
        return "box" if self.fault == "mailbox" else CrookedBox(box, self.fault)

    def send(self, peer: int, header: bytes, payload: memoryview) -> Any:
        self.sent += 1
        transfer = super().send(peer, header, payload)
        if self.fault == "send a future":
            return Future()
        if self.fault == "send that does not tell":
            return Bare()
        return None if self.fault in ("send", "streamed send") or (self.fault == "second send" and self.sent > 1) else transfer

    def recv(self, peer: int, header: bytes, payload: memoryview) -> Any:
        transfer = super().recv(peer, header, payload)
        return None if self.fault in ("recv", "streamed recv") else transfer

    def consume(self, *arguments: Any) -> Any:
        transfer = super().consume(*arguments)
        return None if self.fault == "streamed consume" else transfer

    def wait(self, transfers: Sequence[Transfer], deadline: Deadline) -> None:
        if self.fault != "wait":
            super().wait(transfers, deadline)


class CrookedBackend(TcpBackend):
    def __init__(self, bootstrap: Any) -> None:
        super().__init__(bootstrap)
        self.kind = bootstrap.config.fault
        self.fault = self.kind if bootstrap.rank == 0 else ""

    def open_transport(self, channel: int) -> Any:
        return None if self.fault == "open_transport" else CrookedTransport(self, channel, self.kind, self.fault)

    def open_barrier(self, channel: int) -> Any:
        return "barrier" if self.fault == "open_barrier" else None

    def allocate(self, nbytes: int) -> Any:
        return {"allocate": b"bytes", "allocate too little": memoryview(bytearray(nbytes - 1))}.get(self.fault)


def create(bootstrap: Any) -> Any:
    if bootstrap.config.fault == "factory fails":
        raise FileNotFoundError("no pigeon")
    return None if bootstrap.config.fault == "factory" else CrookedBackend(bootstrap)


class Plugin:
    @hookimpl
    def oneaccord_register_backends(self) -> list[BackendSpec]:
        return [
            BackendSpec(name="crooked", summary="", factory="crooked_for_tests:create", config=Config),
            BackendSpec(name="unloadable", summary="", factory="crooked_for_tests:nothing"),
            BackendSpec(name="unable", summary="", factory="crooked_for_tests:create", probe=lambda: "no pigeon"),
        ]

    @hookimpl
    def oneaccord_collective(self, request: CollectiveRequest) -> Any:
        return "natively" if request.backend == "crooked" and request.op == "xor" else None


@pytest.fixture(scope="module", autouse=True)
def crooked() -> Iterator[None]:
    module = types.ModuleType("crooked_for_tests")
    module.create = create  # type: ignore[attr-defined]
    sys.modules["crooked_for_tests"] = module
    get_plugin_manager().register(Plugin(), "crooked")
    yield
    del sys.modules["crooked_for_tests"]


def outcomes(fault: str, program: Any) -> list[Any]:
    return thread_world(program, 2, "crooked", config={"backends": {"crooked": {"fault": fault}}})


COLLECTIVES = {
    "send": r"CrookedTransport.send\(\) returned None instead of a oneaccord.api.Transfer",
    "send a future": r"CrookedTransport.send\(\) returned <Future .*> instead of a oneaccord.api.Transfer",
    "send that does not tell": "its Bare has no 'done', which a oneaccord.api.Transfer has from the beginning",
    "recv": r"CrookedTransport.recv\(\) returned None instead of",
    "streamed send": r"CrookedTransport.send\(\) returned None instead of",
    "streamed recv": r"CrookedTransport.recv\(\) returned None instead of",
    "streamed consume": r"CrookedTransport.consume\(\) returned None instead of",
    "second send": "(it gave None where a oneaccord.api.Transfer was expected|send.. returned None)",
    "mailbox": r"CrookedTransport.mailbox\(\) returned 'box' instead of a oneaccord.api.Mailbox or None",
    "mailbox without slots": r"incoming=\(\) instead of one or more memoryviews each",
    "post": r"\.post\(\) returned <Future .*> instead of a oneaccord.api.Transfer",
    "fetch": r"\.fetch\(\) returned 'later' instead of a oneaccord.api.Transfer",
    "wait": r"CrookedTransport.wait\(\) returned, but none of the transfers is done",
}


@pytest.mark.parametrize("elements", [3, 1 << 15, 1 << 18])
def test_a_transport_may_have_mailboxes_and_not_stream(elements: int) -> None:
    found = outcomes("mailbox and no fault", lambda group: group.all_reduce(np.arange(elements)).tolist())
    assert found == [list(range(0, 2 * elements, 2))] * 2


MESSAGES = [
    "send",
    "send a future",
    "send that does not tell",
    "recv",
    "second send",
    "mailbox",
    "mailbox without slots",
    "post",
    "fetch",
    "wait",
]


@pytest.mark.parametrize("fault", COLLECTIVES)
def test_what_a_transport_gives_is_believed_by_no_collective(fault: str) -> None:
    def program(group: Group) -> None:
        for _ in range(3):
            group.all_reduce(np.ones(1 << 18))
            group.all_gather(np.ones(1 << 18))
            group.broadcast(np.ones(3))

    mine, other = outcomes(fault, program)
    assert isinstance(mine, oa.PluginError), mine
    with pytest.raises(oa.PluginError, match=rf"^the backend 'crooked' breaks its contract: .*{COLLECTIVES[fault]}"):
        raise mine
    assert isinstance(other, oa.AbortedError)
    assert "rank 0 broke off" in str(other)
    assert "with PluginError: the backend 'crooked' breaks its contract" in str(other)


@pytest.mark.parametrize("fault", MESSAGES)
def test_what_a_transport_gives_is_believed_by_no_message(fault: str) -> None:
    def program(group: Group) -> None:
        for _ in range(3):
            group.sendrecv(np.ones(1 << 18), 1 - group.rank, 1 - group.rank)

    mine, other = outcomes(fault, program)
    assert isinstance(mine, oa.PluginError), mine
    with pytest.raises(oa.PluginError, match=rf"^the backend 'crooked' breaks its contract: .*{COLLECTIVES[fault]}"):
        raise mine
    assert isinstance(other, oa.AbortedError)


BACKENDS = {
    "factory": r"^the factory 'crooked_for_tests:create' of the backend 'crooked' of this process returned None instead of a oneaccord.api.Backend$",
    "open_transport": r"^open_transport\(\) of the backend 'crooked' returned None instead of a oneaccord.api.Transport$",
    "open_barrier": r"^open_barrier\(\) of the backend 'crooked' returned 'barrier' instead of a oneaccord.api.Transport$",
    "allocate": r"^allocate\(80\) of the backend 'crooked' returned b'bytes', and neither a writable memoryview of so many bytes nor None$",
    "allocate too little": r"^allocate\(80\) of the backend 'crooked' returned <memory.*>, and neither",
    "native": "a plugin returned 'natively' when it should say whether it performs all_reduce on the backend 'crooked'; expected a function or None",
}


@pytest.mark.parametrize("fault", BACKENDS)
def test_what_a_backend_and_its_plugin_give_is_looked_at(fault: str) -> None:
    def program(group: Group) -> None:
        if "allocate" in fault:
            group.empty(10)
        group.all_reduce(np.ones(3, int), "xor" if fault == "native" else "sum")
        group.barrier()

    errors = [outcome for outcome in outcomes(fault, program) if isinstance(outcome, oa.PluginError)]
    assert errors
    with pytest.raises(oa.PluginError, match=BACKENDS[fault]):
        raise errors[0]


def test_a_backend_that_was_asked_for_is_made_in_a_world_of_one_too(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, variable in (("backend", False), ("ONEACCORD_BACKEND", True), ("config", False)):
        with monkeypatch.context() as patch:
            if variable:
                patch.setenv(name, "crooked")

            def start(fault: str = "", backend: str = "crooked", name: str = name) -> Group:
                given = {"backends": {"crooked": {"fault": fault}} if backend == "crooked" else {}}
                if name == "config" or backend != "crooked":
                    return oa.init(config={"backend": backend, **given})
                return oa.init("crooked" if name == "backend" else None, config=given)

            with start() as group:
                assert (group.backend_name, group.all_reduce(2).item()) == ("crooked", 2)
            with pytest.raises(FileNotFoundError, match="no pigeon"):
                start("factory fails")
            with pytest.raises(oa.PluginError, match=BACKENDS["factory"]):
                start("factory")
    for backend, words in (("unloadable", "there is no such function"), ("unable", "cannot run here: no pigeon")):
        with pytest.raises((oa.PluginError, oa.BackendUnavailableError), match=words):
            oa.init(backend, config={})


def test_nothing_is_made_in_a_world_of_one_that_takes_what_is_best() -> None:
    with oa.init(config={}) as group:
        assert group._job.backend is None
