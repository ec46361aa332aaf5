# SPDX-License-Identifier: Apache-2.0
"""``compare`` gives the published tables from their figures, and calls a difference only above the noise."""

import dataclasses
import re

import pytest

from rocm_overlay.cli import main
from rocm_overlay.errors import OverlayError
from rocm_overlay.measure import compare, records
from rocm_overlay.measure.quantities import QUANTITIES
from rocm_overlay.measure.records import Record, ResultSet
from rocm_overlay.measure.statistics import Verdict, compare_point, paired_ratio
from tests import published_figures as published

ITL = QUANTITIES["itl_p50_ms"]


def point(found, name):
    return [record for record in found if record.point == name]


def swa(name, first=None, second=None):
    base, ours = published.swa_records()
    return compare_point(point(first or base, name), point(second or ours, name), ITL)


def within(printed, low, high, digits=2):
    """A printed figure can have come from inputs that print as the table's do."""
    half = 0.5 * 10**-digits
    return low - half <= printed <= high + half


@pytest.mark.parametrize("name", published.SWA_ROUNDS)
def test_the_published_deltas_come_out_of_the_published_rounds(name):
    found = swa(name)
    assert [(r.first, r.second) for r in found.rounds] == [
        (pytest.approx(a), pytest.approx(b)) for a, b in published.SWA_ROUNDS[name]
    ]
    # The exact mean of 6.800 and 6.824 is 6.812, of 6.917 and 6.865 6.891.
    assert (round(found.first, 3), round(found.second, 3)) == published.SWA_MEANS[name]
    # The table prints -80 us where its own means differ by 79: they are rounded.
    assert abs(found.difference * 1000 - published.SWA_DELTA_US[name]) <= 1
    changes = zip(published.SWA_ROUNDS[name], found.rounds, published.SWA_ROUND_CHANGES[name], strict=True)
    for (first, second), round_, printed in changes:
        low, high = published.reach(first, second, 0.001, lambda a, b: 100 * (b / a - 1))
        assert within(printed, low, high)
        assert round(100 * round_.change, 2) == pytest.approx(printed, abs=0.015)
    assert round(100 * found.change, 2) == pytest.approx(published.SWA_CHANGE[name], abs=0.015)


@pytest.mark.parametrize("name", published.SWA_ROUNDS)
def test_the_published_noise_and_verdict_come_out(name):
    found = swa(name)
    assert 100 * found.noise.same_arm == pytest.approx(published.SWA_SAME_ARM[name], rel=1e-3)
    assert round(100 * found.noise.half_to_half, 2) == pytest.approx(
        published.SWA_HALF_TO_HALF[name], abs=0.011
    )
    assert found.verdict is Verdict.FASTER


def test_the_published_table_stands_in_the_markdown():
    base, ours = published.swa_records()
    text = compare.markdown(compare.make_report(base, ours, [ITL]))
    assert "Round 1 (base on 0-3) | Round 2 (base on 4-7) | Mean base | Mean PR" in text
    assert re.search(
        r"\| 32k/1k c1 \| 5\.687 / 5\.581 .* \| 5\.681 / 5\.587 .* "
        r"\| 5\.684 \| 5\.584 \| -100 us \(-1\.76%\) \| faster \|",
        text,
    )
    assert "| all launches | 114 | 65 |" in text
    assert "| `_decode_swa_meta_kernel` | 0 | 7 |" in text
    assert text.index("`__amd_rocclr_copyBuffer`") < text.index("`_token_request_mapping_kernel`")
    assert compare.RULE in text


def test_the_published_launches_add_up():
    for arm, launches in published.SWA_LAUNCHES.items():
        assert sum(launches.values()) == published.SWA_LAUNCH_TOTALS[arm]


def test_single_runs_are_never_judged_and_their_differences_are_the_published_ones():
    keys = ("itl_p50_ms", "output_tok_s", "acceptance_length")
    first, second = published.single_records(keys, published.SPECIALIZED)
    report = compare.make_report(first, second, [QUANTITIES[key] for key in keys])
    itl = {c.point: c for c in report.comparisons["itl_p50_ms"]}
    assert {c.verdict for found in report.comparisons.values() for c in found} == {Verdict.NOT_JUDGED}
    assert f"{itl['MI350 1k/512 c1 mono'].change:+.2%}" == "+0.34%"
    assert f"{itl['MI300 1k/512 c1 mono'].change:+.2%}" == "+3.01%"
    assert itl["MI300 64k/1k c1"].change == 0


def test_a_stated_noise_judges_single_runs():
    first, second = published.single_records(("itl_p50_ms",), {
        name: ((pair[0][0],), (pair[1][0],)) for name, pair in published.SPECIALIZED.items()
    })  # fmt: skip
    report = compare.make_report(first, second, [ITL], stated_noise=0.01)
    verdicts = {c.point: c.verdict for c in report.comparisons["itl_p50_ms"]}
    slower = {name for name, verdict in verdicts.items() if verdict is Verdict.SLOWER}
    # On MI350 the branch keeps the time; on MI300 it is 2.7 to 3 percent slower.
    assert slower == {name for name in verdicts if name.startswith("MI300") and name.endswith("mono")}
    assert set(verdicts.values()) == {Verdict.SLOWER, Verdict.WITHIN_NOISE}


AGENTX_KEYS = ("interactivity_p90", "total_tok_s")


def agentx_records(rows):
    sides = published.single_records(
        AGENTX_KEYS,
        {
            name: tuple(zip(*((g.first, g.second) for g in row[:2]), strict=True))
            for name, row in rows.items()
        },
    )
    found = ([], [])
    for first, second in zip(*sides, strict=True):
        row = rows[first.point]
        requests = published.paired_requests(float(row[2])) if len(row) > 2 else ((), ())
        for side, record, own in zip(found, (first, second), requests, strict=True):
            side.append(dataclasses.replace(record, requests=own))
    return found


def test_the_agentx_table_with_its_ratio_column_comes_out():
    first, second = agentx_records(published.AGENTX)
    report = compare.make_report(first, second, [QUANTITIES[key] for key in AGENTX_KEYS])
    lines = compare.gain_table(report).splitlines()[2:]
    assert lines == [agentx_line(name, *row) for name, row in published.AGENTX.items()]


def agentx_line(name, interactivity, total, ratio):
    """The published row. One gain is 1.02 there and 1.03 from the printed 358.6 and 367.6."""
    printed = interactivity.printed
    if (name, printed) == ("TP4 c8", "1.02"):
        low, high = published.reach(interactivity.first, interactivity.second, 0.1, lambda a, b: b / a)
        assert low < 1.025 < high, "the printed figures allow either"
        printed = "1.03"
    return (
        f"| {name} | {interactivity.first} → {interactivity.second} ({printed}×) "
        f"| {total.first:,} → {total.second:,} ({total.printed}×) | {ratio} |"
    )


def test_the_agentx_baselines_come_out():
    first, second = agentx_records(published.AGENTX_BASELINE)
    report = compare.make_report(first, second, [QUANTITIES[key] for key in AGENTX_KEYS])
    table = compare.gain_table(report)
    for name, gains in published.AGENTX_BASELINE.items():
        for gain in gains:
            assert f"({gain.printed}×)" in next(x for x in table.splitlines() if x.startswith(f"| {name} |"))


@pytest.mark.parametrize("name", published.FFN_LAUNCH)
def test_the_kernel_table_comes_out(name):
    gain = published.FFN_LAUNCH[name]
    first, second = published.single_records(("layer_us",), {name: ((gain.first,), (gain.second,))})
    found = compare_point(first, second, QUANTITIES["layer_us"])
    # Whole microseconds do not fix the second decimal of the ratio: 136/81 is 1.679, printed 1.69.
    low, high = published.reach(gain.first, gain.second, 1, lambda a, b: a / b)
    assert within(float(gain.printed), low, high)
    assert found.gain == pytest.approx(float(gain.printed), abs=0.016)
    assert compare.gain_cell(found).startswith(f"{gain.first} → {gain.second} (")


def test_a_difference_below_the_spread_of_one_server_is_noise():
    base, _ = published.swa_records()
    wide = [
        dataclasses.replace(r, figures={"itl_p50_ms": r.figures["itl_p50_ms"] * (1 + 0.01 * (r.run - 2))})
        for r in base
    ]
    found = swa("32k/1k c1", first=wide)
    assert found.noise.same_arm > 0.02
    assert (found.verdict, found.because) == (Verdict.WITHIN_NOISE, "1.76% is not above 2.30%")


def runs(arm, half_of, values):
    """Records of one arm: ``values`` a round, each a list of its runs' figures."""
    return [
        Record(arm, "p", number, half_of[number - 1], index, {"itl_p50_ms": value})
        for number, own in enumerate(values, start=1)
        for index, value in enumerate(own, start=1)
    ]


def test_either_arms_noise_counts_and_a_difference_of_the_noise_is_none():
    """8 against 7 is a difference of 12.5%, each round the same; the noise is one arm's alone."""
    steady, spread, drift = [[8.0] * 2] * 2, [[6.5, 7.5]] * 2, [[6.5] * 2, [7.5] * 2]
    for noisy, kind in ((spread, "same_arm"), (drift, "half_to_half")):
        found = compare_point(runs("a", "xy", steady), runs("b", "yx", noisy), ITL)
        assert getattr(found.noise, kind) == pytest.approx(1 / 7)
        assert found.verdict is Verdict.WITHIN_NOISE
        assert compare_point(runs("b", "xy", noisy), runs("a", "yx", steady), ITL).noise == found.noise
    calm = compare_point(runs("a", "xy", steady), runs("b", "yx", [[7.0] * 2] * 2), ITL)
    assert calm.verdict is Verdict.FASTER
    for noise, verdict in ((0.125, Verdict.WITHIN_NOISE), (0.1249, Verdict.FASTER)):
        found = compare_point(runs("a", "xy", steady), runs("b", "yx", [[7.0] * 2] * 2), ITL, noise)
        assert found.verdict is verdict


def test_rounds_of_different_sign_are_noise():
    _, ours = published.swa_records()
    turned = [
        dataclasses.replace(r, figures={"itl_p50_ms": 5.70}) if r.round == 2 else r
        for r in point(ours, "32k/1k c1")
    ]
    assert swa("32k/1k c1", second=turned).because == "the rounds differ in sign"


def test_exchanged_arms_turn_the_verdict():
    base, ours = published.swa_records()
    found = compare_point(point(ours, "32k/1k c1"), point(base, "32k/1k c1"), ITL)
    assert found.verdict is Verdict.SLOWER


def test_arms_that_stayed_on_their_halves_are_not_judged():
    base, ours = published.swa_records()
    stay = [
        [dataclasses.replace(r, half=half) for r in side] for side, half in ((base, "0-3"), (ours, "4-7"))
    ]
    found = swa("32k/1k c1", *stay)
    assert (found.verdict, found.because) == (
        Verdict.NOT_JUDGED,
        "the arms did not serve on the same halves",
    )
    # Of three halves, two rounds give each arm one that the other never had.
    three = [
        [dataclasses.replace(r, half="abc"[r.round - 1 + arm]) for r in side]
        for arm, side in enumerate((base, ours))
    ]
    assert swa("32k/1k c1", *three).verdict is Verdict.NOT_JUDGED


def test_a_quantity_without_a_direction_is_only_higher_or_lower():
    sides = [
        [Record(arm, "p", n, "", 1, {"acceptance_length": value + 0.001 * n}) for n in (1, 2)]
        for arm, value in (("a", 3.58), ("b", 3.43))
    ]
    assert compare_point(*sides, QUANTITIES["acceptance_length"]).verdict is Verdict.LOWER


def test_ratios_are_paired_only_where_the_sequences_match():
    first, second = published.paired_requests(0.915)
    a = Record("a", "p", 1, "", 1, {}, requests=first)
    b = Record("b", "p", 1, "", 1, {}, requests=second)
    found = paired_ratio([a], [b])
    assert (round(found.median, 3), found.requests) == (0.915, 41)
    ratios = sorted(two.itl_ms / one.itl_ms for one, two in zip(first, second, strict=True))
    assert sum(one < found.low for one in ratios) == sum(one > found.high for one in ratios) == 41 // 10
    assert paired_ratio([a], [dataclasses.replace(b, requests=second[1:])]) is None
    assert paired_ratio([a], [dataclasses.replace(b, requests=second[::-1])]) is None
    assert paired_ratio([dataclasses.replace(a, seed=1)], [dataclasses.replace(b, seed=2)]) is None
    failed = (dataclasses.replace(second[0], itl_ms=None, error="dropped"), *second[1:])
    assert paired_ratio([a], [dataclasses.replace(b, requests=failed)]).requests == 40


def write(folder, *sides):
    kept = ResultSet(folder)
    for record in (record for side in sides for record in side):
        kept.append(record)
    return folder


def test_the_verb_writes_markdown_and_plots(tmp_path, capsys):
    base, ours = published.swa_records()
    folder = write(tmp_path / "set", base, ours)
    out = tmp_path / "out"
    assert main(["compare", f"{folder}:base", f"{folder}:PR", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert printed == (out / "compare.md").read_text()
    assert (out / "compare.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (out / "compare.svg").read_text()


def test_a_regression_beyond_noise_fails_where_it_is_asked_for(tmp_path, capsys):
    base, ours = published.swa_records()
    folder = write(tmp_path / "set", base, ours)
    for first, second, status in (("base", "PR", 0), ("PR", "base", 1)):
        words = [
            f"{folder}:{first}",
            f"{folder}:{second}",
            "--quantity",
            "itl_p50_ms",
            "--out",
            str(tmp_path),
        ]
        assert main(["compare", *words, "--fail-slower"]) == status
        assert main(["compare", *words]) == 0
    assert "slower beyond noise: 32k/1k c1, 32k/1k c2" in capsys.readouterr().err


def test_the_same_sets_give_the_same_files(tmp_path):
    base, ours = published.swa_records()
    sets = [write(tmp_path / name, side) for name, side in (("base", base), ("pr", ours))]
    texts = []
    for out in (tmp_path / "one", tmp_path / "two"):
        assert main(["compare", *map(str, sets), "--out", str(out)]) == 0
        texts.append(((out / "compare.md").read_bytes(), (out / "compare.svg").read_bytes()))
    assert texts[0] == texts[1]


def changed(side, **fields):
    return [dataclasses.replace(record, **fields) for record in side]


REFUSED = {
    "no common point": (lambda b, o: (b, changed(o, point="1k/512 c1")), "no point in common"),
    "no common round": (
        lambda b, o: (b, [dataclasses.replace(r, round=r.round + 2) for r in o]),
        "no round in common",
    ),
    "other hardware": (
        lambda b, o: (changed(b, evidence={"sku": "MI355X"}), changed(o, evidence={"sku": "MI300X"})),
        "another sku",
    ),
    "other repeats": (
        lambda b, o: (changed(b, evidence={"repeats": "same"}), changed(o, evidence={"repeats": "fresh"})),
        "another repeats",
    ),
    "other quantity": (lambda b, o: (b, changed(o, figures={"output_tok_s": 1.0})), "no chosen quantity"),
    "value of zero": (lambda b, o: (b, changed(o, figures={"itl_p50_ms": 0.0})), "cannot be compared"),
    "two halves in a round": (
        lambda b, o: (b, [dataclasses.replace(r, half=str(r.run)) for r in o]),
        "cannot be compared",
    ),
    "two arms in a side": (lambda b, o: (b + o, o), "more than one arm"),
}


@pytest.mark.parametrize(("spoil", "says"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_compared_is_refused(spoil, says):
    with pytest.raises(OverlayError, match=says):
        compare.make_report(*spoil(*published.swa_records()), [ITL])


def test_runs_that_did_not_prove_themselves_are_named():
    base, ours = published.swa_records()
    ours[0] = dataclasses.replace(ours[0], proofs={"text": {"ok": False, "says": "3 answers\nare empty"}})
    text = compare.markdown(compare.make_report(base, ours, [ITL]))
    assert "PR, 32k/1k c1, round 1, run 1: text: 3 answers are empty" in text
    (first,) = (line for line in text.splitlines() if line.startswith("| 32k/1k c1 | 5.687"))
    (second,) = (line for line in text.splitlines() if line.startswith("| 32k/1k c2 | 6.917"))
    assert first.endswith("| faster, not all runs proved |") and "proved" not in second


def test_what_only_one_arm_ran_is_named():
    base, ours = published.swa_records()
    whole = compare.make_report(base, ours, [ITL])
    assert not whole.left_out and "Not in both arms" not in compare.markdown(whole)
    only = [record for record in ours if record.point == "32k/1k c1"][:-1]
    text = compare.markdown(compare.make_report(base, only, [ITL]))
    missing = published.swa_records()[1][[r.point for r in ours].index("32k/1k c1") + len(only)]
    assert "**Not in both arms:**" in text and "- 32k/1k c2: only base ran it" in text
    assert f"- 32k/1k c1: round {missing.round}, run {missing.run}: only base has it" in text
    assert "only PR" not in text


BAD_LINES = {
    "no JSON": ("{", "line 2 is no JSON"),
    "a list": ("[]", "no record"),
    "another format": ('{"format": 2}', "format 2"),
    "no figures": ('{"format": 1, "arm": "a", "point": "p", "round": 1, "half": "", "run": 1}', "figures"),
    "no number": (
        '{"format": 1, "arm": "a", "point": "p", "round": 1, "half": "", "run": 1, "figures": {"x": NaN}}',
        "finite",
    ),
    "unknown field": (
        '{"format": 1, "arm": "a", "point": "p", "round": 1, "half": "", "run": 1, "figures": {}, "runn": 1}',
        "runn",
    ),
}


GOOD_FIELDS = {"format": 1, "arm": "a", "point": "p", "round": 1, "half": "", "run": 1, "figures": {"x": 1.0}}
GOOD_REQUEST = {"input_tokens": 3, "output_tokens": 2, "ttft_ms": 1.0, "itl_ms": 1.0}
BAD_FIELDS = {
    "a round before the first": {"round": 0},
    "a run that is true": {"run": True},
    "a figure beyond numbers": {"figures": {"x": 1e308}},
    "requests that are a map": {"requests": {}},
    "a request of texts": {"requests": [{**GOOD_REQUEST, "itl_ms": "fast"}]},
    "a request without a count": {"requests": [{"input_tokens": 3, "ttft_ms": 1.0, "itl_ms": 1.0}]},
    "a request of another field": {"requests": [{**GOOD_REQUEST, "retries": 1}]},
    "launches of texts": {"launches": {"kernel": "4"}},
    "a proof that is a number": {"proofs": {"text": 3}},
    "a proof of 1": {"proofs": {"text": {"ok": 1, "says": ""}}},
    "a proof without words": {"proofs": {"text": {"ok": True}}},
    "evidence that is a list": {"evidence": ["sku"]},
    "a seed that is a text": {"seed": "1"},
}


@pytest.mark.parametrize("fields", BAD_FIELDS.values(), ids=BAD_FIELDS)
def test_a_field_of_another_form_is_named(tmp_path, fields):
    assert records.from_json({**GOOD_FIELDS, "requests": [GOOD_REQUEST]}, "here").requests[0].error == ""
    (name,) = fields
    with pytest.raises(OverlayError, match="here is no record of a run") as error:
        records.from_json({**GOOD_FIELDS, **fields}, "here")
    assert name in error.value.render()


def test_a_set_with_a_run_twice_is_refused(tmp_path):
    file = write(tmp_path, published.swa_records()[0][:2]) / records.RUNS_NAME
    file.write_text(file.read_text() * 2)
    for use in (records.read, ResultSet):
        with pytest.raises(OverlayError, match="holds a run twice"):
            use(tmp_path)


def test_launches_that_are_no_numbers_are_refused(tmp_path):
    write(tmp_path, published.swa_records()[0][:2])
    (tmp_path / "launches.json").write_text('{"base": {"32k/1k c1": {"kernel": "4"}}}')
    with pytest.raises(OverlayError, match="holds no launches"):
        records.read(tmp_path)


@pytest.mark.parametrize(("line", "says"), BAD_LINES.values(), ids=BAD_LINES)
def test_a_line_that_is_no_record_is_named(tmp_path, line, says):
    file = write(tmp_path, published.swa_records()[0][:1]) / records.RUNS_NAME
    file.write_text(file.read_text() + line + "\n")
    with pytest.raises(OverlayError, match=says):
        records.read(tmp_path)


def test_records_survive_a_kill_in_the_middle_of_a_line(tmp_path):
    base, _ = published.swa_records()
    file = write(tmp_path, base[:3]) / records.RUNS_NAME
    file.write_bytes(file.read_bytes()[:-20])
    assert records.read(tmp_path) == base[:2]
    kept = ResultSet(tmp_path)
    kept.append(base[2])
    assert records.read(tmp_path) == base[:3]
    assert file.with_name("runs.jsonl.torn").exists()
    with pytest.raises(OverlayError, match="holds this run already"):
        kept.append(base[2])


def test_a_set_that_is_not_there_or_an_unknown_arm_is_named(tmp_path, capsys):
    assert main(["compare", str(tmp_path / "none"), str(tmp_path)]) == 2
    folder = write(tmp_path / "set", published.swa_records()[0])
    assert main(["compare", f"{folder}:base", f"{folder}:pr"]) == 2
    errors = capsys.readouterr().err
    assert "runs.jsonl is missing" in errors and "wanted: one of base" in errors
