"""The step of `model.checkpoint` that a run starts from, as its ranks find it."""

import logging
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from checkpoint_tools.import_hf import import_hf
from checkpoint_tools.lora.import_adapters import import_adapters
from megavlm.checkpointing.adapter_settings import AdapterSettings
from megavlm.config.load import load
from megavlm.config.schema import Config
from megavlm.data.loader import PromptStream
from megavlm.data.rows import Rows
from megavlm.environments.curriculum import Curriculum
from megavlm.families import family
from megavlm.observability.phases import Phases
from megavlm.observability.progress import Progress
from megavlm.parallel.mesh import Layout, build_mesh
from megavlm.run.checks.dry_run import check_start
from megavlm.training.initial_model import adapter_settings, start_model, starting_step
from megavlm.training.train_state import TrainState
from tests.conftest import row, write_rows
from tests.support.fork import launch
from tests.unit.checkpoint_tools.lora_models import make_adapters
from tests.unit.checkpointing.ranks import make_hf
from tests.unit.training.test_start import write_recipe

pytestmark = pytest.mark.distributed


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    hf = make_hf(tmp_path / "hf", num_layers=1)
    make_adapters(hf, tmp_path / "peft", target_modules=r".*language_model.*\.(q|v|down)_proj")
    import_adapters(tmp_path / "peft", tmp_path / "checkpoint", base=hf)
    targets = [
        f"language_model.decoder.layers.*.{x}"
        for x in ("self_attention.linear_qkv", "mlp.linear_fc2")
    ]
    return write_recipe(tmp_path, hf, tmp_path / "checkpoint", targets=targets)


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def start(recipe: Path) -> tuple[list[str], AdapterSettings | None, str]:
    """Warnings and adapters' settings of a policy and its critic; or the error."""
    kept = Kept()
    logging.getLogger("megavlm").addHandler(kept)
    config = load(recipe)
    hf_config = AutoConfig.from_pretrained(config.model.folder)
    entries = family(hf_config.model_type).mapping(hf_config)
    mesh = build_mesh(Layout.from_config(config.parallel), seed=0)
    try:
        step = starting_step(config)
        settings = adapter_settings(config, step)
        for head in ("tokens", "values"):
            start_model(config, step, hf_config, entries, mesh, head)
    except ValueError as error:
        return kept.messages, None, str(error)
    return kept.messages, settings, ""


def test_a_bad_tracker_is_one_warning_of_a_run(recipe: Path) -> None:
    tracker = recipe.parent / "checkpoint" / "latest"
    tracker.write_text("")
    first, second = launch(2, start, recipe)
    assert first[1:] == second[1:] == (AdapterSettings(4, 6.0, str(recipe.parent / "hf")), "")
    assert first[0] == [f"{tracker} does not name a complete step: using the newest one, 0."]
    assert second[0] == []


def test_damaged_contents_are_named_on_every_rank(recipe: Path) -> None:
    """With a length of the pickle's frame that no machine has."""
    path = recipe.parent / "checkpoint" / "step_00000000" / ".metadata"
    data = bytearray(path.read_bytes())
    data[10] ^= 128
    path.write_bytes(data)
    (*_, first), (*_, second) = launch(2, start, recipe)
    assert first == second == f"{path} is damaged: its checksum differs from its manifest."


def configured(recipe: Path, *overrides: str) -> Config:
    return load(recipe, ["model.checkpoint=null", "algorithm.steps=3", *overrides])


def resume(recipe: Path, *overrides: str) -> TrainState:
    config = configured(recipe, *overrides)
    mesh = build_mesh(Layout.from_config(config.parallel), seed=0)
    state = TrainState.build(config, mesh, Progress(is_quiet=True), Phases())
    if (of_driver := state.resume()) is not None:
        stream(config).load_state_dict(of_driver)
    return state


def stream(config: Config) -> PromptStream:
    """The driver's prompts, none of which are made."""
    rows = Rows(config.data.train_files, config.data)
    return PromptStream(rows, lambda row: pytest.fail(), config.data, seed=config.run.seed)


def refusals(recipe: Path) -> list[tuple[str, str]]:
    """Save step 3, and resume with keys that do not go on from it. Returns the errors of the run
    and of a dry run.
    """
    state = resume(recipe)
    state.step = 3
    curriculum = Curriculum(state.config.curriculum)
    state.save({**stream(state.config).state_dict(), "curriculum": curriculum.state_dict()}, {})
    state.saver.finish()
    folder = Path(state.config.model.folder)
    rows = write_rows(recipe.parent / "other.parquet", [row(problem="q", images=[])])
    wide = make_hf(recipe.parent / "wide", num_layers=1, ffn_size=512)
    import_hf(wide, recipe.parent / "imported")
    of_wide = (f"model.folder={wide}", f"model.checkpoint={recipe.parent / 'imported'}")
    moved = shutil.copytree(folder, recipe.parent / "moved")
    other = shutil.copytree(folder, recipe.parent / "other")
    (weights,) = other.glob("*.safetensors")
    tensors = load_file(weights)
    tensors[min(tensors)] += 1
    save_file(tensors, weights, metadata={"format": "pt"})
    found = []
    for overrides in (
        ("algorithm.steps=2",),
        ("lora.alpha=7",),
        ("lora.rank=2",),
        ("lora.rank=0",),
        (f"model.folder={other}",),
        ("checkpoint.step=1",),
        ("run.seed=5",),
        (f"data.train_files=[{rows}]",),
        of_wide,
    ):
        with pytest.raises(ValueError) as caught:
            resume(recipe, *overrides)
        with pytest.raises(ValueError) as dry:
            check_start(configured(recipe, *overrides))
        found.append((str(caught.value), str(dry.value)))
    for override in ("lora.dropout=0.1", f"model.folder={moved}"):
        assert resume(recipe, override).step == 3
        assert "step_00000003" in str(check_start(configured(recipe, override)))
    assert check_start(configured(recipe, "run.resume=never")) is None
    return found


def test_a_resume_with_keys_that_do_not_go_on_is_refused(recipe: Path) -> None:
    (found,) = launch(1, refusals, recipe)
    for (error, dry), words in zip(
        found,
        (
            "algorithm.steps=2, but the run has made 3",
            "lora.alpha=7 differs from the alpha that the adapters in",
            "lora.rank=2 differs from the rank of the adapters in",
            "trained adapters: set lora.rank=4",
            "holds other weights than",
            "no complete checkpoint of step 1",
            "run.seed: 5, but the checkpoint was made with 0; use that, or start with run.resume",
            "data.train_files: the checkpoint was made with other data, other columns or",
            "has shape (512, 128), but the model's has (1024, 128): name a folder and a checkpoint",
        ),
        strict=True,
    ):
        assert words in error and dry == error


def without_adapters(recipe: Path) -> str:
    """Save a step of a run without adapters, and resume with them."""
    state = resume(recipe, "lora.rank=0")
    state.step = 3
    state.save(None, {})
    state.saver.finish()
    with pytest.raises(ValueError) as caught:
        resume(recipe)
    return str(caught.value)


def test_adapters_of_a_run_without_them(recipe: Path) -> None:
    (error,) = launch(1, without_adapters, recipe)
    assert "lora.rank=4 asks for adapters, but the run that saved" in error
    assert "trained without" in error
