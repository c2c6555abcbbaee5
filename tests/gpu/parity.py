"""Log-probs and gradients in bf16, by each attention backend, against transformers in fp32.

    python -m tests.gpu.parity FAMILY

Prints a JSON object: for transformers in bf16 and for each backend, the root mean square error of
log-probs from transformers' in fp32, and the gradient's norm over its norm.
"""

import json
import sys
from typing import Any

import torch
from torch import Tensor

from megavlm.data.packing import Pack, make_pack
from megavlm.models.common.attention_backends import BACKENDS
from megavlm.models.common.config import ModelOptions
from megavlm.models.common.logprobs import Scoring
from megavlm.parallel import platform
from megavlm.parallel.mesh import build_mesh, init_distributed
from megavlm.training.forward_backward import forward_backward
from megavlm.training.step.vision_features import VisionFeatures
from tests.gpu import model, shapes

Scores = dict[str, float]


def backends() -> list[tuple[str, str, bool]]:
    """Return (name, backend, layers of Transformer Engine?) of all that this machine can run."""
    own = [(f"{name}, own layers", name, False) for name in BACKENDS if runs(name)]
    if not model.has_transformer_engine() or not platform.has_gpu():
        return own
    return [(f"{name}, Transformer Engine's layers", name, True) for name in BACKENDS] + own


def runs(name: str) -> bool:
    if name == "transformer_engine":  # only with its layers
        return False
    return name == "sdpa" or platform.has_gpu()


def measure(family: str) -> dict[str, Scores]:
    """Return the scores of transformers in bf16 and of each backend."""
    shape = shapes.parity_shape()
    config, mesh = shapes.model_config(family, shape), build_mesh()
    prompt, answers = shapes.prompt_of(config, shape)
    reference = model.theirs(config)
    exact = model.their_logprobs(reference, config, prompt, answers)
    reference.zero_grad(set_to_none=True)
    reference.bfloat16()
    found = {
        "transformers": scores(model.their_logprobs(reference, config, prompt, answers), exact)
    }
    weights = {name: x.detach().clone() for name, x in reference.state_dict().items()}
    del reference
    for name, backend, engine in backends():
        platform.free_cached_memory()
        options = ModelOptions(dtype=torch.bfloat16, attention=backend)
        chunks = model.ours(config, mesh, weights, options, engine=engine)
        found[name] = scores(our_logprobs(chunks, config, shape), exact)
        del chunks
    return found


def our_logprobs(chunks: list[Any], config: Any, shape: shapes.Shape) -> tuple[Tensor, float]:
    """Return log-probs of all answers' tokens, and the norm of the gradient of their sum."""
    trees, images = shapes.inputs(config, shape)
    pack = make_pack(trees, vision_token_ids={config.image_token_id}).to(platform.device())
    found: list[Tensor] = []

    def loss(pack: Pack, scored: Any) -> tuple[Tensor, dict[str, Tensor]]:
        found.append(scored.logprobs.detach())
        return scored.logprobs.sum(), {}

    forward_backward(chunks, [pack], VisionFeatures.everywhere(chunks, images), Scoring(), loss)
    buffers = [buffer for chunk in chunks for buffer in chunk.buffers]
    return found[0], sum(float(x.grad_data.double().square().sum()) for x in buffers) ** 0.5


def scores(found: tuple[Tensor, float], exact: tuple[Tensor, float]) -> Scores:
    error = (found[0].float() - exact[0]).square().mean().sqrt().item()
    return {"logprobs": error, "gradient": found[1] / exact[1]}


def main() -> None:
    platform.install()
    init_distributed()
    print(json.dumps(measure(sys.argv[1])))


if __name__ == "__main__":
    main()
