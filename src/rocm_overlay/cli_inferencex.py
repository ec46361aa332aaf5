# SPDX-License-Identifier: Apache-2.0
"""The ``inferencex`` verb."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from rocm_overlay import inferencex
from rocm_overlay.errors import EXIT_OK, OverlayError
from rocm_overlay.project import Project
from rocm_overlay.recipe import load

FORMS = ("script", "srt-slurm", "entry")
IMAGE = "vllm-openai-rocm:0.1.0"


def run(arguments: argparse.Namespace) -> int:
    """Print one form of the lane, checked; the policy goes to stderr."""
    folder = Project.find().recipes
    own = inferencex.lane([load(folder, name) for name in arguments.recipes])
    print(inferencex.POLICY, file=sys.stderr)
    if arguments.form == "script":
        text = inferencex.script(own)
        problems = inferencex.script_problems(text)
    elif arguments.form == "srt-slurm":
        fragment = inferencex.fragment(own)
        text, problems = inferencex.dump(fragment), inferencex.fragment_problems(fragment)
    else:
        entry = inferencex.entry(own, arguments.image, arguments.framework)
        text, problems = inferencex.dump(entry), inferencex.entry_problems(entry)
    if problems:
        raise OverlayError(
            f"the {arguments.form} would break InferenceX's contract",
            seen="; ".join(problems),
            wanted="docs/inferencex.md",
            fix="correct the options and recipes that it is made of",
        )
    print(text, end="")
    return EXIT_OK


def register(subparsers: Any) -> None:
    """Add the verb."""
    parser = subparsers.add_parser("inferencex", help="recipes as a lane of InferenceX's AgentX benchmark")
    parser.add_argument("recipes", nargs="+", help="of one card, one a tensor-parallel size")
    parser.add_argument("--as", dest="form", choices=FORMS, default="script")
    parser.add_argument("--image", default=IMAGE, help="of the entry")
    parser.add_argument("--framework", default="vllm-openai-rocm", help="of the entry: the lane's name")
    parser.set_defaults(run=run)
