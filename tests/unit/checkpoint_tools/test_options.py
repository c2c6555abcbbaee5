"""No option is ignored in silence: it has an effect, or is refused."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from checkpoint_tools.lora.import_adapters import import_adapters
from megavlm.checkpointing.folder import LORA_SETTINGS as SETTINGS
from tests.unit.checkpoint_tools.command import run
from tests.unit.checkpoint_tools.conftest import Folder
from tests.unit.checkpoint_tools.lora_models import make_adapters

FAMILY, MOE = "qwen2_vl", "qwen3_vl_moe"


@pytest.fixture(scope="module")
def places(
    hf_folder: Folder, imported: Folder, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """A folder of each kind; the trained one has adapters without a recorded alpha."""
    folder = tmp_path_factory.mktemp("options")
    make_adapters(hf_folder(FAMILY), folder / "peft", target_modules=["self_attn.k_proj"])
    import_adapters(folder / "peft", folder / "trained", base=hf_folder(FAMILY))
    step = folder / "trained" / "step_00000000"
    manifest = json.loads((step / "manifest.json").read_text())
    del manifest["files"][SETTINGS]
    (step / "manifest.json").write_text(json.dumps(manifest))
    (step / SETTINGS).unlink()
    return {
        "HF": hf_folder(FAMILY),
        "PLAIN": imported(FAMILY),
        "PEFT": folder / "peft",
        "TRAINED": folder / "trained",
    }


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("inspect HF --step 4", "is a model folder: it has no steps; leave --step out."),
        ("inspect PEFT --step 4", "leave out --step, --mapping and --experts"),
        ("inspect PEFT --mapping", "leave out --step, --mapping and --experts"),
        ("inspect PLAIN --experts memory", "is a checkpoint and has its own format of experts"),
        ("export PLAIN OUT --alpha 8", "holds no adapters."),
        ("lora-merge HF OUT --adapter PEFT --step 4", "it has no steps"),
        ("lora-merge HF OUT --adapter PEFT --alpha 8", "peft has its own alpha: leave"),
        ("lora-import PEFT OUT --base PLAIN --experts memory", "has its own format of experts"),
        ("verify HF PLAIN --alpha 8", "tensors are compared: --alpha is for --logits, or for"),
        ("verify HF PLAIN --tolerance 1", "bits are equal or not: --tolerance is for --logits."),
        ("verify HF PLAIN --experts-b memory", "is a checkpoint and has its own format of experts"),
        ("verify PEFT TRAINED --experts-a memory", "leave --experts-a and --experts-b out."),
        ("verify PEFT PEFT --alpha 8", "have their own alphas: leave --alpha out."),
        ("verify HF PLAIN --logits --alpha 8", "holds adapters: leave --alpha out."),
        ("verify HF PLAIN --logits --experts-b memory", "is a checkpoint and has its own format"),
        ("verify HF PEFT --logits", "but no model to compute logits with: merge"),
        ("verify HF TRAINED --logits", "does not record the alpha of its adapters"),
    ],
)
def test_an_option_without_effect_is_refused(
    command: str,
    message: str,
    places: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    capsys.readouterr()
    names = places | {"OUT": tmp_path / "out"}
    assert run(*(names.get(word, word) for word in command.split())) == 2
    out, error = capsys.readouterr()
    assert not out and error.count("\n") == 1 and message in error, error
    assert not list(tmp_path.iterdir())


def test_logits_with_adapters_and_an_alpha_option(
    places: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("lora-merge", places["HF"], tmp_path / "out", "--adapter", places["PEFT"]) == 0
    capsys.readouterr()
    for alpha, code in ((6, 0), (60, 1)):
        command = ("verify", "--logits", tmp_path / "out", places["TRAINED"], "--quiet")
        assert run(*command, "--alpha", alpha) == code
        assert capsys.readouterr() == ("", "")


def test_logits_of_experts_in_the_other_form(hf_folder: Folder, tmp_path: Path) -> None:
    hf = Path(shutil.copytree(hf_folder(MOE), tmp_path / "hf"))
    path = hf / "model.safetensors"
    tensors = load_file(path)
    stacks = {name: x.mT.contiguous() for name, x in tensors.items() if ".experts." in name}
    save_file(tensors | stacks, path, {"format": "pt"})
    assert run("verify", "--logits", hf_folder(MOE), hf, "--experts-b", "memory", "--quiet") == 0
