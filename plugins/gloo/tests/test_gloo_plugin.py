"""What the gloo backend says of itself where there is no torch, and how its ranks meet."""

from __future__ import annotations

import threading

import pytest
from pydantic import ValidationError
from support.bootstraps import ThreadBootstrap
from support.worlds import must, on_threads

from oneaccord.api import Collective, CollectiveRequest
from oneaccord_gloo import plugin
from oneaccord_gloo.config import GlooConfig
from oneaccord_gloo.meeting import make_store
from oneaccord_gloo.plugin import oneaccord_collective, oneaccord_register_backends
from oneaccord_gloo.process_group import reason


def test_the_probe_says_what_is_missing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(plugin, "find_spec", lambda name: None)
    assert oneaccord_register_backends().probe() == "torch, which brings Gloo, is not installed"
    monkeypatch.setattr(plugin, "find_spec", lambda name: object())
    assert oneaccord_register_backends().probe() is None


@pytest.mark.parametrize("wrong", [{"native": "polled"}, {"threads": 0}, {"intreface": "eth0"}])
def test_a_wrong_setting_is_refused(wrong: dict[str, object]):
    with pytest.raises(ValidationError):
        GlooConfig(**wrong)


def test_collectives_of_other_backends_are_none_of_its_business():
    assert oneaccord_collective(CollectiveRequest("tcp", Collective.BARRIER, "cpu", None, None, 0, 2)) is None


class _Distributed:
    class Store:
        pass


def test_what_one_rank_sets_all_others_get():
    cards: dict[str, dict[int, bytes]] = {}
    together = threading.Barrier(3)

    def body(rank: int) -> list[bytes]:
        store = make_store(ThreadBootstrap(rank, cards, together, GlooConfig()), _Distributed)
        store.set(f"rank {rank}", bytes([rank, 255]))
        assert store.check([f"rank {rank}"])
        store.wait([f"rank {peer}" for peer in range(3)])
        first = [store.get(f"rank {peer}") for peer in range(3)]
        store.set(f"again {rank}", b"")
        assert store.get(f"again {(rank + 1) % 3}") == b""
        return first

    assert must(on_threads(body, 3)) == [[b"\x00\xff", b"\x01\xff", b"\x02\xff"]] * 3


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (
            "[/a/pair.cc:553] Connection closed by peer [1.2.3.4]:9. This is typically caused by a crash.",
            "Connection closed by peer [1.2.3.4]:9.",
        ),
        ("Application timeout caused pair closure", "Application timeout caused pair closure"),
        ("", "RuntimeError"),
    ],
)
def test_the_words_of_gloo_are_passed_on_without_its_advice(said: str, words: str):
    assert reason(RuntimeError(said)) == words
