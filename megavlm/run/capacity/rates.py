"""Assumed rates of an H100 node, and the utilization that others published."""

from dataclasses import dataclass, replace

from megavlm.models.cost import H100_FLOPS, LANGUAGE_SHARE, TOWER_SHARE

NODE = 8  # GPUs of a node


@dataclass(frozen=True)
class Rates:
    """Assumed rates: peaks of the data sheet times an expected share, and fixed seconds. None was
    measured with this code.

    flops: Dense bf16 FLOPs per second, H100_FLOPS at 40 %. encoder: FLOPs per second of a vision
    tower with its small matrices, at 25 %. memory: 3.35 TB/s at 60 %. nvlink: 450 GB/s per
    direction at 75 %. network: One 400 Gb/s port per GPU at 80 %. host: PCIe 5 at 40 %.

    token: Seconds of a server's decoding step in the scheduler and the sampler. layer: Seconds of
    the small kernels of a layer in a CUDA graph. eager: Seconds in which Python launches a layer
    without one. all_reduce: Latency of an all-reduce. sync_round: Seconds of a portion of a
    weight update besides its bytes, for the messages about it and the starts of its copies.
    """

    flops: float = LANGUAGE_SHARE * H100_FLOPS
    encoder: float = TOWER_SHARE * H100_FLOPS
    memory: float = 0.6 * 3.35e12
    nvlink: float = 0.75 * 450e9
    network: float = 0.8 * 50e9
    host: float = 0.4 * 64e9
    token: float = 2e-3
    layer: float = 40e-6
    eager: float = 300e-6
    all_reduce: float = 15e-6
    sync_round: float = 0.01

    def link(self, ranks: int) -> float:
        """Return the bytes per second that a GPU sends to others of `ranks` consecutive ones."""
        return self.nvlink if ranks <= NODE else self.network


# MFU of the actor's update in EasyR1 v0.3.2, assets/baselines.md, on 8 H100. Its layers are
# recomputed: four passes for the three that count.
PUBLISHED_MFU = {"7B": 0.232, "32B": 0.258}
LOW_SHARE = PUBLISHED_MFU["7B"] * 4 / 3
# Rates with which the model computes the 7B's update as slowly as EasyR1.
LOW_RATES = replace(Rates(), flops=LOW_SHARE * H100_FLOPS)
