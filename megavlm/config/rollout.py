"""The `rollout` section: SGLang servers, sampling, and how weights reach the servers."""

from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

from megavlm.config.section import Section, bounded, follows
from megavlm.config.transports import TRANSPORT_TRAITS, transports_with

# Options of the server that megavlm sets itself, with the key to set instead.
OWNED_SERVER_ARGS = {
    "model_path": "model.folder",
    "host": "rollout.mode=external",
    "port": "rollout.port",
    "tp": "rollout.tensor_parallel",
    "tp_size": "rollout.tensor_parallel",
    "tensor_parallel_size": "rollout.tensor_parallel",
    "nnodes": "rollout.tensor_parallel",
    "node_rank": "rollout.tensor_parallel",
    "dist_init_addr": "rollout.tensor_parallel",
    "nccl_init_addr": "rollout.tensor_parallel",
    "base_gpu_id": "rollout.gpus",
    "enable_memory_saver": "rollout.colocate",
    "dtype": "model.dtype",
    "config": "rollout.server_args",
    "device": "CUDA_VISIBLE_DEVICES",
    "quantization": "rollout.quantization",
}
SAMPLING_MASK_MAX_TOKENS = 4096  # SGLang's default
# Options with which a run cannot work, or must not.
REFUSED_SERVER_ARGS = {
    "torchao_config": "SGLang cannot load the weights of an update into quantised ones",
    "speculative_accept_threshold_single": "servers would sample tokens from another distribution "
    "than the one that is trained",
    "speculative_accept_threshold_acc": "servers would sample tokens from another distribution "
    "than the one that is trained",
    "trust_remote_code": "it runs code from the model folder",
    "enable_custom_logit_processor": "it runs code from requests",
    "api_key": "it would show in the process list, and each run makes its own",
    "admin_api_key": "it would show in the process list, and each run makes its own",
}


@dataclass(frozen=True, kw_only=True)
class Rollout(Section):
    """The rollout servers, and how they sample responses."""

    mode: Literal["managed", "external"] = "managed"
    """Who starts the servers. `managed`: megavlm starts and stops them on the machine of the
    trainer's rank 0, or with `rollout.colocate` on every node of the trainer. `external`: running
    servers at `rollout.urls` are used."""

    servers: int = bounded(1, least=1)
    """Number of managed servers; with `rollout.colocate` on each node of the trainer."""

    min_servers: int = bounded(1, least=1)
    """Minimum number of servers that the run continues with. It ends with an error when fewer
    servers are left, counting servers that may still recover."""

    max_restarts: int = bounded(3, least=0)
    """Restarts of each managed server that dies. The restart counter resets after ten healthy
    minutes."""

    urls: tuple[str, ...] = ()
    """Addresses of external servers, each http://HOST:PORT. The environment variables
    MEGAVLM_ROLLOUT_API_KEY and MEGAVLM_ROLLOUT_ADMIN_KEY give their keys."""

    router: str | None = None
    """Address of an sglang-router in front of the external servers. Requests are sent to the
    router, weights to the servers."""

    port: int | None = bounded(None, least=1, most=65535)
    """Port of the first managed server of a node; its others use the ports after it. Null chooses
    free ports."""

    tensor_parallel: int = bounded(1, least=1)
    """Tensor-parallel ranks of each server. A managed server runs on this machine only; a server
    that a Slurm job starts may have a multiple of a rollout node's GPUs, and then uses whole
    nodes."""

    gpus: tuple[int, ...] = bounded((), least=0)
    """GPUs of a node for the ranks of its managed servers, in order. Empty uses the GPUs
    after the trainer's, or the trainer's GPUs with `rollout.colocate`."""

    colocate: bool = False
    """Run trainer and servers on the same GPUs, on any number of nodes. They take turns, and each
    releases its memory to the other."""

    temperature: float = bounded(1.0, above=0)
    """Sampling temperature of training rollouts and of the sampled evaluation. The trainer computes
    its log-probs at the same temperature."""

    top_p: float = bounded(1.0, above=0, most=1)
    """Sample from the likeliest tokens that together have this probability (nucleus sampling). The
    trainer computes its log-probs among the same tokens, which servers return. A value below 1
    needs `rollout.top_k`, as servers return sets of limited size."""

    top_k: int = bounded(0, least=0)
    """Sample from so many of the likeliest tokens. With `rollout.top_p`, tokens must be among both.
    0 sets no limit."""

    max_new_tokens: int = bounded(4, least=1)
    """Maximum length of the response of a turn in tokens. The default suits the demo's one-word
    answers."""

    suppress_special_tokens: bool = True
    """Never sample unused ids of the vocabulary, or special tokens other than the end of the
    response. A sampled image token would be treated as an image when the response is trained
    on."""

    oversample: float = bounded(1.0, least=1)
    """Number of steps whose prompts are started and not yet trained on, at most
    `rollout.max_staleness` + 1 (partial rollouts). Steps train on groups as they are complete, and
    wait for slow ones only if these would be too old in the next step. 1 turns it off: steps train
    on groups in the order of their prompts, and prompts of max_staleness + 1 steps are started."""

    max_staleness: int = bounded(0, least=0, most=16)
    """Maximum staleness of rollouts in steps. With 0, trainer and servers take turns, and a step
    trains on rollouts of its own weights. With k above 0, a separate process generates rollouts
    while the trainer trains: prompts for up to k + 1 steps are started and not yet trained on, and
    no token is sampled by weights that are more than k steps old. `algorithm.importance` corrects
    for the age. A value above 1 helps only if the time of rollouts varies from step to step. With
    `rollout.colocate` they take turns all the same: set 1 and `rollout.oversample`, so that steps
    need not wait for slow responses, which are aborted and go on in the next step."""

    streaming: bool = False
    """Work on the groups of a step as they arrive, in a stream of batches, while the servers
    generate the others. A streamed batch has enough tokens for a round of packs on every data rank.
    Its images are encoded and its log-probs computed at once, and the gradient of the step's first
    update accumulates over the streamed batches; the loss is divided by the number of tokens or
    sequences at the end. The result is that of a step without streaming, up to rounding, and no
    token is stale. It pays where trainer and servers have GPUs of their own. False repeats a run
    bit by bit: with true, the order of sums is the order of arrival."""

    replay: str | None = None
    """Folder of recorded rollouts to train on: RUN_DIR/rollouts of a run with
    `run.record_rollouts`. Step n trains on the groups of step n of that run: no responses are
    sampled, no rewards are computed, and no server is started unless the run evaluates. Data files,
    model folder and `data` keys must be the same as in the recorded run. Null samples
    responses."""

    start_timeout: float = bounded(300, above=0)
    """Seconds in which a started server must become healthy. An external server that cannot be
    reached for this long no longer counts for `rollout.min_servers`; the run keeps probing it, and
    updates its weights before it serves again. Loading a large model and capturing CUDA graphs
    take minutes."""

    request_timeout: float = bounded(300, above=0)
    """Timeout of a request to a server in seconds. A request for responses gets a tenth of a second
    more for each token that it may sample: 3,277 s more for `rollout.max_new_tokens` of 32,768.
    Requests for responses and for weight updates are retried."""

    on_timeout: Literal["fail", "drop", "requeue"] = "fail"
    """Handling of a training group whose request times out in all four attempts. `fail` ends the
    run, which can resume from its last checkpoint. `drop` leaves the group out, and `requeue` asks
    its prompt again in a later step; the step uses another prompt instead. The run still ends if
    more groups of a step time out than it trains on, or if a request of an evaluation times
    out."""

    health_check_timeout: float = bounded(60, above=0)
    """Seconds without an answer to a health probe and without a sign of work after which a server
    is considered hung. A server that works is busy, however long it takes: on a CPU this is
    judged by the CPU time of its processes, elsewhere by the counters of its /v1/loads. The default
    leaves time for more than two probes, each of which SGLang answers within 20 s."""

    concurrency: int = bounded(64, least=1)
    """Maximum number of prompts in flight at each server. All responses to a prompt are one
    request."""

    image_tokens: int | None = bounded(None, least=1)
    """Maximum number of image tokens of the prompts in flight at each server; a prompt with more is
    sent by itself. It bounds how many images a server has to encode before it answers, and has no
    effect for images of up to `image_tokens` / `concurrency` tokens. Null uses 1048576 on a GPU,
    which is 784 images of one megapixel, with 20 GB of pixels in the server's memory, and 8192 on a
    CPU, where such an image takes seconds. A lower limit keeps prompts waiting although others have
    long been encoded and only generate."""

    sync: Literal["tensor", "distributed", "store", "disk"] = follows("tensor")
    """Transport of weight updates. `tensor`: every rank hands its shards to the servers on its
    node, by CUDA IPC on GPUs and by shared memory on CPUs. `distributed`: every rank sends its
    shards to servers anywhere, by NCCL or gloo. `store`: every rank writes its shards, or what has
    changed in them, to `rollout.store`, and servers that no network of ranks reaches read them from
    there. `disk`: the first rank of each pipeline stage
    writes files to a folder that trainer and servers share, for servers without megavlm's weight
    loader. Null uses `distributed` for `rollout.mode=external`, whose servers may be on other
    machines, and `tensor` otherwise."""

    store: str | None = None
    """Folder or URL (s3://BUCKET/FOLDER, or another kind that fsspec opens) of
    `rollout.sync=store`, which trainer ranks and servers write and read. A store belongs to one
    run. Null uses RUN_DIR/store."""

    sync_delta: bool = False
    """Send only the numbers that have changed since the last update, as positions and values, to
    servers that have the others. It pays where servers are on other machines: Adam at a learning
    rate of 1e-6 changes a few percent of the bfloat16 numbers in a step. Each rank keeps what it
    sent in host memory, 2 bytes for each bfloat16 number that it sends. Checksums are still of
    whole weights. An update of everything, and one after servers failed or came back, is sent
    whole."""

    pause_mode: Literal["abort", "retract", "in_place"] = follows("abort")
    """Handling of requests in flight when weights are updated. `abort` ends them, which takes
    SGLang a second; `retract` recomputes their cache with the new weights; `in_place` continues
    with the cache that the old weights computed. Null uses `in_place` if `rollout.max_staleness` is
    above 0 without `rollout.colocate`, and `abort` otherwise."""

    lora: Literal["merged", "adapter"] = "merged"
    """Form in which adapters are sent to the servers. `merged` sends the weights that they change;
    `adapter` sends only the adapters, which is less to send but slower to serve, and needs
    `lora.targets` among language.attention, language.mlp and language.experts."""

    quantization: Literal["fp8"] | None = None
    """Form of the servers' weights. `fp8` stores the linear layers of the language model in e4m3,
    with a scale for each block of 128 x 128 weights: half the memory, half the bytes of an update,
    and faster decoding. Servers start without weights; each rank of the trainer quantises its own
    shards as it sends them. Tower, merger, embeddings, output head, routers and norms stay in
    bfloat16. `algorithm.importance` corrects for what the rounding changes. It needs
    `model.dtype` bfloat16 and GPUs that compute in FP8 (Ada, Hopper or newer); a CPU computes with
    the same weights in bfloat16. Null keeps the trainer's dtype."""

    server_args: dict[str, Any] = field(default_factory=dict)
    """Further options of sglang.launch_server by their long names, for example
    {mem_fraction_static: 0.8}. {speculative_algorithm: NEXTN} decodes speculatively with the
    `mtp.*` head of Qwen3.5, {speculative_algorithm: EAGLE3, speculative_draft_model_path: FOLDER}
    with an EAGLE-3 head. With `rollout.mode=external` they apply to servers that a Slurm job
    or `megavlm plan --servers` starts; servers that already run keep their own options."""

    @property
    def steps_started(self) -> float:
        """Number of steps whose prompts are started and not yet trained on, at most."""
        return self.oversample if self.oversample > 1 else self.max_staleness + 1.0

    @property
    def is_ahead(self) -> bool:
        """True if responses are generated while the trainer trains, by a process of their own."""
        return (self.max_staleness > 0 or self.streaming) and not self.colocate

    @property
    def is_stale(self) -> bool:
        """True if responses go on while weights are pushed."""
        return self.max_staleness > 0 and not self.colocate

    @property
    def samples_likeliest(self) -> bool:
        """True if top-p or top-k leave less likely tokens out."""
        return self.top_p < 1 or self.top_k > 0

    @property
    def draft_algorithm(self) -> str | None:
        """SGLang's algorithm by which servers draft tokens with the model's own head (`mtp.*`), or
        with an EAGLE-3 head in `draft_folder`.
        """
        algorithm = str(self.server_args.get("speculative_algorithm")).upper()
        drafting = ("NEXTN", "EAGLE") if self.draft_folder is None else ("EAGLE3",)
        return algorithm if algorithm in drafting else None

    @property
    def draft_folder(self) -> str | None:
        """Folder of the draft model, if it is not a part of the model."""
        folder = self.server_args.get("speculative_draft_model_path")
        return None if folder is None else str(folder)

    @property
    def sends_changes(self) -> bool:
        """True if updates have only the numbers that have changed."""
        return self.sync_delta or self.sync == "store"

    @property
    def takes_changes(self) -> bool:
        """True if servers may join and leave a run (`megavlm servers`)."""
        return self.mode == "external" and self.router is None

    def check(self) -> None:
        if self.mode == "external":
            self._check_external()
        else:
            self._check_managed()
        for url in self.urls:
            _check_url("urls", url)
        count = len(self.urls) if self.mode == "external" else self.servers
        if not self.colocate:  # on several nodes there are more
            self.check_servers(count)
        for name, value in self.server_args.items():
            plain = name.lstrip("-").replace("-", "_")
            if plain == "mm_feature_transport" and value not in (None, "cpu"):
                # SGLang 0.5.23 frees the memory when a request has read it, but sends the same
                # memory with n + 1 requests of a prompt.
                raise ValueError(
                    f"rollout.server_args.{name}={value} would give an image's GPU memory to the "
                    "next image after the first of a prompt's responses has read it: set it to cpu"
                )
            if plain in OWNED_SERVER_ARGS:
                raise ValueError(
                    f"rollout.server_args.{name} is set by megavlm: use {OWNED_SERVER_ARGS[plain]}"
                )
            if plain in REFUSED_SERVER_ARGS:
                raise ValueError(
                    f"rollout.server_args.{name} is refused, because {REFUSED_SERVER_ARGS[plain]}: "
                    "remove it"
                )
        if self.store is not None and self.sync != "store":
            raise ValueError(
                f"rollout.store={self.store} is only used with rollout.sync=store: set it, or "
                "remove rollout.store"
            )
        if self.sync == "store":
            self._check_store()
        self._check_quantization()
        self._check_delta()
        if self.samples_likeliest:
            self._check_likeliest()
        if self.router is not None and self.suppress_special_tokens:
            # sglang-router 0.3.2 rewrites requests with only the sampling parameters it knows.
            raise ValueError(
                f"rollout.router={self.router} leaves logit biases out of the requests that it "
                "passes on, but rollout.suppress_special_tokens=true is one: servers would sample "
                "from another distribution than the one that is trained; set "
                "rollout.suppress_special_tokens=false or rollout.router=null"
            )

    def check_servers(self, count: int) -> None:
        """Raise ValueError if the `count` servers of a run are too few."""
        if self.min_servers > count:
            raise ValueError(
                f"rollout.min_servers={self.min_servers} is more than the {count} servers that "
                "there are: lower it"
            )

    def check_node(self, gpus: int, node: str) -> None:
        """Raise ValueError if a managed server needs more than the GPUs of `node`."""
        if self.tensor_parallel > gpus:
            raise ValueError(
                f"rollout.tensor_parallel={self.tensor_parallel} is more than the {gpus} GPUs of "
                f"{node}, on which a server of rollout.mode=managed stays: lower it, or give the "
                "servers nodes of their own (megavlm launch --rollout-nodes)"
            )

    def _check_likeliest(self) -> None:
        key = f"rollout.top_p={self.top_p:g}" if self.top_p < 1 else f"rollout.top_k={self.top_k}"
        most = self.server_args.get("sampling_mask_max_tokens", SAMPLING_MASK_MAX_TOKENS)
        if not 1 < self.top_k <= most:
            raise ValueError(
                f"{key} has servers return the tokens that they keep, at most rollout.top_k, but "
                f"rollout.top_k={self.top_k}: set it to 2 to {most} (SGLang's "
                "sampling_mask_max_tokens), for example 1024"
            )
        algorithm = self.server_args.get("speculative_algorithm")
        if algorithm is not None:
            raise ValueError(
                f"{key} needs the tokens that servers keep, and SGLang does not return them with "
                f"rollout.server_args.speculative_algorithm={algorithm}: remove one of them"
            )
        if self.router is not None:
            raise ValueError(
                f"{key} asks servers for the tokens that they keep, but rollout.router="
                f"{self.router} passes on only the keys that it knows: set rollout.router=null, "
                "or rollout.top_p=1 and rollout.top_k=0"
            )

    def _check_quantization(self) -> None:
        if self.quantization is None:
            return
        key = f"rollout.quantization={self.quantization}"
        if not TRANSPORT_TRAITS[self.sync].needs_loader:
            raise ValueError(
                f"{key} needs megavlm's weight loader, but rollout.sync={self.sync} has servers "
                f"load files: set rollout.sync to {transports_with(needs_loader=True)}"
            )
        if self.lora == "adapter":
            raise ValueError(
                f"{key} does not go with rollout.lora=adapter: SGLang has a weight with adapters "
                "under two names, but its scales under one; set rollout.lora=merged"
            )
        for name in ("json_model_override_args", "load_format"):
            if name in self.server_args:
                raise ValueError(
                    f"rollout.server_args.{name} is set by megavlm with {key}: remove one of them"
                )
        algorithm = self.server_args.get("speculative_algorithm")
        if algorithm is not None:
            raise ValueError(
                f"{key} starts servers without weights, and updates have none for a draft model, "
                f"but rollout.server_args.speculative_algorithm={algorithm}: remove one of them"
            )
        kernel = self.server_args.get("moe_runner_backend", "triton")
        if kernel != "triton":
            raise ValueError(
                f"{key} sends experts in the order in which SGLang's Triton kernel stores them, "
                f"but rollout.server_args.moe_runner_backend={kernel}: set it to triton"
            )

    def _check_store(self) -> None:
        for key, value, needed in (
            ("mode", self.mode, "external"),
            ("lora", self.lora, "merged"),
        ):
            if value != needed:
                raise ValueError(
                    f"rollout.sync=store is for external servers that load whole weights, but "
                    f"rollout.{key}={value}: set it to {needed}, or choose another rollout.sync"
                )

    def _check_delta(self) -> None:
        if not self.sync_delta:
            return
        key = "rollout.sync_delta=true"
        if self.sync == "store":
            raise ValueError(
                f"{key} has no use with rollout.sync=store, whose updates are changes anyway: "
                "remove rollout.sync_delta"
            )
        if not TRANSPORT_TRAITS[self.sync].needs_loader:
            raise ValueError(
                f"{key} needs megavlm's weight loader, but rollout.sync={self.sync} has servers "
                f"load files: set rollout.sync to {transports_with(needs_loader=True)}"
            )
        if self.lora == "adapter":
            raise ValueError(
                f"{key} has no use with rollout.lora=adapter, whose updates send no weights: "
                "remove it, or set rollout.lora=merged"
            )
        if self.colocate and not self.server_args.get("enable_weights_cpu_backup"):
            raise ValueError(
                f"{key} needs servers that keep their weights, but those of rollout.colocate=true "
                "drop them in every step: set rollout.sync_delta=false, or "
                "rollout.server_args.enable_weights_cpu_backup=true"
            )

    def _check_external(self) -> None:
        if not self.urls:
            raise ValueError(
                "rollout.mode=external needs the servers' addresses: "
                "set rollout.urls=[http://HOST:PORT], or rollout.mode=managed to start a server"
            )
        if len({url.rstrip("/") for url in self.urls}) < len(self.urls):
            raise ValueError(f"rollout.urls={list(self.urls)} names a server twice: remove one")
        defaults = Rollout()
        for key in ("port", "servers", "gpus", "colocate"):
            value = getattr(self, key)
            if value != getattr(defaults, key):
                shown = str(value).lower() if isinstance(value, bool) else value
                shown = list(value) if isinstance(value, tuple) else shown
                raise ValueError(
                    f"rollout.{key}={shown} is for servers that megavlm starts, but "
                    "rollout.mode=external starts none: remove it, or set rollout.mode=managed "
                    "(for a Slurm job --rollout-nodes 0)"
                )
        if self.router is not None:
            _check_url("router", self.router)

    def _check_managed(self) -> None:
        if self.urls or self.router is not None:
            key = "urls" if self.urls else "router"
            value = list(self.urls) or self.router
            raise ValueError(
                f"rollout.{key}={value} would not be used with rollout.mode=managed: "
                "set rollout.mode=external or remove it"
            )
        if self.port is not None and self.port + self.servers > 65536:
            raise ValueError(
                f"rollout.port={self.port} is the first of rollout.servers={self.servers} ports, "
                "but ports end at 65535: lower one of them"
            )
        self._check_gpus()
        if self.colocate and not TRANSPORT_TRAITS[self.sync].colocates:
            raise ValueError(
                f"rollout.sync={self.sync} needs a GPU for each process, but rollout.colocate=true "
                f"shares them: set rollout.sync to {transports_with(colocates=True)}"
            )

    def _check_gpus(self) -> None:
        gpus, size = self.gpus, self.tensor_parallel
        if not gpus:
            return
        if len(gpus) != self.servers * size or len(set(gpus)) < len(gpus):
            raise ValueError(
                f"rollout.gpus={list(gpus)} must name {self.servers * size} different GPUs, for "
                f"rollout.servers={self.servers} x rollout.tensor_parallel={size}: name one for "
                "each rank, or none to take those after the trainer's"
            )
        for start in range(0, len(gpus), size):
            own = gpus[start : start + size]
            if own != tuple(range(own[0], own[0] + size)):
                raise ValueError(
                    f"rollout.gpus={list(gpus)} gives one server {list(own)}, but a server takes "
                    "GPUs that follow each other: order them so"
                )


def _check_url(key: str, url: str) -> None:
    try:
        parts = urlsplit(url)
        whole = parts.scheme in ("http", "https") and bool(parts.hostname) and bool(parts.port)
    except ValueError:  # the port is not a number, or brackets do not close
        whole = False
    if not whole or parts.path not in ("", "/") or parts.query or parts.fragment:
        raise ValueError(
            f"rollout.{key} holds {url!r}, but that is not a server's address: write http://HOST:PORT"
        )
    if "@" in parts.netloc:
        raise ValueError(
            f"rollout.{key} holds a user name or password for {parts.hostname} and would be "
            "written to the run directory: give keys through the environment"
        )
