"""Rates of an H100 node: measured on one H200, or assumed; and what others published."""

from dataclasses import dataclass, replace

from megavlm.models.cost import H100_FLOPS, LANGUAGE_SHARE, TOWER_SHARE

NODE = 8  # GPUs of a node
# The card of the measured rates (tests/benchmarks/GPU.md), and the memory bandwidth of its data
# sheet. It computes as fast as an H100.
MEASURED_CARD, H200_MEMORY = "one H200", 4.8e12


@dataclass(frozen=True)
class Rates:
    """Rates of an H100 node.

    Measured on one H200: flops: Dense bf16 FLOPs per second of an update at a 7B model's width,
    H100_FLOPS at 46 %. encoder: FLOPs per second of a vision tower with its small matrices, at
    21 %. host: Bytes per second of copies to pinned memory and back, by one GPU.

    Assumed, but a decoding step of the H200 took as long as it does with these: memory: 3.35 TB/s
    at 60 %. token: Seconds of a server's decoding step in the scheduler and the sampler. layer:
    Seconds of the small kernels of a layer in a CUDA graph.

    Assumed: nvlink: 450 GB/s per direction at 75 %. network: One 400 Gb/s port per GPU at 80 %.
    eager: Seconds in which Python launches a layer without a CUDA graph. all_reduce: Latency of an
    all-reduce. sync_round: Seconds of a bucket of a weight update besides its bytes, for the
    messages about it and the starts of its copies.
    """

    flops: float = LANGUAGE_SHARE * H100_FLOPS
    encoder: float = TOWER_SHARE * H100_FLOPS
    memory: float = 0.6 * 3.35e12
    nvlink: float = 0.75 * 450e9
    network: float = 0.8 * 50e9
    host: float = 53e9
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
H200_RATES = replace(Rates(), memory=H200_MEMORY * Rates.memory / 3.35e12)
