# syntax=docker/dockerfile:1
# Training and serving. For a processor:
#   docker build -t modelwright .
# For a GPU (the drivers stay on the host; run with --gpus all):
#   docker build --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu128 -t modelwright:cuda .
# Then, with runs and sources in the present folder:
#   docker run --rm -it --user "$(id -u):$(id -g)" --volume "$PWD:/work" modelwright run quickstart
#   docker run --rm -it --user "$(id -u):$(id -g)" --volume "$PWD:/work" -p 127.0.0.1:8000:8000 modelwright serve runs/quickstart --host 0.0.0.0
FROM python:3.11-slim
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# The fused kernels for processors are compiled when they are first used.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ git && rm -rf /var/lib/apt/lists/*
COPY pyproject.toml README.md LICENSE constraints.txt /source/
COPY src /source/src
COPY packages /source/packages
# By their paths: on PyPI the name modelwright belongs to another project. torch comes first and from its own index, because a
# version with the suffix of a build is newer to pip than the one without.
RUN pip install --no-cache-dir --index-url "$TORCH_INDEX" "$(grep '^torch==' /source/constraints.txt)" \
    && pip install --no-cache-dir -c /source/constraints.txt "/source[clean,completion,hf,hub,report,serve,structured,tensorboard]" /source/packages/plan /source/packages/continual \
    /source/packages/search /source/packages/sandbox \
    && rm -rf /source
# A user without a home may run it, too: caches lie here.
ENV PYTHONUNBUFFERED=1 HOME=/tmp
WORKDIR /work
EXPOSE 8000
STOPSIGNAL SIGTERM
ENTRYPOINT ["modelwright"]
CMD ["--help"]
