# SPDX-License-Identifier: Apache-2.0
"""The mono decode kernels."""
