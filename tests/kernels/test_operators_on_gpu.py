"""The operators on a CUDA device against the recurrence on the CPU, forward and every gradient."""

import pytest
import torch
import torch.nn.functional as F

from kernels.levels import num_levels
from kernels.log_linear_gated_delta import (
    log_linear_gated_delta_rule,
    log_linear_gated_delta_rule_step,
)
from kernels.log_linear_ssd import log_linear_ssd, log_linear_ssd_step
from kernels.state import FenwickState

pytestmark = pytest.mark.gpu
OPERATORS = {
    "ssd": (log_linear_ssd, log_linear_ssd_step, False),
    "gated_delta": (log_linear_gated_delta_rule, log_linear_gated_delta_rule_step, True),
}


def make_inputs(has_beta, T):
    torch.manual_seed(T)
    B, G, H, K, V = 1, 2, 4, 32, 16
    tensors = [
        torch.randn(B, T, G, K),
        F.normalize(torch.randn(B, T, G, K), dim=-1),
        torch.randn(B, T, H, V),
        -F.softplus(torch.randn(B, T, H) - 1) * torch.where(torch.randn(B, T, H) > 1, 20.0, 1.0),
    ]
    if has_beta:
        tensors.append(torch.rand(B, T, H))
    return [*tensors, F.softplus(torch.randn(B, T, H, num_levels(T)))]


def relative_errors(run, inputs):
    tangent = torch.randn_like(inputs[2].double())
    results = []
    for device, dtype, backend in (("cpu", torch.float64, "reference"), ("cuda", None, "auto")):
        leaves = [x.to(device, dtype).requires_grad_() for x in inputs]
        o = run(leaves, backend)
        gradients = torch.autograd.grad(o, leaves, tangent.to(o))
        results.append([x.detach().double().cpu() for x in (o, *gradients)])
    return [((a - e).norm() / e.norm()).item() for e, a in zip(*results, strict=True)]


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("ends", [[1], [65], [1000], [63, 64, 200, 513]], ids=str)
def test_equals_the_recurrence(name, ends):
    op, _, has_beta = OPERATORS[name]
    inputs = make_inputs(has_beta, ends[-1])
    cu_seqlens = torch.tensor([0, *ends])

    def run(x, backend):
        return op(*x, cu_seqlens=cu_seqlens, backend=backend)[0]

    assert max(relative_errors(run, inputs)) < 1e-5


@pytest.mark.parametrize("name", OPERATORS)
def test_prefill_then_step_equals_the_full_row(name):
    op, step, has_beta = OPERATORS[name]
    inputs = [x.cuda() for x in make_inputs(has_beta, 200)]
    full, _ = op(*inputs)
    for n in (1, 64, 127, 128, 150):
        _, state = op(*[x[:, :n] for x in inputs], return_final_state=True)
        for t in range(n, n + 5):
            o, state = step(*[x[:, t] for x in inputs], state)
            torch.testing.assert_close(o, full[:, t], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", OPERATORS)
def test_step_with_its_position_on_the_device_asks_nothing_and_is_equal(name):
    _, step, has_beta = OPERATORS[name]
    inputs = [x.cuda() for x in make_inputs(has_beta, 70)]
    L = inputs[-1].shape[-1]
    host = FenwickState.empty(1, 4, L, 32, 16, device="cuda")
    device = FenwickState(host.levels, host.position.cuda())
    for t in range(70):
        tokens = [x[:, t] for x in inputs]
        expected, host = step(*tokens, host)
        torch.cuda.set_sync_debug_mode("error")
        try:
            o, device = step(*tokens, device)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.testing.assert_close(o, expected, rtol=1e-5, atol=1e-6)
    assert device.position.tolist() == [70]
    torch.testing.assert_close(device.levels, host.levels, rtol=1e-5, atol=1e-6)
