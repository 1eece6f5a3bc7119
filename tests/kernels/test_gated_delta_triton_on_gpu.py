"""The compiled Triton kernels of the gated delta rule against fp64, in every dtype and for every
row of the launch table. Bounds on relative errors: bf16 o 5e-3, gradients 8e-3; fp16 a fraction of
that (its products run in tf32); fp32 3e-5."""

import pytest
import torch
import torch.nn.functional as F

from kernels.levels import num_levels
from kernels.log_linear_gated_delta import (
    PendingFenwickState,
    launch,
    log_linear_gated_delta_rule,
    log_linear_gated_delta_rule_step,
    log_linear_gated_delta_rule_step_in_place,
)
from kernels.log_linear_gated_delta.reference import log_linear_gated_delta_recurrence
from kernels.state import FenwickState
from tests.guarded_memory import guarded_memory

pytestmark = pytest.mark.gpu
NAMES = ["o", "dq", "dk", "dv", "dlog_decay", "dbeta", "dlevel_weights"]
BOUNDS = {torch.bfloat16: 8e-3, torch.float16: 2e-3, torch.float32: 3e-5}


def make_inputs(
    B, T, G, H, K, V, dtype, *, longest=None, decay="weak", keys="random", beta="mixed"
):
    torch.manual_seed(B * 1000 + T)
    gate = torch.randn(B, T, H, device="cuda")
    log_decay = {
        "weak": -torch.exp(torch.rand(H, device="cuda")) * F.softplus(gate - 4),
        "none": torch.zeros_like(gate),
        "strong": -F.softplus(gate + 3) * torch.where(torch.randn_like(gate) > 1, 11.0, 1.0),
    }[decay]
    q, k = (F.normalize(torch.randn(B, T, G, K, device="cuda"), dim=-1) for _ in range(2))
    if keys == "few":  # eight keys, each of which comes back again and again
        k = k[:, torch.randint(0, min(8, T), (T,), device="cuda")]
    elif keys == "one":
        k = k[:, :1].expand_as(k)
    rate = torch.rand(B, T, H, device="cuda") if beta == "mixed" else torch.full_like(gate, beta)
    L = num_levels(longest or T)
    weights = F.softplus(torch.randn(B, T, H, L, device="cuda"))
    v = torch.randn(B, T, H, V, device="cuda")
    return [q.to(dtype), k.to(dtype), v.to(dtype), log_decay, rate, weights.to(dtype)]


def outputs_and_gradients(inputs, tangent, **options):
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    o, _ = log_linear_gated_delta_rule(*leaves, **options)
    return [o.detach(), *torch.autograd.grad(o, leaves, tangent.to(o.dtype))]


def poison():
    """Makes memory that the allocator hands out next hold NaN."""
    torch.cuda.empty_cache()
    torch.full((1 << 28,), torch.nan, device="cuda")


def assert_equal(inputs, cu_seqlens=None, bounds=None):
    dtype = inputs[2].dtype
    tangent = torch.randn_like(inputs[2])
    poison()
    actual = outputs_and_gradients(inputs, tangent, cu_seqlens=cu_seqlens, backend="triton")
    again = outputs_and_gradients(inputs, tangent, cu_seqlens=cu_seqlens, backend="triton")
    assert all(torch.equal(a, b) for a, b in zip(actual, again, strict=True))
    expected = outputs_and_gradients(
        [x.double() for x in inputs], tangent, cu_seqlens=cu_seqlens, backend="chunked"
    )
    # Where each token erases the one before, dlog_decay is 0 but for rounding.
    floors = {"dlog_decay": float(inputs[2].double().norm())}
    errors = {}
    for name, a, e in zip(NAMES, actual, expected, strict=True):
        error, scale = float((a.double() - e).norm()), max(float(e.norm()), floors.get(name, 0))
        errors[name] = error / scale if scale else error
    allowed = dict.fromkeys(NAMES, BOUNDS[dtype]) | (bounds or {})
    if dtype == torch.bfloat16:
        allowed["o"] = 5e-3
    bad = {name: error for name, error in errors.items() if not error <= allowed[name]}
    assert not bad, errors


@pytest.mark.parametrize("decay", ["weak", "none", "strong"])
@pytest.mark.parametrize("T", [1, 63, 64, 65, 129, 1000, 4097])
def test_bf16(T, decay):
    assert_equal(make_inputs(2, T, 6, 6, 128, 128, torch.bfloat16, decay=decay))


@pytest.mark.parametrize("decay", ["weak", "none", "strong"])
def test_bf16_at_16384(decay):
    assert_equal(make_inputs(1, 16384, 2, 2, 128, 128, torch.bfloat16, decay=decay))


@pytest.mark.parametrize("decay", ["weak", "none", "strong"])
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("T", [129, 1000])
def test_bf16_keys_that_repeat(T, beta, decay):
    inputs = make_inputs(1, T, 4, 4, 128, 128, torch.bfloat16, decay=decay, keys="few", beta=beta)
    # What was erased leaves its rounding to every later read of it: in dlog_decay these add up.
    assert_equal(inputs, bounds={"dlog_decay": 2e-2} if decay == "none" else None)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_bf16_one_key_for_all_tokens(beta):
    inputs = make_inputs(
        1, 1000, 4, 4, 128, 128, torch.bfloat16, decay="none", keys="one", beta=beta
    )
    assert_equal(inputs, bounds={"dlog_decay": 2e-2})


@pytest.mark.parametrize("T", [129, 1000])
@pytest.mark.parametrize("beta", [0.5, 1.0])
def test_fp32_keys_that_repeat(T, beta):
    inputs = make_inputs(1, T, 2, 2, 64, 64, torch.float32, decay="none", keys="one", beta=beta)
    assert_equal(inputs)


def test_bf16_against_the_recurrence_itself():
    inputs = make_inputs(1, 600, 2, 2, 64, 64, torch.bfloat16)
    state = FenwickState.empty(
        1, 2, inputs[-1].shape[-1], 64, 64, device="cuda", dtype=torch.float64
    )
    expected, _ = log_linear_gated_delta_recurrence(*[x.double() for x in inputs], state)
    o, _ = log_linear_gated_delta_rule(*inputs, backend="triton")
    assert float((o.double() - expected).norm() / expected.norm()) < 5e-3


def test_bf16_longer_than_one_step_of_the_gates_kernel():
    assert_equal(make_inputs(1, 80_000, 1, 1, 64, 64, torch.bfloat16))


def test_bf16_packed():
    ends = [5, 70, 1350, 1351, 3000]
    inputs = make_inputs(1, 3000, 6, 6, 128, 128, torch.bfloat16, longest=1649, decay="strong")
    assert_equal(inputs, torch.tensor([0, *ends]))


@pytest.mark.parametrize("G", [1, 2])
def test_bf16_groups(G):
    assert_equal(make_inputs(1, 1000, G, 4, 128, 128, torch.bfloat16))


@pytest.mark.parametrize(
    ("K", "V"),
    [(16, 16), (64, 64), (48, 80), (64, 128), (192, 384), (256, 256), (256, 96), (128, 512)],
)
def test_bf16_sizes(K, V):
    assert_equal(make_inputs(1, 600, 2, 2, K, V, torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("T", [65, 1300])
def test_other_dtypes(T, dtype):
    assert_equal(make_inputs(1, T, 2, 2, 128, 128, dtype, decay="strong"))


def test_bf16_by_the_careful_table(monkeypatch):
    monkeypatch.setattr(launch, "HOPPER_PAIRS", launch.CAREFUL_PAIRS)
    launch._pair_shape.cache_clear()  # shapes remember their table
    assert_equal(make_inputs(1, 1000, 3, 3, 128, 128, torch.bfloat16))
    launch._pair_shape.cache_clear()


def test_fp32_large_states():
    assert_equal(make_inputs(1, 300, 1, 1, 256, 256, torch.float32))


def test_more_readers_than_one_program_sums():
    assert_equal(make_inputs(1, 64 * 140 + 3, 1, 1, 64, 64, torch.bfloat16))


def test_writes_nothing_outside(monkeypatch):
    """Every buffer of the kernels lies between guard words and starts as NaN."""
    inputs = make_inputs(1, 3000, 2, 2, 128, 128, torch.bfloat16, longest=2900)
    options = {"cu_seqlens": torch.tensor([0, 60, 2960, 3000]), "backend": "triton"}
    tangent = torch.randn_like(inputs[2])
    expected = outputs_and_gradients(inputs, tangent, **options)
    with guarded_memory(monkeypatch) as guarded:
        actual = outputs_and_gradients(inputs, tangent, **options)
    assert len(guarded) >= 12
    assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))


@pytest.mark.parametrize("position", [0, 100, 448])
def test_goes_on_from_a_state_and_leaves_one(position):
    inputs = make_inputs(1, 300, 2, 2, 64, 64, torch.float32, longest=position + 300)
    L = inputs[-1].shape[-1]
    live = [position > 0 and (l == 0 or (position - 1) >> (l - 1) & 1) for l in range(L)]
    levels = torch.randn(1, 2, L, 64, 64, device="cuda")
    levels = levels * torch.tensor(live, device="cuda").view(L, 1, 1)
    results = []
    for backend, dtype in (("triton", torch.float32), ("chunked", torch.float64)):
        leaves = [x.to(dtype).requires_grad_() for x in [*inputs, levels]]
        past = FenwickState(leaves[-1], torch.tensor([position]))
        o, final = log_linear_gated_delta_rule(
            *leaves[:-1], initial_state=past, return_final_state=True, backend=backend
        )
        tangents = [torch.ones_like(o), torch.ones_like(final.levels)]
        gradients = torch.autograd.grad([o, final.levels], leaves, tangents, materialize_grads=True)
        results.append([o.detach(), final.levels.detach(), *gradients])
    for a, e in zip(*results, strict=True):
        assert float((a.double() - e).norm()) <= 1e-4 * float(e.norm())


def test_neither_pass_waits_for_the_device():
    inputs = [
        x.requires_grad_() for x in make_inputs(1, 700, 4, 4, 64, 64, torch.bfloat16, longest=650)
    ]
    cu_seqlens = torch.tensor([0, 50, 700])
    tangent = torch.randn_like(inputs[2])
    outputs_and_gradients(inputs, tangent, cu_seqlens=cu_seqlens)  # makes the plan's tables
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        outputs_and_gradients(inputs, tangent, cu_seqlens=cu_seqlens)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_both_passes_in_a_cuda_graph():
    inputs = [x.requires_grad_() for x in make_inputs(1, 1500, 4, 4, 128, 128, torch.bfloat16)]
    tangent = torch.randn_like(inputs[2])

    def run():
        o, _ = log_linear_gated_delta_rule(*inputs)
        # Detached: a graph that lives on would tie the leaves to the stream of the first run.
        return [o.detach(), *torch.autograd.grad(o, inputs, tangent)]

    expected = run()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = run()
    graph.replay()
    assert all(torch.equal(a, e) for a, e in zip(replayed, expected, strict=True))


def test_compiled_without_a_break():
    inputs = [x.requires_grad_() for x in make_inputs(1, 300, 4, 4, 64, 64, torch.bfloat16)]

    def loss(q, k, v, log_decay, beta, level_weights):
        o, _ = log_linear_gated_delta_rule(q, k, 2 * v, log_decay, beta, level_weights)
        return o.float().square().sum()

    compiled = torch.compile(loss, fullgraph=True)
    actual = torch.autograd.grad(compiled(*inputs), inputs)
    expected = torch.autograd.grad(loss(*inputs), inputs)
    for a, e in zip(actual, expected, strict=True):
        assert float((a.double() - e.double()).norm() / e.double().norm()) < 2e-2


def test_step_in_place_equals_the_step_and_fits_in_a_cuda_graph():
    L = num_levels(80)
    inputs = make_inputs(3, 70, 2, 4, 128, 64, torch.float32, longest=80)
    state = FenwickState.empty(3, 4, L, 128, 64, device="cuda")
    lazy = PendingFenwickState.of(state)
    tokens = [x[:, 0].clone() for x in inputs]
    parts = lazy.levels, lazy.log_scale, lazy.position, lazy.keys, lazy.values
    start = [x.clone() for x in parts]
    log_linear_gated_delta_rule_step_in_place(*tokens, lazy)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = log_linear_gated_delta_rule_step_in_place(*tokens, lazy)
    for tensor, saved in zip(parts, start, strict=True):
        tensor.copy_(saved)
    for t in range(70):
        for buffer, x in zip(tokens, inputs, strict=True):
            buffer.copy_(x[:, t])
        graph.replay()
        expected, state = log_linear_gated_delta_rule_step(*tokens, state)
        torch.testing.assert_close(o, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(lazy.settled().levels, state.levels, rtol=1e-4, atol=1e-4)
