"""What people type into the search, and the page that answers it, where the words of the page alone do not bring it to the top.

Sphinx's search compares a query with the words of pages and titles, and with entries of its index. This table makes such entries. By site.js
an entry is found if all its words are in the query: so give the least words that decide, and none that also stand in other questions.
"""

from __future__ import annotations

from typing import Any, Final

from docutils import nodes
from sphinx import addnodes
from sphinx.util import logging

LOG = logging.getLogger(__name__)

# A page, or a section of one, and the queries that it answers, in small letters.
ANSWERS: Final[dict[str, str]] = {
    "coming-from#mpi4py": "allreduce, allgather, bcast, mpi4py",
    "faq#does-it-pickle-my-objects": "pickle",
    "faq#does-it-run-in-containers-which-shm-size-does-it-need": "shm size, dev shm",
    "faq#does-it-run-on-macos-or-windows": "windows, macos, wsl, windows support, mac",
    "faq#how-do-i-end-a-job": "kill, cancel, ctrl-c, sigterm",
    "faq#how-do-i-run-it-on-two-hosts": "version mismatch",
    "faq#what-does-the-exit-code-mean": "exit code",
    "faq#which-ports-does-it-use-what-must-the-firewall-allow": "ports, firewall, port, proxy",
    "guides/checkpoints": "checkpoint, save checkpoint, load checkpoint, save model, resume training",
    "guides/checkpoints#save-and-continue": "fewer ranks, different number ranks",
    "guides/debugging": "breakpoint, pdb, debugger, gdb",
    "guides/debugging#a-rank-that-dies-without-a-traceback": "kill -9, sigkill, 137, out of memory, segfault, segmentation fault, sigsegv",
    "guides/debugging-a-hang": "missing rank, hang, hangs, stuck, freeze, timeout, deadlock, timed out",
    "guides/deploying": "docker, container, dockerfile, systemd",
    "guides/elastic": "rank died, rank dies, dead rank, fault tolerance, restart, preemption",
    "guides/gpus": "gpu, gpus, cuda, cupy, nccl",
    "guides/groups#arrays-of-different-lengths": "different lengths, different sizes, different shapes, uneven, allgatherv, gatherv",
    "guides/groups": "send numpy array, broadcast numpy array, send array, broadcast array",
    "guides/groups#coalescing": "small messages, many small",
    "guides/groups#devicemesh": "cartesian, cart, grid, mesh",
    "guides/groups#in-the-background": "async, non blocking, nonblocking, wait_all",
    "guides/large-models": "fsdp, zero, model parallel",
    "guides/launch-from-python": "notebook, jupyter, launch from python",
    "guides/launch-from-python#ranks-that-stay": "pool, executor, sweep, map",
    "guides/logging": "log, log files, print, log level, verbose, progress bar, tqdm, stdout",
    "guides/messages": "tag, tags, mpi tag, any_source, isend",
    "guides/plugins-backend": "write my own backend, own backend, custom backend, new backend",
    "guides/plugins-testing": "conformance",
    "guides/objects": "send object, python objects, send dict, dict, list, object",
    "guides/profiling": "profiler, timeline, trace, slow, profile",
    "guides/recipes#exchange-halos": "halo, stencil, ghost cells",
    "guides/recipes#hand-out-work-to-idle-ranks": "master worker, task queue",
    "guides/recipes#write-one-file-from-all-ranks": "write file, parallel io, memmap, mmap",
    "guides/reductions": "argmin, minloc, custom op",
    "guides/reductions#the-same-bits-every-time": "nan, infinity, overflow, reproducible, deterministic, deterministic sum",
    "guides/several-hosts": "multiple machines, several hosts, two hosts, cluster, multi-node",
    "guides/shared-memory": "shared memory, shared array",
    "guides/slurm": "slurm, sbatch, srun, pbs",
    "guides/testing": "unit test, pytest, test my program, straggler",
    "guides/testing-explore": "race, race condition, kill a rank",
    "guides/testing-rules": "seed",
    "guides/torch": "ddp, distributeddataparallel, torch.distributed, torchrun, unknown backend type, init_process_group, process group",
    "guides/torch#checkpoints": "dcp, distributed checkpoint",
    "guides/training": "average gradients, averaging gradients, gradient averaging",
    "guides/training#jax": "jax",
    "guides/training#what-a-step-means": "bfloat16, mixed precision, float16, amp, unused parameters",
    "guides/windows": "one sided, rma, shared counter, work queue",
    "reference/configuration": "timeout_s, settings, config file, timeout, config path",
    "reference/errors": "deadlineerror, peerlosterror, timeouterror, error message",
    "start/index": "hello world, first program, example",
    "start/install": "install, pip install, version, upgrade",
    "start/tutorial#four-processes": "rank number, how many processes, how many ranks, number processes, which rank",
    "start/tutorial#one-result-for-all": "sum processes, sum ranks, global sum",
    "start/tutorial#a-rank-dies": "rank died",
    "start/tutorial-mpi": "mpi, mpirun",
}


def answer(_app: Any, tree: Any, page: str) -> None:
    """Give a page the entries of its queries; the search shows them, and no page does."""
    for place, queries in ANSWERS.items():
        name, _, section = place.partition("#")
        if name != page:
            continue
        if section and not any(section in found["ids"] for found in tree.findall(nodes.section)):
            LOG.warning("the search leads to a section that is not there: %s", place, type="questions")
        entries = [("single", query.strip(), section, "main", None) for query in queries.split(",")]
        tree.insert(0, addnodes.index(entries=entries))


def check(app: Any, _env: Any) -> None:
    """Every page of the table is there."""
    for place in ANSWERS:
        if (page := place.partition("#")[0]) not in app.env.found_docs:
            LOG.warning("the search leads to a page that is not there: %s", page, type="questions")


def setup(app: Any) -> dict[str, bool]:
    """Connect to Sphinx."""
    app.connect("env-check-consistency", check)
    app.connect("doctree-resolved", answer)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
