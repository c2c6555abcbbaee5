"""The `data` section: files, their columns, and the sizes of prompts and packs."""

from dataclasses import dataclass
from typing import Literal

from megavlm.config.section import Section, bounded, follows


@dataclass(frozen=True, kw_only=True)
class Data(Section):
    """Data files and their columns; a column key that is null means that there is no such
    column."""

    train_files: tuple[str, ...] = ()
    """Parquet, JSONL, JSON or CSV files to train on: paths, globs, or any URL that fsspec opens.
    Each entry is one data set."""

    test_files: tuple[str, ...] = ()
    """Files to evaluate on, of the same kinds and columns."""

    train_weights: tuple[float, ...] = bounded((), above=0)
    """Share of the prompts that each entry of `data.train_files` gets, relative to the others.
    Empty draws all rows as one data set."""

    prompt_key: str | None = "problem"
    """Column of the prompt: text, or chat messages. A last message of the assistant is taken as the
    answer, a column `tools` beside a chat as its tools. Null asks `data.question` of every row. The
    default column names are those of hiyouga/geometry3k."""

    question: str | None = None
    """Prompt of every row where `data.prompt_key` is null."""

    answer_key: str | None = "answer"
    """Column of the reference answer, which rewards compare with and SFT learns: text, or another
    value as pandas prints it. Of a list the first is taken."""

    image_keys: tuple[str, ...] = ("images",)
    """Columns of images, each with an image or a list of them: bytes, base64, a path beside the
    file, a URL, or a struct of bytes, path, url or base64. `<image>` in the prompt marks their
    place; without it they come first."""

    video_key: str | None = None
    """Column of videos, a struct of frames and fps, for supervised data. Rollout servers do not
    take videos."""

    category_key: str | None = "task"
    """Column by whose values metrics and evaluations are also reported separately. Null reports
    them overall only."""

    extra_keys: tuple[str, ...] = ()
    """Further columns that are passed on to environments and rewards."""

    system_prompt: str | None = None
    """System message before every prompt. Null uses what the chat template has."""

    min_pixels: int | None = bounded(None, least=1)
    """Fewest pixels of an image after resizing. Null takes the image processor's own."""

    max_pixels: int | None = bounded(None, least=1)
    """Most pixels of an image after resizing: the cost of an image in tokens. Null takes the image
    processor's own."""

    max_prompt_tokens: int = bounded(1024, least=1)
    """Longest prompt in tokens, image tokens included; `data.long_prompts` decides about longer
    ones."""

    pack_tokens: int = follows(4096, least=1)
    """Longest packed sequence of one forward pass in tokens. It must hold a prompt and one of its
    responses. A prompt whose responses are in several packs is computed in each of them; larger
    packs need more memory. Null takes what a prompt and all of its responses need at their longest
    (for SFT an answer as long as its prompt), and at least 4096."""

    bad_samples: Literal["refuse", "skip"] = "refuse"
    """Handling of rows that cannot be used, such as images that cannot be decoded: `refuse` ends
    the run with an error, `skip` leaves them out and counts them."""

    long_prompts: Literal["refuse", "skip"] = "refuse"
    """Handling of prompts above `data.max_prompt_tokens`: `refuse` ends the run with an error,
    `skip` leaves them out and counts them."""

    workers: int = bounded(0, least=0)
    """Processes that prepare prompts ahead. 0 prepares them in the driver when they are needed. The
    order of prompts does not depend on it."""

    def check(self) -> None:
        low, high = self.min_pixels, self.max_pixels
        if low is not None and high is not None and low > high:
            raise ValueError(
                f"data.min_pixels={low} is above data.max_pixels={high}: lower it or raise the "
                "other"
            )
        if self.max_prompt_tokens > self.pack_tokens:
            raise ValueError(
                f"data.pack_tokens={self.pack_tokens} cannot hold a prompt of "
                f"data.max_prompt_tokens={self.max_prompt_tokens}: raise it or lower the other"
            )
        if (self.prompt_key is None) != (self.question is not None):
            raise ValueError(
                f"data.question={self.question} with data.prompt_key={self.prompt_key or 'null'}: "
                "a question for every row goes with data.prompt_key=null, and only with it"
            )
        if self.train_weights and len(self.train_weights) != len(self.train_files):
            raise ValueError(
                f"data.train_weights has {len(self.train_weights)} weights for "
                f"{len(self.train_files)} entries of data.train_files: give one for each entry, or "
                "none"
            )
