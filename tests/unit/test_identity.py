# SPDX-License-Identifier: Apache-2.0
"""The identity line: what it says, that it comes once a server, and that vLLM itself prints it."""

from __future__ import annotations

import ast
import json
import logging
import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from rocm_overlay import identity, install

ROOT = Path(__file__).resolve().parents[2]
BASE = ROOT / "build/base"
MANIFEST = {
    "version": "0.1.0",
    "overlay_hash": "abcdef0123456789",
    "series_hash": "fedcba9876543210",
    "base": {"vllm_version": "0.33.0", "reference": "vendor/image:tag", "digest": "sha256:123"},
    "files": [{"path": "vllm/a.py", "action": "added", "sha256": "0" * 64}],
    "drift_allowed": [],
}


@pytest.fixture
def site(tmp_path):
    """An installed vllm package with the overlay's manifest."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").touch()
    (tmp_path / "vllm/_version.py").write_text("__version__ = version = '0.33.0'\n")
    write_manifest(tmp_path, MANIFEST)
    return tmp_path


@pytest.fixture
def server(site, monkeypatch):
    """A process that is a server on that package, whose children would inherit nothing of ours."""
    monkeypatch.setattr(install, "find_site", lambda: site)
    monkeypatch.setattr(sys, "argv", ["/usr/local/bin/vllm", "serve", "model"])
    monkeypatch.setenv(identity.ANNOUNCED_VARIABLE, "")
    monkeypatch.delenv("VLLM_LOGGING_LEVEL", raising=False)
    monkeypatch.delenv("VLLM_LOGGING_STREAM", raising=False)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", False)
    return site


def announce():
    """Announce as in vLLM's front process when plugins are loaded: its logger has no handler yet."""
    logger = logging.getLogger("vllm")
    kept = logger.handlers[:]
    logger.handlers.clear()
    try:
        identity.announce()
    finally:
        logger.handlers[:] = kept


def write_manifest(site, manifest):
    (site / install.MANIFEST_PATH).write_text(json.dumps(manifest))


def test_the_line_names_versions_base_digest_and_hashes(site):
    level, line = identity.identity_line(site)
    assert level == logging.INFO
    assert line == (
        "vllm-openai-rocm 0.1.0, vLLM 0.33.0, base vendor/image:tag digest sha256:123, "
        "overlay abcdef012345, series fedcba987654"
    )


def test_what_is_not_recorded_is_said_not_left_out(site):
    base = {"vllm_version": "0.33.0", "reference": "", "digest": ""}
    write_manifest(site, {**MANIFEST, "base": base, "drift_allowed": [{"path": "vllm/a.py"}]})
    _, line = identity.identity_line(site)
    assert "base not recorded digest not recorded" in line
    assert "DRIFT ALLOWED in 1 files" in line


def test_a_package_without_the_manifest_is_warned_of_as_not_laid(site):
    (site / install.MANIFEST_PATH).unlink()
    level, line = identity.identity_line(site)
    assert level == logging.WARNING and "NOT LAID on the vLLM 0.33.0" in line


def test_a_server_says_it_once_and_its_children_do_not(server, capsys):
    announce()
    assert capsys.readouterr().out.count("vllm-openai-rocm 0.1.0") == 1
    assert os.environ[identity.ANNOUNCED_VARIABLE] == str(os.getpid())
    announce()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("arguments", "speaks"),
    [
        (["vllm", "serve", "model"], True),
        (["vllm", "run-batch"], True),
        (["vllm", "bench", "serve"], False),
        (["vllm", "--help"], False),
        (["vllm/entrypoints/cli/main.py", "collect-env"], False),
        (["vllm/entrypoints/openai/api_server.py", "--model", "m"], True),
        (["own_script.py"], True),
    ],
)
def test_only_what_serves_speaks(server, monkeypatch, capsys, arguments, speaks):
    monkeypatch.setattr(sys, "argv", arguments)
    announce()
    assert bool(capsys.readouterr().out) is speaks


def test_the_stream_and_level_that_vllm_would_log_with_are_kept_to(server, monkeypatch, capsys):
    monkeypatch.setenv("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    announce()
    captured = capsys.readouterr()
    assert captured.out == "" and "vllm-openai-rocm 0.1.0" in captured.err
    monkeypatch.setenv(identity.ANNOUNCED_VARIABLE, "")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "WARNING")
    announce()
    assert capsys.readouterr().err == ""


class Kept(logging.Handler):
    """Keeps what is logged."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def test_vllms_own_logger_is_used_once_it_is_set_up(server, monkeypatch, capsys):
    handler = Kept()
    monkeypatch.setattr(logging.getLogger(identity.LOGGER_NAME), "handlers", [handler])
    monkeypatch.setattr(logging.getLogger(identity.LOGGER_NAME), "level", logging.INFO)
    identity.announce()
    assert len(handler.lines) == 1 and "vllm-openai-rocm 0.1.0" in handler.lines[0]
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("fault", [OSError("gone"), RuntimeError("any")])
def test_a_server_never_dies_of_it(server, monkeypatch, capsys, fault):
    def fail():
        raise fault

    monkeypatch.setattr(install, "find_site", fail)
    announce()
    assert "identity not known" in capsys.readouterr().out


def test_a_damaged_manifest_is_said(server, capsys):
    (server / install.MANIFEST_PATH).write_text("{")
    announce()
    assert "identity not known" in capsys.readouterr().out


def test_the_entry_point_is_declared():
    found = {entry.name: entry.value for entry in entry_points(group="vllm.general_plugins")}
    assert found["rocm_overlay_identity"] == "rocm_overlay.identity:announce"


def test_vllm_loads_general_plugins_when_it_builds_the_parser_of_serve():
    tree = ast.parse((BASE / "vllm/engine/arg_utils.py").read_text(encoding="utf-8"))
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    methods = {
        node.name: node for node in classes["AsyncEngineArgs"].body if isinstance(node, ast.FunctionDef)
    }
    assert "load_general_plugins()" in ast.unparse(methods["add_cli_args"])


LOAD = """
import sys
sys.argv = ["vllm", "serve"]
from vllm.plugins import load_general_plugins
load_general_plugins()
"""


@pytest.mark.parametrize(("plugins", "lines"), [(None, 1), ("another", 0)])
def test_the_pinned_vllm_prints_the_line_unless_its_list_of_plugins_leaves_us_out(plugins, lines):
    environment = {
        k: v for k, v in os.environ.items() if k not in (identity.ANNOUNCED_VARIABLE, "VLLM_PLUGINS")
    }
    environment["PYTHONPATH"] = os.pathsep.join([str(BASE), str(ROOT / "src")])
    if plugins is not None:
        environment["VLLM_PLUGINS"] = plugins
    done = subprocess.run(
        [sys.executable, "-c", LOAD], env=environment, capture_output=True, text=True, check=True, timeout=300
    )
    assert done.stdout.count("vllm-openai-rocm: NOT LAID on the vLLM") == lines
