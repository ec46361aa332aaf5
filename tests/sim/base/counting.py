# SPDX-License-Identifier: Apache-2.0
"""Count the base's launches for the timing model: ``python tests/sim/base/counting.py OUT.json [RATIO ...]``.

Weights of experts are zero pages that nobody writes: what a launch executes depends on the router's picks and
on shapes, not on the experts' values, and so cases of 48 rows need little memory. Checks are off. A case that
OUT.json holds already is kept, as long as the sources that it was counted from are the same.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from base import ffn, kernels, layer
from cdnasim import Device
from cdnasim.counts import counts
from cdnasim.native import CHECKS

ROWS, TPS, ARCH = (6, 12, 24, 48), (4, 2), "gfx950"
OFF = dict.fromkeys(CHECKS, "off")


def device_options() -> dict[str, Any]:
    return {"checks": OFF, "seed": 1}


def count_ffn(rows: int, tp: int) -> dict[str, Any]:
    device = Device(ARCH, ranks=tp, **device_options())
    device.count_handoffs()
    run = ffn.FfnRun(ffn.FfnCase(rows, tp, ARCH, defer=True), device)
    return {"ffn": counts(run.launch(), ARCH).as_json()}


def count_layer(rows: int, tp: int, ratio: int) -> dict[str, Any]:
    run = layer.LayerRun(rows, tp, ARCH, ratio, **device_options())
    run.device.count_handoffs()
    first = counts(run.run_k1(), ARCH)
    a = run.ranks[0]
    run.ffn.data |= {
        "part": torch.zeros(tp, rows, ffn.HIDDEN, dtype=torch.bfloat16),
        "residual": a["res_out"].clone(),
        "post": a["post_out"].clone(),
        "comb": a["comb_out"].clone(),
        "pre": a["pre_out"].clone(),
    }
    second = counts(run.k2_run().launch(), ARCH)
    return {"k1": first.as_json(), "k2": second.as_json()}


def main() -> None:
    out, ratios = Path(sys.argv[1]), [int(x) for x in sys.argv[2:]] or [1]
    source = kernels.source_hash()
    data: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    if data.get("source") != source:
        data = {"source": source, "arch": ARCH, "cases": {}}
    for rows in ROWS:
        for tp in TPS:
            jobs = {f"ffn tp{tp} {rows}": lambda rows=rows, tp=tp: count_ffn(rows, tp)}
            for ratio in ratios:
                jobs[f"layer tp{tp} {rows} ratio{ratio}"] = lambda rows=rows, tp=tp, ratio=ratio: count_layer(
                    rows, tp, ratio
                )
            for name, job in jobs.items():
                if name in data["cases"]:
                    continue
                started = time.monotonic()
                data["cases"][name] = job()
                out.write_text(json.dumps(data, indent=1) + "\n")
                total = sum(sum(x["instructions"].values()) for x in data["cases"][name].values())
                print(f"{name}: {total / 1e6:.1f} M a rank, {time.monotonic() - started:.0f} s", flush=True)
                gc.collect()


if __name__ == "__main__":
    main()
