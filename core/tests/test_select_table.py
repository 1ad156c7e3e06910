"""Table files: what they may hold, what they change, and what is said of wrong ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oneaccord.config import load
from oneaccord.config.plugins import PluginManager, Switches
from oneaccord.config.select import Rule, Selector, default_rules, read_table, write_table
from oneaccord.config.selection import make_selector
from oneaccord.errors import ConfigError
from oneaccord.schedule.steps import Collective

ALL_REDUCE, BROADCAST = Collective.ALL_REDUCE, Collective.BROADCAST

numbers = st.none() | st.integers(1, 2**40)


@st.composite
def rules(draw: st.DrawFn) -> Rule:
    """A row with any conditions that do not exclude each other."""
    bounds: dict[str, Any] = {}
    for what in ("bytes", "world", "hosts"):
        low, high = draw(numbers), draw(numbers)
        if low is not None and high is not None:
            low, high = min(low, high), max(low, high)
        bounds |= {f"min_{what}": low, f"max_{what}": high}
    return Rule(
        draw(st.sampled_from(Collective)),
        draw(st.text(min_size=1)),
        reason=draw(st.text()),
        power_of_two=draw(st.booleans()),
        reproducible=draw(st.booleans()),
        uneven=draw(st.booleans()),
        min_ranks_per_host=draw(numbers),
        segments=draw(st.none() | st.integers(1, 64)),
        **bounds,
    )


def plain(rule: Rule) -> dict[str, Any]:
    """Return a rule without the place where it stands."""
    return {name: getattr(rule, name) for name in rule.__slots__ if name not in ("origin", "file")}


@given(given_rules=st.lists(rules(), max_size=5))
def test_what_is_written_is_read_again(tmp_path_factory: pytest.TempPathFactory, given_rules: list[Rule]) -> None:
    path = tmp_path_factory.mktemp("tables") / "table.toml"
    path.write_text(write_table(given_rules, ["a heading", ""]), encoding="utf-8")
    read = read_table(path)
    # Rows of one collective keep their order; collectives stand together in a TOML file.
    for collective in Collective:
        wanted = [plain(rule) for rule in given_rules if rule.collective is collective]
        wanted += [plain(rule) for rule in default_rules() if rule.collective is collective]
        assert [plain(rule) for rule in read if rule.collective is collective] == wanted


def test_the_rows_of_a_file_come_before_those_of_oneaccord(tmp_path: Path) -> None:
    path = tmp_path / "table.toml"
    path.write_text('[[all_reduce]]\nalgorithm = "ring"\nmax_bytes = 16\nmax_world = 4\n')
    read = read_table(path)
    assert read[0] == Rule(ALL_REDUCE, "ring", 16, 4, origin=f"{path}: all_reduce, row 1", file=str(path))
    assert read[1:] == default_rules()
    chooser = Selector(read)
    assert chooser.choose(ALL_REDUCE, 16, 4).algorithm.name == "ring"
    assert chooser.choose(ALL_REDUCE, 16, 5) == Selector().choose(ALL_REDUCE, 16, 5)
    assert chooser.choose(BROADCAST, 16, 4) == Selector().choose(BROADCAST, 16, 4)


def test_sizes_are_explained_where_they_are_round() -> None:
    text = write_table([Rule(ALL_REDUCE, "ring", 3 << 20, min_bytes=1000)])
    assert "max_bytes = 3145728  # 3 MiB\n" in text
    assert "min_bytes = 1000\n" in text


ROW = '[[all_reduce]]\nalgorithm = "ring"\n'


@pytest.mark.parametrize(
    ("text", "key", "value", "words"),
    [
        (
            ROW.replace("all_reduce", "all_redcue"),
            "all_redcue",
            ...,
            ["no collective 'all_redcue'", "did you mean 'all_reduce'?"],
        ),
        ("all_reduce = 3", "all_reduce", 3, ["all_reduce = 3", "[[all_reduce]]"]),
        ("[all_reduce]\nalgorithm = 'ring'", "all_reduce", ..., ["expected rows"]),
        (ROW + "max_byte = 8", "all_reduce.max_byte", 8, ["row 1: max_byte = 8", "did you mean 'max_bytes'?", "min_world"]),
        (ROW + ROW + "max_world = 0", "all_reduce.max_world", 0, ["all_reduce, row 2: max_world = 0", "1 or more"]),
        (ROW + "max_bytes = '1KiB'", "all_reduce.max_bytes", "1KiB", ["max_bytes = '1KiB'", "a whole number, 0 or more"]),
        (ROW + "max_hosts = true", "all_reduce.max_hosts", True, ["max_hosts = True", "a whole number"]),
        (ROW + "power_of_two = 2", "all_reduce.power_of_two", 2, ["power_of_two = 2", "true or false"]),
        (ROW + "segments = 65", "all_reduce.segments", 65, ["segments = 65", "64 at most"]),
        (ROW + "reason = 1", "all_reduce.reason", 1, ["reason = 1", "a text in quotes"]),
        (ROW + "min_world = 5\nmax_world = 4", "all_reduce.min_world", 5, ["min_world = 5 is more than max_world = 4"]),
        ("[[all_reduce]]\nmax_world = 4", "all_reduce.algorithm", None, ["row 1: algorithm is missing"]),
    ],
)
def test_what_is_wrong_in_a_table_is_told_with_file_row_key_and_remedy(
    tmp_path: Path, text: str, key: str, value: object, words: list[str]
) -> None:
    path = tmp_path / "table.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_table(path)
    assert str(caught.value).startswith(f"{path}: ")
    for word in words:
        assert word in str(caught.value)
    assert (caught.value.file, caught.value.key) == (str(path), key)
    assert value is ... or caught.value.value == value


def test_a_table_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml' does not exist"):
        read_table(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("[[all_reduce]")
    with pytest.raises(ConfigError, match=r"bad.toml: this is not valid TOML: .*line 1"):
        read_table(tmp_path / "bad.toml")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_table(tmp_path)


# What the config makes of it


@pytest.fixture
def manager() -> PluginManager:
    return PluginManager(Switches(autoload=False))


def test_the_config_names_a_table(tmp_path: Path, manager: PluginManager) -> None:
    table = tmp_path / "tuned.toml"
    table.write_text(ROW + "max_world = 4\nreason = 'measured'\n")
    resolved = load({"selection": str(table), "algorithms": {"broadcast": "chain"}}, environ={}, manager=manager)
    chooser = make_selector(resolved, manager)
    assert chooser.choose(ALL_REDUCE, 8, 4).reason == "measured"
    assert chooser.choose(ALL_REDUCE, 8, 5) == Selector().choose(ALL_REDUCE, 8, 5)
    assert chooser.choose(BROADCAST, 8, 4).algorithm.name == "chain"
    default = make_selector(load({}, environ={}, manager=manager), manager)
    assert (default.digest == Selector().digest, default.digest == chooser.digest) == (True, False)


def test_a_relative_table_lies_in_the_working_directory(
    tmp_path: Path, manager: PluginManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tuned.toml").write_text(ROW)
    (tmp_path / "oneaccord.toml").write_text('selection = "tuned.toml"\n')
    monkeypatch.chdir(tmp_path)
    resolved = load(environ={}, manager=manager)
    assert make_selector(resolved, manager).choose(ALL_REDUCE, 8, 2).algorithm.name == "ring"


def test_a_wrong_table_is_a_wrong_configuration(tmp_path: Path, manager: PluginManager) -> None:
    config, table = tmp_path / "oneaccord.toml", tmp_path / "tuned.toml"
    config.write_text(f'selection = "{table}"\ntimeout_s = 0\n')
    table.write_text(ROW + "max_byte = 8\n")
    with pytest.raises(ConfigError) as caught:
        load(config, environ={}, manager=manager)
    assert "timeout_s" in str(caught.value)
    config.write_text(f'selection = "{table}"\n[algorithms]\nall_redcue = "ring"\n')
    with pytest.raises(ConfigError) as caught:
        load(config, environ={}, manager=manager)
    first, second = str(caught.value).splitlines()
    assert "all_redcue" in first
    assert second.startswith(f"{config}: selection = '{table}': {table}: all_reduce, row 1: max_byte = 8: this key is unknown")
    config.write_text(f'selection = "{tmp_path / "none.toml"}"\n')
    with pytest.raises(ConfigError, match=r"oneaccord.toml: selection = .*none.toml.*does not exist") as caught:
        load(config, environ={}, manager=manager)
    assert (caught.value.file, caught.value.key) == (str(config), "selection")


def test_an_algorithm_that_is_not_there_is_told_with_its_place(tmp_path: Path, manager: PluginManager) -> None:
    table = tmp_path / "tuned.toml"
    table.write_text(ROW + ROW.replace("ring", "rin"))
    resolved = load({"selection": str(table)}, environ={}, manager=manager)
    with pytest.raises(ConfigError, match=r"tuned.toml: all_reduce, row 2 names .*'rin'.*did you mean 'ring'\?") as caught:
        make_selector(resolved, manager)
    assert (caught.value.file, caught.value.key) == (str(table), "all_reduce.algorithm")
    resolved = load({"algorithms": {"all_reduce": "rin"}}, environ={}, manager=manager)
    with pytest.raises(
        ConfigError, match=r"^config argument: algorithms.all_reduce = 'rin': .*did you mean 'ring'\?"
    ) as caught:
        make_selector(resolved, manager)
    assert (caught.value.file, caught.value.key) == ("config argument", "algorithms.all_reduce")


@pytest.mark.parametrize(
    ("environ", "values"),
    [
        ({}, (None, False, None)),
        ({"ONEACCORD_REPRODUCIBLE": "true", "ONEACCORD_RANKS_PER_HOST": "8"}, (None, True, 8)),
    ],
)
def test_the_other_settings_of_the_choice(manager: PluginManager, environ: dict[str, str], values: tuple[object, ...]) -> None:
    settings = load({}, environ=environ, manager=manager).settings
    assert (settings.selection, settings.reproducible, settings.ranks_per_host) == values


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "many"])
def test_ranks_per_host_is_a_positive_whole_number(manager: PluginManager, value: object) -> None:
    with pytest.raises(ConfigError, match="ranks_per_host") as caught:
        load({"ranks_per_host": value}, environ={}, manager=manager)
    assert caught.value.key == "ranks_per_host"
