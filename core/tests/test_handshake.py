"""The handshake: who holds the secret comes in, and nobody else; without input or output."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from oneaccord.net.handshake import (
    CLIENT_BYTES,
    GREETING_BYTES,
    HELLO_BYTES,
    KNOCK_BYTES,
    MAGIC,
    REPLY_BYTES,
    ClientHandshake,
    ServerHandshake,
    is_knock,
    knock,
)

SECRET = b"the secret of the tests"
SECRETS = st.binary(max_size=80)


def shake(server_secret: bytes, client_secret: bytes, hello: bytes = b"hello") -> tuple[bytes | None, bool]:
    """Return the hello that the server accepts, and whether the client accepts the server."""
    server, client = ServerHandshake(server_secret), ClientHandshake(client_secret, hello)
    reply, heard = server.answer(client.answer(server.greeting))
    return heard, client.accepts(reply)


@given(secret=SECRETS, hello=st.binary(max_size=HELLO_BYTES))
def test_both_sides_accept_who_holds_the_secret(secret: bytes, hello: bytes) -> None:
    assert shake(secret, secret, hello) == (hello.ljust(HELLO_BYTES, b"\0"), True)


@given(ours=SECRETS, theirs=SECRETS)
def test_neither_side_accepts_another_secret(ours: bytes, theirs: bytes) -> None:
    # HMAC pads a key with zeros, so that secrets that differ in zeros at their end alone are one.
    if ours.rstrip(b"\0") != theirs.rstrip(b"\0"):
        assert shake(ours, theirs) == (None, False)


@given(at=st.integers(0, CLIENT_BYTES - 1), flip=st.integers(1, 255))
def test_a_client_that_was_tampered_with_is_refused(at: int, flip: int) -> None:
    server, client = ServerHandshake(SECRET), ClientHandshake(SECRET, b"hello")
    said = bytearray(client.answer(server.greeting))
    said[at] ^= flip
    if at >= len(MAGIC):  # who sends another magic is dropped before the proof is looked at
        reply, hello = server.answer(bytes(said))
        assert hello is None
        assert not client.accepts(reply)


def test_both_sides_have_the_same_seals_and_no_other_connection_has_them() -> None:
    pairs = []
    for _ in range(2):
        server, client = ServerHandshake(SECRET), ClientHandshake(SECRET, b"hello")
        server.answer(client.answer(server.greeting))
        pairs += [(client.seals[0], server.seals[1]), (server.seals[0], client.seals[1])]
    sent, expected = ([each.of(b"words") for each in side] for side in zip(*pairs, strict=True))
    assert sent == expected
    assert len(set(sent)) == 4


@given(at=st.integers(0, GREETING_BYTES - 1), flip=st.integers(1, 255))
def test_a_greeting_that_was_tampered_with_leads_to_nothing(at: int, flip: int) -> None:
    server, client = ServerHandshake(SECRET), ClientHandshake(SECRET, b"hello")
    greeting = bytearray(server.greeting)
    greeting[at] ^= flip
    if at >= len(MAGIC):
        assert server.answer(client.answer(bytes(greeting)))[1] is None


@given(at=st.integers(0, REPLY_BYTES - 1), flip=st.integers(1, 255))
def test_a_reply_that_was_tampered_with_is_refused(at: int, flip: int) -> None:
    server, client = ServerHandshake(SECRET), ClientHandshake(SECRET, b"hello")
    reply = bytearray(server.answer(client.answer(server.greeting))[0])
    assert client.accepts(bytes(reply))
    reply[at] ^= flip
    assert not client.accepts(bytes(reply))


def test_what_a_client_said_before_opens_no_second_connection() -> None:
    first, client = ServerHandshake(SECRET), ClientHandshake(SECRET, b"hello")
    said = client.answer(first.greeting)
    assert first.answer(said)[1] is not None
    assert ServerHandshake(SECRET).answer(said)[1] is None


def test_what_a_server_said_before_convinces_no_second_client() -> None:
    server, client = ServerHandshake(SECRET), ClientHandshake(SECRET, b"hello")
    reply = server.answer(client.answer(server.greeting))[0]
    other = ClientHandshake(SECRET, b"hello")
    other.answer(server.greeting)
    assert not other.accepts(reply)


def test_a_clients_own_words_are_no_answer_to_it() -> None:
    """Nobody gets in by sending back what it was sent: the two sides prove different things."""
    client = ClientHandshake(SECRET, b"hello")
    said = client.answer(ServerHandshake(SECRET).greeting)
    assert not client.accepts(MAGIC + said[-32:])


def test_nothing_is_accepted_before_a_greeting() -> None:
    assert not ClientHandshake(SECRET, b"hello").accepts(bytes(REPLY_BYTES))
    assert not ClientHandshake(SECRET, b"hello").accepts(MAGIC + bytes(REPLY_BYTES - len(MAGIC)))


def test_the_secret_is_never_sent() -> None:
    server, client = ServerHandshake(SECRET), ClientHandshake(SECRET, b"hello")
    said = client.answer(server.greeting)
    wire = server.greeting + said + server.answer(said)[0]
    assert SECRET not in wire
    assert (len(server.greeting), len(said)) == (GREETING_BYTES, CLIENT_BYTES)


def test_each_handshake_is_fresh() -> None:
    assert ServerHandshake(SECRET).greeting != ServerHandshake(SECRET).greeting
    assert knock(SECRET) != knock(SECRET)


@given(secret=SECRETS, other=SECRETS)
def test_a_knock_is_of_one_who_holds_the_secret(secret: bytes, other: bytes) -> None:
    words = knock(secret)
    assert len(words) == KNOCK_BYTES
    assert is_knock(secret, words)
    if secret.rstrip(b"\0") != other.rstrip(b"\0"):
        assert not is_knock(other, words)


@given(at=st.integers(len(MAGIC), KNOCK_BYTES - 1), flip=st.integers(1, 255))
def test_a_knock_that_was_tampered_with_is_none(at: int, flip: int) -> None:
    words = bytearray(knock(SECRET))
    words[at] ^= flip
    assert not is_knock(SECRET, bytes(words))
