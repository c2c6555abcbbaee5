"""Modelled seconds of a recipe's step by phase.

FLOPs come from `models.cost` and the output layer, bytes from the weight-sync plan and the layout.
Nothing is assumed to overlap. `Rates` has the assumptions about the hardware; none of them was
measured with this code. Not covered: rewards, data, scattering of packs, copies of the reference's
weights, stragglers among experts, and a separate critic.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from megavlm.config.algorithm import PolicyOptimization
from megavlm.config.schema import Config
from megavlm.config.transports import TRANSPORT_TRAITS
from megavlm.data.packing import Segment, Tree
from megavlm.families import family
from megavlm.models.common.components import model_part
from megavlm.models.common.config import ModelOptions
from megavlm.models.common.mapping import Entry
from megavlm.models.cost import H100_FLOPS, LANGUAGE_SHARE, TOWER_SHARE, ModelCost
from megavlm.parallel.mesh import Layout
from megavlm.run.capacity.memory import RunMemory, ServerRankMemory, image_tokens
from megavlm.run.capacity.weight_updates import received_bytes, server_layout, stored_bytes
from megavlm.training.step.balance import TreeSize
from megavlm.training.step.pack_plan import Schedule, costs_of, plan_packs
from megavlm.training.step.step_plan import schedule_of
from megavlm.weight_sync.ownership import numel
from megavlm.weight_sync.trainable import trained_entries

TEXT_TOKENS = 128  # assumed text tokens of a prompt, in addition to its image


@dataclass(frozen=True)
class Rates:
    """Assumed rates of an H100 node: peaks of the data sheet times an expected share.

    flops: Dense bf16 FLOPs per second, H100_FLOPS at 40 %. encoder: FLOPs per second of a vision
    tower with its small matrices, at 25 %. memory: 3.35 TB/s at 60 %. nvlink: 450 GB/s per
    direction at 75 %. network: One 400 Gb/s port per GPU at 80 %. host: PCIe 5 at 40 %. token:
    Fixed seconds of a server's decoding step.
    """

    flops: float = LANGUAGE_SHARE * H100_FLOPS
    encoder: float = TOWER_SHARE * H100_FLOPS
    memory: float = 0.6 * 3.35e12
    nvlink: float = 0.75 * 450e9
    network: float = 0.8 * 50e9
    host: float = 0.4 * 64e9
    token: float = 0.004


@dataclass(frozen=True)
class StepWork:
    """Work of a step. prompts: Number of prompts. responses: Number of responses per prompt.
    prompt: Tokens of a prompt. response: Mean tokens of a response. longest: Tokens of the longest
    response. patches: Patches of an image.
    """

    prompts: int
    responses: int
    prompt: int
    response: int
    longest: int
    patches: int

    @classmethod
    def of(cls, config: Config, hf_config: Any) -> "StepWork":
        """Return a recipe's step, assuming one image of the maximum size per prompt and a mean
        response length of half the maximum.
        """
        algorithm = config.algorithm
        assert isinstance(algorithm, PolicyOptimization)
        merge = family(hf_config.model_type).patch_sizes(hf_config).merge
        image, longest = int(image_tokens(config, hf_config)), config.rollout.max_new_tokens
        return cls(
            algorithm.prompts_per_step,
            algorithm.responses_per_prompt,
            min(image + TEXT_TOKENS, config.data.max_prompt_tokens),
            longest // 2,
            longest,
            image * merge**2,
        )

    @property
    def tokens(self) -> int:
        return self.prompts * (self.prompt + self.responses * self.response)

    @property
    def targets(self) -> int:
        return self.prompts * self.responses * self.response


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
    ) -> None:
        """Store the arguments. rates: None takes the defaults. memory: The run's memory, if it is
        already known.
        """
        self.step, self.rates = StepWork.of(config, hf_config), rates or Rates()
        self.memory = memory or RunMemory.of(config, hf_config, world_size)
        self._config, self._hf_config, self._world_size = config, hf_config, world_size
        self._num_servers, self._text = num_servers, hf_config.text_config
        parts = family(hf_config.model_type)
        self._entries, self._architecture = parts.mapping(hf_config), parts.architecture(hf_config)
        self._options = ModelOptions.from_config(config)
        self._cost = ModelCost.of(self._entries, self._architecture)

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each phase, and their sum as `total`."""
        algorithm = self._config.algorithm
        assert isinstance(algorithm, PolicyOptimization)
        forward, minibatches = self._forward(), algorithm.minibatches
        old = (minibatches - 1) / minibatches  # the first minibatch needs no pass for old log-probs
        phases = {
            "rollout": self._rollout(),
            "vision": self.vision_flops / self._world_size / self.rates.encoder,
            "reference": forward if algorithm.kl_coefficient else 0.0,
            "old log-probs": forward * old,
            "update": self._update(),
            "sync": self._sync(),
        }
        if self._config.rollout.colocate:
            phases["switch"] = self._switch()
        return phases | {"total": sum(phases.values())}

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
        return self.step.prompts * self._image_flops

    @property
    def _image_flops(self) -> float:
        side = int(self.step.patches**0.5)
        return self._cost.image((1, side, side))

    def _segment(self, length: int, parent: int, *, is_target: bool) -> Segment:
        ids = torch.empty(length, device="meta")
        return Segment(ids, ids, parent, is_target)

    def _rollout(self) -> float:
        """Return the seconds of prefill and decoding."""
        step = self.step
        requests = -(-step.prompts * step.responses // self._num_servers)
        running = max(1, min(requests, self.max_running))
        waves = requests / running
        # The last wave lasts until its longest response ends, the other waves for the mean length.
        steps = step.longest + max(0.0, waves - 1) * step.response
        prefill = step.prompts / self._num_servers * self.prefill_seconds()
        return prefill + steps * self.decode_seconds(running)

    @property
    def _server(self) -> ServerRankMemory:
        assert self.memory.server is not None
        return self.memory.server

    @property
    def max_running(self) -> int:
        """Number of responses of mean length whose KV cache fits a server."""
        context = self.step.prompt + self.step.response
        ranks = self._config.rollout.tensor_parallel
        return int(self._server.cache / (self._cache_bytes(ranks) * context))

    def decode_seconds(self, running: int) -> float:
        """Return the seconds of a server's decoding step: the longer of the time to read the
        weights and the running responses' cache, and the time to compute.
        """
        rates, ranks = self.rates, self._config.rollout.tensor_parallel
        cache = running * self._cache_bytes(ranks) * (self.step.prompt + self.step.response)
        read = (self._server.weights + cache) / rates.memory
        computed = running * self._cost.per_token / ranks / rates.flops
        return max(read, computed) + rates.token

    def prefill_seconds(self) -> float:
        """Return a server's seconds for the prefill of a prompt with its image."""
        rates, ranks = self.rates, self._config.rollout.tensor_parallel
        flops = self._cost.per_token * self.step.prompt
        flops += self._image_flops * rates.flops / rates.encoder
        return flops / ranks / rates.flops

    def _cache_bytes(self, ranks: int) -> float:
        """Return the bytes per token in a server rank's KV cache."""
        heads = -(-self._text.num_key_value_heads // ranks)
        width = self._architecture["kv_channels"] * heads
        itemsize = self._options.dtype.itemsize
        return 2.0 * self._architecture["num_layers"] * width * itemsize

    def _forward(self, passes: float = 1.0, exchanges: float = 1.0) -> float:
        """Return the seconds on the slowest rank of `passes` forward passes of the language model
        over all tokens, with `exchanges` times the exchanges of a forward pass over the tensor,
        context and expert axes.
        """
        compute = passes * self.forward_flops / self._world_size / self.rates.flops
        exchanged = self.exchanged()
        moved = exchanges * sum(exchanged[axis] for axis in ("tensor", "context", "expert"))
        return (compute + moved / self.rates.nvlink) * self.over_ideal

    def exchanged(self) -> dict[str, float]:
        """Return the bytes that a GPU sends over the tensor, context and expert axes in a forward
        pass over the step's tokens, and for gradients and weights in an update.
        """
        parallel, data = self._config.parallel, self._world_size // self._config.parallel.model_size
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
        data = self._world_size // self._config.parallel.model_size
        return self._schedule.time(self.packs) * data / (self._num_trees * self._tree_size.cost)

    @property
    def bubble(self) -> float:
        """Share of a minibatch's time in which a pipeline stage is idle."""
        return 1 - replace(self._schedule, bubble=0.0).time(self.packs) / self._schedule.time(
            self.packs
        )

    @cached_property
    def packs(self) -> list[list[float]]:
        """Cost of each pack of each data rank in a minibatch."""
        trees = [self._tree_size] * self._num_trees
        data = self._world_size // self._config.parallel.model_size
        most = self._config.data.pack_tokens
        return costs_of(plan_packs(trees, data, most, self._schedule))

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
        recompute = self._config.recompute
        again = {"none": 0.0, "full": 1.0, "selective": self._mlp_share}[recompute.language]
        if recompute.language == "selective" and not {"mlp", "moe"} & set(recompute.modules):
            again = 0.0
        passes = self._forward(3 + again, 2.5 + (recompute.language == "full"))
        algorithm = self._config.algorithm
        assert isinstance(algorithm, PolicyOptimization)
        link = self.rates.nvlink if self._world_size <= 8 else self.rates.network
        exchanged = self.exchanged()["gradients"] / link
        if self._config.optimizer.offload:  # to the GPU and back
            exchanged += 2 * max(stage.step for stage in self.memory.stages) / self.rates.host
        return passes + algorithm.minibatches * exchanged

    @property
    def _mlp_share(self) -> float:
        """Share of MLPs and experts in the parameters of the layers that a token uses."""
        parts = {"mlp": 0.0, "experts": 0.0, "attention": 0.0}
        for entry in self._entries:
            name = model_part(entry.megatron)
            if name in parts and ".layers." in entry.megatron:
                parts[name] += numel(entry)
        return 1 - parts["attention"] / max(sum(parts.values()), 1.0)

    @cached_property
    def _changed(self) -> list[Entry]:
        """Entries that training can change."""
        lora = self._config.lora
        indices = trained_entries(self._entries, self._options, lora.targets if lora.rank else None)
        return [self._entries[index] for index in indices]

    @property
    def _changed_bytes(self) -> int:
        return self._options.dtype.itemsize * sum(map(numel, self._changed))

    @cached_property
    def received(self) -> int:
        """Bytes that a server's rank receives in a weight sync with the recipe's transport."""
        servers = server_layout(self._config, self._hf_config)
        stored = max(stored_bytes(self._changed, servers, self._options.dtype.itemsize))
        return received_bytes(self._config.rollout.sync, self._changed_bytes, stored)

    def _sync(self) -> float:
        """Return the seconds to gather the changed tensors and send them."""
        rollout, rates = self._config.rollout, self.rates
        link = rates.nvlink if rollout.mode == "managed" else rates.network
        gathered = self._changed_bytes / self._config.parallel.pipeline  # on one rank of each stage
        if TRANSPORT_TRAITS[rollout.sync].by_stage:
            sent = max(float(self.received), gathered)  # a stage sends all that it has
        else:  # rank 0 sends to every rank of every server
            sent = float(self.received) * self._num_servers * rollout.tensor_parallel
        return gathered / rates.nvlink + sent / link

    def _switch(self) -> float:
        """Return the seconds to switch shared GPUs to the servers and back."""
        # The trainer's memory moves to the host and back, except gradients: they start from zero.
        moved = max(2 * (stage.weights + stage.optimizer) for stage in self.memory.stages)
        # The server's weights are only loaded, from their copy on the host.
        return (moved + self._server.weights) / self.rates.host
