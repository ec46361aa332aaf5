# SPDX-License-Identifier: Apache-2.0
"""``ci``: the pipeline's steps, and those that need no GPU run here."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rocm_overlay import table
from rocm_overlay.errors import EXIT_FAILED_CHECK, EXIT_OK, OverlayError
from rocm_overlay.measure.server import end_group
from rocm_overlay.processes import GroupGuard, interruptible
from rocm_overlay.project import Project
from rocm_overlay.recipe import parse_yaml
from rocm_overlay.textio import read_text

FOLDER = Path("ci/buildkite")
CPU_DEVICES = "cpu-"
END_S = 20


@dataclass(frozen=True)
class Step:
    """One step of a pipeline file."""

    file: str
    key: str
    label: str
    device: str
    commands: tuple[str, ...]
    timeout_s: float

    @property
    def runs_here(self) -> bool:
        """Whether a machine without a GPU can run it."""
        return self.device.startswith(CPU_DEVICES)


def read_steps(root: Path) -> list[Step]:
    """Every step of the pipeline's files.

    Raises:
        OverlayError: a step without one of its fields.
    """
    found = []
    for file in sorted((root / FOLDER).glob("*.yaml")):
        for step in parse_yaml(read_text(file, file.name), file.name)["steps"]:
            try:
                words = {name: str(step[name]) for name in ("key", "label", "device")}
                minutes = float(step["timeout_in_minutes"])
                found.append(
                    Step(file.name, **words, commands=tuple(step["commands"]), timeout_s=60 * minutes)
                )
            except (KeyError, TypeError, ValueError) as error:
                raise OverlayError(
                    f"{file.name} has a step that is none",
                    seen=f"{type(error).__name__}: {error} in {str(step)[:80]}",
                    wanted="key, label, device, commands and timeout_in_minutes",
                    fix=f"correct {file}",
                ) from None
    return found


def choose(steps: Sequence[Step], keys: Sequence[str]) -> list[Step]:
    """The steps to run: those named, or every one that needs no GPU.

    Raises:
        OverlayError: a name that no step has, or one of a step that needs a GPU.
    """
    known = {step.key: step for step in steps}
    for key in keys:
        if key not in known or not known[key].runs_here:
            raise OverlayError(
                f"step {key} cannot run here",
                seen=f"needs {known[key].device}" if key in known else "no such step",
                wanted=f"one of {', '.join(step.key for step in steps if step.runs_here)}",
                fix="correct the step's name",
            )
    return [known[key] for key in keys] if keys else [step for step in steps if step.runs_here]


def run_step(step: Step, root: Path) -> tuple[bool, float]:
    """Run a step's commands until one fails or its time is over; whether none did, and its seconds.

    Nothing that a command started outlives it: neither its time's end nor this process's.
    """
    folder = str(Path(sys.executable).parent)
    env: dict[str, str] = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ.get('PATH', '')}"}
    started = time.monotonic()
    for command in step.commands:
        print(f"--- {step.key}: {command}", flush=True)
        left = step.timeout_s - (time.monotonic() - started)
        process = subprocess.Popen(["bash", "-c", command], cwd=root, env=env, start_new_session=True)
        guard = GroupGuard(process.pid, END_S)
        try:
            status: int | None = process.wait(max(0.0, left))
        except subprocess.TimeoutExpired:
            print(f"{step.key}: longer than {step.timeout_s:g} s", file=sys.stderr)
            status = None
        finally:
            end_group(process, END_S)
            guard.stop()
        if status != 0:
            return False, time.monotonic() - started
    return True, time.monotonic() - started


def run(arguments: argparse.Namespace) -> int:
    """List the steps, or run those that can be run here; every one is run, whatever another one did."""
    root = Project.find().root
    steps = read_steps(root)
    if not arguments.execute:
        rows = [(step.key, step.device, "here" if step.runs_here else "on an agent") for step in steps]
        print(table.render(("step", "device", "runs"), rows))
        return EXIT_OK
    with interruptible():
        results = [(step, *run_step(step, root)) for step in choose(steps, arguments.step)]
    rows = [
        (step.key, "passed" if passed else "FAILED", f"{seconds:.0f}") for step, passed, seconds in results
    ]
    print(table.render(("step", "result", "s"), rows))
    return EXIT_OK if all(passed for _, passed, _ in results) else EXIT_FAILED_CHECK


def register(subparsers: Any) -> None:
    """Add the verb."""
    parser = subparsers.add_parser("ci", help="the pipeline's steps; --run runs those that need no GPU")
    parser.add_argument("--run", dest="execute", action="store_true")
    parser.add_argument("--step", action="append", default=[], help="only this one; repeatable")
    parser.set_defaults(run=run)
