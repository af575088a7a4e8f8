# The wheel of `make dist` with torch's CUDA build, and its command line. This image was linted and never built.
#
#     make dist && docker build -f packaging/docker/cuda.Dockerfile -t quaver:cuda .
#     docker run --rm --gpus all --ipc host quaver:cuda doctor
#
# torch's wheels bring the CUDA libraries. The host needs NVIDIA's driver and its container toolkit.
# Debian's packages are not pinned, because its mirrors drop old versions.
# hadolint global ignore=DL3008
FROM debian:bookworm-slim
# Triton compiles launchers with a C compiler, torch.compile its CPU code with g++.
RUN apt-get update \
    && apt-get install --no-install-recommends --yes g++ python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 quaver
COPY constraints.txt dist/*.whl /dist/
RUN python3 -m venv /opt/quaver
ENV PATH=/opt/quaver/bin:$PATH
RUN set -- /dist/*.whl \
    && pip install --no-cache-dir --constraint /dist/constraints.txt "${1}[inspect,serving,train]"
USER 1000
WORKDIR /home/quaver
ENTRYPOINT ["quaver"]
CMD ["--help"]
