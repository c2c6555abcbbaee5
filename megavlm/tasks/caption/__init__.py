"""Descriptions of images, compared with reference captions."""

from megavlm.task import PublishedData, Task

TASK = Task(
    reward="megavlm.tasks.caption.reward:score",
    check_options="megavlm.tasks.caption.reward:check_options",
    check_row="megavlm.tasks.caption.reward:check_row",
    prepare_options="megavlm.tasks.caption.corpus:with_corpus",
    published=PublishedData(
        "flickr30k",
        "umaru97/flickr30k_train_val_test",
        keys={
            "image_keys": ("image",),
            "prompt_key": None,
            "question": "Describe the image in one sentence.",
            "answer_key": "caption",
            "category_key": None,
            "extra_keys": ("caption",),
        },
        reward={"options": {"reference_key": "caption"}},
    ),
    demo=("describe",),
)
