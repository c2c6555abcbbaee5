"""`megavlm train RECIPE --data-report`: writes a page about the recipe's data, without training."""

from functools import partial
from pathlib import Path

from megavlm.config.algorithm import DataTraining
from megavlm.config.schema import Config
from megavlm.data.processor import Processor
from megavlm.data.report import DATA_REPORT_FILE, write_data_report
from megavlm.data.rows import Rows
from megavlm.data.summary import summarize
from megavlm.families import family_of
from megavlm.observability.progress import Progress
from megavlm.run.checks.model_folder import check_is_folder
from megavlm.run.checks.preflight import check_run_dir

LIMIT = 5000  # maximum rows of each split that are read


def data_report(config: Config, progress: Progress) -> Path:
    """Write data_report.html to the run directory and return its path. Loads no weights.

    Raises ValueError if the recipe names no data, its model is missing, or the directory cannot be
    written.
    """
    splits = {"Training data": config.data.train_files, "Test data": config.data.test_files}
    if not any(splits.values()):
        raise ValueError("data.train_files=[] names no data: add data.train_files=[FILE.parquet]")
    check_run_dir(Path(config.run.dir))
    check_is_folder(Path(config.model.folder))
    processor = Processor(config.model.folder, config.data, family_of(config.model.folder))
    summaries = {}
    for name, files in splits.items():
        if files:
            summaries[name] = summarize(
                Rows(files, config.data),
                processor,
                max_tokens=config.data.max_prompt_tokens,
                limit=LIMIT,
                is_supervised=isinstance(config.algorithm, DataTraining)
                and name == "Training data",
                count=partial(progress.count, unit=f"{name.lower()}: row"),
            )
    progress.show("writing the page")
    path = Path(config.run.dir) / DATA_REPORT_FILE
    write_data_report(path, summaries)
    return path
