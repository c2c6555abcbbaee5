"""HF -> checkpoint -> HF: every tensor equal, nothing half-written, clear errors."""

import filecmp
import json
import os
import pickle
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint_tools.export_hf import WriteOptions, export_hf
from checkpoint_tools.import_hf import import_hf
from megavlm.demo.tiny_model import make_tiny_model
from megavlm.models.common.hf_source import HFFolder
from megavlm.parallel.torchvision_ops import define_torchvision_operators
from tests.unit.checkpoint_tools.command import assert_nothing_partial, run

NORM = "model.norm.weight"


def make_folder(folder: Path, *, tied: bool = False, dtype: torch.dtype = torch.float32) -> Path:
    make_tiny_model(
        folder,
        ["red blue"] * 10,
        seed=0,
        num_layers=2,
        vision_depth=2,
        full_attention_blocks=[1],
        tied_embeddings=tied,
        randomise_norms_and_biases=True,
    )
    if dtype != torch.float32:
        path = folder / "model.safetensors"
        save_file({k: x.to(dtype) for k, x in load_file(path).items()}, path, {"format": "pt"})
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}, indent=2))
    return folder


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("original") / "hf")


@pytest.fixture(scope="module")
def imported(original: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("imported") / "checkpoint"
    import_hf(original, folder)
    return folder


@pytest.fixture
def hf(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "hf"))


@pytest.fixture
def checkpoint(imported: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(imported, tmp_path / "checkpoint"))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_there_and_back_is_bit_exact(tmp_path: Path, tied: bool, dtype: torch.dtype) -> None:
    hf = make_folder(tmp_path / "hf", tied=tied, dtype=dtype)
    import_hf(hf, tmp_path / "checkpoint")
    done = export_hf(tmp_path / "checkpoint", tmp_path / "out")

    before, after = load_file(hf / "model.safetensors"), HFFolder(tmp_path / "out")
    assert set(after) == set(before) and done.num_tensors == len(before)
    for name, tensor in before.items():
        assert after[name].dtype == dtype and torch.equal(after[name], tensor), name
    # Everything else in the folder is the same, byte by byte; a model card is added.
    names = sorted(path.name for path in hf.iterdir())
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["README.md", *names]
    names.remove("model.safetensors")
    assert filecmp.cmpfiles(hf, tmp_path / "out", names, shallow=False) == (names, [], [])


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl", "qwen3_vl_moe"])
def test_every_family_comes_back_bit_by_bit(family: str, tmp_path: Path) -> None:
    options = {"dense_layers": [1], "num_experts": 3} if family == "qwen3_vl_moe" else {}
    make_tiny_model(tmp_path / "hf", ["red"], seed=0, family=family, vision_depth=1, **options)
    import_hf(tmp_path / "hf", tmp_path / "checkpoint")
    done = export_hf(
        tmp_path / "checkpoint", tmp_path / "out", options=WriteOptions(max_shard_bytes=5 * 10**5)
    )
    before, after = HFFolder(tmp_path / "hf"), HFFolder(tmp_path / "out")
    assert set(before) == set(after) and done.num_tensors == len(before) and done.num_files > 1
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_stacks_that_transformers_saved_come_back_so_or_as_on_the_hub(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "hf", ["red"], seed=0, family="qwen3_vl_moe", vision_depth=1)
    define_torchvision_operators()
    from transformers import AutoModelForImageTextToText

    AutoModelForImageTextToText.from_pretrained(tmp_path / "hf").save_pretrained(tmp_path / "saved")
    import_hf(tmp_path / "saved", tmp_path / "checkpoint")
    assert not run("export", tmp_path / "checkpoint", tmp_path / "out")
    assert not run("export", tmp_path / "checkpoint", tmp_path / "hub", "--experts", "hub")
    for came, back in (("saved", "out"), ("hf", "hub")):
        before, after = HFFolder(tmp_path / came), HFFolder(tmp_path / back)
        assert set(before) == set(after)
        assert all(torch.equal(before[name], after[name]) for name in before)


def test_the_export_loads_in_transformers(imported: Path, original: Path, tmp_path: Path) -> None:
    define_torchvision_operators()
    from transformers import AutoModelForImageTextToText, AutoProcessor

    export_hf(imported, tmp_path / "out", options=WriteOptions(max_shard_bytes=10**6))
    weights = sorted(tmp_path.glob("out/*.safetensors"))
    assert len(weights) > 1
    assert all(path.stat().st_size < 10**6 + 10**4 for path in weights)
    assert all(path.stat().st_mode & 0o777 == 0o666 & ~current_umask() for path in weights)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    expected = load_file(original / "model.safetensors")
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in expected.values())

    model, report = AutoModelForImageTextToText.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert torch.equal(model.lm_head.weight, expected["lm_head.weight"])
    AutoProcessor.from_pretrained(tmp_path / "out")


def test_weights_in_several_files_and_the_other_naming_import_alike(
    hf: Path, imported: Path, tmp_path: Path
) -> None:
    tensors = load_file(hf / "model.safetensors")
    (hf / "model.safetensors").unlink()
    renamed = {
        f"model.{name}"
        if name.startswith("visual.")
        else name.replace("model.", "model.language_model."): x
        for name, x in tensors.items()
    }
    places = {name: f"part-{i % 3}.safetensors" for i, name in enumerate(renamed)}
    for file_name in set(places.values()):
        save_file({k: x for k, x in renamed.items() if places[k] == file_name}, hf / file_name)
    (hf / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))

    import_hf(hf, tmp_path / "checkpoint")
    export_hf(tmp_path / "checkpoint", tmp_path / "out")
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert after.keys() == tensors.keys()
    assert all(torch.equal(after[name], x) for name, x in tensors.items())


def test_nothing_is_replaced_without_force(hf: Path, checkpoint: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("text")
    for convert, source, target in (
        (import_hf, hf, checkpoint),
        (export_hf, checkpoint, hf),
        (import_hf, hf, other),
    ):
        before = sorted(target.rglob("*"))
        with pytest.raises(
            ValueError, match=r"is not empty: choose another folder, or add --force"
        ):
            convert(source, target)
        assert sorted(target.rglob("*")) == before

    with pytest.raises(ValueError, match="--force does not replace such a folder"):
        import_hf(hf, other, force=True)
    assert (other / "thesis.txt").exists()
    (hf / "stale.txt").write_text("")
    export_hf(checkpoint, hf, options=WriteOptions(force=True))
    assert not (hf / "stale.txt").exists()
    import_hf(hf, checkpoint, force=True)
    assert_nothing_partial(tmp_path)


def test_an_export_keeps_the_old_folder_when_it_fails(
    checkpoint: Path, hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device", "model.safetensors")

    monkeypatch.setattr("checkpoint_tools.export_hf.SafetensorsWriter", full_disk)
    before = (hf / "model.safetensors").read_bytes()
    with pytest.raises(OSError, match="No space left"):
        export_hf(checkpoint, hf, options=WriteOptions(force=True))
    assert (hf / "model.safetensors").read_bytes() == before
    assert_nothing_partial(tmp_path)


def test_the_dtype_in_the_configuration_follows_the_weights(
    checkpoint: Path, tmp_path: Path
) -> None:
    (checkpoint / "hf" / "checksums").unlink()
    path = checkpoint / "hf" / "config.json"
    config = json.loads(path.read_text()) | {"dtype": "bfloat16"}
    path.write_text(json.dumps(config))
    export_hf(checkpoint, tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written == config | {"dtype": "float32"}


def rewrite(step: Path, /, **values: object) -> None:
    path = step / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda step: damage(step / "__0_0.distcp"), r"__0_0\.distcp is damaged"),
        (lambda step: os.truncate(step / "__0_0.distcp", 99), r"__0_0\.distcp has 99 bytes"),
        (lambda step: (step / "__0_0.distcp").unlink(), r"__0_0\.distcp is missing"),
        (lambda step: (step / "manifest.json").write_text("{"), r"manifest\.json cannot be read"),
        (lambda step: (step / "manifest.json").unlink(), "holds no complete checkpoint"),
        (
            lambda step: rewrite(step, files=None),
            r"manifest\.json cannot be read .*: files is None",
        ),
        (lambda step: rewrite(step, files=["x"]), r"manifest\.json cannot be read .*: files is \["),
        (lambda step: rewrite(step, files={"x": {}}), r"manifest\.json cannot .*: x has \{\} inst"),
        (lambda step: rewrite(step, files={"x": 3}), r"manifest\.json cannot .*: x has 3 instead"),
        (lambda step: rewrite(step, layout=None), r"manifest\.json cannot .*: layout is None"),
        (
            lambda step: rewrite(step, layout={"tensor": "2"}),
            r"manifest\.json cannot .*: layout is",
        ),
        (lambda step: rewrite(step, scores=None), r"manifest\.json cannot .*: scores is None"),
        (lambda step: rewrite(step, step="0"), r"manifest\.json cannot .*: step is '0'"),
        (lambda step: shutil.rmtree(step.parent / "hf"), "is not a HuggingFace model folder"),
        (
            lambda step: os.truncate(step.parent / "hf/tokenizer.json", 100),
            r"hf/tokenizer\.json has 100 bytes; .* changed on purpose, delete .*/hf/checksums\.",
        ),
        (lambda step: damage(step.parent / "hf/tokenizer.json"), r"hf/tokenizer\.json is damaged"),
        (lambda step: (step.parent / "hf/tokenizer.json").unlink(), r"tokenizer\.json is missing"),
        (
            lambda step: (step.parent / "hf/checksums").write_text("{"),
            "hf/checksums cannot be read",
        ),
    ],
)
def test_a_damaged_checkpoint_is_named(
    checkpoint: Path, tmp_path: Path, spoil: object, message: str
) -> None:
    spoil(checkpoint / "step_00000000")  # type: ignore[operator]  # a function of one path
    with pytest.raises(ValueError, match=message):
        export_hf(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_checksums_of_the_model_s_files_stay_where_they_are(
    checkpoint: Path, original: Path, tmp_path: Path
) -> None:
    """No export has them; a checkpoint without them, as there were some, is taken as it is."""
    sums = json.loads((checkpoint / "hf" / "checksums").read_text())
    names = {path.name for path in (checkpoint / "hf").iterdir()}
    assert sums.keys() == names - {"checksums"} and "tokenizer.json" in sums
    export_hf(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out" / "checksums").exists()
    (checkpoint / "hf" / "checksums").unlink()
    (checkpoint / "hf" / "tokenizer.json").write_text("other")
    export_hf(checkpoint, tmp_path / "other")
    assert (tmp_path / "other" / "tokenizer.json").read_text() == "other"


def test_a_checkpoint_of_another_size_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "hf" / "checksums").unlink()
    path = checkpoint / "hf" / "config.json"
    config = json.loads(path.read_text())
    config["text_config"]["num_hidden_layers"] = 1
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"config\.json: .*number of `layer_types`"):
        export_hf(checkpoint, tmp_path / "out")
    config["text_config"]["layer_types"] = None
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"decoder\.layers\.1\..* is not a tensor of the model"):
        export_hf(checkpoint, tmp_path / "out")
    config["text_config"] |= {"num_hidden_layers": 3}
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"has no tensor .*decoder\.layers\.2\."):
        export_hf(checkpoint, tmp_path / "out")
    config["text_config"] |= {"num_hidden_layers": 2, "intermediate_size": 512}
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"linear_fc1\.weight .*\(512, 128\).*\(1024, 128\)"):
        export_hf(checkpoint, tmp_path / "out")


def test_contents_that_would_run_code_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    canary = tmp_path / "canary"

    class Malicious:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.system, (f"touch {canary}",)

    step = checkpoint / "step_00000000"
    (step / ".metadata").write_bytes(pickle.dumps(Malicious()))
    manifest = json.loads((step / "manifest.json").read_text())
    del manifest["files"][".metadata"]
    (step / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=r"\.metadata cannot be read .*posix\.system"):
        export_hf(checkpoint, tmp_path / "out")
    assert not canary.exists()


def without(folder: Path, name: str) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors[name]
    save_file(tensors, path)


def other_family(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "llava"}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda hf: without(hf, NORM), rf"has no tensor {re.escape(NORM)}"),
        (lambda hf: os.truncate(hf / "model.safetensors", 999), r"not a complete safetensors file"),
        (lambda hf: (hf / "model.safetensors").rename(hf / "pytorch_model.bin"), "pickled weights"),
        (
            other_family,
            r"config\.json: model_type 'llava' is not supported: use one of",
        ),
        (lambda hf: (hf / "config.json").unlink(), "is not a HuggingFace model folder: No such"),
        (lambda hf: (hf / "config.json").write_text("x"), "is not a model's configuration"),
    ],
)
def test_a_wrong_model_folder_is_one_sentence_and_exit_code_2(
    hf: Path, tmp_path: Path, spoil: object, message: str
) -> None:
    spoil(hf)  # type: ignore[operator]  # a function of one path
    with pytest.raises(ValueError, match=message):
        import_hf(hf, tmp_path / "checkpoint")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


def current_umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask
