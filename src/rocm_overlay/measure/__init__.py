# SPDX-License-Identifier: Apache-2.0
"""Measuring a server over HTTP: ``bench``, ``compare``, ``eval``. docs/measuring.md is the user's page."""
