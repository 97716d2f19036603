"""Routes are tested against routers written in this file, independent of the code that replays routes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from echo_shared.sampling import torch_routes
from echo_shared.sampling.torch_routes import Replay, Routers
from echo_shared.wire.messages import NO_ROUTE
from tests.families import FAMILIES

IDS = torch.randint(0, 128, (2, 11), generator=torch.Generator().manual_seed(3))
TOKENS = IDS.numel()
OTHERS = {
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "qwen2_moe": ("Qwen2Moe", {"num_experts": 4, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}),
    "olmoe": ("Olmoe", {"num_experts": 4}),
    "granitemoe": ("GraniteMoe", {"num_local_experts": 4}),
}


def _config(name: str) -> Any:
    if name in FAMILIES:
        return FAMILIES[name]()
    kind, options = OTHERS[name]
    small: dict[str, Any] = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2}
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    return getattr(transformers, f"{kind}Config")(
        **small, **ids, num_experts_per_tok=2, intermediate_size=64, **options
    )


def a_model(name: str, *, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(_config(name), dtype=torch.float32).eval().requires_grad_(False)


def routers_of(model: nn.Module) -> Routers:
    routers = Routers.of(model)
    assert routers is not None
    return routers


def recorded(model: Any, routers: Routers) -> Tensor:
    with routers.recording() as found:
        model(input_ids=IDS)
    routes_TB = torch_routes.packed(found)
    assert routes_TB is not None
    return torch.from_numpy(routes_TB).reshape(-1, routers.num_layers, routers.top_k)


def logits(model: Any, routers: Routers, replay: Replay | None) -> Tensor:
    with routers.replaying(replay):
        found: Tensor = model(input_ids=IDS).logits
    return found


@contextmanager
def any_margin(monkeypatch: pytest.MonkeyPatch, margin: float) -> Iterator[None]:
    with monkeypatch.context() as patched:
        patched.setattr(torch_routes, "MARGIN", margin)
        yield


def sampler_of(name: str, model: Any, *, noise: float) -> Any:
    """Return a copy of the model whose routers have noise in their weights, like those of a coarse engine."""
    coarse = a_model(name)
    coarse.load_state_dict(model.state_dict())
    for module in coarse.modules():
        if torch_routes._ROUTER.fullmatch(type(module).__name__):
            module.weight += noise * torch.randn_like(module.weight) * module.weight.std()
    return coarse


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_next", "gpt_oss", "deepseek_v2", *OTHERS])
def test_the_routers_of_every_family_are_found_and_replay_their_own_choice(name: str) -> None:
    model = a_model(name)
    expected = model(input_ids=IDS).logits
    routers = routers_of(model)
    routes = recorded(model, routers)
    assert routes.shape == (TOKENS, routers.num_layers, 2) and int(routes.max()) < routers.num_experts
    replay = Replay(routes)
    assert torch.equal(logits(model, routers, None), expected)
    assert torch.equal(logits(model, routers, replay), expected)
    assert len(replay.refused) == routers.num_layers and not torch.stack(replay.refused).any()


def test_a_router_that_chooses_groups_of_experts_first_replays_its_choice_of_experts() -> None:
    """DeepSeek-V3's router chooses three times: two experts of each group, whose scores are the group's score; then
    groups; and then experts of these groups."""
    torch.manual_seed(1)
    config = transformers.DeepseekV3Config(hidden_size=64, n_routed_experts=16, n_group=4, topk_group=2)
    router = DeepseekV3TopkRouter(config)
    router.weight.data.normal_()
    hidden = torch.randn(9, 64)
    _, weights, own = router(hidden)
    routers = routers_of(nn.ModuleList([router]))
    assert (routers.top_k, routers.num_experts) == (8, 16)
    replay = Replay(own[:, None].to(torch.uint8))
    with routers.replaying(replay):
        _, found, chosen = router(hidden)
    assert torch.equal(chosen, own) and torch.equal(found, weights) and not replay.refused[0].any()


@pytest.mark.parametrize("name", ["llama", "granitemoehybrid"])
def test_a_model_without_experts_has_no_routers(name: str) -> None:
    assert Routers.of(a_model(name)) is None


def test_experts_whose_ids_take_two_bytes_are_not_recorded() -> None:
    config = _config("qwen3_moe")
    config.num_experts, config.moe_intermediate_size, config.num_hidden_layers = 256, 8, 1
    assert Routers.of(AutoModelForCausalLM.from_config(config)) is None


def by_softmax_of_all(router: Any, x: Tensor, ids_TK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Route as Qwen3-MoE does: take the softmax over all experts, then the weights of the given ones. `norm_topk_prob`
    makes their sum 1.
    """
    scores_TE = nn.functional.linear(x, router.weight)
    weights_TK = scores_TE.softmax(dim=-1).gather(1, ids_TK)
    return scores_TE, weights_TK / weights_TK.sum(dim=1, keepdim=True) if router.norm_topk_prob else weights_TK, ids_TK


def by_softmax_of_chosen(router: Any, x: Tensor, ids_TK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Route as gpt-oss does: take the softmax over the logits of the given experts only."""
    scores_TE = nn.functional.linear(x, router.weight, router.bias)
    return scores_TE, scores_TE.gather(1, ids_TK).softmax(dim=-1), ids_TK


class Forced(nn.Module):
    """A router that uses given experts. Its formula is written out here, as a reference for the replay of routes."""

    def __init__(self, router: Any, formula: Callable[..., Any], routes_TK: Tensor) -> None:
        super().__init__()
        self.router, self.formula, self.routes_TK = router, formula, routes_TK.long()

    def forward(self, x: Tensor) -> Any:
        return self.formula(self.router, x.reshape(-1, x.shape[-1]), self.routes_TK)


@pytest.mark.parametrize(
    ("name", "place", "formula"),
    [("qwen3_moe", "gate", by_softmax_of_all), ("gpt_oss", "router", by_softmax_of_chosen)],
)
def test_replayed_routes_compute_what_forced_routes_compute(
    name: str, place: str, formula: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, forced = a_model(name), a_model(name)
    coarse = sampler_of(name, model, noise=0.5)
    routes = recorded(coarse, routers_of(coarse))
    own = recorded(model, routers_of(model))
    share = float((routes.sort(-1).values != own.sort(-1).values).any(-1).float().mean())
    assert 0.1 < share < 0.9, "many routes differ"
    for number, layer in enumerate(forced.model.layers):
        setattr(layer.mlp, place, Forced(getattr(layer.mlp, place), formula, routes[:, number]))
    expected = forced(input_ids=IDS).logits
    again = a_model(name)
    with any_margin(monkeypatch, 1e9):
        found = logits(again, routers_of(again), Replay(routes))
    assert torch.allclose(found, expected, rtol=0, atol=2e-6)
    assert not torch.allclose(found, model(input_ids=IDS).logits, atol=1e-2)


def test_gradients_flow_through_the_weights_of_replayed_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    model, forced = a_model("qwen3_moe"), a_model("qwen3_moe")
    coarse = sampler_of("qwen3_moe", model, noise=0.5)
    routes = recorded(coarse, routers_of(coarse))
    for number, layer in enumerate(forced.model.layers):
        layer.mlp.gate = Forced(layer.mlp.gate, by_softmax_of_all, routes[:, number])
    gradients = []
    for one in (model, forced):
        weight = one.model.layers[0].self_attn.q_proj.weight.requires_grad_(True)
        if one is model:
            with any_margin(monkeypatch, 1e9):
                found = logits(model, routers_of(model), Replay(routes))
        else:
            found = forced(input_ids=IDS).logits
        found.log_softmax(-1)[..., 5].sum().backward()
        gradients.append(weight.grad)
    assert torch.allclose(*gradients, rtol=1e-4, atol=1e-6) and gradients[0].abs().max() > 1e-3


def test_a_token_without_route_follows_the_models_own_choice() -> None:
    model = a_model("gpt_oss")
    routers, expected = routers_of(model), model(input_ids=IDS).logits
    replay = Replay(torch.full((TOKENS, 2, 2), NO_ROUTE, dtype=torch.uint8))
    assert torch.equal(logits(model, routers, replay), expected)
    assert not torch.stack(replay.refused).any(), "an unknown route is not refused"


SCORES = torch.tensor([[4.0, 3.0, 2.9, 0.0, -1.0]])
SPREAD = float(SCORES.std(correction=0))
OWN = torch.tensor([[0, 1]])


@pytest.mark.parametrize(
    ("given", "short"),
    [([0, 1], 0.0), ([1, 0], 0.0), ([0, 2], 0.1), ([2, 1], 0.1), ([0, 3], 3.0), ([3, 4], 4.0)],
)
def test_a_shortfall_by_hand(given: list[int], short: float) -> None:
    """The lowest score of the router's own choice is 3. The shortfall does not depend on which of the chosen experts is
    missing.
    """
    found = torch_routes.shortfalls(SCORES, OWN, torch.tensor([given]), are_chances=False)
    assert float(found) == pytest.approx(short / SPREAD, abs=1e-6)
    chances = torch_routes.shortfalls(SCORES.softmax(-1), OWN, torch.tensor([given]), are_chances=True)
    assert float(chances) == pytest.approx(short / SPREAD, abs=1e-5), "probabilities are compared by logarithm"


@pytest.mark.parametrize("given", [[1, 1], [0, 5], [0, NO_ROUTE], [NO_ROUTE, NO_ROUTE]], ids=str)
def test_ids_that_are_no_route_are_infinitely_far(given: list[int]) -> None:
    found = torch_routes.shortfalls(SCORES, OWN, torch.tensor([given]), are_chances=False)
    assert found.tolist() == [torch.inf]


@pytest.mark.parametrize("nothing", [0.0, -torch.inf])
def test_experts_of_groups_that_were_not_chosen_do_not_count(nothing: float) -> None:
    """DeepSeek sets the scores of experts in other groups to 0 or -inf. The spread must be computed from the remaining
    scores.
    """
    are_chances = nothing == 0.0
    scores = SCORES.softmax(-1) if are_chances else SCORES
    wider = torch.cat([scores, torch.full((1, 3), nothing)], dim=1)
    near = torch_routes.shortfalls(wider, OWN, torch.tensor([[0, 2]]), are_chances=are_chances)
    far = torch_routes.shortfalls(wider, OWN, torch.tensor([[0, 6]]), are_chances=are_chances)
    assert float(near) == pytest.approx(0.1 / SPREAD, abs=1e-5) and far.tolist() == [torch.inf]


def test_a_route_outside_of_the_margin_is_refused_for_its_token_and_layer_alone() -> None:
    model = a_model("qwen3_moe")
    routers, expected = routers_of(model), model(input_ids=IDS).logits
    own = recorded(model, routers)
    scores = []
    hook = model.model.layers[1].mlp.gate.register_forward_hook(lambda _m, _i, output: scores.append(output[0]))
    model(input_ids=IDS)
    hook.remove()
    worst = scores[0].argsort(dim=-1)[:, :2]
    routes = own.clone()
    routes[:, 1] = worst.to(torch.uint8)
    replay = Replay(routes)
    assert torch.equal(logits(model, routers, replay), expected), "the model's own choice is computed"
    refused = torch.stack(replay.refused)
    assert not refused[0].any() and refused[1].all()


def test_both_passes_of_one_router_record_and_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """While routes are replayed, the routers record the replayed routes."""
    model = a_model("gpt_oss")
    routers = routers_of(model)
    coarse = sampler_of("gpt_oss", model, noise=0.5)
    routes = recorded(coarse, routers_of(coarse))
    with any_margin(monkeypatch, 1e9), routers.replaying(Replay(routes)):
        assert torch.equal(recorded(model, routers), routes)
    assert routers.current is None
