import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from megavlm import __version__, cli
from megavlm.config.dump import to_yaml
from megavlm.config.load import load
from megavlm.demo.tiny_model import make_tiny_model
from megavlm.run.launcher import Nodes
from tests.support.cache import cached_folder

WriteRecipe = Callable[..., Path]


@pytest.fixture(autouse=True)
def outside_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MEGAVLM_AGENT_PID", "MEGAVLM_REASON_FILE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def megavlm(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """The command in this process: exit code, stdout, stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["megavlm", *map(str, arguments)])
        monkeypatch.setattr(cli, "leave", sys.exit)
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, captured.out, captured.err

    return run


@pytest.fixture(scope="module")
def model() -> Path:
    return cached_folder("cli-model", "", lambda path: make_tiny_model(path, ["red"] * 9, seed=0))


@pytest.mark.parametrize("phase", ["train", "evaluate"])
def test_dry_run_prints_what_it_resolved_and_starts_nothing(
    model: Path,
    megavlm: Callable[..., tuple[int, str, str]],
    write_recipe: WriteRecipe,
    monkeypatch: pytest.MonkeyPatch,
    phase: str,
) -> None:
    monkeypatch.setattr("megavlm.run.launcher.run_workers", lambda *_: pytest.fail("started"))
    recipe = write_recipe()
    given = ["run.seed=7", f"model.folder={model}"]
    code, out, err = megavlm(phase, recipe, *given, "--dry-run")
    assert (code, err) == (0, "")
    assert out.startswith(to_yaml(load(recipe, given)))
    assert yaml.safe_load(out)["run"]["seed"] == 7
    assert not (recipe.parent / "run").exists()


def test_train_starts_a_rank_for_each_place_of_the_layout(
    megavlm: Callable[..., tuple[int, str, str]],
    write_recipe: WriteRecipe,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started = []
    monkeypatch.setattr(
        "megavlm.run.launcher.run_workers", lambda *given: started.append(given) or 5
    )
    recipe = write_recipe(parallel={"tensor": 2})
    layout = ["parallel.pipeline=2", "parallel.context=2"]
    assert megavlm("train", recipe)[0] == 5
    assert megavlm("evaluate", recipe, "parallel.data=3")[0] == 5
    assert megavlm("train", recipe, *layout)[0] == 5
    assert megavlm("rollout", recipe, *layout)[0] == 5
    some = ("--nodes", 2, "--node-rank", 1, "--master", "node0:29500")
    assert megavlm("train", recipe, *layout, *some)[0] == 5
    assert started == [
        (["train", str(recipe)], 2, Nodes()),
        (["evaluate", str(recipe), "parallel.data=3"], 6, Nodes()),
        (["train", str(recipe), *layout], 8, Nodes()),
        (["rollout", str(recipe), *layout], 1, Nodes()),
        (["train", str(recipe), *layout], 4, Nodes(2, 1, "node0:29500")),
    ]


BAD = [
    (["train", "none.yaml"], "none.yaml cannot be read"),
    (["train", "RECIPE", "optimizer.lrr=1"], "did you mean optimizer.lr?"),
    (["train", "RECIPE", "model.folder=none"], "model.folder=none is not a folder"),
    (
        ["train", "RECIPE", "model.folder=runs/demo-zoom/model"],
        "model.folder=runs/demo-zoom/model does not exist: make it by make demo ENV=zoom",
    ),
    (
        ["train", "RECIPE", "model.folder=runs/demo/model", "--data-report"],
        "model.folder=runs/demo/model does not exist: make it by make demo",
    ),
    (
        ["train", "RECIPE", "data.train_files=[runs/demo/data/train.parquet]"],
        "runs/demo/data/train.parquet: no such data file; make it by make demo",
    ),
    (
        ["train", "RECIPE", "model.checkpoint=runs/demo/imported"],
        "model.checkpoint=runs/demo/imported holds no complete checkpoint: make it by make demo",
    ),
    (["train", "RECIPE", "--dry-run", "data.prompt_key=none"], "data.prompt_key"),
    (["train", "RECIPE", "--dry-run", "parallel.sequence=true"], "parallel.tensor=1 has only one"),
    (
        ["train", "RECIPE", "--dry-run", "parallel.pipeline=3"],
        "does not split the model's 4 layers",
    ),
    (["train", "RECIPE", "--dry-run", "parallel.expert=2"], "but the model has none"),
    (["train", "RECIPE", "--dry-run", "lora.rank=4", "lora.targets=[mlp]"], "lora.targets holds"),
    (["train", "RECIPE", "--dry-run", "recompute.modules=[norm]"], "recompute.modules names norm"),
    (["train", "RECIPE", "--nodes", "2"], "--nodes 2 needs --master HOST:PORT"),
    (["train", "RECIPE", "--nodes", "2", "--master", "a:1"], "needs --node-rank, 0 to 1"),
    (
        ["train", "RECIPE", "--nodes", "2", "--master", "a:1", "--node-rank", "1"],
        "--nodes 2 does not divide the 1 ranks of the layout",
    ),
    (["evaluate", "RECIPE", "data.test_files=[]"], "data.test_files=[] names no data"),
    (["report", "none"], "none is not a run directory: it has no metrics.jsonl"),
    (["demo", "--data", "none"], "--data none is not a folder"),
    (["demo", "--family", "qwen4"], "--family qwen4 is unknown: choose one of qwen2_vl, qwen2_5_"),
    (
        ["demo", "algorithm.steps=2", "optimizer.warmup_steps=5"],
        "optimizer.warmup_steps=5 is above algorithm.steps=2",
    ),
    (["demo", "run.dir=x"], "run.dir=x is set by the demo: give --run-dir x instead"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_bad_input_is_one_sentence_on_stderr_and_exit_code_2(
    megavlm: Callable[..., tuple[int, str, str]],
    write_recipe: WriteRecipe,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)  # runs/demo may be in the repository
    monkeypatch.setattr("megavlm.run.launcher.run_workers", lambda *_: pytest.fail("started"))
    recipe = str(write_recipe())
    given = [recipe if word == "RECIPE" else word for word in arguments]
    code, out, err = megavlm(*given)
    assert (code, out) == (2, "")
    assert err.startswith("megavlm: ") and message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("command", ["megavlm", "megavlm-convert"])
def test_version_and_completion(command: str) -> None:
    program = Path(sys.executable).with_name(command)
    shown = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
    assert shown.stdout == f"{command} {version('megavlm')}\n" == f"{command} {__version__}\n"
    helped = subprocess.run([program, "--help"], capture_output=True, text=True, check=True)
    assert "--install-completion" in helped.stdout


@pytest.mark.parametrize("arguments", [["train"], ["rain", "x"], ["demo", "--seed", "x"]])
def test_wrong_usage_is_exit_code_2(
    megavlm: Callable[..., tuple[int, str, str]], arguments: list[str]
) -> None:
    code, out, err = megavlm(*arguments)
    assert (code, out) == (2, "")
    assert "Usage" in err and "Traceback" not in err


def test_report_rebuilds_curve_and_page(
    megavlm: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = []
    monkeypatch.setattr("megavlm.observability.plots.reward_curve", built.append)
    monkeypatch.setattr("megavlm.observability.report.write_report", built.append)
    (tmp_path / "metrics.jsonl").touch()
    code, out, _ = megavlm("report", tmp_path)
    assert (code, out.strip()) == (0, str(tmp_path / "report.html"))
    assert built == [tmp_path, tmp_path]


def test_demo_passes_its_options_on(
    megavlm: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[dict[str, object]] = []
    pipeline = ModuleType("megavlm.demo.pipeline")
    pipeline.run_demo = calls.append  # type: ignore[attr-defined]
    pipeline.DemoOptions = dict  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megavlm.demo.pipeline", pipeline)
    monkeypatch.setattr("megavlm.demo.pipeline", pipeline, raising=False)
    assert megavlm("demo")[0] == 0
    options = ["--data", tmp_path, "--seed", 3, "--run-dir", "r", "--warm-steps", 5]
    options += ["--tasks", "kind,length", "--family", "qwen3_vl", "--algorithm", "ppo"]
    assert megavlm("demo", "algorithm.steps=3", *options)[0] == 0
    assert megavlm("demo", "--algorithm", "zoom", "--seed", 1)[0] == 0
    plain = {
        "run_dir": Path("runs/demo"),
        "seed": 0,
        "family": "qwen2_5_vl",
        "algorithm": "grpo",
        "data": None,
        "tasks": None,
        "warm_steps": None,
        "overrides": [],
    }
    given = {
        "run_dir": Path("r"),
        "seed": 3,
        "family": "qwen3_vl",
        "algorithm": "ppo",
        "data": tmp_path,
        "tasks": ["kind", "length"],
        "warm_steps": 5,
        "overrides": ["algorithm.steps=3"],
    }
    variant = {"run_dir": Path("runs/demo-zoom-seed1"), "algorithm": "zoom", "seed": 1}
    assert calls == [plain, given, plain | variant]


def test_help_and_the_checks_before_a_run_import_nothing_heavy(write_recipe: WriteRecipe) -> None:
    lines = [
        "import sys, megavlm.cli, megavlm.config.load, megavlm.run.checks.preflight as preflight",
        f"config = megavlm.config.load.load({str(write_recipe())!r})",
        "preflight.check(config, world_size=1)",
        "sys.argv = ['megavlm', 'train', '--help']",
        "try: megavlm.cli.main()",
        "except SystemExit as ended: code = ended.code",
        "heavy = {'megatron', 'sglang', 'transformers', 'torch'} & set(sys.modules)",
        "sys.exit(f'{code} {heavy}' if code or heavy else 0)",
    ]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_keys_of_recipes_complete_with_tab() -> None:
    assert cli.complete_key("algorithm.st") == ["algorithm.steps="]
    assert cli.complete_key("algorithm.critic_l") == ["algorithm.critic_lr="], "of one algorithm"
    assert "lora.rank=" in cli.complete_key("l")
