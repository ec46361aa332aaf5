# SPDX-License-Identifier: Apache-2.0
"""A recipe's replicas behind vLLM's router: one node by compose, a fleet by Kubernetes manifests.

The router is vLLM's own (package vllm-router). Its ``cache_aware`` policy sends a prompt to the replica that
served its longest known prefix, so that agents' growing prompts meet their cache. A replica is ready once it
has answered warm-up requests (``rocm-overlay ready``), not when its port opens.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from rocm_overlay import container
from rocm_overlay.dashboard import dashboard_text
from rocm_overlay.errors import EXIT_FAILED_CHECK, EXIT_OK, OverlayError
from rocm_overlay.measure import options
from rocm_overlay.measure.server import check_url
from rocm_overlay.project import Project
from rocm_overlay.recipe import Recipe, load
from rocm_overlay.textio import write_text_atomically

ROUTER_VERSION = "0.1.17"
ROUTER_IMAGE = f"vllm-router:{ROUTER_VERSION}"
ROUTER_PORT, ROUTER_METRICS_PORT = 8080, 29000
POLICY = "cache_aware"
FIRST_PORT = 8000
GPUS_A_NODE = 8
NAME = "vllm-openai-rocm"
# Reading the weights and capturing graphs.
START_S, PROBE_S, GRACE_S, DRAIN_S = 3600, 10, 120, 20
COUNTERS = "/run/vllm-metrics"
MARKER = "/tmp/vllm-openai-rocm-warm"
# A container that is started again keeps its /tmp, but no tmpfs: its new server has to be warmed up anew.
NODE_MARKER_FOLDER = "/run/vllm-ready"
ROUTER_DOCKERFILE = f"""\
# SPDX-License-Identifier: Apache-2.0
# The router's image: vLLM's own package, nothing of ours. Name the base by digest where it is deployed.
ARG PYTHON=python:3.12-slim
FROM ${{PYTHON}}
RUN pip install --no-cache-dir vllm-router=={ROUTER_VERSION}
USER 65534
ENTRYPOINT ["vllm-router"]
"""


def ready_words(port: int, marker: str = MARKER) -> list[str]:
    """The probe that a replica is ready."""
    return ["rocm-overlay", "ready", "--url", f"http://127.0.0.1:{port}", "--marker", marker]


def compose(recipe: Recipe, image: str, node_gpus: int = GPUS_A_NODE) -> dict[str, Any]:
    """The compose file of one node: as many replicas as it has room for, router, Prometheus, Grafana.

    Raises:
        OverlayError: a node with fewer GPUs than one replica takes.
    """
    count = node_gpus // recipe.gpus
    if count < 1:
        raise OverlayError(
            f"{recipe.name} does not fit the node",
            seen=f"{node_gpus} GPUs",
            wanted=f"at least {recipe.gpus}",
            fix="take another recipe",
        )
    ports = [FIRST_PORT + index for index in range(count)]
    services: dict[str, Any] = {}
    for index, port in enumerate(ports):
        own = yaml.safe_load(container.compose_text(recipe, ["--port", str(port)], image))["services"][
            "server"
        ]
        first = index * recipe.gpus
        cards = ",".join(str(card) for card in range(first, first + recipe.gpus))
        own["environment"] = [*own["environment"], f"HIP_VISIBLE_DEVICES={cards}"]
        own["environment"] += [f"PROMETHEUS_MULTIPROC_DIR={COUNTERS}"]
        own["tmpfs"] = [COUNTERS, NODE_MARKER_FOLDER]
        own["healthcheck"] = {
            "test": ["CMD", *ready_words(port, f"{NODE_MARKER_FOLDER}/warm")],
            "interval": f"{PROBE_S}s",
            "timeout": "120s",
            "retries": 3,
            "start_period": f"{START_S}s",
        }
        own["restart"] = "unless-stopped"
        # Reached through the router alone.
        own.pop("ports")
        services[f"server-{index}"] = own
    services["router"] = {
        "image": ROUTER_IMAGE,
        "build": {"context": "router"},
        "command": [
            *("--host", "0.0.0.0", "--port", str(ROUTER_PORT), "--policy", POLICY),
            *("--prometheus-host", "0.0.0.0", "--prometheus-port", str(ROUTER_METRICS_PORT)),
            *("--worker-urls", *(f"http://server-{index}:{port}" for index, port in enumerate(ports))),
        ],
        "ports": [f"{ROUTER_PORT}:{ROUTER_PORT}"],
        "depends_on": {f"server-{index}": {"condition": "service_healthy"} for index in range(count)},
        "restart": "unless-stopped",
    }
    services["prometheus"] = {
        "image": "prom/prometheus:v3.5.0",
        "volumes": ["./prometheus.yml:/etc/prometheus/prometheus.yml:ro"],
    }
    services["grafana"] = {
        "image": "grafana/grafana:12.1.0",
        "ports": ["3000:3000"],
        "volumes": [
            "./grafana/datasource.yml:/etc/grafana/provisioning/datasources/datasource.yml:ro",
            "./grafana/provider.yml:/etc/grafana/provisioning/dashboards/provider.yml:ro",
            "./grafana/dashboard.json:/var/lib/grafana/dashboards/dashboard.json:ro",
        ],
    }
    return {"services": services, "volumes": {container.CACHE_VOLUME: {"name": container.CACHE_VOLUME}}}


def prometheus(ports: Sequence[int]) -> dict[str, Any]:
    """What the node's Prometheus scrapes: every replica and the router."""
    servers = [f"server-{index}:{port}" for index, port in enumerate(ports)]
    return {
        "global": {"scrape_interval": "10s"},
        "scrape_configs": [
            {"job_name": "vllm", "static_configs": [{"targets": servers}]},
            {"job_name": "router", "static_configs": [{"targets": [f"router:{ROUTER_METRICS_PORT}"]}]},
        ],
    }


DATASOURCE = {
    "apiVersion": 1,
    "datasources": [
        {"name": "Prometheus", "uid": "prometheus", "type": "prometheus", "url": "http://prometheus:9090"}
    ],
}
PROVIDER = {
    "apiVersion": 1,
    "providers": [{"name": NAME, "type": "file", "options": {"path": "/var/lib/grafana/dashboards"}}],
}


def _labels(part: str) -> dict[str, str]:
    return {"app.kubernetes.io/name": NAME, "app.kubernetes.io/component": part}


def _scraped(port: int) -> dict[str, str]:
    return {"prometheus.io/scrape": "true", "prometheus.io/port": str(port), "prometheus.io/path": "/metrics"}


def _deployment(
    part: str, replicas: int, port: int, strategy: dict[str, Any], spec: dict[str, Any]
) -> dict[str, Any]:
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": f"{NAME}-{part}", "labels": _labels(part)},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": _labels(part)},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": strategy},
            # An update that does not become ready is one that failed.
            "progressDeadlineSeconds": 2 * START_S,
            "template": {"metadata": {"labels": _labels(part), "annotations": _scraped(port)}, "spec": spec},
        },
    }


def manifests(recipe: Recipe, image: str, replicas: int) -> dict[str, dict[str, Any]]:
    """The Kubernetes objects by file name, ``kustomization.yaml`` among them."""
    objects = {
        "server.yaml": server_deployment(recipe, image, replicas),
        "server-budget.yaml": {
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": {"name": f"{NAME}-server", "labels": _labels("server")},
            "spec": {"maxUnavailable": 1, "selector": {"matchLabels": _labels("server")}},
        },
        "router.yaml": router_deployment(),
        "router-service.yaml": {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": NAME, "labels": _labels("router")},
            "spec": {
                "selector": _labels("router"),
                "ports": [{"name": "http", "port": 80, "targetPort": "http"}],
            },
        },
        **_discovery(),
    }
    return {
        **objects,
        "kustomization.yaml": {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            "resources": list(objects),
        },
    }


def server_deployment(recipe: Recipe, image: str, replicas: int) -> dict[str, Any]:
    """The replicas: one pod each, ready after warm-up, replaced one by one."""
    words = ["--recipe", recipe.name, "--", "--port", str(FIRST_PORT)]
    probe = {"exec": {"command": ready_words(FIRST_PORT)}, "periodSeconds": PROBE_S, "timeoutSeconds": 120}
    health = {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": PROBE_S, "timeoutSeconds": 5}
    server = {
        "name": "server",
        "image": image,
        "args": words,
        "ports": [{"name": "http", "containerPort": FIRST_PORT}],
        "env": [
            {"name": "PROMETHEUS_MULTIPROC_DIR", "value": COUNTERS},
            {
                "name": container.TOKEN_VARIABLE,
                "valueFrom": {"secretKeyRef": {"name": "huggingface", "key": "token", "optional": True}},
            },
        ],
        "resources": {"limits": {"amd.com/gpu": str(recipe.gpus)}},
        "startupProbe": {**health, "failureThreshold": START_S // PROBE_S},
        "readinessProbe": {**probe, "failureThreshold": 3},
        "livenessProbe": {**health, "failureThreshold": 6},
        # The router takes a pod that ends off its list; what it sent until then is answered.
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(DRAIN_S)]}}},
        "securityContext": {"seccompProfile": {"type": "Unconfined"}},
        "volumeMounts": [
            {"name": "shm", "mountPath": "/dev/shm"},
            {"name": "counters", "mountPath": COUNTERS},
            {"name": "weights", "mountPath": f"{container.CONTAINER_HOME}/{container.WEIGHTS}"},
            {"name": "cache", "mountPath": container.CACHE_FOLDER},
        ],
    }
    spec = {
        "terminationGracePeriodSeconds": GRACE_S,
        "containers": [server],
        "volumes": [
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
            {"name": "counters", "emptyDir": {"medium": "Memory"}},
            {"name": "weights", "persistentVolumeClaim": {"claimName": "huggingface", "readOnly": False}},
            {"name": "cache", "emptyDir": {}},
        ],
    }
    # A node's cards are all taken: a new replica has room once an old one is gone.
    return _deployment("server", replicas, FIRST_PORT, {"maxSurge": 0, "maxUnavailable": 1}, spec)


def router_deployment() -> dict[str, Any]:
    """The router, which finds ready replicas by their labels."""
    selector = [f"{key}={value}" for key, value in _labels("server").items()]
    probe = {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": PROBE_S}
    router = {
        "name": "router",
        "image": ROUTER_IMAGE,
        "args": [
            *("--host", "0.0.0.0", "--port", str(ROUTER_PORT), "--policy", POLICY),
            *("--prometheus-host", "0.0.0.0", "--prometheus-port", str(ROUTER_METRICS_PORT)),
            *("--service-discovery", "--service-discovery-port", str(FIRST_PORT)),
            # Without it the router lists every namespace's pods, which its Role does not let it.
            *("--service-discovery-namespace", "$(NAMESPACE)", "--selector", *selector),
        ],
        "env": [{"name": "NAMESPACE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.namespace"}}}],
        "ports": [
            {"name": "http", "containerPort": ROUTER_PORT},
            {"name": "metrics", "containerPort": ROUTER_METRICS_PORT},
        ],
        "readinessProbe": probe,
        "livenessProbe": {**probe, "failureThreshold": 6},
        "resources": {"requests": {"cpu": "2", "memory": "2Gi"}, "limits": {"memory": "8Gi"}},
        "securityContext": {"runAsNonRoot": True, "runAsUser": 65534, "allowPrivilegeEscalation": False},
    }
    spec = {"serviceAccountName": f"{NAME}-router", "containers": [router]}
    # One router knows all prefixes; a second one beside it during an update knows none yet.
    return _deployment("router", 1, ROUTER_METRICS_PORT, {"maxSurge": 1, "maxUnavailable": 0}, spec)


def _discovery() -> dict[str, dict[str, Any]]:
    """What lets the router list pods: an account, a role and their binding."""
    metadata = {"name": f"{NAME}-router", "labels": _labels("router")}
    group = "rbac.authorization.k8s.io"
    rules = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}]
    return {
        "router-account.yaml": {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata},
        "router-role.yaml": {
            "apiVersion": f"{group}/v1",
            "kind": "Role",
            "metadata": metadata,
            "rules": rules,
        },
        "router-binding.yaml": {
            "apiVersion": f"{group}/v1",
            "kind": "RoleBinding",
            "metadata": metadata,
            "roleRef": {"apiGroup": group, "kind": "Role", "name": metadata["name"]},
            "subjects": [{"kind": "ServiceAccount", "name": metadata["name"]}],
        },
    }


def files(recipe: Recipe, image: str, node_gpus: int, replicas: int) -> dict[str, str]:
    """Every file of a deployment by its path."""

    def text(value: object) -> str:
        dumped: str = yaml.safe_dump(value, sort_keys=False, width=1000)
        return dumped

    node = compose(recipe, image, node_gpus)
    ports = [FIRST_PORT + index for index in range(node_gpus // recipe.gpus)]
    return {
        "compose.yaml": text(node),
        "prometheus.yml": text(prometheus(ports)),
        "router/Dockerfile": ROUTER_DOCKERFILE,
        "grafana/datasource.yml": text(DATASOURCE),
        "grafana/provider.yml": text(PROVIDER),
        "grafana/dashboard.json": dashboard_text(),
        **{f"kubernetes/{name}": text(own) for name, own in manifests(recipe, image, replicas).items()},
    }


def is_ready(url: str, marker: Path, timeout_s: float = 100.0) -> str:
    """Why a replica is not ready, empty where it is. When its health page first answers, it is warmed up."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=timeout_s):
            pass
        if marker.exists():
            return ""
        with urllib.request.urlopen(f"{url}/v1/models", timeout=timeout_s) as answer:
            model = json.loads(answer.read())["data"][0]["id"]
        for length in (8, 512):
            body = {"model": model, "prompt": " ".join(["warm"] * length), "max_tokens": 16, "temperature": 0}
            request = urllib.request.Request(
                f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                if not json.loads(answer.read())["choices"][0]["text"]:
                    return "the warm-up's answer is empty"
    except (OSError, ValueError, KeyError, IndexError, TypeError, http.client.HTTPException) as error:
        return f"{type(error).__name__}: {error}"
    marker.touch()
    return ""


def run_ready(arguments: argparse.Namespace) -> int:
    """The probe."""
    check_url(arguments.url, "--url")
    reason = is_ready(arguments.url.rstrip("/"), arguments.marker)
    if reason:
        print(f"not ready: {reason}", file=sys.stderr)
    return EXIT_FAILED_CHECK if reason else EXIT_OK


def run(arguments: argparse.Namespace) -> int:
    """Write a deployment's files."""
    from rocm_overlay.cli_recipe import built_image

    project = Project.find()
    recipe = load(project.recipes, arguments.recipe)
    image = arguments.image or built_image(recipe, project)
    for name, text in files(recipe, image, arguments.node_gpus, arguments.replicas).items():
        path = arguments.out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomically(path, text)
        print(path)
    return EXIT_OK


def register(subparsers: Any) -> None:
    """Add ``deploy`` and ``ready``."""
    parser = subparsers.add_parser(
        "deploy", help="replicas behind vLLM's router: compose and Kubernetes files"
    )
    parser.add_argument("recipe")
    parser.add_argument("--image", type=options.image, help="default: the name that make image gives it")
    parser.add_argument(
        "--node-gpus", type=options.count, default=GPUS_A_NODE, help="of the compose file's node"
    )
    parser.add_argument("--replicas", type=options.count, default=4, help="of the Kubernetes deployment")
    parser.add_argument("--out", type=Path, default=Path("build/deploy"))
    parser.set_defaults(run=run)
    ready = subparsers.add_parser("ready", help="a replica's readiness: healthy, and warmed up once")
    ready.add_argument("--url", required=True)
    ready.add_argument("--marker", type=Path, default=Path(MARKER), help="made after the warm-up")
    ready.set_defaults(run=run_ready)
