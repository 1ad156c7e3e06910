"""Jitter: the same numbers everywhere, spread as they should be, and what a network file says of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path as FilePath
from statistics import fmean, pvariance

import pytest
from pydantic import ValidationError

from oneaccord.api import NETWORKS, ConfigError, Jitter, Network, Paths, UsageError

UNIFORM = Jitter(distribution="uniform", mean_s=1e-6)
EXPONENTIAL = Jitter(distribution="exponential", mean_s=1e-6)
COUNT = 20_000

WIRES = """
topology = "wires"

[wire]
latency_s = 1e-6
bandwidth_bytes_per_s = 1e10

[jitter]
distribution = "exponential"
mean_s = 2e-7
links = "between hosts"
"""


def draws(jitter: Jitter, count: int, seed: int = 42) -> list[float]:
    source = jitter.draws(seed)
    return [source.next() for _ in range(count)]


@pytest.mark.parametrize(
    ("jitter", "first"),
    [
        (UNIFORM, ["0x1.574a266688014p-20", "0x1.adae76f9aaed1p-25", "0x1.274f7bbee47b6p-21", "0x1.df5766a93790bp-22"]),
        (EXPONENTIAL, ["0x1.485a66e085cafp-20", "0x1.6b4cde8ecc9c2p-21", "0x1.756641e3bde8bp-24", "0x1.ffe98e96e8fd1p-26"]),
    ],
    ids=["uniform", "exponential"],
)
def test_a_seed_gives_the_same_bits_everywhere(jitter: Jitter, first: list[str]) -> None:
    assert [seconds.hex() for seconds in draws(jitter, 4)] == first
    assert draws(jitter, 4, seed=43) != draws(jitter, 4)


def test_sources_do_not_disturb_each_other() -> None:
    one, other = EXPONENTIAL.draws(42), EXPONENTIAL.draws(42)
    assert [(one.next(), other.next()) for _ in range(100)] == [(each, each) for each in draws(EXPONENTIAL, 100)]


@pytest.mark.parametrize(
    ("jitter", "variance", "below"),
    [(UNIFORM, 1 / 3, lambda t: t / 2), (EXPONENTIAL, 1.0, lambda t: 1 - math.exp(-t))],
    ids=["uniform", "exponential"],
)
def test_draws_follow_the_law(jitter: Jitter, variance: float, below: Callable[[float], float]) -> None:
    drawn = sorted(seconds / jitter.mean_s for seconds in draws(jitter, COUNT))
    assert fmean(drawn) == pytest.approx(1, abs=0.025)
    assert pvariance(drawn) == pytest.approx(variance, rel=0.06)
    # Kolmogorov and Smirnov's distance, which is greater than this once in 500 times.
    assert max(abs(below(t) - (i + 0.5) / COUNT) for i, t in enumerate(drawn)) < 1.86 / math.sqrt(COUNT)


def test_a_negative_seed_is_refused() -> None:
    with pytest.raises(UsageError, match="the seed is -1; expected 0 or more"):
        UNIFORM.draws(-1)


def test_jitter_covers_all_messages_or_those_between_hosts() -> None:
    paths = Paths(NETWORKS["fat-tree"], 16)
    inside, outside = paths.between(0, 7), paths.between(7, 8)
    between = Jitter(distribution="uniform", mean_s=1.0, links="between hosts")
    assert [UNIFORM.covers(inside), UNIFORM.covers(outside)] == [True, True]
    assert [between.covers(inside), between.covers(outside)] == [False, True]


def load(folder: FilePath, text: str) -> Network:
    path = folder / "network.toml"
    path.write_text(text)
    return Network.load(path)


def test_a_network_file_may_have_jitter(tmp_path: FilePath) -> None:
    assert load(tmp_path, WIRES).jitter == Jitter(distribution="exponential", mean_s=2e-7, links="between hosts")
    short = load(tmp_path, WIRES.replace('links = "between hosts"', "").replace("2e-7", "1"))
    assert short.jitter == Jitter(distribution="exponential", mean_s=1.0, links="all")
    assert load(tmp_path, WIRES.split("[jitter]", maxsplit=1)[0]).jitter is None
    assert len({short, load(tmp_path, WIRES)}) == 2  # still a key


@pytest.mark.parametrize(
    ("old", "new", "key", "words"),
    [
        (
            '"exponential"',
            '"normal"',
            "jitter.distribution",
            "jitter.distribution = 'normal': it should be 'uniform' or 'exponential'",
        ),
        ('distribution = "exponential"', "", "jitter.distribution", "jitter.distribution is missing, and it has no default"),
        ("mean_s = 2e-7", "", "jitter.mean_s", "jitter.mean_s is missing, and it has no default"),
        ("mean_s = 2e-7", "mean_s = 0", "jitter.mean_s", "jitter.mean_s = 0: it should be greater than 0"),
        ("mean_s = 2e-7", "mean_s = inf", "jitter.mean_s", "jitter.mean_s = inf: it should be a finite number"),
        ("mean_s = 2e-7", "mean_s = true", "jitter.mean_s", "jitter.mean_s = True: it should be a valid number"),
        (
            "mean_s =",
            "spread_s = 1\nmean_s =",
            "jitter.spread_s",
            "this key is unknown. Valid here: distribution, mean_s, links",
        ),
        ('"between hosts"', '"wire"', "jitter.links", "jitter.links = 'wire': it should be 'all' or 'between hosts'"),
    ],
)
def test_what_is_wrong_with_jitter_is_said_with_file_key_and_value(
    tmp_path: FilePath, old: str, new: str, key: str, words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, WIRES.replace(old, new))
    assert words in str(caught.value)
    assert caught.value.file == str(tmp_path / "network.toml")
    assert key == caught.value.key


def test_a_bus_has_no_links_between_hosts() -> None:
    bus = NETWORKS["laptop"].model_dump()
    assert Network(**bus | {"jitter": UNIFORM}).jitter == UNIFORM
    with pytest.raises(ValidationError, match=r"jitter\.links = 'between hosts' cannot be used with the topology 'bus'"):
        Network(**bus | {"jitter": {"distribution": "uniform", "mean_s": 1.0, "links": "between hosts"}})
