"""The configured processor and rows."""

from collections.abc import Sequence

from megavlm.config.schema import Config
from megavlm.data.processor import Processor
from megavlm.data.rows import Row, read_rows


def make_processor(config: Config) -> Processor:
    data = config.data
    return Processor(
        config.model.folder,
        min_pixels=data.min_pixels,
        max_pixels=data.max_pixels,
        system_prompt=data.system_prompt,
        max_prompt_tokens=data.max_prompt_tokens,
    )


def read(config: Config, files: Sequence[str]) -> list[Row]:
    data = config.data
    return read_rows(
        files,
        prompt_key=data.prompt_key,
        answer_key=data.answer_key,
        image_key=data.image_key,
        category_key=data.category_key,
        video_key=data.video_key,
        extra_keys=data.extra_keys,
    )
