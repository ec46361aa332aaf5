# SPDX-License-Identifier: Apache-2.0
"""A recipe's server in a container: the ``docker run`` line and the compose file.

Both hand the recipe's name and the user's arguments to the image's entry point. They are meant to
be kept, so that a secret among the arguments is refused.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence

import yaml

from rocm_overlay import __version__
from rocm_overlay.errors import OverlayError
from rocm_overlay.masking import HIDDEN, is_secret, mask_value
from rocm_overlay.recipe import Recipe
from rocm_overlay.render import ServeCommand, build_command

# The name that `make image` gives.
DEFAULT_IMAGE = f"vllm-openai-rocm:{__version__}"

# What a ROCm container needs to reach the GPUs: the compute and the display device, shared memory
# and peer handles of the host (the ranks exchange both), the kernel's default filter off (it
# forbids the calls that map peer memory), and the group that owns the devices.
DEVICES = ("/dev/kfd", "/dev/dri")
GROUP = "video"
SECURITY = "seccomp=unconfined"

# The folder of every compiled kernel, as the image's variables have it. A named volume takes the
# image's folders and modes with it, where a host's folder would hide them.
CACHE_VOLUME = "vllm-openai-rocm-cache"
CACHE_FOLDER = "/var/cache/vllm-openai-rocm"
# The home folder of the container's user, and below it and the host's, where weights are kept.
CONTAINER_HOME = "/root"
WEIGHTS = ".cache/huggingface"

TOKEN_VARIABLE = "HF_TOKEN"
# Secrets that the server also reads from a variable.
SECRET_VARIABLES = {"hf-token": TOKEN_VARIABLE, "api-key": "VLLM_API_KEY"}


def docker_line(recipe: Recipe, overrides: Sequence[str] = (), image: str = DEFAULT_IMAGE) -> str:
    """The ``docker run`` line, for a shell. The Hugging Face token is passed by name alone.

    Raises:
        OverlayError: as ``build_command``; or an override that carries a secret.
    """
    command = build_command(recipe, overrides)
    _refuse_secrets(command)
    parts = ["docker run --rm"]
    parts += [f"--device {device}" for device in DEVICES]
    parts += [f"--group-add {GROUP}", "--ipc=host", f"--security-opt {SECURITY}"]
    parts += [f"-p {command.port}:{command.port}"]
    # Double quotes: the shell that runs the line fills in the home folder.
    parts += [f'-v "$HOME/{WEIGHTS}:{CONTAINER_HOME}/{WEIGHTS}"', f"-v {CACHE_VOLUME}:{CACHE_FOLDER}"]
    parts += [f"-e {TOKEN_VARIABLE}", shlex.quote(image)]
    parts.append(shlex.join(_words(command)))
    return " \\\n  ".join(parts)


def compose_text(recipe: Recipe, overrides: Sequence[str] = (), image: str = DEFAULT_IMAGE) -> str:
    """A compose file (YAML text) with one service, ``server``.

    Raises:
        OverlayError: as ``docker_line``.
    """
    command = build_command(recipe, overrides)
    _refuse_secrets(command)
    service: dict[str, object] = {
        "image": image,
        # Compose reads $ as the start of a variable.
        "command": [word.replace("$", "$$") for word in _words(command)],
        "devices": [f"{device}:{device}" for device in DEVICES],
        "group_add": [GROUP],
        "ipc": "host",
        "security_opt": [SECURITY],
        "ports": [f"{command.port}:{command.port}"],
        "volumes": [
            f"${{HOME}}/{WEIGHTS}:{CONTAINER_HOME}/{WEIGHTS}",
            f"{CACHE_VOLUME}:{CACHE_FOLDER}",
        ],
        "environment": [TOKEN_VARIABLE],
        # The server finishes its requests and frees the GPUs' peer memory.
        "stop_grace_period": "60s",
    }
    # Named, so that compose does not put its project's name before it: `docker run` has the same one.
    volumes = {CACHE_VOLUME: {"name": CACHE_VOLUME}}
    text: str = yaml.safe_dump({"services": {"server": service}, "volumes": volumes}, sort_keys=False)
    return text


def _words(command: ServeCommand) -> list[str]:
    words = ["--recipe", command.recipe]
    return [*words, "--", *command.given] if command.given else words


def _refuse_secrets(command: ServeCommand) -> None:
    """A rendered line is meant to be kept: a secret in it would be printed, or be useless hidden."""
    for own in command.arguments:
        for name in _secrets(own.key, own.value):
            variable = SECRET_VARIABLES.get(name)
            way = f"the environment variable {variable}" if variable else "a variable or file of the server's"
            raise OverlayError(
                f"--{name} would be written into the rendered text",
                seen=f"--{name} {HIDDEN}",
                wanted=f"the secret in {way}",
                fix=f"drop --{own.key}" + (f" and pass -e {variable}" if variable else ""),
            )


def _secrets(name: str, value: object) -> Iterator[str]:
    """The dotted names of the secrets in a flag's value."""
    if is_secret(name.rpartition(".")[2]) and mask_value(name, value) == HIDDEN:
        yield name
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _secrets(f"{name}.{key}", inner)
    elif mask_value(name, value) != value:
        yield name
