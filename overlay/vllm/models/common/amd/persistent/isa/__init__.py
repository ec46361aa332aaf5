# SPDX-License-Identifier: Apache-2.0
"""What an architecture names: matrix instructions, conversions, number formats."""
