"""A program: TRL's GRPOTrainer on the files of a case, as FOLDER. Prints a line of JSON a step.

It runs in an environment of its own (launch/requirements-trl.txt), with this repository's root as
PYTHONPATH, and takes part in torchrun's group where there is one.
As its users would set it on a CPU: the step's responses are generated in one batch, and trained in
one (no gradient checkpointing, no reference model, float32, the vision tower frozen).
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from megavlm.parallel.torchvision_ops import define_torchvision_operators

define_torchvision_operators()

from datasets import Image, Sequence, load_dataset  # noqa: E402
from reward import score  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForImageTextToText,
    AutoProcessor,
    TrainerCallback,
)
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

RANK, PROCESSES = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class Clock(TrainerCallback):
    def on_step_end(self, *_: Any, **__: Any) -> None:
        show(time=time.time())


def show(**values: Any) -> None:
    if RANK == 0:
        print(json.dumps(values), flush=True)


def reward(completions: list[Any], **_: Any) -> list[float]:
    return [score(completion[0]["content"], {}) for completion in completions]


def main(folder: Path) -> None:
    case = json.loads((folder / "theirs.json").read_text())
    model = AutoModelForImageTextToText.from_pretrained(folder / "model", dtype="float32")
    model.model.visual.requires_grad_(False)
    processor = AutoProcessor.from_pretrained(folder / "model", padding_side="left")
    data = load_dataset(
        "parquet",
        data_files=str(folder / "data.parquet"),
        split="train",
        cache_dir=str(folder / f"cache{RANK}"),
    )
    has_images = bool(data[0]["images"])
    data = data.map(
        lambda row: {
            "prompt": [{"role": "user", "content": row["problem"].replace("<image>", "")}]
        },
        remove_columns=["problem", "answer", "task"] + ([] if has_images else ["images"]),
    )
    if has_images:
        data = data.cast_column("images", Sequence(Image()))
    sequences = case["prompts"] * case["n"]
    special = processor.tokenizer.all_special_ids
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        processing_class=processor,
        train_dataset=data,
        callbacks=[Clock()],
        args=GRPOConfig(
            output_dir=str(folder / "trl"),
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            ddp_backend="gloo",
            dataloader_num_workers=int(has_images),
            per_device_train_batch_size=sequences // PROCESSES,
            steps_per_generation=1,
            num_generations=case["n"],
            max_completion_length=case["length"],
            # As many tokens in each response, and none that stands for an image.
            generation_kwargs={"min_new_tokens": case["length"], "suppress_tokens": special},
            beta=0.0,
            loss_type="dapo",
            learning_rate=case["lr"],
            lr_scheduler_type="constant",
            adam_beta2=0.999,
            weight_decay=0.0,
            max_grad_norm=1.0,
            max_steps=case["steps"],
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
    )
    show(time=time.time())
    trainer.train()
    sys.stdout.flush()
    os._exit(0)  # now and then gloo aborts or hangs at the end of an interpreter


if __name__ == "__main__":
    main(Path(sys.argv[1]))
