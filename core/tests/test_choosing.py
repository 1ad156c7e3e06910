"""What ``auto`` takes for ranks of one host and for ranks of several, as each rank lays it open and as the doctor tells it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import msgspec
import pytest

from oneaccord.config import load
from oneaccord.config.plugins import PluginManager
from oneaccord.config.plugins.choice import candidates, weigh
from oneaccord.errors import BackendUnavailableError, UnknownBackendError
from oneaccord.job.autobackend import _Candidate, _Card, _rank

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from subprocess import CompletedProcess

    from support.plugin_tools import PluginFactory


def test_candidates_come_the_best_first(plugins: PluginFactory, manager: PluginManager) -> None:
    plugins.backend("alpha", "factory='os:getcwd', auto_priority=1")
    plugins.backend("beta", "factory='os:getcwd', auto_priority=5, one_host=True")
    plugins.backend("gamma", "factory='os:getcwd', auto_priority=5, one_host=True")
    plugins.backend("delta", "factory='os:getcwd', auto_priority=9, probe=lambda: 'no GPU here'")

    specs, passed_over = candidates(manager)

    assert [spec.name for spec in specs] == ["beta", "gamma", "alpha"]
    assert passed_over == [("delta", "no GPU here")]
    assert weigh(manager)[0] == "beta"


def test_across_hosts_those_for_one_host_are_passed_over(plugins: PluginFactory, manager: PluginManager) -> None:
    plugins.backend("alpha", "factory='os:getcwd', auto_priority=1")
    plugins.backend("beta", "factory='os:getcwd', auto_priority=5, one_host=True")

    assert weigh(manager) == ("beta", [("alpha", "it can run, but beta comes before it")])
    assert weigh(manager, one_host=False) == ("alpha", [("beta", "it is for ranks of one host")])


def test_where_all_are_for_one_host_there_is_none_across_hosts(plugins: PluginFactory, manager: PluginManager) -> None:
    plugins.backend("beta", "factory='os:getcwd', auto_priority=5, one_host=True")

    assert weigh(manager, one_host=False) == (None, [("beta", "it is for ranks of one host")])


def test_without_any_candidate_there_is_nothing_to_choose_from(plugins: PluginFactory, manager: PluginManager) -> None:
    plugins.backend("alpha")

    with pytest.raises(BackendUnavailableError, match="alpha: it is used only if it is chosen by name"):
        candidates(manager)


def test_without_any_backend_only_installing_one_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oneaccord.config.plugins.manager.installed", lambda group: ())
    with pytest.raises(
        BackendUnavailableError, match="can run here: none is installed\ninstall one, for example with: pip install"
    ):
        candidates(PluginManager())


def test_a_blocked_backend_is_not_said_to_be_missing(plugins: PluginFactory, manager: PluginManager) -> None:
    plugins.backend("alpha", "factory='os:getcwd', auto_priority=1", distribution="dist-one")
    manager.switch(["no:Dist_One"])
    with pytest.raises(BackendUnavailableError) as caught:
        candidates(manager)
    assert "  alpha: it is blocked by the switch 'no:Dist_One'\n" in str(caught.value)
    assert "remove a switch" in str(caught.value)
    with pytest.raises(UnknownBackendError, match="blocked by the switch 'no:Dist_One'; remove it"):
        manager.describe("alpha")


@pytest.mark.parametrize("others", [True, False])
def test_the_doctor_tells_both(plugins: PluginFactory, run_python: Callable[..., CompletedProcess[str]], others: bool) -> None:
    plugins.backend("alpha", "factory='os:getcwd', auto_priority=1")
    plugins.backend("beta", f"factory='os:getcwd', auto_priority=5, one_host={others}")
    only = {"ONEACCORD_PLUGINS": "alpha,beta", "ONEACCORD_NO_AUTOLOAD": "1"}

    report = json.loads(run_python("-m", "oneaccord", "doctor", "--json", **only).stdout)
    lines = run_python("-m", "oneaccord", "doctor", **only).stdout.splitlines()

    assert report["auto"]["backend"] == "beta"
    assert report["auto"]["backend_on_several_hosts"] == ("alpha" if others else "beta")
    assert ("auto takes beta for ranks of one host" if others else "auto takes beta") in lines
    apart = "auto takes alpha for ranks of several hosts, or where beta does not start"
    assert (apart in lines) == others


def test_the_doctor_imports_factories_and_lists_modules_of_the_config(
    plugins: PluginFactory, run_python: Callable[..., CompletedProcess[str]], tmp_path: Path
) -> None:
    plugins.backend("alpha", "factory='os:getcwd', auto_priority=1")
    plugins.backend("beta", "factory='no_such_package:make', auto_priority=5")
    (tmp_path / "my_observers.py").write_text("")
    only = {"ONEACCORD_PLUGINS": "alpha,beta,my_observers", "ONEACCORD_NO_AUTOLOAD": "1"}

    report = json.loads(run_python("-m", "oneaccord", "doctor", "--json", **only).stdout)

    runs = {each["name"]: (each["available"], each["reason"]) for each in report["backends"]}
    assert runs["alpha"] == (True, None)
    assert not runs["beta"][0]
    assert "no_such_package" in runs["beta"][1]
    assert report["auto"]["backend"] == "alpha"
    assert [(each["name"], each["error"]) for each in report["extensions"]] == [("my_observers", None)]


NEAR, FAR, SLOW = (
    _Candidate("near", 9, one_host=True),
    _Candidate("far", 5, one_host=False),
    _Candidate("slow", 1, one_host=False),
)


def test_ranks_choose_in_one_order_from_what_all_have() -> None:
    cards = [_Card("x", [NEAR, FAR, SLOW]), _Card("x", [SLOW, NEAR])]

    names, passed_over = _rank([msgspec.msgpack.decode(msgspec.msgpack.encode(card), type=_Card) for card in cards])

    assert names == ["near", "slow"]
    assert passed_over == [("far", "rank 1 cannot run it")]


def test_ranks_of_several_systems_pass_over_what_is_for_one_host() -> None:
    names, passed_over = _rank([_Card("x", [NEAR, FAR]), _Card("y", [NEAR, FAR])])

    assert names == ["far"]
    assert passed_over == [("near", "it is for ranks of one host, but these are on several")]


@pytest.mark.parametrize(
    ("systems", "first"),
    [("xxyy", "both"), ("xxy", "both"), ("xyz", "far"), ("xxx", "near")],
    ids=["even", "uneven", "one rank", "one host"],
)
def test_a_composed_backend_is_for_several_hosts_with_several_ranks(systems: str, first: str) -> None:
    both = _Candidate("both", 7, one_host=False, composed=True)
    names, passed_over = _rank([_Card(system, [NEAR, both, FAR]) for system in systems])
    assert names[0] == first
    assert (("both", "it is for several hosts with several ranks each") in passed_over) == (first != "both")


def test_a_composed_backend_is_for_several_hosts_and_needs_its_parts(plugins: PluginFactory, manager: PluginManager) -> None:
    plugins.backend("alpha", "factory='os:getcwd', auto_priority=1")
    plugins.backend("both", "factory='os:getcwd', auto_priority=5, parts=lambda config: {'far': 'alpha'}")
    plugins.backend("torn", "factory='os:getcwd', auto_priority=9, parts=lambda config: {'far': 'absent'}")
    lacking = load({}, manager=manager).lacking
    place = "it is for several hosts with several ranks each"
    name, passed_over = weigh(manager, lacking)
    assert (name, dict(passed_over)["both"]) == ("alpha", place)
    assert "absent" in dict(passed_over)["torn"]
    assert weigh(manager, lacking, one_host=False)[0] == "both"
