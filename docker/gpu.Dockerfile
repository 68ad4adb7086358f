# kvproof on an NVIDIA GPU: CUDA 13 with its compiler, which FlashInfer and Triton call at run time.
# docker build -f docker/gpu.Dockerfile -t kvproof:gpu .
# The tag is a real one; whoever builds for keeps appends its digest (docker buildx imagetools inspect TAG).
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04

ENV PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cu130 \
    PIP_NO_CACHE_DIR=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    FLASHINFER_WORKSPACE_BASE=/cache \
    TRITON_CACHE_DIR=/cache/triton

# Triton compiles its launchers with gcc against Python's headers; git says which revision a run is of
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc g++ git python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home --uid 1001 kvproof && mkdir /results /cache && chown kvproof /results /cache
COPY --chown=kvproof . /kvproof
WORKDIR /kvproof
RUN python3 -m venv /opt/venv && chown -R kvproof /opt/venv
USER kvproof
ENV PATH=/opt/venv/bin:$PATH
RUN python -m pip install --quiet --constraint docker/gpu.txt -e '.[gpu,postgresql]'

VOLUME /results /cache
ENTRYPOINT ["kvproof"]
CMD ["doctor"]
