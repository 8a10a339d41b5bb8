# agent-r1-trl with vLLM and DeepSpeed on CUDA, in the versions of requirements/constraints.txt.
#
#     docker build -t agent-r1-trl .
#     docker run --rm -it --gpus all --shm-size 8g -v "$PWD:/work" agent-r1-trl train --config recipe.yaml
#
# torch brings its CUDA libraries with it; the base image adds the compiler with which DeepSpeed and Triton build kernels.
# The host needs a driver for CUDA 13 (580 or newer; `nvidia-smi` shows the version).
# The image was never built or pulled where this was written (docs/versions.md); the tag is one that public projects build on.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04

ARG PYTHON_VERSION=3.12
ARG TORCH_VERSION=2.13.0
ARG VLLM_VERSION=0.31.0

ENV DEBIAN_FRONTEND=noninteractive \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    VIRTUAL_ENV=/opt/venv \
    PATH=/opt/venv/bin:$PATH

# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends git ninja-build python${PYTHON_VERSION}-dev python${PYTHON_VERSION}-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python${PYTHON_VERSION} -m venv /opt/venv

WORKDIR /opt/agent-r1-trl
COPY requirements/constraints.txt requirements/constraints.txt
# The largest layer first: it stays in the cache while the package changes.
RUN pip install torch==${TORCH_VERSION} vllm==${VLLM_VERSION} --constraint requirements/constraints.txt

COPY setup.cfg pyproject.toml README.md LICENSE ./
COPY src src
COPY recipes recipes
RUN pip install '.[vllm,deepspeed,sandbox,tensorboard]' --constraint requirements/constraints.txt \
    && python -c "import agent_r1_trl"

WORKDIR /work
ENTRYPOINT ["agent-r1-trl"]
CMD ["--help"]
