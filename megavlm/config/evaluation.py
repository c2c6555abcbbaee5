"""The `evaluation` section: evaluations during a run, and of `megavlm evaluate`."""

from dataclasses import dataclass

from megavlm.config.section import Section, bounded

EVALUATION = "evaluation/"  # prefix of an evaluation's metrics
MEASURES = ("greedy", "sampled", "valid", "blind", "shuffled")


@dataclass(frozen=True, kw_only=True)
class Evaluation(Section):
    """Evaluation on `data.test_files`, during a run and by `megavlm evaluate`."""

    every: int = bounded(0, least=0)
    """Steps between evaluations. 0 turns them off."""

    before: bool = False
    """Evaluate before the first step."""

    after: bool = False
    """Evaluate after the last step."""

    limit: int | None = bounded(None, least=1)
    """Most rows of an evaluation. Null takes all."""

    sampled: bool = True
    """Also measure accuracy at `rollout.temperature`, beside greedy accuracy."""

    shuffled: bool = True
    """Also measure greedy accuracy with images exchanged between questions. A model that looks at
    its images falls to the accuracy of guessing."""

    model: str | None = None
    """Model that `megavlm evaluate` measures: a checkpoint, a HuggingFace folder or a PEFT adapter.
    Null takes the recipe's."""

    baseline: str | None = None
    """Second model that `megavlm evaluate` compares with, of the same kinds. Null compares with
    none."""

    samples: int = bounded(1, least=1)
    """Responses to each question in `megavlm evaluate`: 1 is greedy, more are sampled at
    `rollout.temperature`."""

    episodes: int | None = bounded(None, least=1)
    """Most episodes of each model in `megavlm evaluate`, which asks `episodes` // `samples`
    questions and at least one. Null asks all."""
