# SPDX-License-Identifier: Apache-2.0
"""The stages that the mono kernels are made of."""
