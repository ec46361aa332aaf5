# SPDX-License-Identifier: Apache-2.0
"""--specialized-decode and --monokernel: alone, together, in the JSON of --kernel-config, and
contradicting."""

from __future__ import annotations

from collections.abc import Callable
from json import dumps
from typing import Any

import pytest
import torch

from tests.unit import test_specialized_decode_tree as tree  # noqa: F401

from vllm.config import KernelConfig  # isort: skip
from vllm.engine.arg_utils import EngineArgs  # isort: skip
from vllm.model_executor.models import ModelRegistry  # isort: skip
from vllm.models.common.specialized_decode.flags import settle  # isort: skip
from vllm.utils.argparse_utils import FlexibleArgumentParser  # isort: skip


@pytest.fixture(scope="module")
def parser() -> Any:
    return EngineArgs.add_cli_args(FlexibleArgumentParser())


class Configurable(torch.nn.Module):
    """As much of a text model as vLLM asks for before it loads one."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a model that vLLM can configure without a network: its configuration alone."""
    ModelRegistry.register_model("Configurable", Configurable)
    folder = tmp_path_factory.mktemp("model")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = {"architectures": ["Configurable"], "model_type": "llama", "vocab_size": 64, **sizes}
    (folder / "config.json").write_text(dumps(config))
    return str(folder)


@pytest.fixture
def chosen(parser: Any, model: str) -> Callable[[list[str]], KernelConfig]:
    """The kernel configuration of the engine that a command line makes."""

    def configure(words: list[str]) -> KernelConfig:
        arguments = parser.parse_args(["--model", model, "--skip-tokenizer-init", *words])
        return EngineArgs.from_cli_args(arguments).create_engine_config().kernel_config

    return configure


def json(text: str) -> list[str]:
    return ["--kernel-config", text]


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ([], None),
        (["--no-monokernel"], None),
        (json('{"monokernel": false}'), None),
        (["--specialized-decode"], "auto"),
        (["--specialized-decode", "auto"], "auto"),
        (["--specialized-decode", "monokernel"], "monokernel"),
        (["--monokernel"], "monokernel"),
        (["--monokernel", "--specialized-decode"], "monokernel"),
        (["--monokernel", "--specialized-decode", "auto"], "monokernel"),
        (["--monokernel", "--specialized-decode", "monokernel"], "monokernel"),
        (json('{"specialized_decode": "auto"}'), "auto"),
        (json('{"specialized_decode": "monokernel"}'), "monokernel"),
        (json('{"monokernel": true}'), "monokernel"),
        ([*json('{"monokernel": true}'), "--specialized-decode"], "monokernel"),
        (["--kernel-config.specialized_decode", "auto"], "auto"),
    ],
    ids=str,
)
def test_each_way_to_ask_and_to_abstain(chosen: Any, words: list[str], kind: str | None) -> None:
    config = chosen(words)
    assert config.specialized_decode == kind
    assert config.monokernel is (kind is not None), "what vLLM's own code reads must be a true bool"


@pytest.mark.parametrize(
    "words",
    [
        ["--no-monokernel", "--specialized-decode"],
        ["--no-monokernel", "--specialized-decode", "monokernel"],
        [*json('{"monokernel": false}'), "--specialized-decode", "auto"],
        [*json('{"monokernel": false}'), "--monokernel"],
        [*json('{"specialized_decode": "auto"}'), "--no-monokernel"],
        [*json('{"monokernel": true}'), "--no-monokernel"],
    ],
    ids=str,
)
def test_a_contradiction_is_an_error(chosen: Any, words: list[str]) -> None:
    with pytest.raises(ValueError, match="--no-monokernel contradicts --specialized-decode"):
        chosen(words)


def test_a_contradiction_inside_the_json_is_an_error() -> None:
    with pytest.raises(ValueError, match="--no-monokernel contradicts --specialized-decode auto"):
        KernelConfig(monokernel=False, specialized_decode="auto")


def test_an_unknown_kind_is_an_error(chosen: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        chosen(["--specialized-decode", "mono"])
    assert "invalid choice: 'mono'" in capsys.readouterr().err
    with pytest.raises(ValueError, match="auto"):
        KernelConfig(specialized_decode="mono")


def test_two_kinds_contradict() -> None:
    """There is one kind today; the rule is there for the second."""
    with pytest.raises(
        ValueError, match=r"monokernel \(--monokernel\) contradicts --specialized-decode other"
    ):
        settle(("other", None), (None, True))


@pytest.mark.parametrize("options", [{"monokernel": True}, {"specialized_decode": "auto"}])
def test_the_choice_takes_part_in_the_hash(options: dict[str, Any]) -> None:
    assert KernelConfig(**options).compute_hash() != KernelConfig().compute_hash()


def test_strict_mode_compiles_nothing_else() -> None:
    assert KernelConfig(specialized_decode_strict=True).compute_hash() == KernelConfig().compute_hash()


def test_strict_mode_is_set_through_the_kernel_config(chosen: Any) -> None:
    config = chosen([*json('{"specialized_decode_strict": true}'), "--monokernel"])
    assert config.specialized_decode_strict and config.monokernel
    assert not chosen(["--monokernel"]).specialized_decode_strict
