"""The class that server_support/megavlm_prompts.py changes."""


class BaseMultimodalProcessor:
    async def load_mm_data(self) -> None: ...


class BaseMultiModalProcessorOutput:
    pass
