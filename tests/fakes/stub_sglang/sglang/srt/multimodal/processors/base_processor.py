"""The class that server_support/megavlm_prompts.py and megavlm_images.py change."""


class Modality:
    IMAGE = None


class BaseMultimodalProcessor:
    @classmethod
    def _load_single_item(cls) -> None: ...

    async def load_mm_data(self) -> None: ...

    def process_and_combine_mm_data(self) -> None: ...


class BaseMultiModalProcessorOutput:
    pass
