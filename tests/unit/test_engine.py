# SPDX-License-Identifier: Apache-2.0
"""The container engines: which one answers, and the commands that each is given."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from rocm_overlay import engine as engines
from rocm_overlay.engine import Buildah, BuildRequest, Completed, Docker, RunRequest, Shell, select_engine
from rocm_overlay.errors import OverlayError

DIGEST = "sha256:" + "a" * 64


class FakeShell(Shell):
    """Answers commands by the words they start with, and keeps what was asked.

    The longest matching beginning wins; a command that nothing matches is not found (127).
    """

    def __init__(self, answers: dict[str, Completed | str | int]) -> None:
        self.answers = answers
        self.commands: list[str] = []

    def capture(self, command: Sequence[str], timeout: float | None = None) -> Completed:
        line = " ".join(command)
        self.commands.append(line)
        for start in sorted(self.answers, key=len, reverse=True):
            if line.startswith(start):
                answer = self.answers[start]
                if isinstance(answer, int):
                    return Completed(answer, "", "it failed" if answer else "")
                return Completed(0, answer) if isinstance(answer, str) else answer
        return Completed(127, "", f"{command[0]}: not found")

    def stream(self, command: Sequence[str]) -> Completed:
        return self.capture(command)

    def attach(self, command: Sequence[str]) -> int:
        return self.capture(command).status


@pytest.fixture(autouse=True)
def own_environment(monkeypatch):
    """No variable of this machine decides, and none that is set here stays."""
    monkeypatch.setenv("BUILDAH_ISOLATION", "chroot")
    monkeypatch.setenv("STORAGE_DRIVER", "")
    monkeypatch.setattr(engines, "install_packages", lambda shell, packages: False)


def test_docker_is_used_where_its_daemon_answers():
    shell = FakeShell({"docker version": "27.0", "buildah": ""})
    assert select_engine(shell).name == "docker"


def test_buildah_is_used_where_only_a_docker_client_is_installed():
    shell = FakeShell({"docker version": 1, "buildah": ""})
    assert select_engine(shell).name == "buildah"


def test_the_engine_asked_for_is_used_even_where_docker_answers():
    assert select_engine(FakeShell({"docker version": "27.0", "buildah": ""}), "buildah").name == "buildah"


def test_no_engine_is_an_error_that_says_how_to_get_one():
    with pytest.raises(OverlayError) as caught:
        select_engine(FakeShell({}))
    assert "no container engine" in caught.value.what and "apt-get install buildah" in str(caught.value.fix)


def test_an_engine_asked_for_that_does_not_answer_is_not_replaced_by_another():
    with pytest.raises(OverlayError, match="no container engine answers: docker") as caught:
        select_engine(FakeShell({"docker version": 1, "buildah": ""}), "docker")
    fix = str(caught.value.fix)
    assert "start the docker daemon" in fix and "leave --engine" in fix and "buildah" not in fix


def test_a_buildah_asked_for_that_is_not_there_is_to_be_installed():
    with pytest.raises(OverlayError) as caught:
        select_engine(FakeShell({"docker version": "27.0"}), "buildah")
    assert "apt-get install buildah" in str(caught.value.fix) and "start docker" not in str(caught.value.fix)


def test_buildah_is_installed_where_we_may(monkeypatch):
    shell = FakeShell({})

    def install(_, packages):
        shell.answers["buildah"] = ""
        return packages == ["buildah"]

    monkeypatch.setattr(engines, "install_packages", install)
    assert select_engine(shell).name == "buildah"


@pytest.mark.parametrize(("mount", "driver"), [(0, None), (1, "vfs")])
def test_buildah_falls_back_to_vfs_where_its_own_driver_cannot_mount(monkeypatch, mount, driver):
    monkeypatch.delenv("STORAGE_DRIVER")
    shell = FakeShell({"buildah": "", "buildah from scratch": "working\n", "buildah mount": mount})
    assert Buildah(shell).answers()
    assert "buildah rm working" in shell.commands
    # What answers() chose is what later commands are given.
    Buildah(shell).has_image("image:tag")
    option = f"--storage-driver {driver} " if driver else ""
    assert shell.commands[-1] == f"buildah {option}images --quiet image:tag"


def test_the_users_storage_driver_wins(monkeypatch):
    monkeypatch.setenv("STORAGE_DRIVER", "overlay")
    shell = FakeShell({"buildah": ""})
    Buildah(shell).answers()
    assert all(line.startswith("buildah --storage-driver overlay ") for line in shell.commands)


def test_buildah_pulls_a_name_without_a_registry_as_docker_would():
    shell = FakeShell({"buildah": "", "docker": ""})
    Buildah(shell).pull("vendor/image:tag")
    Buildah(shell).pull("oci-archive:base.tar")
    Docker(shell).pull("vendor/image:tag")
    assert shell.commands == [
        "buildah pull docker://vendor/image:tag",
        "buildah pull oci-archive:base.tar",
        "docker pull vendor/image:tag",
    ]


@pytest.mark.parametrize(
    ("engine", "wanted"),
    [
        (Docker, "docker build --tag ours:1 --tag ours"),
        (Buildah, "buildah bud --layers=false --pull-never --tag ours:1 --tag ours"),
    ],
)
def test_both_engines_build_the_same_request(tmp_path, engine, wanted):
    shell = FakeShell({"docker": "", "buildah": ""})
    engine(shell).build(BuildRequest(tmp_path, ["ours:1", "ours"], {"A": "1", "B": "two words"}))
    # Nothing else is done: the image that had the name may be another checkout's.
    assert shell.commands == [f"{wanted} --build-arg A=1 --build-arg B=two words {tmp_path}"]


def test_removing_what_lost_its_name_is_left_to_the_user(monkeypatch):
    assert Docker(FakeShell({})).prune_command() == ["docker", "image", "prune"]
    monkeypatch.setenv("STORAGE_DRIVER", "vfs")
    assert Buildah(FakeShell({})).prune_command() == ["buildah", "--storage-driver", "vfs", "rmi", "--prune"]


@pytest.mark.parametrize("engine", [Docker, Buildah])
def test_a_failed_build_names_the_image_and_the_last_line(tmp_path, engine):
    shell = FakeShell({engine.name: Completed(3, "STEP 1\nError: no such file\n")})
    with pytest.raises(OverlayError) as caught:
        engine(shell).build(BuildRequest(tmp_path, ["ours:1"], {}))
    assert "ours:1" in caught.value.what
    assert caught.value.seen == "exit status 3: Error: no such file"


def image_answers(labels, entrypoint=None, digest=DIGEST):
    """What both engines say of an image."""
    config = {"Labels": labels, "Entrypoint": entrypoint}
    return {
        "docker": "",
        "docker image inspect --format {{json .Config.Labels}}": json.dumps(labels),
        "docker image inspect --format {{json .RepoDigests}}": json.dumps([f"vendor/image@{digest}"]),
        "buildah": "",
        "buildah from": "working\n",
        "buildah inspect": json.dumps({"FromImageDigest": digest, "OCIv1": {"config": config}}),
    }


@pytest.mark.parametrize("engine", [Docker, Buildah])
def test_labels_and_digest_of_an_image(engine):
    one = engine(FakeShell(image_answers({"a": "b"})))
    assert one.labels("vendor/image:tag") == {"a": "b"}
    assert one.repository_digest("vendor/image:tag") == DIGEST


@pytest.mark.parametrize("engine", [Docker, Buildah])
def test_an_image_without_labels_or_digest_has_none(engine):
    one = engine(FakeShell(image_answers(None, digest="")))
    assert one.labels("vendor/image:tag") == {}
    assert one.repository_digest("vendor/image:tag") == ""


@pytest.mark.parametrize("engine", [Docker, Buildah])
def test_inspecting_an_image_that_is_not_there_says_so(engine):
    with pytest.raises(OverlayError, match="cannot inspect the image vendor/image:tag"):
        engine(FakeShell({engine.name: 1})).labels("vendor/image:tag")


RUN = RunRequest("ours:1", ["--recipe", "one"], environment={"HOME": "/home"}, mounts=["/a:/b:ro"])


def test_docker_runs_the_entry_point_or_leaves_it_out():
    shell = FakeShell({"docker": ""})
    Docker(shell).run(RUN)
    Docker(shell).run(RunRequest("ours:1", ["vllm", "serve"], entrypoint=False))
    assert shell.commands == [
        "docker run --rm --env HOME=/home --volume /a:/b:ro ours:1 --recipe one",
        "docker run --rm --entrypoint vllm ours:1 serve",
    ]


def test_buildah_runs_the_entry_point_that_the_image_names_and_removes_the_container():
    shell = FakeShell(image_answers({}, ["our-entrypoint"]))
    Buildah(shell).run(RUN)
    assert shell.commands[-2:] == [
        "buildah run --env HOME=/home --volume /a:/b:ro working -- our-entrypoint --recipe one",
        "buildah rm working",
    ]


def test_buildah_runs_a_bare_command_and_returns_its_status():
    shell = FakeShell({**image_answers({}, ["our-entrypoint"]), "buildah run": Completed(7, "said")})
    done = Buildah(shell).run(RunRequest("ours:1", ["vllm", "serve"], entrypoint=False), capture=True)
    assert (done.status, done.output) == (7, "said")
    assert "buildah run working -- vllm serve" in shell.commands
    assert shell.commands[-1] == "buildah rm working"


def test_a_real_command_that_is_missing_or_hangs_has_a_status_of_its_own():
    assert Shell().capture(["no-such-command-anywhere"]).status == 127
    assert Shell().capture(["sleep", "5"], timeout=0.05).status == 124


def test_a_streamed_command_shows_its_lines_and_returns_the_last(capfd):
    done = Shell().stream(
        ["sh", "-c", "for i in 1 2 3 4 5 6 7 8; do echo line $i; done; echo oops >&2; exit 4"]
    )
    assert done.status == 4
    assert done.output.splitlines()[-2:] == ["line 8", "oops"] and "line 1\n" not in done.output
    assert "line 1\n" in capfd.readouterr().err
