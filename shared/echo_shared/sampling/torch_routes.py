"""Routes of a mixture-of-experts model: the ids of the experts that compute a token in each layer.

A router gives the token the K experts with the highest scores. Two scores are often nearly equal, so the rounding of
another engine gives the token another expert, and its probabilities jump. `Routers.recording` collects the routes of a
forward pass, `Routers.replaying` gives routes to one. The weights of the experts always follow from the pass's own
scores, so their gradients stay right. Source: rollout routing replay, R3 (arXiv 2510.11370).

    sampler, bfloat16    scores .31 .30 .29 ...    experts 4 and 9     recorded: 4 9
    learner, float32     scores .31 .29 .30 ...    experts 4 and 7     replayed: 4 9, weights from .31 and .29

Departure from R3: routes come from nodes that are not trusted. A replayed expert's score must lie within `MARGIN` of
the score that the pass needs for its own choice. Otherwise the pass makes its own choice for this token and layer. So a
node cannot move probabilities by more than rounding can.

transformers names a router's class `...TopKRouter` and returns logits, weights and expert ids from it. `Routers.of`
tests this on random tokens, and finds no routers in a model of another form.

Dimensions: T tokens, M layers with a router, K experts of a token in one layer, E experts of a layer, H hidden size.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from echo_shared.wire.messages import NO_ROUTE

MOST_EXPERTS: Final = NO_ROUTE
"""Largest number of experts in one layer: an expert id takes one byte."""
MARGIN: Final = 0.1
"""How far a replayed expert's score may lie below the lowest score of the pass's own choice. Unit: the standard
deviation of the token's scores over the layer's experts. Scores that are probabilities are compared by logarithm."""

_ROUTER: Final = re.compile(r"\w*Top[kK]Router")
_TESTED_TOKENS: Final = 8


@dataclass(slots=True)
class Replay:
    """Routes for one forward pass."""

    routes_TMK: Tensor
    """Expert ids, uint8. If all ids of a token are `NO_ROUTE`, the forward pass chooses the token's experts."""
    refused: list[Tensor] = field(default_factory=list)
    """Result of the forward pass: one tensor [T] for each layer. True where the layer chose its own experts, because
    the router's scores for the given experts are too low (by more than `MARGIN`).
    """


class Routers:
    """All routers of one model, in the order of its layers; create it with `of`."""

    def __init__(self, modules: Sequence[nn.Module], *, top_k: int, num_experts: int) -> None:
        self.top_k = top_k
        self.num_experts = num_experts
        self._modules = modules
        self._are_chances = [_scores_are_chances(module) for module in modules]
        self._recorded: list[Tensor] | None = None
        self._replay: Replay | None = None

    @classmethod
    def of(cls, model: nn.Module) -> Routers | None:
        """Return the model's routers, and let them record and replay. Return None for a model without routers, or with
        routers whose routes cannot be recorded and replayed.
        """
        modules = [module for module in model.modules() if _ROUTER.fullmatch(type(module).__name__)]
        shapes = {_shape(module) for module in modules}
        if len(shapes) != 1 or (shape := shapes.pop()) is None or shape[1] > MOST_EXPERTS:
            return None
        routers = cls(modules, top_k=shape[0], num_experts=shape[1])
        if not all(map(_replays, modules)):
            return None
        for number, module in enumerate(modules):
            module.forward = partial(routers._route, number, module.forward)
        return routers

    @property
    def num_layers(self) -> int:
        return len(self._modules)

    @property
    def route_bytes(self) -> int:
        """Bytes of one token's route."""
        return self.num_layers * self.top_k

    @contextmanager
    def recording(self) -> Iterator[list[Tensor]]:
        """Within the block, collect the expert ids of each layer, [T, K]. The block makes one forward pass."""
        recorded: list[Tensor] = []
        self._recorded = recorded
        try:
            yield recorded
        finally:
            self._recorded = None

    @property
    def current(self) -> Replay | None:
        """Routes that forward passes replay at present; None: passes choose by themselves."""
        return self._replay

    @contextmanager
    def replaying(self, replay: Replay | None) -> Iterator[None]:
        """Within the block, forward passes follow the routes in `replay`; None: passes choose the experts by
        themselves.
        """
        before, self._replay = self._replay, replay
        try:
            yield
        finally:
            self._replay = before

    def _route(self, number: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        replay = self._replay
        if replay is None:
            output = forward(*args, **kwargs)
        else:
            given_TK = replay.routes_TMK[:, number].long()
            with _Choice(given_TK, self.num_experts, are_chances=self._are_chances[number]) as choice:
                output = forward(*args, **kwargs)
            replay.refused += choice.refused
        if self._recorded is not None:
            self._recorded.append(output[2])
        return output


def recording(routers: Routers | None) -> AbstractContextManager[list[Tensor]]:
    """Return `Routers.recording`. Without routers, nothing is collected."""
    return nullcontext([]) if routers is None else routers.recording()


def packed(recorded: Sequence[Tensor]) -> NDArray[np.uint8] | None:
    """Return the routes of a recorded pass [T, B], where B is layers times experts of a token; None if nothing was
    recorded.
    """
    return torch.cat(list(recorded), dim=1).to(torch.uint8).numpy(force=True) if recorded else None


class _Choice(TorchFunctionMode):
    """Replaces the experts with the highest scores by given ones, in one router's forward pass."""

    def __init__(self, given_TK: Tensor, num_experts: int, *, are_chances: bool) -> None:
        super().__init__()
        self._given_TK = given_TK
        self._num_experts, self._are_chances = num_experts, are_chances
        self.refused: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk) or not _chooses_experts(args[0], result, self._num_experts):
            return result
        scores_TE, own_TK = args[0], result[1]
        with torch.no_grad():
            known_T = self._given_TK[:, 0] != NO_ROUTE
            far_T = shortfalls(scores_TE, own_TK, self._given_TK, are_chances=self._are_chances) > MARGIN
            chosen_TK = torch.where((known_T & ~far_T)[:, None], self._given_TK, own_TK)
        self.refused.append(known_T & far_T)
        return torch.return_types.topk((scores_TE.gather(1, chosen_TK), chosen_TK))


class _Seen(TorchFunctionMode):
    """Records the scores from which a router chooses its experts."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self._num_experts = num_experts
        self.scores: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.topk, Tensor.topk) and _chooses_experts(args[0], result, self._num_experts):
            self.scores.append(args[0])
        return result


def _chooses_experts(scores: Tensor, result: Any, num_experts: int) -> bool:
    """Return True for the choice of experts, False for that of groups of experts."""
    return scores.dim() == 2 and scores.shape[1] == num_experts and result[1].dim() == 2


def shortfalls(scores_TE: Tensor, own_TK: Tensor, given_TK: Tensor, *, are_chances: bool) -> Tensor:
    """Return, for each token [T], how far the lowest score of the given experts lies below that of the own choice, in
    the unit of `MARGIN`. The result is infinite unless the ids are K different experts.
    """
    # Leave scores of 0 and -inf out of the spread: models that first choose groups of experts give them to all experts
    # of the other groups.
    usable_TE = scores_TE.isfinite() & (scores_TE > 0) if are_chances else scores_TE.isfinite()
    compared_TE = scores_TE.float().where(usable_TE, 1.0 if are_chances else 0.0)
    compared_TE = compared_TE.log() if are_chances else compared_TE
    count_T = usable_TE.sum(dim=1)
    mean_T = compared_TE.sum(dim=1) / count_T
    errors_TE = (compared_TE - mean_T[:, None]).where(usable_TE, 0.0)
    spread_T = (errors_TE.square().sum(dim=1) / count_T).sqrt()
    compared_TE = compared_TE.where(usable_TE, -torch.inf)
    size = scores_TE.shape[1]
    ids_TK = given_TK.clamp(max=size - 1)
    short_T = compared_TE.gather(1, own_TK).amin(dim=1) - compared_TE.gather(1, ids_TK).amin(dim=1)
    is_route_T = (given_TK < size).all(dim=1) & (given_TK.sort(dim=1).values.diff(dim=1) > 0).all(dim=1)
    return (short_T / spread_T.clamp(min=torch.finfo(torch.float32).tiny)).where(is_route_T, torch.inf)


def _shape(module: nn.Module) -> tuple[int, int] | None:
    """Return K and E of a router; None if the module has another form."""
    weight, top_k = getattr(module, "weight", None), getattr(module, "top_k", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2 or not isinstance(top_k, int):
        return None
    return top_k, weight.shape[0]


def _random_tokens(module: Any) -> Tensor:
    weight: Tensor = module.weight
    generator = torch.Generator().manual_seed(0)
    return torch.randn(_TESTED_TOKENS, weight.shape[1], generator=generator).to(weight)


@torch.no_grad()
def _replays(module: Any) -> bool:
    """Return True if the router gives the same output when its own choice is replayed."""
    tokens_TH = _random_tokens(module)
    try:
        own = module(tokens_TH)
        with _Choice(own[2], module.weight.shape[0], are_chances=False) as choice:
            again = module(tokens_TH)
    except (TypeError, IndexError, AttributeError, RuntimeError):
        return False  # The class is another form of router, or needs further arguments.
    return len(choice.refused) == 1 and not choice.refused[0].any() and all(map(torch.equal, own[1:3], again[1:3]))


@torch.no_grad()
def _scores_are_chances(module: Any) -> bool:
    """Return True if the router chooses by softmax or sigmoid, False if it chooses by logits."""
    with _Seen(module.weight.shape[0]) as seen:
        module(_random_tokens(module))
    return bool((seen.scores[0] >= 0).all())
