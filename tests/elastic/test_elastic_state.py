"""What the state of an elastic function may hold: all of it comes out on a rank that was behind as it went in."""

from __future__ import annotations

import datetime as dt
import enum
import random
from collections import Counter, OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import oneaccord as oa
from oneaccord_simulated.running import Simulation

Point = namedtuple("Point", "x y")  # noqa: PYI024 - one of a program's own


class Kind(enum.Enum):
    """A kind."""

    ONE = 1


@dataclass
class Settings:
    """What a program may have."""

    lr: float = 0.1


def travelled(content: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what two ranks begin with, when rank 0 has made it."""

    @oa.elastic(state=lambda: content)
    def train(group: oa.Group, generation: int, state: oa.ElasticState) -> dict[str, Any]:
        return dict(state)

    run = Simulation(2).execute(lambda _: train())
    assert not run.errors
    return run.results


def test_what_a_rank_gets_from_another_one_is_as_it_was() -> None:
    shared = np.arange(6, dtype=np.float32).reshape(2, 3)
    content: dict[str, Any] = {
        "plain": [None, True, 3, -(1 << 63), 1 << 127, 2.5, 1 + 2j, "ä", b"\x00"],
        "tuple": ((0.9, 0.999), {1, 2}, frozenset("a")),
        "keys": {(1, "a"): 1, 2: 2, None: 3},
        "ordered": OrderedDict(b=1, a=2),
        "random": random.Random(1).getstate(),
        "numpy's": np.random.Generator(np.random.PCG64(1)).bit_generator.state,
        "arrays": [np.zeros((0, 3), np.int8), shared[:, ::2], np.float32(1.5), np.complex64(1j)],
        "tied": (shared, shared),
    }
    for state in travelled(content):
        assert list(state) == list(content)
        arrays = state.pop("arrays")
        for got, given in zip(arrays, content["arrays"], strict=True):
            assert type(got) is type(given)
            assert got.dtype == given.dtype
            np.testing.assert_array_equal(got, given)
        first, second = state.pop("tied")
        assert first is second
        np.testing.assert_array_equal(first, shared)
        assert state == {name: each for name, each in content.items() if name not in ("arrays", "tied")}
        assert type(state["ordered"]) is OrderedDict
        assert type(state["tuple"][0]) is tuple


def test_a_state_may_contain_itself() -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    for state in travelled({"loop": loop}):
        assert state["loop"][1] is state["loop"]


class Vector(np.ndarray):  # type: ignore[type-arg]
    """An array that holds more."""


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (Settings(), r"state\['cfg'\]\['x'\]\[1\], a .*Settings: a state may hold"),
        (Kind.ONE, "Kind: a state may hold"),
        (Point(1, 2), "Point: a state may hold"),
        (Counter("a"), "Counter: a state may hold"),
        (dt.date(2026, 1, 1), "datetime.date: a state may hold"),
        (lambda: 0, "a function: a state may hold"),
        (np.random.default_rng(0), "Generator: a state may hold"),
        (np.array([None]), "ndarray: .*object"),
        (np.zeros(2).view(Vector), "Vector: a state may hold"),
        ("\ud800", "half a surrogate"),
    ],
    ids=["dataclass", "enum", "namedtuple", "counter", "date", "function", "generator", "objects", "subclass", "surrogate"],
)
def test_what_could_not_travel_as_it_is_is_refused_when_it_is_committed(value: object, words: str) -> None:
    state = oa.ElasticState()
    state["step"] = 1
    state.commit()
    state["cfg"] = {"x": (0, value)}
    with pytest.raises(oa.UsageError, match=f"commit\\(\\) cannot keep {'.*' if 'state' not in words[:6] else ''}{words}"):
        state.commit()


def test_a_state_that_is_nested_too_deep_to_be_read_again_is_refused() -> None:
    nested: list[Any] = []
    state = oa.ElasticState()
    for _ in range(90):
        nested = [nested]
    state["x"] = nested
    state.commit()
    assert travelled(dict(state)) == [{"x": nested}] * 2
    for _ in range(20):
        nested = [nested]
    state["x"] = nested
    with pytest.raises(oa.UsageError, match="more than 100 levels deep"):
        state.commit()


def test_the_first_state_is_checked_too() -> None:
    @oa.elastic(state={"cfg": Settings()})
    def train(group: oa.Group, generation: int, state: oa.ElasticState) -> None: ...

    run = Simulation(2).execute(lambda _: train())
    assert isinstance(run.errors[0], oa.UsageError)
    assert str(run.errors[0]).startswith("elastic() cannot keep state['cfg'], a ")


@pytest.mark.peers
def test_tensors_of_torch_come_as_they_were() -> None:
    torch = pytest.importorskip("torch")
    weight = torch.nn.Parameter(torch.arange(4.0))
    half = torch.ones(2, dtype=torch.bfloat16)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()

    content = {"weight": weight, "half": half, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    for state in travelled(content):
        assert type(state["weight"]) is torch.nn.Parameter
        assert torch.equal(state["weight"], weight)
        assert state["half"].dtype is torch.bfloat16
        assert torch.equal(state["half"], half)
        other = torch.nn.Linear(2, 2)
        other.load_state_dict(state["model"])
        assert torch.equal(other.weight, model.weight)
        torch.optim.Adam(other.parameters()).load_state_dict(state["optimizer"])
        assert state["optimizer"]["param_groups"][0]["betas"] == (0.9, 0.999)

    kept = oa.ElasticState()
    kept["loss"] = weight.sum()
    with pytest.raises(oa.UsageError, match=r"x\.detach\(\)"):
        kept.commit()


@pytest.mark.peers
def test_arrays_of_jax_come_as_they_were() -> None:
    jnp = pytest.importorskip("jax.numpy")
    for state in travelled({"x": jnp.arange(3.0), "y": jnp.ones(2, "bfloat16")}):
        assert type(state["x"]) is type(jnp.ones(1))
        assert state["x"].tolist() == [0.0, 1.0, 2.0]
        assert state["y"].dtype == jnp.bfloat16
