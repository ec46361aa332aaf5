# SPDX-License-Identifier: Apache-2.0
"""``--no-skips``: on an agent that was taken for its GPUs, a case that is skipped has failed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-skips", action="store_true", help="a skipped case fails, as for GPUs not seen")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    if item.config.getoption("--no-skips") and report.skipped:
        reason = report.longrepr[-1] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome, report.longrepr = "failed", f"--no-skips, but: {reason}"
    return report
