# SPDX-License-Identifier: Apache-2.0
"""Kernels shared by the AMD paths of several models."""
