# SPDX-License-Identifier: Apache-2.0
"""Replicas behind a router: manifests that Kubernetes' own schemas take, probes that wait for the warm-up."""

import json
import re

import pytest
import yaml

from rocm_overlay import dashboard, deploy
from rocm_overlay.cli import main
from rocm_overlay.errors import OverlayError
from rocm_overlay.project import Project
from rocm_overlay.recipe import load
from tests.scripted_server import Script, ScriptedServer

PROJECT = Project.find()
IMAGE = "vllm-openai-rocm:test"
SOURCES = (
    *PROJECT.base.glob("vllm/v1/metrics/*.py"),
    PROJECT.base / "vllm/v1/spec_decode/metrics.py",
    PROJECT.root / "overlay/vllm/models/common/specialized_decode/metrics.py",
)


@pytest.fixture(scope="module")
def rendered():
    return deploy.files(load(PROJECT.recipes, "mi355x-tp2"), IMAGE, 8, 4)


def kubernetes(files):
    return {name: yaml.safe_load(text) for name, text in files.items() if name.startswith("kubernetes/")}


def test_every_object_fits_kubernetes_schemas(rendered):
    import kubernetes_validate

    objects = kubernetes(rendered)
    kustomization = objects.pop("kubernetes/kustomization.yaml")
    assert [f"kubernetes/{name}" for name in kustomization["resources"]] == list(objects)
    for value in objects.values():
        kubernetes_validate.validate(value, "1.31", strict=True)
    broken = kubernetes(rendered)["kubernetes/server.yaml"]
    broken["spec"]["replica"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, "1.31", strict=True)


def test_a_pod_is_ready_after_its_warm_up_and_replaced_when_there_is_room(rendered):
    spec = kubernetes(rendered)["kubernetes/server.yaml"]["spec"]
    (server,) = spec["template"]["spec"]["containers"]
    assert server["readinessProbe"]["exec"]["command"][:2] == ["rocm-overlay", "ready"]
    assert server["startupProbe"]["failureThreshold"] * server["startupProbe"]["periodSeconds"] == 3600
    assert server["resources"]["limits"] == {"amd.com/gpu": "2"}
    assert spec["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
    assert spec["template"]["metadata"]["annotations"]["prometheus.io/port"] == "8000"
    assert spec["template"]["spec"]["terminationGracePeriodSeconds"] > deploy.DRAIN_S


def test_the_router_finds_exactly_the_servers_pods(rendered):
    objects = kubernetes(rendered)
    (router,) = objects["kubernetes/router.yaml"]["spec"]["template"]["spec"]["containers"]
    words = router["args"]
    selector = dict(word.split("=") for word in words[words.index("--selector") + 1 :])
    labels = objects["kubernetes/server.yaml"]["spec"]["template"]["metadata"]["labels"]
    assert selector == labels != objects["kubernetes/router.yaml"]["spec"]["template"]["metadata"]["labels"]
    assert words[words.index("--policy") + 1] == "cache_aware"
    # Its Role is of its own namespace: no other one's pods may be listed.
    assert objects["kubernetes/router-role.yaml"]["kind"] == "Role"
    assert words[words.index("--service-discovery-namespace") + 1] == "$(NAMESPACE)"
    (variable,) = router["env"]
    assert variable["name"] == "NAMESPACE"
    assert variable["valueFrom"] == {"fieldRef": {"fieldPath": "metadata.namespace"}}
    assert (
        objects["kubernetes/router-service.yaml"]["spec"]["selector"]["app.kubernetes.io/component"]
        == "router"
    )


def test_a_node_is_filled_with_replicas_of_disjoint_cards(rendered):
    services = yaml.safe_load(rendered["compose.yaml"])["services"]
    servers = {name: own for name, own in services.items() if name.startswith("server-")}
    cards = [
        card
        for own in servers.values()
        for word in own["environment"]
        if word.startswith("HIP_VISIBLE_DEVICES=")
        for card in word.partition("=")[2].split(",")
    ]
    assert len(servers) == 4 and sorted(cards) == [str(card) for card in range(8)]
    router = services["router"]
    assert set(router["depends_on"]) == set(servers)
    urls = router["command"][router["command"].index("--worker-urls") + 1 :]
    targets = yaml.safe_load(rendered["prometheus.yml"])["scrape_configs"][0]["static_configs"][0]["targets"]
    assert urls == [f"http://{target}" for target in targets]
    for index, own in enumerate(servers.values()):
        assert own["command"][-1] == str(8000 + index) and "ports" not in own
        assert own["healthcheck"]["test"][:3] == ["CMD", "rocm-overlay", "ready"]
        # Gone when the container is started again, as the server that was warmed up is.
        marker = own["healthcheck"]["test"][own["healthcheck"]["test"].index("--marker") + 1]
        assert marker.rpartition("/")[0] in own["tmpfs"]


def test_files_that_others_name_are_there(rendered):
    services = yaml.safe_load(rendered["compose.yaml"])["services"]
    mounted = [
        v.split(":")[0][2:] for own in services.values() for v in own.get("volumes", []) if v.startswith("./")
    ]
    assert mounted and set(mounted) <= set(rendered)
    assert f"{services['router']['build']['context']}/Dockerfile" in rendered


def exported_names():
    """Metric names that the servers' sources define, as a page has them."""
    text = "".join(path.read_text() for path in SOURCES)
    names = set(re.findall(r'"(vllm:[a-z0-9_]+)"', text))
    for metric in ("taken_steps", "taken_rows", "declined_steps"):
        assert f'"{metric}"' in text
        names.add(f"vllm:specialized_decode_{metric}")
    return names


def unknown_metrics(queries):
    known = exported_names()
    named = {name for query in queries for name in re.findall(r"vllm:[a-z0-9_]+", query)}
    return sorted(
        name
        for name in named
        if name not in known and re.sub(r"_(total|bucket|sum|count)$", "", name) not in known
    )


def test_every_query_asks_for_a_metric_that_exists():
    assert unknown_metrics(dashboard.queries()) == []
    assert unknown_metrics(["rate(vllm:no_such_total[1m])"]) == ["vllm:no_such_total"]


def test_the_dashboard_is_whole(rendered):
    value = json.loads(rendered["grafana/dashboard.json"])
    assert len({panel["id"] for panel in value["panels"]}) == len(dashboard.PANELS)
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in value["panels"]}
    assert len(places) == len(dashboard.PANELS)
    assert all(query.count("(") == query.count(")") for query in dashboard.queries())
    asked = " ".join(dashboard.queries())
    for counter in ("taken_steps", "declined_steps", "taken_rows"):
        assert f"vllm:specialized_decode_{counter}_total" in asked


def test_a_server_is_ready_once_it_answered_a_warm_up(tmp_path, capsys):
    marker = tmp_path / "warm"
    with ScriptedServer() as server:
        words = ["ready", "--url", server.url, "--marker", str(marker)]
        assert main(words) == 0 and server.completions == 2
        assert main(words) == 0 and server.completions == 2, "only once"
    assert main(words) == 1
    assert "not ready" in capsys.readouterr().err


def test_a_server_that_answers_nothing_is_not_ready(tmp_path):
    for script in (Script(text=""), Script(drop_every=1)):
        with ScriptedServer(script) as server:
            assert main(["ready", "--url", server.url, "--marker", str(tmp_path / "warm")]) == 1
    assert not (tmp_path / "warm").exists()


def test_an_address_that_is_none_is_no_replica_that_is_not_ready(tmp_path, capsys):
    assert main(["ready", "--url", "localhost:8000", "--marker", str(tmp_path / "warm")]) == 2
    assert "--url is no address of a server" in capsys.readouterr().err


@pytest.mark.parametrize(
    "image", ["BAD IMAGE", "", "name:", "Name:1", "name@sha256:12", "name:1 --privileged", "a:b:c"]
)
def test_what_is_no_image_is_refused(tmp_path, capsys, image):
    with pytest.raises(SystemExit):
        main(["deploy", "mi355x-tp2", "--out", str(tmp_path / "out"), "--image", image])
    assert "is no image" in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.parametrize("image", ["name", "name:0.1.0", "h.example:5000/a/b-c:1", f"a/b@sha256:{'0' * 64}"])
def test_images_as_engines_take_them_are_taken(tmp_path, image):
    assert main(["deploy", "mi355x-tp2", "--out", str(tmp_path), "--image", image]) == 0
    assert image in (tmp_path / "kubernetes" / "server.yaml").read_text()


@pytest.mark.parametrize("option", ["--replicas", "--node-gpus"])
def test_a_deployment_of_nothing_is_refused(tmp_path, option, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["deploy", "mi355x-tp4", "--out", str(tmp_path / "out"), option, "0"])
    assert caught.value.code == 2
    assert f"{option}: '0' is no whole number above zero" in capsys.readouterr().err


def test_the_verb_writes_every_file(tmp_path, rendered, capsys):
    assert main(["deploy", "mi355x-tp2", "--image", IMAGE, "--out", str(tmp_path)]) == 0
    written = {p.relative_to(tmp_path).as_posix(): p.read_text() for p in tmp_path.rglob("*") if p.is_file()}
    assert written == rendered
    with pytest.raises(OverlayError, match="does not fit"):
        deploy.compose(load(PROJECT.recipes, "mi355x-tp4"), IMAGE, 2)
