"""Both operators against the recurrence that defines them: forward, every gradient, states."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F

from kernels.levels import num_levels
from kernels.log_linear_gated_delta import (
    log_linear_gated_delta_rule,
    log_linear_gated_delta_rule_step,
)
from kernels.log_linear_gated_delta.chunked import log_linear_gated_delta_chunked
from kernels.log_linear_gated_delta.reference import (
    log_linear_gated_delta_dense,
    log_linear_gated_delta_recurrence,
)
from kernels.log_linear_ssd import log_linear_ssd, log_linear_ssd_step
from kernels.log_linear_ssd.chunked import log_linear_ssd_chunked
from kernels.log_linear_ssd.reference import log_linear_ssd_dense, log_linear_ssd_recurrence
from kernels.state import FenwickState


@dataclass(frozen=True)
class Operator:
    op: object
    step: object
    recurrence: object
    dense: object
    chunked: object
    has_beta: bool


OPERATORS = {
    "ssd": Operator(
        log_linear_ssd,
        log_linear_ssd_step,
        log_linear_ssd_recurrence,
        log_linear_ssd_dense,
        log_linear_ssd_chunked,
        has_beta=False,
    ),
    "gated_delta": Operator(
        log_linear_gated_delta_rule,
        log_linear_gated_delta_rule_step,
        log_linear_gated_delta_recurrence,
        log_linear_gated_delta_dense,
        log_linear_gated_delta_chunked,
        has_beta=True,
    ),
}
LENGTHS = [1, 2, 15, 63, 64, 65, 127, 128, 129, 1000]
DECAYS = ["none", "mild", "strong", "mixed"]


@pytest.fixture(params=OPERATORS, ids=str)
def operator(request):
    return OPERATORS[request.param]


def make_inputs(operator, B, T, *, G=2, H=4, K=8, V=6, L=None, decay="mixed", dtype=torch.float64):
    random = torch.Generator().manual_seed(B * 1000 + T)

    def randn(*shape):
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    log_decay = {
        "none": torch.zeros(B, T, H, dtype=torch.float64),
        "mild": -F.softplus(randn(B, T, H) - 2),
        "strong": torch.full((B, T, H), -50.0, dtype=torch.float64),
        "mixed": -F.softplus(randn(B, T, H) - 2) * torch.where(randn(B, T, H) > 1, 40.0, 1.0),
    }[decay]
    L = num_levels(T) if L is None else L
    tensors = [randn(B, T, G, K), F.normalize(randn(B, T, G, K), dim=-1), randn(B, T, H, V)]
    tensors.append(log_decay)
    if operator.has_beta:
        tensors.append(torch.sigmoid(randn(B, T, H)))
    tensors.append(F.softplus(randn(B, T, H, L)))
    return [x.to(dtype) for x in tensors]


def names(operator):
    beta = ["dbeta"] if operator.has_beta else []
    return ["dq", "dk", "dv", "dlog_decay", *beta, "dlevel_weights"]


def relative_error(actual, expected, floor=0.0):
    scale = expected.double().norm().clamp(min=floor)
    error = (actual.double() - expected.double()).norm()
    return float(error if scale == 0 else error / scale)


def outputs_and_gradients(run, inputs, tangent):
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    o = run(inputs)
    gradients = torch.autograd.grad(o, inputs, tangent.to(o.dtype), materialize_grads=True)
    return o.detach(), gradients


def assert_equal(operator, inputs, cu_seqlens=None, tolerance=1e-5, floor=0.0):
    """Chunked in the dtype of the inputs against the recurrence in fp64."""
    tangent = torch.randn_like(inputs[2].double())

    def run(backend):
        return lambda x: operator.op(*x, cu_seqlens=cu_seqlens, backend=backend)[0]

    doubles = [x.double() for x in inputs]
    expected = outputs_and_gradients(run("reference"), doubles, tangent)
    actual = outputs_and_gradients(run("chunked"), inputs, tangent)
    errors = {"o": relative_error(actual[0], expected[0])}
    for name, a, e in zip(names(operator), actual[1], expected[1], strict=True):
        errors[name] = relative_error(a, e, floor)
    bad = {name: error for name, error in errors.items() if not error < tolerance}
    assert not bad, bad


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("T", [1, 2, 15, 63, 64, 65, 129])
def test_dense_equals_recurrence(operator, T, decay):
    inputs = make_inputs(operator, 2, T, decay=decay)
    o, _ = operator.op(*inputs, backend="reference")
    assert float((operator.dense(*inputs) - o).abs().max()) < 1e-10


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("T", LENGTHS)
def test_chunked_equals_recurrence_in_fp32(operator, T, decay):
    inputs = make_inputs(operator, 1 if T == 1000 else 2, T, decay=decay, dtype=torch.float32)
    assert_equal(operator, inputs)


@pytest.mark.parametrize("G", [1, 2, 4])
def test_chunked_equals_recurrence_for_grouped_heads(operator, G):
    inputs = make_inputs(operator, 2, 150, G=G, K=16, V=5, dtype=torch.float32)
    assert_equal(operator, inputs)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_repeated_keys_stay_accurate(beta):
    operator = OPERATORS["gated_delta"]
    inputs = make_inputs(operator, 1, 129, decay="none", dtype=torch.float32)
    inputs[1] = inputs[1][:, :1].expand_as(inputs[1]).contiguous()
    inputs[4] = torch.full_like(inputs[4], beta)
    # With beta = 1 each token erases the one before, so that dlog_decay is 0 but for rounding.
    assert_equal(operator, inputs, floor=float(inputs[2].norm()))


ENDS = [[1, 2, 130], [63, 64, 65, 200], [64, 128, 192], [100, 101, 229, 230], [7, 250], [300]]


@pytest.mark.parametrize("ends", ENDS, ids=str)
def test_chunked_equals_recurrence_for_packed_documents(operator, ends):
    cu_seqlens = torch.tensor([0, *ends])
    inputs = make_inputs(operator, 1, ends[-1], dtype=torch.float32)
    assert_equal(operator, inputs, cu_seqlens)


def test_a_packed_document_equals_the_document_alone(operator):
    ends = [0, 37, 101, 230]
    inputs = make_inputs(operator, 1, 230)
    packed, _ = operator.op(*inputs, cu_seqlens=torch.tensor(ends))
    for a, b in zip(ends, ends[1:], strict=False):
        alone, _ = operator.op(*[x[:, a:b] for x in inputs])
        torch.testing.assert_close(packed[:, a:b], alone, rtol=0, atol=1e-12)


def test_changing_a_packed_document_changes_no_bit_of_its_neighbours(operator):
    cu_seqlens = torch.tensor([0, 70, 133, 200])
    inputs = make_inputs(operator, 1, 200, dtype=torch.float32)
    changed = [torch.cat([x[:, :70], x[:, 70:133].flip(1) * 0.5, x[:, 133:]], 1) for x in inputs]
    others = [*range(70), *range(133, 200)]
    tangent = torch.randn_like(inputs[2])

    def run(x):
        return operator.op(*x, cu_seqlens=cu_seqlens)[0]

    before, after = (outputs_and_gradients(run, x, tangent) for x in (inputs, changed))
    assert torch.equal(before[0][:, others], after[0][:, others])
    assert not torch.equal(before[0], after[0])
    for name, a, b in zip(names(operator), before[1], after[1], strict=True):
        assert torch.equal(a[:, others], b[:, others]), name


@pytest.mark.parametrize("max_C", [1, 2, 8, 32])
def test_chunk_length_changes_nothing(operator, max_C):
    inputs = make_inputs(operator, 2, 77)
    expected, _ = operator.op(*inputs, backend="reference")
    o, _ = operator.chunked(*inputs, (77, 77), None, False, max_C=max_C)
    torch.testing.assert_close(o, expected, rtol=0, atol=1e-11)


def test_gradcheck(operator):
    inputs = make_inputs(operator, 1, 7, H=2, G=1, K=2, V=3, decay="mild")
    inputs = [x.requires_grad_() for x in inputs]

    def run(*x):
        return operator.chunked(*x, (7,), None, False, max_C=2)[0]

    assert torch.autograd.gradcheck(run, inputs)


def linear_parent(operator, q, k, v, log_decay, beta=None):
    """The ordinary recurrence with one state, written out."""
    B, T, H, V = v.shape
    q, k = (x.repeat_interleave(H // x.shape[2], dim=2) for x in (q, k))
    S, outputs = torch.zeros(B, H, q.shape[-1], V, dtype=v.dtype), []
    for t in range(T):
        S = log_decay[:, t].exp()[..., None, None] * S
        value = v[:, t]
        if beta is not None:
            value = value - torch.einsum("bhk,bhkv->bhv", k[:, t], S)
            value = beta[:, t, :, None] * value
        S = S + torch.einsum("bhk,bhv->bhkv", k[:, t], value)
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], S))
    return torch.stack(outputs, 1)


@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_level_weights_one_is_the_linear_parent(operator, backend):
    *inputs, level_weights = make_inputs(operator, 2, 140)
    o, _ = operator.op(*inputs, torch.ones_like(level_weights), backend=backend)
    torch.testing.assert_close(o, linear_parent(operator, *inputs), rtol=0, atol=1e-10)


def test_prefill_then_step_equals_the_full_row(operator):
    T = 131
    inputs = make_inputs(operator, 2, T)
    full, _ = operator.op(*inputs, backend="reference")
    H, V, L = *full.shape[2:], inputs[-1].shape[-1]
    for n in range(T):
        state = FenwickState.empty(2, H, L, inputs[0].shape[-1], V, dtype=torch.float64)
        if n:
            o, state = operator.op(*[x[:, :n] for x in inputs], return_final_state=True)
            torch.testing.assert_close(o, full[:, :n], rtol=0, atol=1e-11)
        for t in range(n, min(n + 3, T)):
            o, state = operator.step(*[x[:, t] for x in inputs], state)
            torch.testing.assert_close(o, full[:, t], rtol=0, atol=1e-11)
        assert state.position.tolist() == [min(n + 3, T)] * 2


@pytest.mark.parametrize("positions", [(1, 2), (5, 0), (63, 64), (70, 63), (128, 191), (200, 65)])
@pytest.mark.parametrize("T", [1, 3, 64, 130])
def test_going_on_from_any_position_equals_the_recurrence(operator, positions, T):
    """Outputs, final state and all gradients, also the one that flows into the initial state."""
    N, K, V, H = len(positions), 8, 6, 4
    L = num_levels(T + max(positions))
    levels = []
    for p in positions:
        past = [x[:1] for x in make_inputs(operator, 1, max(p, 1), L=L)]
        state = FenwickState.empty(1, H, L, K, V, dtype=torch.float64)
        levels.append(operator.recurrence(*past, state)[1].levels if p else state.levels)
    inputs = make_inputs(operator, N, T, L=L)
    live = torch.tensor(
        [[p > 0 and (l == 0 or (p - 1) >> (l - 1) & 1 == 1) for l in range(L)] for p in positions]
    )[:, None, :, None, None]
    tangents = torch.randn(N, T, H, V, dtype=torch.float64), torch.randn(N, H, L, K, V).double()
    results = []
    for backend in ("reference", "chunked"):
        leaves = [x.detach().clone().requires_grad_() for x in [*inputs, torch.cat(levels)]]
        state = FenwickState(leaves[-1], torch.tensor(positions))
        o, final = operator.op(
            *leaves[:-1], initial_state=state, return_final_state=True, backend=backend
        )
        gradients = torch.autograd.grad(
            [o, final.levels], leaves, list(tangents), materialize_grads=True
        )
        results.append([o, final.levels, *gradients[:-1], gradients[-1] * live])
        assert final.position.tolist() == [p + T for p in positions]
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11)


def test_packed_documents_go_on_from_their_own_states(operator):
    ends = torch.tensor([0, 5, 70, 71])
    first, second = (make_inputs(operator, 1, 71, L=9) for _ in range(2))
    _, state = operator.op(*first, cu_seqlens=ends, return_final_state=True)
    o, _ = operator.op(*second, cu_seqlens=ends, initial_state=state)
    for n, (a, b) in enumerate(zip(ends.tolist(), ends.tolist()[1:], strict=False)):
        both = [torch.cat([x[:, a:b], y[:, a:b]], 1) for x, y in zip(first, second, strict=True)]
        expected, _ = operator.op(*both)
        torch.testing.assert_close(o[:, a:b], expected[:, b - a :], rtol=0, atol=1e-11, msg=str(n))


def test_bf16_inputs_are_accumulated_in_fp32_also_under_autocast(operator):
    inputs = make_inputs(operator, 2, 200, decay="mild", dtype=torch.bfloat16)
    expected, _ = operator.op(*[x.double() for x in inputs], backend="reference")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o, _ = operator.op(*inputs)
    assert o.dtype == torch.bfloat16
    assert relative_error(o, expected) < 3e-3  # the rounding of the output alone is 2e-3


def test_state_size_depends_on_levels_alone(operator):
    sizes = set()
    for T in (3, 100, 500):
        inputs = make_inputs(operator, 1, T, L=10)
        _, state = operator.op(*inputs, return_final_state=True)
        sizes.add(tuple(state.levels.shape))
    assert sizes == {(1, 4, 10, 8, 6)}


def with_bad(inputs, index, tensor):
    return [*inputs[:index], tensor, *inputs[index + 1 :]]


def test_wrong_calls_are_refused_in_one_line(operator, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    inputs = make_inputs(operator, 2, 65)
    packed = make_inputs(operator, 1, 65)
    state = FenwickState.empty(2, 4, num_levels(65), 8, 6)
    late = FenwickState(state.levels, torch.tensor([0, 100]))
    few = inputs[-1][..., :7]
    cases = [
        (lambda: operator.op(*inputs[:-1], few), "too few levels: a row of 65 tokens needs 8"),
        (lambda: operator.op(*inputs, initial_state=late), "too few levels: a row of 165 tokens"),
        (lambda: operator.step(*[x[:, 0] for x in inputs[:-1]], few[:, 0], state), "state.levels"),
        (lambda: operator.op(*with_bad(inputs, 1, inputs[1][:, :9])), "k has shape"),
        (lambda: operator.op(*with_bad(inputs, 2, inputs[2][:, :, :3])), "heads do not divide"),
        (lambda: operator.op(*with_bad(inputs, 0, inputs[0].long())), "q is torch.int64"),
        (lambda: operator.op(*inputs, backend="triton"), "needs a CUDA device"),
        (lambda: operator.op(*inputs, backend="cuda"), "unknown backend: got 'cuda'"),
        (lambda: operator.op(*inputs, cu_seqlens=torch.tensor([0, 65])), "needs one packed row"),
        (lambda: operator.op(*packed, cu_seqlens=torch.tensor([0, 9])), "must rise from 0 to T=65"),
        (lambda: operator.op(*packed, cu_seqlens=torch.tensor([0, 9, 9, 65])), "empty document"),
        (lambda: operator.op(*packed, cu_seqlens=torch.tensor([0.0, 65])), "integers"),
        (lambda: operator.op(*[x[:, :0] for x in inputs]), "empty input"),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message) as error:
            call()
        assert "\n" not in str(error.value)


def test_step_refuses_a_position_beyond_its_levels(operator):
    inputs = [x[:, 0] for x in make_inputs(operator, 1, 1, L=3)]
    state = FenwickState(torch.zeros(1, 4, 3, 8, 6), torch.tensor([4]))
    with pytest.raises(ValueError, match="too few levels: a row of 5 tokens needs 4"):
        operator.step(*inputs, state)


def test_a_call_in_inference_mode_does_not_spoil_a_later_training_step(operator):
    inputs = make_inputs(operator, 1, 83, G=1, K=4)
    with torch.inference_mode():
        operator.op(*inputs)
    o, _ = operator.op(*[x.requires_grad_() for x in inputs])
    o.sum().backward()
    assert all(x.grad is not None for x in inputs)


def test_step_does_not_depend_on_levels_it_cannot_read(operator):
    def run(extra):
        inputs = make_inputs(operator, 2, 40, L=6, dtype=torch.float32)
        inputs[-1] = F.pad(inputs[-1], (0, extra), value=7.0)
        L = 6 + extra
        state = FenwickState.empty(2, 4, L, inputs[0].shape[-1], inputs[2].shape[-1])
        outputs = []
        for t in range(32):
            o, state = operator.step(*[x[:, t] for x in inputs], state)
            outputs.append(o)
            assert state.live_levels == num_levels(t + 2)
        assert not state.levels[:, :, 6:].any()
        assert state.levels.shape[2] == L
        return torch.stack(outputs)

    assert torch.equal(run(0), run(9))


def test_position_lies_on_the_host_or_beside_the_levels(operator):
    inputs = [x[:, 0] for x in make_inputs(operator, 1, 1, L=3)]
    state = FenwickState(
        torch.zeros(1, 4, 3, 8, 6), torch.zeros(1, dtype=torch.int64, device="meta")
    )
    with pytest.raises(
        ValueError, match=r"on meta; expected \[1\] on the CPU or beside the levels"
    ):
        operator.step(*inputs, state)
