import pytest
import torch
import torch.nn.functional as F

from kernels.causal_conv1d import causal_conv1d, causal_conv1d_step


@pytest.fixture
def conv():
    torch.manual_seed(0)
    return torch.randn(3, 4, dtype=torch.float64), torch.randn(3, dtype=torch.float64)


@pytest.mark.parametrize("T", [1, 2, 3, 4, 17])
def test_equals_torch_conv1d(conv, T):
    weight, bias = conv
    x = torch.randn(2, T, 3, dtype=torch.float64)
    y, _ = causal_conv1d(x, weight, bias)
    expected = F.conv1d(F.pad(x.transpose(1, 2), (3, 0)), weight[:, None], bias, groups=3)
    torch.testing.assert_close(y, expected.transpose(1, 2))


@pytest.mark.parametrize("n", [0, 1, 2, 3, 9])
def test_going_on_token_by_token_equals_the_row(conv, n):
    x = torch.randn(2, 10, 3, dtype=torch.float64)
    full, last = causal_conv1d(x, *conv, return_final_state=True)
    state = torch.zeros(2, 3, 3, dtype=torch.float64)
    if n:
        _, state = causal_conv1d(x[:, :n], *conv, return_final_state=True)
    rest, _ = causal_conv1d(x[:, n:], *conv, initial_state=state)
    torch.testing.assert_close(rest, full[:, n:])
    for t in range(n, 10):
        y, state = causal_conv1d_step(x[:, t], *conv, state)
        torch.testing.assert_close(y, full[:, t])
    assert torch.equal(state, last)


ENDS = [0, 1, 3, 9, 20]


@pytest.mark.parametrize("with_state", [False, True])
def test_packed_documents_equal_documents_alone(conv, with_state):
    x = torch.randn(1, 20, 3, dtype=torch.float64)
    before = torch.randn(4, 3, 3, dtype=torch.float64) if with_state else None
    y, final = causal_conv1d(
        x,
        *conv,
        cu_seqlens=torch.tensor(ENDS),
        initial_state=before,
        return_final_state=with_state,
    )
    for n, (a, b) in enumerate(zip(ENDS, ENDS[1:], strict=False)):
        state = before[n : n + 1] if with_state else None
        alone, last = causal_conv1d(x[:, a:b], *conv, initial_state=state, return_final_state=True)
        torch.testing.assert_close(y[:, a:b], alone)
        if with_state:
            assert torch.equal(final[n : n + 1], last)


def test_changing_a_document_changes_no_bit_of_its_neighbours(conv):
    x = torch.randn(1, 20, 3, dtype=torch.float64)
    changed = x.clone()
    changed[:, 3:9] *= -3
    others = [*range(3), *range(9, 20)]
    results = []
    for row in (x, changed):
        row = row.requires_grad_()
        y, _ = causal_conv1d(row, *conv, cu_seqlens=torch.tensor(ENDS))
        (gradient,) = torch.autograd.grad(y.square().sum(), row)
        results.append((y[:, others], gradient[:, others]))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_wrong_shapes_are_refused(conv):
    weight, bias = conv
    with pytest.raises(ValueError, match="weight has shape"):
        causal_conv1d(torch.zeros(1, 5, 2), weight, bias)
    with pytest.raises(ValueError, match="initial_state has shape"):
        causal_conv1d(torch.zeros(1, 5, 3), weight, bias, initial_state=torch.zeros(1, 3, 4))
