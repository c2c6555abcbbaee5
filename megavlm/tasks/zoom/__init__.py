"""Questions about details: the policy zooms into an image, rotates it or marks a place in it before
it answers.
"""

from megavlm.task import Task

TASK = Task(
    reward="megavlm.tasks.vqa.reward:score",
    environment="megavlm.tasks.zoom.environment:Zoom",
    check_options="megavlm.tasks.vqa.reward:check_options",
    check_row="megavlm.rewards.base:check_answer",
    demo=("weave",),
)
