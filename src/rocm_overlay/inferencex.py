# SPDX-License-Identifier: Apache-2.0
"""A recipe as a lane of InferenceX's AgentX benchmark: its script, its srt-slurm fragment, its master entry.

What is asked of each is in docs/inferencex.md, and checked here. A vLLM lane there takes images as shipped,
so none of these makes our image a vLLM lane: they are for a lane of our own, for private runs of the same
workload, and for the upstream image once our kernels are in it.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from rocm_overlay.errors import OverlayError
from rocm_overlay.recipe import Recipe
from rocm_overlay.values import text_of

MODEL = "deepseek-ai/DeepSeek-V4.1-Flash"
MODEL_PREFIX, PRECISION, EXPERIMENT = "dsv41flash", "fp4", "dsv41flash"
TRACES = "semianalysis_cc_traces_weka_062126"
DEFAULT_PORT = 8888
# The distribution of acceptance that the lane prescribes, with thinking on and five drafts.
GOLDEN_DRAFTS, GOLDEN_LENGTH = 5, 3.51
ROWS_A_SEQUENCE = 1 + GOLDEN_DRAFTS
SEQUENCES = 128
MOST_CAPTURED = 2048
# Points by concurrency, of the published lanes.
CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64)
RUNNERS = {"mi355x": "cluster:mi355x-amds", "mi325x": "cluster:mi325x-amd", "mi300x": "cluster:mi300x-amd"}
REQUIRED_VARIABLES = (
    "MODEL", "TP", "CONC", "KV_OFFLOADING", "TOTAL_CPU_DRAM_GB", "RESULT_DIR", "DURATION", "EVAL_ONLY",
)  # fmt: skip
EXPORTS = {
    "AIPERF_SERVER_URL": '"http://localhost:$PORT"',
    "AIPERF_SERVER_METRICS_URLS": '"http://localhost:$PORT/metrics"',
    "AIPERF_REQUIRED_SERVER_METRIC_PREFIX": "vllm:",
    "WEKA_LOADER_OVERRIDE": TRACES,
    "PYTHONUNBUFFERED": "1",
    "GPU_COUNT": '"$TP"',
}
# In the order in which a script calls them.
HELPERS = (
    "check_env_vars", "resolve_trace_source", "install_agentic_deps", "wait_for_server_ready", "run_eval",
    "build_replay_cmd", "run_agentic_replay_and_write_outputs",
)  # fmt: skip
# Of a fragment: what the launcher binds, and what only a variant may say.
BOUND_BY_LAUNCHER = ("MODEL", "RESULT_DIR", "MODEL_PATH", "HF_HOME", "VLLM_CACHE_ROOT")
ONLY_IN_VARIANTS = ("CONC", "KV_OFFLOADING")
ENTRY_FIELDS = {
    "image", "model", "model-prefix", "runner", "precision", "framework", "multinode", "scenarios",
}  # fmt: skip
ROW_FIELDS = {"tp", "kv-offloading", "spec-decoding", "conc-list", "srt-recipe"}
# What the script, or the launcher, says in the recipe's place.
SCRIPTED = ("host", "port", "served-model-name", "speculative-config", "tensor-parallel-size")

POLICY = """\
A vLLM lane of InferenceX takes an image of vLLM's as shipped: no overlay, no patch, no rebuilt image. Ours
is none. The routes are: the kernels upstream, then an image bump; a framework lane of our own; private runs
of the same recipe, published elsewhere. The acceptance length is the golden one, never one of ours."""


@dataclass(frozen=True)
class Lane:
    """The recipes of one SKU, one a tensor-parallel size."""

    sku: str
    recipes: tuple[Recipe, ...]

    @property
    def name(self) -> str:
        """The script's name without its suffix, as the launcher looks for it."""
        return f"{EXPERIMENT}_{PRECISION}_{self.sku}_vllm_mtp"


def lane(recipes: Sequence[Recipe]) -> Lane:
    """The lane of some recipes.

    Raises:
        OverlayError: recipes of several SKUs, two of one size, another model, or another number of drafts.
    """
    skus = {recipe.hardware.skus[0].lower() for recipe in recipes}
    sizes = [recipe.gpus for recipe in recipes]
    if len(skus) != 1 or not skus <= set(RUNNERS) or len(set(sizes)) != len(sizes):
        raise OverlayError(
            "these recipes are no lane",
            seen=", ".join(
                f"{recipe.name} ({recipe.gpus} x {recipe.hardware.skus[0]})" for recipe in recipes
            ),
            wanted=f"one of {', '.join(RUNNERS)}, and one recipe a tensor-parallel size",
            fix="name recipes of one card",
        )
    for recipe in recipes:
        speculative = recipe.args.get("speculative-config")
        drafts = speculative.get("num_speculative_tokens") if isinstance(speculative, dict) else None
        if recipe.model != MODEL or drafts != GOLDEN_DRAFTS:
            raise OverlayError(
                f"recipe {recipe.name} is not what the lane measures",
                seen=f"{recipe.model} with {drafts} drafts",
                wanted=f"{MODEL} with {GOLDEN_DRAFTS} drafts, whose acceptance is measured there",
                fix="take another recipe",
            )
    return Lane(next(iter(skus)), tuple(sorted(recipes, key=lambda recipe: recipe.gpus)))


def capture_size(sequences: int) -> int:
    """The power of two at or above the rows of ``sequences``, at most ``MOST_CAPTURED``."""
    return int(min(MOST_CAPTURED, 1 << (sequences * ROWS_A_SEQUENCE - 1).bit_length()))


def server_args(recipe: Recipe) -> dict[str, Any]:
    """A recipe's arguments as the lane has them, without what the script or launcher says."""
    args: dict[str, Any] = {key: value for key, value in recipe.args.items() if key not in SCRIPTED}
    args["max-num-seqs"] = SEQUENCES
    args["max-cudagraph-capture-size"] = capture_size(SEQUENCES)
    args["disable-uvicorn-access-log"] = True
    return args


def speculative(recipe: Recipe, evaluation: bool) -> dict[str, Any]:
    """The speculative configuration: golden acceptance for throughput, real verification for evaluation."""
    own = recipe.args["speculative-config"]
    assert isinstance(own, dict)
    kept = {key: value for key, value in own.items() if key != "synthetic_acceptance_length"}
    if evaluation:
        return {**kept, "rejection_sample_method": "block"}
    return {**kept, "rejection_sample_method": "synthetic", "synthetic_acceptance_length": GOLDEN_LENGTH}


def _flag_lines(args: Mapping[str, Any]) -> list[str]:
    lines = []
    for key, value in args.items():
        if isinstance(value, bool):
            lines.append(f"--{key}" if value else f"--no-{key}")
        else:
            lines.append(f"--{key} {shlex.quote(text_of(value))}")
    return lines


def _case(recipe: Recipe) -> str:
    variables = "\n".join(f"    export {name}={shlex.quote(value)}" for name, value in recipe.env.items())
    flags = "\n".join(f"      {line}" for line in _flag_lines(server_args(recipe)))
    configs = {
        "THROUGHPUT_SPEC": json.dumps(speculative(recipe, evaluation=False)),
        "EVAL_SPEC": json.dumps(speculative(recipe, evaluation=True)),
    }
    specs = "\n".join(f"    {name}={shlex.quote(value)}" for name, value in configs.items())
    return f"  {recipe.gpus})\n{variables}\n{specs}\n    RECIPE_ARGS=(\n{flags}\n    )\n    ;;"


SCRIPT = """\
#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Made by rocm-overlay inferencex {names}; change the recipes, not this file.
{policy}
set -eo pipefail
source "$(dirname "${{BASH_SOURCE[0]}}")/../../benchmark_lib.sh"

check_env_vars {required}
if [[ "$KV_OFFLOADING" != none ]]; then
  echo "KV_OFFLOADING is $KV_OFFLOADING; this lane measures none" >&2
  exit 2
fi
if [[ -n "$ROCR_VISIBLE_DEVICES" ]]; then
  export HIP_VISIBLE_DEVICES="$ROCR_VISIBLE_DEVICES"
fi
if [[ -z "$PORT" ]]; then
  export PORT={port}
fi

case "$TP" in
{cases}
  *)
    echo "TP is $TP; this lane has {sizes}" >&2
    exit 2
    ;;
esac
{exports}

SPEC="$THROUGHPUT_SPEC"
if [[ "$EVAL_ONLY" == true ]]; then
  SPEC="$EVAL_SPEC"
fi
if [[ -n "$MODEL_PATH" ]]; then
  WEIGHTS="$MODEL_PATH"
else
  WEIGHTS="$MODEL"
  hf download "$MODEL"
fi

resolve_trace_source
install_agentic_deps

SERVER_LOG="$RESULT_DIR/server.log"
SERVER=(
  vllm serve "$WEIGHTS"
  --host 0.0.0.0 --port "$PORT" --served-model-name "$MODEL" --tensor-parallel-size "$TP"
  --speculative-config "$SPEC"
  "${{RECIPE_ARGS[@]}}"
)
printf '%q ' "${{SERVER[@]}}" > "$RESULT_DIR/vllm_command.txt"
# A session of its own, so that the trap ends the engine and its workers with it.
setsid "${{SERVER[@]}}" > "$SERVER_LOG" 2>&1 &
SERVER_PID=$!
stop_server() {{
  local status=$?
  trap - EXIT INT TERM
  kill -TERM -- "-$SERVER_PID" 2>/dev/null || true
  for _ in $(seq 60); do
    kill -0 -- "-$SERVER_PID" 2>/dev/null || break
    sleep 1
  done
  kill -KILL -- "-$SERVER_PID" 2>/dev/null || true
  exit "$status"
}}
trap stop_server EXIT INT TERM

wait_for_server_ready --port "$PORT" --server-log "$SERVER_LOG" --server-pid "$SERVER_PID"
if [[ "$EVAL_ONLY" == true ]]; then
  run_eval --port "$PORT"
else
  build_replay_cmd "$RESULT_DIR"
  run_agentic_replay_and_write_outputs "$RESULT_DIR"
fi
"""


def script(own: Lane) -> str:
    """The benchmark script of a lane, for ``benchmarks/single_node/agentic/NAME.sh``."""
    return SCRIPT.format(
        names=" ".join(recipe.name for recipe in own.recipes),
        policy="\n".join(f"# {line}" for line in POLICY.splitlines()),
        required=" ".join(REQUIRED_VARIABLES),
        port=DEFAULT_PORT,
        cases="\n".join(_case(recipe) for recipe in own.recipes),
        sizes=" and ".join(str(recipe.gpus) for recipe in own.recipes),
        exports="\n".join(f"export {name}={value}" for name, value in EXPORTS.items()),
    )


def fragment(own: Lane) -> dict[str, Any]:
    """The srt-slurm recipe of a lane: a base, and a variant for each size and concurrency."""
    first, *others = own.recipes
    variants: dict[str, Any] = {}
    for recipe in own.recipes:
        for concurrency in CONCURRENCIES:
            name = f"override_tp{recipe.gpus}_c{concurrency}"
            variants[name] = {"env": {"CONC": str(concurrency), "KV_OFFLOADING": "none"}}
            if recipe in others:
                variants[name]["roles"] = {"agg": _role(recipe)}
    return {
        "base": {
            "engine": "vllm",
            "frontend": "vllm",
            "env": dict(first.env),
            "roles": {"agg": _role(first)},
            "benchmark": {"type": "custom", "command": "bash /infmax-workspace/benchmarks/agentic_client.sh"},
        },
        **variants,
    }


def _role(recipe: Recipe) -> dict[str, Any]:
    args = {
        key: value if isinstance(value, bool) else text_of(value)
        for key, value in server_args(recipe).items()
    }
    # The connector rewrites acceptance for each run, and restores verification for evaluations.
    args["speculative-config"] = json.dumps(speculative(recipe, evaluation=True))
    args["tensor-parallel-size"] = str(recipe.gpus)
    return {"nodes": 1, "workers": 1, "gpus": recipe.gpus, "args": args}


def entry(own: Lane, image: str, framework: str) -> dict[str, Any]:
    """The lane's entry of the master configuration.

    Args:
        image: ``repository:tag``, with or without a digest.
        framework: ``vllm`` for an image as shipped by vLLM, or a lane's own name.

    Raises:
        OverlayError: an image of ours in a vLLM lane.
    """
    if framework == "vllm" and not image.startswith("vllm/vllm-openai"):
        raise OverlayError(
            "a vLLM lane takes an image as vLLM ships it",
            seen=image,
            wanted="vllm/vllm-openai-rocm:TAG",
            fix="give --framework a name of our own, or an upstream image",
        )
    place = f"benchmarks/single_node/srt-slurm-recipes/{MODEL_PREFIX}/{framework}"
    rows = [
        {
            "tp": recipe.gpus,
            "kv-offloading": "none",
            "spec-decoding": "mtp",
            "conc-list": list(CONCURRENCIES),
            "srt-recipe": f"{place}/{own.sku}-{PRECISION}-mtp/agentic.yaml",
        }
        for recipe in own.recipes
    ]
    return {
        f"{MODEL_PREFIX}-{PRECISION}-{own.sku}-{framework}-agentic-dspark": {
            "image": image,
            "model": MODEL,
            "model-prefix": MODEL_PREFIX,
            "runner": RUNNERS[own.sku],
            "precision": PRECISION,
            "framework": framework,
            "multinode": False,
            "scenarios": {"agentic-coding": {"search-space": rows}},
        }
    }


def dump(value: Mapping[str, Any]) -> str:
    """As YAML, in the order given."""
    text: str = yaml.safe_dump(dict(value), sort_keys=False, width=1000)
    return text


def script_problems(text: str) -> list[str]:
    """All in which a script breaks the contract, a line each."""
    found = [
        f"{name} is never called" for name in HELPERS if not re.search(rf"^\s*{name}\b", text, re.MULTILINE)
    ]
    if not found:
        places = [text.index(f"\n{name}" if name != "run_eval" else name) for name in HELPERS[:4]]
        found += [] if places == sorted(places) else ["helpers are called in another order"]
    checked = re.search(r"^check_env_vars (.*)$", text, re.MULTILINE)
    missing = set(REQUIRED_VARIABLES) - set(checked[1].split() if checked else ())
    found += [f"{name} is not checked" for name in sorted(missing)]
    found += ["a caller's variable has a default" for _ in re.findall(r"\$\{\w+:?[-=]", text)]
    found += [] if re.search(r"^set -eo pipefail$", text, re.MULTILINE) else ["set -eo pipefail is missing"]
    found += ["set -u is not allowed there"] if re.search(r"^set -\w*u", text, re.MULTILINE) else []
    found += [f"{name} is not exported" for name in EXPORTS if f"export {name}=" not in text]
    found += [f"{name} is not written" for name in ("server.log", "vllm_command.txt") if name not in text]
    found += ["the server's process tree is not stopped"] if "trap stop_server EXIT" not in text else []
    found += ["a folder is made"] if re.search(r"\bmkdir\b", text) else []
    return found


def fragment_problems(value: Mapping[str, Any]) -> list[str]:
    """All in which an srt-slurm recipe breaks the contract, a line each."""
    found: list[str] = []
    base, points = value.get("base", {}), []
    found += ["model is set"] if "model" in base else []
    for name in ONLY_IN_VARIANTS:
        found += [f"{name} is set in base"] if name in base.get("env", {}) else []
    for name, variant in value.items():
        if name == "base":
            continue
        role = variant.get("roles", base.get("roles", {})).get("agg", {})
        own = variant.get("env", {})
        bound = [key for key in BOUND_BY_LAUNCHER if key in {**base.get("env", {}), **own}]
        found += [f"{name}: the launcher binds {key}" for key in bound]
        found += [f"{name}: no {key}" for key in ONLY_IN_VARIANTS if key not in own]
        found += _role_problems(name, role)
        points.append((role.get("gpus"), own.get("CONC"), own.get("KV_OFFLOADING")))
    twice = {point for point in points if points.count(point) > 1}
    return found + [f"several variants match {point}" for point in sorted(map(str, twice))]


def _role_problems(name: str, role: Mapping[str, Any]) -> list[str]:
    args: Mapping[str, Any] = role.get("args", {})
    found = [f"{name}: {key} has dashes" for key in args if key.startswith("-")]
    found += [f"{name}: {key} is no single text" for key, v in args.items() if not isinstance(v, str | bool)]
    if str(args.get("tensor-parallel-size")) != str(role.get("gpus")):
        found.append(f"{name}: gpus {role.get('gpus')} is not the tensor-parallel size")
    try:
        config = json.loads(args.get("speculative-config", ""))
        method = config["method"]
    except (ValueError, KeyError, TypeError):
        return [*found, f"{name}: speculative-config is no JSON object with a method"]
    if method not in ("eagle", "eagle3", "nextn", "mtp", "dspark"):
        found.append(f"{name}: method {method}")
    if "synthetic_acceptance_length" in config:
        found.append(f"{name}: acceptance is hard-coded")
    return found


def entry_problems(value: Mapping[str, Any]) -> list[str]:
    """All in which a master entry breaks the contract, a line each."""
    found = []
    for name, own in value.items():
        found += [f"{name}: no {key}" for key in sorted(ENTRY_FIELDS - set(own))]
        found += [f"{name}: unknown field {key}" for key in sorted(set(own) - ENTRY_FIELDS)]
        rows = own.get("scenarios", {}).get("agentic-coding", {}).get("search-space", [])
        found += [f"{name}: no point"] if not rows else []
        for row in rows:
            found += [f"{name}: unknown field {key}" for key in sorted(set(row) - ROW_FIELDS)]
            found += [f"{name}: no {key}" for key in sorted(ROW_FIELDS - set(row))]
        if not re.fullmatch(r"[\w./-]+:[\w.-]+(@sha256:[0-9a-f]{64})?", str(own.get("image"))):
            found.append(f"{name}: image {own.get('image')} is no repository:tag")
    return found
