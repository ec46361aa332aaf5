# SPDX-License-Identifier: Apache-2.0
"""Builds, verifies and serves the vllm-openai-rocm distribution."""

__version__ = "0.1.0"
