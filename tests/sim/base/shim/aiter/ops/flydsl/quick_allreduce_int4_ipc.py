# SPDX-License-Identifier: Apache-2.0
"""The name that the base's peer-memory module imports; the simulator allocates peer memory itself."""


class UncachedIpcHeap:
    """Never instantiated here: a call to it in a simulated run is an error."""

    @staticmethod
    def alloc_uncached(num_bytes: int) -> int:
        raise RuntimeError("peer memory of a simulated run comes from cdnasim, not from an IPC heap")
