"""The compiled Triton kernels of log-linear SSD against fp64, in every dtype and for every row of
the launch table. Bounds on relative errors: bf16 o, dv 3.5e-3, the other gradients 3e-3; fp16 a
fraction of that (its products run in tf32); fp32 1e-5."""

import pytest
import torch
import torch.nn.functional as F

from kernels.levels import num_levels
from kernels.log_linear_ssd import (
    log_linear_ssd,
    log_linear_ssd_step,
    log_linear_ssd_step_in_place,
)
from kernels.state import FenwickState, LazyFenwickState
from tests.guarded_memory import guarded_memory

pytestmark = pytest.mark.gpu
NAMES = ["o", "dq", "dk", "dv", "dlog_decay", "dlevel_weights"]
BOUNDS = {torch.bfloat16: 3e-3, torch.float16: 1e-3, torch.float32: 1e-5}
LARGER_BOUND = {torch.bfloat16: {"o": 3.5e-3, "dv": 3.5e-3}}


def make_inputs(B, T, G, H, K, V, dtype, *, longest=None, decay="weak"):
    torch.manual_seed(B * 1000 + T)
    gate = torch.randn(B, T, H, device="cuda")
    log_decay = {
        "weak": -torch.exp(torch.rand(H, device="cuda")) * F.softplus(gate - 4),
        "none": torch.zeros_like(gate),
        "strong": -F.softplus(gate + 3) * torch.where(torch.randn_like(gate) > 1, 11.0, 1.0),
    }[decay]
    L = num_levels(longest or T)
    tensors = [
        torch.randn(B, T, G, K, device="cuda") * K**-0.5,
        torch.randn(B, T, G, K, device="cuda"),
        torch.randn(B, T, H, V, device="cuda"),
        log_decay,
        F.softplus(torch.randn(B, T, H, L, device="cuda")),
    ]
    return [x if i == 3 else x.to(dtype) for i, x in enumerate(tensors)]


def outputs_and_gradients(inputs, tangent, **options):
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    o, _ = log_linear_ssd(*leaves, **options)
    return [o.detach(), *torch.autograd.grad(o, leaves, tangent.to(o.dtype))]


def poison():
    """Makes memory that the allocator hands out next hold NaN."""
    torch.cuda.empty_cache()
    torch.full((1 << 28,), torch.nan, device="cuda")


def assert_equal(inputs, cu_seqlens=None):
    dtype = inputs[2].dtype
    tangent = torch.randn_like(inputs[2])
    poison()
    actual = outputs_and_gradients(inputs, tangent, cu_seqlens=cu_seqlens, backend="triton")
    again = outputs_and_gradients(inputs, tangent, cu_seqlens=cu_seqlens, backend="triton")
    assert all(torch.equal(a, b) for a, b in zip(actual, again, strict=True))
    expected = outputs_and_gradients(
        [x.double() for x in inputs], tangent, cu_seqlens=cu_seqlens, backend="chunked"
    )
    errors = {}
    for name, a, e in zip(NAMES, actual, expected, strict=True):
        error, scale = float((a.double() - e).norm()), float(e.norm())
        errors[name] = error / scale if scale else error
    bounds = {name: LARGER_BOUND.get(dtype, {}).get(name, BOUNDS[dtype]) for name in NAMES}
    bad = {name: error for name, error in errors.items() if not error <= bounds[name]}
    assert not bad, errors


@pytest.mark.parametrize("decay", ["weak", "none", "strong"])
@pytest.mark.parametrize("T", [1, 15, 63, 64, 65, 127, 129, 1000, 4097])
def test_bf16(T, decay):
    assert_equal(make_inputs(2, T, 1, 6, 128, 64, torch.bfloat16, decay=decay))


@pytest.mark.parametrize("decay", ["weak", "none", "strong"])
def test_bf16_at_16384(decay):
    assert_equal(make_inputs(1, 16384, 1, 2, 128, 64, torch.bfloat16, decay=decay))


def test_bf16_longer_than_one_step_of_the_gates_kernel():
    assert_equal(make_inputs(1, 300_000, 1, 1, 64, 64, torch.bfloat16))


def test_bf16_packed():
    ends = [5, 70, 1350, 1351, 3000]
    inputs = make_inputs(1, 3000, 1, 6, 128, 64, torch.bfloat16, longest=1649, decay="strong")
    assert_equal(inputs, torch.tensor([0, *ends]))


@pytest.mark.parametrize("G", [2, 4])
def test_bf16_groups(G):
    assert_equal(make_inputs(1, 1000, G, 4, 128, 64, torch.bfloat16))


@pytest.mark.parametrize(
    ("K", "V"),
    [(16, 16), (64, 64), (64, 128), (48, 80), (128, 256), (192, 64), (256, 128), (256, 96)],
)
def test_bf16_sizes(K, V):
    assert_equal(make_inputs(1, 600, 2, 4, K, V, torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("T", [65, 1300])
def test_other_dtypes(T, dtype):
    assert_equal(make_inputs(1, T, 1, 4, 128, 64, dtype, decay="strong"))


def test_writes_nothing_outside_its_buffers(monkeypatch):
    """Every buffer of the kernels lies between guard words and starts as NaN."""
    inputs = make_inputs(1, 3000, 1, 6, 128, 64, torch.bfloat16, longest=1649)
    options = {"cu_seqlens": torch.tensor([0, 5, 70, 1350, 1351, 3000]), "backend": "triton"}
    tangent = torch.randn_like(inputs[2])
    expected = outputs_and_gradients(inputs, tangent, **options)
    with guarded_memory(monkeypatch) as guarded:
        actual = outputs_and_gradients(inputs, tangent, **options)
    assert len(guarded) >= 12
    assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))


def test_one_head_of_every_size_of_grid():
    # Few programs: fewer heads a program, and the partial sums that go with it.
    for B, T in [(1, 128), (4, 500), (1, 4096)]:
        assert_equal(make_inputs(B, T, 1, 12, 64, 64, torch.bfloat16))


def test_neither_pass_waits_for_the_device():
    inputs = [
        x.requires_grad_() for x in make_inputs(1, 700, 1, 4, 64, 64, torch.bfloat16, longest=650)
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
    inputs = [x.requires_grad_() for x in make_inputs(1, 1500, 1, 4, 128, 64, torch.bfloat16)]
    tangent = torch.randn_like(inputs[2])

    def run():
        o, _ = log_linear_ssd(*inputs)
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
    inputs = [x.requires_grad_() for x in make_inputs(1, 300, 1, 4, 64, 64, torch.bfloat16)]

    def loss(q, k, v, log_decay, level_weights):
        o, _ = log_linear_ssd(q, k, 2 * v, log_decay, level_weights)
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
    lazy = LazyFenwickState.of(state)
    tokens = [x[:, 0].clone() for x in inputs]
    start = [x.clone() for x in (lazy.levels, lazy.log_scale, lazy.position)]
    log_linear_ssd_step_in_place(*tokens, lazy)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = log_linear_ssd_step_in_place(*tokens, lazy)
    for tensor, saved in zip((lazy.levels, lazy.log_scale, lazy.position), start, strict=True):
        tensor.copy_(saved)
    for t in range(70):
        for buffer, x in zip(tokens, inputs, strict=True):
            buffer.copy_(x[:, t])
        graph.replay()
        expected, state = log_linear_ssd_step(*tokens, state)
        torch.testing.assert_close(o, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(lazy.settled().levels, state.levels, rtol=1e-4, atol=1e-4)
