# The wheel of `make dist` with torch's CPU build, and its command line. This image was linted and never built; its
# commands were run in a Debian root by rehearse.py.
#
#     make dist && docker build -f packaging/docker/cpu.Dockerfile -t quaver:cpu .
#     docker run --rm quaver:cpu doctor
#
# Debian's packages are not pinned, because its mirrors drop old versions.
# hadolint global ignore=DL3008
FROM debian:bookworm-slim
# g++ compiles CPU kernels for torch.compile.
RUN apt-get update \
    && apt-get install --no-install-recommends --yes g++ python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 quaver
COPY constraints.txt dist/*.whl /dist/
RUN python3 -m venv /opt/quaver
ENV PATH=/opt/quaver/bin:$PATH
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --no-cache-dir --constraint /dist/constraints.txt --extra-index-url "$TORCH_INDEX" torch \
    && set -- /dist/*.whl \
    && pip install --no-cache-dir --constraint /dist/constraints.txt "${1}[inspect,serving,train]"
USER 1000
WORKDIR /home/quaver
ENTRYPOINT ["quaver"]
CMD ["--help"]
