"""MiniWoB++ (arXiv 1802.08802): small web pages, each with a task that its text asks for."""

from megavlm.task import Task

TASK = Task(
    reward="megavlm.rewards.zero:of_row",
    environment="megavlm.tasks.miniwob.environment:MiniWoB",
    check_row="megavlm.tasks.miniwob.rows:check_row",
)
