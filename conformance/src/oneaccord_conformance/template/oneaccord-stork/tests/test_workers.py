"""The launcher keeps the contract of oneaccord, and names a worker that was lost."""

import os
import signal

import oneaccord
import pytest
from oneaccord_conformance.launchers import check_launcher


def test_launcher_keeps_the_contract() -> None:
    findings = check_launcher("stork", {}, ranks=2, timeout_s=60, told=print)
    assert not [each.fault for each in findings if each.fault]


def test_launcher_worker_that_is_killed_is_named() -> None:
    with oneaccord.Ranks(2, on="stork") as ranks:
        pid = ranks.submit(os.getpid).result(60)
        with pytest.raises(oneaccord.RankError, match="killed by SIGKILL"):
            ranks.submit(os.kill, pid, signal.SIGKILL).result(60)


def test_launcher_refuses_more_workers_than_it_may_have() -> None:
    with pytest.raises(oneaccord.UsageError, match="most_workers is 1"):
        oneaccord.launch(oneaccord.Group.barrier, 2, on="stork", timeout_s=60, options={"most_workers": 1})
