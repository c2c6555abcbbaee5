"""How many questions an evaluation asks."""

import pytest

from megavlm.config.evaluation import Evaluation
from megavlm.evaluation.questions import question_limit


@pytest.mark.parametrize(
    ("limit", "episodes", "samples", "questions"),
    [
        (None, None, 1, None),
        (7, None, 4, 7),
        (None, 10, 1, 10),
        (None, 10, 4, 2),
        (None, 8, 4, 2),
        (1, 8, 4, 1),
        (None, 3, 4, 1),
    ],
)
def test_episodes_are_an_upper_bound(
    limit: int | None, episodes: int | None, samples: int, questions: int | None
) -> None:
    settings = Evaluation(limit=limit, episodes=episodes, samples=samples)
    assert question_limit(settings) == questions
