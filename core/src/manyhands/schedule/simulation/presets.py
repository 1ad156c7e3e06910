"""Networks by name: the textbook's, and three that resemble what people have."""

from __future__ import annotations

from typing import Final

from manyhands.schedule.simulation.network import Level, Network

__all__ = ["PRESETS"]

_US: Final[float] = 1e-6
_GB: Final[float] = 1e9

# A GPU adds two arrays in memory at about 3 TB/s of traffic (H100: 3.35 TB/s, data sheet), three bytes moved for one of the result.
_GPU_REDUCTION: Final[float] = 1000 * _GB

# NVLink 4 with NVSwitch: 450 GB/s in each direction per GPU (data sheet). NCCL's point-to-point latency over it is 1 to 2 us; the
# launch of the next transfer takes about half of that.
_NVLINK: Final[Level] = Level(latency_s=1.5 * _US, bandwidth_bytes_per_s=450 * _GB, gap_s=0.7 * _US)

PRESETS: Final[dict[str, Network]] = {
    # The numbers are round on purpose: 1 us and 10 GB/s make a result easy to check by hand. A core adds float32 arrays that do not
    # fit its cache at a few GB/s; without a cost of reduction, formulas stay those that books print first.
    "textbook": Network(
        topology="wires",
        summary="every pair has its own wires; 1 us, 10 GB/s, free reductions; one send and one receive of a rank at a time",
        wire=Level(latency_s=1 * _US, bandwidth_bytes_per_s=10 * _GB),
    ),
    # Eight GPUs behind one 400 Gbit/s card (50 GB/s). InfiniBand's end-to-end latency is about 1.2 us with one switch between
    # (NDR adapters 0.5 to 0.6 us at each end), and a further switch adds 0.13 to 0.2 us with its cable. A core gives a card one
    # message in about 0.1 us. 16 hosts and 8 spines per leaf: the 2:1 of many clusters.
    "fat-tree": Network(
        topology="fat_tree",
        summary="8 ranks per host behind one 400 Gbit/s card, 16 hosts per leaf switch, oversubscribed 2:1 towards the spines",
        ranks_per_host=8,
        reduction_bytes_per_s=_GPU_REDUCTION,
        host=_NVLINK,
        nic=Level(latency_s=0.6 * _US, bandwidth_bytes_per_s=50 * _GB, gap_s=0.1 * _US),
        spine=Level(latency_s=0.2 * _US, bandwidth_bytes_per_s=50 * _GB, gap_s=0.02 * _US),
        hosts_per_leaf=16,
        oversubscription=2,
    ),
    # As TPU pods and Fugaku's Tofu D have it, with 50 GB/s per link and direction (a TPU v4 link: 50 GB/s; Jouppi et al., 2023).
    # Tofu D's put takes 0.49 us to a neighbour, and about 0.1 us for each hop more (Ajima et al., 2018); 0.3 us is between them.
    "torus": Network(
        topology="torus",
        summary="8 ranks per host, hosts in a 3-D torus with 50 GB/s to each of six neighbours, routed along x, y, then z",
        ranks_per_host=8,
        reduction_bytes_per_s=_GPU_REDUCTION,
        host=_NVLINK,
        link=Level(latency_s=0.3 * _US, bandwidth_bytes_per_s=50 * _GB, gap_s=0.05 * _US),
    ),
    # One loopback connection moves 3 to 5 GB/s and takes 15 to 30 us from one Python process to another; two channels of DDR4 or
    # DDR5 carry 40 to 60 GB/s, and each byte crosses memory about four times on its way through the kernel. NumPy adds float32
    # arrays that come from memory at about 4 GB/s of the result.
    "laptop": Network(
        topology="bus",
        summary="one host: 4 GB/s and 20 us over loopback for each pair, 12 GB/s of memory bandwidth for all together",
        reduction_bytes_per_s=4 * _GB,
        host=Level(latency_s=20 * _US, bandwidth_bytes_per_s=4 * _GB),
        bus=Level(latency_s=0, bandwidth_bytes_per_s=12 * _GB),
    ),
}
"""Networks that ``--network`` knows by name."""
