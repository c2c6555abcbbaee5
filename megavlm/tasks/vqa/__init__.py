"""Short answers to questions about images."""

from megavlm.task import PublishedData, Task

TASK = Task(
    reward="megavlm.tasks.vqa.reward:score",
    variants={"vqa_retry": "megavlm.tasks.vqa.retry:Retry"},
    check_options="megavlm.tasks.vqa.reward:check_options",
    check_row="megavlm.rewards.base:check_answer",
    published=PublishedData(
        "chartqa",
        "HuggingFaceM4/ChartQA",
        keys={
            "image_keys": ("image",),
            "prompt_key": "query",
            "answer_key": "label",
            "category_key": "human_or_machine",
        },
        # A number may be 5 % off, as in the relaxed accuracy by which ChartQA is reported.
        reward={"options": {"relative": 0.05}},
    ),
)
