"""The table ``[backends.tcp]``: where ranks listen, and how connections are tuned."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.worlds import over_sockets

import oneaccord as oa
from oneaccord import Group
from oneaccord.config import load
from oneaccord_tcp.interfaces import address_of


def run(**tcp: Any) -> list[Any]:
    """Make a group and sum in it; return each rank's address and congestion control, or what it raised."""

    def program(group: Group) -> tuple[str, str]:
        assert group.all_reduce(np.ones(1))[0] == group.world_size
        backend: Any = group._job.backend
        sock = next(iter(backend._links.values()))[0]
        algorithm = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()
        return backend._addresses[group.rank][0], algorithm

    return over_sockets(program, **tcp)


def test_by_default_ranks_listen_where_they_met_and_one_host_is_not_paced() -> None:
    assert run() == [("127.0.0.1", "reno")] * 2


def test_the_interface_and_the_congestion_control_can_be_chosen() -> None:
    allowed = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control").read_text(encoding="ascii").split()
    other = next((name for name in allowed if name != "reno"), "reno")
    assert run(interface="lo", congestion_control=other) == [("127.0.0.1", other)] * 2


def test_a_host_is_listened_on_and_wins_over_the_interface() -> None:
    assert [result[0] for result in run(host="127.0.0.5", interface="no-such")] == ["127.0.0.5"] * 2


def test_an_unknown_interface_is_refused_with_those_that_there_are() -> None:
    results = run(interface="eth77")
    first = next(result for result in results if isinstance(result, oa.ConfigError))
    assert (first.key, first.value) == ("backends.tcp.interface", "eth77")
    assert "'eth77'" in str(first)
    assert "it has lo" in str(first) or ", lo" in str(first)
    assert all(isinstance(result, (oa.ConfigError, oa.AbortedError)) for result in results)


def test_a_host_of_another_machine_is_refused() -> None:
    results = run(host="198.51.100.7")
    first = next(result for result in results if isinstance(result, oa.RendezvousError))
    assert "198.51.100.7" in str(first)
    assert "no such address" in str(first)
    # It is the backend's own address that is wrong, on whichever rank; not the one where the ranks meet, which is rank 0's.
    for result in results:
        assert "rendezvous address" not in str(result)
        assert "rank 0 cannot listen" not in str(result) or result.rank == 0


def test_without_a_secret_only_loopback_is_listened_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ONEACCORD_SECRET", raising=False)
    results = run(host="0.0.0.0")
    first = next(result for result in results if isinstance(result, oa.AuthenticationError))
    assert "without a secret is refused" in str(first)


def test_a_host_that_means_every_address_can_be_dialled_by_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is told to the other ranks must lead to this host from theirs: 0.0.0.0 leads each to itself."""
    monkeypatch.setenv("ONEACCORD_SECRET", "a secret of the tests")
    assert [result[0] for result in run(host="0.0.0.0")] == ["127.0.0.1"] * 2


@pytest.mark.parametrize("value", [0, -1, (1 << 28) + 1])
def test_a_buffer_has_bounds(value: int) -> None:
    resolved = load({"backends": {"tcp": {"buffer_bytes": value}}}, environ={})
    with pytest.raises(
        oa.ConfigError, match=f"backends.tcp.buffer_bytes = {value}: it should be (greater|less) than or equal to"
    ):
        resolved.backend_config("tcp")


def test_the_address_of_an_interface() -> None:
    assert address_of("lo") == "127.0.0.1"
    with pytest.raises(oa.ConfigError, match="no such interface"):
        address_of("")


def test_a_congestion_control_that_the_host_lacks_is_refused_with_those_that_it_has() -> None:
    results = over_sockets(lambda group: group.rank, congestion_control="carrier_pigeon")
    for result in results:
        assert isinstance(result, oa.ConfigError), result
        assert "carrier_pigeon" in str(result)
        assert "auto, " in str(result)
        assert result.key == "backends.tcp.congestion_control"
