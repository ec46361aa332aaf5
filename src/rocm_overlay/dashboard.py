# SPDX-License-Identifier: Apache-2.0
"""The Grafana dashboard of a server and of our kernels' counters, as data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# {model} is filled in by Grafana's own variable.
BY_MODEL = '{model_name=~"$model"}'
WIDTH, HEIGHT, COLUMNS = 8, 8, 3


@dataclass(frozen=True)
class Panel:
    """One graph: a title, Grafana's unit, and its queries with their legends."""

    title: str
    unit: str
    queries: Sequence[tuple[str, str]]
    text: str = ""


def rate(counter: str, by: str = "", labels: str = BY_MODEL) -> str:
    """A counter's growth a second, summed."""
    return f"sum{f' by ({by}) ' if by else ''}(rate({counter}{labels}[$__rate_interval]))"


def quantiles(histogram: str) -> list[tuple[str, str]]:
    """p50, p90 and p99 of a histogram."""
    bucket = rate(f"{histogram}_bucket", "le")
    return [(f"histogram_quantile({share / 100}, {bucket})", f"p{share}") for share in (50, 90, 99)]


OURS = '{role=~"$role"}'
TAKEN = "vllm:specialized_decode_taken_steps_total"
DECLINED = "vllm:specialized_decode_declined_steps_total"
ROWS = "vllm:specialized_decode_taken_rows_total"
DRAFTS = "vllm:spec_decode_num_drafts_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
BY_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"

PANELS = (
    Panel("Inter-token latency", "s", quantiles("vllm:inter_token_latency_seconds")),
    Panel("Time to first token", "s", quantiles("vllm:time_to_first_token_seconds")),
    Panel("End-to-end latency", "s", quantiles("vllm:e2e_request_latency_seconds")),
    Panel(
        "Tokens",
        "short",
        [
            (rate("vllm:generation_tokens_total"), "generated/s"),
            (rate("vllm:prompt_tokens_total"), "prompt/s"),
        ],
    ),
    Panel(
        "Requests",
        "short",
        [
            (f"sum(vllm:num_requests_running{BY_MODEL})", "running"),
            (f"sum(vllm:num_requests_waiting{BY_MODEL})", "waiting"),
        ],
    ),
    Panel(
        "KV cache and prefix hits",
        "percentunit",
        [
            (f"max(vllm:kv_cache_usage_perc{BY_MODEL})", "KV cache used"),
            (
                f"{rate('vllm:prefix_cache_hits_total')} / {rate('vllm:prefix_cache_queries_total')}",
                "prefix hits",
            ),
        ],
    ),
    Panel(
        "Acceptance length", "short", [(f"1 + {rate(ACCEPTED)} / {rate(DRAFTS)}", "tokens a verification")]
    ),
    Panel(
        "Acceptance by position",
        "percentunit",
        [
            (
                f"{rate(BY_POSITION, 'position')} / ignoring (position) group_left {rate(DRAFTS)}",
                "{{position}}",
            )
        ],
    ),
    Panel(
        "Requests ended",
        "short",
        [
            (rate("vllm:request_success_total", "finished_reason"), "{{finished_reason}}"),
            (rate("vllm:num_preemptions_total"), "preemptions"),
        ],
    ),
    Panel(
        "Steps on our kernels",
        "percentunit",
        [(f"{rate(TAKEN, '', OURS)} / ({rate(TAKEN, '', OURS)} + {rate(DECLINED, '', OURS)})", "share")],
        "Of all steps, those with prefills too. Served where PROMETHEUS_MULTIPROC_DIR is set for the server.",
    ),
    Panel("Declined steps by reason", "short", [(rate(DECLINED, "reason", OURS), "{{reason}}")]),
    Panel(
        "Rows a step on our kernels", "short", [(f"{rate(ROWS, '', OURS)} / {rate(TAKEN, '', OURS)}", "rows")]
    ),
)


def queries() -> list[str]:
    """Every query of the dashboard."""
    return [expression for panel in PANELS for expression, _ in panel.queries]


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana imports it."""
    return {
        "uid": "vllm-openai-rocm",
        "title": "vllm-openai-rocm",
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {
            "list": [
                _variable("model", "label_values(vllm:num_requests_running, model_name)"),
                _variable("role", f"label_values({TAKEN}, role)"),
            ]
        },
        "panels": [_panel(index, panel) for index, panel in enumerate(PANELS)],
    }


def dashboard_text() -> str:
    """The dashboard as JSON text."""
    return json.dumps(dashboard(), indent=1) + "\n"


def _variable(name: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "prometheus"},
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _panel(index: int, panel: Panel) -> dict[str, Any]:
    place = {"x": WIDTH * (index % COLUMNS), "y": HEIGHT * (index // COLUMNS), "w": WIDTH, "h": HEIGHT}
    return {
        "id": index + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.text,
        "datasource": {"type": "prometheus", "uid": "prometheus"},
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + number), "expr": expression, "legendFormat": legend}
            for number, (expression, legend) in enumerate(panel.queries)
        ],
    }
