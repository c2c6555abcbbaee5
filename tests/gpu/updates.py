"""Updates on one rank: the optimizer's step, adapters, collectives, a checkpoint, and the changes
of a bucket of weights.

python -m tests.gpu.updates

The model has the width of Qwen3-VL-2B in bfloat16, and few layers.
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megavlm.checkpointing.load import load_checkpoint
from megavlm.checkpointing.save import SaveTarget, save_checkpoint
from megavlm.config.lora import LoRA
from megavlm.config.optimizer import Optimizer
from megavlm.data.packs.packing import make_pack
from megavlm.inference.server_support.megavlm_delta import restore, write
from megavlm.models.common.config import ModelOptions
from megavlm.models.common.logprobs import Scoring
from megavlm.models.common.lora import adapters_disabled, add_adapters
from megavlm.models.common.lora_linear import is_adapter
from megavlm.parallel import platform
from megavlm.parallel.mesh import Mesh, build_mesh
from megavlm.training.forward_backward import compute_logprobs
from megavlm.training.losses import supervised_loss
from megavlm.training.optimizer import Updater, build_updater
from megavlm.training.step.vision_features import VisionFeatures
from tests.gpu import model, shapes
from tests.gpu.lines import checking, report
from tests.gpu.machine import seconds_of

FAMILY = "qwen3_vl"
SETTINGS = Optimizer(lr=1e-3, clip_grad=1.0)
ADAM_ERROR = 1e-5  # of an update, relative to the learning rate


class Run:
    """A model with its optimizer and the inputs of an update."""

    def __init__(self, mesh: Mesh, lora: LoRA | None = None, family: str = FAMILY) -> None:
        self.config = shapes.parity_config(family, "tiny" if shapes.is_tiny() else "wide")
        attention = "flash" if platform.has_gpu() else "sdpa"
        options = ModelOptions(dtype=torch.bfloat16, attention=attention)
        torch.manual_seed(0)
        chunks = model.build(self.config, mesh, options, engine=model.has_transformer_engine())
        if lora is not None:
            add_adapters(chunks[0], lora)
        self.updater: Updater = build_updater(chunks, SETTINGS, mesh, num_steps=9)
        trees, self.images = shapes.inputs(self.config, shapes.parity_shape("tiny"))
        pack = make_pack(trees, vision_token_ids={self.config.image_token_id})
        self.pack = pack.to(platform.device())
        self.features = VisionFeatures.everywhere(self.updater.chunks, self.images)

    def update(self, step: int = 0) -> dict[str, float]:
        loss = supervised_loss(self.pack.num_targets)
        return self.updater.update([self.pack], self.features, loss, step=step)

    def logprobs(self) -> Tensor:
        chunks = self.updater.chunks
        return compute_logprobs(chunks, [self.pack], self.features, Scoring())[0].logprobs

    def weights(self) -> dict[str, Tensor]:
        (chunk,) = self.updater.chunks
        return {name: x.detach().clone() for name, x in chunk.module.named_parameters()}

    def states(self) -> list[Tensor]:
        with self.updater.state_on_device():
            return [x.detach().clone() for x in self.updater.state_tensors()]


def check_step(mesh: Mesh) -> None:
    """Compare the optimizer's first step with AdamW written out, on the same gradients."""
    run = Run(mesh)
    buffers = [buffer for chunk in run.updater.chunks for buffer in chunk.buffers]
    before = run.weights()
    loss = run.update()["loss"]
    gradients = {
        name: parameter.main_grad.float()
        for name, parameter in run.updater.chunks[0].module.named_parameters()
        if parameter.requires_grad
    }
    # A first step of Adam is the gradient's sign, but for eps; weights are decayed beside it.
    norm = float(sum(x.grad_data.double().square().sum() for x in buffers)) ** 0.5
    scale = min(1.0, SETTINGS.clip_grad / (norm + 1e-6))
    worst, eps = 0.0, SETTINGS.megatron_options["adam_eps"]
    for name, after in run.weights().items():
        if name not in gradients:
            assert after.equal(before[name]), f"{name} is frozen"
            continue
        gradient, old = scale * gradients[name], before[name].float()
        decay = SETTINGS.weight_decay if old.dim() > 1 else 0.0
        new = old - SETTINGS.lr * (gradient / (gradient.abs() + eps) + decay * old)
        rounded = 2**-8 * new.abs()  # weights are in bfloat16
        worst = max(worst, float(((after.float() - new).abs() - rounded).max()) / SETTINGS.lr)
    losses = [loss, *(run.update(step)["loss"] for step in range(1, 4))]
    falls = losses[-1] < losses[0]
    fault = None
    if not (worst <= ADAM_ERROR and falls):
        fault = f"off by {worst:.1e} of the rate, at most {ADAM_ERROR:.0e}; losses {losses}"
    report("optimizer step", fault=fault, error=max(worst, 0.0), losses=losses)
    model.let_go(run.updater.chunks)


def check_adapters(mesh: Mesh) -> None:
    """Check that new adapters change nothing, and that an update changes adapters alone."""
    _check_adapters(mesh, "adapters", FAMILY, LoRA(rank=8))
    experts = LoRA(rank=8, targets=("language.experts",))
    _check_adapters(mesh, "adapters on experts", "qwen3_vl_moe", experts)


def _check_adapters(mesh: Mesh, name: str, family: str, lora: LoRA) -> None:
    run = Run(mesh, lora, family)
    base = run.updater.chunks[0].module
    with adapters_disabled(base):
        plain = run.logprobs()
    new = run.logprobs()
    before = run.weights()
    run.update()
    after = run.weights()
    changed = {name for name in before if not before[name].equal(after[name])}
    with adapters_disabled(base):
        off = run.logprobs()
    faults = {
        "new adapters change log-probs": not new.equal(plain),
        "without adapters the model is not its base": not off.equal(plain),
        "an update changed no adapter": not changed,
        "an update changed the base": any(not is_adapter(name) for name in changed),
    }
    found = [fault for fault, is_true in faults.items() if is_true]
    report(name, fault="; ".join(found) or None, changed=len(changed))
    model.let_go(run.updater.chunks)


def check_checkpoint(mesh: Mesh) -> None:
    """Save, train on, load: weights and optimizer are the saved ones bit by bit."""
    run = Run(mesh)
    run.update()
    with tempfile.TemporaryDirectory() as name:
        target = SaveTarget(Path(name))
        with run.updater.state_on_device():
            save_checkpoint(target, 1, run.updater, extra={"step": 1})
        saved = [*run.weights().values(), *run.states()]
        run.update(1)
        moved = [*run.weights().values(), *run.states()]
        with run.updater.state_on_device():
            load_checkpoint(
                Path(name),
                chunks=[chunk.module for chunk in run.updater.chunks],
                optimizer=run.updater.optimizer,
                scheduler=run.updater.scheduler,
            )
    loaded = [*run.weights().values(), *run.states()]
    same = all(map(torch.equal, saved, loaded))
    different = not all(map(torch.equal, saved, moved))
    fault = None if same and different else f"loaded as saved: {same}; trained on: {different}"
    report("checkpoint", fault=fault, tensors=len(saved))
    model.let_go(run.updater.chunks)


def check_collectives(mesh: Mesh) -> None:
    """Run the collectives that training uses, on a group of one rank."""
    device, found = platform.device(), {}
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8):
        x = torch.arange(1024, device=device).to(dtype)
        outputs: list[Any] = []
        dist.all_reduce(reduced := x.clone())
        gathered, scattered, exchanged = (torch.empty_like(x) for _ in range(3))
        dist.all_gather_into_tensor(gathered, x)
        dist.reduce_scatter_tensor(scattered, x)
        dist.all_to_all_single(exchanged, x)
        dist.broadcast(sent := x.clone(), 0)
        outputs += [reduced, gathered, scattered, exchanged, sent]
        found[str(dtype)] = all(x.equal(output) for output in outputs)
    objects: list[Any] = [None]
    dist.all_gather_object(objects, {"rank": 0}, group=mesh.objects)
    dist.barrier(group=mesh.objects)
    wrong = [name for name, is_right in found.items() if not is_right]
    fault = f"wrong results in {', '.join(wrong)}" if wrong else None
    report("collectives of one rank", fault=fault, backend=dist.get_backend())


def check_changes(mesh: Mesh) -> None:
    """Time the changes of a bucket (`rollout.sync_delta`) beside a copy of all of it to the host.
    3 % of the numbers have changed, which is Adam's share at a learning rate of 1e-6.
    """
    device, count = platform.device(), 2**20 if shapes.is_tiny() else 2**28
    new = torch.randint(-(2**15), 2**15, (count,), dtype=torch.int16, device=device)
    base = torch.empty(count, dtype=torch.int16, pin_memory=platform.has_gpu()).copy_(new)
    places = torch.arange(0, count, 33, device=device)
    new[places] ^= 1
    held, out = base.to(device).view(torch.uint8), torch.empty_like(new).view(torch.uint8)
    parts, changed = write(new.view(torch.uint8), base, out)
    found = {
        "write": seconds_of(lambda: write(new.view(torch.uint8), base, out), 3),
        "restore": seconds_of(lambda: restore(parts, out, held), 3),
        "copy to the host": seconds_of(lambda: base.copy_(new), 3),
    }
    same = held.equal(new.view(torch.uint8)) and changed == len(places)
    report(
        "changes of a bucket",
        fault=None if same else f"{changed} of {len(places)} changes, or other bytes",
        gigabytes=count * 2 / 1e9,
        share_sent=sum(part.nbytes for part in parts) / (2 * count),
        seconds=found,
    )


CHECKS = {
    "optimizer step": check_step,
    "adapters": check_adapters,
    "checkpoint": check_checkpoint,
    "collectives of one rank": check_collectives,
    "changes of a bucket": check_changes,
}


def main() -> None:
    model.prepare()
    mesh = build_mesh()
    for name, check in CHECKS.items():
        platform.free_cached_memory()
        with checking(name):
            check(mesh)


if __name__ == "__main__":
    main()
