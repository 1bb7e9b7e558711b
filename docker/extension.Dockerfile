# pg_tensile alone, for a server that mounts images as volumes: PostgreSQL 18 and later find it by extension_control_path
# and dynamic_library_path. docs/extension-image.md says how, and where the Python environment comes from.
#
#     docker build -f docker/extension.Dockerfile -t pg_tensile-extension .        (in the folder above)
#
# Build arguments:
#   BASE         what the server's image is made of: its Debian, or the image itself. Its packages have PostgreSQL PG_MAJOR
#   PG_MAJOR     18 for debian:forky-slim
#   PYTHON       the interpreter of the processes that compute, in the server's image
#
# Versions of Debian's packages are not pinned (DL3008): a rebuild is to take their security updates.
# hadolint global ignore=DL3002,DL3003,DL3008

ARG BASE=debian:forky-slim

FROM ${BASE} AS build
ARG PG_MAJOR=18
ARG PYTHON=/opt/pg_tensile/bin/python
SHELL ["/bin/bash", "-Eeuo", "pipefail", "-c"]
USER 0
ENV LANG=C.UTF-8 \
    PATH=/usr/lib/postgresql/${PG_MAJOR}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
# The server and its headers are unpacked, not installed: a cluster would be made, and clang and LLVM come along.
RUN apt-get update -q \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends \
        gcc libc6-dev make python3 "postgresql-client-$PG_MAJOR" \
 && cd /tmp \
 && apt-get download -q "postgresql-$PG_MAJOR" "postgresql-server-dev-$PG_MAJOR" \
 && for package in postgresql-*.deb; do dpkg --extract "$package" /; done \
 && rm -rf postgresql-*.deb /var/lib/apt/lists/*
WORKDIR /build
COPY Makefile pg_tensile.control LICENSE ./
COPY scripts/upgrade_script.py scripts/
COPY sql sql
COPY pg_tensile pg_tensile
COPY pyworker pyworker
# Bytecode is for the path of the volume, and trusted without a look at the sources' times.
RUN make -s -j "$(nproc)" PYTHON="$PYTHON" \
 && make -s install PYTHON="$PYTHON" DESTDIR=/out \
 && mkdir -p /image/licenses/pg_tensile \
 && cp LICENSE /image/licenses/pg_tensile \
 && mv "/out$(pg_config --pkglibdir)" /image/lib \
 && mv "/out$(pg_config --sharedir)" /image/share \
 && find /image -name __pycache__ -prune -exec rm -rf {} + \
 && python3 -m compileall -q --invalidation-mode unchecked-hash -s /image -p /extensions/pg_tensile /image

FROM scratch
LABEL org.opencontainers.image.title="pg_tensile" \
      org.opencontainers.image.licenses="PostgreSQL"
COPY --from=build /image/ /
USER 65532:65532
