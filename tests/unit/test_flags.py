# SPDX-License-Identifier: Apache-2.0
"""The base's flags in every spelling; what the base would complete is refused.

The table itself is compared with the base's parser in test_base_flags.
"""

from __future__ import annotations

import pytest

from rocm_overlay.errors import OverlayError
from rocm_overlay.flags import Spelling, flag_table, read_flag


@pytest.mark.parametrize(
    ("word", "spelling"),
    [
        ("--max-num-seqs", Spelling("max-num-seqs", values="1")),
        ("--max_num_seqs=4", Spelling("max-num-seqs", values="1", inline="4")),
        ("-tp", Spelling("tensor-parallel-size", values="1")),
        ("-tp=2", Spelling("tensor-parallel-size", values="1", inline="2")),
        ("-n", Spelling("nnodes", values="1")),
        ("--monokernel", Spelling("monokernel", values="0")),
        ("--no-monokernel", Spelling("monokernel", on=False, values="0")),
        ("--disable-prefix-caching", Spelling("enable-prefix-caching", on=False, values="0")),
        ("--device-memory-utilization", Spelling("gpu-memory-utilization", values="1")),
        ("-cc.cudagraph_mode", Spelling("compilation-config", values="1", path=("cudagraph_mode",))),
        ("--engram_config.a_b", Spelling("engram-config", values="1", path=("a_b",))),
        ("-O3", Spelling("optimization-level", values="1", inline="3")),
        ("-O=0", Spelling("optimization-level", values="1", inline="0")),
        ("-O", Spelling("optimization-level", values="1")),
        # Not the base's: it is passed on, for the base to judge.
        ("--of-a-later-base", Spelling("of-a-later-base")),
        ("--no-such", Spelling("such", on=False)),
        ("--HF-TOKEN", Spelling("HF-TOKEN")),
    ],
)
def test_every_spelling_has_one_meaning(word: str, spelling: Spelling) -> None:
    assert read_flag(word) == spelling


@pytest.mark.parametrize(
    ("word", "wanted"),
    [
        ("--max-num-b", "--max-num-batched-tokens"),
        ("--tensor-parallel", "--tensor-parallel-size"),
        ("--tensor_parallel=2", "--tensor-parallel-size"),
        ("--no-mono", "--no-monokernel"),
        ("--hf-toke=hush", "--hf-token"),
        ("--api-k", "--api-key"),
        ("--engram.cpu_offload", "--engram-config"),
        ("--conf", "--config"),
        ("-t", "-tp"),
        ("-n2", "-n"),
    ],
)
def test_a_flag_cut_short_is_refused_with_the_whole_one(word: str, wanted: str) -> None:
    with pytest.raises(OverlayError, match="not the whole name of a flag") as caught:
        read_flag(word)
    assert wanted in str(caught.value.wanted)
    assert "hush" not in caught.value.render()


def test_every_spelling_of_the_table_is_read_back() -> None:
    for key, own in flag_table().items():
        for on, words in ((True, own["on"]), (False, own["off"])):
            for word in words:
                assert read_flag(word) == Spelling(key, on, own["values"])
