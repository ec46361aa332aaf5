# SPDX-License-Identifier: Apache-2.0
"""The console script: one verb a job. ``rocm-overlay VERB --help`` says what each takes."""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Sequence

from rocm_overlay import __version__
from rocm_overlay.errors import EXIT_BAD_INPUT, OverlayError

# Modules with a ``register(subparsers)`` that adds their verbs; imported when the script starts, so
# each keeps its heavy imports inside its handlers.
COMMAND_MODULES = (
    "rocm_overlay.cli_base",
    "rocm_overlay.cli_rebase",
    "rocm_overlay.cli_image",
    "rocm_overlay.ci_local",
    "rocm_overlay.cli_eval",
    "rocm_overlay.cli_inferencex",
    "rocm_overlay.cli_recipe",
    "rocm_overlay.deploy",
    "rocm_overlay.bench_swa",
    "rocm_overlay.bench_host",
    "rocm_overlay.kernel_builds",
    "rocm_overlay.measure.bench",
    "rocm_overlay.measure.compare",
    "rocm_overlay.measure.layer_test",
)


def build_parser() -> argparse.ArgumentParser:
    """The parser with every verb registered."""
    parser = argparse.ArgumentParser(
        prog="rocm-overlay", description="Build, verify and serve vllm-openai-rocm."
    )
    parser.add_argument("--version", action="version", version=f"vllm-openai-rocm {__version__}")
    subparsers = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for name in COMMAND_MODULES:
        importlib.import_module(name).register(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit status: 0 done, 1 a check found a fault, 2 bad input."""
    arguments = build_parser().parse_args(argv)
    started = time.monotonic()
    try:
        status = int(arguments.run(arguments))
    except OverlayError as error:
        print(error.render(), file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        return EXIT_BAD_INPUT
    except OSError as error:
        # A file system's refusal that no verb knew better: named, and without a traceback.
        print(f"error: {arguments.verb} stopped\n  seen:   {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    elapsed = time.monotonic() - started
    if elapsed > 2:
        print(f"{arguments.verb}: {elapsed:.1f} s", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
