"""Modelled seconds of a recipe's step by phase.

FLOPs come from `models.cost` and the output layer, bytes from the weight-sync plan and the layout,
the rollout from `capacity.serving`. Nothing is assumed to overlap, except rollouts and training
where `rollout.max_staleness` is above 0, and what is done early with `rollout.streaming`. `Rates`
has the assumptions about the hardware. Not covered: rewards, data, scattering of packs, copies of
the reference's weights except for each streamed batch of groups, and a separate critic.
"""

import math
from bisect import bisect_right
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from megavlm.config.algorithm import PolicyOptimization
from megavlm.config.schema import Config
from megavlm.config.transports import TRANSPORT_TRAITS
from megavlm.data.packs.trees import Segment, Tree
from megavlm.families import family
from megavlm.models.common.components import model_part
from megavlm.models.common.config import ModelOptions
from megavlm.models.common.mapping import Entry
from megavlm.models.cost import H100_FLOPS, ModelCost
from megavlm.parallel.mesh import Layout
from megavlm.planner.activations import EXPERT_IMBALANCE
from megavlm.planner.memory import RunMemory
from megavlm.planner.rates import NODE, Rates
from megavlm.planner.serving import ServerModel
from megavlm.planner.weight_updates import received_bytes, server_layout, stored_bytes
from megavlm.planner.work import StepWork
from megavlm.training.step.balance import TreeSize
from megavlm.training.step.pack_plan import Schedule, costs_of, plan_packs
from megavlm.training.step.step_plan import schedule_of
from megavlm.training.streaming import stream_batch_tokens, streaming_mode
from megavlm.weight_sync.ownership import numel
from megavlm.weight_sync.trainable import trained_entries
from megavlm.weight_sync.transports.disk import BUCKET
from megavlm.weight_sync.update import GPU_PORTION

# Assumed share of a sync's bytes with `rollout.sync_delta`, after a step of Adam at a learning rate
# of 1e-6. tests/benchmarks/RESULTS.md has 2 to 6 % with random gradients.
DELTA_SHARE = 0.06
DELTA_COPIES = 8  # further passes over all bytes: written for the comparison, compared, restored
COPIES = 8  # passes over a weight's bytes in a sync, on both sides, besides the transfer


class StepModel:
    """Model of a step of a recipe on `world_size` trainer ranks and `num_servers` servers."""

    def __init__(
        self,
        config: Config,
        hf_config: Any,
        world_size: int,
        num_servers: int,
        rates: Rates | None = None,
        memory: RunMemory | None = None,
        step: StepWork | None = None,
    ) -> None:
        """Store the arguments. rates: None takes the defaults. memory: The run's memory, if it is
        already known. step: None takes the recipe's assumed lengths.
        """
        self.step, self.rates = step or StepWork.of(config, hf_config), rates or Rates()
        self.memory = memory or RunMemory.of(config, hf_config, world_size)
        self._config, self._hf_config, self._world_size = config, hf_config, world_size
        self._num_servers, self._text = num_servers, hf_config.text_config
        parts = family(hf_config.model_type)
        self._entries, self._architecture = parts.mapping(hf_config), parts.architecture(hf_config)
        self._options = ModelOptions.from_config(config)
        self._cost = ModelCost.of(self._entries, self._architecture)
        self._planned: dict[int, list[list[float]]] = {}  # packs, by the number of trees

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each phase, and of the step as `total`: their sum, or with
        `rollout.max_staleness` the longer of rollout and training, and the sync. With
        `rollout.streaming` some of the training is done during the rollout.
        """
        training = self.training()
        phases = {"rollout": self.rollout, **training, "sync": self._sync()}
        rollout = self._config.rollout
        if rollout.colocate:
            phases["switch"] = self._switch()
        total = sum(phases.values())
        if rollout.is_stale:
            total -= min(self.rollout, total - self.rollout - phases["sync"])
        elif early := self.early():
            total += self.stream_end(early) - self.rollout - early
        return phases | {"total": total}

    def training(self) -> dict[str, float]:
        """Return the seconds of each phase of the trainer."""
        algorithm = self._config.algorithm
        assert isinstance(algorithm, PolicyOptimization)
        forward, minibatches = self._forward(), algorithm.minibatches
        old = (minibatches - 1) / minibatches  # the first minibatch needs no pass for old log-probs
        return {
            "vision": self.vision_flops / self._world_size / self.rates.encoder,
            "reference": forward if algorithm.kl_coefficient else 0.0,
            "old log-probs": forward * old,
            "update": self._update(),
        }

    def early(self) -> float:
        """Return the seconds of the training that is done in a stream of batches; see
        `streaming_mode`.
        """
        how, algorithm, training = (
            streaming_mode(self._config),
            self._config.algorithm,
            self.training(),
        )
        assert isinstance(algorithm, PolicyOptimization)
        if how == "nothing":
            return 0.0
        update = self._passes() / algorithm.minibatches if how == "gradients" else 0.0
        return sum(training.values()) - training["update"] + update

    def stream_end(self, early: float) -> float:
        """Return the seconds from the start of the rollout to the end of the last streamed batch.
        early: Seconds of all streamed batches' work, as balanced as a minibatch.
        """
        algorithm, step = self._config.algorithm, self.step
        assert isinstance(algorithm, PolicyOptimization)
        ends = self.server.group_seconds(step, self.prompts_per_server)
        arrivals = sorted(ends * self._num_servers)[-step.prompts :]
        least = -(-stream_batch_tokens(self._config, self._data_size) * step.prompts // step.tokens)
        # The reference's weights are loaded, and the policy's saved and loaded.
        copied = 3 * max(stage.weights for stage in self.memory.stages) / self.rates.host
        overhead = 0.0 if self._config.lora.rank or not algorithm.kl_coefficient else copied
        free, taken = 0.0, 0
        while taken < step.prompts:
            start = max(free, arrivals[min(taken + least, step.prompts) - 1])
            arrived = bisect_right(arrivals, start)
            balance = self._over_ideal(arrived - taken) / self.over_ideal
            free = start + overhead + early * balance * (arrived - taken) / step.prompts
            taken = arrived
        return free

    @property
    def forward_flops(self) -> float:
        """FLOPs of the language model over the step's trees."""
        step = self.step
        tree = self._cost.tree(self._tree, {})
        output = 2.0 * self._text.vocab_size * self._text.hidden_size
        return step.prompts * tree + step.targets * output

    @property
    def _tree(self) -> Tree:
        """A prompt with its responses."""
        step = self.step
        segments = [self._segment(step.prompt, -1, is_target=False)]
        segments += [self._segment(step.response, 0, is_target=True)] * step.responses
        return Tree(tuple(segments))

    @property
    def vision_flops(self) -> float:
        """FLOPs of the tower over the step's images."""
        side = int(self.step.patches**0.5)
        return self.step.prompts * self._cost.image([(1, side, side)])

    def _segment(self, length: int, parent: int, *, is_target: bool) -> Segment:
        ids = torch.empty(length, device="meta")
        return Segment(ids, ids, parent, is_target)

    @cached_property
    def server(self) -> ServerModel:
        memory = self.memory.server
        assert memory is not None
        return ServerModel.of(self._config, self._hf_config, memory, self.step, self.rates)

    @cached_property
    def rollout(self) -> float:
        """Seconds of the server with the most prompts."""
        return self.server.rollout_seconds(self.step, self.prompts_per_server)

    @property
    def prompts_per_server(self) -> int:
        return -(-self.step.prompts // self._num_servers)

    def _forward(self, passes: float = 1.0, exchanges: float = 1.0) -> float:
        """Return the seconds on the slowest rank of `passes` forward passes of the language model
        over all tokens, with `exchanges` times the exchanges of a forward pass over the tensor,
        context and expert axes. The rank of the busiest experts has more to compute and exchange.
        """
        excess = EXPERT_IMBALANCE - 1 if self._config.parallel.expert > 1 else 0.0
        flops = self.forward_flops * (1 + excess * self._flops_share("experts"))
        compute = passes * flops / self._world_size / self.rates.flops
        parallel, moved = self._config.parallel, self.exchanged()
        moved["expert"] *= 1 + excess
        spans = {
            "tensor": parallel.tensor,
            "context": parallel.tensor * parallel.context,
            "expert": parallel.expert * parallel.expert_tensor,
        }
        exchanged = sum(moved[axis] / self.rates.link(ranks) for axis, ranks in spans.items())
        return (compute + exchanges * exchanged) * self.over_ideal

    def exchanged(self) -> dict[str, float]:
        """Return the bytes that a GPU sends over the tensor, context and expert axes in a forward
        pass over the step's tokens, and for gradients and weights in an update.
        """
        parallel, data = self._config.parallel, self._data_size
        layers = self._architecture["num_layers"] / parallel.pipeline
        hidden, itemsize = self._text.hidden_size, self._options.dtype.itemsize
        moved = self.step.tokens / data / parallel.context * hidden * itemsize * layers
        routed = self._architecture.get("moe_router_topk", 0) / parallel.tensor
        keys = self._architecture["num_query_groups"] * self._architecture["kv_channels"]
        gradients = max(stage.gradients for stage in self.memory.stages)
        return {
            "tensor": 4 * moved * (1 - 1 / parallel.tensor),  # two gathers and scatters per layer
            # keys and values, to all other context ranks
            "context": 2 * moved * keys / hidden / parallel.tensor * (parallel.context - 1),
            "expert": 2 * moved * routed * (1 - 1 / parallel.expert),  # dispatched and combined
            # fp32 gradients are scattered and bf16 weights gathered: 4 + 2 bytes per parameter
            "gradients": 1.5 * gradients * (1 - 1 / data),
        }

    @property
    def over_ideal(self) -> float:
        """Time of a minibatch on the slowest data rank, relative to the ideal. It includes repeated
        prompts, waiting ranks and pipeline bubbles, as the step is planned, with all responses of
        mean length.
        """
        return self._over_ideal(self._num_trees)

    def _over_ideal(self, num_trees: int) -> float:
        ideal = num_trees * self._tree_size.cost / self._data_size
        return self._schedule.time(self._packs(num_trees)) / ideal

    @property
    def bubble(self) -> float:
        """Share of a minibatch's time in which a pipeline stage is idle."""
        return 1 - replace(self._schedule, bubble=0.0).time(self.packs) / self._schedule.time(
            self.packs
        )

    @property
    def packs(self) -> list[list[float]]:
        """Cost of each pack of each data rank in a minibatch."""
        return self._packs(self._num_trees)

    def _packs(self, num_trees: int) -> list[list[float]]:
        if num_trees not in self._planned:
            trees, most = [self._tree_size] * num_trees, self._config.data.pack_tokens
            planned = costs_of(plan_packs(trees, self._data_size, most, self._schedule))
            self._planned[num_trees] = planned
        return self._planned[num_trees]

    @property
    def _data_size(self) -> int:
        return self._world_size // self._config.parallel.model_size

    @property
    def _num_trees(self) -> int:
        """Number of prompts in a minibatch."""
        algorithm = self._config.algorithm
        assert isinstance(algorithm, PolicyOptimization)
        return self.step.prompts // algorithm.minibatches

    @cached_property
    def _tree_size(self) -> TreeSize:
        return TreeSize.of(self._tree, self._cost.segments(self._tree, {}))

    @cached_property
    def _schedule(self) -> Schedule:
        return schedule_of(Layout.from_config(self._config.parallel), self._cost)

    @property
    def update_mfu(self) -> float:
        """Model FLOPs utilization of the update: FLOPs without recomputation, relative to the GPUs'
        peak.
        """
        return 3 * self.forward_flops / self._update() / self._world_size / H100_FLOPS

    def _update(self) -> float:
        """Return the seconds of forward, backward, recomputation and gradient reduction."""
        algorithm = self._config.algorithm
        assert isinstance(algorithm, PolicyOptimization)
        exchanged = self.exchanged()["gradients"] / self.rates.link(self._world_size)
        if self._config.optimizer.offload:  # to the GPU and back
            exchanged += 2 * max(stage.step for stage in self.memory.stages) / self.rates.host
        return self._passes() + algorithm.minibatches * exchanged

    def _passes(self) -> float:
        """Return the seconds of forward, backward and recomputation."""
        recompute = self._config.recompute
        is_full = recompute.language == "full"
        modules = recompute.modules if recompute.language == "selective" else ()
        again = float(is_full)
        if {"mlp", "moe"} & set(modules):
            again += self._flops_share("mlp", "experts")
        if "core_attn" in modules:
            core = ModelCost.of((), self._architecture)  # no matrices
            again += self.step.prompts * core.tree(self._tree, {}) / self.forward_flops
        return self._forward(3 + again, 2.5 + is_full)

    def _flops_share(self, *names: str) -> float:
        """Return the share of parts of the layers in the FLOPs of a token."""
        rest = [x for x in self._entries if model_part(x.megatron) not in names]
        return 1 - ModelCost.of(rest, self._architecture).per_token / self._cost.per_token

    @cached_property
    def _pushed(self) -> list[Entry]:
        """Entries that a sync sends: the ones that training can change, or all of them if the
        server has released its weights.
        """
        lora, rollout = self._config.lora, self._config.rollout
        if rollout.colocate and not rollout.server_args.get("enable_weights_cpu_backup"):
            return list(self._entries)
        indices = trained_entries(self._entries, self._options, lora.targets if lora.rank else None)
        return [self._entries[index] for index in indices]

    @property
    def _pushed_bytes(self) -> int:
        return self._options.dtype.itemsize * sum(map(numel, self._pushed))

    @cached_property
    def received(self) -> int:
        """Bytes that a server's rank receives in a weight sync with the recipe's transport."""
        servers = server_layout(self._config, self._hf_config)
        stored = max(stored_bytes(self._pushed, servers, self._options.dtype.itemsize))
        return received_bytes(self._config.rollout.sync, self._pushed_bytes, stored)

    @cached_property
    def sent(self) -> float:
        """Bytes that a trainer rank sends in a weight sync. Every rank sends alike, to each rank of
        each server; with files the first rank of each stage sends the stage's tensors.
        """
        rollout, parallel = self._config.rollout, self._config.parallel
        if not TRANSPORT_TRAITS[rollout.sync].needs_loader:
            return self._pushed_bytes / parallel.pipeline
        if rollout.colocate:  # all servers of a node read what its ranks hand over
            return float(self.received)
        receivers = self._num_servers * rollout.tensor_parallel
        return self.received * receivers / self._world_size

    @property
    def sync_rounds(self) -> int:
        """Number of buckets that a server's rank receives one after the other in a weight sync."""
        traits = TRANSPORT_TRAITS[self._config.rollout.sync]
        size = GPU_PORTION if traits.needs_loader else BUCKET
        return math.ceil(max(self.received, self.sent) / size)

    def _sync(self) -> float:
        """Return the seconds to send the changed tensors, and to verify them."""
        rollout, rates = self._config.rollout, self.rates
        share = DELTA_SHARE if rollout.sends_changes else 1.0
        if rollout.colocate:
            # Each rank sends its share to the servers of its node. What no rank of the node has
            # comes once over the network, a part to each GPU.
            missing = self._pushed_bytes * (1 - self._share_on_node()) / NODE
            seconds = missing * share / rates.network + self.received * share / rates.nvlink
        else:
            link = rates.nvlink if rollout.mode == "managed" else rates.network
            seconds = max(self.received, self.sent) * share / link
        seconds += self.sync_rounds * rates.sync_round
        if not TRANSPORT_TRAITS[rollout.sync].needs_loader:
            return seconds + self.sent / rates.nvlink  # gathered first
        # Packed, hashed and copied into place; then packed and hashed again.
        seconds += COPIES * self.received / rates.memory
        if rollout.sends_changes:  # what was sent last comes from the host, and goes back anew
            seconds += DELTA_COPIES * self.received / rates.memory + 2 * self.sent / rates.host
        return seconds

    def _share_on_node(self) -> float:
        """Return the share of the model that the ranks of one node hold together."""
        parallel = self._config.parallel
        stages = max(1.0, NODE * parallel.pipeline / self._world_size)
        layers = min(1.0, stages / parallel.pipeline)
        experts = min(1.0, NODE / (parallel.expert * parallel.expert_tensor))
        routed = sum(numel(x) for x in self._entries if ".experts." in x.megatron)
        share = routed / sum(map(numel, self._entries))
        return layers * (1 - share + share * experts)

    def _switch(self) -> float:
        """Return the seconds to switch shared GPUs to the servers and back. The servers' weights
        are dropped, because the sync sends all of them.
        """
        return 2 * self.memory.away / self.rates.host
