# SPDX-License-Identifier: Apache-2.0
#
# The pinned vLLM ROCm image, our overlay and patches on its installed vllm package, verified.
# The only pin is base.toml, so nothing here has a default: `make image` passes every argument.
# Builds alike with `docker build` and `buildah bud`, without network once the base is there.
ARG BASE_IMAGE
FROM ${BASE_IMAGE}

# Everything below is under folders of its own: a mounted home folder hides nothing of it.
COPY base.toml pyproject.toml README.md LICENSE /opt/vllm-openai-rocm/
COPY src /opt/vllm-openai-rocm/src
COPY overlay /opt/vllm-openai-rocm/overlay
COPY patches /opt/vllm-openai-rocm/patches
COPY recipes /opt/vllm-openai-rocm/recipes

# Where kernels are compiled to unless the user says otherwise; all of it is under HOME by default.
# TRITON_HOME rather than TRITON_CACHE_DIR: vLLM keeps a TRITON_CACHE_DIR that is set, and otherwise
# puts Triton's files beside Inductor's below VLLM_CACHE_ROOT, which is what a user moves.
# AITER_JIT_DIR stays unset: with it AITER does not find the modules that it was built with. AITER
# takes the FlyDSL kernels that it was built with only where FLYDSL_RUNTIME_CACHE_DIR is unset; they
# are in its own folder, which only root can write and which ends with the container, so that ours
# has links to them (below).
# PYTHONNOUSERSITE: packages in a mounted home would come before the image's own.
ENV ROCM_OVERLAY_HOME=/opt/vllm-openai-rocm \
    PYTHONNOUSERSITE=1 \
    VLLM_CACHE_ROOT=/var/cache/vllm-openai-rocm/vllm \
    TRITON_HOME=/var/cache/vllm-openai-rocm \
    FLYDSL_RUNTIME_CACHE_DIR=/var/cache/vllm-openai-rocm/flydsl \
    FLYDSL_AUTOTUNE_CACHE_DIR=/var/cache/vllm-openai-rocm/flydsl-autotune

# The installed copy of the tool is the only one that stays. PIP_BREAK_SYSTEM_PACKAGES: Debian and
# Ubuntu mark their Python as not pip's (PEP 668); in an image there is no other owner. chmod: the
# files have the modes of the checkout, which may be closed to others than its owner; the image is for
# every user. Linked are kernels, not the lock files beside them, which their readers write.
RUN set -eu; chmod -R a+rX /opt/vllm-openai-rocm; \
    PIP_BREAK_SYSTEM_PACKAGES=1 PIP_ROOT_USER_ACTION=ignore python3 -m pip install --quiet \
      --disable-pip-version-check --no-cache-dir --no-index --no-deps --no-build-isolation /opt/vllm-openai-rocm; \
    rm -rf /opt/vllm-openai-rocm/src /opt/vllm-openai-rocm/build; \
    for folder in . vllm .triton flydsl flydsl-autotune; do \
      mkdir -p "/var/cache/vllm-openai-rocm/$folder"; \
    done; \
    aiter=$(python3 -c 'import importlib.util as u; print(*u.find_spec("aiter").submodule_search_locations)' \
      2>/dev/null) || aiter=; \
    if [ -d "$aiter/jit/flydsl_cache" ]; then \
      cp --recursive --symbolic-link "$aiter/jit/flydsl_cache/." /var/cache/vllm-openai-rocm/flydsl/; \
      find /var/cache/vllm-openai-rocm/flydsl -type l ! -name '*.pkl' -delete; \
    fi; \
    find /var/cache/vllm-openai-rocm -type d -exec chmod 1777 {} +

ARG BASE_REFERENCE
ARG BASE_DIGEST
# Paths, with spaces between.
ARG ALLOW_DRIFT
RUN set -eu; set --; for path in ${ALLOW_DRIFT}; do set -- "$@" --allow-drift "$path"; done; \
    rocm-overlay lay --installed --base-reference "${BASE_REFERENCE}" --base-digest "${BASE_DIGEST}" "$@"; \
    rocm-overlay verify

# Compiled ahead of time, a server's start compiles none of our kernels, whoever runs it and wherever its
# caches are; without, the first start compiles those that it uses. It takes minutes, so it is asked for.
ARG COMPILE_KERNELS=no
ENV VLLM_MONO_KERNELS_SHIPPED=/opt/vllm-openai-rocm/kernels
RUN set -eu; mkdir -p "$VLLM_MONO_KERNELS_SHIPPED"; \
    if [ "${COMPILE_KERNELS}" = yes ]; then \
      rocm-overlay kernels --out "$VLLM_MONO_KERNELS_SHIPPED"; \
      chmod -R a+rX "$VLLM_MONO_KERNELS_SHIPPED"; \
    fi

ARG VERSION
ARG VLLM_VERSION
ARG OVERLAY_HASH
ARG SERIES_HASH
LABEL org.opencontainers.image.title="vllm-openai-rocm" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.base.name="${BASE_REFERENCE}" \
      org.opencontainers.image.base.digest="${BASE_DIGEST}" \
      vllm-openai-rocm.vllm-version="${VLLM_VERSION}" \
      vllm-openai-rocm.drift-allowed="${ALLOW_DRIFT}" \
      vllm-openai-rocm.overlay-hash="${OVERLAY_HASH}" \
      vllm-openai-rocm.series-hash="${SERIES_HASH}"

ENTRYPOINT ["rocm-overlay-entrypoint"]
