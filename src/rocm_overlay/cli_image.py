# SPDX-License-Identifier: Apache-2.0
"""Verbs for the image and the machine: image, mirror-base, pin-digest, doctor."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from rocm_overlay.engine import ENGINES, Shell, select_engine
from rocm_overlay.errors import EXIT_FAILED_CHECK, EXIT_OK
from rocm_overlay.pin import ARCHITECTURES, Pin
from rocm_overlay.project import Project

Subparsers = Any


def register(subparsers: Subparsers) -> None:
    """Add the verbs of this module."""
    image = subparsers.add_parser("image", help="build the image over the pinned base, or over the stand-in")
    _architecture(image)
    image.add_argument(
        "--engine", choices=ENGINES, help="default: docker where its daemon answers, else buildah"
    )
    image.add_argument(
        "--base", metavar="REFERENCE", help="build over this image or oci-archive:PATH instead"
    )
    image.add_argument(
        "--tag", help="the image's only name (default: vllm-openai-rocm:VERSION and vllm-openai-rocm)"
    )
    image.add_argument(
        "--allow-drift",
        action="append",
        default=[],
        metavar="PATH",
        help="accept that this file of the base differs from the lock; repeatable, recorded in the image",
    )
    image.add_argument(
        "--compile-kernels", action="store_true", help="compile the mono kernels into it, which takes minutes"
    )
    image.add_argument(
        "--no-stand-in", action="store_true", help="fail where the pinned image cannot be pulled"
    )
    image.set_defaults(run=_image)

    mirror = subparsers.add_parser(
        "mirror-base", help="copy the pinned base by digest, and record where and when"
    )
    _architecture(mirror, default=None)
    mirror.add_argument(
        "--to", default="", metavar="REFERENCE", help="required: a registry reference or oci-archive:PATH"
    )
    mirror.add_argument("--engine", choices=ENGINES, help="what copies where there is no skopeo")
    mirror.set_defaults(run=_mirror_base)

    digest = subparsers.add_parser("pin-digest", help="write the digest of the pinned tag into base.toml")
    _architecture(digest, default=None)
    digest.set_defaults(run=_pin_digest)

    doctor = subparsers.add_parser("doctor", help="is this machine fit to serve?")
    doctor.add_argument("--recipe", metavar="NAME", help="also check what this recipe needs")
    doctor.add_argument("--json", action="store_true", help="print the rows as JSON")
    doctor.set_defaults(run=_doctor)


def _architecture(parser: argparse.ArgumentParser, default: str | None = "gfx950") -> None:
    shown = "%(default)s" if default else "all"
    parser.add_argument("--arch", choices=ARCHITECTURES, default=default, help=f"default: {shown}")


def _image(arguments: argparse.Namespace) -> int:
    from rocm_overlay import image
    from rocm_overlay.plan import Sources

    started = time.monotonic()
    image.check_drift_paths(arguments.allow_drift)
    project = Project.find()
    sources = Sources.load(project)
    pin = sources.pin
    base = image.obtain_base(
        project,
        pin,
        arguments.arch,
        select_engine(Shell(), arguments.engine),
        given=arguments.base,
        allow_stand_in=not arguments.no_stand_in,
    )
    stamp = sources.stamp()
    tags = image.image_tags(pin, arguments.arch, stamp["version"], stand_in=base.stand_in)
    built = image.build_image(
        project,
        stamp,
        base,
        [arguments.tag] if arguments.tag else tags,
        allow_drift=arguments.allow_drift,
        compile_kernels=arguments.compile_kernels,
        started=started,
    )
    print(built.table())
    return EXIT_OK


def _mirror_base(arguments: argparse.Namespace) -> int:
    from rocm_overlay import mirror

    mirror.check_destination(arguments.to)
    engine = select_engine(Shell(), arguments.engine)
    copied = mirror.mirror_base(Project.find(), engine, _architectures(arguments), arguments.to)
    print(f"copied {copied} to {arguments.to}; recorded in base.toml")
    return EXIT_OK


def _pin_digest(arguments: argparse.Namespace) -> int:
    from rocm_overlay import mirror

    for architecture in _architectures(arguments):
        print(f"{architecture}: {mirror.pin_digest(Project.find(), Shell(), architecture)}")
    return EXIT_OK


def _architectures(arguments: argparse.Namespace) -> tuple[str, ...]:
    return (arguments.arch,) if arguments.arch else ARCHITECTURES


def _doctor(arguments: argparse.Namespace) -> int:
    from rocm_overlay import doctor, recipe

    project = Project.find()
    chosen = recipe.load(project.recipes, arguments.recipe) if arguments.recipe else None
    rows = doctor.examine(Pin.load(project.pin_file), doctor.Machine.here(), doctor.Needs.of(chosen))
    if arguments.json:
        print(json.dumps({"rows": [row.as_json() for row in rows]}, indent=1))
    else:
        print(doctor.render(rows))
    return EXIT_FAILED_CHECK if any(row.status == doctor.FAIL for row in rows) else EXIT_OK
