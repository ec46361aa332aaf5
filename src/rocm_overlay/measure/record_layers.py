# SPDX-License-Identifier: Apache-2.0
"""A program that runs a model in vLLM's engine and records its layers: one arm of the layer test.

It is a process of its own because an engine gives its GPUs back by ending. Every request's answer is one
forced token, so that both arms decode the same ones whatever their logits say. The scheduler runs in this
process, where all requests are there before its first step: the steps are then the same in both arms.
"""

from __future__ import annotations

import argparse
import importlib
import os
import random
import sys
from collections.abc import Sequence
from pathlib import Path

# One sequence shorter than the window of 128 keys, one about it, two beyond it.
PROMPTS = (7, 71, 199, 391)
STEPS = 24
MAX_MODEL_LEN = 512
# Tokens of every vocabulary that is served here, none of them a special one.
TOKENS = range(16, 400)
EXTENSION = "rocm_overlay.measure.layer_worker.RecordingWorker"
LOAD_FORMAT = "layer_test_dummy"


def record(words: Sequence[str], file: Path) -> list[str]:
    """Run a model and record it; the recording's problems.

    Args:
        words: model and flags, as ``vllm serve`` takes them.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams
    from vllm.engine.arg_utils import EngineArgs
    from vllm.entrypoints.common.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    importlib.import_module(EXTENSION.rpartition(".")[0])  # registers the load format here too
    own = [
        "--load-format",
        LOAD_FORMAT,
        "--enforce-eager",
        "--max-model-len",
        str(MAX_MODEL_LEN),
        "--no-enable-prefix-caching",
    ]
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(
        [*words, *own, "--worker-extension-cls", EXTENSION]
    )
    arguments.model = arguments.model_tag or arguments.model
    llm = LLM.from_engine_args(EngineArgs.from_cli_args(arguments))
    prompts = [{"prompt_token_ids": random.Random(length).choices(TOKENS, k=length)} for length in PROMPTS]
    forced = [
        SamplingParams(
            temperature=0.0,
            max_tokens=STEPS + 1,
            min_tokens=STEPS + 1,
            ignore_eos=True,
            allowed_token_ids=[TOKENS[length % len(TOKENS)]],
            detokenize=False,
        )
        for length in PROMPTS
    ]
    llm.collective_rpc("begin_layer_recording", args=(list(PROMPTS), STEPS))
    llm.generate(prompts, forced, use_tqdm=False)
    found: list[list[str]] = llm.collective_rpc("end_layer_recording", args=(str(file),))
    return [line for own in found for line in own]


def main() -> int:
    """Record one arm; 1 where the recording has problems."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("words", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    words = arguments.words[1:] if arguments.words[:1] == ["--"] else arguments.words
    problems = record(words, arguments.out.absolute())
    print("".join(f"problem: {line}\n" for line in problems), file=sys.stderr, end="")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
