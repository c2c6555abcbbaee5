"""The `rollout` section: SGLang servers, sampling, and how weights reach the servers."""

from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

from megavlm.config.section import Section, bounded, follows

# Options of the server that megavlm sets itself, and the key to set instead.
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
}
# Options that run code from a model folder or a request, and keys, which are random for each run.
REFUSED_SERVER_ARGS = {
    "trust_remote_code": "it runs code from the model folder",
    "enable_custom_logit_processor": "it runs code from requests",
    "api_key": "it would show in the process list, and each run makes its own",
    "admin_api_key": "it would show in the process list, and each run makes its own",
}


@dataclass(frozen=True, kw_only=True)
class Rollout(Section):
    """The rollout servers and how responses are sampled on them."""

    mode: Literal["managed", "external"] = "managed"
    """Who starts the servers. `managed`: megavlm starts and stops them on this machine.
    `external`: running servers at `rollout.urls` are used."""

    servers: int = bounded(1, least=1)
    """Number of managed servers."""

    min_servers: int = bounded(1, least=1)
    """Fewest servers that the run goes on with. It ends with an error when fewer can be left."""

    max_restarts: int = bounded(3, least=0)
    """Restarts of each managed server that dies. The restart counter resets after ten healthy
    minutes."""

    urls: tuple[str, ...] = ()
    """Addresses of external servers, each http://HOST:PORT. Their keys are given by the environment
    variables MEGAVLM_ROLLOUT_API_KEY and MEGAVLM_ROLLOUT_ADMIN_KEY."""

    router: str | None = None
    """Address of an sglang-router in front of the external servers. Requests go to it, weights to
    the servers."""

    port: int | None = bounded(None, least=1, most=65535)
    """Port of the first managed server; the others follow it. Null chooses free ports."""

    tensor_parallel: int = bounded(1, least=1)
    """Tensor-parallel ranks of each server. A managed server stays on this machine; one that a
    Slurm job starts may have a multiple of a rollout node's GPUs, and then takes whole nodes."""

    gpus: tuple[int, ...] = bounded((), least=0)
    """GPUs of this machine for the ranks of all managed servers, in order. Empty takes those after
    the trainer's, or the trainer's own with `rollout.colocate`."""

    colocate: bool = False
    """Run trainer and servers on the same GPUs. They take turns, and each releases its memory to
    the other."""

    temperature: float = bounded(1.0, above=0)
    """Sampling temperature of training rollouts and of the sampled evaluation. The trainer's
    log-probs are of the same tempered distribution."""

    top_p: float = bounded(1.0, above=0, most=1)
    """Nucleus sampling threshold. It is 1 for policy optimisation, whose log-probs are over the
    whole vocabulary."""

    max_new_tokens: int = bounded(4, least=1)
    """Longest response of a turn in tokens. The default suits the demo's one-word answers."""

    suppress_special_tokens: bool = True
    """Never sample special tokens, the end of the response excepted, or unused ids of the
    vocabulary. A sampled image token would be taken for an image when the response is trained
    on."""

    oversample: float = bounded(1.0, least=1)
    """Prompts that are started per prompt of a step. When enough groups are complete, the others
    are aborted and finished in later steps (partial rollouts), so that a step does not wait for its
    slowest responses. 1 turns it off."""

    max_staleness: int = bounded(0, least=0, most=16)
    """Steps that rollouts may be ahead of training. 0: trainer and servers take turns, and a step
    trains on its own weights' rollouts. With k a process generates while the trainer trains: up to
    k + 1 steps' worth of prompts are started and not trained on, and no token is from weights older
    than k steps, for which `algorithm.importance` corrects. Trainer and servers need GPUs of their
    own. More than 1 helps only where the time of a rollout varies from step to step."""

    replay: str | None = None
    """Folder of recorded rollouts to train on, RUN_DIR/rollouts of a run with
    `run.record_rollouts`. Step n trains on the groups of its step n: no response is sampled and no
    reward computed, and no server is started unless the run evaluates. Data files, model folder and
    `data` keys must be those of the recorded run. Null samples responses."""

    start_timeout: float = bounded(300, above=0)
    """Seconds until a started server must be healthy, and after which an unreachable external
    server no longer counts for `rollout.min_servers`; it is looked for as long as the run lives,
    and refitted before it serves again. Loading a large model and capturing CUDA graphs take
    minutes."""

    request_timeout: float = bounded(300, above=0)
    """Seconds until a request to a server fails. A request for responses has a tenth of a second
    more for each token that it may sample: 3,277 s more for `rollout.max_new_tokens` of 32,768.
    Requests for responses and for weight updates are tried again."""

    timed_out: Literal["fail", "drop", "requeue"] = "fail"
    """Handling of a training group whose request times out in all four attempts. `fail` ends the
    run, which can resume from its last checkpoint. `drop` leaves the group out, and `requeue` asks
    its prompt again in a later step; the step takes a further prompt instead. The run still ends
    where more groups of a step time out than it trains on, or a request of an evaluation does."""

    patience: float = bounded(60, above=0)
    """Seconds that a server may answer no health probe and show no work before it is taken for
    hung. A server that works is busy, however long: on a CPU by the CPU time of its processes, else
    by the counters of its /v1/loads. The default is two probes, which SGLang answers within 20 s,
    and then some."""

    concurrency: int = bounded(64, least=1)
    """Prompts in flight at each server. The responses to a prompt are one request."""

    image_tokens: int | None = bounded(None, least=1)
    """Image tokens of the prompts in flight at each server; a prompt with more goes alone. It
    bounds what a server has to encode before it answers, and changes nothing for images of up to
    `image_tokens` / `concurrency` tokens. Null takes 65536, which is 64 images of one megapixel,
    and 8192 on a CPU, where such an image takes seconds."""

    sync: Literal["tensor", "distributed", "disk"] = "tensor"
    """Transport of weight updates. `tensor`: rank 0 sends each server rank its slices, by CUDA IPC
    on GPUs, by shared memory on CPUs; by value over HTTP to servers on CPUs that the run did not
    start. `distributed`: the first rank of each pipeline stage broadcasts slices by NCCL or gloo.
    `disk`: stages write to a folder that all share."""

    pause: Literal["abort", "retract", "in_place"] = follows("abort")
    """Handling of requests in flight when weights are updated. `abort` ends them, for which SGLang
    takes a second, `retract` computes them again under the new weights, `in_place` goes on with the
    cache that the old weights computed. Null takes `in_place` where `rollout.max_staleness` is
    above 0, and `abort` elsewhere."""

    lora: Literal["merged", "adapter"] = "merged"
    """Form in which adapters are sent. `merged` sends the weights that they change, `adapter` the
    adapters alone, which is less to send and slower to serve."""

    server_args: dict[str, Any] = field(default_factory=dict)
    """Further options of sglang.launch_server by their long names, for example
    {mem_fraction_static: 0.8}. With `rollout.mode=external` they are those of the servers that a
    Slurm job or `megavlm plan --servers` starts; running servers keep their own."""

    def check(self) -> None:
        if self.mode == "external":
            self._check_external()
        else:
            self._check_managed()
        for url in self.urls:
            _check_url("urls", url)
        count = len(self.urls) if self.mode == "external" else self.servers
        if self.min_servers > count:
            raise ValueError(
                f"rollout.min_servers={self.min_servers} is more than the {count} servers that "
                "there are: lower it"
            )
        for name in self.server_args:
            plain = name.lstrip("-").replace("-", "_")
            if plain in OWNED_SERVER_ARGS:
                raise ValueError(
                    f"rollout.server_args.{name} is set by megavlm: use {OWNED_SERVER_ARGS[plain]}"
                )
            if plain in REFUSED_SERVER_ARGS:
                raise ValueError(
                    f"rollout.server_args.{name} is refused, because {REFUSED_SERVER_ARGS[plain]}: "
                    "remove it"
                )
        if self.router is not None and self.suppress_special_tokens:
            # sglang-router 0.3.2 writes requests anew, with the sampling parameters that it knows.
            raise ValueError(
                f"rollout.router={self.router} leaves logit biases out of the requests that it "
                "passes on, and rollout.suppress_special_tokens=true is one: servers would sample "
                "from another distribution than the one that is trained; set "
                "rollout.suppress_special_tokens=false or rollout.router=null"
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
                    f"rollout.{key}={shown} is for servers that megavlm starts, and "
                    "rollout.mode=external starts none: remove it, or set rollout.mode=managed"
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
                "which end at 65535: lower one of them"
            )
        self._check_gpus()
        if self.colocate and self.sync == "distributed":
            raise ValueError(
                "rollout.sync=distributed is a group of processes that each have a GPU of their "
                "own, and rollout.colocate=true shares them: set rollout.sync to tensor or disk"
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
                    f"rollout.gpus={list(gpus)} gives one server {list(own)}, and a server takes "
                    "GPUs that follow each other: order them so"
                )


def _check_url(key: str, url: str) -> None:
    try:
        parts = urlsplit(url)
        whole = parts.scheme in ("http", "https") and bool(parts.hostname) and bool(parts.port)
    except ValueError:  # a port that is no number, or brackets that do not close
        whole = False
    if not whole or parts.path not in ("", "/") or parts.query or parts.fragment:
        raise ValueError(
            f"rollout.{key} holds {url!r}, which is not a server's address: write http://HOST:PORT"
        )
    if "@" in parts.netloc:
        raise ValueError(
            f"rollout.{key} holds a user name or password for {parts.hostname}, which would be "
            "written to the run directory: give keys through the environment"
        )
