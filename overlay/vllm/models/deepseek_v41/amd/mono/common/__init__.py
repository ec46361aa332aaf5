# SPDX-License-Identifier: Apache-2.0
"""What vLLM's persistent kernels of MiniMax M3 are written on; those of this folder's parent are not."""
