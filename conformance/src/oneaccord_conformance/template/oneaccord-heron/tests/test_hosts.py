"""The launcher keeps the contract of oneaccord, and refuses what it cannot do."""

import oneaccord
import pytest
from oneaccord_conformance.launchers import check_launcher


def test_launcher_keeps_the_contract() -> None:
    findings = check_launcher("heron", {}, ranks=2, timeout_s=60, told=print)
    assert not [each.fault for each in findings if each.fault]


def test_launcher_runs_ranks_on_two_hosts() -> None:
    options = {"hosts": ["box1:1", "box2:2"]}
    found = oneaccord.launch(oneaccord.Group.all_gather_object, 3, on="heron", args=("x",), timeout_s=60, options=options)
    assert found == [["x"] * 3] * 3


@pytest.mark.parametrize("host", ["box1", "box1:0", ":4"])
def test_launcher_host_that_is_none_is_refused(host: str) -> None:
    with pytest.raises(oneaccord.UsageError, match="is no host"):
        oneaccord.launch(oneaccord.Group.barrier, 1, on="heron", timeout_s=60, options={"hosts": [host]})
