"""The processor of a configuration, and its stream of training prompts."""

from megavlm.config.algorithm import SFT
from megavlm.config.schema import Config
from megavlm.data.loader import PromptStream
from megavlm.data.processor import Processor
from megavlm.data.rows import Rows


def make_processor(config: Config) -> Processor:
    data = config.data
    return Processor(
        config.model.folder,
        min_pixels=data.min_pixels,
        max_pixels=data.max_pixels,
        system_prompt=data.system_prompt,
        max_prompt_tokens=data.max_prompt_tokens,
    )


def make_stream(config: Config, rows: Rows, processor: Processor) -> PromptStream:
    data, algorithm = config.data, config.algorithm
    # One batch is what a step draws, so that an image is processed once in it.
    size = algorithm.batch_size if isinstance(algorithm, SFT) else algorithm.prompts_per_step
    return PromptStream(
        rows,
        processor.prompt,
        seed=config.run.seed,
        batch_size=size,
        workers=data.workers,
        weights=data.train_weights,
        bad=data.bad_samples,
        long=data.long_prompts,
    )
