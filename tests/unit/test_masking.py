# SPDX-License-Identifier: Apache-2.0
"""What is hidden wherever something is printed, and what is not."""

from __future__ import annotations

import pytest

from rocm_overlay.masking import HIDDEN, is_secret, mask_text, mask_value, mask_words


@pytest.mark.parametrize(
    "name",
    [
        *("hf-token", "HF_TOKEN", "--HF-TOKEN", "hf-token.x", "api-key", "VLLM_API_KEY", "--api-key"),
        *("redis_password", "PASSWD", "client_secret", "aws_secret_access_key", "passphrase", "credential"),
    ],
)
def test_a_name_that_says_secret_is_one(name: str) -> None:
    assert is_secret(name)
    assert mask_value(name, "hush") == HIDDEN
    assert mask_value(name, 7) == HIDDEN


@pytest.mark.parametrize(
    "name",
    [
        *("tokenizer", "TOKENIZERS_PARALLELISM", "max-num-batched-tokens", "num_speculative_tokens"),
        *("return-tokens-as-token-ids", "long-prefill-token-threshold", "ssl-keyfile", "monokernel"),
    ],
)
def test_a_name_that_only_sounds_like_one_is_not(name: str) -> None:
    assert not is_secret(name)
    assert mask_value(name, "shown") == "shown"


def test_a_switch_hides_nothing() -> None:
    assert mask_value("hf-token", True) is True


def test_keys_are_judged_at_any_depth() -> None:
    value = {"a": [{"b": {"db_password": "hush", "port": 1}}], "api_key": ["hush"]}
    assert mask_value("some-config", value) == {
        "a": [{"b": {"db_password": HIDDEN, "port": 1}}],
        "api_key": HIDDEN,
    }


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--hf-token", "hush", "--seed", "1"], ["--hf-token", HIDDEN, "--seed", "1"]),
        (["--api-key", "hush", "hush"], ["--api-key", HIDDEN, HIDDEN]),
        (["--api-key=hush"], [f"--api-key={HIDDEN}"]),
        (["--hf-toke", "hush"], ["--hf-toke", HIDDEN]),
        (["--api-k=hush"], [f"--api-k={HIDDEN}"]),
        (["--c", '{"password":"hush"}'], ["--c", f'{{"password":"{HIDDEN}"}}']),
        (["--c", '{"password":"hush",}'], ["--c", HIDDEN]),
        (["--c", '{"a": 1}'], ["--c", '{"a": 1}']),
    ],
)
def test_a_command_line_is_masked_word_by_word(words: list[str], shown: list[str]) -> None:
    assert mask_words(words) == shown


def test_a_token_is_known_by_its_form_where_no_name_says_so() -> None:
    assert mask_text("model hf_abcDEF123456 next") == f"model {HIDDEN} next"
    assert mask_text("hf_models/some-model") == "hf_models/some-model"
