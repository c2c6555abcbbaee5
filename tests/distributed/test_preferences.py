"""DPO on pairs with images: a trainer's steps are those of transformers with a plain loss, under
every layout; the reference is the model that a run starts from, and sees each pair once.
"""

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid

from megavlm.config.load import load
from megavlm.config.schema import Config
from megavlm.data.processor import Prompt
from megavlm.observability.phases import Phases
from megavlm.observability.progress import Progress
from megavlm.observability.records import read_records
from megavlm.parallel import platform
from megavlm.parallel.mesh import Layout, build_mesh
from megavlm.rollout.sampler import Sampler
from megavlm.training.dpo_trainer import PreferenceTrainer
from megavlm.training.driver import Driver
from megavlm.training.train_state import TrainState
from tests.conftest import write_rows
from tests.parity.models import model_folder
from tests.parity.reference import Reference
from tests.parity.table import EXPERT_LAYOUTS, LAYOUTS
from tests.support.fork import launch
from tests.support.levels import slow
from tests.support.random_images import image

pytestmark = pytest.mark.distributed
LAYOUTS = LAYOUTS | EXPERT_LAYOUTS
PAIRS, BATCH, STEPS = 8, 4, 4  # two epochs
BETA, RATE, CLIP = 0.3, 1e-3, 0.5
COMPARED = (
    "loss",
    "gradient_norm",
    "preference/accuracy",
    "preference/margin",
    "preference/chosen_reward",
    "preference/rejected_reward",
)


def write_pairs(folder: Path) -> str:
    words = "Find x in the triangle. How many blue circles?".split()
    rows = []
    for number in range(PAIRS):
        images = [image(64 + 32 * (number % 3), 96, number)] * (number % 3)
        shown = [{"bytes": file, "path": None} for file in images]
        rows.append(
            {
                "images": shown,
                "prompt": "<image>" * len(shown) + " ".join(words[: number % 4 + 1]),
                "chosen": " ".join(words[number % 5 :][:3]),
                "rejected": [{"role": "assistant", "content": " ".join(words[: number % 3 + 2])}],
            }
        )
    return write_rows(folder / "pairs.parquet", rows)


def recipe(folder: Path, family: str, layout: str, **sections: dict[str, Any]) -> Path:
    """Write a recipe whose run directory is `folder`."""
    ranks = LAYOUTS[layout]
    axes = ("tensor", "pipeline", "virtual", "context", "expert", "expert_tensor")
    content: dict[str, Any] = {
        "run": {"dir": str(folder), "summary": False},
        "model": {"folder": str(model_folder(family)), "dtype": "float32"},
        "data": {
            "train_files": [write_pairs(folder)],
            "prompt_key": "prompt",
            "answer_key": "chosen",
            "rejected_key": "rejected",
            "category_key": None,
        },
        "parallel": {
            "data": ranks.data,
            "sequence": ranks.sequence,
            **{axis: getattr(ranks.mesh, axis) for axis in axes},
        },
        "algorithm": {"name": "dpo", "steps": STEPS, "batch_size": BATCH, "beta": BETA},
        "optimizer": {"lr": RATE, "warmup_steps": 0, "weight_decay": 0.0, "clip_grad": CLIP},
    }
    for section, values in sections.items():
        content[section] = content.get(section, {}) | values
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(content))  # JSON is YAML
    return path


def run(path: Path, steps: int) -> tuple[int, int]:
    """Train up to a step and save. Returns the passes of the reference, and the pairs that this
    rank knows the reference's log-probs of.
    """
    config = load(path)
    mesh = build_mesh(Layout.from_config(config.parallel), seed=config.run.seed)
    progress, passes = Progress(), 0
    phases = Phases(platform.synchronize, begun=progress.show)
    state = TrainState.build(config, mesh, progress, phases)
    driver = None
    if mesh.is_driver:
        driver = Driver(config, state.hf_config, mesh, None, progress)
    trainer = PreferenceTrainer(state, driver, None)
    trainer.setup()
    if trainer.reference is not None:
        swap = trainer.reference.in_place

        def counted() -> Any:
            nonlocal passes
            passes += 1
            return swap()

        trainer.reference.in_place = counted  # type: ignore[method-assign]
    with state.saver:
        while state.step < steps:
            state.start_step_clock()
            trainer.train_step()
        trainer.save()
    if driver is not None:
        driver.close()
    return passes, len(trainer.reference_logprobs)


def history(path: Path, world_size: int, steps: int = STEPS) -> tuple[np.ndarray, list[Any]]:
    """Return what is compared of each step, and what each rank returns."""
    results = launch(world_size, run, path, steps)
    records = read_records(path.parent / "metrics.jsonl")
    return np.array([[record[name] for name in COMPARED] for record in records]), results


def prompts(config: Config) -> list[Prompt]:
    """Return the pairs of all steps, in their order, with pixels."""
    sampler = Sampler(config, None)
    taken = sampler.prompt_stream().take(BATCH * STEPS)
    make = sampler.processor.preference_prompt
    return [make(sampler.rows[prompt.row.index]) for prompt in taken]


def plain(path: Path) -> list[list[float]]:
    """The same with transformers and torch, a sequence at a time."""
    config = load(path)
    model = Reference(Path(config.model.folder))
    visual = [p for name, p in model.model.named_parameters() if "visual" in name]
    for parameter in visual if config.model.freeze_tower else ():
        parameter.requires_grad_(False)
    trained = [p for p in model.model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, betas=(0.9, 0.95), weight_decay=0)
    start = Reference(Path(config.model.folder))
    found, pairs = [], prompts(config)
    for step in range(STEPS):
        optimizer.zero_grad()
        sums = torch.zeros(len(COMPARED), dtype=torch.float64)
        for prompt in pairs[BATCH * step :][:BATCH]:
            ratios = []
            for response in (prompt.answer_ids, prompt.rejected_ids):
                with torch.no_grad():
                    reference = start.scores(prompt, response).logprobs(response)
                logprobs = model.scores(prompt, response).logprobs(response)
                ratios.append((logprobs - reference).double().sum())
            loss = -logsigmoid(BETA * (ratios[0] - ratios[1]))
            (loss / BATCH).backward()
            chosen, rejected = (BETA * ratio.item() for ratio in ratios)
            right = float(chosen > rejected)
            values = [loss.item(), 0.0, right, chosen - rejected, chosen, rejected]
            sums += torch.tensor(values, dtype=torch.float64) / BATCH
        sums[1] = torch.nn.utils.clip_grad_norm_(trained, CLIP)
        optimizer.step()
        found.append(sums.tolist())
    return found


TRAINED = {"freeze_tower": False, "freeze_merger": False}
FROZEN = {"freeze_tower": True, "freeze_merger": True}


@cache
def one_rank(family: str, frozen: bool) -> np.ndarray:
    with tempfile.TemporaryDirectory() as folder:
        path = recipe(Path(folder), family, "one rank", model=FROZEN if frozen else TRAINED)
        return history(path, 1)[0]


@pytest.mark.parametrize(
    ("model", "frozen"),
    [
        ("qwen2_5_vl", False),
        *slow(("qwen2_5_vl", True), ("qwen3_5", True)),
    ],
)
def test_steps_are_those_of_transformers(tmp_path: Path, model: str, frozen: bool) -> None:
    path = recipe(tmp_path, model, "one rank", model=FROZEN if frozen else TRAINED)
    found, ((passes, known),) = history(path, 1)
    assert (passes, known) == (STEPS // 2, PAIRS), "the second epoch needs no reference"
    (expected,) = launch(1, plain, path)
    # The rewards begin at zero; Adam divides by a gradient's own size.
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    assert found[-1][0] < 0.6 < found[0][0] == pytest.approx(np.log(2))
    assert found[0][1] > CLIP, "the gradient is clipped"


@pytest.mark.parametrize(
    ("model", "frozen", "layout"),
    [
        ("qwen2_5_vl", False, "TP2+SP"),
        ("qwen2_5_vl", True, "PP2"),
        *slow(
            ("qwen2_5_vl", False, "CP2xDP2"),
            ("qwen2_5_vl", False, "PP2 virtual 2"),
            ("qwen3_vl_moe", True, "EP2 over TP2+SP"),
        ),
    ],
)
def test_steps_are_the_same_under_every_layout(
    tmp_path: Path, model: str, frozen: bool, layout: str
) -> None:
    expected = one_rank(model, frozen)
    path = recipe(tmp_path, model, layout, model=FROZEN if frozen else TRAINED)
    found, results = history(path, LAYOUTS[layout].world_size)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    assert {passes for passes, _ in results} == {STEPS // 2}
    assert [known for _, known in results] == [PAIRS] + [0] * (len(results) - 1)


def test_a_resumed_run_compares_with_the_start_of_the_first(tmp_path: Path) -> None:
    """After an epoch, on other ranks. The reference's log-probs are not in the checkpoint."""
    history(recipe(tmp_path, "qwen2_5_vl", "DP2", model=FROZEN), 2, steps=STEPS // 2)
    path = recipe(tmp_path, "qwen2_5_vl", "one rank", model=FROZEN)
    found, results = history(path, 1)
    np.testing.assert_allclose(found, one_rank("qwen2_5_vl", True), rtol=1e-4, atol=1e-4)
    assert results == [(STEPS // 2, PAIRS)]


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("qwen2_5_vl", "one rank"),
        *slow(("qwen2_5_vl", "PP2"), ("qwen3_vl_moe", "EP2 over TP2+SP")),
    ],
)
def test_adapters_that_a_run_starts_from_are_in_its_reference(
    tmp_path: Path, family: str, layout: str
) -> None:
    """At a resume too: there they are those of the first start, and no others that the checkpoint
    folder holds by then.
    """
    before, after = tmp_path / "before", tmp_path / "after"
    before.mkdir(), after.mkdir()
    ranks, lora = LAYOUTS[layout].world_size, {"rank": 4, "alpha": 8.0}
    first = recipe(before, family, "one rank", lora=lora, model=FROZEN)
    history(first, 1, steps=1)
    start = before / "checkpoints" / "step_00000001"
    model = FROZEN | {"checkpoint": str(start.parent)}
    whole, _ = history(recipe(after, family, layout, lora=lora, model=model), ranks)
    assert whole[0][0] == pytest.approx(np.log(2), abs=1e-6)
    assert abs(whole[1][0] - np.log(2)) > 1e-3, "the second step has moved away"

    parts = tmp_path / "parts"
    parts.mkdir()
    path = recipe(parts, family, layout, lora=lora, model=model)
    history(path, ranks, steps=2)
    history(first, 1, steps=2)  # the folder that the run started from has a later step now
    with pytest.raises(RuntimeError, match=f"but the run started from {start}"):
        history(path, ranks)
    path = recipe(parts, family, layout, lora=lora, model=model | {"checkpoint": str(start)})
    np.testing.assert_allclose(history(path, ranks)[0], whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("layout", ["TP2+SP", *slow("PP2")])
def test_the_reference_of_adapters_is_the_model_without_them(tmp_path: Path, layout: str) -> None:
    """New adapters change nothing; the second step compares trained ones with none."""
    lora = {"rank": 4, "alpha": 8.0}
    found = []
    for name, ranks in (("one", "one rank"), ("cut", layout)):
        (tmp_path / name).mkdir()
        path = recipe(tmp_path / name, "qwen2_5_vl", ranks, lora=lora, model=FROZEN)
        found.append(history(path, LAYOUTS[ranks].world_size)[0])
    one, cut = found
    assert one[0][0] == pytest.approx(np.log(2)) and one[-1][0] < 0.6
    assert abs(one[1][0] - np.log(2)) > 1e-3, "the reference's pass is without adapters"
    np.testing.assert_allclose(cut[0], one[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(cut, one, rtol=1e-4, atol=1e-4)


def test_without_a_reference_rewards_are_log_probs(tmp_path: Path) -> None:
    settings = {"reference_free": True}
    path = recipe(tmp_path, "qwen2_5_vl", "one rank", algorithm=settings, model=FROZEN)
    found, results = history(path, 1, steps=1)
    assert results == [(0, 0)]
    (expected,) = launch(1, free_rewards, path)
    np.testing.assert_allclose(found[0][-2:], expected, rtol=1e-5)


def free_rewards(path: Path) -> list[float]:
    """Return the mean rewards of the first step's chosen and rejected responses."""
    config = load(path)
    model, pairs = Reference(Path(config.model.folder)), prompts(config)[:BATCH]
    sums = [0.0, 0.0]
    for prompt in pairs:
        for index, response in enumerate((prompt.answer_ids, prompt.rejected_ids)):
            logprobs = model.scores(prompt, response).logprobs(response)
            sums[index] += BETA * float(logprobs.sum()) / BATCH
    return sums
