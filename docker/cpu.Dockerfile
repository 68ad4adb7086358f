# kvproof without a GPU: the oracle, and our Triton kernels under Triton's interpreter.
# docker build -f docker/cpu.Dockerfile -t kvproof:cpu .
# The tag is a real one; whoever builds for keeps appends its digest (docker buildx imagetools inspect TAG).
FROM python:3.11-slim-bookworm

# torch's CPU build: the default index has the CUDA one, of several GB
ENV PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu \
    PIP_NO_CACHE_DIR=1 \
    PYTHONDONTWRITEBYTECODE=1

# git says which revision a run is of
RUN apt-get update && apt-get install --yes --no-install-recommends git && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home --uid 1000 kvproof && mkdir /results && chown kvproof /results
COPY --chown=kvproof . /kvproof
WORKDIR /kvproof
RUN python -m venv /opt/venv && chown -R kvproof /opt/venv
USER kvproof
ENV PATH=/opt/venv/bin:$PATH
RUN python -m pip install --quiet -e '.[postgresql]'

VOLUME /results
ENTRYPOINT ["kvproof"]
CMD ["doctor"]
