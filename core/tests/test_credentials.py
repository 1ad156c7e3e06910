"""Which texts are taken for secrets that keep strangers out, and what both ends make of them."""

from __future__ import annotations

import base64
import hashlib
import os
import secrets
import uuid

import pytest

from oneaccord.errors import AuthenticationError
from oneaccord.net.credentials import Credentials


def test_sixteen_random_bytes_keep_strangers_out_in_whatever_letters() -> None:
    for drawn in (b"/7\xaf\xe0\xaf\xa5M\xaa\xeb\xaf=\xa5G\xdd6/", os.urandom(16), os.urandom(16)):
        letters = [drawn.hex(), drawn.hex().upper(), str(uuid.UUID(bytes=drawn)), secrets.token_urlsafe(16)]
        for text in (*(each.encode() for each in letters), base64.b64encode(drawn)):
            Credentials.of_text(text).check_reach("192.0.2.1", "listening at")


@pytest.mark.parametrize(
    "text", [b"a", b" ", b"changeme", b"hunter2hunter2hunter2", b"password" * 8, b"1" * 64, b"0123456789" * 3, bytes(range(15))]
)
def test_shorter_texts_and_those_that_repeat_themselves_do_not(text: bytes) -> None:
    credentials = Credentials.of_text(text)
    for each in (
        credentials,
        credentials.of_run("run"),
        credentials.of_job(b"nonce"),
        credentials.of_job(b"nonce").towards("rank 1"),
    ):
        each.check_reach("127.0.0.1", "listening at")
        with pytest.raises(
            AuthenticationError, match=r"^listening at 192\.0\.2\.1 with a secret that can be guessed .* is refused"
        ):
            each.check_reach("192.0.2.1", "listening at")


def test_a_job_without_a_secret_stays_one_in_all_that_is_made_of_it() -> None:
    for each in (Credentials(b"").of_run("run"), Credentials(b"").of_job(b"nonce"), Credentials.of_text(b"")):
        with pytest.raises(AuthenticationError, match=r"^meeting at ::2 without a secret is refused"):
            each.check_reach("::2", "meeting at")


def test_only_the_digits_of_a_key_are_taken_as_they_are() -> None:
    key = b"78690d369d6fa0325add562474675520"
    assert Credentials.of_text(key).secret == key
    words = b"correct horse battery staple"
    assert Credentials.of_text(words).secret == hashlib.pbkdf2_hmac("sha256", words, b"oneaccord secret", 100_000)
