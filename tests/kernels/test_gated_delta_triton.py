"""The Triton kernels of the gated delta rule against the chunked form in fp64, which other tests
hold to the recurrence. On a CPU they run in Triton's interpreter, in fp32; the same tests with
their own tolerances run compiled where there is a GPU (test_gated_delta_triton_on_gpu.py)."""

import pytest
import torch
import torch.nn.functional as F

from kernels.levels import num_levels
from kernels.log_linear_gated_delta import (
    PendingFenwickState,
    log_linear_gated_delta_rule,
    log_linear_gated_delta_rule_step,
    log_linear_gated_delta_rule_step_in_place,
)
from kernels.log_linear_gated_delta import pair_plan as plans
from kernels.state import FenwickState
from tests.guarded_memory import guarded_memory

if torch.cuda.is_available():
    pytest.skip(
        "the interpreter's tests; with a GPU the kernels are compiled", allow_module_level=True
    )

NAMES = ["o", "dq", "dk", "dv", "dlog_decay", "dbeta", "dlevel_weights"]


def make_inputs(B, T, *, G=1, H=1, K=16, V=16, L=None, longest=None, decay="mixed"):
    random = torch.Generator().manual_seed(1000 * B + T)

    def randn(*shape):
        return torch.randn(*shape, generator=random)

    log_decay = {
        "none": torch.zeros(B, T, H),
        "strong": torch.full((B, T, H), -50.0),
        "mixed": -F.softplus(randn(B, T, H) - 2) * torch.where(randn(B, T, H) > 1, 40.0, 1.0),
    }[decay]
    L = L or num_levels(longest or T)
    q, k = (F.normalize(randn(B, T, G, K), dim=-1) for _ in range(2))
    beta = torch.sigmoid(randn(B, T, H))
    return [q, k, randn(B, T, H, V), log_decay, beta, F.softplus(randn(B, T, H, L))]


def outputs_and_gradients(inputs, tangent, **options):
    leaves = [x.clone().requires_grad_() for x in inputs]
    o, _ = log_linear_gated_delta_rule(*leaves, **options)
    gradients = torch.autograd.grad(o, leaves, tangent.to(o.dtype))
    return [o.detach(), *gradients]


def assert_equal(inputs, cu_seqlens=None, tolerance=1e-5, floor=0.0):
    tangent = torch.randn(inputs[2].shape, generator=torch.Generator().manual_seed(1))
    actual = outputs_and_gradients(inputs, tangent, cu_seqlens=cu_seqlens, backend="triton")
    expected = outputs_and_gradients(
        [x.double() for x in inputs], tangent, cu_seqlens=cu_seqlens, backend="chunked"
    )
    errors = {}
    for name, a, e in zip(NAMES, actual, expected, strict=True):
        assert a.dtype == torch.float32
        error, scale = (a.double() - e).norm(), e.norm().clamp(min=floor)
        errors[name] = float(error if scale == 0 else error / scale)
    assert max(errors.values()) < tolerance, errors
    return actual


@pytest.mark.parametrize("decay", ["none", "strong", "mixed"])
@pytest.mark.parametrize("T", [1, 63, 64, 65, 129])
def test_equals_the_chunked_form(T, decay):
    assert_equal(make_inputs(1, T, decay=decay))


def test_equals_the_chunked_form_over_several_chunks():
    assert_equal(make_inputs(2, 330))


@pytest.mark.slow
@pytest.mark.parametrize("decay", ["none", "strong", "mixed"])
def test_equals_the_chunked_form_over_many_chunks(decay):
    assert_equal(make_inputs(1, 1000, decay=decay))


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_repeated_keys_stay_accurate(beta):
    inputs = make_inputs(1, 200, decay="none")
    inputs[1] = inputs[1][:, :1].expand_as(inputs[1]).contiguous()
    inputs[4] = torch.full_like(inputs[4], beta)
    # With beta = 1 each token erases the one before, so that dlog_decay is 0 but for rounding.
    assert_equal(inputs, floor=float(inputs[2].norm()))


def test_a_node_with_many_readers_is_summed_in_parts(monkeypatch):
    monkeypatch.setattr(plans, "READERS_PER_SUM", 1)
    T = 64 * 6 + 9  # of this length alone: plans are kept
    plan = plans.pair_plan((T,), (0,), False, torch.device("cpu"))
    assert len(plan.splits) == 2
    assert_equal(make_inputs(1, T))


@pytest.mark.parametrize("ends", [[5, 70, 350, 351], [1, 2, 3, 130]], ids=str)
def test_packed_documents_have_trees_of_their_own(ends):
    lengths = [b - a for a, b in zip([0, *ends], ends, strict=False)]
    inputs = make_inputs(1, ends[-1], longest=max(lengths))
    cu_seqlens = torch.tensor([0, *ends])
    actual = assert_equal(inputs, cu_seqlens)
    alone, begin = [], 0
    for length in lengths:
        rows = [x[:, begin : begin + length].contiguous() for x in inputs]
        alone.append(log_linear_gated_delta_rule(*rows, backend="triton")[0])
        begin += length
    assert torch.equal(actual[0], torch.cat(alone, dim=1))


@pytest.mark.parametrize(("G", "H", "K", "V"), [(2, 4, 16, 16), (1, 2, 48, 80), (1, 1, 144, 72)])
def test_groups_and_sizes(G, H, K, V):
    assert_equal(make_inputs(1, 140, G=G, H=H, K=K, V=V))


def test_more_levels_than_needed_get_no_gradient():
    inputs = make_inputs(1, 200, L=19)
    assert assert_equal(inputs)[-1][..., num_levels(200) :].abs().max() == 0


def test_a_non_contiguous_and_misaligned_input_is_taken():
    inputs = make_inputs(1, 70, H=2, V=64)
    wide = torch.cat([inputs[2][..., :3], inputs[2]], dim=-1)
    turned = inputs[3].transpose(1, 2).contiguous().mT
    assert_equal([*inputs[:2], wide[..., 3:], turned, *inputs[4:]])


def test_beta_of_another_dtype_is_taken():
    inputs = make_inputs(1, 70)
    tangent = torch.randn_like(inputs[2])
    first = outputs_and_gradients(inputs, tangent, backend="triton")
    inputs[4] = inputs[4].double()
    second = outputs_and_gradients(inputs, tangent, backend="triton")
    assert second[5].dtype == torch.float64
    assert all(torch.equal(a, b.to(a.dtype)) for a, b in zip(first, second, strict=True))


def test_values_of_any_size_are_held():
    """States are kept by a scale of their own: v of 1e-6 and of 1e6 lose nothing."""
    inputs = make_inputs(1, 200)
    inputs[2] = inputs[2] * torch.where(torch.arange(200) < 100, 1e-6, 1e6)[:, None, None]
    assert_equal(inputs)


def test_two_runs_give_the_same_bits():
    inputs = make_inputs(1, 330)
    tangent = torch.randn_like(inputs[2])
    first, second = (outputs_and_gradients(inputs, tangent, backend="triton") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_reads_nothing_uninitialised_and_writes_nothing_outside(monkeypatch):
    """Every buffer of the kernels lies between guard words and starts as NaN."""
    inputs = make_inputs(1, 550, longest=450)
    cu_seqlens = torch.tensor([0, 60, 510, 550])
    tangent = torch.randn_like(inputs[2])
    options = {"cu_seqlens": cu_seqlens, "backend": "triton"}
    expected = outputs_and_gradients(inputs, tangent, **options)
    with guarded_memory(monkeypatch) as guarded:
        actual = outputs_and_gradients(inputs, tangent, **options)
    assert len(guarded) >= 12
    assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))


@pytest.mark.parametrize("position", [0, 1, 100, 128, 448])
def test_goes_on_from_a_state_and_leaves_one(position):
    lengths = [70, 1, 150]
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    L = num_levels(position + 150)
    inputs = make_inputs(1, sum(lengths), L=L)
    random = torch.Generator().manual_seed(5)
    levels = torch.randn(3, 1, L, 16, 16, generator=random)
    live = [position > 0 and (l == 0 or (position - 1) >> (l - 1) & 1) for l in range(L)]
    levels = levels * torch.tensor(live).view(L, 1, 1)
    state = FenwickState(levels, torch.full((3,), position))
    results = []
    for backend, dtype in (("triton", torch.float32), ("chunked", torch.float64)):
        leaves = [x.to(dtype).requires_grad_() for x in [*inputs, levels]]
        past = FenwickState(leaves[-1], state.position)
        o, final = log_linear_gated_delta_rule(
            *leaves[:-1],
            cu_seqlens=cu_seqlens,
            initial_state=past,
            return_final_state=True,
            backend=backend,
        )
        assert final is not None
        tangents = [
            torch.randn(x.shape, generator=torch.Generator().manual_seed(i)).to(dtype)
            for i, x in enumerate((o, final.levels))
        ]
        gradients = torch.autograd.grad([o, final.levels], leaves, tangents, materialize_grads=True)
        assert final.position.tolist() == [position + n for n in lengths]
        results.append([o.detach(), final.levels.detach(), *gradients])
    for a, e in zip(*results, strict=True):
        error, scale = (a.double() - e).norm(), e.norm()
        assert error <= 1e-5 * scale, (error, scale)


def test_torch_compile_traces_without_a_break():
    inputs = [x.requires_grad_() for x in make_inputs(1, 130)]

    def loss(q, k, v, log_decay, beta, level_weights):
        o, _ = log_linear_gated_delta_rule(
            q, k, 2 * v, log_decay, beta, level_weights, backend="triton"
        )
        return o.square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    actual = torch.autograd.grad(compiled(*inputs), inputs)
    expected = torch.autograd.grad(loss(*inputs), inputs)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e)


def test_custom_operator_keeps_pytorchs_rules():
    import kernels.log_linear_gated_delta.triton_op  # noqa: F401  # registers it

    inputs = [x.requires_grad_() for x in make_inputs(1, 130, K=64, V=64)]
    cu_seqlens = torch.tensor([0, 30, 130])
    torch.library.opcheck(
        torch.ops.fenwick.log_linear_gated_delta.default,
        (*inputs, cu_seqlens, None),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )


def test_what_the_kernels_cannot_take_is_refused_in_one_line():
    few = make_inputs(1, 200, L=8)
    tall = make_inputs(1, 20, K=257)
    wide = make_inputs(1, 20, V=513)
    double = [x.double() for x in make_inputs(1, 20)]
    for inputs, message in [
        (few, "too few levels: a row of 200 tokens needs 9"),
        (tall, "K up to 256 and V up to 512: got K=257, V=16"),
        (wide, "K up to 256 and V up to 512: got K=16, V=513"),
        (double, "one of bf16, fp16, fp32"),
    ]:
        with pytest.raises(ValueError, match=message):
            log_linear_gated_delta_rule(*inputs, backend="triton")


def test_step_in_place_equals_the_step_at_every_carry():
    """Rows at 0, 5 and 31 at the start: carries of every size, and past two multiples of the
    sixteen tokens after which changes are carried out."""
    B, T, L = 3, 24, 9
    inputs = make_inputs(B, 55, G=1, H=2, K=24, V=20, L=L)
    state = FenwickState.empty(B, 2, L, 24, 20)
    state = FenwickState(state.levels, torch.tensor([0, 0, 0]))
    for row, count in enumerate([0, 5, 31]):
        for t in range(count):
            one = FenwickState(state.levels[row : row + 1], state.position[row : row + 1])
            tokens = [x[row : row + 1, t] for x in inputs]
            _, one = log_linear_gated_delta_rule_step(*tokens, one)
            state.levels[row], state.position[row] = one.levels[0], one.position[0]
    lazy = PendingFenwickState.of(state)
    for t in range(T):
        tokens = [x[:, t] for x in inputs]
        expected, state = log_linear_gated_delta_rule_step(*tokens, state)
        o = log_linear_gated_delta_rule_step_in_place(*tokens, lazy)
        torch.testing.assert_close(o, expected, rtol=1e-5, atol=1e-6)
        settled = lazy.settled()
        torch.testing.assert_close(settled.levels, state.levels, rtol=1e-5, atol=1e-6)
    assert settled.position.tolist() == state.position.tolist() == [24, 29, 55]
