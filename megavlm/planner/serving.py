"""Modelled seconds of a rollout server: prefill, decoding steps, and a step's prompts.

A rank's decoding step multiplies the batch with its weights, reads the cache of each response (a
shared prompt is stored once, and read for each), updates the states of linear attention, reduces
over the server's ranks, and samples from logits in fp32. With speculative decoding a step is a pass
that drafts tokens one by one and verifies them together, and adds `accepted` of them. Not covered:
memory that the scheduler keeps free for the rest of responses, experts that are chosen more often,
and attention that is data-parallel within a server.
"""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from typing import Any, Self

from megavlm.config.schema import Config
from megavlm.families import family
from megavlm.inference.connect import IMAGE_TOKENS
from megavlm.inference.server_args import ServerOptions
from megavlm.models.common.components import model_part
from megavlm.models.common.config import ModelOptions
from megavlm.models.cost import ModelCost
from megavlm.planner.memory import ServerRankMemory
from megavlm.planner.rates import Rates
from megavlm.planner.weight_updates import server_layout, stored_bytes
from megavlm.planner.work import StepWork

# SGLang 0.5.23: passes of the sampler over logits [requests, V] in fp32 (sampling with log-probs);
# states that are kept for each running request with a radix cache and overlapped scheduling;
# memory of states over memory of keys and values (mamba_full_memory_ratio).
SAMPLER_PASSES, STATES_PER_REQUEST, STATE_RATIO = 14, 5, 0.9
# SGLang 0.5.23 with speculative decoding: drafts of a pass, and requests that run at a time.
DRAFTS, DRAFTED_REQUESTS = 3, 48
ACCEPTED = 2.0  # tokens that a pass adds; no model's value is known


@dataclass(frozen=True)
class ServerModel:
    """Model of one server. Bytes are those of one rank.

    ranks: Number of its ranks. layers: Number of the model's layers. hidden, vocabulary: Widths of
    hidden states and logits. weights: Bytes of the language model's weights without routed experts.
    experts: Bytes of routed experts. routed: Share of the experts that a token is routed to.
    per_token, per_image: FLOPs of a token in the layers, and of a prompt's image. token: Bytes of a
    token in the cache. state: Bytes of a response's states of linear attention. cache: Bytes for
    keys and values. states: Bytes for states. graphs: Largest number of requests with a CUDA graph;
    None if every number has one. concurrency: Maximum number of prompts in flight. drafts: Tokens
    that a pass drafts; 0 without speculative decoding. head: Bytes that a draft of all requests
    reads: the draft head and the output layer. accepted: Tokens that a pass adds to a response.
    most_requests: Maximum number of requests that run at a time; None without one.
    """

    ranks: int
    layers: int
    hidden: int
    vocabulary: int
    itemsize: int
    weights: float
    experts: float
    routed: float
    per_token: float
    per_image: float
    token: float
    state: float
    cache: float
    states: float
    graphs: int | None
    concurrency: int
    rates: Rates
    drafts: int = 0
    head: float = 0.0
    accepted: float = 1.0
    most_requests: int | None = None

    @classmethod
    def of(
        cls,
        config: Config,
        hf_config: Any,
        memory: ServerRankMemory,
        work: StepWork,
        rates: Rates | None = None,
    ) -> Self:
        """Return a recipe's server. memory: Memory of its ranks."""
        parts, text = family(hf_config.model_type), hf_config.text_config
        entries, architecture = parts.mapping(hf_config), parts.architecture(hf_config)
        layout, ranks = server_layout(config, hf_config), config.rollout.tensor_parallel
        itemsize = ModelOptions.from_config(config).dtype.itemsize
        output = "embedding" if hf_config.tie_word_embeddings else "output"
        read = ("attention", "mlp", "experts", output)
        language = [x for x in entries if model_part(x.megatron) in read]
        routed = [x for x in language if x.expert is not None]
        others = [x for x in language if x.expert is None]
        cost, side = ModelCost.of(entries, architecture), int(work.patches**0.5)
        linear = sum(architecture.get("linear_attention_freq", ()))
        cached = (architecture["num_layers"] - linear) * architecture["kv_channels"]
        # With more ranks than key-value heads, several ranks hold the same head.
        heads = -(-text.num_key_value_heads // ranks)
        ratio = 0.0
        if linear:
            ratio = float(config.rollout.server_args.get("mamba_full_memory_ratio") or STATE_RATIO)
        options = ServerOptions.from_config(config, config.model.folder, "cuda")
        given, head, drafts = config.rollout.server_args, [], 0
        if None not in (parts.draft_head, config.rollout.draft_algorithm):
            drafts = int(given.get("speculative_num_steps") or DRAFTS)
            drafting = parts.mapping(hf_config, draft_head=True)
            head = [x for x in drafting if x.megatron.startswith("draft_head.")]
            head += [x for x in language if model_part(x.megatron) == output]
        most = given.get("max_running_requests") or (DRAFTED_REQUESTS if drafts else None)
        return cls(
            ranks=ranks,
            layers=architecture["num_layers"],
            hidden=text.hidden_size,
            vocabulary=text.vocab_size,
            itemsize=itemsize,
            weights=max(stored_bytes(others, layout, itemsize)),
            experts=max(stored_bytes(routed, layout, itemsize)),
            routed=architecture.get("moe_router_topk", 0) / architecture.get("num_moe_experts", 1),
            per_token=cost.per_token,
            per_image=cost.image([(1, side, side)]),
            token=2.0 * cached * heads * itemsize,
            state=linear * _layer_state(architecture, itemsize) / ranks if linear else 0.0,
            cache=memory.cache / (1 + ratio),
            states=memory.cache * ratio / (1 + ratio),
            graphs=options.arguments().get("cuda_graph_max_bs_decode"),
            concurrency=_in_flight(config, work.patches / parts.patch_sizes(hf_config).merge ** 2),
            rates=rates or Rates(),
            drafts=drafts,
            head=max(stored_bytes(head, layout, itemsize)) if drafts else 0.0,
            accepted=ACCEPTED if drafts else 1.0,
            most_requests=most,
        )

    def max_running(self, work: StepWork) -> int:
        """Return how many responses the server's memory has room for, if they have as many tokens
        as running responses have on average.
        """
        most = int(self.cache / (self.token * (work.prompt / work.responses + work.resident)))
        if self.state:
            kept = STATES_PER_REQUEST + (self.drafts + 1 if self.drafts else 0)
            most = min(most, int(self.states / self.state / kept))
        return max(1, min(most, self.most_requests or most))

    def decode_seconds(self, running: int, context: float) -> float:
        """Return the seconds in which each of the running responses gets a token. context: Mean
        tokens of the running responses, including their prompts.
        """
        return self._pass_seconds(running, context) / self.accepted

    def least_accepted(self, running: int, context: float) -> float:
        """Return how many tokens a pass must add so that drafts pay at all."""
        plain = replace(self, drafts=0, accepted=1.0)
        return self._pass_seconds(running, context) / plain._pass_seconds(running, context)

    def _pass_seconds(self, running: int, context: float) -> float:
        rates, tokens = self.rates, running * (self.drafts + 1)
        weights = self.weights + self.experts * (1 - (1 - self.routed) ** tokens)
        output = 2 * self.vocabulary * self.hidden
        matrices = max(
            weights / rates.memory, tokens * (self.per_token + output) / self.ranks / rates.flops
        )
        states = 2 * self.state + SAMPLER_PASSES * 4 * self.vocabulary
        moved = running * context * self.token + tokens * states
        seconds = matrices + moved / rates.memory + self._exchange_seconds(tokens)
        if self.graphs is not None and running > self.graphs:
            seconds = max(seconds, self.layers * rates.eager)
        flops = running * (self.per_token / self.layers + output) / self.ranks
        draft = max(self.head / rates.memory, flops / rates.flops) + rates.layer
        return seconds + self.layers * rates.layer + rates.token + self.drafts * draft

    def _exchange_seconds(self, running: int) -> float:
        """Return the seconds of two all-reduces in each layer, and to gather the logits."""
        if self.ranks == 1:
            return 0.0
        reduced = 2 * self.layers * 2 * self.hidden
        moved = running * self.itemsize * (1 - 1 / self.ranks) * (reduced + self.vocabulary)
        return 2 * self.layers * self.rates.all_reduce + moved / self.rates.link(self.ranks)

    def prefill_seconds(self, work: StepWork) -> float:
        """Return the seconds for the prefill of a prompt with its image."""
        encoded = self.per_image / self.rates.encoder
        return (encoded + self.per_token * work.prompt / self.rates.flops) / self.ranks

    def rollout_seconds(self, work: StepWork, num_prompts: int) -> float:
        """Return the seconds to answer `num_prompts` prompts that arrive together."""
        return self.group_seconds(work, num_prompts)[-1]

    def group_seconds(self, work: StepWork, num_prompts: int) -> list[float]:
        """Return the seconds after which each of `num_prompts` prompts that arrive together is
        answered, ascending.

        A response starts when the server has room for it, in the order of prompts. Its prompt is
        computed first, and nothing else meanwhile. A group is in flight until its longest response
        ends.
        """
        lengths, prefill = work.lengths(num_prompts * work.responses), self.prefill_seconds(work)
        waiting, most = deque(enumerate(lengths)), self.max_running(work)
        running: list[tuple[int, int, int]] = []  # step of the end, step of the start, group
        left: dict[int, int] = {}  # responses of each group in flight that have not ended
        seconds, step, starts = 0.0, 0, 0  # starts: sum of the running responses' first steps
        ends: list[float] = []
        while waiting or running:
            while waiting and len(running) < most:
                group = waiting[0][0] // work.responses
                if group not in left:
                    if len(left) == self.concurrency:
                        break
                    left[group] = work.responses
                    seconds += prefill
                heappush(running, (step + waiting.popleft()[1], step, group))
                starts += step
            end, count = running[0][0], len(running)
            context = work.prompt + (step + end) / 2 - starts / count
            seconds += (end - step) * self.decode_seconds(count, context)
            step = end
            while running and running[0][0] == step:
                _, start, group = heappop(running)
                starts -= start
                left[group] -= 1
                if not left[group]:
                    del left[group]
                    ends.append(seconds)
        return ends


def _in_flight(config: Config, image_tokens: float) -> int:
    """Return how many prompts with an image the client has in flight at a server, as
    `RequestLimits.slots` bounds them.
    """
    most = config.rollout.image_tokens or IMAGE_TOKENS["cuda"]
    slots = math.ceil(image_tokens * config.rollout.concurrency / most)
    return max(1, config.rollout.concurrency // max(1, slots))


def _layer_state(architecture: Mapping[str, Any], itemsize: int) -> int:
    """Return the bytes that a response keeps of a layer with Gated DeltaNet: the recurrent state in
    fp32, and the last inputs of the convolution.
    """
    values = architecture["linear_num_value_heads"] * architecture["linear_value_head_dim"]
    keys = architecture["linear_num_key_heads"] * architecture["linear_key_head_dim"]
    inputs = (architecture["linear_conv_kernel_dim"] - 1) * (2 * keys + values)
    return int(4 * values * architecture["linear_key_head_dim"] + itemsize * inputs)
