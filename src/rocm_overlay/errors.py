# SPDX-License-Identifier: Apache-2.0
"""The one error type a user sees, and the exit codes of the console script."""

from __future__ import annotations

EXIT_OK = 0
EXIT_FAILED_CHECK = 1
EXIT_BAD_INPUT = 2


class OverlayError(Exception):
    """Something a user can act on.

    Args:
        what: the thing that is wrong, by name, in one sentence.
        seen: the value found, if one was.
        wanted: the value or form that would have been right.
        fix: what to do about it, in one sentence or command.
        exit_code: the console script's exit status.
    """

    def __init__(
        self,
        what: str,
        *,
        seen: object = None,
        wanted: object = None,
        fix: str | None = None,
        exit_code: int = EXIT_BAD_INPUT,
    ) -> None:
        super().__init__(what)
        self.what = what
        self.seen = seen
        self.wanted = wanted
        self.fix = fix
        self.exit_code = exit_code

    def render(self) -> str:
        """The error as the lines printed to stderr."""
        lines = [f"error: {self.what}"]
        for label, value in (("seen", self.seen), ("wanted", self.wanted), ("fix", self.fix)):
            if value is not None:
                lines.append(f"  {label + ':':<8}{value}")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.render()


class CheckFailed(OverlayError):
    """A check ran to its end and found a fault: exit status 1 rather than 2."""

    def __init__(self, what: str, **details: object) -> None:
        super().__init__(what, exit_code=EXIT_FAILED_CHECK, **details)  # type: ignore[arg-type]
