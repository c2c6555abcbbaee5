"""The `data` section: files, their columns, and the sizes of prompts and packs."""

from dataclasses import dataclass
from typing import Literal

from megavlm.config.section import Section, bounded, follows

# Formats of images. Pillow's other decoders are rarely needed and have had more vulnerabilities.
IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")


@dataclass(frozen=True, kw_only=True)
class Data(Section):
    """Data files and their columns; a column key is null if the files have no column for it."""

    train_files: tuple[str, ...] = ()
    """Parquet, JSONL, JSON or CSV files to train on: paths, globs, or any URL that fsspec opens.
    Each entry is one data set."""

    test_files: tuple[str, ...] = ()
    """Files to evaluate on, of the same kinds and columns."""

    train_weights: tuple[float, ...] = bounded((), above=0)
    """Sampling weight of each entry of `data.train_files`, relative to the other entries. Empty
    draws all rows as one data set."""

    prompt_key: str | None = "problem"
    """Column of the prompt: text, or chat messages. If the last message is the assistant's, it is
    the answer; with a chat, a column `tools` gives its tools. Null asks `data.question` of every
    row. The default column names match hiyouga/geometry3k."""

    question: str | None = None
    """Prompt of every row where `data.prompt_key` is null."""

    answer_key: str | None = "answer"
    """Column of the reference answer, which rewards compare with, SFT learns and DPO prefers: text,
    another value as pandas prints it, or the assistant's message in a list. Of another list the
    first item is used."""

    rejected_key: str | None = None
    """Column of the response that DPO rejects: text, the assistant's message in a list, or a whole
    chat that ends with it. Only files to train on need the column."""

    image_keys: tuple[str, ...] = ("images",)
    """Columns of images, each with an image or a list of images: bytes, base64, a path relative to
    the data file, a URL, or a struct of bytes, path, url or base64. `<image>` in the prompt marks
    the place of each image; without it, images come first."""

    video_key: str | None = None
    """Column of videos, each with a video or a list of videos: a video file in any form that an
    image may have, or a struct of frames and fps. `<video>` in the prompt marks the place of each
    video; without it, videos come first, after the images."""

    audio_key: str | None = None
    """Column of audio, each with a clip or a list of clips: a file in any form that an image may
    have, or a struct of array and sampling_rate. `<audio>` in the prompt marks the place of each
    clip; without it, clips come first, after images and videos."""

    category_key: str | None = "task"
    """Column whose values group the rows: metrics and evaluations are also reported for each value.
    Files need not have the column of the default. Null reports metrics overall only."""

    extra_keys: tuple[str, ...] = ()
    """Further columns that are passed on to environments and rewards."""

    system_prompt: str | None = None
    """System message before every prompt. Null uses the default of the chat template."""

    min_pixels: int | None = bounded(None, least=1)
    """Minimum number of pixels of an image after resizing. Null uses the image processor's
    value."""

    max_pixels: int | None = bounded(None, least=1)
    """Maximum number of pixels of an image after resizing; it bounds the image's number of tokens.
    Null uses the image processor's value."""

    video_fps: float = bounded(2.0, above=0)
    """Frames per second that are sampled from a video file, evenly spread from its first frame to
    its last; at least 4 frames, and an even number. Videos given as frames are used as they are.
    The default is that of Qwen-VL's own tools."""

    video_max_frames: int | None = bounded(None, least=2)
    """Maximum number of frames of a video. A longer file is sampled at a lower rate; a longer list
    of frames is refused. Null uses the video processor's `max_frames`, 768."""

    video_max_pixels: int | None = bounded(None, least=1)
    """Maximum number of pixels of all frames of a video together, after resizing; it bounds the
    video's number of tokens, which is pixels / 1568 (Qwen3-VL and Qwen3.5: / 2048). A frame has
    one token at least. Null uses the video processor's bounds."""

    max_prompt_tokens: int = bounded(1024, least=1)
    """Maximum length of a prompt in tokens, image tokens included; `data.long_prompts` says what
    happens to longer prompts."""

    pack_tokens: int = follows(4096, least=1)
    """Maximum length in tokens of the packed sequence of one forward pass. It must hold a prompt
    and one of its responses. A prompt whose responses are in several packs is computed in each of
    them; larger packs need more memory. Null uses the maximum length of a prompt with all of its
    responses (for SFT and DPO, with answers as long as the prompt), and at least 4096."""

    bad_samples: Literal["refuse", "skip"] = "refuse"
    """Handling of rows that cannot be used, such as images that cannot be decoded: `refuse` ends
    the run with an error, `skip` leaves them out and counts them."""

    long_prompts: Literal["refuse", "skip"] = "refuse"
    """Handling of prompts above `data.max_prompt_tokens`: `refuse` ends the run with an error,
    `skip` leaves them out and counts them."""

    workers: int = bounded(0, least=0)
    """Worker processes that prepare prompts ahead of their use. 0 prepares them in the driver when
    they are needed. The order of prompts does not depend on it."""

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
