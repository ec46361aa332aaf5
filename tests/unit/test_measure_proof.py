# SPDX-License-Identifier: Apache-2.0
"""Each proof of a run at both sides of its bound, from pages and requests typed in."""

import dataclasses

import pytest

from rocm_overlay.errors import OverlayError
from rocm_overlay.measure.client import Outcome
from rocm_overlay.measure.metrics_page import Page, Window
from rocm_overlay.measure.proof import prove
from rocm_overlay.measure.records import Request
from rocm_overlay.measure.workload import Promise, load_profile, pass_of, promise
from rocm_overlay.project import Project
from rocm_overlay.recipe import load

PROFILE = load_profile("tiny")
EVIDENCE = {"image_digest": "sha256:0", "sku": "MI355X", "recipe_hash": "0"}
STEPS = "vllm:specialized_decode"
DRAFTS = "vllm:spec_decode_num_drafts_total"


def own(point=0, run=1, **changes):
    profile = dataclasses.replace(PROFILE, **changes)
    return pass_of(profile, profile.points[point], 1, run, "arm")


def request(tokens=8, error=""):
    return Request(32, tokens, 1.0, 1.0, error)


def outcome(requests=None, texts=("word",) * 3):
    return Outcome({}, tuple(requests or [request()] * 3), tuple(texts))


def page(**counters):
    """A page of one engine; a name's parts after ``__`` are labels, as ``taken__role_draft``."""
    lines = ["vllm:generation_tokens_total 0"]
    for word, value in counters.items():
        name, *labels = word.split("__")
        pairs = ",".join('{}="{}"'.format(*label.split("_", 1)) for label in labels)
        known = {"drafts": DRAFTS, "accepted": "vllm:spec_decode_num_accepted_tokens_total"}
        known |= {"queries": "vllm:prefix_cache_queries_total", "hits": "vllm:prefix_cache_hits_total"}
        known |= {"taken": f"{STEPS}_taken_steps_total", "declined": f"{STEPS}_declined_steps_total"}
        lines.append(f"{known[name]}{{{pairs}}} {value}")
    return Page.parse("\n".join(lines) + "\n", "typed in")


def proof(name, after, before=None, promised=None, pass_=None, out=None, **changes):
    window = Window(before or page(), after)
    promised = promised or Promise((1.0, 6.0), True)
    found = prove(
        pass_ or own(**changes),
        dataclasses.replace(PROFILE, **changes),
        promised,
        out or outcome(),
        window,
        EVIDENCE,
    )
    return found[name].ok


@pytest.mark.parametrize(("made", "ok"), [(7, False), (8, True), (9, False)])
def test_each_answer_has_the_asked_length(made, ok):
    assert proof("tokens", page(), out=outcome([request(), request(made), request()])) is ok


@pytest.mark.parametrize(("text", "ok"), [("w", True), ("", False), (" \n\t", False)])
def test_no_answer_is_empty_but_a_failed_ones(text, ok):
    assert proof("text", page(), out=outcome(texts=("w", text, "w"))) is ok
    failed = outcome([request(0, "dropped"), request(), request()], ("", "w", "w"))
    assert proof("text", page(), out=failed) is True and proof("requests", page(), out=failed) is False


@pytest.mark.parametrize(
    ("length", "ok"), [(3.32, False), (3.34, True), (3.51, True), (3.68, True), (3.70, False)]
)
def test_a_synthetic_acceptance_is_held_within_5_percent(length, ok):
    promised = promise(load(Project.find().recipes, "agentx-mi355x-tp4"), 1)
    after = page(drafts=1000, accepted=1000 * (length - 1))
    assert proof("acceptance", after, promised=promised) is ok


def test_acceptance_is_of_the_run_alone():
    before = page(drafts=1000, accepted=5000)
    assert proof("acceptance", page(drafts=1100, accepted=5250), before, Promise((3.4, 3.6), True)) is True
    assert proof("acceptance", page(drafts=1000, accepted=5000), before) is False, "nothing was verified"
    assert proof("acceptance", page(drafts=9, accepted=9), promised=Promise(None, False)) is False
    assert proof("acceptance", page(), promised=Promise(None, False)) is True


@pytest.mark.parametrize(("taken", "ok"), [(100, True), (99, True), (98, False), (0, False)])
def test_99_of_100_decode_steps_are_on_the_kernels(taken, ok):
    after = (
        page(taken__role_target=taken, declined__role_target__reason_rows=50)
        if taken == 100
        else page(taken__role_target=taken, **{"declined__role_target__reason_sliding window": 100 - taken})
    )
    assert proof("kernels", after) is ok
    assert proof("fallback", after) is (taken == 100)


def test_steps_of_the_draft_are_none_of_the_targets():
    after = page(taken__role_draft=1000, **{"declined__role_target__reason_sliding window": 10})
    assert proof("kernels", after) is False


@pytest.mark.parametrize(("taken", "ok"), [(89, False), (90, True)])
def test_steps_are_as_many_as_the_verifications_need(taken, ok):
    """Of 200 verifications of two requests at once at least 100 steps, less a tenth."""
    assert (
        proof("kernels", page(taken__role_target=taken, drafts=200, accepted=200), pass_=own(point=1)) is ok
    )


def test_a_recipe_without_the_kernels_has_no_step_on_them_and_a_large_batch_may():
    for promised, ok in ((Promise(None, False), False), (Promise(None, None), True)):
        assert proof("kernels", page(taken__role_target=1), promised=promised) is ok
    assert proof("kernels", page()) is None and proof("fallback", page()) is None, "not served"


@pytest.mark.parametrize(("hits", "ok"), [(4, False), (5, True), (10, True), (11, False)])
def test_prefix_hits_are_in_the_profiles_range(hits, ok):
    after = page(queries=100, hits=hits)
    assert proof("prefix", after, prefix_hit_rate=(0.05, 0.10)) is ok
    assert (
        proof("prefix", after, prefix_hit_rate=(0.05, 0.10), repeats="same", pass_=own(run=2, repeats="same"))
        is None
    )


def test_a_rows_promise_ends_with_the_kernels():
    """Six rows a request: eight requests are 48 rows of gfx950; gfx942 has 42 at TP 4 and 32 at TP 2."""
    for name, most in (("mi355x-tp4", 8), ("mi355x-tp2", 8), ("mi325x-tp4", 7), ("mi325x-tp2", 5)):
        recipe = load(Project.find().recipes, name)
        seen = [promise(recipe, concurrency).kernels for concurrency in (1, most, most + 1)]
        assert seen == [True, True, None], name


@pytest.mark.parametrize("name", ["drafts", "queries", "taken__role_target"])
def test_a_counter_that_falls_is_a_server_that_was_started_again(name):
    with pytest.raises(OverlayError, match="fell between two scrapes"):
        Window(page(**{name: 10}), page(**{name: 9}))
