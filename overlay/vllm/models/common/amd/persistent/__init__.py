# SPDX-License-Identifier: Apache-2.0
"""Persistent decode kernels: the execution model and what every kernel of it shares."""
