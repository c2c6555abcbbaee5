"""A family of another kind, registered as a user registers one: its images are tiles of one size
and a thumbnail, its positions are plain. It is transformers' InternVL; nothing outside the folder
`tiles` knows of it.
"""

import io
import json
import multiprocessing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig

from checkpoint_tools.export_hf import export_hf
from checkpoint_tools.import_hf import import_hf
from megavlm.config.data import Data
from megavlm.config.load import load
from megavlm.data.loader import holding
from megavlm.data.packs.packing import Pack, make_pack
from megavlm.data.packs.trees import prompt_tree
from megavlm.data.processor import ProcessedImage, Processor, Prompt
from megavlm.data.rows import Row
from megavlm.families import FAMILIES, Family, family_of
from megavlm.inference.server_args import ServerOptions
from megavlm.models.common.config import ModelOptions
from megavlm.models.common.loading import MEMORY
from megavlm.observability.progress import Progress
from megavlm.planner.memory import RunMemory
from megavlm.rollout.recorded import RecordedRollouts
from megavlm.run.checks import preflight
from megavlm.run.train import train
from megavlm.training.step.rank_images import sources_from_bytes, sources_to_bytes
from tests.conftest import DATA
from tests.parity.reference import Reference, token_weights, weighted_loss
from tests.parity.runs import Run, difference
from tests.parity.table import LAYOUTS
from tests.support.columns import columns
from tests.support.fork import launch
from tests.support.samples import auto_processor, image
from tests.support.timeouts import scaled
from tests.unit.families.tiles.folder import SIDE, SPECIAL, TOKENS_PER_TILE, make_folder
from tests.unit.rollout.test_recorded import ROWS, arrays, played

NAME = "internvl"
RESPONSES = [[5, 6, 7, 8], [9, 10, 11]]
# (width, height) and tiles, the thumbnail included
SIZES = [((30, 30), 1), ((100, 40), 4), ((64, 64), 5), ((20, 150), 5), ((333, 200), 3)]


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    """Add the family as its line in families.py would."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FAMILIES, NAME, Family("tests.unit.families.tiles"))
        yield


@pytest.fixture(scope="module")
def folder(registered: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiles") / "hf"
    launch(1, make_folder, folder)
    return folder


@pytest.fixture(scope="module")
def processor(folder: Path) -> Processor:
    return Processor(folder, DATA, family_of(folder))


def row(problem: str, *images: bytes) -> Row:
    return Row(3, problem, "red", images, "colour", "train.parquet:3")


def pictures() -> list[bytes]:
    return [image(size, seed=seed) for seed, (size, _) in enumerate(SIZES)]


@pytest.fixture(scope="module")
def prompts(processor: Processor) -> list[Prompt]:
    files = pictures()
    return [
        processor.prompt(row("<image>What color is it?", files[2])),
        processor.prompt(row("What color is it?")),
        processor.prompt(row("<image>What <image> is it?", files[0], files[1])),
    ]


def test_prompts_equal_those_of_transformers(folder: Path, processor: Processor) -> None:
    files, theirs = pictures(), auto_processor(folder)
    prompt = processor.prompt(row("<image>" * len(files) + "What color is it?", *files))
    text = f"{SPECIAL['context_image_token']}\n" * len(files) + "What color is it?"
    expected = theirs(
        text=f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n",
        images=[Image.open(io.BytesIO(file)) for file in files],
        return_tensors="pt",
    )
    assert torch.equal(prompt.token_ids, expected["input_ids"][0])
    assert processor.num_tokens(prompt.row) == len(prompt.token_ids)
    tiles = [frames for _, frames in SIZES]
    assert [item.grid for item in prompt.images] == [(n, SIDE // 8, SIDE // 8) for n in tiles]
    assert [item.num_tokens for item in prompt.images] == [n * TOKENS_PER_TILE for n in tiles]

    config = AutoConfig.from_pretrained(folder)
    inputs = family_of(folder).model_inputs(
        config, prompt.token_ids, prompt.positions, prompt.images
    )
    assert torch.equal(inputs["pixel_values"], expected["pixel_values"])
    assert torch.equal(prompt.positions, torch.arange(len(prompt.token_ids)).expand(3, -1))
    assert prompt.next_position == len(prompt.token_ids)


def test_a_server_gets_whole_pictures_and_one_token_for_each(processor: Processor) -> None:
    files = pictures()
    prompt = processor.prompt(row("<image>" * len(files) + "?", *files))
    assert prompt.request_ids.count(processor.image_token_id) == len(files)
    held = holding(prompt, "requests")
    for file, full, sent in zip(files, prompt.images, held.images, strict=True):
        for item in (full, sent):
            for sent_file in (item.png(), b"".join(item.ppm())):
                shown, stored = (Image.open(io.BytesIO(x)) for x in (sent_file, file))
                assert shown.tobytes() == stored.convert("RGB").tobytes()
        assert sent.pixels.is_meta and sent.grid == full.grid


def test_tiles_travel_to_the_rank_that_encodes_them(prompts: list[Prompt]) -> None:
    images = {item.key: item for prompt in prompts for item in prompt.images}
    for key, item in sources_from_bytes(sources_to_bytes(images)).items():
        assert isinstance(item, ProcessedImage)
        assert torch.equal(item.patches(), images[key].patches())


def test_groups_of_tiled_images_are_recorded_and_replayed(
    processor: Processor, tmp_path: Path
) -> None:
    group, recorded = played(processor), RecordedRollouts(tmp_path)
    recorded.save(1, [group])
    (again,) = recorded.load(1, ROWS, processor)
    before, after = arrays([group]), arrays([again])
    assert all(torch.equal(before[name], after[name]) for name in before)
    for mine, theirs in zip(again.prompts, group.prompts, strict=True):
        for item, other in zip(mine.images, theirs.images, strict=True):
            assert torch.equal(item.content, other.content) and item.png() == other.png()


def test_settings_of_other_families_are_refused(folder: Path, processor: Processor) -> None:
    with pytest.raises(ValueError, match=r"data\.max_pixels=1000: this model cuts"):
        Processor(folder, Data(max_pixels=1000), family_of(folder))
    assert processor.vision_token_ids == (processor.image_token_id,)


def packs(prompts: list[Prompt], processor: Processor, **shape: int) -> list[Pack]:
    """Two packs of trees, of two responses to each prompt."""
    trees = []
    for prompt in prompts:
        weights = [token_weights(len(x), index) for index, x in enumerate(RESPONSES)]
        weighted = [columns(len(x), loss_weights=x) for x in weights]
        trees.append(prompt_tree(prompt, RESPONSES, weighted))
    tokens = processor.vision_token_ids
    return [make_pack(part, vision_token_ids=tokens, **shape) for part in (trees[:2], trees[2:])]


def expect(folder: Path, prompts: list[Prompt]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return transformers' logits of all responses, and gradients by their names on the hub."""
    reference = Reference(folder)
    reference.model.zero_grad()
    logits = []
    for prompt in prompts:
        for index, response in enumerate(RESPONSES):
            scores = reference.scores(prompt, response)
            logits.append(scores.logits.detach())
            weights = token_weights(len(response), index)
            weighted_loss(scores.logprobs(response), None, weights).backward()
    gradients = {name: x.grad for name, x in reference.model.named_parameters()}
    return torch.cat(logits), {hub_name(name): x for name, x in gradients.items()}


def hub_name(name: str) -> str:
    """Return a tensor's name on the hub, given its name in memory."""
    if name.startswith("lm_head"):
        return f"language_model.{name}"
    name = name.removeprefix("model.")
    return name.replace("language_model.", "language_model.model.", 1)


def compare(
    folder: Path, parts: list[Pack], layout: str, images: dict[str, ProcessedImage], expected: Any
) -> dict[str, float]:
    """Return the relative differences of the logits and of each gradient on this rank."""
    options = ModelOptions(freeze_tower=False, freeze_merger=False, recompute_tower=True)
    config = AutoConfig.from_pretrained(folder)
    run = Run.start(folder, config, LAYOUTS[layout], options, images)
    logits, gradients = torch.from_numpy(expected[0]), expected[1]
    gradients = {name: torch.from_numpy(x) for name, x in gradients.items()}
    found = {"logits": difference(torch.cat(run.logits(parts)), logits)}
    mine = run.backward(parts)
    for name, (shard, full) in run.shards(gradients, MEMORY).items():
        found[name[0]] = difference(mine[name], shard, full)
    return found


@pytest.mark.parametrize("layout", ["one rank", "TP2", "PP2", "CP2"])
def test_logits_and_gradients_equal_those_of_transformers(
    folder: Path, processor: Processor, prompts: list[Prompt], layout: str
) -> None:
    (expected,) = launch(1, expect, folder, prompts)
    images = {item.key: item for prompt in prompts for item in prompt.images}
    ranks = LAYOUTS[layout]
    shape = {"context_size": ranks.mesh.context}
    results = launch(
        ranks.world_size,
        compare,
        folder,
        packs(prompts, processor, **shape),
        layout,
        images,
        expected,
    )
    names = set().union(*results)
    entries = family_of(folder).mapping(AutoConfig.from_pretrained(folder))
    assert names == {"logits", *(entry.megatron for entry in entries)}
    for found in results:
        assert max(found.values()) < 1e-5, max(found, key=lambda name: found[name])


def test_a_recipe_is_checked_and_its_memory_modelled(
    folder: Path, write_recipe: Callable[..., Path]
) -> None:
    config = load(write_recipe(model={"folder": str(folder)}))
    preflight.check(config, world_size=1)
    (stage,) = RunMemory.of(config, AutoConfig.from_pretrained(folder), 1).stages
    assert stage.encoding > 0
    assert ServerOptions(folder, "float32", "cpu").environment()["MEGAVLM_SERVED_MODULES"] == ""


def test_weights_come_back_as_they_were(folder: Path, tmp_path: Path) -> None:
    import_hf(folder, tmp_path / "checkpoint")
    export_hf(tmp_path / "checkpoint", tmp_path / "exported")
    before, after = (load_file(x / "model.safetensors") for x in (folder, tmp_path / "exported"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_supervised_run_ends_with_an_export_that_equals_it(
    folder: Path, tmp_path: Path, write_recipe: Callable[..., Path]
) -> None:
    recipe = write_recipe(
        model={
            "folder": str(folder),
            "dtype": "float32",
            "freeze_tower": False,
            "freeze_merger": False,
        },
        algorithm={"name": "sft", "steps": 2, "batch_size": 2},
        evaluation={"before": False, "after": False},
        checkpoint={"export_hf": True, "verify_export": True},
    )
    run = multiprocessing.get_context("fork").Process(target=run_recipe, args=(recipe,))
    run.start()
    run.join(scaled(240))
    run.kill()  # if it hangs
    assert run.exitcode == 0
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["export_logit_difference"] < 1e-5
    before, after = (
        load_file(x / "model.safetensors")
        for x in (folder, Path(result["paths"]["HuggingFace folder"]))
    )
    unchanged = [name for name in before if (before[name] == after[name]).all()]
    # A bias of keys shifts all scores of a query alike where positions do not turn them, as in this
    # tower: its gradient is rounding, which differs by processor.
    assert [name for name in unchanged if not name.endswith(".attention.k_proj.bias")] == []


def test_no_module_of_the_package_names_it() -> None:
    package = Path(__file__).parents[3] / "megavlm"
    sources = {path: path.read_text(encoding="utf-8").lower() for path in package.rglob("*.py")}
    assert len(sources) > 100
    assert not [path for path, source in sources.items() if NAME in source]


def run_recipe(recipe: Path) -> None:
    assert train(load(recipe), Progress(is_quiet=True))
