# SPDX-License-Identifier: Apache-2.0
"""The long evaluations through lm-eval, with the published settings as data.

lm-eval is no dependency of the tool: it is called where it is installed, and what it asks for, data sets from
the network among it, is its own.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

from rocm_overlay.errors import OverlayError
from rocm_overlay.measure.accuracy import Answer, read_samples
from rocm_overlay.processes import run_bound
from rocm_overlay.recipe import parse_yaml

PROFILES_NAME = "lm_eval.yaml"
PROGRAM = "lm-eval"
VERSION = "0.4.13"
STDERR_FD = 2
# The first sample's: lm-eval's own default.
FIRST_SEED = 1234


@dataclass(frozen=True)
class LmEvalProfile:
    """One task's settings; ``filter`` is the one whose score counts, ``questions`` how many the task has.

    Its command line samples a question once, so that each of ``samples`` is a call of its own.
    """

    name: str
    task: str
    filter: str
    model: str
    path: str
    model_args: Mapping[str, str]
    flags: Sequence[str]
    questions: int
    context: int
    samples: int = 1

    def command(
        self, model: str, url: str, out: Path, limit: int | None = None, sample: int = 1
    ) -> list[str]:
        """The words that run it for one sample, against a server that calls its model ``model``."""
        arguments = {"model": model, "base_url": url.rstrip("/") + self.path, **self.model_args}
        if self.samples > 1:
            # lm-eval sends this seed with each request: with one seed every sample would be the same.
            arguments["seed"] = str(FIRST_SEED + sample - 1)
        words = [PROGRAM, "--model", self.model]
        words += ["--model_args", ",".join(f"{key}={value}" for key, value in arguments.items())]
        words += ["--tasks", self.task, *self.flags, "--output_path", str(out), "--log_samples"]
        return words if limit is None else [*words, "--limit", str(limit)]


def profiles() -> dict[str, LmEvalProfile]:
    """Every profile by name."""
    text = resources.files("rocm_overlay.measure").joinpath(PROFILES_NAME).read_text(encoding="utf-8")
    return {name: LmEvalProfile(name, **fields) for name, fields in parse_yaml(text, PROFILES_NAME).items()}


def require(name: str) -> LmEvalProfile:
    """The profile of that name.

    Raises:
        OverlayError: no such profile, or lm-eval is not installed.
    """
    known = profiles()
    if name not in known:
        raise OverlayError(
            f"no lm-eval profile {name}", seen=name, wanted=f"one of {', '.join(known)}", fix="correct --task"
        )
    if shutil.which(PROGRAM) is None:
        raise OverlayError(
            f"{name} needs lm-eval, which is not installed",
            seen=f"no {PROGRAM} on the path",
            wanted=f"lm-eval {VERSION}",
            fix=f"pip install 'lm-eval[api]=={VERSION}', in the environment that runs this",
        )
    return known[name]


def run_profile(
    name: str, arm: str, model: str, url: str, out: Path, limit: int | None = None, sample: int = 1
) -> list[Answer]:
    """Run a profile for one sample of each question, and read it.

    Raises:
        OverlayError: no such profile, lm-eval is not installed, it fails, or it leaves no samples.
    """
    profile = require(name)
    folder = out / "lm-eval" / arm / name / f"sample-{sample}"
    folder.mkdir(parents=True, exist_ok=True)
    command = profile.command(model, url, folder, limit, sample)
    print(" ".join(command), file=sys.stderr, flush=True)
    status = run_bound(command, stdout=STDERR_FD, check=False).returncode
    found = sorted(folder.rglob(f"samples_{profile.task}_*.jsonl"), key=lambda file: file.stat().st_mtime)
    if status != 0 or not found:
        raise OverlayError(
            f"lm-eval did not finish {name}",
            seen=f"exit status {status}, {len(found)} sample files in {folder}",
            wanted="a samples file",
            fix="read what it printed, and run the same command again",
        )
    return [replace(one, sample=sample) for one in read_samples(found[-1], arm, name, profile.filter)]
