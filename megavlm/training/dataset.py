"""The rows of a configuration. Imports nothing heavy: preflight checks read them, too."""

from collections.abc import Sequence

from megavlm.config.schema import Config
from megavlm.data.rows import Columns, Rows


def read(config: Config, files: Sequence[str]) -> Rows:
    data = config.data
    columns = Columns(
        prompt=data.prompt_key,
        question=data.question,
        answer=data.answer_key,
        images=data.image_keys,
        category=data.category_key,
        videos=data.video_key,
        extra=data.extra_keys,
    )
    return Rows(files, columns)
