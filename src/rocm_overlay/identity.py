# SPDX-License-Identifier: Apache-2.0
"""The line with which a server says what it is built from.

``announce`` is a ``vllm.general_plugins`` entry point. vLLM loads those when the parser of
``vllm serve`` is built, so that a bare ``vllm serve`` prints the line before anything else runs,
and again in the engine core and in each worker process; a variable that children inherit keeps it
to one line a server. vLLM leaves the plugin out when VLLM_PLUGINS is set and does not name
``rocm_overlay_identity`` (an empty VLLM_PLUGINS names none), and the line is not shown when
VLLM_LOGGING_LEVEL is above INFO. ``rocm-overlay verify`` and the image's labels tell the same.

vLLM sets its logging up only once the command line is parsed, so that in the front process its
logger still has no handler here: the line then goes to the stream that it is going to have.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from pathlib import Path
from typing import Any

from rocm_overlay import install

ANNOUNCED_VARIABLE = "ROCM_OVERLAY_ANNOUNCED"
# Below vLLM's own logger, which alone has handlers.
LOGGER_NAME = "vllm.rocm_overlay"
# Of the vllm command's verbs, those that start an engine of their own.
SERVING_VERBS = ("serve", "launch", "run-batch")
HASH_DIGITS = 12
DATE_FORMAT = "%m-%d %H:%M:%S"


def announce() -> None:
    """Log the overlay's identity once a server. Never raises: a server must not die of it."""
    try:
        if os.environ.get(ANNOUNCED_VARIABLE) or not _is_server(sys.argv):
            return
        os.environ[ANNOUNCED_VARIABLE] = str(os.getpid())
        _log(*identity_line(install.find_site()))
    except Exception as error:
        with contextlib.suppress(Exception):
            _log(logging.WARNING, f"vllm-openai-rocm: identity not known: {error!r}")


def _log(level: int, line: str) -> None:
    logger = logging.getLogger(LOGGER_NAME)
    if logger.hasHandlers():
        logger.log(level, "%s", line)
        return
    threshold = logging.getLevelName(os.environ.get("VLLM_LOGGING_LEVEL", "INFO").upper())
    if isinstance(threshold, int) and level < threshold:
        return
    to_stderr = os.environ.get("VLLM_LOGGING_STREAM") == "ext://sys.stderr"
    handler = logging.StreamHandler(sys.stderr if to_stderr else sys.stdout)
    handler.setFormatter(
        logging.Formatter("%(levelname)s %(asctime)s [rocm_overlay] %(message)s", DATE_FORMAT)
    )
    handler.handle(logger.makeRecord(LOGGER_NAME, level, __file__, 0, line, (), None))


def identity_line(site: Path) -> tuple[int, str]:
    """Level and text of the line, from the install manifest of the package in ``site``."""
    manifest = install.read_manifest(site)
    if manifest is None:
        version = install.installed_version(site)
        return logging.WARNING, f"vllm-openai-rocm: NOT LAID on the vLLM {version} in {site}"
    base: dict[str, Any] = manifest["base"]
    parts = [
        f"vllm-openai-rocm {manifest['version']}",
        f"vLLM {base['vllm_version']}",
        f"base {base['reference'] or 'not recorded'} digest {base['digest'] or 'not recorded'}",
        f"overlay {manifest['overlay_hash'][:HASH_DIGITS]}",
        f"series {manifest['series_hash'][:HASH_DIGITS]}",
    ]
    if manifest["drift_allowed"]:
        parts.append(f"DRIFT ALLOWED in {len(manifest['drift_allowed'])} files")
    return logging.INFO, ", ".join(parts)


def _is_server(arguments: list[str]) -> bool:
    """Whether this process is to serve.

    The vllm command builds the parser of every verb for any of them, and some (``bench``,
    ``collect-env``) write results to stdout, where vLLM's log goes too.
    """
    if Path(arguments[0]).name not in ("vllm", "main.py"):
        return True
    return any(word in SERVING_VERBS for word in arguments[1:2])
