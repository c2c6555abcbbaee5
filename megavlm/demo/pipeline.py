"""`megavlm demo`: the whole pipeline from scratch, on a machine without a GPU.

The demo makes data and a tiny random model, imports it as a Megatron checkpoint, runs a supervised
warm start and then GRPO (or another algorithm) against a real SGLang server, evaluates and exports.
Its training runs use the recipes in recipes/debug, started as a user would start them.
"""

import difflib
import json
import os
import shlex
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from megavlm.config.data import Data
from megavlm.config.load import load
from megavlm.config.schema import Config
from megavlm.demo.data import DemoData, draw_data, take_data
from megavlm.demo.shapes import STARTS, TASKS, Start
from megavlm.demo.warm_start import plan_warm_start
from megavlm.demo_folder import ALGORITHM, FAMILY
from megavlm.families import FAMILIES, family_of
from megavlm.observability.text import minutes
from megavlm.parallel import platform
from megavlm.task import built_in_tasks

MARK = ".megavlm-demo"
RECIPES = Path(__file__).resolve().parents[2] / "recipes" / "debug"
# Keys that all parts of the demo must share, and the demo's option that sets each of them.
OPTIONS = {"run.dir": "--run-dir", "run.seed": "--seed"}
SERVER_ARGS = "rollout.server_args."
# Overrides that the warm start must share, which trains the draft head, too.
HEAD_KEYS = ("speculation.", f"{SERVER_ARGS}speculative_draft_model_path=")
# Length of responses on a user's data set, whose answers may be long.
RESPONSE_TOKENS = 16  # at most


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """Options of `megavlm demo`.

    data: folder with Parquet files; with None the demo draws images, with questions of `tasks`
    (None: the questions that the demo or its environment teaches). warm_steps: steps of the warm
    start; None makes as many as the images need. algorithm: ALGORITHM in
    recipes/debug/ALGORITHM_shapes.yaml. overrides: key=value for this recipe.
    """

    run_dir: Path
    seed: int = 0
    family: str = FAMILY
    algorithm: str = ALGORITHM
    data: Path | None = None
    tasks: Sequence[str] | None = None
    warm_steps: int | None = None
    overrides: Sequence[str] = ()

    @property
    def recipe(self) -> Path:
        """The recipe of the RL phase."""
        return RECIPES / (f"{self.algorithm}_shapes.yaml" if self.data is None else "grpo_any.yaml")

    def check(self) -> None:
        """Raise ValueError for options that would only fail after the warm start."""
        if self.data is not None and self.tasks is not None:
            raise ValueError("--tasks is for drawn images: leave it out with --data")
        for override in self.overrides:
            key, _, value = override.partition("=")
            if option := OPTIONS.get(key):
                raise ValueError(f"{override} is set by the demo: give {option} {value} instead")
        known = sorted(path.stem.removesuffix("_shapes") for path in RECIPES.glob("*_shapes.yaml"))
        known.remove("sft")  # the recipe of the warm start
        algorithm = self.algorithm
        if algorithm not in known:
            near = difflib.get_close_matches(algorithm, known, n=1)
            hint = f"did you mean {near[0]}? Otherwise " if near else ""
            raise ValueError(
                f"--algorithm {algorithm} (ALGORITHM or ENV of make demo) has no recipe: {hint}"
                f"choose one of {', '.join(known)}"
            )
        if self.data is not None and algorithm != ALGORITHM:
            keys = [
                f"recipes/{folder}/{algorithm}.yaml"
                for folder in ("algorithms", "environments")
                if (RECIPES.parent / folder / f"{algorithm}.yaml").is_file()
            ]
            raise ValueError(
                f"--algorithm {algorithm} (ALGORITHM or ENV of make demo) needs the demo's "
                "own images: with --data, leave it out"
                + "".join(f", or give the keys of {name} as overrides" for name in keys)
            )
        if self.family not in FAMILIES:
            raise ValueError(
                f"--family {self.family} is unknown: choose one of {', '.join(FAMILIES)}"
            )
        load(self.recipe, self.keys)

    @property
    def draft_head(self) -> Path:
        """Folder of the EAGLE-3 draft head that the demo makes."""
        return self.run_dir / "draft_head"

    @property
    def keys(self) -> list[str]:
        """Overrides of the RL phase's recipe. Servers that are to draft with an EAGLE-3 head, but
        are given none, draft with the demo's own.
        """
        if f"{SERVER_ARGS}speculative_algorithm=EAGLE3" not in self.overrides or any(
            key.startswith(HEAD_KEYS[1]) for key in self.overrides
        ):
            return [*self.overrides]
        return [*self.overrides, f"{HEAD_KEYS[1]}{self.draft_head}"]


def run_demo(options: DemoOptions) -> None:
    """Run the demo and write everything to its run directory. Raises SystemExit if a run failed."""
    options.check()
    run_dir, data, family = options.run_dir, options.data, options.family
    recipe = load(options.recipe, options.keys)
    shown, drafts = recipe.data, recipe.rollout.draft_algorithm is not None
    start = STARTS.get(options.algorithm, Start())
    _clear(run_dir)
    stage = _Stages()
    with stage("data", "draw images with questions" if data is None else f"read {data}"):
        sets = _make_data(options)
    model, imported = run_dir / "model", run_dir / "imported"
    with stage("model", f"make a tiny {family} with random weights"):
        from transformers.utils.logging import disable_progress_bar

        from megavlm.demo.tiny_model import make_tiny_model

        disable_progress_bar()
        make_tiny_model(
            model,
            sets.texts(),
            seed=options.seed,
            family=family,
            draft_head=drafts and FAMILIES[family].draft_head == "mtp",
            **start.sizes,
        )
    platform.install()  # must precede the first import of megatron-core
    if recipe.rollout.draft_folder == str(options.draft_head):
        from checkpoint_tools.draft_head import make_draft_head

        make_draft_head(model, options.draft_head, seed=options.seed)
    with stage("import", "import it into a Megatron checkpoint"):
        from checkpoint_tools.import_hf import import_hf

        import_hf(model, imported)
    # Experts need sequence parallelism under tensor parallelism.
    experts = ["parallel.sequence=true"] if family.endswith("_moe") else []
    common = [
        f"model.folder={model}",
        f"run.seed={options.seed}",
        f"data.category_key={_yaml(sets.category_key)}",
        f"data.test_files=[{sets.test}]",
    ]
    if data is None:
        images, longest = "shapes", []
    else:
        images = "any"
        longest = [f"rollout.max_new_tokens={_longest_answer(model, sets)}"]
    warm_start = run_dir / "warm_start"
    warm_recipe = f"sft_{images}.yaml"
    warm_keys = [
        *common,
        f"run.dir={warm_start}",
        f"model.checkpoint={imported}",
        f"data.train_files=[{sets.warm_start}]",
        "run.summary=false",
        # It sees images and videos as the recipe of the RL phase shows them.
        f"data.max_pixels={_yaml(shown.max_pixels)}",
        f"data.max_prompt_tokens={shown.max_prompt_tokens}",
        f"data.video_key={_yaml(shown.video_key)}",
        *(key for key in options.keys if key.startswith(HEAD_KEYS)),
    ]
    warm_steps = start.warm_steps if options.warm_steps is None else options.warm_steps
    with stage("warm start", "supervised warm start, from which the model learns to see"):
        if data is not None:
            planned = plan_warm_start(load(RECIPES / warm_recipe, warm_keys), warm_steps)
            print(f"{planned}; --warm-steps gives another number", flush=True)
            warm_steps = planned.steps
        if warm_steps is not None:
            warm_keys.append(f"algorithm.steps={warm_steps}")
        _train(RECIPES / warm_recipe, warm_keys)
    with stage("training", f"{options.algorithm} against an SGLang server, then export and report"):
        _train(
            options.recipe,
            [
                *common,
                f"run.dir={run_dir}",
                f"model.checkpoint={warm_start / 'checkpoints'}",
                f"data.train_files=[{sets.train}]",
                "run.summary=false",
                *longest,
                *experts,
                *options.keys,
            ],
        )
    _close(
        run_dir, stage.seconds, {"data": run_dir / "data", "model": model, "warm start": warm_start}
    )


def _make_data(options: DemoOptions) -> DemoData:
    folder = options.run_dir / "data"
    if options.data is not None:
        return take_data(options.data, folder, seed=options.seed)
    drawn = options.tasks or drawn_tasks(options.algorithm)
    return draw_data(folder, seed=options.seed, tasks=drawn)


def drawn_tasks(algorithm: str) -> Sequence[str] | None:
    """Return the kinds of questions that a recipe needs, None for the plain demo's."""
    task = built_in_tasks().get(algorithm)
    own = (algorithm,) if algorithm in TASKS else ()
    return (task.demo if task else own) or None


def _train(path: Path, overrides: list[str]) -> None:
    """Train a recipe as `megavlm train` does."""
    from megavlm.run.checks import preflight
    from megavlm.run.launcher import run_workers

    config: Config = load(path, overrides)
    preflight.check(config, world_size=config.parallel.num_ranks, phase="train")
    command = shlex.join(["megavlm", "train", os.path.relpath(path), *overrides])
    print(f"the same by hand: {command}", flush=True)
    code = run_workers(["train", str(path), *overrides], config.parallel.num_ranks)
    if code:
        raise SystemExit(code)


def _close(run_dir: Path, seconds: dict[str, float], paths: dict[str, Path]) -> None:
    """Add the phases before training to the result of the run, and print it."""
    from megavlm.observability.console import print_closing
    from megavlm.observability.metrics import reward_points
    from megavlm.observability.report import write_report
    from megavlm.observability.result import RESULT_FILE, write_result

    result = json.loads((run_dir / RESULT_FILE).read_text())
    phases = result["seconds_by_phase"]
    rest = seconds.pop("training") - sum(phases.values())  # checks, report and shutdown of the run
    before = {name: round(value, 3) for name, value in seconds.items()}
    phases["other"] = round(phases.get("other", 0.0) + rest, 3)
    for name, value in phases.items():  # "model" and "data" are phases of the run too
        before[name] = before.get(name, 0.0) + value
    result["seconds_by_phase"] = before
    result["paths"] |= {name: str(path) for name, path in paths.items()}
    write_result(run_dir, result)
    write_report(run_dir)
    print_closing(result, reward_points(run_dir))


def _clear(run_dir: Path) -> None:
    """Delete the folder of an earlier demo. Raises ValueError for any other folder that is not
    empty.
    """
    if run_dir.is_dir() and any(run_dir.iterdir()):
        if not (run_dir / MARK).is_file():
            raise ValueError(f"--run-dir {run_dir} is not an earlier demo: give another folder")
        print(f"replacing the earlier demo in {run_dir}", flush=True)
        shutil.rmtree(run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / MARK).touch()


def _longest_answer(model: Path, sets: DemoData) -> int:
    """Return the token count of the longest answer and its end of turn, up to RESPONSE_TOKENS."""
    from megavlm.data.processor import Processor

    processor = Processor(model, Data(), family_of(model))
    answers = {row.answer for row in sets.rows()}
    return min(max(len(processor.encode_answer(answer)) for answer in answers), RESPONSE_TOKENS)


class _Stages:
    """Stages of the demo. Each stage is announced when it begins, and timed."""

    count = 5

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._started = time.perf_counter()

    @contextmanager
    def __call__(self, name: str, what: str) -> Iterator[None]:
        start, number = time.perf_counter(), len(self.seconds) + 1
        print(f"[{minutes(start - self._started)}] {number} of {self.count}: {what}", flush=True)
        yield
        self.seconds[name] = time.perf_counter() - start


def _yaml(value: str | int | None) -> str:
    return "null" if value is None else str(value)
