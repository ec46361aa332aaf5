# SPDX-License-Identifier: Apache-2.0
"""A distribution small enough to read: a four-file base, one overlay file, one removal, one patch."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from rocm_overlay.plan import Sources
from rocm_overlay.project import Project

BASE = {
    "vllm/__init__.py": "",
    "vllm/_version.py": "__version__ = version = '1.2.3'\n",
    "vllm/amd/ops/__init__.py": "def enabled():\n    return False\n",
    "vllm/amd/rocm.py": (
        "import os\n\n\ndef build(cam):\n    # one\n    # two\n    base = os.sep\n    return base\n"
    ),
    "vllm/amd/old.py": "unused = True\n",
    "vllm/other.py": "untouched = True\n",
}
OVERLAY = {
    "vllm/amd/ops/__init__.py": "def enabled():\n    return True\n\n\ndef gate():\n    return True\n",
    "vllm/amd/ours/kernel.py": "def launch():\n    return 1\n",
}
MANIFEST = """\
[[file]]
path = "vllm/amd/ops/__init__.py"
kind = "replaces"
why = "the gate"
upstream = "planned"
symbols = ["enabled", "gate"]

[[file]]
path = "vllm/amd/ours/kernel.py"
kind = "new"
why = "the kernel"
upstream = "planned"
symbols = ["launch"]

[[remove]]
path = "vllm/amd/old.py"
why = "nothing uses it"
"""
HEADER = """\
Subject: Ask the gate before building
Why: the call site is upstream's; no registry stands before it
Kind: rocm-only
Upstream: planned
Drop-when: base vllm/amd/rocm.py calls gate in build
Test: tests/unit/test_plan.py
Probe: vllm/amd/rocm.py calls gate in build
"""
DIFF = """\
--- a/vllm/amd/rocm.py
+++ b/vllm/amd/rocm.py
@@ -4,5 +4,7 @@
 def build(cam):
     # one
     # two
+    if gate():
+        return None
     base = os.sep
     return base
"""
PIN = """\
[vllm]
version = "1.2.3"
commit = "abc"
sdist = "vllm-1.2.3.tar.gz"
sha256 = "{sha}"

[image.gfx950]
reference = "vllm/vllm-openai-rocm:v1.2.3"
digest = ""

[image.gfx942]
reference = "vllm/vllm-openai-rocm:v1.2.3"
digest = ""

[mirror.gfx950]
location = ""
date = ""

[mirror.gfx942]
location = ""
date = ""

[packages]
torch = "2.13.0"

[compile]
flydsl = ["0.4.2"]

[files]
"""
ACTIONS = {"vllm/amd/ops/__init__.py": "replace", "vllm/amd/old.py": "remove", "vllm/amd/rocm.py": "patch"}


def write_files(root: Path, files: Mapping[str, str]) -> Path:
    """Write text files below a folder and return it."""
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text, encoding="utf-8")
    return root


def make_base(root: Path, changes: Mapping[str, str | None] | None = None) -> Path:
    """The base below ``root``, with some files changed, or left out where the change is None."""
    files = {**BASE, **(changes or {})}
    return write_files(root, {path: text for path, text in files.items() if text is not None})


def make_project(root: Path, patch: str = HEADER + DIFF, pin_sha: str = "0" * 64) -> Project:
    """The project below ``root``: pin with its lock, overlay and series."""
    lines = [
        f'"{path}" = {{ action = "{action}", sha256 = "{hashlib.sha256(BASE[path].encode()).hexdigest()}" }}'
        for path, action in sorted(ACTIONS.items())
    ]
    name = "0001-amd-gate.patch"
    write_files(root, {"base.toml": PIN.format(sha=pin_sha) + "\n".join(lines) + "\n"})
    write_files(root / "overlay", {**OVERLAY, "manifest.toml": MANIFEST})
    write_files(root / "patches", {"series": f"# the order\n{name}\n", name: patch})
    return Project(root)


def make_sources(root: Path, **kwargs: str) -> Sources:
    """The loaded sources of make_project."""
    return Sources.load(make_project(root, **kwargs))


def snapshot(root: Path) -> dict[str, tuple[str, int, int]]:
    """Every file below ``root``: content hash, mode and modification time, so that a change shows."""
    return {
        path.relative_to(root).as_posix(): (
            hashlib.sha256(path.read_bytes()).hexdigest(),
            path.stat().st_mode,
            path.stat().st_mtime_ns,
        )
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }
