# SPDX-License-Identifier: Apache-2.0
"""Errors, each of which says where."""


class AssemblyError(ValueError):
    """Text that the simulator does not understand: an unknown opcode, operand, modifier or directive."""

    def __init__(self, file: str, line: int, text: str, why: str) -> None:
        super().__init__(f"{file}:{line}: {why}: {text.strip()!r}")
        self.file, self.line, self.text, self.why = file, line, text, why


class SimulationError(RuntimeError):
    """A run that went wrong: a caught fault, a deadlock, or something that is not modelled.

    ``kind`` is the part of the message before the first colon ("out-of-bounds", "lds-race", "deadlock", ...);
    ``line`` and ``text`` are the instruction's, ``source`` its source location where the compiler gave one.
    """

    def __init__(
        self, message: str, kernel: str = "", where: str = "", line: int = 0, text: str = "", source: str = ""
    ) -> None:
        place = ", ".join(part for part in (kernel, where, f"line {line}" if line else "", source) if part)
        super().__init__(f"{message}\n  at {place}: {text.strip()}" if place else message)
        self.kind = message.split(":", 1)[0]
        self.kernel, self.where, self.line, self.text, self.source = kernel, where, line, text, source
