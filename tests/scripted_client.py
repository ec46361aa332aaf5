# SPDX-License-Identifier: Apache-2.0
"""Stands for ``vllm bench serve`` where a test is about what surrounds it: same flags, same result fields.

It sends real requests, and starts in a tenth of a second where vLLM's client takes many. That both write the
same fields is tested with vLLM's own client.
"""

import argparse
import http.client
import itertools
import json
import random
import sys
import threading
import time
import urllib.parse
from pathlib import Path

FIELDS = {
    "base-url": str, "model": str, "tokenizer": str, "backend": str, "dataset-name": str,
    "random-input-len": int, "random-output-len": int, "max-concurrency": int, "num-prompts": int,
    "seed": int, "percentile-metrics": str, "metric-percentiles": str, "ready-check-timeout-sec": int,
    "result-dir": Path, "result-filename": str, "extra-body": json.loads,
}  # fmt: skip


def one_request(url, body, result, index):
    started = time.perf_counter()
    times, text = [], ""
    try:
        connection = http.client.HTTPConnection(url.hostname, url.port, timeout=60)
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        for line in answer:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                if event["choices"]:
                    times.append(time.perf_counter())
                    text += event["choices"][0]["text"]
        gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
        result[index] = (len(times), times[0] - started, gaps, times[-1] - started, text, "")
    except (OSError, http.client.HTTPException, IndexError) as error:
        result[index] = (0, 0.0, [], 0.0, "", f"{type(error).__name__}: {error}")


def percentile(values, share):
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share / 100 * len(ordered)))] if ordered else 0.0


def statistics_of(name, values, percentiles):
    found = {f"mean_{name}_ms": 1000 * sum(values) / len(values) if values else 0.0}
    return found | {f"p{p}_{name}_ms": 1000 * percentile(values, p) for p in percentiles}


def main():
    assert sys.argv[1:3] == ["bench", "serve"], sys.argv
    parser = argparse.ArgumentParser()
    for name, kind in FIELDS.items():
        parser.add_argument(f"--{name}", type=kind)
    for name in ("ignore-eos", "save-result", "save-detailed", "disable-tqdm", "trust-remote-code"):
        parser.add_argument(f"--{name}", action="store_true")
    words = parser.parse_args(sys.argv[3:])
    source = random.Random(words.seed)
    prompts = [
        " ".join(f"w{source.randrange(10**6)}" for _ in range(words.random_input_len))
        for _ in range(words.num_prompts)
    ]
    common = {"model": words.model, "max_tokens": words.random_output_len, "stream": True}
    common |= words.extra_body or {}
    url, found = urllib.parse.urlparse(words.base_url), [None] * len(prompts)
    queue = iter(enumerate(prompts))
    lock = threading.Lock()

    def work():
        while True:
            with lock:
                index, prompt = next(queue, (None, None))
            if prompt is None:
                return
            one_request(url, common | {"prompt": prompt}, found, index)

    started = time.perf_counter()
    threads = [threading.Thread(target=work) for _ in range(words.max_concurrency)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    duration = time.perf_counter() - started
    good = [one for one in found if not one[-1]]
    made = sum(one[0] for one in good)
    result = {
        "completed": len(good),
        "failed": len(found) - len(good),
        "output_throughput": made / duration,
        "total_token_throughput": (made + words.random_input_len * len(good)) / duration,
        "input_lens": [words.random_input_len] * len(found),
        "output_lens": [one[0] for one in found],
        "ttfts": [one[1] for one in found],
        "itls": [one[2] for one in found],
        "generated_texts": [one[4] for one in found],
        "errors": [one[5] for one in found],
    }
    percentiles = [int(p) for p in words.metric_percentiles.split(",")]
    columns = {
        "ttft": [one[1] for one in good],
        "tpot": [sum(one[2]) / len(one[2]) for one in good if one[2]],
        "itl": [gap for one in good for gap in one[2]],
        "e2el": [one[3] for one in good],
    }
    for name, values in columns.items():
        result |= statistics_of(name, values, percentiles)
    (words.result_dir / words.result_filename).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
