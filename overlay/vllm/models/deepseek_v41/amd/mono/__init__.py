# SPDX-License-Identifier: Apache-2.0
"""Decode kernels of DeepSeek-V4.1 for CDNA3 and CDNA4; README.md describes them.

``common`` is not theirs: vLLM's kernels of MiniMax M3 import it.
"""
