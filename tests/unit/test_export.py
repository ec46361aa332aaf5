# SPDX-License-Identifier: Apache-2.0
"""The export as upstream pull requests: manifest, style, the same bytes twice, git am, tests, hooks."""

import ast
import fcntl
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from rocm_overlay import export_checks, upstream_style
from rocm_overlay.carry import Work, carry
from rocm_overlay.errors import CheckFailed, OverlayError
from rocm_overlay.export import PLACEHOLDER, REPOSITORY, export
from rocm_overlay.export_body import read_result
from rocm_overlay.export_checks import apply_mailboxes, local_configuration, mailboxes, run_hooks, run_tests
from rocm_overlay.export_files import rename_modules, without_tests
from rocm_overlay.export_plan import Carried, Result, load_plan
from rocm_overlay.gittool import git_text
from rocm_overlay.kept import read_kept
from rocm_overlay.overlay import load_overlay
from rocm_overlay.plan import Sources
from rocm_overlay.project import Project
from rocm_overlay.rebase_pulls import pull_findings
from rocm_overlay.recipe import load_all
from rocm_overlay.upstream_style import COPYRIGHT, SPDX, WIDTH, obtain_ruff, restyle, upstream_text
from tests.tiny import make_sources, write_files
from tests.tiny_rebase import git, make_checkout

PROJECT = Project.find()
pytestmark = pytest.mark.xdist_group("export")


@pytest.fixture(scope="module", autouse=True)
def one_worker_at_a_time():
    """One repository of the pinned source serves all exports, and a second export is refused. The group above
    does not keep these tests on one worker whatever the way they are dealt, so the others wait."""
    PROJECT.build.mkdir(exist_ok=True)
    with (PROJECT.build / ".export-tests.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


ENTRY = """
[[pr]]
name = "gate"
title = "[ROCm] Gate"
files = ["vllm/amd/ops/*"]
patches = ["*-gate.patch"]
merged_when = "base vllm/amd/ops/__init__.py defines gate"
purpose = ["A gate."]
"""
KERNEL = """
[[pr]]
name = "kernel"
title = "[ROCm] Kernel"
depends = ["gate"]
files = ["vllm/amd/ours/*", "!*/theirs.py"]
remove = ["vllm/amd/ol*", "tests/test_old.py"]
merged_when = "never: recognised file by file"
purpose = ["A kernel."]
"""


def plan_of(tmp_path, text):
    sources = make_sources(tmp_path / "p")
    write_files(tmp_path / "p", {"upstream/prs.toml": text})
    return load_plan(tmp_path / "p", sources)


def test_each_file_and_patch_is_in_one_pull_request(tmp_path):
    gate, kernel = plan_of(tmp_path, ENTRY + KERNEL).pulls
    assert gate.files == ("vllm/amd/ops/__init__.py",) and gate.patches == ("0001-amd-gate.patch",)
    assert kernel.files == ("vllm/amd/ours/kernel.py",) and kernel.depends == ("gate",)
    assert kernel.remove == ("vllm/amd/old.py", "tests/test_old.py")


FAULTS = {
    "a file in none": (ENTRY, "overlay file vllm/amd/ours/kernel.py belongs to no pull request"),
    "a patch in none": (
        (ENTRY + KERNEL).replace("*-gate.patch", "x"),
        "patch 0001-amd-gate.patch belongs to no",
    ),
    "a removal in none": ((ENTRY + KERNEL).replace("ol*", "x*"), "removal vllm/amd/old.py belongs to no"),
    "a removal in two": (
        ENTRY.replace("patches", 'remove = ["vllm/*"]\npatches') + KERNEL,
        "removal vllm/amd/old.py belongs to more than one",
    ),
    "a file in two": (ENTRY + KERNEL.replace("ours/*", "*"), "belongs to more than one pull request"),
    "a dependency that comes later": (KERNEL + ENTRY, "depends on what does not stand before it"),
    "an unknown field": (ENTRY + KERNEL + "tests = []\n", "kernel: unknown field"),
    "a missing field": (ENTRY.replace("title", "#") + KERNEL, "field title"),
    "two of one name": (ENTRY + ENTRY, "two entries of one name"),
    "a test that is not there": (
        ENTRY + KERNEL + "[[pr.test]]\nfrom = 'tests/x.py'\nto = 'y'\n",
        "no such file",
    ),
    "half a test": (ENTRY + KERNEL + "[[pr.test]]\nfrom = 'tests/x.py'\n", "a carried file"),
    "a condition that is none": (ENTRY.replace("base vllm", "vllm") + KERNEL, "merged_when"),
    "an edit without a text to find": (
        ENTRY + KERNEL + "[[pr.edit]]\npath = 'x'\nold = ''\nnew = 'y'\n",
        "kernel: an edit",
    ),
    "an edit of no text": (ENTRY + KERNEL + "[[pr.edit]]\npath = 1\nold = 'x'\nnew = 'y'\n", "an edit"),
    "an edit of no count": (
        ENTRY + KERNEL + "[[pr.edit]]\npath = 'x'\nold = 'x'\nnew = 'y'\ncount = 'all'\n",
        "an edit",
    ),
    "half a result": (ENTRY + KERNEL + "[[pr.results]]\nfile = 'x'\n", "kernel: a result"),
    "a result's block of no number": (
        ENTRY + KERNEL + "[[pr.results]]\nfile = 'x'\nheading = 'y'\nblock = 0\n",
        "a result",
    ),
    "a list of no texts": (ENTRY + KERNEL + "limits = [3]\n", "field limits"),
    "one table where several stand": ("[pr]\nname = 'x'\n", "tables, each under"),
    "a rename to nothing": ("[rename]\n'a' = ''\n" + ENTRY + KERNEL, "rename"),
    "a test that stays without a reason": ("[stays]\n'a' = ' '\n" + ENTRY + KERNEL, "why the test stays"),
    "no TOML": ("[[pr", "not valid TOML"),
    "an unknown table": (ENTRY + KERNEL + "[other]\n", "unknown table"),
}


@pytest.mark.parametrize(("text", "says"), FAULTS.values(), ids=FAULTS)
def test_a_manifest_that_does_not_fit_is_named(tmp_path, text, says):
    with pytest.raises(OverlayError, match=says):
        plan_of(tmp_path, text)


def test_modules_are_called_as_upstream_calls_them():
    renames = {"tests.unit.tree": "tests.models.x.deployment", "tests.toy": "tests.models.x.toy"}
    text = "from tests.unit import tree as t\nfrom tests import toy  # isort: skip\n"
    text += "from tests.unit.tree import A\nimport tests.toy\n"
    text += "from tests.unit import trees\nfrom tests.unit import tree\n"
    assert rename_modules(text, renames).splitlines() == [
        "from tests.models.x import deployment as t",
        "from tests.models.x import toy  # isort: skip",
        "from tests.models.x.deployment import A",
        "import tests.models.x.toy",
        "from tests.unit import trees",
        "from tests.models.x import deployment as tree",
    ]


def test_a_test_that_stays_here_is_left_out_with_its_decorators():
    text = "import x\n\n\n@x.mark\ndef test_a():\n    pass\n\n\ndef test_b():\n    pass\n"
    assert "test_a" not in without_tests(text, Carried("t.py", "u.py", ("test_a",)))
    assert "x.mark" not in without_tests(text, Carried("t.py", "u.py", ("test_a",)))
    with pytest.raises(OverlayError, match=r"no test of t\.py"):
        without_tests(text, Carried("t.py", "u.py", ("test_c",)))


LONG = "words that go on and on until the line is wider than upstream's lines, which are of 88"
OURS = f'''{SPDX}
"""Summary.

{LONG}.

Args:
    one: {LONG}.
    two: short.

====  {"=" * 90}
"""

# {LONG}
# and a second line.
VALUES = {{
    "a": 1, "b": 2,
}}  # fmt: skip
OTHER = 1  # {LONG}
TEXT = "{LONG}"
'''


def test_our_text_takes_upstreams_form_and_means_the_same():
    text = upstream_text(OURS)
    lines = text.split("\n")
    assert lines[:2] == [SPDX, COPYRIGHT] and "fmt:" not in text
    wide = [line for line in lines if len(line) > WIDTH]
    assert [line[:4] for line in wide] == ["====", "TEXT"]
    assert "    two: short." in lines and '"""' in lines
    assert any(line.startswith("        ") for line in lines), "an argument's text hangs"
    assert lines[lines.index("OTHER = 1") - 1].startswith("# ")
    for ours, theirs in zip(ast.walk(ast.parse(OURS)), ast.walk(ast.parse(text)), strict=True):
        assert type(ours) is type(theirs)


@pytest.fixture(scope="module")
def ruff():
    return obtain_ruff(PROJECT.base, PROJECT.cache / "tools")


def test_upstreams_ruff_has_nothing_to_say_of_our_files(ruff, tmp_path):
    overlay = load_overlay(PROJECT.overlay)
    files = {file.path: file.content.decode() for file in overlay.files if file.path.endswith(".py")}
    (tmp_path / "a").mkdir()
    styled = restyle(files, ruff, tmp_path / "a")
    assert set(styled) == set(files)
    for command in (("check", "--no-cache"), ("format", "--check", "--no-cache")):
        done = ruff.run(tmp_path / "a", *command, *sorted(files))
        assert done.returncode == 0 or "I001" in done.stdout, done.stdout + done.stderr


def test_our_documents_in_the_overlay_are_in_upstreams_form():
    """They go as they are, so that upstream's copy is known again."""
    documents = [one for one in Sources.load(PROJECT).overlay.files if one.path.endswith(".md")]
    assert documents
    for one in documents:
        text = one.content.decode()
        assert upstream_style.upstream_markdown(text) == text, one.path


def test_the_version_of_ruff_is_the_pinned_sources(ruff):
    assert (
        ruff.run(PROJECT.root, "--version")
        .stdout.strip()
        .endswith(upstream_style.ruff_version((PROJECT.base / ".pre-commit-config.yaml").read_text()))
    )
    with pytest.raises(OverlayError, match="names no ruff"):
        upstream_style.ruff_version("repos: []")


@pytest.mark.parametrize("heading", ["Measured on an NVIDIA H200", "Compiled code"])
def test_results_come_from_the_documents_themselves(heading):
    plan = load_plan(PROJECT.root, Sources.load(PROJECT))
    block = read_result(PROJECT, plan.pulls[0], Result("docs/tuning/swa_decode_meta.md", heading, 1))
    assert (
        block[-1].startswith("```")
        and block[-1].removesuffix("```").strip("`\n")
        in (PROJECT.root / "docs/tuning/swa_decode_meta.md").read_text()
    )
    with pytest.raises(OverlayError, match="not where it should be"):
        read_result(PROJECT, plan.pulls[0], Result("docs/tuning/swa_decode_meta.md", heading + "!", 1))


# --- the real export ---


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """The export of this checkout: its folder, and what it lists."""
    target = tmp_path_factory.mktemp("export") / "out"
    return target, export(PROJECT, PROJECT.base, target)


def test_two_exports_are_the_same_to_the_byte(exported, tmp_path):
    target, first = exported
    again = export(PROJECT, PROJECT.base, tmp_path / "again")
    assert [one.commit for one in again] == [one.commit for one in first]
    contents = [
        {
            path.relative_to(root).as_posix(): path.read_bytes()
            for path in sorted(root.rglob("*"))
            if path.is_file()
        }
        for root in (target, tmp_path / "again")
    ]
    assert contents[0] == contents[1] and len(contents[0]) == 2 * len(first) + 1


def test_every_branch_holds_its_files_and_a_sign_off_to_fill_in(exported):
    target, found = exported
    repository = PROJECT.build / REPOSITORY
    for one in found:
        assert git_text("rev-parse", f"pr/{one.pull.name}", cwd=repository) == one.commit
        assert f"Signed-off-by: {PLACEHOLDER}" in git_text(
            "log", "-1", "--format=%B", one.commit, cwd=repository
        )
        changed = git_text(
            "diff", "--name-only", "--no-renames", f"{one.commit}~1", one.commit, cwd=repository
        )
        assert tuple(sorted(changed.splitlines())) == tuple(sorted(one.paths))
    listing = json.loads((target / "series.json").read_text())
    assert [row["branch"] for row in listing["pull_requests"]] == [f"pr/{one.pull.name}" for one in found]


def test_a_body_says_what_it_must(exported):
    target, found = exported
    for one in found:
        body = (target / one.folder / "BODY.md").read_text()
        for heading in (
            "Purpose",
            "Claims",
            "Validation",
            "Commands to reproduce",
            "Limits",
            "What it does not change",
        ):
            assert f"## {heading}" in body, one.pull.name
        assert all(command in body for command in one.pull.run)


def test_every_test_of_a_pull_request_is_run_by_its_own_command(exported):
    _, found = exported
    for one in found:
        upstreams = {*one.pull.remove, *(edit.path for edit in one.pull.edits)}
        tests = [path for path in one.paths if Path(path).name.startswith("test_") and path not in upstreams]
        assert tests and one.pull.run
        roots = [word for command in one.pull.run for word in command.split() if word.startswith("tests/")]
        assert all(path.startswith(tuple(roots)) for path in tests), one.pull.name


@pytest.fixture(scope="module")
def applied(exported, tmp_path_factory):
    """Each pull request applied by git am on what it depends on."""
    target, found = exported
    plan = load_plan(PROJECT.root, Sources.load(PROJECT))
    root = tmp_path_factory.mktemp("am")
    return {
        one.pull.name: (
            one,
            apply_mailboxes(
                PROJECT.build / REPOSITORY,
                mailboxes(plan, found, target, one),
                root / one.pull.name,
                PROJECT.base,
            ),
        )
        for one in found
    }


def test_every_pull_request_applies_alone_on_what_it_depends_on(applied):
    for one, checkout in applied.values():
        assert git_text("rev-parse", "HEAD^{tree}", cwd=checkout) == git_text(
            "rev-parse", f"{one.commit}^{{tree}}", cwd=checkout
        )
        assert git_text("log", "-1", "--format=%s", cwd=checkout) == one.pull.title
        assert not git_text("status", "--porcelain", cwd=checkout)


# Upstream's own checks that are scripts without packages of their own; the full test runs every hook.
QUICK_HOOKS = ("check_forbidden_imports", "check_torch_cuda", "check_spdx_header", "check_trust_remote_code")


@pytest.mark.parametrize("hook", QUICK_HOOKS)
def test_every_pull_request_passes_upstreams_quick_hooks(applied, hook):
    for one, checkout in applied.values():
        files = [path for path in one.paths if path.endswith(".py") and (checkout / path).is_file()]
        done = quick_hook(checkout, hook, files)
        assert done.returncode == 0, f"{one.pull.name}: {done.stdout}{done.stderr}"


def quick_hook(checkout, hook, files):
    command = [sys.executable, f"tools/pre_commit/{hook}.py", *files]
    return subprocess.run(command, cwd=checkout, text=True, capture_output=True, check=False)


@pytest.mark.parametrize(
    ("hook", "text"),
    [
        ("check_forbidden_imports", "import re\n"),
        ("check_torch_cuda", "torch.cuda.synchronize()\n"),
        ("check_spdx_header", "x = 1\n"),
    ],
)
def test_a_quick_hook_finds_a_planted_fault(applied, hook, text):
    _, checkout = applied["gates"]
    planted = checkout / "vllm/planted.py"
    planted.write_text(text)
    try:
        assert quick_hook(checkout, hook, ["vllm/planted.py"]).returncode
    finally:
        planted.unlink()


def test_what_is_called_at_run_time_alone_is_among_the_branchs_files(applied):
    """The host path opens our FFN launch by an import inside a function that its tests replace."""
    one, checkout = applied["mono-decode-host"]
    assert "mono.ffn_launch import" in (checkout / "vllm/models/deepseek_v41/amd/mono_decode.py").read_text()
    assert (checkout / "vllm/models/deepseek_v41/amd/mono/ffn_launch.py").is_file()
    assert "vllm/models/deepseek_v41/amd/mono/ffn_launch.py" not in one.paths


def model_fields(path):
    """What the model's part of a test module's configuration holds, as source."""
    tree = ast.parse((PROJECT.root / path).read_text())
    (made,) = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "deployment")
    (model,) = (one.value for one in made.body if ast.unparse(one).startswith("config.model_config ="))
    return sorted(ast.unparse(one) for one in model.keywords)


def test_the_carried_tests_run_on_the_configuration_that_ours_do():
    ours = model_fields("tests/unit/test_specialized_decode_tree.py")
    theirs = model_fields("upstream/tests/deployment.py")
    assert len(ours) > 3 and theirs == ours


SAME_IN_BOTH = {
    "--attention-config": "attention-config",
    "--engram-config": "engram-config",
    "--block-size": "block-size",
    "--monokernel": "monokernel",
}


def test_upstreams_recipe_serves_mi350x_as_ours_does(applied):
    _, checkout = applied["recipes"]
    path = "recipes/models/deepseek-ai/DeepSeek-V4.1-Flash.yaml"
    theirs = yaml.safe_load((checkout / path).read_text())["strategy_overrides"]["single_node_tp"]
    card = theirs["hardware_overrides"]["mi350x"]
    (ours,) = (one for one in load_all(PROJECT.recipes) if one.name == "mi355x-tp4")
    words = card["extra_args"]
    said = {
        word: True if next_word.startswith("--") else yaml.safe_load(next_word)
        for word, next_word in zip(words, [*words[1:], "--"], strict=True)
        if word.startswith("--")
    }
    assert "MI350X" in ours.hardware.skus and set(said) == set(SAME_IN_BOTH)
    assert {word: ours.args[SAME_IN_BOTH[word]] for word in said} == said
    assert ours.args["tensor-parallel-size"] == theirs["tp"].get("mi350x", theirs["tp"]["default"])
    name = "VLLM_ROCM_USE_AITER_TRITON_SPARSE_MLA"
    assert set(card["extra_env"]) == {name} and ours.env[name] in ("1", "True")


def test_a_patch_that_does_not_apply_is_named(exported, tmp_path):
    target, found = exported
    with pytest.raises(CheckFailed, match="does not apply"):
        patch = next((target / found[-1].folder).glob("*.patch"))
        apply_mailboxes(PROJECT.build / REPOSITORY, [patch, patch], tmp_path / "twice", PROJECT.base)


def test_what_upstream_merged_is_recognised_and_leaves_the_overlay(applied):
    """A base with our pull requests as they were exported: nothing conflicts and nothing of them stays."""
    _, merged = applied["recipes"]
    sources = Sources.load(PROJECT)
    plan = load_plan(PROJECT.root, sources)
    wanted = plan.closure("recipes")
    rows = pull_findings(PROJECT, sources, merged)
    assert {row.what for row in rows} == {pull.name for pull in wanted}
    assert all("another form" not in row.found for row in rows)
    kept = {path: read_kept(PROJECT.patches, entry) for path, entry in sources.pin.locked().items()}
    found = carry(Work(sources, kept.__getitem__, merged, PROJECT.base))
    ours = {path for pull in wanted for path in pull.files}
    assert set(found.dropped) >= ours and not found.conflicts
    dropped = {name for name, text in found.patches.items() if text is None}
    assert dropped == {name for pull in wanted for name in pull.patches}


def test_nothing_is_taken_for_merged_on_the_pinned_base():
    assert pull_findings(PROJECT, Sources.load(PROJECT), PROJECT.base) == []


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_every_pull_request_passes_its_tests_on_the_cpu(applied):
    for one, checkout in applied.values():
        assert "passed" in run_tests(checkout, one.pull.run), one.pull.name


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_every_pull_request_passes_upstreams_hooks(applied):
    for one, checkout in applied.values():
        results = run_hooks(checkout, one.paths, PROJECT.cache / "pre-commit")
        assert [(r.name, r.detail) for r in results if r.state == "Failed"] == [], one.pull.name
        passed = {r.name for r in results if r.state == "Passed"}
        assert {"ruff-check", "ruff-format", "typos", "Check SPDX headers"} <= passed
        assert "Check new tests are wired into Buildkite CI" in passed
        assert {"Check for forbidden imports", "Prevent new 'torch.cuda' APIs call"} <= passed
        assert any(name.startswith("Run mypy") for name in passed)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_the_checks_find_a_planted_fault(applied, tmp_path):
    _, source = applied["gates"]
    checkout = tmp_path / "spoilt"
    shutil.copytree(source, checkout, symlinks=True)
    gate = checkout / "vllm/models/deepseek_v41/amd/ops/__init__.py"
    gate.write_text(gate.read_text().replace("_CDNA_VERSIONS = (3, 4)", "_CDNA_VERSIONS = (3,)"))
    with pytest.raises(CheckFailed, match="test_dsv41_swa_gate"):
        run_tests(checkout, ["python -m pytest tests/kernels/models/amd/test_dsv41_swa_gate.py"])
    gate.write_text(gate.read_text().replace(COPYRIGHT, "#") + "import os\nx = 'teh'\n")
    failed = {r.name for r in run_hooks(checkout, [gate.relative_to(checkout).as_posix()],
                                        PROJECT.cache / "pre-commit") if r.state == "Failed"}  # fmt: skip
    assert {"ruff-check", "typos", "Check SPDX headers"} <= failed


def test_a_hook_of_a_repository_is_taken_from_its_package_and_others_are_named(monkeypatch):
    text = (PROJECT.base / ".pre-commit-config.yaml").read_text()
    configuration, left_out = local_configuration(text, ["a.py", "run.sh"])
    assert {one["repo"] for one in configuration["repos"]} == {"local"}
    hooks = {hook["id"]: hook for one in configuration["repos"] for hook in one["hooks"]}
    assert hooks["ruff-check"]["args"] == ["--output-format", "github", "--fix"]
    assert hooks["typos"]["additional_dependencies"][0].startswith("typos==")
    assert hooks["markdownlint-cli2"]["additional_dependencies"] == ["markdownlint-cli2@0.21.0"]
    assert hooks["markdownlint-cli2"]["language_version"] == "system"
    states = {one.name: one.state for one in left_out}
    assert states["shellcheck"] == "not run" and states["actionlint"] == states["check-json"] == "Skipped"
    monkeypatch.setattr(shutil, "which", lambda name: None)
    _, left_out = local_configuration(text, ["a.md"])
    assert [one.detail for one in left_out if one.name == "markdownlint-cli2"] == ["npm is not installed"]


def test_a_test_command_that_is_none_is_refused(tmp_path):
    with pytest.raises(OverlayError, match="a test command"):
        run_tests(tmp_path, ["true"])


def test_a_run_without_tests_or_with_a_skipped_one_fails(tmp_path):
    write_files(tmp_path, {"test_x.py": "import pytest\n\n\ndef test_x():\n    pytest.skip('x')\n"})
    with pytest.raises(CheckFailed, match=r"test_x\.py"):
        run_tests(tmp_path, ["python -m pytest test_x.py"])


def test_a_folder_with_other_things_in_it_is_never_replaced(tmp_path):
    write_files(tmp_path / "mine", {"thesis.txt": "all of it"})
    with pytest.raises(OverlayError, match="is no export"):
        export(PROJECT, PROJECT.base, tmp_path / "mine")
    with pytest.raises(OverlayError, match="the author"):
        export(PROJECT, PROJECT.base, tmp_path / "out", "somebody")


def test_the_time_of_the_commits_is_the_projects_own(tmp_path, monkeypatch):
    from rocm_overlay.export import _moment

    project = make_checkout(tmp_path / "p")
    assert _moment(project) == f"{git(project.root, 'log', '-1', '--format=%ct')} +0000"
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "5")
    assert _moment(project) == "5 +0000"
    assert export_checks.PLACEHOLDER == PLACEHOLDER
