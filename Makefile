# SPDX-License-Identifier: Apache-2.0
# Verbs only. Each does its own set-up; `make help` lists them.
.DEFAULT_GOAL := help
TOOL := .venv/bin/rocm-overlay
PYTEST := .venv/bin/python -m pytest
ARCH ?= gfx950
# Without ARCH, what is about the pin is about both architectures.
ARCH_GIVEN = $(if $(filter-out file,$(origin ARCH)),--arch "$(ARCH)")

.PHONY: help setup setup-image image test test-full proofs test-device check lock tree rebase rebase-continue rebase-abort export-prs mirror-base pin-digest recipes demo bench-swa bench-host bench-mono sim-check clean kernels

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup-image:
	@ci/setup.sh image

setup: ## the virtual environment, the pinned base and the laid tree
	@ci/setup.sh test
	@$(TOOL) tree

image: setup-image ## build vllm-openai-rocm (ARCH=gfx950 or gfx942; BASE, TAG, ENGINE, ALLOW_DRIFT, KERNELS=1)
	@$(TOOL) image --arch $(ARCH) $(if $(BASE),--base "$(BASE)") $(if $(TAG),--tag "$(TAG)") \
	  $(if $(ENGINE),--engine "$(ENGINE)") $(foreach path,$(ALLOW_DRIFT),--allow-drift "$(path)") $(if $(KERNELS),--compile-kernels)

test: setup ## the tests, under 30 minutes on two cores
	@$(PYTEST) -n 2 --dist loadgroup -m "not full"

test-full: setup ## every test
	@$(PYTEST) -n 2 --dist loadgroup

proofs: setup ## the long proofs, from where the last run stopped: docs/proofs.md (MINUTES=60, JOBS=2, ONLY="WORD ..")
	@set -f; .venv/bin/python tests/sim/proofs.py --minutes "$(or $(MINUTES),60)" --jobs "$(or $(JOBS),2)" $${ONLY:+--only $$ONLY}

test-device: setup ## the tests that need a GPU, AMD or NVIDIA
	@$(PYTEST) tests/device

check: setup ## lint and types only
	@.venv/bin/ruff check . && .venv/bin/ruff format --check . && .venv/bin/mypy

kernels: setup ## compile the mono kernels ahead of time into build/kernels (ARCH; JOBS, WRITE=1: the table)
	@$(TOOL) kernels --arch $(ARCH) $(if $(JOBS),--jobs $(JOBS)) $(if $(WRITE),--write)

lock: setup-image ## re-make the hash list of base.toml
	@$(TOOL) lock

tree: setup-image ## lay overlay and patches onto a copy of the base: build/tree
	@$(TOOL) tree

rebase: setup ## carry everything over to another base: TO=version, image or checkout (REPORT=1: only report)
	@$(TOOL) rebase --to "$(TO)" $(if $(REPORT),--report)

rebase-continue: setup-image ## take a rebase that waits up again (ACCEPT="PATH ...", DROP="PATCH ...")
	@$(TOOL) rebase-continue $(foreach path,$(ACCEPT),--accept "$(path)") $(foreach name,$(DROP),--drop "$(name)")

rebase-abort: setup-image ## undo a rebase that waits
	@$(TOOL) rebase-abort

export-prs: setup ## the work as upstream pull requests: build/export (AUTHOR="NAME <EMAIL>", CHECK=1: apply and test each)
	@$(TOOL) export-prs $(if $(AUTHOR),--author "$(AUTHOR)") $(if $(CHECK),--check)

mirror-base: setup-image ## copy the pinned images to TO=registry/name or TO=oci-archive:FILE (ARCH for one)
	@$(TOOL) mirror-base --to "$(TO)" $(ARCH_GIVEN)

pin-digest: setup-image ## look the pinned tags' digests up and write them to base.toml (ARCH for one)
	@$(TOOL) pin-digest $(ARCH_GIVEN)

recipes: setup-image ## list the recipes
	@$(TOOL) recipes list

demo: setup ## our launches on simulated gfx950 GPUs (KERNEL=ffn or layer), two minutes: errors, hand-offs, modelled time
	@.venv/bin/python tests/sim/mono/demo.py --kernel $(or $(KERNEL),ffn) $(if $(ROWS),--rows $(ROWS)) $(if $(TP),--tp $(TP))

bench-swa: setup ## SWA metadata: launches and GPU time a step, vLLM's operations against ours
	@$(TOOL) bench-swa

sim-check: setup ## the simulator's proofs, as a table (FULL=1: the long cases too)
	@.venv/bin/python -m cdnasim.check $(if $(FULL),--full)

bench-mono: setup ## our mono kernels beside the base's, modelled (KERNEL=ffn or layer, ARCH, ROWS, TP, WRITE=1 keeps docs/tuning)
	@.venv/bin/python tests/sim/mono/bench.py --arch $(ARCH) --kernel $(or $(KERNEL),ffn) --rows $(or $(ROWS),6) --tp $(or $(TP),4) $(if $(WRITE),--write)

bench-host: setup ## specialised decode: host cost of a step's checks, ours against the base's
	@$(TOOL) bench-host

clean: ## remove what builds made; the download cache stays
	@rm -rf build .venv
