"""Prompts of token ids, in the first process of a server: only a vision token counts as an image.

SGLang decodes a request's tokens and counts the image placeholders in the text. A policy may sample
ordinary tokens that spell `<image>`, `<|image_pad|>` or `<|video_pad|>`; these are counted, too,
and the next turn is refused with HTTP 400. The text has no other use: the processor of transformers
tokenizes it again, and SGLang replaces the result by the request's own tokens. So here the text
consists only of the placeholders of the request's vision tokens. The attention mask of the text is
dropped, because some of SGLang's processors would apply it to the tokens.
"""

from typing import Any

from sglang.srt.environ import envs
from sglang.srt.multimodal.processors.base_processor import BaseMultimodalProcessor


def install() -> None:
    """Make SGLang count vision tokens if images are the only media and the request's tokens are
    kept.
    """
    load = BaseMultimodalProcessor.load_mm_data
    process = BaseMultimodalProcessor.process_and_combine_mm_data

    async def load_by_ids(self: Any, prompt: Any, multimodal_tokens: Any, **given: Any) -> Any:
        images, ids = given.get("image_data") or [], None
        if (
            isinstance(prompt, list)
            and not (given.get("video_data") or given.get("audio_data"))
            and not any(isinstance(image, dict) for image in images)  # already processed
            and prompt.count(multimodal_tokens.image_token_id) == len(images)
            and envs.SGLANG_MM_AVOID_RETOKENIZE.get()
        ):
            ids, prompt = prompt, multimodal_tokens.image_token * len(images)
        loaded = await load(self, prompt, multimodal_tokens=multimodal_tokens, **given)
        if ids is not None:
            loaded.input_ids = ids
        return loaded

    def process_without_mask(self: Any, media: Any, *arguments: Any, **options: Any) -> Any:
        made = process(self, media, *arguments, **options)
        if media.input_ids is not None and made[2]:
            made[2].pop("attention_mask", None)
        return made

    BaseMultimodalProcessor.load_mm_data = load_by_ids
    BaseMultimodalProcessor.process_and_combine_mm_data = process_without_mask
