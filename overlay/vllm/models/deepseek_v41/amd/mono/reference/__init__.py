# SPDX-License-Identifier: Apache-2.0
"""The launches in float64, stage by stage: what a kernel must give, and nothing of how it does it."""
