# SPDX-License-Identifier: Apache-2.0
"""Where the project's own files are, in a checkout and in the image."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from rocm_overlay.errors import OverlayError

HOME_VARIABLE = "ROCM_OVERLAY_HOME"
IMAGE_HOME = Path("/opt/vllm-openai-rocm")
PIN_NAME = "base.toml"


@dataclass(frozen=True)
class Project:
    """The folder that holds base.toml, overlay/, patches/ and recipes/."""

    root: Path

    @property
    def pin_file(self) -> Path:
        return self.root / PIN_NAME

    @property
    def overlay(self) -> Path:
        return self.root / "overlay"

    @property
    def patches(self) -> Path:
        return self.root / "patches"

    @property
    def recipes(self) -> Path:
        return self.root / "recipes"

    @property
    def build(self) -> Path:
        return self.root / "build"

    @property
    def base(self) -> Path:
        """The unpacked pinned source: base/vllm is the package, base/tests its tests."""
        return self.build / "base"

    @property
    def tree(self) -> Path:
        """The laid copy: tree/vllm is the package with overlay and patches in."""
        return self.build / "tree"

    @property
    def cache(self) -> Path:
        """Downloads, kept across builds. ROCM_OVERLAY_CACHE moves it."""
        chosen = os.environ.get("ROCM_OVERLAY_CACHE")
        return Path(chosen) if chosen else self.root / ".cache"

    @classmethod
    def find(cls, start: Path | None = None) -> Project:
        """The project of ROCM_OVERLAY_HOME, of ``start`` or the working folder upwards, of this
        source checkout, or of the image.

        Raises:
            OverlayError: none of these folders holds a base.toml.
        """
        chosen = os.environ.get(HOME_VARIABLE)
        if chosen:
            if not (Path(chosen) / PIN_NAME).is_file():
                raise OverlayError(
                    f"{HOME_VARIABLE} names a folder without a {PIN_NAME}",
                    seen=chosen,
                    wanted="the root of a vllm-openai-rocm checkout or of the image's copy",
                    fix=f"unset {HOME_VARIABLE} or correct it",
                )
            return cls(Path(chosen).resolve())
        here = (start or Path.cwd()).resolve()
        source = Path(__file__).resolve()
        for folder in [here, *here.parents, *source.parents, IMAGE_HOME]:
            if (folder / PIN_NAME).is_file() and (folder / "overlay").is_dir():
                return cls(folder)
        raise OverlayError(
            "no vllm-openai-rocm project found",
            seen=f"no {PIN_NAME} in {here}, above it, or in {IMAGE_HOME}",
            wanted=f"a folder with {PIN_NAME}, overlay/ and patches/",
            fix=f"run from a checkout, or set {HOME_VARIABLE}",
        )
