# SPDX-License-Identifier: Apache-2.0
"""Settings of every test run."""

import os

from hypothesis import settings

# CI judges a commit by the same examples each time; a developer's run goes on looking for new ones.
settings.register_profile("ci", derandomize=True, deadline=None)
if os.environ.get("CI"):
    settings.load_profile("ci")
