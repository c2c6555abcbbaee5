"""The end of a run: export, plot, report, result and closing table."""

from pathlib import Path

from megavlm.observability.console import print_closing
from megavlm.observability.metrics import reward_points
from megavlm.observability.plots import reward_curve
from megavlm.observability.report import REPORT_FILE, write_report
from megavlm.observability.result import build_result, write_result
from megavlm.run.export import export_checkpoint, verify_export
from megavlm.training.driver import Driver
from megavlm.training.train_state import TrainState


def finish(train_state: TrainState, driver: Driver | None, complete: bool) -> None:
    """Export, plot and report a complete run; print how to resume a stopped one. Collective."""
    run_dir = Path(train_state.config.run.dir)
    if not complete:
        if driver is not None:
            train_state.progress.line(
                f"Stopped after step {train_state.step}; the same command goes on from there."
            )
            driver.close()
        return
    paths = {"run": run_dir, "checkpoints": train_state.folder}
    difference = None
    progress = train_state.progress
    if train_state.config.checkpoint.export_hf:
        progress.begin("exporting the model as a HuggingFace folder")
        paths["HuggingFace folder"] = folder = export_checkpoint(train_state, driver)
        if train_state.config.checkpoint.verify_export:
            progress.begin("comparing the exported model with the trained one")
            with train_state.phases("verification"):
                difference = verify_export(train_state, driver, folder)
    if driver is None:
        return
    driver.close()
    progress.begin("writing the report")
    train_state.start_step_clock()
    if curve := progress.attempt("the reward curve", lambda: reward_curve(run_dir)):
        paths["reward curve"] = curve
    paths["report"] = run_dir / REPORT_FILE
    result = build_result(
        run_dir,
        steps=train_state.step,
        seed=train_state.config.run.seed,
        extra_seconds=train_state.seconds_between_steps,
        paths={name: str(path) for name, path in paths.items()},
    )
    result["export_logit_difference"] = difference
    progress.attempt("the result", lambda: write_result(run_dir, result))
    progress.attempt("the report", lambda: write_report(run_dir))  # last, as it shows the result
    if train_state.config.run.summary:
        rewards = reward_points(run_dir)
        progress.attempt("the output", lambda: print_closing(result, rewards))
    if difference is not None:
        progress.line(
            "transformers computes the trainer's logits from the exported folder, to "
            f"{difference:.1e} of the largest."
        )
