# SPDX-License-Identifier: Apache-2.0
"""``vllm bench serve`` as a process: its command, its time limit, its result file as figures and requests."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rocm_overlay.errors import OverlayError
from rocm_overlay.measure.records import Request
from rocm_overlay.measure.server import Server, end_group
from rocm_overlay.measure.workload import Pass
from rocm_overlay.processes import GroupGuard
from rocm_overlay.textio import log_end

DEFAULT_CLIENT = ("vllm",)
LATENCIES = ("ttft", "tpot", "itl", "e2el")
PERCENTILES = (50, 90, 99)
STOP_TIMEOUT_S = 10


@dataclass(frozen=True)
class Client:
    """How the client is called.

    Attributes:
        program: the words before ``bench serve``.
        model: the name that the server knows the model by.
        tokenizer: name or folder of the tokenizer; the model's where None.
        flags: further words, such as ``--trust-remote-code``.
    """

    program: Sequence[str]
    model: str
    tokenizer: str | None = None
    flags: Sequence[str] = ()

    def command(self, server: Server, own: Pass, file: Path) -> list[str]:
        """The words of one run, whose result goes into ``file``."""
        point = own.point
        words = [*self.program, "bench", "serve", "--backend", "openai", "--base-url", server.url]
        words += ["--model", self.model, "--dataset-name", "random", "--ignore-eos"]
        words += [] if self.tokenizer is None else ["--tokenizer", self.tokenizer]
        words += [
            "--random-input-len",
            str(point.input_tokens),
            "--random-output-len",
            str(point.output_tokens),
        ]
        words += ["--max-concurrency", str(point.concurrency), "--num-prompts", str(point.prompts)]
        words += ["--seed", str(own.seed), "--percentile-metrics", ",".join(LATENCIES)]
        words += ["--metric-percentiles", ",".join(map(str, PERCENTILES)), "--ready-check-timeout-sec", "0"]
        words += ["--save-result", "--save-detailed", "--disable-tqdm"]
        words += ["--result-dir", str(file.parent), "--result-filename", file.name]
        words += ["--extra-body", json.dumps(own.extra)] if own.extra else []
        return [*words, *self.flags]

    def run(self, server: Server, own: Pass, file: Path, limit_s: float) -> Outcome:
        """Run the client once; its result file and log stay in the folder of ``file``.

        Raises:
            OverlayError: the client cannot be started, takes longer than ``limit_s``, fails, or leaves a
                result that is none.
        """
        file.parent.mkdir(parents=True, exist_ok=True)
        file.unlink(missing_ok=True)
        log = file.with_suffix(".log")
        command = self.command(server, own, file)
        with log.open("wb") as output:
            status = _run(command, output, limit_s)
        if status is None:
            raise OverlayError(
                f"{server.name}, {own.point.name}: the run took too long",
                seen=f"more than {limit_s:g} s for {own.point.prompts} requests",
                wanted="a server that keeps up, or a longer limit",
                fix="look at the server, or give run_timeout_s a larger value",
            )
        if status != 0 or not file.is_file():
            raise OverlayError(
                f"{server.name}, {own.point.name}: the client failed",
                seen=f"exit status {status}; {log_end(log)}",
                wanted="a finished run",
                fix=f"read {log}",
            )
        return read_outcome(file, own)


def _run(command: Sequence[str], output: Any, limit_s: float) -> int | None:
    try:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        raise OverlayError(
            "the benchmark client cannot be started",
            seen=f"{command[0]}: {error.strerror}",
            wanted="vllm on the path",
            fix="give --client, for example 'python -m vllm.entrypoints.cli.main'",
        ) from None
    guard = GroupGuard(process.pid, 0)
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        end_group(process, STOP_TIMEOUT_S)
        return None
    except BaseException:
        # The client must not go on loading a server that nobody measures any more.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    finally:
        guard.stop()


@dataclass(frozen=True)
class Outcome:
    """One run of the client: figures by quantity, its requests, and the answers' texts."""

    figures: Mapping[str, float]
    requests: tuple[Request, ...]
    texts: tuple[str, ...]

    @property
    def failed(self) -> tuple[str, ...]:
        """The errors of the requests that failed."""
        return tuple(request.error for request in self.requests if request.error)


def read_outcome(file: Path, own: Pass) -> Outcome:
    """The client's result file.

    Raises:
        OverlayError: a file that is no result, another number of requests, or no request that ended well.
    """
    try:
        value: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        outcome = Outcome(_figures(value), tuple(_requests(value)), tuple(value["generated_texts"]))
        completed = int(value["completed"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _no_result(file, f"{type(error).__name__}: {error}", "the result of vllm bench serve") from None
    if len(outcome.requests) != own.point.prompts:
        raise _no_result(file, f"{len(outcome.requests)} requests", f"{own.point.prompts}")
    if not completed:
        first = next(iter(outcome.failed), "none said why")
        raise OverlayError(
            f"{own.point.name}: every request failed",
            seen=first.strip().splitlines()[-1] if first.strip() else first,
            wanted=f"{own.point.prompts} answers",
            fix=f"look at the server's log; the client's result is kept in {file}",
        )
    return outcome


def _no_result(file: Path, seen: str, wanted: str) -> OverlayError:
    return OverlayError(
        f"{file} is no result of the run",
        seen=seen,
        wanted=wanted,
        fix="run it again with the pinned base's client",
    )


def _figures(value: Mapping[str, Any]) -> dict[str, float]:
    figures = {"output_tok_s": value["output_throughput"], "total_tok_s": value["total_token_throughput"]}
    for name in LATENCIES:
        figures[f"{name}_mean_ms"] = value[f"mean_{name}_ms"]
        figures |= {f"{name}_p{p}_ms": value[f"p{p}_{name}_ms"] for p in PERCENTILES}
    # A latency that no request had, as the inter-token one of answers of one token, is NaN or 0.
    return {key: float(number) for key, number in figures.items() if math.isfinite(number) and number > 0}


def _requests(value: Mapping[str, Any]) -> list[Request]:
    columns = (value[name] for name in ("input_lens", "output_lens", "ttfts", "itls", "errors"))
    return [
        Request(
            input_tokens=int(length),
            output_tokens=int(made),
            ttft_ms=1000 * ttft if made and not error else None,
            itl_ms=1000 * sum(gaps) / len(gaps) if gaps and not error else None,
            error=str(error or ""),
        )
        for length, made, ttft, gaps, error in zip(*columns, strict=True)
    ]
