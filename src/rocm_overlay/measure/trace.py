# SPDX-License-Identifier: Apache-2.0
"""Launches a decode step by kernel name, from a torch-profiler trace of a worker.

vLLM marks the start of each step with ``execute_context_C(..)_generation_G(..)``; sampling and drafting come
after the mark's end, so that a step reaches from one mark's start to the next one's. What runs on the GPU
later than it was launched is given to the step that launched it, by the trace's correlation number. Steps
with a prefill (C > 0) and the last step, whose end the trace may lack, are left out. A kernel's count is that
of most steps; launches inside a replayed graph carry the number of the replay.
"""

from __future__ import annotations

import bisect
import gzip
import json
import re
import statistics
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rocm_overlay.errors import OverlayError

STEP = re.compile(r"execute(?:_\d+)?_context_(\d+)\(.*?\)_generation_(\d+)\(")
ON_GPU = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
LAUNCHING = frozenset({"cuda_runtime", "cuda_driver", "hip_runtime"})


@dataclass(frozen=True)
class Launches:
    """Per decode step of one worker.

    Attributes:
        by_kernel: launches by name, in most steps.
        steps: decode steps in the trace.
        usual: those whose total is the most frequent one.
        totals: how many steps had each total.
        gpu_us: median GPU microseconds a step by kernel name.
    """

    by_kernel: dict[str, int]
    steps: int
    usual: int
    totals: dict[int, int]
    gpu_us: dict[str, float]


def read_trace(file: Path) -> Launches:
    """The launches of a trace file, ``.json`` or ``.json.gz``.

    Raises:
        OverlayError: no such file, no trace, no decode step in it, or GPU work without a launch.
    """
    try:
        content = file.read_bytes()
        text = gzip.decompress(content) if file.suffix == ".gz" else content
        events: list[dict[str, Any]] = json.loads(text)["traceEvents"]
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise OverlayError(
            f"{file} is no torch-profiler trace",
            seen=f"{type(error).__name__}: {error}",
            wanted="the JSON file that the profiler writes for a worker",
            fix="serve with --profiler-config, and give one rank's file",
        ) from None
    return count(events, str(file))


def count(events: list[dict[str, Any]], where: str) -> Launches:
    """The launches of a trace's events; ``where`` names it in errors.

    Raises:
        OverlayError: no decode step, or GPU work whose launch the trace lacks.
    """
    marks = sorted(
        (event["ts"], match[1] == "0" and match[2] != "0")
        for event in events
        if event.get("cat") == "user_annotation" and (match := STEP.match(event.get("name", "")))
    )
    starts = [start for start, _ in marks]
    decode = {index for index, (_, is_decode) in enumerate(marks[:-1]) if is_decode}
    if not decode:
        raise OverlayError(
            f"{where} holds no whole decode step",
            seen=f"{len(marks)} steps",
            wanted="a step without prefills, and one after it",
            fix="trace while requests decode",
        )
    launched = {
        event["args"]["correlation"]: event["ts"]
        for event in events
        if event.get("cat") in LAUNCHING and "correlation" in event.get("args", {})
    }
    names: dict[int, Counter[str]] = {index: Counter() for index in decode}
    times: dict[int, Counter[str]] = {index: Counter() for index in decode}
    for event in events:
        if event.get("cat") not in ON_GPU:
            continue
        correlation = event.get("args", {}).get("correlation")
        if correlation not in launched:
            raise OverlayError(
                f"{where}: GPU work without its launch",
                seen=event.get("name"),
                wanted="a launch with the same correlation",
                fix="trace CPU and GPU activities together",
            )
        step = bisect.bisect_right(starts, launched[correlation]) - 1
        if step in decode:
            names[step][event["name"]] += 1
            times[step][event["name"]] += event["dur"]
    return _summary(names, times)


def _summary(names: dict[int, Counter[str]], times: dict[int, Counter[str]]) -> Launches:
    kernels = sorted({name for own in names.values() for name in own})
    totals = Counter(sum(own.values()) for own in names.values())
    return Launches(
        by_kernel={name: statistics.mode(own[name] for own in names.values()) for name in kernels},
        steps=len(names),
        usual=totals.most_common(1)[0][1],
        totals=dict(sorted(totals.items())),
        gpu_us={name: float(statistics.median(own[name] for own in times.values())) for name in kernels},
    )
