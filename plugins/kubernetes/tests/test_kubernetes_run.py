"""``oneaccord run --on kubernetes`` with the real client, against a stand-in for a cluster that runs the commands of its pods."""

from __future__ import annotations

import re
import signal
import time
from typing import Any

import pytest

pytestmark = [pytest.mark.engines, pytest.mark.timeout(150)]

ADDS = """
import numpy as np
import oneaccord as oa

with oa.init(timeout_s=60) as group:
    print("of", group.world_size, group.all_reduce(np.array([group.rank]))[0], flush=True)
    group.barrier()
"""
DIES = """
import sys, time
import oneaccord as oa

with oa.init(timeout_s=60) as group:
    print("there", flush=True)
    group.barrier()
    if group.rank == 3:
        raise ValueError("no good")
    group.barrier()
"""
LEAVES = """
import os, time
import oneaccord as oa

group = oa.init(timeout_s=60)
group.barrier()
if group.rank >= 2:
    os._exit(7)
time.sleep(1)
os._exit(0)
"""
WAITS = """
import time
import oneaccord as oa

with oa.init(timeout_s=60) as group:
    print("there", flush=True)
    time.sleep(120)
"""


@pytest.mark.parametrize("kind", ["job", "jobset"])
def test_kubernetes_pods_are_one_job(cluster: Any, kind: str) -> None:
    done = cluster.run(ADDS, "--option", f"kind={kind}")
    assert done.returncode == 0, done
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] of 4 6" for rank in range(4)]
    assert "submitted digits to the namespace team: 2 pods of 2 ranks" in done.stderr
    job = cluster.objects[f"{kind}s", "digits"]
    belongings = [each for (plural, _), each in cluster.objects.items() if plural in ("secrets", "services")]
    assert len(belongings) == {"job": 2, "jobset": 1}[kind]
    for each in belongings:
        assert each["metadata"]["ownerReferences"][0]["uid"] == job["metadata"]["uid"]
    # The secret is in no command line, nor in the object that people look at.
    secret = cluster.objects["secrets", "digits"]["stringData"]["secret"]
    assert len(secret) == 64
    assert secret not in str(cluster.commands) + str(job)


def test_kubernetes_first_cause_and_its_code_come_back(cluster: Any) -> None:
    done = cluster.run(DIES)
    assert done.returncode == 1
    last = done.stderr.splitlines()
    assert re.fullmatch(r"oneaccord run: the pod digits-1-abcde, ranks 2 to 3, failed first: exit code 1", last[-1]), (
        done.stderr
    )
    assert "ValueError: no good" in done.stderr
    assert done.stderr.count("oneaccord run: rank 3 failed first: exit code 1") == 1
    assert "failed first on this host" not in done.stderr + done.stdout  # of the other pod, which only heard of it
    assert ("jobs", "digits") in cluster.objects  # kubectl can look at it


def test_kubernetes_output_survives_a_cut_connection(cluster: Any) -> None:
    cluster.cuts = 3
    program = ADDS + "\nfor number in range(50):\n    print(number, flush=True)\n    __import__('time').sleep(0.02)\n"
    done = cluster.run(program, "--no-prefix", ranks="2")
    assert (done.returncode, cluster.cuts) == (0, 0), done
    lines = done.stdout.splitlines()
    for number in range(50):
        assert lines.count(str(number)) == 2


def until(cluster: Any, count: int) -> None:
    end = time.monotonic() + 60
    while sum("there" in line for pod in cluster.pods for line in pod.lines) < count:
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_kubernetes_signal_deletes_the_job(cluster: Any, number: signal.Signals) -> None:
    with cluster.start(WAITS) as process:
        until(cluster, 4)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number, err
    assert (sorted(out.splitlines()), cluster.objects) == ([f"[{rank}] there" for rank in range(4)], {})
    assert all(pod.code is not None for pod in cluster.pods)
    assert f"ended by {number.name}" in err


def test_kubernetes_job_continues_without_a_dead_pod(cluster: Any) -> None:
    done = cluster.run(LEAVES, "--keep-going")
    assert done.returncode == 0, done
    assert cluster.objects["jobs", "digits"]["spec"]["backoffLimitPerIndex"] == 0
    assert "the pod digits-1-abcde, ranks 2 to 3, failed, and the others continued: exit code 7" in done.stderr


@pytest.mark.parametrize("kind", ["jobs", "secrets"])
def test_kubernetes_refusal_is_told_and_leaves_nothing(cluster: Any, kind: str) -> None:
    cluster.refuses[kind] = f'{kind} is forbidden: User "me" cannot create it'
    done = cluster.run(ADDS)
    assert (done.returncode, cluster.objects) == (2, {})
    assert f'in the namespace team: {kind} is forbidden: User "me" cannot create it' in done.stderr


def test_kubernetes_output_that_may_not_be_read_is_told(cluster: Any) -> None:
    cluster.refuses["log"] = "pods/log is forbidden"
    done = cluster.run(ADDS)
    assert (done.returncode, done.stdout) == (0, "")
    assert "the output of the pod digits-1-abcde cannot be read: the cluster refuses read pod log" in done.stderr


def test_kubernetes_pods_that_do_not_begin_are_told(cluster: Any) -> None:
    cluster.waits = {"reason": "ImagePullBackOff", "message": "no such image: x"}
    done = cluster.run(ADDS, "--option", "start_timeout_s=2")
    assert (done.returncode, cluster.objects) == (2, {})
    assert "2 of 2 pods did not begin in time; the job is deleted." in done.stderr
    assert "digits-0-abcde waits: ImagePullBackOff: no such image: x" in done.stderr


def test_kubernetes_job_that_someone_deletes_is_told(cluster: Any) -> None:
    with cluster.start(WAITS) as process:
        until(cluster, 4)
        cluster.objects.pop(("jobs", "digits"))
        for pod in cluster.pods:
            pod.kill()
        _, err = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "failed first: exit code 143" in err


def test_kubernetes_cluster_out_of_reach_is_told(cluster: Any) -> None:
    cluster.server.shutdown()
    cluster.server.server_close()
    done = cluster.run(ADDS)
    assert done.returncode == 2
    assert "the cluster cannot be reached for create job" in done.stderr
    cluster.server.shutdown = lambda: None  # it is closed
