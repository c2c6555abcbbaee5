"""GRPO through the command line: two trainer ranks, the real SGLang server, resharded weights."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from safetensors import safe_open

from checkpoint_tools.draft_head import FOLDER, make_draft_head
from megavlm.demo.data import DemoData
from megavlm.demo.tiny_model import make_tiny_model
from megavlm.models.common.hf_source import HFFolder
from megavlm.observability.traces import read_trace
from megavlm.process import ExitCode
from tests.e2e.conftest import World
from tests.support.draft_head import add_draft_head

pytestmark = pytest.mark.sglang

GRPO = {
    "name": "grpo",
    "steps": 3,
    "prompts_per_step": 4,
    "responses_per_prompt": 4,
    "minibatches": 2,
    "entropy_coefficient": 0.01,  # the gradient is never zero, even where no response is right
}
METRICS = """reward accuracy response_length truncated_share groups_without_signal
kl_reference entropy clip_share rollout_train_kl rollout_max_difference gradient_norm learning_rate
tokens_per_second memory_gib seconds/rollout seconds/vision seconds/reference seconds/old_logprobs
seconds/update seconds/sync seconds/total""".split()


@pytest.fixture(scope="module")
def trained(world: World) -> Path:
    """Return the recipe of a run that has ended, started as a user starts it."""
    recipe = world.recipe(
        "grpo",
        parallel={"tensor": 2, "sequence": True},
        algorithm=GRPO,
        optimizer={"lr": 1e-3},
        rollout={"temperature": 0.7},
        evaluation={"before": True, "after": True},
        checkpoint={"export_hf": True, "verify_export": True},
        run={"profile": [2], "profile_ranks": [0, 1]},
    )
    done = world.megavlm("train", recipe, forks=False)
    assert done.returncode == 0, done.stderr
    return recipe


@pytest.mark.usefixtures("trained")
def test_three_steps(world: World) -> None:
    run = world.root / "grpo"
    steps = world.metrics("grpo")
    assert [step["step"] for step in steps] == [1, 2, 3]
    for step in steps:
        assert set(METRICS) <= set(step), set(METRICS) - set(step)
        assert any(name.startswith("reward/") for name in step)
        # The server sampled with the weights that the trainer scores with, after each sync too.
        assert step["rollout_max_difference"] < 1e-4
        assert step["skipped_updates"] == 0
    assert steps[2]["kl_reference"] > 1e-4, "it moved from the start"

    result = json.loads((run / "result.json").read_text())
    assert result["steps"] == 3 and result["seed"] == 0
    assert result["total_episodes"] == 3 * 4 * 4
    assert result["evaluation"]["step"] == 3
    assert set(result["accuracy_after_by_category"]) >= {"colour", "count", "compare"}
    assert 0 <= result["accuracy_before"] <= 1 and 0 <= result["accuracy_after"] <= 1
    assert result["seconds_by_phase"]["rollout"] > 0
    assert result["export_logit_difference"] < 1e-5
    for name in (
        "config.yaml",
        "report.html",
        "reward.png",
        "samples/rollouts.jsonl",
        "tensorboard",
    ):
        assert (run / name).exists(), name
    with safe_open(run / "hf/model.safetensors", "pt") as exported:
        with safe_open(world.root / "model/model.safetensors", "pt") as start:
            assert set(exported.keys()) == set(start.keys())
            tower = [name for name in start.keys() if name.startswith("visual.")]
            moved = [
                name
                for name in start.keys()
                if not exported.get_tensor(name).equal(start.get_tensor(name))
            ]
    assert tower and not set(moved) & set(tower), "the tower is frozen"
    assert len(moved) > 20
    key = (run / "rollout_server.log").read_text() + (run / "config.yaml").read_text()
    assert "api_key" not in key


@pytest.mark.usefixtures("trained")
def test_a_profile_has_ranks_and_servers_on_one_timeline(world: World) -> None:
    folder = world.root / "grpo/profile"
    assert [path.name for path in folder.iterdir()] == ["step_2.json.gz"]
    events = read_trace(folder / "step_2.json.gz")["traceEvents"]
    names = {
        event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"
    }
    spans: dict[tuple[str, str], tuple[float, float]] = {}
    for event in events:
        if event["ph"] == "X":
            spans[names[event["pid"]], event["name"]] = event["ts"], event["ts"] + event["dur"]
    start, end = spans["rank_0", "rollout"]
    for rank in ("rank_0", "rank_1"):
        assert {name for process, name in spans if process == rank} > {"update", "sync", "vision"}
        assert spans[rank, "update"][0] > end, "the clocks agree"
    served = [span for (process, _), span in spans.items() if process.startswith("server_0")]
    assert any(start < begun < ended < end for begun, ended in served), "the server generates"


@pytest.mark.long
def test_the_checkpoint_is_evaluated_and_trained_on(world: World, trained: Path) -> None:
    run, steps = world.root / "grpo", world.metrics("grpo")
    result = json.loads((run / "result.json").read_text())
    elsewhere = (f"run.dir={world.root / 'evaluated'}", f"model.checkpoint={run / 'checkpoints'}")
    evaluated = world.megavlm("evaluate", trained, *elsewhere, "checkpoint.verify_export=false")
    assert evaluated.returncode == 0, evaluated.stderr
    again = json.loads((world.root / "evaluated/evaluation.json").read_text())
    assert again["greedy"] == result["evaluation_after"]["greedy"], "the checkpoint is what trained"

    changed = ("algorithm.steps=4", "rollout.temperature=1.0", "checkpoint.verify_export=false")
    resumed = world.megavlm("train", trained, *changed)
    assert resumed.returncode == 0, resumed.stderr
    *earlier, last = world.metrics("grpo")
    assert earlier == steps and last["step"] == 4
    assert last["rollout_max_difference"] < 1e-4


def few_rows(world: World) -> dict[str, list[str]]:
    """Return the files of a test set of two rows, for models with experts. Their exports are
    verified on it, and one token in a million has two experts that are closer than rounding.
    """
    path = world.root / "few_rows.parquet"
    pq.write_table(pq.read_table(world.root / "data/test.parquet").slice(0, 2), path)
    return {"test_files": [str(path)]}


@pytest.mark.slow
@pytest.mark.parametrize("family", [pytest.param("qwen3_5", marks=pytest.mark.long), "qwen3_5_moe"])
def test_layers_of_linear_attention(world: World, family: str) -> None:
    """One family replays routed experts; the servers of both draft tokens with a head that is
    trained.
    """
    plain, model = world.root / family, world.root / f"{family}_mtp"
    sets = (world.root / f"data/{name}.parquet" for name in ("train", "test", "warm_start"))
    make_tiny_model(plain, DemoData(*sets, "task").texts(), seed=0, family=family, num_layers=4)
    add_draft_head(plain, model)
    recipe = world.recipe(
        f"grpo_{family}",
        model={"folder": str(model)},
        data=few_rows(world),
        parallel={"tensor": 2, "sequence": True},
        algorithm=GRPO | {"steps": 2, "routing_replay": family == "qwen3_5_moe"},
        optimizer={"lr": 1e-3},
        rollout={"temperature": 0.7, "server_args": {"speculative_algorithm": "NEXTN"}},
        speculation={"train": True, "lr": 1e-3},
        checkpoint={"export_hf": True, "verify_export": True},
    )
    done = world.megavlm("train", recipe)
    assert done.returncode == 0, done.stderr
    steps = world.metrics(f"grpo_{family}")
    assert [step["step"] for step in steps] == [1, 2]
    assert all(step["accept_length"] >= 1 for step in steps)
    assert all(step["rollout_max_difference"] < 1e-4 for step in steps)
    run = world.root / f"grpo_{family}"
    assert json.loads((run / "result.json").read_text())["export_logit_difference"] < 1e-5
    exported, start = HFFolder(run / "hf"), HFFolder(model)
    assert set(exported) == set(start)
    assert all(0 < step["draft_divergence"] < 9 for step in steps)
    assert not exported["mtp.fc.weight"].equal(start["mtp.fc.weight"])
    for name in ("in_proj_qkv.weight", "in_proj_a.weight", "conv1d.weight", "A_log"):
        key = f"model.language_model.layers.0.linear_attn.{name}"
        assert not exported[key].equal(start[key]), key


@pytest.mark.slow
def test_an_eagle3_head_is_trained(world: World) -> None:
    """Over two stages that recompute their layers, and with adapters that are merged."""
    model, head = world.root / "qwen3_vl", world.root / "eagle3"
    sets = (world.root / f"data/{name}.parquet" for name in ("train", "test", "warm_start"))
    texts = DemoData(*sets, "task").texts()
    make_tiny_model(model, texts, seed=0, family="qwen3_vl", num_layers=4)
    make_draft_head(model, head, seed=0)
    recipe = world.recipe(
        "eagle3",
        model={"folder": str(model)},
        parallel={"pipeline": 2},
        recompute={"language": "full"},
        lora={"rank": 4, "alpha": 16},
        algorithm=GRPO | {"steps": 2},
        optimizer={"lr": 1e-3},
        rollout={
            "temperature": 0.7,
            "server_args": {
                "speculative_algorithm": "EAGLE3",
                "speculative_draft_model_path": str(head),
            },
        },
        speculation={"train": True, "lr": 1e-3},
        checkpoint={"export_hf": True, "verify_export": True},
    )
    done = world.megavlm("train", recipe)
    assert done.returncode == 0, done.stderr
    steps = world.metrics("eagle3")
    assert [step["step"] for step in steps] == [1, 2]
    assert all(step["accept_length"] >= 1 for step in steps)
    assert all(step["rollout_max_difference"] < 1e-4 for step in steps)
    assert all(0 < step["draft_divergence"] < 9 for step in steps)
    run = world.root / "eagle3"
    assert json.loads((run / "result.json").read_text())["export_logit_difference"] < 1e-5
    assert set(HFFolder(run / "hf")) == set(HFFolder(model))
    exported, start = HFFolder(run / "hf" / FOLDER), HFFolder(head)
    assert set(exported) == set(start)
    assert not any(exported[name].equal(start[name]) for name in start)


@pytest.mark.slow
def test_adapters_on_experts_are_served(world: World) -> None:
    """Each rank has half of the experts; the server has the base, and each step's adapters. Routes
    are replayed: about one run in a hundred has a token whose second and third experts are closer
    than trainer and server compute their logits.
    """
    model = world.root / "qwen3_vl_moe"
    sets = (world.root / f"data/{name}.parquet" for name in ("train", "test", "warm_start"))
    make_tiny_model(model, DemoData(*sets, "task").texts(), seed=0, family="qwen3_vl_moe")
    recipe = world.recipe(
        "experts",
        model={"folder": str(model)},
        data=few_rows(world),
        parallel={"data": 2, "expert": 2},
        lora={"rank": 4, "alpha": 16, "targets": ["language.attention", "language.experts"]},
        algorithm=GRPO | {"steps": 2, "routing_replay": True},
        optimizer={"lr": 1e-3},
        rollout={"temperature": 0.7, "lora": "adapter"},
        checkpoint={"export_hf": True, "verify_export": True},
    )
    done = world.megavlm("train", recipe)
    assert done.returncode == 0, done.stderr
    steps = world.metrics("experts")
    assert [step["step"] for step in steps] == [1, 2]
    assert all(step["rollout_max_difference"] < 1e-4 for step in steps)
    assert steps[1]["kl_reference"] > 1e-4, "it moved from the start"
    run = world.root / "experts"
    assert json.loads((run / "result.json").read_text())["export_logit_difference"] < 1e-5
    with safe_open(run / "hf/model.safetensors", "pt") as exported:
        with safe_open(model / "model.safetensors", "pt") as start:
            for name in ("gate_up_proj", "down_proj"):
                key = f"model.language_model.layers.1.mlp.experts.{name}"
                assert not exported.get_tensor(key).equal(start.get_tensor(key)), key


@pytest.mark.slow
def test_a_server_that_does_not_start_is_one_sentence(world: World) -> None:
    recipe = world.recipe(
        "broken_server", parallel={"tensor": 1}, algorithm=GRPO, rollout={"start_timeout": 0.5}
    )
    done = world.megavlm("train", recipe)
    assert done.returncode == ExitCode.TRANSIENT
    assert "rollout.start_timeout" in done.stderr and "Traceback" not in done.stderr
