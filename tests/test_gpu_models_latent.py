"""On a GPU: the grouped products of many experts, in a captured graph and in training."""

import copy

import pytest
import torch

from suite.models.routed import RoutedExperts, Routing, SharedMixtureOfExperts
from tests.model_rig import relative_error

pytestmark = pytest.mark.gpu

HIDDEN, SIZE, EXPERTS, TOP_K = 2048, 1408, 64, 6  # DeepSeek-V2-Lite's


def block(dtype: torch.dtype) -> SharedMixtureOfExperts:
    routing = Routing(experts=EXPERTS, top_k=TOP_K, score="softmax", renormalise=False, scaling=1.0)
    made = SharedMixtureOfExperts(routing, HIDDEN, SIZE, 2 * SIZE, dtype=dtype, device="cuda").requires_grad_(False)
    random = torch.Generator("cuda").manual_seed(1)
    for parameter in made.parameters():
        parameter.normal_(0.0, parameter.shape[-1] ** -0.5, generator=random)
    return made


@torch.no_grad()
def test_experts_replay_in_a_graph_as_they_run_eagerly():
    made, batches = block(torch.bfloat16), [torch.randn(32, HIDDEN, device="cuda").bfloat16() for _ in range(3)]
    held = batches[0].clone()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            made(held)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = made(held)
    for x in batches:  # other experts each time: no shape may have been captured with the data
        held.copy_(x)
        graph.replay()
        assert torch.equal(out, made(x))


@torch.no_grad()
def test_a_padded_batch_gives_the_same_rows():
    made, x = block(torch.bfloat16), torch.randn(32, HIDDEN, device="cuda").bfloat16()
    other = torch.cat((x[:20], torch.randn(12, HIDDEN, device="cuda").bfloat16()))
    assert torch.equal(made.experts(x, *made.gate(x))[:20], made.experts(other, *made.gate(other))[:20])


def test_experts_train_under_autocast_within_twice_bf16s_own_error():
    made = RoutedExperts(4, 128, 64, dtype=torch.float32, device="cuda")
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    rough = copy.deepcopy(made).bfloat16()
    x = torch.randn(257, 128, device="cuda", requires_grad=True)
    chosen = torch.rand(257, 4, device="cuda").topk(2).indices
    weights = torch.rand(257, 2, device="cuda")

    def grads(experts: RoutedExperts, rows: torch.Tensor, *, autocast: bool = False):
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            return torch.autograd.grad(
                experts(rows, chosen, weights).float().square().sum(), [rows, *experts.parameters()]
            )

    exact, own = grads(made, x), grads(rough, x.detach().bfloat16().requires_grad_())
    for got, bf16, want in zip(grads(made, x, autocast=True), own, exact, strict=True):
        assert got.dtype == torch.float32
        assert relative_error(got, want) <= 2 * relative_error(bf16.float(), want) + 2**-8
