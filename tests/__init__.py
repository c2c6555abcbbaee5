from megavlm.parallel import platform

platform.install()  # before any test imports megatron
