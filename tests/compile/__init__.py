# SPDX-License-Identifier: Apache-2.0
"""Kernels compiled for AMD architectures without a GPU, and what the compiled code may use."""
