# SPDX-License-Identifier: Apache-2.0
"""--specialized-decode and --monokernel: alone, together, in the JSON of --kernel-config, and
contradicting."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from json import dumps
from typing import Any

import pytest
import regex as re
import torch

from tests.unit import test_specialized_decode_tree as tree

from vllm.config import KernelConfig, utils  # isort: skip
from vllm.engine import arg_utils  # isort: skip
from vllm.engine.arg_utils import EngineArgs  # isort: skip
from vllm.model_executor.models import ModelRegistry  # isort: skip
from vllm.models.common.specialized_decode import flags  # isort: skip
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
def kernels_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flags, "ARCHITECTURES", flags.ARCHITECTURES | {"Configurable"})


@pytest.fixture
def chosen(parser: Any, model: str, kernels_of_its_own: None) -> Callable[[list[str]], KernelConfig]:
    """The kernel configuration of the engine that a command line makes, for a model with kernels."""

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
    assert bool(config.monokernel) is (kind is not None)


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


@pytest.mark.parametrize("kind", ["mono", "", False, True])
def test_an_unknown_kind_that_no_parser_saw_is_an_error(model: str, kind: Any) -> None:
    """As ``LLM(specialized_decode=...)`` gives it. False would turn the kernels on."""
    arguments = EngineArgs(model=model, skip_tokenizer_init=True, specialized_decode=kind)
    wanted = f"--specialized-decode: {kind!r}, wanted auto or monokernel, or None for vLLM's path"
    with pytest.raises(ValueError, match=f"^{re.escape(wanted)}"):
        arguments.create_engine_config()


@pytest.mark.parametrize("switch", ["true", "false", 2])
def test_a_switch_that_is_not_one_is_an_error(switch: Any) -> None:
    with pytest.raises(ValueError, match=f"^--monokernel: {switch!r}, wanted True, False or None"):
        flags.settle_options(KernelConfig(), (None, switch))


def test_two_kinds_contradict() -> None:
    """There is one kind today; the rule is there for the second."""
    with pytest.raises(
        ValueError, match=r"monokernel \(--monokernel\) contradicts --specialized-decode other"
    ):
        settle(("other", None), (None, True))


ASKS = [["--specialized-decode"], ["--monokernel"], json('{"specialized_decode": "monokernel"}')]


@pytest.mark.parametrize("words", ASKS, ids=str)
def test_a_model_without_kernels_of_its_own_is_refused(parser: Any, model: str, words: list[str]) -> None:
    arguments = parser.parse_args(["--model", model, "--skip-tokenizer-init", *words])
    with pytest.raises(ValueError, match="has no decode kernels of its own here") as error:
        EngineArgs.from_cli_args(arguments).create_engine_config()
    (reason,) = [line for line in str(error.value).splitlines() if line.startswith("  - ")]
    assert reason.startswith("  - model architecture: Configurable, wanted one of DeepseekV41ForCausalLM, ")
    assert "Drop the option" in str(error.value)


@pytest.mark.parametrize("words", [[], ["--no-monokernel"]], ids=str)
def test_a_model_without_kernels_of_its_own_serves_without_the_option(
    parser: Any, model: str, words: list[str]
) -> None:
    arguments = parser.parse_args(["--model", model, "--skip-tokenizer-init", *words])
    assert not EngineArgs.from_cli_args(arguments).create_engine_config().kernel_config.monokernel


def test_another_platform_is_refused(chosen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(arg_utils.current_platform), "is_rocm", lambda platform: False)
    with pytest.raises(ValueError, match=r"1 reason\(s\):\n  - platform: another one, wanted ROCm"):
        chosen(["--monokernel"])


def test_every_reason_is_given_at_once() -> None:
    with pytest.raises(ValueError, match=r"2 reason\(s\):\n  - model .*\n  - platform"):
        flags.require_kernels(KernelConfig(monokernel=True), ["Other"], on_rocm=False)


MODELS = tree.TREE / "vllm" / "models"
REGISTRY = tree.TREE / "vllm" / "model_executor" / "models" / "registry.py"


def test_the_models_with_kernels_are_those_whose_rocm_files_read_the_option() -> None:
    """A model that a later base gives such kernels fails here until it is listed."""
    readers = {
        file.relative_to(MODELS).parts[0]
        for file in MODELS.rglob("*.py")
        if "kernel_config.monokernel" in file.read_text(encoding="utf-8")
    }
    registered = dict(
        re.findall(r'"(\w+)": \(\s*"vllm\.models\.(\w+)",', REGISTRY.read_text(encoding="utf-8"))
    )
    # The drafts of these models come with them; no user serves one.
    served = {name for name, folder in registered.items() if folder in readers and "For" in name}
    assert served == flags.ARCHITECTURES


CHOICES = [{}, {"specialized_decode": "auto"}, {"monokernel": True}, {"monokernel": False}]


@pytest.mark.parametrize("options", CHOICES, ids=str)
@pytest.mark.parametrize("beside", [(), ((None, None),)], ids=["made", "settled"])
@pytest.mark.parametrize("replace", [dataclasses.replace, utils.replace], ids=["dataclasses", "vllm"])
def test_a_copy_of_a_settled_configuration_does_not_contradict_itself(
    options: dict[str, Any], beside: Any, replace: Any
) -> None:
    config = flags.settle_options(KernelConfig(**options), *beside)
    copy = replace(config, moe_backend="aiter")
    same = (config.specialized_decode, config.monokernel)
    assert (copy.specialized_decode, copy.monokernel) == same and copy.moe_backend == "aiter"
    if options != {"monokernel": False}:
        assert replace(config, specialized_decode="auto").specialized_decode == "auto"


@pytest.mark.parametrize("options", CHOICES, ids=str)
def test_a_copy_without_the_kernels_drops_both_fields(options: dict[str, Any]) -> None:
    config = flags.settle_options(KernelConfig(**options))
    copy = dataclasses.replace(config, specialized_decode=None, monokernel=None)
    assert copy.specialized_decode is None and not copy.monokernel


def test_to_abstain_is_not_to_compile_otherwise() -> None:
    hashes = {KernelConfig(**options).compute_hash() for options in ({}, {"monokernel": False})}
    hashes.add(flags.settle_options(KernelConfig(), (None, None)).compute_hash())
    assert len(hashes) == 1


def test_a_bare_option_takes_the_model_s_name_for_its_kind(capsys: pytest.CaptureFixture[str]) -> None:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    parser.add_argument("model_tag", nargs="?")
    with pytest.raises(SystemExit):
        parser.parse_args(["--specialized-decode", "org/model"])
    assert "invalid choice: 'org/model'" in capsys.readouterr().err
    given = parser.parse_args(["--specialized-decode=auto", "org/model"])
    assert (given.specialized_decode, given.model_tag) == ("auto", "org/model")


@pytest.mark.parametrize("options", [{"monokernel": True}, {"specialized_decode": "auto"}])
def test_the_choice_takes_part_in_the_hash(options: dict[str, Any]) -> None:
    assert KernelConfig(**options).compute_hash() != KernelConfig().compute_hash()


def test_strict_mode_compiles_nothing_else() -> None:
    assert KernelConfig(specialized_decode_strict=True).compute_hash() == KernelConfig().compute_hash()


STRICT = json('{"specialized_decode_strict": true}')


def test_strict_mode_without_kernels_is_refused(chosen: Any) -> None:
    with pytest.raises(ValueError, match=r"^specialized_decode_strict .* wanted --specialized-decode or"):
        chosen(STRICT)


def test_strict_mode_lets_vllm_s_path_be_chosen(chosen: Any) -> None:
    """So that a benchmark can be repeated without the kernels by one option."""
    config = chosen([*STRICT, "--no-monokernel"])
    assert config.specialized_decode_strict and not config.monokernel


def test_strict_mode_is_set_through_the_kernel_config(chosen: Any) -> None:
    config = chosen([*json('{"specialized_decode_strict": true}'), "--monokernel"])
    assert config.specialized_decode_strict and config.monokernel
    assert not chosen(["--monokernel"]).specialized_decode_strict
