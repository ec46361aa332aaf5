# SPDX-License-Identifier: Apache-2.0
"""vLLM's own client, from the laid tree, under ``bench``: a real tokenizer, real requests, one record."""

import os
import shlex
import subprocess
import sys

import pytest
import yaml

from rocm_overlay.measure import records
from rocm_overlay.project import Project
from tests.scripted_server import ScriptedServer

PROJECT = Project.find()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A word tokenizer of 200 words in a folder, as transformers loads it."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<unk>": 0} | {f"w{index}": index for index in range(1, 200)}
    bare = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    bare.pre_tokenizer = pre_tokenizers.Whitespace()
    folder = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=bare, unk_token="<unk>").save_pretrained(folder)
    return folder


def test_vllms_client_drives_a_run_and_its_result_is_read(tokenizer, tmp_path):
    point = {"input_tokens": 32, "output_tokens": 6, "concurrency": 2, "prompts": 4, "seed": 101}
    profile = {
        "rounds": 1, "runs": 1, "repeats": "salted", "prefix_hit_rate": [0.0, 0.05], "run_timeout_s": 280,
        "warmup": {**point, "prompts": 1, "seed": 7}, "points": [point],
    }  # fmt: skip
    file = tmp_path / "profiles.yaml"
    file.write_text(yaml.safe_dump({"test": profile}))
    client = [sys.executable, "-m", "vllm.entrypoints.cli.main"]
    command = [sys.executable, "-m", "rocm_overlay.cli", "bench", "mi355x-tp4", "--profile", "test"]
    command += ["--profiles", str(file), "--client", shlex.join(client), "--tokenizer", str(tokenizer)]
    command += ["--out", str(tmp_path / "set"), "--client-flags", ""]
    paths = [str(PROJECT.tree), str(PROJECT.root / "src"), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
    with ScriptedServer() as server:
        done = subprocess.run(
            [*command, "--url", server.url], env=env, capture_output=True, text=True, check=False
        )
    assert done.returncode == 0, done.stderr

    (record,) = records.read(tmp_path / "set")
    wanted = {"itl_p50_ms", "itl_p99_ms", "tpot_p50_ms", "ttft_p90_ms", "output_tok_s", "acceptance_length"}
    assert wanted <= set(record.figures)
    assert {request.output_tokens for request in record.requests} == {6}
    assert {request.input_tokens for request in record.requests} == {32}
    assert all(request.itl_ms > 0 for request in record.requests)
    assert [proof["ok"] for name, proof in record.proofs.items() if name != "evidence"] == [True] * 8
    # The client's one salt a run reaches the server with each prompt of the run; the warm-up has none.
    salts = [body.get("cache_salt") for body in server.bodies]
    (salt,) = set(salts) - {None}
    assert salt.startswith("server-32-6-c2-1-1-") and salts.count(salt) == 4
