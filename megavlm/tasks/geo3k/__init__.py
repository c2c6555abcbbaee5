"""Mathematics with images, as in Geometry3K: an answer that math-verify compares."""

from megavlm.task import PublishedData, Task

TASK = Task(
    reward="megavlm.tasks.geo3k.reward:score",
    variants={"geo3k_calculator": "megavlm.tasks.geo3k.calculator:Calculator"},
    check_options="megavlm.tasks.geo3k.reward:check_options",
    check_row="megavlm.rewards.base:check_answer",
    published=PublishedData(
        "geo3k",
        "hiyouga/geometry3k",
        "data/train-00000-of-00001.parquet",
        "data/test-00000-of-00001.parquet",
        keys={"category_key": None},
    ),
)
