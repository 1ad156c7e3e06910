"""What the launcher refuses before anything starts, and where it lets the ranks meet."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any

import pytest
from support.worlds import free_port

from oneaccord.errors import ConfigError, InvalidRankError, InvalidWorldSizeError, RendezvousError, UsageError
from oneaccord.local.launching import Launch
from oneaccord.local.meeting_place import arrange_meeting

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("job", "error", "words"),
    [
        ({"target": "missing.py"}, UsageError, "no script 'missing.py'"),
        ({"target": "numpy_"}, UsageError, "give -m"),
        ({"target": "no_such_module_here.inside", "is_module": True}, UsageError, "'no_such_module_here'"),
        ({"ranks": 0}, InvalidWorldSizeError, "-n 0"),
        ({"nodes": 0}, InvalidWorldSizeError, "--nnodes 0"),
        ({"nodes": 2, "node_rank": 2, "rendezvous": "h:1"}, InvalidRankError, "--node-rank 2"),
        ({"nodes": 2}, ConfigError, "--rendezvous host:port"),
        ({"nodes": 2, "rendezvous": "h:1"}, ConfigError, "ONEACCORD_SECRET"),
        ({"rendezvous": "nowhere"}, ConfigError, "'nowhere'"),
    ],
)
def test_what_cannot_run_is_refused(job: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error) as caught:
        Launch(**{"target": __file__} | job).validate({})
    assert words in str(caught.value)


def test_a_directory_needs_a_main(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"__main__\.py"):
        Launch(str(tmp_path)).validate({})
    (tmp_path / "__main__.py").write_text("")
    Launch(str(tmp_path)).validate({})


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RendezvousError, match=f"127.0.0.1:{port}: the port is in use"):
            arrange_meeting(Launch("x", rendezvous=f"127.0.0.1:{port}"), {})


def test_an_address_of_another_host_is_named() -> None:
    with pytest.raises(RendezvousError, match=r"192\.0\.2\.1:\d+: this host has no such address"):
        arrange_meeting(Launch("x", rendezvous="192.0.2.1:29500"), {})


def test_an_address_of_one_host_is_bound_as_given() -> None:
    port = free_port()
    meeting = arrange_meeting(Launch("x", rendezvous=f"127.0.0.1:{port}"), {})
    assert meeting.listener is not None
    with meeting.listener:
        assert meeting.listener.getsockname() == ("127.0.0.1", port)
    assert (meeting.host, meeting.port) == ("127.0.0.1", port)


def test_only_the_first_host_binds() -> None:
    assert arrange_meeting(Launch("x", nodes=2, node_rank=1, rendezvous="192.0.2.1:29500"), {}).listener is None
