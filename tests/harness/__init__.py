# SPDX-License-Identifier: Apache-2.0
"""Stand-ins that let tests run vLLM's ROCm code on machines without its hardware or packages."""
