"""The function that server_support/megavlm_images.py changes."""


def _read_media_bytes() -> None: ...
