# The GPU image: SGLang's own, with what the trainer needs beside it. Build from the repository:
#   docker build -t megavlm .
#   docker run --gpus all --ipc host -v "$PWD":/megavlm megavlm megavlm train recipes/grpo/...
# Not built yet: this set (torch of the base image, Transformer Engine 2.11) is what the packages
# declare, and has still to run on a GPU. tests/gpu_path runs its Python code on CPUs.
ARG SGLANG_TAG=v0.5.23-cu130
FROM lmsysorg/sglang:${SGLANG_TAG}

ARG MEGATRON_CORE=0.16.1
ARG TRANSFORMER_ENGINE=2.11.0
ARG MAX_JOBS=16
ENV MAX_JOBS=${MAX_JOBS} PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1

# Without build isolation Transformer Engine's extension is compiled against the torch that SGLang
# brought; without it listed as a constraint, pip would be free to replace that torch. The kernels
# come compiled, in core_cu13; the extension is C++ alone, so no GPU architecture is chosen here.
# torch 2.14's headers need C++20, which torch's own build adds; with another framework than
# pytorch named, Transformer Engine would ask for C++17.
RUN pip freeze | grep -E '^(torch|torchvision|transformers|sglang)==' > /tmp/base.txt \
    && pip install -c /tmp/base.txt megatron-core==${MEGATRON_CORE} \
    && NVTE_FRAMEWORK=pytorch pip install -c /tmp/base.txt --no-build-isolation \
        "transformer-engine[core_cu13,pytorch]==${TRANSFORMER_ENGINE}"

# There is no apex, which would be compiled here for named architectures: fused Adam, norms and
# the accumulation of weight gradients in the matrix product are Transformer Engine's, and
# megatron-core's own linears, which need apex for the latter, compute nothing in this model.

# For environments in a browser (docs/guides/browser.md).
RUN apt-get update && apt-get install -y --no-install-recommends chromium fonts-liberation \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /megavlm
COPY . .
RUN pip install -c /tmp/base.txt --no-build-isolation -e ".[linear-attention,video,browser]"
