from megavlm.parallel import platform

platform.install()  # before anything imports megatron
