# Targets: service (the default: answers requests, no torch) and trainer.
#   docker build -t doubly-sparse-softmax .
#   docker build -t doubly-sparse-softmax-trainer --target trainer .
# pip reads the PIP_* build arguments itself, so a mirror or a CPU-only index for torch needs no
# change here: --build-arg PIP_EXTRA_INDEX_URL=...

# deploy/image/pin.sh prints it with the digest that the tag has now.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm
FROM ${PYTHON_IMAGE} AS base


# Third-party packages first: this layer changes only with their versions. pip installs only files whose hashes
# are listed.
FROM base AS service-packages
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /build
COPY deploy/requirements/service.txt ./
RUN python -m venv --without-pip /opt/venv \
    && pip --python /opt/venv/bin/python install --no-compile --require-hashes -r service.txt


FROM service-packages AS trainer-packages
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
COPY pyproject.toml constraints.txt ./
RUN python -c "import tomllib; \
project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
open('trainer.txt', 'w').write('\n'.join(project['optional-dependencies']['train']))" \
    && pip --python /opt/venv/bin/python install --no-compile -r trainer.txt -c constraints.txt


# The project itself: one wheel, and the demo model readable by any user id whatever the umask
# of the checkout was.
FROM service-packages AS project
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
COPY deploy/requirements/build.txt ./
RUN python -m venv --without-pip /opt/build \
    && pip --python /opt/build/bin/python install --no-compile --require-hashes -r build.txt
COPY pyproject.toml README.md LICENSE ./
COPY service service
COPY trainer trainer
COPY models/demo /models/demo
RUN pip --python /opt/build/bin/python wheel --no-deps --no-build-isolation --wheel-dir /dist . && chmod -R a+rX /models


# Nothing that runs is taken away, only tests, debuggers' symbols, the languages whose source code rich could
# highlight, and what onnxruntime has for those who convert models or link to it from C.
# Loops are compiled here, for the processor of the machine that builds. On another kind of processor a
# container compiles its own when it starts, which takes some seconds.
FROM service-packages AS service-venv
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends binutils && rm -rf /var/lib/apt/lists/*
COPY --from=project /dist /dist
WORKDIR /opt/venv/lib/python3.11/site-packages
RUN pip --python /opt/venv/bin/python install --no-compile --no-deps /dist/*.whl \
    && find . -depth -type d \( -name tests -o -path ./onnx/backend/test \) -exec rm -r {} + \
    && rm -r onnxruntime/capi/libonnxruntime.so.* onnxruntime/datasets onnxruntime/quantization \
        onnxruntime/tools onnxruntime/transformers \
    && find pygments/lexers -name "*.py" ! -name __init__.py ! -name _mapping.py -delete \
    && find llvmlite ml_dtypes uvloop httptools -name '*.so' -exec strip --strip-unneeded {} + \
    && PYTHONDONTWRITEBYTECODE=1 /opt/venv/bin/python -m service.engine.kernels --all


# Some packages hold files for other Pythons, which this one cannot compile.
FROM trainer-packages AS trainer-venv
COPY --from=project /dist /dist
RUN pip --python /opt/venv/bin/python install --no-compile --no-deps /dist/*.whl \
    && { python -m compileall -qq -j 0 /opt/venv/lib || true; } \
    && /opt/venv/bin/python -m service.engine.kernels --all


FROM base AS runtime
RUN groupadd --gid 10001 dss \
    && useradd --no-log-init --uid 10001 --gid dss --home-dir /tmp --shell /usr/sbin/nologin dss
# Nothing is written outside /tmp, so the root file system can be mounted read-only.
ENV PATH=/opt/venv/bin:$PATH \
    HOME=/tmp \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
ENTRYPOINT ["dss"]


FROM runtime AS trainer
ENV MPLCONFIGDIR=/tmp/matplotlib
# Mount the folder that holds runs/ and models/ here.
WORKDIR /data
RUN chown dss:dss /data
COPY --from=trainer-venv /opt/venv /opt/venv
USER 10001:10001
CMD ["--help"]
ARG VERSION=unknown
ARG REVISION=unknown
LABEL org.opencontainers.image.title="doubly-sparse-softmax-trainer" \
      org.opencontainers.image.description="Trains a doubly sparse softmax and exports it as a model bundle" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.revision="$REVISION"


FROM runtime AS service
ENV DSS_MODELS=/models \
    DSS_HOST=0.0.0.0 \
    DSS_PORT=8000
WORKDIR /srv
COPY --from=service-venv /opt/venv /opt/venv
COPY --from=project /models /models
# What the virtual environment holds, as CycloneDX; the base image's own packages are not in it.
COPY deploy/requirements/sbom.cdx.json /usr/share/doc/doubly-sparse-softmax/
# Its user cannot write byte code, so what a start and a health check import is compiled here.
RUN PYTHONDONTWRITEBYTECODE='' python -c "import service.cli.main, service.healthcheck, service.server.forkserver, \
    service.server.server, service.server.supervisor, service.server.worker, uvicorn.lifespan.on, uvicorn.loops.uvloop" && PYTHONDONTWRITEBYTECODE='' dss verify /models/demo/1
USER 10001:10001
EXPOSE 8000
CMD ["serve"]
HEALTHCHECK --interval=10s --timeout=3s --start-period=30s --retries=3 \
    CMD ["python", "-m", "service.healthcheck"]
ARG VERSION=unknown
ARG REVISION=unknown
LABEL org.opencontainers.image.title="doubly-sparse-softmax" \
      org.opencontainers.image.description="Serves top-k from a doubly sparse softmax over HTTP" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.revision="$REVISION"
