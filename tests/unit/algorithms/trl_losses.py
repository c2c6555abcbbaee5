"""A program: TRL's own losses of given log-probs, by its settings, with their gradients, as JSON.

It runs by itself because TRL imports transformers' trainers, for which a torchvision beside a CPU
build of torch has to be out of sight.
"""

import json
import sys
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

sys.modules["torchvision"] = None  # type: ignore[assignment]

import torch  # noqa: E402
from trl.trainer.dpo_trainer import DPOTrainer  # noqa: E402
from trl.trainer.grpo_trainer import GRPOTrainer  # noqa: E402


def loss(columns: dict[str, list[list[float]]], settings: dict[str, Any]) -> dict[str, Any]:
    c = {name: torch.tensor(rows, dtype=torch.float64) for name, rows in columns.items()}
    logprobs = c["logprobs"].requires_grad_()
    settings = {
        "loss_type": "grpo",
        "beta": 0.0,
        "importance_sampling_level": "token",
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "max_completion_length": c["mask"].shape[1],
        "entropy_coef": 0.0,
    } | settings
    trainer: Any = SimpleNamespace(
        **settings,
        args=SimpleNamespace(
            delta=settings.get("delta"),
            use_bias_correction_kl=settings.get("unbiased_kl", False),
            steps_per_generation=1,
            sapo_temperature_pos=settings.get("sapo_temperature_pos"),
            sapo_temperature_neg=settings.get("sapo_temperature_neg"),
        ),
        use_vllm=True,
        vllm_importance_sampling_correction=True,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        aux_loss_enabled=False,
        use_adaptive_entropy=False,
        _entropy_bonus_enabled=True,
        current_gradient_accumulation_steps=1,
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(
            num_processes=1, sync_gradients=True, gather=lambda x: x, reduce=lambda x, reduction: x
        ),
        _metrics=defaultdict(lambda: defaultdict(list)),
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, c["entropy"], None),
    )
    gap = (c["old"] - c["rollout"]) * c["mask"]
    if settings["importance_sampling_level"] == "sequence":
        gap = gap.sum(1, keepdim=True)
    inputs = {
        "prompt_ids": c["mask"],
        "prompt_mask": c["mask"],
        "completion_ids": c["mask"],
        "completion_mask": c["mask"],
        "advantages": c["advantages"][:, 0],
        "old_per_token_logps": c["old"],
        "ref_per_token_logps": c["reference"],
        "importance_sampling_ratio": gap.exp().clamp(max=2.0),
        "num_items_in_batch": c["mask"].sum(),
    }
    value = GRPOTrainer._compute_loss(trainer, None, inputs)
    value.backward()
    assert logprobs.grad is not None
    return {"loss": value.item(), "gradient": logprobs.grad.tolist()}


def pair_loss(columns: dict[str, list[list[float]]], settings: dict[str, Any]) -> dict[str, Any]:
    """The rows are two chosen responses, then the rejected ones; `pairs`: number of pairs used."""
    used = [i + 2 * j for j in range(2) for i in range(settings.get("pairs", 2))]
    c = {name: torch.tensor(rows, dtype=torch.float64)[used] for name, rows in columns.items()}
    logprobs = c["logprobs"].requires_grad_()
    masked, (chosen, rejected) = logprobs * c["mask"], (c["reference"] * c["mask"]).sum(1).chunk(2)
    after_prompt = torch.nn.functional.pad(c["mask"], (1, 0))
    outputs = SimpleNamespace(
        log_probs=masked, entropy=c["mask"], mean_logits=c["mask"], is_top1=c["mask"].bool()
    )
    settings = {
        "beta": 0.1,
        "loss_types": ["sigmoid"],
        "loss_weights": [1.0],
        "label_smoothing": 0.0,
    } | settings
    trainer: Any = SimpleNamespace(
        **settings,
        ld_alpha=None,
        f_divergence_type="reverse_kl",
        use_weighting=False,
        aux_loss_enabled=False,
        precompute_ref_logps=True,
        _tp_size=1,
        _total_train_tokens=0,
        _metrics=defaultdict(lambda: defaultdict(list)),
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(
            device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x
        ),
    )
    inputs = {
        "input_ids": after_prompt.long(),
        "attention_mask": after_prompt,
        "completion_mask": after_prompt,
        "ref_chosen_logps": chosen,
        "ref_rejected_logps": rejected,
    }
    value = DPOTrainer._compute_loss(trainer, lambda **_: outputs, inputs, return_outputs=False)
    value.backward()
    assert logprobs.grad is not None
    metrics = {name: found[-1] for name, found in trainer._metrics["train"].items()}
    return {"loss": value.item(), "gradient": logprobs.grad.tolist(), "metrics": metrics}


if __name__ == "__main__":
    given = json.load(sys.stdin)
    made = {name: loss(given["columns"], settings) for name, settings in given["settings"].items()}
    for name, settings in given["pair_settings"].items():
        made[name] = pair_loss(given["pairs"], settings)
    json.dump(made, sys.stdout)
