"""The real server: its log-probs against the trainer's on the same tokens, and how fast it decodes.

    python -m tests.gpu.serving [cuda_ipc]

The server has random weights of Qwen2.5-VL-3B's shape. Text prompts of 512 tokens and 256 sampled
ones are also what SGLang's own benchmark runs, without HTTP and without our client. Images go to
the scheduler through the host; `cuda_ipc` measures what that costs, and nothing else.
"""

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoConfig

from megavlm.config.data import Data
from megavlm.data.packs.packing import make_pack
from megavlm.data.packs.trees import prompt_tree
from megavlm.data.processor import Processor, Prompt
from megavlm.data.rows import Row
from megavlm.families import family, family_of
from megavlm.inference.client import RolloutClient
from megavlm.inference.protocol import Response, SamplingParams
from megavlm.inference.server import ManagedServer
from megavlm.inference.server_args import ServerOptions
from megavlm.models.common.config import ModelOptions
from megavlm.models.common.hf_source import HFFolder
from megavlm.models.common.loading import load_hf
from megavlm.models.common.logprobs import Scoring
from megavlm.parallel import platform
from megavlm.parallel.mesh import build_mesh
from megavlm.training.forward_backward import compute_logprobs
from megavlm.training.gradient_buffers import wrap
from megavlm.training.step.vision_features import VisionFeatures
from tests.fakes.fixed_servers import FixedServers
from tests.gpu import folder as folders
from tests.gpu import model, shapes
from tests.gpu.lines import checking, report
from tests.support.generation import generate
from tests.support.random_images import image
from tests.support.servers import run_server

RELEASE = "Qwen2.5-VL-3B"
# What the carried packages lack is not asked for: no xgrammar, no kernels but Triton's and torch's.
KIT_ARGS = {
    "attention_backend": "triton",
    "mm_attention_backend": "triton_attn",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "mm_feature_transport": "cpu",  # 0.5.17 takes CUDA IPC by default
}
NOT_YET: dict[str, object] = {"prefill_decode_interval": None}  # SGLang 0.5.17 lacks it
# Of the mean difference of log-probs between server and trainer, both in bfloat16.
MEAN_DIFFERENCE = 0.05
BATCH, PROMPT, ANSWER = 64, 512, 256
IMAGES, SIDE = 32, 896  # images of a request each, and their pixels: 1,024 tokens


def server_args(transport: str) -> dict[str, object]:
    """Return the server's arguments on a GPU, where a trainer is beside it."""
    if shapes.is_tiny():
        return {}
    return {
        **KIT_ARGS,
        **NOT_YET,
        "mm_feature_transport": transport,
        "mem_fraction_static": 0.45,
        "cuda_graph_max_bs_decode": BATCH,
        "skip_server_warmup": True,  # it asks for a chat about an image; each measurement warms up
    }


def main() -> None:
    (transport,) = sys.argv[1:] or [KIT_ARGS["mm_feature_transport"]]
    is_whole = not sys.argv[1:]
    model.prepare()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        start = time.monotonic()
        folders.make_folder(root / "model", RELEASE)
        platform.free_cached_memory()
        report("folder", seconds=time.monotonic() - start)
        device = "cuda" if platform.has_gpu() else "cpu"
        dtype = "bfloat16" if platform.has_gpu() else "float32"
        options = ServerOptions(root / "model", dtype, device, server_args=server_args(transport))
        log = root / "server.log"
        try:
            with checking("server"):
                measure_server(options, log, transport, is_whole=is_whole)
        finally:
            if log.exists():
                sys.stderr.write(log.read_text(errors="replace"))
        if is_whole:
            with checking("SGLang's benchmark"):
                run_benchmark(root / "model")


def measure_server(options: ServerOptions, log: Path, transport: str, *, is_whole: bool) -> None:
    """Start a server, and report what it is measured by: only images, if not `is_whole`."""
    start = time.monotonic()
    with run_server(ManagedServer(options, log_path=log, start_timeout=240)) as server:
        report("server", seconds=time.monotonic() - start)
        routing = FixedServers(server.url, api_key=server.api_key, is_local=True)
        with RolloutClient(routing) as client:
            folder = options.model_folder
            processor = Processor(folder, Data(max_prompt_tokens=2**20), family_of(folder))
            with checking("images"):
                measure_images(processor, client, transport)
            if is_whole:
                with checking("log-probs"):
                    compare_logprobs(folder, processor, client)
                with checking("decoding"):
                    measure_decoding(processor, client)


def measure_images(processor: Processor, client: RolloutClient, transport: str) -> None:
    """Report the seconds of requests that sample one token after an image that the server has not
    seen.
    """
    count, side = (2, 56) if shapes.is_tiny() else (IMAGES, SIDE)
    sampling_params = SamplingParams(1.0, 1, suppressed_ids=tuple(processor.suppressed_ids))

    def ask(first: int) -> float:
        prompts = [
            processor.prompt(Row(i, "<image>How many circles?", "", (png,), "", f"image:{i}"))
            for i, png in enumerate(image(side, side, first + i) for i in range(count))
        ]
        start = time.monotonic()
        generate(client, prompts, n=1, sampling_params=sampling_params)
        return time.monotonic() - start

    ask(0)  # kernels are compiled
    seconds = sorted(ask(count * (i + 1)) for i in range(3))[1]
    report("images", transport=transport, images=count, side=side, seconds=seconds,
           images_per_second=count / seconds)  # fmt: skip


def compare_logprobs(folder: Path, processor: Processor, client: RolloutClient) -> None:
    """Compare log-probs of sampled tokens, of prompts with and without images."""
    sides = (56, 84) if shapes.is_tiny() else (448, 672)
    sources = [(), (image(sides[0], sides[1], 0),), (image(sides[1], sides[0], 1),)]
    prompts = [
        processor.prompt(
            Row(i, "<image>" * len(files) + "How many circles?", "", files, "", f"kit:{i}")
        )
        for i, files in enumerate(sources)
    ]
    length = 8 if shapes.is_tiny() else 128
    sampling_params = SamplingParams(1.0, length, suppressed_ids=tuple(processor.suppressed_ids))
    start = time.monotonic()
    groups = generate(client, prompts, n=4, sampling_params=sampling_params)
    seconds = time.monotonic() - start
    for name, prompt, group in zip(("text", "wide", "high"), prompts, groups, strict=True):
        ours = trainer_logprobs(folder, prompt, group, sampling_params)
        served = torch.cat([torch.from_numpy(response.logprobs) for response in group])
        gap = (ours - served).abs()
        bound = MEAN_DIFFERENCE if platform.has_gpu() else 1e-4
        mean = float(gap.mean())
        fault = None if mean <= bound else f"off by {mean:.1e} on average, at most {bound:.0e}"
        report("log-probs", fault=fault, prompt=name, mean=mean, max=float(gap.max()),
               tokens=len(served), seconds=seconds)  # fmt: skip


def trainer_logprobs(
    folder: Path, prompt: Prompt, group: Sequence[Response], sampling_params: SamplingParams
) -> torch.Tensor:
    """Return the trainer's log-probs of a group's tokens, on the host."""
    config, mesh = AutoConfig.from_pretrained(folder), build_mesh()
    gpu = platform.has_gpu()
    options = ModelOptions(
        dtype=torch.bfloat16 if gpu else torch.float32, attention="flash" if gpu else "sdpa"
    )
    chunks = model.build(config, mesh, options, engine=model.has_transformer_engine())
    load_hf(chunks[0], family(config.model_type).mapping(config), HFFolder(folder), mesh)
    chunks[0].requires_grad_(False)
    chunks[0].language_model.decoder.final_layernorm.weight.requires_grad_(True)  # of the buffers
    wrapped = wrap(chunks, shard_optimizer=False)
    images = {x.key: x for x in prompt.images}
    tree = prompt_tree(prompt, [response.token_ids.tolist() for response in group])
    pack = make_pack([tree], vision_token_ids={config.image_token_id}).to(platform.device())
    features = VisionFeatures.everywhere(wrapped, images)
    scoring = Scoring(sampling_params.temperature, sampling_params.suppressed_ids)
    (scores,) = compute_logprobs(wrapped, [pack], features, scoring)
    return scores.logprobs.cpu()


def measure_decoding(processor: Processor, client: RolloutClient) -> None:
    """Report sampled tokens a second of a full batch, with suppressed tokens and without."""
    batch, prompt, answer = (4, 16, 8) if shapes.is_tiny() else (BATCH, PROMPT, ANSWER)
    words = "How many circles are there? " * prompt
    for name, suppressed in (
        ("none suppressed", ()),
        ("special tokens suppressed", tuple(processor.suppressed_ids)),
        ("none suppressed, again", ()),
    ):
        prompts = [text_prompt(processor, words, prompt, i) for i in range(batch)]
        sampling_params = SamplingParams(1.0, answer, suppressed_ids=suppressed)
        generate(
            client, prompts, n=1, sampling_params=sampling_params
        )  # graphs and kernels are there
        start = time.monotonic()
        groups = generate(client, prompts, n=1, sampling_params=sampling_params)
        seconds = time.monotonic() - start
        tokens = sum(len(response.token_ids) for (response,) in groups)
        report("decoding", sampling=name, suppressed=len(suppressed), batch=batch, prompt=prompt,
               answer=answer, seconds=seconds, tokens_per_second=tokens / seconds)  # fmt: skip


def text_prompt(processor: Processor, words: str, length: int, index: int) -> Prompt:
    """Return a prompt of about `length` tokens that shares no prefix with the others."""
    text = " ".join(words.split()[index : index + length // 2])
    return processor.prompt(Row(index, f"{index} {text}", "", (), "", f"kit:{index}"))


def run_benchmark(folder: Path) -> None:
    """Run SGLang's benchmark of one batch at the same shapes, in a process of its own."""
    if shapes.is_tiny():
        return  # it decodes on a GPU alone
    args = [
        word for name, value in KIT_ARGS.items() for word in (f"--{name.replace('_', '-')}", value)
    ]
    command = [sys.executable, "-m", "sglang.bench_one_batch", "--model-path", str(folder), *args]
    command += ["--batch-size", str(BATCH), "--input-len", str(PROMPT), "--output-len", str(ANSWER)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    text = done.stdout + done.stderr
    found = re.findall(
        r"Decode\.\s+median latency:\s+([\d.]+) s, median throughput:\s+([\d.]+)", text
    )
    fault = None if found else f"no figure in its output: {text[-300:]}"
    rate = float(found[-1][1]) if found else None
    report("SGLang's benchmark", fault=fault, tokens_per_second=rate)


if __name__ == "__main__":
    main()
