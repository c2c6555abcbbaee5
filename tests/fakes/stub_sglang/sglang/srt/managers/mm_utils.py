"""The class that server_support/megavlm_images.py changes."""


class ShmPointerMMData:
    pass
