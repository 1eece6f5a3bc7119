"""The linear parents: the log-linear operators with weight 1, or FLA's, called as FLA is called."""

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import linear_parents
from kernels.fla_library import fla_function, fla_obstacle
from kernels.linear_parents import gated_delta_rule, linear_ssd


def make_inputs(T: int, G: int = 1, H: int = 2, K: int = 16, V: int = 16) -> dict[str, Tensor]:
    q, k = torch.randn(1, T, G, K), F.normalize(torch.randn(1, T, G, K), dim=-1)
    return {
        "q": q,
        "k": k,
        "v": torch.randn(1, T, H, V),
        "log_decay": -torch.rand(1, T, H),
        "beta": torch.rand(1, T, H),
    }


def recurrence(x: dict[str, Tensor], ends: list[int], delta: bool) -> Tensor:
    """One state, token by token."""
    H, V, K = x["v"].shape[2], x["v"].shape[3], x["q"].shape[3]
    q, k = (x[n][0].repeat_interleave(H // x[n].shape[2], 1).double() for n in ("q", "k"))
    v, g, beta = (x[n][0].double() for n in ("v", "log_decay", "beta"))
    S, outputs = torch.zeros(H, K, V, dtype=torch.float64), []
    for t in range(len(q)):
        if t in ends:
            S = torch.zeros_like(S)
        S = g[t].exp()[:, None, None] * S
        new = v[t]
        if delta:
            new = beta[t][:, None] * (v[t] - torch.einsum("hk,hkv->hv", k[t], S))
        S = S + k[t][:, :, None] * new[:, None]
        outputs.append(torch.einsum("hk,hkv->hv", q[t], S))
    return torch.stack(outputs)[None]


@pytest.mark.parametrize("ends", [[], [7, 40]], ids=str)
@pytest.mark.parametrize("delta", [False, True])
def test_equals_one_state_token_by_token(ends: list[int], delta: bool) -> None:
    x = make_inputs(50, G=2 if delta else 1)
    cu_seqlens = torch.tensor([0, *ends, 50]) if ends else None
    if delta:
        o = gated_delta_rule(**x, cu_seqlens=cu_seqlens)
    else:
        o = linear_ssd(x["q"], x["k"], x["v"], x["log_decay"], cu_seqlens=cu_seqlens)
    torch.testing.assert_close(o.double(), recurrence(x, ends, delta), rtol=1e-4, atol=1e-4)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """In FLA's place, functions of its signatures that note what they are given."""
    noted: list[dict[str, Any]] = []

    def chunk(q: Tensor, k: Tensor, v: Tensor, g: Tensor, *rest: Tensor, **options: Any) -> Any:
        noted.append({"q": q, "k": k, "v": v, "g": g, "rest": rest, **options})
        return v, None

    for name, function in (
        ("simple_gla", "chunk_simple_gla"),
        ("gated_delta_rule", "chunk_gated_delta_rule"),
    ):
        module = ModuleType(f"fla.ops.{name}")
        setattr(module, function, chunk)
        monkeypatch.setitem(sys.modules, f"fla.ops.{name}", module)
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(linear_parents, "_is_fla", lambda *_: True)
    fla_function.cache_clear()
    yield noted
    fla_function.cache_clear()


def test_fla_gets_a_key_for_every_head_its_scale_and_documents(calls: list[Any]) -> None:
    x = make_inputs(20, H=4)
    cu_seqlens = torch.tensor([0, 5, 20])
    linear_ssd(x["q"], x["k"], x["v"], x["log_decay"], cu_seqlens=cu_seqlens)
    (call,) = calls
    assert call["scale"] == 1.0
    assert call["k"].shape == (1, 20, 4, 16)
    assert call["k"][:, :, 3].equal(x["k"][:, :, 0])
    assert call["cu_seqlens"].equal(cu_seqlens)
    assert call["cu_seqlens_cpu"].equal(cu_seqlens)


def test_fla_gets_beta_and_nothing_of_documents_where_there_are_none(calls: list[Any]) -> None:
    x = make_inputs(20, G=2)
    gated_delta_rule(**x)
    (call,) = calls
    assert call["scale"] == 1.0
    assert call["rest"][0] is x["beta"]
    assert "cu_seqlens" not in call


def test_fla_where_it_cannot_run_is_refused() -> None:
    x = make_inputs(4)
    del x["beta"]
    with pytest.raises(ValueError, match='library="fla": it(s kernels need| is not installed)'):
        linear_ssd(**x, library="fla")


@pytest.mark.parametrize(
    ("version", "major", "refused"),
    [("3.6.0", 9, True), ("3.7.0", 9, True), ("3.7.1", 9, False), ("3.6.0", 10, False)],
)
def test_fla_is_left_out_where_its_backward_pass_refuses(
    version: str, major: int, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("triton.__version__", version)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (major, 0))
    fla_obstacle.cache_clear()
    try:
        assert (fla_obstacle(torch.device("cuda", 0)) is not None) is refused
    finally:
        fla_obstacle.cache_clear()


def test_fla_is_left_out_where_there_is_no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    fla_obstacle.cache_clear()
    try:
        assert "not installed" in (fla_obstacle(torch.device("cuda", 0)) or "")
    finally:
        fla_obstacle.cache_clear()


@pytest.mark.gpu
@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_fla_equals_our_own(delta: bool, packed: bool) -> None:
    pytest.importorskip("fla.ops")
    if obstacle := fla_obstacle(torch.device("cuda", 0)):
        pytest.skip(obstacle)
    x = make_inputs(1000, G=4 if delta else 1, H=4, K=64, V=64)
    for name in ("q", "k", "v"):
        x[name] = x[name].bfloat16()
    x = {name: value.cuda().requires_grad_() for name, value in x.items()}
    if not delta:
        del x["beta"]
    cu_seqlens = torch.tensor([0, 100, 1000]) if packed else None
    operator = gated_delta_rule if delta else linear_ssd
    results = []
    for library in ("own", "fla"):
        o = operator(**x, cu_seqlens=cu_seqlens, library=library)
        results.append([o, *torch.autograd.grad(o.square().sum(), list(x.values()))])
    for own, theirs in zip(*results, strict=True):
        error = (own.float() - theirs.float()).norm() / own.float().norm()
        assert error < 2e-2
