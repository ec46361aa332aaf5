# SPDX-License-Identifier: Apache-2.0
"""Figures that pull requests published, typed in from their tables, and result sets made of them.

The tables print rounded figures, and some of their deltas were taken from unrounded ones. ``reach`` gives
the deltas that inputs within half a last digit can have.
"""

from dataclasses import dataclass

from rocm_overlay.measure.records import Record, Request

# The gfx950 SWA metadata pull request: ITL p50 in ms, (base, PR) a round; base on GPUs 0-3, then on 4-7.
SWA_ROUNDS = {
    "32k/1k c1": ((5.687, 5.581), (5.681, 5.587)),
    "32k/1k c2": ((6.917, 6.800), (6.865, 6.824)),
}
SWA_MEANS = {"32k/1k c1": (5.684, 5.584), "32k/1k c2": (6.891, 6.812)}
SWA_DELTA_US = {"32k/1k c1": -100, "32k/1k c2": -80}
SWA_CHANGE = {"32k/1k c1": -1.75, "32k/1k c2": -1.16}
SWA_ROUND_CHANGES = {"32k/1k c1": (-1.85, -1.66), "32k/1k c2": (-1.70, -0.61)}
# Of three runs on one server, in percent; and of one arm between the halves.
SWA_SAME_ARM = {"32k/1k c1": 0.3, "32k/1k c2": 1.0}
SWA_HALF_TO_HALF = {"32k/1k c1": 0.1, "32k/1k c2": 0.75}
SWA_LAUNCHES = {
    "base": {
        "_compute_swa_indices_and_lens_kernel": 4,
        "non-causal index kernel": 3,
        "compare_scalar_kernel<long>": 7,
        "FillFunctor<int>": 9,
        "_count_valid_row_entries_kernel": 7,
        "rocprim scan": 7,
        "_compact_dense_row_to_ragged_kernel": 7,
        "__amd_rocclr_copyBuffer": 24,
        "_token_request_mapping_kernel": 2,
        "others": 44,
    },
    "PR": {
        "FillFunctor<int>": 2,
        "__amd_rocclr_copyBuffer": 10,
        "_decode_swa_meta_kernel": 7,
        "_token_request_mapping_kernel": 2,
        "others": 44,
    },
}
SWA_LAUNCH_TOTALS = {"base": 114, "PR": 65}

# The specialised-decode pull request, single runs: (main, branch) of median ITL ms, output tok/s, acceptance.
SPECIALIZED = {
    "MI350 1k/512 c1 mono": ((5.91, 249.50, 1.55), (5.93, 247.89, 1.55)),
    "MI350 1k/512 c1": ((9.37, 176.78, 1.72), (9.40, 168.85, 1.64)),
    "MI350 1k/512 c4 mono": ((8.86, 482.20, 1.78), (8.84, 457.21, 1.68)),
    "MI350 64k/1k c64 mono": ((11.57, 493.53, 1.24), (11.55, 489.41, 1.23)),
    "MI300 1k/512 c1 mono": ((7.32, 218.62, 1.67), (7.54, 215.63, 1.69)),
    "MI300 1k/512 c4 mono": ((13.54, 446.72, 1.71), (13.95, 419.52, 1.80)),
    "MI300 64k/1k c1 mono": ((7.53, 106.13, 1.10), (7.73, 102.89, 1.08)),
    "MI300 64k/1k c1": ((15.51, 61.57, 1.14), (15.51, 58.53, 1.07)),
}


@dataclass(frozen=True)
class Gain:
    """A published ``first → second (gain×)``."""

    first: float
    second: float
    printed: str


# The mono decode pull request, AgentX, FFN launch against K1 + K2: p90 interactivity, total tok/s, and the
# median ratio of the same requests' inter-token latency.
AGENTX = {
    "TP4 c1": (Gain(523.7, 571.4, "1.09"), Gain(26796, 28225, "1.05"), "0.915"),
    "TP4 c2": (Gain(471.1, 510.0, "1.08"), Gain(27217, 28241, "1.04"), "0.916"),
    "TP4 c4": (Gain(445.1, 502.5, "1.13"), Gain(36791, 39640, "1.08"), "0.911"),
    "TP4 c8": (Gain(358.6, 367.6, "1.02"), Gain(62621, 62877, "1.00"), "0.915"),
    "TP2 c1": (Gain(429.1, 471.5, "1.10"), Gain(25039, 25599, "1.02"), "0.928"),
    "TP2 c2": (Gain(381.7, 417.2, "1.09"), Gain(25695, 25962, "1.01"), "0.925"),
    "TP2 c4": (Gain(332.4, 394.4, "1.19"), Gain(35885, 36761, "1.02"), "0.927"),
    "TP2 c8": (Gain(245.3, 265.7, "1.08"), Gain(60501, 61180, "1.01"), "0.932"),
}
# K1 + K2 against mono off on the same node, and against InferenceX's run at TP4.
AGENTX_BASELINE = {
    "TP2 c1": (Gain(318.1, 429.1, "1.35"), Gain(21573, 25039, "1.16")),
    "TP2 c2": (Gain(299.3, 381.7, "1.28"), Gain(22735, 25695, "1.13")),
    "TP2 c4": (Gain(288.0, 332.4, "1.15"), Gain(33043, 35885, "1.09")),
    "TP2 c8": (Gain(214.6, 245.3, "1.14"), Gain(58294, 60501, "1.04")),
    "TP4 c1": (Gain(343.7, 523.7, "1.52"), Gain(23691, 26796, "1.13")),
    "TP4 c2": (Gain(327.4, 471.1, "1.44"), Gain(23579, 27217, "1.15")),
    "TP4 c4": (Gain(307.2, 445.1, "1.45"), Gain(34831, 36791, "1.06")),
    "TP4 c8": (Gain(265.8, 358.6, "1.35"), Gain(60266, 62621, "1.04")),
}
# The FFN launch, us a layer, vLLM's against the kernel; and ranges of the whole layer at decode points.
FFN_LAUNCH = {
    "TP2 c1": Gain(136, 81, "1.69"),
    "TP2 c2": Gain(181, 128, "1.41"),
    "TP2 c4": Gain(241, 215, "1.12"),
    "TP2 c8": Gain(345, 342, "1.01"),
    "TP4 c1": Gain(111, 57, "1.96"),
    "TP4 c2": Gain(147, 85, "1.74"),
    "TP4 c4": Gain(176, 140, "1.26"),
    "TP4 c8": Gain(234, 209, "1.12"),
}


def swa_records():
    """The gfx950 pull request's two arms: three runs a server, spread as its noise says, around the cell."""
    halves = (("0-3", "4-7"), ("4-7", "0-3"))
    found = {"base": [], "PR": []}
    for point, rounds in SWA_ROUNDS.items():
        for number, values in enumerate(rounds, start=1):
            for arm, value, half in zip(found, values, halves[number - 1], strict=True):
                for run, share in enumerate((-0.5, 0.0, 0.5), start=1):
                    itl = value * (1 + share * SWA_SAME_ARM[point] / 100)
                    launches = SWA_LAUNCHES[arm] if point.endswith("c1") and run == 1 else {}
                    figures = {"itl_p50_ms": itl}
                    found[arm].append(Record(arm, point, number, half, run, figures, launches=launches))
    return found["base"], found["PR"]


def single_records(keys, rows):
    """One run an arm: ``rows`` gives each point's pair of figures in the order of ``keys``."""
    sides = ([], [])
    for point, pair in rows.items():
        for side, arm, figures in zip(sides, ("main", "branch"), pair, strict=True):
            side.append(Record(arm, point, 1, "", 1, dict(zip(keys, figures, strict=True))))
    return sides


def paired_requests(ratio, count=41):
    """Two request lists of one sequence whose median inter-token latency ratio is ``ratio``."""
    first, second = [], []
    for index in range(count):
        own = ratio + 0.004 * (index - count // 2)
        base = 1.5 + 0.01 * ((7 * index) % count)
        first.append(Request(1000 + index, 128, 90.0, base))
        second.append(Request(1000 + index, 130, 91.0, base * own))
    return tuple(first), tuple(second)


def reach(first, second, digit, formula):
    """The least and greatest of ``formula(first, second)`` where each input is known to half of ``digit``."""
    half = digit / 2
    corners = [formula(first + a, second + b) for a in (-half, half) for b in (-half, half)]
    return min(corners), max(corners)
