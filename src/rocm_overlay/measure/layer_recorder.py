# SPDX-License-Identifier: Apache-2.0
"""Records a model's layers' outputs at decode tokens by forward hooks; ``layers`` compares them.

Hooks see eager steps only, in which our kernels run too. A row is known by its position: prompt lengths lie
so far apart that each position belongs to one request's answer, and a step with any other row, a prefill's,
is left out. A router that ran shows vLLM's path: the kernels pick experts by themselves.
"""

from __future__ import annotations

import bisect
import inspect
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rocm_overlay.errors import OverlayError
from rocm_overlay.measure.layers import LayerOutput, Recording, Token

if TYPE_CHECKING:
    import torch

LAYER = re.compile(r"(?:^|\.)layers\.(\d+)$")
LAYER_CLASS = "DecoderLayer"
ROUTER = "gate"
SCORING = "sqrtsoftplus"
FORMAT = 1


class LayerRecorder:
    """Hooks on every decoder layer of a model and on its routers.

    Args:
        model: holds the layers as ``…layers.N`` of a class whose name ends in ``DecoderLayer``, called with
            ``positions`` [rows] and returning (hidden [rows, ...], residual [rows, ...], ...).
        prompts: each request's prompt length, in tokens.
        steps: decode tokens that are recorded of each request.

    Raises:
        OverlayError: no such layer, or prompts whose answers share positions.
    """

    def __init__(self, model: torch.nn.Module, prompts: Sequence[int], steps: int) -> None:
        self.prompts, self.steps = sorted(prompts), steps
        if any(after - before < steps for before, after in zip(self.prompts, self.prompts[1:], strict=False)):
            raise OverlayError(
                "the prompts' answers share positions",
                seen=f"lengths {self.prompts} and {steps} tokens each",
                wanted="lengths that lie further apart than an answer is long",
                fix="choose other lengths",
            )
        self.outputs: dict[Token, dict[int, LayerOutput]] = {}
        self.problems: list[str] = []
        self._gaps: dict[int, torch.Tensor] = {}
        self._handles: list[Any] = []
        self.layers = [
            (int(match[1]), module)
            for name, module in model.named_modules()
            if (match := LAYER.search(name)) and type(module).__name__.endswith(LAYER_CLASS)
        ]
        if not self.layers:
            raise OverlayError(
                "the model has no decoder layers",
                seen=type(model).__name__,
                wanted=f"modules layers.N of a class named …{LAYER_CLASS}",
                fix="give a model of such layers",
            )
        for index, layer in self.layers:
            self._hook(index, layer)

    def _hook(self, index: int, layer: torch.nn.Module) -> None:
        signature = inspect.signature(layer.forward)

        def before(_: Any, __: Any) -> None:
            self._gaps.pop(index, None)

        def after(_: Any, words: Any, named: Any, output: Any) -> None:
            self._keep(index, signature.bind(*words, **named).arguments["positions"], output)

        self._handles.append(layer.register_forward_pre_hook(before))
        self._handles.append(layer.register_forward_hook(after, with_kwargs=True))
        for block in layer.modules():
            router = getattr(block, ROUTER, None)
            if router is not None and getattr(block, "scoring_func", None) == SCORING:
                self._handles.append(router.register_forward_hook(self._routed(index, block, router)))

    def _routed(self, index: int, block: Any, router: Any) -> Any:
        def after(_: Any, __: Any, output: Any) -> None:
            logits = output[0] if isinstance(output, tuple) else output
            self._gaps[index] = routing_gap(logits, router.e_score_correction_bias, block.n_activated_experts)

        return after

    def _token(self, position: int) -> Token | None:
        index = bisect.bisect_right(self.prompts, position) - 1
        if index < 0 or position - self.prompts[index] >= self.steps:
            return None
        return Token(self.prompts[index], position)

    def _keep(self, index: int, positions: torch.Tensor, output: Any) -> None:
        tokens = [self._token(int(position)) for position in positions.flatten().tolist()]
        # Two rows of one request are a prefill's, even where they lie inside another's answer.
        if None in tokens or len({token.prompt for token in tokens if token}) < len(tokens):
            return
        hidden, residual = (part.detach().to("cpu", copy=True) for part in output[:2])
        gaps = self._gaps.get(index)
        values = [None] * len(tokens) if gaps is None else gaps.tolist()
        for row, token in enumerate(tokens):
            assert token is not None
            own = self.outputs.setdefault(token, {})
            if index in own:
                self.problems.append(f"layer {index} ran twice at {token}")
            own[index] = LayerOutput(hidden[row].flatten(), residual[row].flatten(), values[row])

    def finish(self, file: Path) -> list[str]:
        """Take the hooks off and write the recording; its problems, none of a whole one."""
        import torch

        for handle in self._handles:
            handle.remove()
        wanted = {Token(prompt, prompt + step) for prompt in self.prompts for step in range(self.steps)}
        whole = {token for token, own in self.outputs.items() if len(own) == len(self.layers)}
        if missing := len(wanted - whole):
            self.problems.append(
                f"{missing} of {len(wanted)} tokens were not seen whole in a decode-only step"
            )
        rows = [
            (token.prompt, token.position, index, one.hidden, one.residual, one.gap)
            for token, own in self.outputs.items()
            for index, one in own.items()
        ]
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_name(file.name + ".partial")
        torch.save({"format": FORMAT, "rows": rows}, partial)
        partial.replace(file)
        return self.problems


def routing_gap(logits: torch.Tensor, bias: torch.Tensor | None, picks: int) -> torch.Tensor:
    """Between the scores of the last expert that is picked and the first that is not, f32 [rows].

    Args:
        logits: [rows, experts]; scores are the root of their softplus, and the bias is added for the choice.
    """
    import torch

    scores = torch.nn.functional.softplus(logits.float()).sqrt()
    best = torch.topk(scores if bias is None else scores + bias.float(), picks + 1, dim=-1).values
    return best[..., -2] - best[..., -1]


def read_recording(file: Path) -> Recording:
    """A recording that ``finish`` wrote.

    Raises:
        OverlayError: no such file, or one that is none.
    """
    import pickle

    import torch

    try:
        content = torch.load(file, weights_only=True)
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']}")
        found: dict[Token, dict[int, LayerOutput]] = {}
        for prompt, position, index, hidden, residual, gap in content["rows"]:
            found.setdefault(Token(prompt, position), {})[index] = LayerOutput(hidden, residual, gap)
    except (
        OSError,
        EOFError,
        RuntimeError,
        pickle.UnpicklingError,
        KeyError,
        TypeError,
        ValueError,
    ) as error:
        raise OverlayError(
            f"{file} is no recording of layers",
            seen=f"{type(error).__name__}: {error}",
            wanted=f"format {FORMAT}, as rocm-overlay layer-test leaves it",
            fix="record it anew",
        ) from None
    return found
