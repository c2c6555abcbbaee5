"""What a recipe's weight syncs will send, before any rank is started."""

from transformers import AutoConfig

from megavlm.config.schema import Config
from megavlm.models.common.config import ModelOptions
from megavlm.models.common.layout_rules import check_model_layout
from megavlm.models.registry import family
from megavlm.parallel.mesh import Layout, check_world
from megavlm.weight_sync.plan import Plan, TrainerRanks
from megavlm.weight_sync.plan_table import Serving, render, table
from megavlm.weight_sync.sglang_layout import Engine
from megavlm.weight_sync.trainable import trained_entries

# Of adapters, in the column of a run that has none.
ASSUMED_RANK, ASSUMED_TARGETS = 16, ("language.attention",)


def sync_plan(config: Config, world_size: int) -> str:
    """ValueError for a layout that the model or the world size does not fit."""
    hf_config = AutoConfig.from_pretrained(config.model.folder, local_files_only=True)
    text, options, axes = (
        hf_config.text_config,
        ModelOptions.from_config(config),
        Layout.from_config(config.parallel),
    )
    parts = family(hf_config.model_type)
    check_world(axes, world_size)
    check_model_layout(
        parts.architecture(hf_config), axes, options, vocab_size=text.vocab_size, recompute_layers=1
    )
    entries, rollout, lora = parts.mapping(hf_config), config.rollout, config.lora
    trainer = TrainerRanks.of(hf_config, axes, world_size, options)
    changed = trained_entries(entries, options, lora.targets if lora.rank else None)
    plan = Plan(entries, trainer, changed)
    engine = Engine(
        rollout.tensor_parallel,
        int(rollout.server_args.get("ep_size", 1)),
        text.num_key_value_heads,
        bool(hf_config.tie_word_embeddings),
    )
    serving = Serving(len(rollout.urls) or rollout.servers, engine)
    adapters = (lora.rank, lora.targets) if lora.rank else (ASSUMED_RANK, ASSUMED_TARGETS)
    rows = table(plan, serving, itemsize=options.dtype.itemsize, lora=adapters)
    return render(rows, plan, serving, adapters)
