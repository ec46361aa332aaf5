# SPDX-License-Identifier: Apache-2.0
"""An OpenAI-compatible server that answers by script, with vLLM's metrics, and that can be told to fail.

It stands for a vLLM server in the tests of what measures one. A prompt whose text was seen is a prefix hit;
every answer has ``max_tokens`` tokens, sent one an interval. As a program it serves until it is ended.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import CollectorRegistry, Counter, generate_latest

DRAFTS = 5


@dataclass
class Script:
    """How it behaves.

    Attributes:
        interval_s: between two tokens.
        accepted: drafts that a verification accepts.
        drop_every: each such completion is cut off without an answer; 0 for none.
        die_after: completions before the process ends; 0 for never.
        metrics: ``good``, ``malformed``, ``foreign``, ``missing``, ``slow``, ``without counters``, or a page
            with one counter that is ``not a number``, ``without end``, ``below zero`` or of ``no position``.
        kernel_share: of the decode steps, those on our kernels.
        text: of each token.
        slow_s: before each answer's first token.
        answers: makes the text of an answer from its prompt.
        on_profile: is called with ``start`` and ``stop``; None for a server without a profiler.
    """

    interval_s: float = 0.002
    accepted: float = 2.5
    drop_every: int = 0
    die_after: int = 0
    metrics: str = "good"
    kernel_share: float = 1.0
    text: str = " word"
    slow_s: float = 0.0
    answers: Callable[[str], str] | None = None
    on_profile: Callable[[str], None] | None = None


class ScriptedServer(ThreadingHTTPServer):
    """The server; ``with`` starts and stops it. ``url`` is where it answers."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, script: Script | None = None, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.script = script or Script()
        self.completions = 0
        self.bodies: list[dict] = []
        self.seen: set[str] = set()
        self.lock = threading.Lock()
        self.registry = CollectorRegistry()
        self.counters = {
            name: Counter(f"vllm:{name}", name, labels, registry=self.registry)
            for name, labels in {
                "spec_decode_num_drafts": ["engine"],
                "spec_decode_num_accepted_tokens": ["engine"],
                "spec_decode_num_accepted_tokens_per_pos": ["engine", "position"],
                "prefix_cache_queries": ["engine"],
                "prefix_cache_hits": ["engine"],
                "generation_tokens": ["engine"],
                "specialized_decode_taken_steps": ["kernels", "role", "reason"],
                "specialized_decode_declined_steps": ["kernels", "role", "reason"],
            }.items()
        }
        for counter in self.counters.values():
            if counter._labelnames == ("engine",):
                counter.labels("0")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def __enter__(self) -> ScriptedServer:
        self.thread = threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()
        self.thread.join()

    def handle_error(self, *_: object) -> None:
        """A client that hung up is no news."""

    def count(self, body: dict) -> int:
        """Account for one completion; its number, from 1."""
        script, prompt = self.script, str(body.get("prompt") or body.get("messages"))
        key = hashlib.sha256((prompt + str(body.get("cache_salt"))).encode()).hexdigest()
        length, made = len(prompt.split()) + 1, int(body.get("max_tokens") or 16)
        drafts = made / (1 + script.accepted)
        with self.lock:
            self.completions += 1
            self.bodies.append(body)
            add = lambda name, value, *labels: self.counters[name].labels(*labels).inc(value)  # noqa: E731
            add("spec_decode_num_drafts", drafts, "0")
            add("spec_decode_num_accepted_tokens", drafts * script.accepted, "0")
            for position in range(DRAFTS):
                share = min(1.0, max(0.0, script.accepted - position))
                add("spec_decode_num_accepted_tokens_per_pos", drafts * share, "0", str(position))
            add("prefix_cache_queries", length, "0")
            add("prefix_cache_hits", length if key in self.seen else 0, "0")
            add("generation_tokens", made, "0")
            if script.metrics != "without counters":
                add("specialized_decode_taken_steps", drafts * script.kernel_share, "mono", "target", "")
                declined = ("specialized_decode_declined_steps", "mono", "target")
                add(declined[0], 1, *declined[1:], "not decode only")
                add(declined[0], drafts * (1 - script.kernel_share), *declined[1:], "sliding window")
            self.seen.add(key)
            return self.completions


class Handler(BaseHTTPRequestHandler):
    server: ScriptedServer

    def log_message(self, *_: object) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        if self.path == "/metrics":
            self._metrics()
        elif self.path == "/v1/models":
            self._send(json.dumps({"object": "list", "data": [{"id": "tiny", "object": "model"}]}))
        else:
            self._send(
                "" if self.path == "/health" else "no such page", 200 if self.path == "/health" else 404
            )

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or b"{}")
        script = self.server.script
        if self.path == "/tokenize":
            self._send(json.dumps({"count": len(body["prompt"].split())}))
            return
        if self.path in ("/start_profile", "/stop_profile"):
            if script.on_profile is not None:
                script.on_profile(self.path[1:].removesuffix("_profile"))
            self._send("", 200 if script.on_profile else 404)
            return
        salt = body.get("cache_salt") or ""
        if len(salt) > 128 or set(salt) & set("@/\\\0"):  # as vLLM refuses it
            self._send(json.dumps({"error": {"message": "cache_salt", "type": "BadRequestError"}}), 400)
            return
        number = self.server.count(body)
        if script.die_after and number > script.die_after:
            os._exit(3)
        if script.drop_every and number % script.drop_every == 0:
            self.connection.close()
            return
        time.sleep(script.slow_s)
        if body.get("stream"):
            self._stream(body)
        else:
            self._answer(body)

    def _text(self, body: dict) -> str | None:
        prompt = str(body.get("prompt") or body.get("messages"))
        return self.server.script.answers(prompt) if self.server.script.answers else None

    def _answer(self, body: dict) -> None:
        made = int(body.get("max_tokens") or 16)
        text = self._text(body)
        text = self.server.script.text * made if text is None else text
        choice = {"index": 0, "finish_reason": "length", "text": text}
        if "messages" in body:
            choice |= {"message": {"role": "assistant", "content": text}}
        length = len(str(body.get("prompt") or "").split())
        usage = {"prompt_tokens": length, "completion_tokens": made, "total_tokens": length + made}
        self._send(json.dumps({"id": "1", "object": "completion", "choices": [choice], "usage": usage}))

    def _stream(self, body: dict) -> None:
        made = int(body.get("max_tokens") or 16)
        chat = "messages" in body
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        for _ in range(made):
            time.sleep(self.server.script.interval_s)
            text = self.server.script.text
            piece = {"delta": {"content": text}} if chat else {"text": text}
            self._event({"id": "1", "choices": [{"index": 0, "finish_reason": None, **piece}]})
        length = len(str(body.get("prompt") or "").split())
        usage = {"prompt_tokens": length, "completion_tokens": made, "total_tokens": length + made}
        self._event({"id": "1", "choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def _event(self, value: dict) -> None:
        self.wfile.write(f"data: {json.dumps(value)}\n\n".encode())
        self.wfile.flush()

    def _metrics(self) -> None:
        kind = self.server.script.metrics
        if kind == "slow":
            time.sleep(5)
        pages = {
            "malformed": 'vllm:spec_decode_num_drafts_total{engine="0" 12 and more\n',
            "foreign": "other_total 3\n",
            "not a number": "vllm:spec_decode_num_drafts_total NaN\n",
            "without end": "vllm:generation_tokens_total +Inf\n",
            "below zero": "vllm:prefix_cache_queries_total -1\n",
            "no position": 'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="x"} 1\n',
        }
        page = pages.get(kind) or generate_latest(self.server.registry).decode()
        self._send(page, 404 if kind == "missing" else 200)

    def _send(self, text: str, status: int = 200) -> None:
        content = text.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def solver(wrong: Callable[[str], bool] = lambda prompt: False) -> Callable[[str], str]:
    """Answers the made problems and the needles rightly, but where ``wrong`` says otherwise."""

    def answer(prompt: str) -> str:
        if "cellar?" in prompt:
            found = re.search(r"cellar is (\d+)", prompt)
            return " lost." if wrong(prompt) or found is None else f" {found[1]}."
        boxes, each, eaten = map(int, re.findall(r"\d+", prompt.rpartition("Question:")[2]))
        return f" It is so.\n#### {boxes * each - eaten + wrong(prompt)}"

    return answer


def main() -> None:
    # Words of a file, so that a test changes how a server behaves and not its command.
    parser = argparse.ArgumentParser(fromfile_prefix_chars="@")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--interval-s", type=float, default=0.002)
    parser.add_argument("--die-after", type=int, default=0)
    parser.add_argument("--slow-s", type=float, default=0.0)
    parser.add_argument("--solve", action="store_true", help="answer the made problems and needles")
    parser.add_argument("--wrong", help="and wrongly where the last question matches this expression")
    words = parser.parse_args()
    script = Script(interval_s=words.interval_s, die_after=words.die_after, slow_s=words.slow_s)
    if words.solve:
        wrong = re.compile(words.wrong or r"(?!)")
        script.answers = solver(lambda prompt: bool(wrong.search(prompt.rpartition("Question:")[2])))
    ScriptedServer(script, words.port).serve_forever(0.02)


if __name__ == "__main__":
    main()
