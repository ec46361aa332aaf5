# SPDX-License-Identifier: Apache-2.0
# Verbs only. Each does its own set-up; `make help` lists them.
.DEFAULT_GOAL := help
TOOL := .venv/bin/rocm-overlay
PYTEST := .venv/bin/python -m pytest
ARCH ?= gfx950

.PHONY: help setup setup-image image test test-full check lock tree verify-base mirror-base pin-digest recipes bench-swa clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup-image:
	@ci/setup.sh image

setup: ## the virtual environment, the pinned base and the laid tree
	@ci/setup.sh test
	@$(TOOL) tree

image: setup-image ## build vllm-openai-rocm (ARCH=gfx950 or gfx942; BASE, TAG, ENGINE)
	@$(TOOL) fetch
	@$(TOOL) image --arch $(ARCH) $(if $(BASE),--base "$(BASE)") $(if $(TAG),--tag "$(TAG)") $(if $(ENGINE),--engine "$(ENGINE)")

test: setup ## the tests, under 30 minutes on two cores
	@$(PYTEST) -n 2 --dist loadgroup -m "not full"

test-full: setup ## every test
	@$(PYTEST) -n 2 --dist loadgroup

check: setup ## lint, types and provenance only
	@.venv/bin/ruff check . && .venv/bin/ruff format --check . && .venv/bin/mypy

lock: setup-image ## re-make the hash list of base.toml
	@$(TOOL) lock

tree: setup-image ## lay overlay and patches onto a copy of the base: build/tree
	@$(TOOL) tree

mirror-base: setup-image ## copy the pinned images to TO=registry/name or TO=oci-archive:FILE
	@$(TOOL) mirror-base --to "$(TO)"

pin-digest: setup-image ## look the pinned tags' digests up and write them to base.toml
	@$(TOOL) pin-digest

recipes: setup-image ## list the recipes
	@$(TOOL) recipes list

bench-swa: setup ## SWA metadata: launches and GPU time a step, vLLM's operations against ours
	@$(TOOL) bench-swa

clean: ## remove what builds made; the download cache stays
	@rm -rf build .venv
