"""The launcher of ssh, without a server."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from oneaccord.api import Ask, Deadline, Host, UsageError
from oneaccord_ssh.config import SshConfig
from oneaccord_ssh.launcher import SshLauncher
from oneaccord_ssh.plugin import register_launchers


def hosts_of(ask: Ask, tmp_path: Path, *hosts: str, **options: object) -> list[Host]:
    if shutil.which("ssh") is None:
        pytest.skip("there is no ssh")
    file = tmp_path / "config"
    file.write_text("Host alias\n  HostName 10.1.2.3\n")
    return list(SshLauncher(SshConfig(hosts=hosts, config_file=str(file), **options)).allocate(ask, Deadline(60)))


def test_hosts_without_slots_share_the_other_ranks(tmp_path: Path) -> None:
    found = hosts_of(Ask(8), tmp_path, "a:3", "b", "c")
    assert [(host.name, host.slots) for host in found] == [("a", 3), ("b", 3), ("c", 3)]
    assert {(host.python, host.folder) for host in found} == {(sys.executable, str(Path.cwd()))}


def test_hosts_have_the_address_of_ssh_configuration(tmp_path: Path) -> None:
    found = hosts_of(Ask(3), tmp_path, "alias", "b", "c", addresses={"c": "10.9.9.9"}, pythons={"b": "/opt/python"})
    assert [host.address for host in found] == ["10.1.2.3", "b", "10.9.9.9"]
    assert [host.python for host in found] == [sys.executable, "/opt/python", sys.executable]


@pytest.mark.parametrize(
    ("hosts", "message"),
    [((), "no hosts"), (("a:2", "a:2"), "named twice"), (("a:x",), "'a:x' is no host"), (("-oProxyCommand=x",), "is no host")],
)
def test_hosts_that_cannot_be_are_refused(tmp_path: Path, hosts: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        hosts_of(Ask(2), tmp_path, *hosts)


def test_command_quotes_words_and_asks_for_no_password() -> None:
    (spec,) = register_launchers()
    assert (spec.name, spec.kind) == ("ssh", "hosts")
    launcher = SshLauncher(SshConfig(user="ada", port=2200, identity_file="/k", args=("-v",), connect_timeout_s=7))
    command = launcher.command(Host("n1", "10.0.0.1", 2), ["python3", "-c", "print('a b')"])
    assert command[:8] == ["ssh", "-l", "ada", "-p", "2200", "-i", "/k", "-v"]
    assert "BatchMode=yes" in command
    assert "ConnectTimeout=7" in command
    assert command[-3:] == ["--", "n1", "exec python3 -c 'print('\"'\"'a b'\"'\"')'"]
    launcher.release()
    launcher.release()
