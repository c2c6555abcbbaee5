# The GPU image: SGLang's own, with what the trainer needs beside it. Build from the repository:
#   docker build -t megavlm .
#   docker run --gpus all --ipc host -v "$PWD":/megavlm megavlm megavlm train recipes/grpo/...
# Not built yet: this set (torch of the base image, Transformer Engine 2.11) is what the packages
# declare, and has still to run on a GPU.
ARG SGLANG_TAG=v0.5.23-cu130
FROM lmsysorg/sglang:${SGLANG_TAG}

ARG MEGATRON_CORE=0.16.1
ARG TRANSFORMER_ENGINE=2.11.0
ARG APEX_COMMIT=10417aceddd7d5d05d7cbf7b0fc2daad1105f8b4
ARG MAX_JOBS=16
ENV MAX_JOBS=${MAX_JOBS} NVCC_APPEND_FLAGS="--threads 4" PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1

# Without build isolation both compile against the torch that SGLang brought; without it listed as a
# constraint, pip would be free to replace that torch.
RUN pip freeze | grep -E '^(torch|torchvision|transformers|sglang)==' > /tmp/base.txt \
    && pip install -c /tmp/base.txt megatron-core==${MEGATRON_CORE} \
    && pip install -c /tmp/base.txt --no-build-isolation \
        "transformer-engine[core_cu13,pytorch]==${TRANSFORMER_ENGINE}"

# megatron-core takes fused Adam and gradient accumulation from it where Transformer Engine has none.
RUN git clone https://github.com/NVIDIA/apex.git /tmp/apex \
    && git -C /tmp/apex checkout ${APEX_COMMIT} \
    && pip install --no-build-isolation \
        --config-settings "--build-option=--cpp_ext --cuda_ext --parallel 8" /tmp/apex \
    && rm -rf /tmp/apex

WORKDIR /megavlm
COPY . .
RUN pip install -c /tmp/base.txt --no-build-isolation -e .
