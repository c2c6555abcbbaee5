"""The `evaluation` section: evaluations during a run and by `megavlm evaluate`."""

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
    """Maximum number of rows in an evaluation. Null uses all rows."""

    sampled: bool = True
    """Also measure the accuracy of responses that are sampled as in training
    (`rollout.temperature`, `rollout.top_p`, `rollout.top_k`), in addition to greedy accuracy."""

    shuffled: bool = True
    """Also measure greedy accuracy with images exchanged between questions. The accuracy of a model
    that looks at its images then falls to the accuracy of guessing."""

    model: str | None = None
    """Model that `megavlm evaluate` measures: a checkpoint, a HuggingFace folder or a PEFT adapter.
    Null uses the recipe's model."""

    baseline: str | None = None
    """Second model, of the same kinds, that `megavlm evaluate` compares the first with. Null
    measures one model only."""

    samples: int = bounded(1, least=1)
    """Responses to each question in `megavlm evaluate`: one response is greedy, several are sampled
    as in training."""

    episodes: int | None = bounded(None, least=1)
    """Maximum number of episodes of each model in `megavlm evaluate`, which asks `episodes` //
    `samples` questions, at least one. Null asks all questions."""
