# The operator image: operator, dcpctl, vllm-router, and the connector's files for the engines' init container.
#
#   docker build -f docker/operator.Dockerfile -t dcp-disagg/operator:VERSION .
#
# VERSION is the version in pyproject.toml. Every dependency is locked with its hash in docker/requirements*.txt, which
# `make generate` exports from uv.lock.
#
# Build arguments
#   BASE_IMAGE     any image with python3 (3.11 or newer) that can make virtual environments
#   PIP_INDEX_URL  a mirror of the package index
# Build secret
#   ca-certificates  a bundle of certificate authorities, where the network has its own:
#                    --secret id=ca-certificates,src=/path/to/bundle.crt

ARG BASE_IMAGE=python:3.12-slim

FROM ${BASE_IMAGE} AS build
ARG PIP_INDEX_URL
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_NO_INPUT=1 PIP_PROGRESS_BAR=off

# Dependencies come first: this layer is built again only when the lock changes.
COPY docker/requirements.txt docker/requirements.build.txt /build/docker/
RUN --mount=type=secret,id=ca-certificates,target=/run/secrets/ca-certificates \
    set -eu; \
    if [ -f /run/secrets/ca-certificates ]; then export PIP_CERT=/run/secrets/ca-certificates; fi; \
    python3 -m venv /build/venv; \
    python3 -m venv --without-pip /opt/dcp/venv; \
    /build/venv/bin/python -m pip install \
        --only-binary :all: --require-hashes -r /build/docker/requirements.build.txt; \
    /build/venv/bin/python -m pip --python /opt/dcp/venv/bin/python install \
        --only-binary :all: --require-hashes -r /build/docker/requirements.txt

COPY pyproject.toml README.md LICENSE /build/
COPY operator/dcp_operator /build/operator/dcp_operator
COPY connector/dcp_connector /build/connector/dcp_connector
# The wheel is built and installed without the network: all it needs is in the two environments.
RUN set -eu; \
    cd /build; \
    /build/venv/bin/python -m hatchling build -t wheel -d /build/dist; \
    /build/venv/bin/python -m pip --python /opt/dcp/venv/bin/python install --no-index --no-deps /build/dist/*.whl; \
    mkdir -p /opt/dcp/connector; \
    cp -r /build/connector/dcp_connector /opt/dcp/connector/

FROM ${BASE_IMAGE}
COPY --from=build /opt/dcp /opt/dcp
# PYTHONSAFEPATH: a file in the working directory never shadows a module.
ENV PATH=/opt/dcp/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    PYTHONSAFEPATH=1 \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1
# A name for the user: programs that ask who runs them get an answer.
RUN echo 'dcp:x:65532:65532::/:/usr/sbin/nologin' >> /etc/passwd
WORKDIR /
USER 65532:65532
ENTRYPOINT ["python", "-m", "dcp_operator"]
