"""Configs as dataclasses: a table that needs no pydantic gives what pydantic would have given."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from manyhands.api import BackendConfig
from manyhands.config.models import as_dict, as_it_stands, check, is_config, model_of
from manyhands.config.settings import RendezvousSettings, Settings

if TYPE_CHECKING:
    from collections.abc import Callable
    from subprocess import CompletedProcess


@dataclass(frozen=True)
class Several:
    """One field of each type, and limits."""

    needed: str
    text: str | None = None
    flag: bool = False
    count: int = field(default=2, metadata={"ge": 1, "le": 1 << 60, "description": "a whole number"})
    number: float = field(default=0.5, metadata={"gt": -1, "lt": 1e300})
    perhaps: float | None = field(default=None, metadata={"gt": 0, "allow_inf_nan": False})
    either: int | float = 0
    word: str = field(default="a", metadata={"pattern": r"^\S+$"})
    names: list[str] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)
    tables: dict[str, dict[str, Any]] = field(default_factory=dict)
    rendezvous: RendezvousSettings = field(default_factory=RendezvousSettings)


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([0, 1, 60, 2**53 + 1, 10**400])
    | st.floats()
    | st.text(st.characters())
    | st.sampled_from(
        ["30", " 30", "0.5", "1e3", "-1", "true", "0x1", "٣", "inf", "a:1", "a:70000", "1_0", "\ud800", "007", "9" * 400]
    )
    | st.binary(max_size=2)
)
values = st.recursive(
    scalars,
    lambda below: (
        st.lists(below, max_size=2) | st.dictionaries(st.sampled_from(["a", "é", "address", "timeout_s", 3]), below, max_size=2)
    ),
    max_leaves=3,
)


def tables(kind: type[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(st.sampled_from([each.name for each in fields(kind)] + ["unknown"]), values, max_size=3)


@example((Several, {"needed": "", "either": 7}))
@example((Several, {"needed": "", "either": 7.0}))
@given(
    tables(Settings).map(lambda table: (Settings, table))
    | tables(Several).map(lambda table: (Several, {"needed": "", **table}))
)
def test_a_table_that_needs_no_pydantic_gives_what_pydantic_gives(given: tuple[type[Any], dict[str, Any]]) -> None:
    kind, table = given
    config = as_it_stands(kind, table)

    if config is not None:
        assert repr(as_dict(config)) == repr(model_of(kind).model_validate(table).model_dump())


@pytest.mark.parametrize(
    "table",
    [
        {},
        {"backend": "tcp", "timeout_s": 30, "native": False, "plugins": ["no:gloo"], "algorithms": {"all_reduce": "ring"}},
        {"timeout_s": "30", "ranks_per_host": "4", "rendezvous": {"address": "[::1]:29500", "timeout_s": 2.5}},
        {"backends": {"tcp": {"spin_us": 0}, "shm": {}}},
    ],
    ids=str,
)
def test_what_is_usual_needs_no_pydantic(table: dict[str, Any]) -> None:
    config = as_it_stands(Settings, table)

    assert repr(as_dict(config)) == repr(model_of(Settings).model_validate(table).model_dump())


def test_a_config_that_pydantic_made_is_the_dataclass_too() -> None:
    config, wrong = check(Settings, {"gpu_fallback": "host", "rendezvous": {"secret_file": "secret"}})

    assert wrong is None
    assert (type(config), type(config.rendezvous)) == (Settings, RendezvousSettings)
    assert (config.gpu_fallback, config.rendezvous.secret_file.name, config.timeout_s) == ("host", "secret", 60.0)


def test_the_values_of_a_config_are_its_own() -> None:
    words = ["no:gloo"]
    config = as_it_stands(Settings, {"plugins": words})
    words.append("no:tcp")

    assert config.plugins == ["no:gloo"]


def test_a_config_is_a_frozen_dataclass_or_a_model() -> None:
    class Undecorated(Several):
        more: int = 0

    thawed = dataclass(type("Thawed", (), {}))

    assert is_config(Several)
    assert is_config(BackendConfig)
    assert not any(map(is_config, (Undecorated, thawed, dict, int, Several(""), "Several")))


PROGRAM = """
import sys
import numpy
before = set(sys.modules)
import manyhands

with manyhands.init({backend!r}, timeout_s=30) as group:
    assert group.all_reduce(numpy.ones(2))[0] == group.world_size == 2
    # The dearest of what was loaded without a need, or of what would be.
    print(*sorted({{"asyncio", "difflib", "email", "importlib.metadata", "importlib.resources", "pydantic", "pydantic_core", "subprocess"}} & set(sys.modules) - before))
"""


@pytest.mark.parametrize("backend", ["auto", "tcp"])
def test_a_rank_loads_nothing_dear_to_make_its_first_call(
    backend: str, run_python: Callable[..., CompletedProcess[str]], tmp_path: Any
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM.format(backend=backend))

    words = ("-n", "2", "--no-fork", "--no-prefix", "--backend", backend, "program.py")
    done = run_python("-m", "manyhands", "run", *words, PYTHONSAFEPATH="1")  # a variable with which none is forked for the test

    assert (done.returncode, done.stderr, done.stdout) == (0, "", "\n\n")
