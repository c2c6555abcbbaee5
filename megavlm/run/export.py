"""Export of the trained model as a HuggingFace folder, and a comparison of its logits with the
trainer's.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from checkpoint_tools.export_hf import WriteOptions, export_hf
from megavlm.data.media.image_processing import ProcessedImage
from megavlm.data.packs.packing import Pack, join_targets, make_pack
from megavlm.data.packs.positions import text_positions
from megavlm.data.packs.trees import prompt_tree
from megavlm.data.processor import Prompt
from megavlm.families import family
from megavlm.model_config import model_config
from megavlm.models.linear_attention.in_transformers import use_plain_torch
from megavlm.parallel import platform
from megavlm.parallel.collectives import broadcast_object
from megavlm.training.driver import Driver
from megavlm.training.forward_backward import logits
from megavlm.training.step.vision_features import VisionFeatures
from megavlm.training.train_state import TrainState

EXPORT_FOLDER = "hf"
NUM_PROBES = 8
# Largest fp32 logit difference, relative to the largest logit, for every family and layout.
TOLERANCE = 1e-5


def export_checkpoint(train_state: TrainState, driver: Driver | None) -> Path:
    """Export the latest checkpoint to RUN_DIR/hf, on the driver. Returns the folder."""
    folder = Path(train_state.config.run.dir) / EXPORT_FOLDER
    if driver is not None:
        with train_state.phases("export"):
            export_hf(train_state.folder, folder, options=WriteOptions(force=True))
    return folder


def verify_export(train_state: TrainState, driver: Driver | None, folder: Path) -> float | None:
    """Compare the trainer's logits with the logits of transformers on the exported folder. Returns
    the largest difference, relative to the largest logit, over the answers of a few test rows; None
    on ranks other than the driver. Collective.

    Raises RuntimeError if fp32 logits differ by more than TOLERANCE.
    """
    probes, parcel = [], None
    if driver is not None:
        probes = _probes(driver)
        parcel = _pack(driver, probes)
    pack, images = broadcast_object(parcel, train_state.mesh)
    ours = _trainer_logits(train_state, pack, images)
    if driver is None:
        return None
    device = platform.device()
    theirs = _transformers_logits(folder, probes, train_state.config.model.dtype, device)
    difference = ((ours - theirs).abs().max() / theirs.abs().max()).item()
    # Not `>`, so that NaN fails, too.
    if train_state.config.model.dtype == "float32" and not difference <= TOLERANCE:
        raise RuntimeError(
            f"{folder}: transformers' logits differ from the trainer's by {difference:.1e} of the "
            f"largest, more than {TOLERANCE:.0e}: the exported model is not the trained model."
        )
    return difference


def _trainer_logits(
    train_state: TrainState, pack: Pack, images: dict[str, ProcessedImage]
) -> Tensor:
    """Compute the logits [N, V] of a pack and return them on every rank. Collective."""
    mesh, chunks = train_state.mesh, train_state.updater.chunks
    device = platform.device()
    part = pack.part(mesh.context_rank)
    # With virtual stages the number of microbatches must be a multiple of the pipeline stages.
    packs = [part.to(device)] * (mesh.layout.pipeline if mesh.layout.virtual > 1 else 1)
    features = VisionFeatures.everywhere(chunks, images)
    local = logits(chunks, packs, features)
    held = [None] * mesh.world_size
    mine = None
    if local and mesh.tensor_rank == 0 and mesh.data_rank == 0:
        mine = (part, local[0].cpu())
    dist.all_gather_object(held, mine, group=mesh.objects)
    parts, values = zip(*(pair for pair in held if pair is not None), strict=True)
    return join_targets(parts, values).to(device)


def _probes(driver: Driver) -> list[tuple[Prompt, list[int]]]:
    """Return the prompts of a few rows with their answers, from the test files if there are any."""
    sampler = driver.sampler
    processor, rows = sampler.processor, (sampler.test_rows or sampler.rows)[:NUM_PROBES]
    return [(processor.prompt(row), processor.encode_answer(row.answer)) for row in rows]


def _pack(
    driver: Driver, probes: Sequence[tuple[Prompt, list[int]]]
) -> tuple[Pack, dict[str, ProcessedImage]]:
    trees = [prompt_tree(prompt, [answer]) for prompt, answer in probes]
    shape = driver.planner.shape
    pack = make_pack(
        trees,
        vision_token_ids=shape.vision_token_ids,
        multiple=shape.multiple,
        context_size=shape.context_size,
    )
    return pack, {image.key: image for prompt, _ in probes for image in prompt.images}


@torch.no_grad()
def _transformers_logits(
    folder: Path, probes: Sequence[tuple[Prompt, list[int]]], dtype: str, device: torch.device
) -> Tensor:
    """Compute the logits [N, V] that predict each answer token, one sequence at a time."""
    from transformers import AutoModelForImageTextToText
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    with device:
        model = AutoModelForImageTextToText.from_pretrained(
            folder, config=model_config(folder), dtype=getattr(torch, dtype)
        )
    if device.type == "cpu":
        use_plain_torch(model)
    model.eval()
    logits, parts = [], family(model.config.model_type)
    for prompt, answer in probes:
        ids = torch.cat([prompt.token_ids, torch.tensor(answer)])
        after = text_positions(len(answer), prompt.next_position)
        positions = torch.cat([prompt.positions, after], dim=1)
        inputs = {
            "input_ids": ids[None],
            "attention_mask": torch.ones_like(ids)[None],
            **parts.model_inputs(model.config, ids, positions, prompt.images),
        }
        output = model(**{name: x.to(device) for name, x in inputs.items()}, use_cache=False)
        logits.append(output.logits[0, len(prompt.token_ids) - 1 : -1])
    return torch.cat(logits)
