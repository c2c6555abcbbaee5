"""Evaluation as the configuration asks for it: during a run, and of a model by itself."""

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from checkpoint_tools.export_hf import export_hf
from megavlm.config.dump import write
from megavlm.config.schema import Config
from megavlm.data.processor import Processor, Prompt
from megavlm.data.rows import Row, Rows
from megavlm.evaluation.result import EvaluationResult
from megavlm.evaluation.runner import Answer
from megavlm.evaluation.runner import evaluate as run_evaluation
from megavlm.rollout.client import RolloutClient
from megavlm.rollout.messages import Response, Sampling
from megavlm.training.dataset import read
from megavlm.training.episodes import Arena
from megavlm.training.inputs import make_processor
from megavlm.training.scoring import make_judge
from megavlm.training.servers import connect

RESULT_FILE = "evaluation.json"


def evaluate(
    config: Config,
    client: RolloutClient,
    processor: Processor,
    arena: Arena,
    rows: Rows,
    train_rows: Rows,
    version: int | None,
) -> EvaluationResult:
    """`version`: of the weights that must answer; None: of any."""

    def play(questions: Sequence[Row], how: Sampling) -> list[Answer]:
        def generate(prompts: Sequence[Prompt], n: int) -> list[list[Response]]:
            return client.generate(prompts, n=n, sampling=how, weight_version=version)

        groups = arena.play([processor.prompt(row) for row in questions], 1, generate)
        return [Answer(episode.text, episode.score.correct) for (episode,) in groups]

    return run_evaluation(
        play,
        rows[: config.evaluation.limit],
        train_rows=list(train_rows.texts()),
        num_tokens=processor.num_tokens,
        sampling=sampling(config, processor),
        sampled=config.evaluation.sampled,
        shuffled=config.evaluation.shuffled,
        seed=config.run.seed,
    )


def sampling(config: Config, processor: Processor) -> Sampling:
    rollout = config.rollout
    return Sampling(
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        max_new_tokens=rollout.max_new_tokens,
        suppressed_ids=processor.suppressed_ids if rollout.suppress_special_tokens else (),
    )


def evaluate_model(config: Config) -> None:
    """`megavlm evaluate`: the model that the recipe starts from, or what `rollout.urls` serve.

    Writes evaluation.json to the run directory.
    """
    write(config, config.run.dir)
    processor = make_processor(config)
    rows, train_rows = read(config, config.data.test_files), read(config, config.data.train_files)
    with (
        closing(Arena(config, processor, make_judge(config))) as arena,
        _served_folder(config) as folder,
        connect(config, folder) as connection,
    ):
        client = connection.client
        result = evaluate(config, client, processor, arena, rows, train_rows or rows, None)
    path = Path(config.run.dir) / RESULT_FILE
    path.write_text(json.dumps(result.to_dict(), indent=2) + "\n")
    print(result.line())
    print(f"evaluation  {path}")


@contextmanager
def _served_folder(config: Config) -> Iterator[Path]:
    """The model folder; a checkpoint to start from is exported for as long as it is served."""
    if config.model.checkpoint is None or config.rollout.mode == "external":
        yield Path(config.model.folder)
        return
    with tempfile.TemporaryDirectory(prefix="megavlm-evaluate-") as folder:
        export_hf(Path(config.model.checkpoint), Path(folder) / "hf")
        yield Path(folder) / "hf"
