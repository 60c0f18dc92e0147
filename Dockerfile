# syntax=docker/dockerfile:1
# fedfr_jax with the versions that its tests run with (requirements.txt).
#   docker build -t fedfr .                             CPUs
#   docker build -t fedfr --build-arg DEVICE=cuda .     NVIDIA GPUs (CUDA 12 comes along)
#   docker build -t fedfr --build-arg DEVICE=tpu .      TPUs
#   docker run --rm -v "$PWD/runs:/workspace/runs" fedfr train --config=demo --workdir=runs/demo
ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS wheel
WORKDIR /source
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheel .

FROM python:${PYTHON}-slim
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
ARG DEVICE=cpu
ARG EXTRAS=remote,report,tensorboard,tfds,export,search,privacy
COPY requirements.txt /lock/requirements.txt
RUN --mount=from=wheel,source=/wheel,target=/wheel \
    case "$DEVICE" in \
      cpu) jax="jax[k8s]" ;; \
      cuda) jax="jax[cuda12,k8s]" ;; \
      tpu) jax="jax[tpu]" ;; \
      *) echo "DEVICE must be cpu, cuda or tpu, got $DEVICE." >&2; exit 2 ;; \
    esac \
    && pip install --no-cache-dir --constraint /lock/requirements.txt \
      "$jax" "$(ls /wheel/*.whl)[$EXTRAS]"
# Where GKE puts the driver of GPUs; elsewhere the folder is missing, and nothing is lost.
ENV LD_LIBRARY_PATH=/usr/local/nvidia/lib64
RUN useradd --create-home --uid 1000 fedfr && install --directory --owner=fedfr /workspace
USER 1000
WORKDIR /workspace
ENTRYPOINT ["fedfr"]
CMD ["--help"]
