"""``oneaccord run``: what belongs to it and what to the script, who starts the ranks, and what is refused first."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

from oneaccord.cli.run import run
from oneaccord.contract.backend import BackendSpec, LaunchRequest, NoConfig
from oneaccord.contract.hookspecs import hookimpl
from oneaccord.errors import BackendUnavailableError, ConfigError, OneAccordError, UsageError
from oneaccord.local import processes, resolve, starting
from oneaccord.local.launching import Launch

if TYPE_CHECKING:
    from pathlib import Path

    from oneaccord.config.plugins import PluginManager

requests: list[LaunchRequest] = []


def launcher_of_threads(request: LaunchRequest) -> int:
    """Stand in for a backend that starts its ranks itself."""
    requests.append(request)
    return 9


class Plugin:
    @hookimpl
    def oneaccord_register_backends(self) -> list[BackendSpec]:
        return [
            BackendSpec("wires", "processes", factory="os:getcwd", auto_priority=1),
            BackendSpec("threads", "threads", factory="os:getcwd", launcher=f"{__name__}:launcher_of_threads"),
            BackendSpec("broken", "never", factory="os:getcwd", probe=lambda: "no such card", install="pip install card"),
        ]


@pytest.fixture(autouse=True)
def _surroundings(manager: PluginManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager.register(Plugin(), "for tests")
    monkeypatch.setattr(resolve, "get_plugin_manager", lambda: manager)
    monkeypatch.setattr(starting, "fork_server", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text("")
    for name in ("ONEACCORD_SECRET", "ONEACCORD_BACKEND", "ONEACCORD_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    requests.clear()


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Launch, dict[str, str]]]:
    """The jobs that would have been started; each ends with the exit code 4."""
    started: list[tuple[Launch, dict[str, str]]] = []

    def run_job(job: Launch, environ: dict[str, str], *_: object) -> int:
        started.append((job, environ))
        return 4

    monkeypatch.setattr(processes, "run_job", run_job)
    return started


def call(*words: str) -> int:
    return run(words)


def test_the_exit_code_is_that_of_the_job(jobs: list[Any]) -> None:
    assert call("-n", "3", "script.py") == 4
    assert jobs[0][0] == Launch("script.py", ranks=3)


def test_what_follows_the_script_is_its_own(jobs: list[Any]) -> None:
    words = ["-n", "7", "--help", "-m", "--", "--backend=x", "y"]
    call("-n", "2", "script.py", *words)
    assert jobs[0][0].args == tuple(words)
    assert jobs[0][0].ranks == 2


def test_a_module_and_its_arguments(jobs: list[Any]) -> None:
    call("-n", "2", "-m", "json.tool", "--help")
    assert (jobs[0][0].target, jobs[0][0].is_module, jobs[0][0].args) == ("json.tool", True, ("--help",))


def test_the_choices_reach_the_ranks(jobs: list[Any], tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text("timeout_s = 5\n")
    call("--backend", "wires", "--config", "my.toml", "--no-prefix", "script.py")
    job, _ = jobs[0]
    assert job.environ == {"ONEACCORD_BACKEND": "wires", "ONEACCORD_CONFIG": str(tmp_path / "my.toml")}
    assert not job.prefix


def test_several_hosts(jobs: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEACCORD_SECRET", "s")
    call("-n", "4", "--nnodes", "2", "--node-rank", "1", "--rendezvous", "node1:29500", "script.py")
    assert jobs[0][0] == Launch("script.py", ranks=4, nodes=2, node_rank=1, rendezvous="node1:29500")


def test_address_and_secret_of_several_hosts_may_come_from_the_config(jobs: list[Any], tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("hush\n")
    (tmp_path / "oneaccord.toml").write_text('[rendezvous]\naddress = "node1:29500"\nsecret_file = "secret"\n')
    call("--nnodes", "2", "script.py")
    job, environ = jobs[0]
    assert job.rendezvous == "node1:29500"
    assert environ["ONEACCORD_SECRET"] == "hush"


@pytest.mark.parametrize("hosts", ["1", "2"])
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b" \n", "which is empty"),
        (b"hu\0sh", "which holds a zero byte"),
        (None, "which cannot be read: No such file or directory"),
    ],
    ids=["empty", "zero byte", "absent"],
)
def test_a_secret_file_that_cannot_be_is_refused_before_any_rank(
    jobs: list[Any], tmp_path: Path, hosts: str, content: bytes | None, words: str
) -> None:
    if content is not None:
        (tmp_path / "secret").write_bytes(content)
    (tmp_path / "oneaccord.toml").write_text('[rendezvous]\naddress = "node1:29500"\nsecret_file = "secret"\n')

    with pytest.raises(ConfigError, match=f"^rendezvous.secret_file is 'secret', {words}"):
        call("--nnodes", hosts, "script.py")
    assert jobs == []


def test_a_secret_need_not_be_utf_8(jobs: list[Any], tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"h\xfcsh\n")
    (tmp_path / "oneaccord.toml").write_text('[rendezvous]\nsecret_file = "secret"\n')

    call("-n", "2", "script.py")

    assert os.fsencode(jobs[0][1]["ONEACCORD_SECRET"]) == b"h\xfcsh"


@pytest.mark.parametrize("chosen_by", ["argument", "file", "variable"])
def test_a_backend_may_start_its_ranks_itself(
    jobs: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen_by: str
) -> None:
    words: list[str] = []
    if chosen_by == "argument":
        words = ["--backend", "threads"]
    elif chosen_by == "file":
        (tmp_path / "oneaccord.toml").write_text('backend = "threads"\n')
    else:
        monkeypatch.setenv("ONEACCORD_BACKEND", "threads")
    monkeypatch.setenv("PYTHONHASHSEED", "17")
    assert call("-n", "3", *words, "script.py", "a", "-b") == 9
    given = ({"ONEACCORD_BACKEND": "threads"} if words else {}) | {"PYTHONHASHSEED": "17"}
    assert requests == [LaunchRequest("script.py", False, ("a", "-b"), 3, "threads", given, True, NoConfig())]
    assert jobs == []


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        (["missing.py"], UsageError, "missing.py"),
        (["-n", "0", "script.py"], UsageError, "-n 0"),
        (["--backend", "wirse", "script.py"], OneAccordError, "wires"),
        (["--backend", "broken", "script.py"], BackendUnavailableError, "no such card; try: pip install card"),
        (["--config", "no.toml", "script.py"], ConfigError, "no.toml"),
        (["--nnodes", "2", "--rendezvous", "h:1", "script.py"], ConfigError, "ONEACCORD_SECRET"),
        (["--backend", "threads", "--rendezvous", "h:1", "script.py"], UsageError, "'threads'"),
        (["--backend", "threads", "missing.py"], UsageError, "missing.py"),
    ],
)
def test_mistakes_are_found_before_anything_starts(
    jobs: list[Any], words: list[str], error: type[Exception], message: str
) -> None:
    with pytest.raises(error) as caught:
        call(*words)
    assert message in str(caught.value)
    assert jobs == []
    assert requests == []


def test_a_mistyped_option_is_no_script(jobs: list[Any]) -> None:
    with pytest.raises(UsageError, match="has no option --bakend; write --backend"):
        call("--bakend", "wires", "script.py")
    assert jobs == []
