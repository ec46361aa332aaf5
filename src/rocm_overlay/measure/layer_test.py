# SPDX-License-Identifier: Apache-2.0
"""``layer-test``: five layers of a recipe's model, every output at every decode token, kernels off and on.

Of the five, layer 0 has the sliding window alone, 1 and 3 are sources of compressed keys and their index,
and 2 and 4 read them, at ratio 2 and 1. Weights are random ones, which every process draws alike.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rocm_overlay.errors import EXIT_FAILED_CHECK, EXIT_OK, OverlayError
from rocm_overlay.measure import options
from rocm_overlay.measure.layer_recorder import read_recording
from rocm_overlay.measure.layers import check_paths, compare_layers
from rocm_overlay.processes import interruptible, run_bound
from rocm_overlay.project import Project
from rocm_overlay.recipe import Recipe, load
from rocm_overlay.render import build_command
from rocm_overlay.textio import log_end

PROGRAM = "rocm_overlay.measure.record_layers"
DEFAULT_OUT = Path("build/layers")
DEFAULT_LIMIT_S = 1800.0
FIVE_LAYERS = {
    "num_hidden_layers": 5,
    "compress_ratios": [0, 2, 2, 1, 1],
    "kv_source_layer_ids": [1, 3],
    "index_source_layer_ids": [1, 3],
    "candidate_source_layer_id": -1,
    "engram_layer_ids": [],
}
# Of drafts, graphs and Engram tables, which five eager layers do not have.
LEFT_OUT = frozenset(
    {
        "speculative-config",
        "compilation-config",
        "max-cudagraph-capture-size",
        "engram-config",
        "max-model-len",
    }
)
ARMS = {"off": "--no-monokernel", "on": "--monokernel"}


def arm_words(recipe: Recipe, arm: str, model: str | None = None) -> tuple[list[str], Mapping[str, str]]:
    """What the recorder runs in an arm: the words of a served five-layer model, and its environment."""
    kept = {key: value for key, value in recipe.args.items() if key not in LEFT_OUT}
    given = [model] if model else []
    given += ["--hf-overrides", json.dumps(FIVE_LAYERS), ARMS[arm]]
    command = build_command(replace(recipe, args=kept), given)
    return command.argv()[2:], command.env


def record_arm(words: list[str], env: Mapping[str, str], file: Path, limit_s: float) -> None:
    """Run the recorder in a process of its own; its log stays beside ``file``.

    Raises:
        OverlayError: it fails, takes too long or finds a problem; nothing it wrote is taken for a recording.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)
    log = file.with_suffix(".log")
    command = [sys.executable, "-m", PROGRAM, "--out", str(file), "--", *words]
    with log.open("wb") as output:
        try:
            status: Any = run_bound(
                command, env={**os.environ, **env}, stdout=output, stderr=output, timeout=limit_s, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            status = f"none in {limit_s:g} s"
    if status != 0:
        file.unlink(missing_ok=True)
        raise OverlayError(
            f"the layers could not be recorded into {file}",
            seen=f"exit status {status}; {log_end(log, lines=12)}",
            wanted="every decode token of every request",
            fix=f"read {log}",
        )


def run(arguments: argparse.Namespace) -> int:
    """Record both arms and compare them; 1 where an output is off."""
    recipe = load(arguments.recipes or Project.find().recipes, arguments.recipe)
    if recipe.args.get("monokernel") is not True:
        raise OverlayError(
            f"recipe {recipe.name} has no kernels to test",
            seen=f"monokernel: {recipe.args.get('monokernel')}",
            wanted="a recipe with monokernel: true",
            fix="name another recipe",
        )
    files = {arm: arguments.out / f"{arm}.pt" for arm in ARMS}
    with interruptible():
        for arm, file in files.items():
            print(f"kernels {arm}: recording into {file}", file=sys.stderr, flush=True)
            record_arm(*arm_words(recipe, arm, arguments.model), file, arguments.limit_s)
    off, on = (read_recording(file) for file in files.values())
    check_paths(off, on)
    report = compare_layers(off, on)
    print(f"{report.compared} outputs compared, {report.left_out} left out behind near-ties")
    for one in report.mismatches:
        print(f"MISMATCH: {one}")
    return EXIT_FAILED_CHECK if report.mismatches else EXIT_OK


def register(subparsers: Any) -> None:
    """Add the ``layer-test`` verb."""
    parser = subparsers.add_parser(
        "layer-test", help="five layers on this machine's GPUs: outputs with the kernels on and off"
    )
    parser.add_argument("recipe")
    parser.add_argument("--recipes", type=Path, help="a folder of recipes in place of the project's")
    parser.add_argument("--model", help="a folder or name that holds the model's configuration and tokenizer")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="for the recordings and logs")
    parser.add_argument(
        "--limit-s", type=options.seconds, default=DEFAULT_LIMIT_S, help="seconds for one arm"
    )
    parser.set_defaults(run=run)
