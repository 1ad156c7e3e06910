"""Strangers at the ports of a job: they get nothing, and the job works all the same."""

from __future__ import annotations

import random
import signal
import socket
import struct
import textwrap
from collections.abc import Callable
from contextlib import ExitStack

import pytest
from support.fault_tools import SECRET, TELLING_JOINS, Nursery
from support.shrink_tools import GOING_ON, LOSING, SHRINKING, places

from oneaccord.net.handshake import KNOCK_BYTES, MAGIC, knock, refusal


def call(stack: ExitStack, port: int, words: bytes = b"") -> socket.socket:
    """Connect, say something, and stay."""
    sock = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30))
    if words:
        sock.sendall(words)
    return sock


def random_bytes(stack: ExitStack, port: int) -> None:
    generator = random.Random(port)
    for length in (1, 8, 40, 168, 4096, 65536):
        call(stack, port, generator.randbytes(length))


def one_byte_then_silence(stack: ExitStack, port: int) -> None:
    for number in range(1, len(MAGIC) + 1):
        call(stack, port, MAGIC[:number])


def silence(stack: ExitStack, port: int) -> None:
    call(stack, port)


def two_hundred(stack: ExitStack, port: int) -> None:
    for _ in range(200):
        call(stack, port)


def a_web_browser(stack: ExitStack, port: int) -> None:
    call(stack, port, b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: */*\r\n\r\n" + bytes(200))


def a_tls_client(stack: ExitStack, port: int) -> None:
    call(stack, port, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200))


def resets(stack: ExitStack, port: int) -> None:
    for words in (b"", MAGIC, MAGIC + bytes(100)):
        with socket.create_connection(("127.0.0.1", port), timeout=30) as sock:
            sock.sendall(words)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def strangers(stack: ExitStack, port: int) -> None:
    """Call as all of them."""
    for stranger in (random_bytes, one_byte_then_silence, silence, a_web_browser, a_tls_client, resets):
        stranger(stack, port)


MEET = textwrap.dedent("""
    with oa.init(timeout_s=30) as group:
        until_told_to_go()
        tell("sum", value=float(group.all_reduce(np.ones(1))[0]))
        group.sendrecv(np.ones(1), (rank + 1) % world_size, (rank - 1) % world_size)
""")


@pytest.mark.parametrize("stranger", [strangers, pytest.param(two_hundred, marks=pytest.mark.long)])
def test_strangers_at_the_rendezvous(nursery: Nursery, stranger: Callable[[ExitStack, int], None]) -> None:
    with ExitStack() as stack, nursery.ranks(TELLING_JOINS + MEET) as ranks:
        ranks.start(0).await_facts("joined", 1)
        stranger(stack, ranks.port)
        ranks.start(1).await_facts("joined", 2)
        stranger(stack, ranks.port)
        ranks.start(2)
        ranks.go()
        ranks.wait()
        assert ranks.output() == ""
        assert [fact["value"] for fact in ranks.await_facts("sum")] == [3.0] * 3


TELLING_PORTS = """
from oneaccord.job.job import Job
listen = Job.listen
def listening(self, *args):
    address = listen(self, *args)
    tell("listens", port=address[1])
    return address
Job.listen = listening
"""


@pytest.mark.parametrize("stranger", [strangers, pytest.param(two_hundred, marks=pytest.mark.long)])
def test_strangers_at_the_data_ports(nursery: Nursery, stranger: Callable[[ExitStack, int], None]) -> None:
    with ExitStack() as stack, nursery.ranks(TELLING_PORTS + MEET) as ranks:
        for fact in ranks.start().await_facts("listens"):
            stranger(stack, fact["port"])
        ranks.go()
        ranks.wait()
        assert ranks.output() == ""
        assert [fact["value"] for fact in ranks.await_facts("sum")] == [3.0] * 3


def test_a_stranger_gets_not_a_word(nursery: Nursery) -> None:
    with ExitStack() as stack, nursery.ranks(TELLING_JOINS + MEET) as ranks:
        ranks.start(0).await_facts("joined", 1)
        sock = call(stack, ranks.port, b"GET / HTTP/1.1\r\n\r\n")
        heard = b""
        try:
            while piece := sock.recv(4096):
                heard += piece
        except ConnectionResetError:
            pass
        assert heard == b""


def wrong_proofs(stack: ExitStack, port: int) -> list[socket.socket]:
    """Connect with wrong proofs, which a listener answers in the order in which they came."""
    damaged = bytearray(knock(SECRET.encode()))
    damaged[-1] ^= 1
    words = (knock(b"another secret"), bytes(damaged), MAGIC + bytes(KNOCK_BYTES - len(MAGIC)))
    return [call(stack, port, each) for each in words]


def assert_refused(callers: list[socket.socket]) -> None:
    assert [caller.recv(64) for caller in callers] == [refusal(bytes(32))] * len(callers)


def test_a_wrong_proof_costs_its_sender_alone(nursery: Nursery) -> None:
    """Where the ranks meet, at their data ports, and where those that are left meet again."""
    program = (
        TELLING_JOINS
        + TELLING_PORTS
        + """
import oneaccord.group.shrinking as shrinking
listening = shrinking._listen
def listening_again(*args):
    listener = listening(*args)
    tell("again", port=listener.getsockname()[1])
    while not os.path.exists(os.environ["GO"]):
        time.sleep(0.005)
    return listener
shrinking._listen = listening_again
"""
        + GOING_ON
        + LOSING
        + SHRINKING
    )
    with ExitStack() as stack, nursery.ranks(program) as ranks:
        ranks.start(0).await_facts("joined", 1)
        assert_refused(wrong_proofs(stack, ranks.port))
        ranks.start(1, 2)
        for fact in ranks.await_facts("listens"):
            assert_refused(wrong_proofs(stack, fact["port"]))
        ranks.await_facts("running")
        ranks.signal(2, signal.SIGKILL)
        again = ranks.await_facts("again", 2)
        callers = [wrong_proofs(stack, fact["port"]) for fact in again]
        ranks.go()
        assert_refused(callers[0])  # where the others come, behind these
        assert places(ranks.await_facts("works", 2)) == {0: (0, 2), 1: (1, 2)}
        ranks.wait([0, 1])
        assert ranks.output(0) == ""


def test_once_all_ranks_are_there_nobody_listens_at_the_rendezvous(nursery: Nursery) -> None:
    program = """
        with oa.init(timeout_s=30) as group:
            group.barrier()
            tell("met")
            until_told_to_go()
    """
    with nursery.ranks(program) as ranks:
        ranks.start().await_facts("met")
        with socket.socket() as sock:
            assert sock.connect_ex(("127.0.0.1", ranks.port)) != 0
        ranks.go()
        ranks.wait()
