"""Rules of the section about checkpoints."""

from megavlm.config.schema import Config

EVALUATION = "evaluation/"
MEASURES = ("greedy", "sampled", "valid", "blind", "shuffled")  # evaluation.result's


def check_checkpoint(config: Config) -> None:
    checkpoint = config.checkpoint
    if checkpoint.verify_export and not checkpoint.export_hf:
        raise ValueError(
            "checkpoint.verify_export=true has nothing to verify with checkpoint.export_hf=false: "
            "set both or neither"
        )
    if checkpoint.step is not None and config.run.resume == "never":
        raise ValueError(
            f"checkpoint.step={checkpoint.step} is a step to resume from, and run.resume=never "
            "resumes from none: remove one of them"
        )
    if checkpoint.keep_every is not None:
        _check_keep_every(checkpoint.keep_every, checkpoint.every, checkpoint.keep_last)
    if checkpoint.best_metric is not None and checkpoint.best_metric.startswith(EVALUATION):
        _check_evaluated(checkpoint.best_metric, config)


def _check_keep_every(keep_every: int, every: int, keep_last: int | None) -> None:
    if keep_last is None:
        raise ValueError(
            f"checkpoint.keep_every={keep_every} says what stays when others are deleted, and "
            "checkpoint.keep_last=null deletes none: set checkpoint.keep_last, or remove it"
        )
    if every == 0 or keep_every % every:
        raise ValueError(
            f"checkpoint.keep_every={keep_every} must be a multiple of checkpoint.every={every}: "
            "no other step is saved; change one of them"
        )


def _check_evaluated(metric: str, config: Config) -> None:
    measure, evaluation = metric.split("/")[1], config.evaluation
    if measure not in MEASURES:
        raise ValueError(
            f"checkpoint.best_metric={metric} is nothing that an evaluation measures: choose one "
            f"of {', '.join(EVALUATION + name for name in MEASURES)}"
        )
    if getattr(evaluation, measure, True) is False:
        raise ValueError(
            f"checkpoint.best_metric={metric} is not measured with evaluation.{measure}=false: "
            "turn it on or choose another metric"
        )
    if not evaluation.every and not evaluation.after:
        raise ValueError(
            f"checkpoint.best_metric={metric} needs evaluations of saved steps: set "
            "evaluation.every to checkpoint.every, or choose a metric of the training steps"
        )
