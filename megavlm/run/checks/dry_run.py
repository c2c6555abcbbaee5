"""`--dry-run`: the checks before a run, and more checks that need the model's tokenizer and
tensors.

A run makes these checks as it goes. They need seconds of imports, so only a dry run makes
them in advance.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from megavlm.checkpointing.folder import EXTRA_STATE, experts_form, locate_step
from megavlm.config.algorithm import DPO, SFT
from megavlm.config.dump import to_yaml
from megavlm.config.schema import Config
from megavlm.data.chat.messages import without_placeholders
from megavlm.data.loader import check_state
from megavlm.data.processor import Processor
from megavlm.data.rows import Row, Rows
from megavlm.data.summary import evenly
from megavlm.data.tables.files import expand
from megavlm.environments.curriculum import Curriculum
from megavlm.families import family_of
from megavlm.parallel import platform
from megavlm.run.checks import preflight

if TYPE_CHECKING:
    from megavlm.models.common.mapping import Entry

PROMPTS = 500  # evenly spread rows of a data set that are made into prompts
FETCHED = 3  # rows of a data set whose images at URLs are fetched
# Ranges in which runs learn. A value outside is likely a typing error, but may be meant.
USUAL = {
    "optimizer.lr": (1e-8, 1e-2),
    "algorithm.critic_lr": (1e-8, 1e-1),
    "algorithm.kl_coefficient": (1e-5, 1.0),
    "algorithm.clip_low": (1e-5, 1.0),
    "algorithm.clip_high": (1e-5, 10.0),
    "algorithm.beta": (1e-3, 10.0),
    "rollout.temperature": (0.2, 2.0),
    "optimizer.weight_decay": (1e-6, 1.0),
    "optimizer.clip_grad": (1e-3, 100.0),
}
NOT_CHECKED = (
    "values of tensors (but for tied embeddings), rows that are not named above, memory, and "
    "whether servers start"
)


def dry_run(config: Config, *, world_size: int, phase: preflight.Phase) -> str:
    """Return the resolved configuration as YAML, followed by comments that list the checks that
    were made and those that were not. It starts and writes nothing.

    Raises ValueError for the first thing that would end the run later.
    """
    preflight.check(config, world_size=world_size, phase=phase, starts=False)
    platform.install()
    checked = [check_tensors(config)]
    if phase == "train" and (resumed := check_start(config)):
        checked.append(resumed)
    processor = Processor(config.model.folder, config.data, family_of(config.model.folder))
    files = {"train_files": config.data.train_files} if phase != "evaluate" else {}
    if preflight.evaluates(config, phase):
        files["test_files"] = config.data.test_files
    for key, names in files.items():
        checked.append(check_prompts(f"data.{key}", Rows(names, config.data), processor, config))
    lines = [f"# Checked: {line}\n" for line in checked]
    lines += [f"# Unusual: {line}\n" for line in (*unusual_values(config), *shared_files(files))]
    return "".join((to_yaml(config), *lines, f"# Not checked: {NOT_CHECKED}\n"))


def unusual_values(config: Config) -> list[str]:
    """Return a sentence for each value outside the range in which runs learn."""
    found = []
    for name, (low, high) in USUAL.items():
        section, key = name.split(".")
        value = getattr(getattr(config, section), key, None)  # each algorithm has keys of its own
        if value and not low <= value <= high:
            found.append(f"{name}={value:g} is outside the usual range, {low:g} to {high:g}")
    alpha, rank = config.lora.alpha, config.lora.rank
    if rank and not rank / 4 <= alpha <= rank * 8:
        found.append(
            f"lora.alpha={alpha:g} is outside the usual range for lora.rank={rank}, "
            f"{rank / 4:g} to {rank * 8}"
        )
    return found


def shared_files(files: Mapping[str, Sequence[str]]) -> list[str]:
    """Return a sentence for each test file that is also a training file, by path or content."""
    train, test = (expand(files.get(key, ())) for key in ("train_files", "test_files"))
    known = {file.digest(): file.url for file in train} if test else {}
    return [
        f"data.test_files: {file.url} holds the same as {known[digest]} in data.train_files, so an "
        "evaluation measures what was trained on"
        for file in test
        if (digest := file.digest()) in known
    ]


def check_tensors(config: Config) -> str:
    """Check that the tensors of model.folder and model.checkpoint have the names and shapes of the
    model. Returns a summary of the check.
    """
    # Imported late: they import megatron-core, which the platform must precede.
    from checkpoint_tools.hf_config import read_config
    from megavlm.families import family
    from megavlm.models.common.hf_source import HFFolder
    from megavlm.models.common.loading import HUB, HubTensors
    from megavlm.training.initial_model import head_tensors

    folder, checkpoint = Path(config.model.folder), config.model.checkpoint
    hf_config = read_config(folder)
    parts = family(hf_config.model_type)
    parts.architecture(hf_config)
    parts.rotary(hf_config)
    entries, source = parts.mapping(hf_config), HFFolder(folder)
    trains_mtp = config.speculation.train and parts.draft_head == "mtp"
    read = parts.mapping(hf_config, draft_head=trains_mtp)
    HubTensors(read, source, HUB if checkpoint is None else experts_form(folder))
    done = f"{len(source)} tensors of {folder} by name and shape"
    if config.speculation.train and not trains_mtp:
        head_folder = config.rollout.draft_folder
        assert head_folder is not None, "the recipe was checked"
        head = head_tensors(head_folder, parts.draft_head)
        HubTensors(parts.draft_mapping(hf_config), head)
        done += f", {len(head)} of {head_folder}"
    if checkpoint is None:
        return done
    step = locate_step(Path(checkpoint), None)
    check_shapes(step, entries)
    return f"{done}, and those of {step}"


def check_shapes(step: Path, entries: "Sequence[Entry]") -> None:
    """Raise ValueError if a step does not hold the tensors of the model in their shapes."""
    from megavlm.checkpointing.reader import StepReader
    from megavlm.models.common.mapping import by_key

    reader = StepReader(step)
    for key, (entry, *_) in by_key(entries).items():
        reader.check(key, entry.checkpoint_shape)


def check_start(config: Config) -> str | None:
    """Check that the run can resume, if its directory holds a step. Returns a summary of the check,
    None if the run starts anew.
    """
    # Imported late: it imports megatron-core, which the platform must precede.
    from checkpoint_tools.hf_config import read_config
    from megavlm.families import family
    from megavlm.training.resume import check_resume, step_to_resume

    if (step := step_to_resume(config)) is None:
        return None
    source = config.model.checkpoint
    start = None if source is None else locate_step(Path(source), None)
    hf_config = read_config(Path(config.model.folder))
    check_resume(config, step, hf_config.model_type, start)
    parts, trains_head = family(hf_config.model_type), config.speculation.train
    check_shapes(step, parts.mapping(hf_config, draft_head=trains_head))
    if (state := json.loads((step / EXTRA_STATE).read_text())["driver"]) is not None:
        Curriculum(config.curriculum).load_state_dict(state["curriculum"])
        fingerprint = Rows(config.data.train_files, config.data).fingerprint()
        check_state(state, fingerprint, config.run.seed, config.data.train_weights)
    return f"the run can resume from {step}, by its keys, its model, its tensors and its data"


@dataclass
class _Found:
    """Counts over the rows that were made into prompts. unfetched: Rows whose images at URLs were
    not fetched. context: Earlier assistant messages that SFT does not learn. empty: Sources of rows
    whose problem has no text.
    """

    lengths: list[int] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)  # reasons, one per skipped row
    fetched: int = 0
    unfetched: int = 0
    context: int = 0
    empty: list[str] = field(default_factory=list)


def check_prompts(key: str, rows: Rows, processor: Processor, config: Config) -> str:
    """Make prompts of evenly spread rows, as training does. Returns a summary of the check.

    Raises ValueError as training would: for a row that cannot be used or is too long, if the recipe
    refuses such rows, and if no row is left, if it skips them.
    """
    data, found = config.data, _Found()
    is_train = key == "data.train_files"
    is_learnt = is_train and isinstance(config.algorithm, SFT)
    is_compared = is_train and isinstance(config.algorithm, DPO)
    indices = evenly(len(rows), PROMPTS)
    for index in indices:
        try:
            row = _read(rows, index, found)
            if not without_placeholders(row.problem).strip():
                found.empty.append(row.source)
            length = None if row.num_unfetched else processor.num_tokens(row)
            if is_learnt and length is not None:
                processor.answer_ids(row)
                found.context += processor.num_context_turns(row)
            if is_compared and length is not None:
                processor.pair_ids(row)
        except ValueError as error:
            if data.bad_samples == "refuse":
                raise
            found.skipped.append(str(error))
            continue
        if length is not None and length > data.max_prompt_tokens:
            reason = processor.too_long(row, length)
            if data.long_prompts == "refuse":
                raise ValueError(reason)
            found.skipped.append(reason)
        elif length is not None:
            found.lengths.append(length)
    if found.skipped and not found.lengths:
        raise ValueError(
            f"{key}: none of {len(found.skipped)} rows, evenly spread, can be used: "
            f"{found.skipped[0]}"
        )
    return f"{key}, {len(rows):,} rows: {_summary(found, len(rows), len(indices))}"


def _read(rows: Rows, index: int, found: _Found) -> Row:
    """Read a row. Images at URLs are fetched for the first FETCHED such rows only."""
    row = rows.peek(index)
    if row.num_unfetched and found.fetched < FETCHED:
        found.fetched += 1
        return rows[index]
    found.unfetched += bool(row.num_unfetched)
    return row


def _summary(found: _Found, num_rows: int, num_prompts: int) -> str:
    first = min(num_rows, preflight.SAMPLE)
    texts = [f"columns, images and rewards of {_share(first, num_rows, 'the first')}"]
    prompts = f"prompts of {_share(num_prompts, num_rows, 'evenly spread')}"
    if found.lengths:
        prompts += f" (at most {max(found.lengths)} tokens)"
    texts.append(prompts)
    if found.skipped:
        texts.append(f"{len(found.skipped)} of them would be skipped, first: {found.skipped[0]}")
    if found.empty:
        texts.append(
            f"{len(found.empty)} of them ask nothing, as their problem has no text, "
            f"first: {found.empty[0]}"
        )
    if found.context:
        texts.append(
            f"{found.context} earlier messages of the assistant are context and not learnt, since "
            "the chat template renders them otherwise than they are sampled"
        )
    if found.fetched:
        texts.append(
            f"images at URLs fetched for {found.fetched} rows, and for {found.unfetched} not"
        )
    return "; ".join(texts)


def _share(count: int, total: int, which: str) -> str:
    return "all" if count == total else f"{which} {count:,}"
