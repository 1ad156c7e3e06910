"""Launch environments: what each launcher's variables mean, and what is said when they cannot mean anything."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest

from oneaccord.common.variables import Variable
from oneaccord.errors import ConfigError, RendezvousError
from oneaccord.launchers import LaunchEnvironment, claim, discover, meeting_place, parse_address, why_not_alone
from oneaccord.launchers.hosts import expand_hostlist, tasks_of_node
from oneaccord.launchers.variables import derived_ports

PARENT = 10_000_000  # no process has so high a number
OF_PARENT = f"process {PARENT}"


def derived(
    launcher: str, rank: int, size: int, local_rank: int, local_size: int | None, host: str, job: str, *hosts: str
) -> LaunchEnvironment:
    """Return what is understood if the places to meet come from the job's name."""
    port, *more = derived_ports(f"{launcher} {job}")
    return LaunchEnvironment(launcher, rank, size, local_rank, local_size, host, port, job, tuple(more), hosts)


TORCHRUN = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "node001",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_RUN_ID": "abc",
}
SLURM = {
    "SLURM_JOB_ID": "123456",
    "SLURM_JOB_NAME": "train",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "node[003-004]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    # srun speaks PMI-1 and PMIx too
    "PMI_RANK": "5",
    "PMI_SIZE": "8",
    "PMIX_RANK": "5",
    "PMIX_SERVER_URI41": "pmix-server.20960;tcp4://127.0.0.1:37757",
}
OPEN_MPI_4 = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
    "PMIX_NAMESPACE": "1531576321",
    "PMIX_RANK": "3",
}
OPEN_MPI_5 = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-f5n18-3903919@1",
    "PMIX_RANK": "3",
    "PMIX_SERVER_URI41": "prterun-f5n18-3903919@0.1;tcp4://127.0.0.1:57983",
}
PRTERUN = {
    "PMIX_RANK": "1",
    "PMIX_NAMESPACE": "prterun-f5n18-12192@1",
    "PMIX_HOSTNAME": "f5n18",
    "PMIX_SERVER_URI41": "prterun-f5n18-12192@0.0;tcp4://127.0.0.1:57405",
    "PMIX_VERSION": "5.0.11rc1",
    "PRTE_LAUNCHED": "1",
}
HYDRA = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "2", "MPI_LOCALNRANKS": "4", "PMI_FD": "9"}
MVAPICH = {
    "MV2_COMM_WORLD_RANK": "1",
    "MV2_COMM_WORLD_SIZE": "2",
    "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_SIZE": "2",
}
LSF = {
    "JSM_NAMESPACE_RANK": "6",
    "JSM_NAMESPACE_SIZE": "12",
    "JSM_NAMESPACE_LOCAL_RANK": "0",
    "JSM_NAMESPACE_LOCAL_SIZE": "6",
    "LSB_JOBID": "777",
    "LSB_MCPU_HOSTS": "batch1 1 h41n08 42 h41n09 42",
    # jsrun's own MPI is an Open MPI
    "OMPI_COMM_WORLD_RANK": "6",
    "OMPI_COMM_WORLD_SIZE": "12",
}
FLUX = {
    "FLUX_TASK_RANK": "1",
    "FLUX_JOB_SIZE": "2",
    "FLUX_TASK_LOCAL_ID": "1",
    "FLUX_JOB_NNODES": "1",
    "FLUX_JOB_ID": "4096",
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
}
PALS = {
    "PALS_RANKID": "3",
    "PALS_LOCAL_RANKID": "1",
    "PALS_LOCAL_SIZE": "2",
    "PALS_APID": "fe45",
    "PMI_RANK": "3",
    "PMI_SIZE": "4",
    "MASTER_ADDR": "x1000c0s0b0n0",
}
KUBERNETES = {
    "JOB_COMPLETION_INDEX": "2",
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
    "WORLD_SIZE": "4",
    "MASTER_ADDR": "train-0.train",
}
LEADER_WORKER_SET = {
    "LWS_LEADER_ADDRESS": "train-0.train.default",
    "LWS_GROUP_SIZE": "4",
    "LWS_WORKER_INDEX": "3",
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        pytest.param(TORCHRUN, LaunchEnvironment("torchrun", 5, 8, 1, 4, "node001", 29400, "abc"), id="torchrun"),
        pytest.param(
            TORCHRUN | {"ONEACCORD_LAUNCHED": "[::1]:4000"},
            LaunchEnvironment("oneaccord", 5, 8, 1, 4, "::1", 4000, ""),
            id="oneaccord",
        ),
        pytest.param(SLURM, derived("slurm", 5, 8, 1, 4, "node003", "123456"), id="slurm"),
        pytest.param(
            OPEN_MPI_4,
            derived("openmpi", 3, 4, 1, 2, "10.96.0.1", "1531576321 of tcp://10.96.0.1,10.148.0.1:34911"),
            id="openmpi-4",
        ),
        pytest.param(
            OPEN_MPI_5,
            derived("openmpi", 3, 4, 1, 2, "f5n18", "prterun-f5n18-3903919@1"),
            id="openmpi-5",
        ),
        pytest.param(
            PRTERUN | {"ONEACCORD_WORLD_SIZE": "4"},
            derived("pmix", 1, 4, 0, None, "f5n18", "prterun-f5n18-12192@1"),
            id="prterun",
        ),
        pytest.param(
            SLURM | {"SLURM_JOB_NAME": "interactive", "SLURM_TASK_PID": "77"},
            derived("slurm", 5, 8, 1, 4, "node003", "123456"),
            id="srun from an interactive shell",
        ),
        pytest.param(HYDRA, derived("mpich", 2, 4, 2, 4, "127.0.0.1", OF_PARENT), id="hydra"),
        pytest.param(
            {"PMI_RANK": "0", "PMI_SIZE": "2", "PMI_LOCAL_RANK": "0", "PMI_LOCAL_SIZE": "2"},
            derived("mpich", 0, 2, 0, 2, "127.0.0.1", OF_PARENT),
            id="pmi",
        ),
        pytest.param(MVAPICH, derived("mvapich", 1, 2, 1, 2, "127.0.0.1", OF_PARENT), id="mvapich"),
        pytest.param(LSF, derived("lsf", 6, 12, 0, 6, "h41n08", "777"), id="lsf"),
        pytest.param(FLUX, derived("flux", 1, 2, 1, 2, "127.0.0.1", "4096"), id="flux"),
        pytest.param(PALS, derived("pals", 3, 4, 1, 2, "x1000c0s0b0n0", "fe45"), id="pals"),
        pytest.param(KUBERNETES, LaunchEnvironment("kubernetes", 2, 4, 0, 1, "train-0.train", 29500, ""), id="kubernetes"),
        pytest.param(
            KUBERNETES | {"HOSTNAME": "train-2"},
            LaunchEnvironment("kubernetes", 2, 4, 0, 1, "train-0.train", 29500, "train"),
            id="kubernetes, pods named by their job",
        ),
        pytest.param(
            SLURM
            | {
                "SLURM_CLUSTER_NAME": "c1",
                "SLURM_STEP_ID": "3",
                "SLURM_DISTRIBUTION": "arbitrary",
                "SLURMD_NODENAME": "node004",
                "SLURM_GTIDS": "4,5",
            },
            derived("slurm", 5, 8, 1, 4, "node003", "c1:123456.3", "node004"),
            id="slurm, tasks ordered by a file",
        ),
        pytest.param(
            SLURM | {"SLURM_DISTRIBUTION": "arbitrary,Pack", "SLURMD_NODENAME": "node004", "SLURM_GTIDS": "0,5"},
            derived("slurm", 5, 8, 1, 4, "node004", "123456"),
            id="slurm, beside task 0",
        ),
        pytest.param(
            SLURM | {"SLURM_DISTRIBUTION": "arbitrary", "SLURMD_NODENAME": "node004", "SLURM_PROCID": "0"},
            derived("slurm", 0, 8, 1, 4, "node004", "123456"),
            id="slurm, task 0 itself",
        ),
        pytest.param(
            SLURM | {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "node004"},
            derived("slurm", 5, 8, 1, 8, "127.0.0.1", "123456"),
            id="slurm, one node",
        ),
        pytest.param(
            LEADER_WORKER_SET,
            LaunchEnvironment("leaderworkerset", 3, 4, 0, 1, "train-0.train.default", 29500, ""),
            id="leaderworkerset",
        ),
        pytest.param(
            {"ONEACCORD_RANK": "1", "ONEACCORD_WORLD_SIZE": "2", "ONEACCORD_RENDEZVOUS": "[::1]:7000"},
            LaunchEnvironment("by hand", 1, 2, 0, None, "::1", 7000, ""),
            id="by hand",
        ),
    ],
)
def test_each_launcher_is_understood(environ: dict[str, str], expected: LaunchEnvironment) -> None:
    assert discover(environ, parent=PARENT, process=77) == expected


@pytest.mark.parametrize(
    "environ",
    [
        pytest.param({}, id="nothing"),
        pytest.param({"RANK": "", "WORLD_SIZE": " "}, id="set to nothing"),
        pytest.param(SLURM | {"SLURM_JOB_NAME": "bash"}, id="slurm bash"),
        pytest.param(SLURM | {"SLURM_JOB_NAME": "interactive"}, id="slurm interactive"),
        pytest.param({"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, id="slurm batch script"),
        pytest.param({"KUBERNETES_SERVICE_HOST": "10.96.0.1"}, id="some pod"),
        pytest.param({"MASTER_ADDR": "node1", "ONEACCORD_RENDEZVOUS": "node1:1"}, id="an address alone"),
    ],
)
def test_plain_python_is_no_launch(environ: dict[str, str]) -> None:
    environ = {name: value for name, value in environ.items() if not name.startswith("PMI_")}
    assert discover(environ, parent=PARENT) is None


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        pytest.param(
            {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, "Slurm has 4 tasks", id="slurm batch script"
        ),
        pytest.param(SLURM | {"SLURM_JOB_NAME": "bash", "SLURM_STEP_NUM_TASKS": "8"}, "Slurm has 8 tasks", id="slurm bash"),
        *(
            pytest.param({name: "1"}, f"{name}=1: this process seems to be one of several", id=name)
            for name in ("OMPI_COMM_WORLD_SIZE", "PMI_ID", "ALPS_APP_PE", "HOROVOD_RANK", "LOCAL_RANK", "JOB_COMPLETION_INDEX")
        ),
    ],
)
def test_what_speaks_against_a_world_of_one_is_said(environ: dict[str, str], words: str) -> None:
    environ = {name: value for name, value in environ.items() if not name.startswith("PMI_") or name == "PMI_ID"}
    assert discover(environ, process=77) is None
    doubt = why_not_alone(environ)
    assert doubt is not None
    assert doubt.startswith(words)
    assert "ONEACCORD_RANK=0 and ONEACCORD_WORLD_SIZE=1" in doubt


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "1"},
        {"SLURM_JOB_NAME": "bash", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "8", "PMIX_NAMESPACE": "slurm.pmix.1.0"},
        {"MASTER_ADDR": "node1", "ONEACCORD_RENDEZVOUS": "node1:1"},
        {"KUBERNETES_SERVICE_HOST": "10.96.0.1"},
    ],
)
def test_where_nothing_speaks_against_it_nothing_is_said(environ: dict[str, str]) -> None:
    assert discover(environ, process=77) is None
    assert why_not_alone(environ) is None


def test_every_variable_of_a_launcher_alone_is_an_error_or_doubtful() -> None:
    """A rank that is alone although its environment says that it was launched is never silent."""
    seen = {
        name
        for launch in (TORCHRUN, OPEN_MPI_4, OPEN_MPI_5, PRTERUN, HYDRA, MVAPICH, LSF, FLUX, PALS, LEADER_WORKER_SET)
        for name in launch
    }
    told = {name for name in seen if re.search(r"RANK|SIZE|INDEX|TASK_LOCAL|NAMESPACE", name)}
    for name in sorted(told):
        try:
            assert discover({name: "1"}) is None
        except ConfigError as error:
            assert name in str(error)  # noqa: PT017 - either will do
        else:
            assert name in str(why_not_alone({name: "1"})), name


def test_ranks_that_the_user_numbers_have_one_place() -> None:
    found = discover(SLURM | {"ONEACCORD_RANK": "1", "ONEACCORD_WORLD_SIZE": "2"})
    assert found is not None
    assert (found.rank, found.job, found.port, found.others) == (1, "123456", derived_ports("slurm 123456")[0], [])


def test_overrides_win_over_a_launcher() -> None:
    environ = SLURM | {"ONEACCORD_RANK": "0", "ONEACCORD_WORLD_SIZE": "2", "ONEACCORD_RENDEZVOUS": "other:7000"}
    found = discover(environ)
    assert found is not None
    assert (found.launcher, found.rank, found.world_size, found.host, found.port) == ("slurm", 0, 2, "other", 7000)


def test_an_override_makes_a_bad_variable_harmless() -> None:
    found = discover(TORCHRUN | {"RANK": "abc", "ONEACCORD_RANK": "0"})
    assert found is not None
    assert found.rank == 0


def test_what_runs_inside_an_allocation_hides_the_scheduler() -> None:
    for inner, name in ((TORCHRUN, "torchrun"), (OPEN_MPI_4, "openmpi"), (HYDRA, "mpich"), (MVAPICH, "mvapich")):
        found = discover(SLURM | {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"} | inner, parent=PARENT)
        assert found is not None
        assert found.launcher == name
        assert found.world_size == int(next(value for key, value in inner.items() if key.endswith("SIZE")))


LEFT_OVER = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "23456"}
SLURM_TASK = SLURM | {"SLURM_STEP_NUM_TASKS": "8", "SLURM_TASK_PID": "77"}


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        pytest.param(OPEN_MPI_5 | LEFT_OVER, ["RANK and WORLD_SIZE say rank 0 of 1", "mpirun", "rank 3 of 4"], id="mpirun"),
        pytest.param(HYDRA | LEFT_OVER, ["rank 0 of 1", "mpiexec", "rank 2 of 4"], id="mpich"),
        pytest.param(MVAPICH | LEFT_OVER, ["rank 0 of 1", "MVAPICH", "rank 1 of 2"], id="mvapich"),
        pytest.param(LSF | LEFT_OVER, ["rank 0 of 1", "jsrun", "rank 6 of 12"], id="lsf"),
        pytest.param(FLUX | LEFT_OVER, ["rank 0 of 1", "Flux", "rank 1 of 2"], id="flux"),
        pytest.param(SLURM_TASK | LEFT_OVER, ["rank 0 of 1", "srun", "rank 5 of 8"], id="slurm"),
        pytest.param(SLURM_TASK | LEFT_OVER | {"WORLD_SIZE": "8"}, ["rank 0 of 8", "rank 5 of 8"], id="another rank"),
        pytest.param(SLURM_TASK | LEFT_OVER | {"WORLD_SIZE": "9"}, ["rank 0 of 9", "srun"], id="srun is the nearest"),
        pytest.param(
            SLURM_TASK | OPEN_MPI_5 | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
            ["OMPI_COMM_WORLD_RANK and OMPI_COMM_WORLD_SIZE say rank 0 of 1", "srun", "rank 5 of 8"],
            id="mpirun within srun left over",
        ),
    ],
)
def test_contradicting_launchers_are_refused_in_words(environ: dict[str, str], words: list[str]) -> None:
    with pytest.raises(ConfigError, match="two launchers contradict each other") as caught:
        discover(environ, parent=PARENT, process=77)
    assert all(word in str(caught.value) for word in [*words, "unset", "ONEACCORD_RANK"])


@pytest.mark.parametrize(
    ("environ", "identity"),
    [
        pytest.param(OPEN_MPI_5 | LEFT_OVER | {"RANK": "3", "WORLD_SIZE": "4"}, (3, 4), id="a wrapper says the same"),
        pytest.param(SLURM | LEFT_OVER | {"RANK": "41", "WORLD_SIZE": "64"}, (41, 64), id="an agent for each task"),
        pytest.param(SLURM_TASK | TORCHRUN | {"RANK": "1", "WORLD_SIZE": "8"}, (1, 8), id="torchrun counts anew"),
        pytest.param(SLURM_TASK | TORCHRUN | {"RANK": "0", "WORLD_SIZE": "1"}, (0, 1), id="torchrun alone in each task"),
        pytest.param(OPEN_MPI_5 | LEFT_OVER | {"ONEACCORD_LAUNCHED": "127.0.0.1:1"}, (0, 1), id="oneaccord run in each"),
        pytest.param(SLURM | LEFT_OVER | {"RANK": "2", "WORLD_SIZE": "8"}, (2, 8), id="an agent with an order of its own"),
        pytest.param(
            SLURM_TASK
            | {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1", "PMI_RANK": "0", "PMI_SIZE": "1"}
            | LEFT_OVER
            | {"WORLD_SIZE": "2"},
            (0, 2),
            id="a step of one task for each rank",
        ),
        pytest.param(SLURM | OPEN_MPI_5, (3, 4), id="mpirun's daemons are Slurm's tasks"),
        pytest.param(OPEN_MPI_5 | LEFT_OVER | {"ONEACCORD_RANK": "0", "ONEACCORD_WORLD_SIZE": "1"}, (0, 1), id="by hand"),
        pytest.param({"PMI_RANK": "0", "PMI_SIZE": "1"} | LEFT_OVER | {"WORLD_SIZE": "4"}, (0, 4), id="one task"),
        pytest.param(OPEN_MPI_5 | LEFT_OVER | {"OMPI_COMM_WORLD_SIZE": ""}, (0, 1), id="half of mpirun's"),
    ],
)
def test_launchers_within_each_other_are_understood(environ: dict[str, str], identity: tuple[int, int]) -> None:
    found = discover(environ, parent=PARENT, process=77)
    assert found is not None
    assert (found.rank, found.world_size) == identity


def test_a_world_of_its_own_in_a_child_leaves_the_note_of_the_rank_that_started_it() -> None:
    note = f"{os.getppid()} 1/2@('127.0.0.1', 5)"
    environ = {Variable.JOINED: note}
    claim(environ, 0, 1, None)()
    assert environ == {Variable.JOINED: note}
    with pytest.raises(RendezvousError, match="was started by rank 1 of 2"):
        claim(environ, 1, 2, ("127.0.0.1", 5))


def test_steps_and_attempts_of_one_job_of_slurm_are_runs_of_their_own() -> None:
    runs = [
        discover(SLURM | more)
        for more in ({"SLURM_STEP_ID": "0"}, {"SLURM_STEP_ID": "1"}, {"SLURM_STEP_ID": "0", "SLURM_RESTART_COUNT": "1"})
    ]
    assert [run and run.job for run in runs] == ["123456.0", "123456.1", "123456.0.1"]
    assert len({run and run.port for run in runs}) == 3


def test_steps_and_elements_of_one_job_of_lsf_are_runs_of_their_own() -> None:
    runs = [
        discover(LSF | {"LSB_JOBINDEX": index, "PMIX_NAMESPACE": step}) for index, step in (("0", "1"), ("0", "2"), ("3", "1"))
    ]
    assert [run and run.job for run in runs] == ["777.0.1", "777.0.2", "777.3.1"]
    assert len({run and run.port for run in runs}) == 3


def test_ranks_behind_wrapper_scripts_meet_at_one_port() -> None:
    program = "import os; from oneaccord.launchers import discover; print(discover(os.environ).port)"
    environ = {name: value for name, value in os.environ.items() if not re.match("RANK|WORLD_SIZE|OMPI|SLURM", name)}
    wrapped = ["sh", "-c", 'sh -c \'"$@"; exit $?\' - "$@"; exit $?', "-", sys.executable, "-c", program]
    printed = subprocess.run(wrapped, env=environ | HYDRA, capture_output=True, text=True, check=True, timeout=120).stdout
    begun = Path(f"/proc/{os.getpid()}/stat").read_text().rpartition(")")[2].split()[19]
    assert int(printed) == derived_ports(f"mpich process {os.getpid()}.{begun}")[0]


def test_torchrun_s_own_store_keeps_its_port() -> None:
    agents = TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    found = [discover(agents | {"MASTER_PORT": str(port)}) for port in range(61440, 65536, 16)]
    assert all(
        each and each.port and each.port >= 61440 and each.job == f"abc at node001:{port}"
        for each, port in zip(found, range(61440, 65536, 16), strict=True)
    )
    assert not any(port in (each.port, *each.ports) for each, port in zip(found, range(61440, 65536, 16), strict=True) if each)


def test_open_mpi_on_one_host_meets_on_loopback() -> None:
    ports = set()
    for version in (OPEN_MPI_4, OPEN_MPI_5):
        found = discover(version | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, parent=PARENT)
        assert found is not None
        assert found.host == "127.0.0.1"
        ports.add(found.port)
    assert len(ports) == 2


def test_open_mpi_over_ipv6() -> None:
    uri = "1314521088.0;tcp6://[fe80::b9b:ac5d:9cf0:b858,2620:10d:c083:150e::3000:2]:43370"
    found = discover(OPEN_MPI_4 | {"OMPI_MCA_orte_hnp_uri": uri})
    assert found is not None
    assert found.host == "fe80::b9b:ac5d:9cf0:b858"


def test_a_named_host_without_a_port_means_29500() -> None:
    environ = {name: value for name, value in TORCHRUN.items() if name != "MASTER_PORT"}
    found = discover(environ)
    assert found is not None
    assert found.port == 29500


def test_master_addr_serves_where_the_launcher_tells_no_address() -> None:
    several = HYDRA | {"MPI_LOCALNRANKS": "2", "MASTER_ADDR": "node7", "MASTER_PORT": "1234"}
    found = discover(several, parent=PARENT)
    assert found is not None
    assert (found.host, found.port) == ("node7", 1234)


BY_HAND = {"ONEACCORD_RANK": "1", "ONEACCORD_WORLD_SIZE": "2"}
OURS = TORCHRUN | {"ONEACCORD_LAUNCHED": "node3:5000"}


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        pytest.param(BY_HAND, ("node1", 29501), id="by hand"),
        pytest.param(BY_HAND | {"MASTER_ADDR": "node7"}, ("node1", 29501), id="before MASTER_ADDR"),
        pytest.param(TORCHRUN, ("node1", 29501), id="before torchrun's"),
        pytest.param(BY_HAND | {"ONEACCORD_RENDEZVOUS": "node2:4000"}, ("node2", 4000), id="after the variable"),
        pytest.param(OURS, ("node3", 5000), id="after that of oneaccord run"),
    ],
)
def test_a_configured_address_counts_for_ranks_of_launchers_and_by_hand(
    environ: dict[str, str], place: tuple[str, int]
) -> None:
    found = discover(environ, configured="node1:29501")
    assert found is not None
    assert (found.host, found.port) == place
    if environ is not OURS and environ is not TORCHRUN:
        assert meeting_place(environ, "node1:29501", 1) == place


@pytest.mark.parametrize("variables", [{"RANK": "0", "WORLD_SIZE": "1"}, {"PMI_RANK": "0", "PMI_SIZE": "1"}])
def test_a_world_of_one_needs_no_address(variables: dict[str, str]) -> None:
    found = discover(variables)
    assert found is not None
    assert (found.rank, found.world_size, found.host, found.port) == (0, 1, None, None)


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        pytest.param(TORCHRUN | {"RANK": "abc"}, ["RANK", "'abc'"], id="no number"),
        pytest.param(TORCHRUN | {"RANK": "-1"}, ["RANK", "'-1'"], id="negative"),
        pytest.param(TORCHRUN | {"RANK": "8"}, ["RANK=8", "WORLD_SIZE=8", "7"], id="too large"),
        pytest.param(TORCHRUN | {"WORLD_SIZE": "0"}, ["WORLD_SIZE=0"], id="empty world"),
        pytest.param(TORCHRUN | {"MASTER_PORT": "70000"}, ["MASTER_PORT", "70000", "65535"], id="port too large"),
        pytest.param(TORCHRUN | {"LOCAL_RANK": "x"}, ["LOCAL_RANK", "'x'"], id="local rank"),
        pytest.param({"RANK": "1"}, ["RANK=1", "WORLD_SIZE", "unset RANK"], id="rank alone"),
        pytest.param({"WORLD_SIZE": "4"}, ["WORLD_SIZE=4", "set RANK"], id="world size alone"),
        pytest.param({"ONEACCORD_RANK": "0"}, ["ONEACCORD_RANK=0", "ONEACCORD_WORLD_SIZE"], id="override alone"),
        pytest.param({"ONEACCORD_WORLD_SIZE": "2"}, ["ONEACCORD_WORLD_SIZE=2", "ONEACCORD_RANK"], id="override size alone"),
        pytest.param(
            PRTERUN,
            ["PMIX_RANK=1", "-x ONEACCORD_WORLD_SIZE=4", "mpirun, srun or oneaccord run", "unset PMIX_RANK"],
            id="prterun",
        ),
        pytest.param({"OMPI_COMM_WORLD_RANK": "1"}, ["OMPI_COMM_WORLD_SIZE"], id="half of open mpi"),
        pytest.param(
            {"JOB_COMPLETION_INDEX": "1", "KUBERNETES_SERVICE_HOST": "h"},
            ["WORLD_SIZE or ONEACCORD_WORLD_SIZE"],
            id="kubernetes without size",
        ),
        pytest.param(SLURM | {"SLURM_STEP_NODELIST": "node[1-"}, ["node[1-", "ONEACCORD_RENDEZVOUS"], id="hostlist"),
        pytest.param(TORCHRUN | {"ONEACCORD_RENDEZVOUS": "nowhere"}, ["ONEACCORD_RENDEZVOUS", "nowhere"], id="rendezvous"),
    ],
)
def test_what_cannot_be_is_refused_by_name(environ: dict[str, str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        discover(environ)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "environ",
    [
        pytest.param(HYDRA | {"MPI_LOCALNRANKS": "2"}, id="mpich"),
        pytest.param({"RANK": "0", "WORLD_SIZE": "2"}, id="torchrun"),
        pytest.param({k: v for k, v in KUBERNETES.items() if k != "MASTER_ADDR"}, id="kubernetes"),
        pytest.param({"ONEACCORD_RANK": "0", "ONEACCORD_WORLD_SIZE": "2"}, id="by hand"),
        pytest.param({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, id="one host, no port"),
    ],
)
def test_several_ranks_without_an_address_are_told_what_to_set(environ: dict[str, str]) -> None:
    with pytest.raises(RendezvousError, match=r"set ONEACCORD_RENDEZVOUS=host:port .*MASTER_ADDR"):
        discover(environ)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("node1:29500", ("node1", 29500)),
        ("127.0.0.1:1", ("127.0.0.1", 1)),
        ("[::1]:65535", ("::1", 65535)),
        ("[fe80::1%eth0]:80", ("fe80::1%eth0", 80)),
    ],
)
def test_addresses(text: str, expected: tuple[str, int]) -> None:
    assert parse_address(text) == expected


@pytest.mark.parametrize(
    "text", ["", "node1", "node1:", ":29500", "::1:29500", "node1:0", "node1:65536", "node1:1x", "a b:1", "[]:1"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_address(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("number", ["9" * 5000, "9" * 30])
def test_numbers_that_python_does_not_read_are_refused_in_words(number: str) -> None:
    for variable in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        with pytest.raises(ConfigError):
            discover(TORCHRUN | {variable: number})
    with pytest.raises(ConfigError):
        parse_address(f"node1:{number}")
    with pytest.raises(ConfigError):
        list(islice(expand_hostlist(f"node[{number}-{number}]"), 3))
    assert tasks_of_node(number, 0) is None
    assert all(61440 <= port < 65536 for port in derived_ports(number))


def test_a_job_whose_name_is_no_text_has_a_port_all_the_same() -> None:
    assert len(derived_ports("job\udcff")) == 8
