"""The table of routes: what it may hold, and what is refused, in words."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.worlds import must, thread_world

import oneaccord as oa
from oneaccord.api import BackendUnavailableError, ConfigError, install_command
from oneaccord.config import load
from oneaccord.config.plugins.manager import PluginManager
from oneaccord_hybrid.gpus import Gpus, gpus_here, have_one_each


def config(**routes: Any) -> dict[str, Any]:
    return {"backend": "hybrid", "backends": {"hybrid": {"routes": routes}}}


@pytest.mark.parametrize(
    ("routes", "said"),
    [
        ({}, 'expected at least one route, such as { cpu = "tcp", cuda = "nccl" }'),
        ({"cpu": "tcp", "intra": "shm", "inter": "tcp"}, "cpu is one route for all ranks, intra and inter are two"),
        ({"cpu": "tcp", "inter": "tcp"}, "cpu is one route for all ranks, intra and inter are two"),
        ({"intra": "shm"}, "intra is given alone: give inter as well, or cpu instead of both"),
        ({"inter": "tcp", "cuda": "nccl"}, "inter is given alone: give intra as well"),
        ({"barrier": "tcp"}, "barrier serves only some calls in host memory: give a route for all others"),
        ({"cuda": "nccl", "p2p": "tcp"}, "p2p serves only some calls in host memory: give a route for all others"),
        ({"cpu": "hybrid"}, "hybrid cannot be a part of itself"),
        ({"cpu": "tcp", "p2p": "auto"}, 'expected the name of a backend, such as "tcp"'),
        ({"cpu": ""}, 'expected the name of a backend, such as "tcp"'),
        ({"cpu": 1}, "should be a valid string"),
        ({"cpu": "tcp", "barier": "tcp"}, "did you mean 'backends.hybrid.routes.barrier'? Valid here: cpu, cuda, barrier, p2p"),
    ],
)
def test_routes_that_make_no_sense_are_refused_in_words(routes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(config(**routes), environ={}).backend_config("hybrid")
    assert said in str(caught.value)
    assert str(caught.value).startswith("config argument: backends.hybrid.routes")


def test_without_a_table_of_routes_shm_is_inside_hosts_and_tcp_between_them() -> None:
    found: Any = load({"backend": "hybrid"}, environ={}).backend_config("hybrid")
    assert found.routes.model_dump(exclude_none=True) == {"intra": "shm", "inter": "tcp"}
    with pytest.raises(ConfigError, match=r"routes = 'tcp': expected a table\..* such as \{ cpu = \"tcp\""):
        load({"backends": {"hybrid": {"routes": "tcp"}}}, environ={}).backend_config("hybrid")


@pytest.mark.parametrize("missing", ["shm", "tcp"])
def test_without_a_table_of_routes_a_part_that_is_missing_is_named(missing: str) -> None:
    with pytest.raises(oa.PluginError, match=f"routes.*'{missing}'.*no:oneaccord-{missing}"):
        load({"backend": "hybrid", "plugins": [f"no:oneaccord-{missing}"]}, environ={}, manager=PluginManager()).runnable(
            "hybrid"
        )


@pytest.mark.parametrize(
    ("cards", "hosts", "each"),
    [
        ([Gpus(0)], [0], False),
        ([Gpus(1)], [0], True),
        ([Gpus(1), Gpus(1)], [0, 0], False),
        ([Gpus(1), Gpus(1)], [0, 1], True),
        ([Gpus(2), Gpus(2), Gpus(1)], [0, 0, 1], True),
        ([Gpus(2), Gpus(2), Gpus(0)], [0, 0, 1], False),
        ([Gpus(1, "0"), Gpus(1, "1")], [0, 0], True),
        ([Gpus(1, "0"), Gpus(0, "-1")], [0, 0], False),
    ],
)
def test_gpus_have_a_route_if_each_rank_has_one(cards: list[Gpus], hosts: list[int], each: bool) -> None:
    assert have_one_each(cards, hosts) is each


@pytest.mark.parametrize(
    ("visible", "count"), [(None, 2), ("", 0), ("1", 1), ("0,1", 2), ("0,-1,1", 1), ("-1", 0), ("0,1,2", 2)]
)
def test_gpus_are_those_of_the_driver_that_are_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, visible: str | None, count: int
) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpus_here(tmp_path) == Gpus(count, visible or "")


def test_routes_may_stand_in_variables() -> None:
    variables = {"ONEACCORD_BACKENDS__HYBRID__ROUTES__INTRA": "shm", "ONEACCORD_BACKENDS__HYBRID__ROUTES__INTER": "tcp"}
    found: Any = load({}, environ=variables).backend_config("hybrid")
    assert (found.routes.intra, found.routes.inter, found.routes.cpu) == ("shm", "tcp", None)


def never(group: oa.Group) -> None:
    raise AssertionError


def test_a_name_that_nobody_has_is_unknown_and_the_nearest_is_told() -> None:
    for outcome in thread_world(never, 2, "hybrid", config=config(cpu="tpc")):
        assert isinstance(outcome, oa.UnknownBackendError)
    assert "there is no backend 'tpc'" in str(outcome)
    assert "did you mean 'tcp'?" in str(outcome)


def test_before_any_rank_starts_a_part_is_looked_for_and_who_names_it_is_told(
    register: Callable[..., str], tmp_path: Path
) -> None:
    broken = register(never, devices=("cuda",), probe=lambda: "there is no GPU", install="pip install oneaccord[star]")
    file = tmp_path / "oneaccord.toml"
    file.write_text(f'backend = "hybrid"\n[backends.hybrid.routes]\ncpu = "tcp"\ncuda = "{broken}"\n')
    with pytest.raises(BackendUnavailableError) as caught:
        load(file, environ={}).runnable("hybrid")
    assert str(caught.value) == (
        f"{file}: backends.hybrid.routes.cuda = {broken!r}: the backend {broken!r} of this process cannot run here: there is no GPU; "
        "try: pip install oneaccord[star]"
    )
    with pytest.raises(oa.UnknownBackendError) as unknown:
        load(None, environ={"ONEACCORD_BACKENDS__HYBRID__ROUTES__CPU": "tpc"}).runnable("hybrid")
    assert str(unknown.value).startswith(
        "environment variable ONEACCORD_BACKENDS__HYBRID__ROUTES__CPU: backends.hybrid.routes.cpu = 'tpc': there is no backend 'tpc'"
    )
    assert (unknown.value.key, unknown.value.value) == ("backends.hybrid.routes.cpu", "tpc")


def test_a_part_that_is_not_installed_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    from oneaccord.config.plugins import manager

    everything = manager.installed
    monkeypatch.setattr(manager, "installed", lambda group: tuple(each for each in everything(group) if each.name != "shm"))
    for outcome in thread_world(never, 2, "hybrid", config=config(cpu="tcp", p2p="shm")):
        assert isinstance(outcome, BackendUnavailableError)
    assert "the backend 'hybrid' should be composed of 'shm'" in str(outcome)
    assert str(outcome).endswith("install it with: " + install_command("pip install 'oneaccord[shm]'"))


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_part_that_cannot_run_is_named_with_its_command(register: Callable[..., str], world_size: int) -> None:
    broken = register(never, devices=("cuda",), probe=lambda: "there is no GPU", install="pip install oneaccord[star]")
    outcomes = thread_world(never, world_size, "hybrid", config=config(cpu="tcp", cuda=broken))
    assert {type(outcome) for outcome in outcomes} == {BackendUnavailableError}
    assert (
        str(outcomes[0])
        == f"the backend {broken!r} of this process cannot run here: there is no GPU; try: pip install oneaccord[star]"
    )


def test_a_part_s_own_table_is_checked() -> None:
    tables = {"hybrid": {"routes": {"cpu": "tcp"}}, "tcp": {"spin_us": -1}}
    for outcome in thread_world(never, 2, "hybrid", config={"backend": "hybrid", "backends": tables}):
        assert isinstance(outcome, ConfigError)
        assert "backends.tcp.spin_us = -1" in str(outcome)


def test_a_part_s_own_table_counts(counting: Callable[[str], str]) -> None:
    name = counting("cpu")
    seen = []

    def program(group: oa.Group) -> None:
        seen.append(group.backend(name)._config.spin_us)

    tables = {"hybrid": {"routes": {"cpu": name}}, name: {"spin_us": 7}}
    must(thread_world(program, 2, "hybrid", config={"backend": "hybrid", "backends": tables}))
    assert seen == [7, 7]


@pytest.mark.parametrize(
    ("routes", "said"),
    [
        ({"cpu": "gpu"}, "routes.cpu is 'gpu', which moves no arrays in host memory"),
        ({"intra": "a", "inter": "gpu"}, "routes.inter is 'gpu', which moves no arrays in host memory"),
        ({"cpu": "a", "barrier": "gpu", "cuda": "gpu"}, "routes.barrier is 'gpu', which moves no arrays in host memory"),
        ({"cpu": "a", "cuda": "a"}, "routes.cuda is 'a', which moves no arrays on GPUs"),
    ],
)
def test_a_part_that_cannot_serve_its_route_is_refused_before_any_is_made(
    bootstrap: Callable[..., Any], routes: dict[str, str], said: str
) -> None:
    from oneaccord_hybrid.backend import HybridBackend

    given = bootstrap(**routes)
    with pytest.raises(ConfigError) as caught:
        HybridBackend(given)
    assert said in str(caught.value)
    assert given.log == []


def test_a_backend_that_is_composed_of_itself_by_way_of_another_is_refused(register: Callable[..., str]) -> None:
    names: list[str] = []
    names.append(register(lambda bootstrap: bootstrap.part(names[0])))
    for outcome in thread_world(never, 2, "hybrid", config=config(cpu=names[0])):
        assert isinstance(outcome, ConfigError)
        assert str(outcome) == f"'hybrid' -> {names[0]!r} -> {names[0]!r}: a backend cannot be a part of itself"
