"""Checkpoints of other code bases: every tensor has a place, every setting is heard.

FLA's own models are compared where flash-linear-attention can be imported (tests/models/
compare_with_fla.py; PYTHONPATH may point to it): on a CPU in Triton's interpreter, on a GPU as is.
"""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from typer.testing import CliRunner

from kernels.levels import level_matrix
from models.__main__ import app
from models.import_model import import_model
from models.language_model import LanguageModel
from models.weights import load_model

LEVELS = 5
MAMBA2 = {"hidden_size": 32, "head_dim": 16, "state_size": 16, "num_hidden_layers": 2}
GATED_DELTANET = {"hidden_size": 32, "head_dim": 16, "num_heads": 2, "num_hidden_layers": 2}


def random_tensors(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(0)
    tensors = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=random)
        one = "norm" in name or name.endswith((".D", ".L"))
        tensors[name] = 1 + 0.3 * noise if one else 0.3 * noise
    return tensors


def mamba2_shapes(log_linear: bool) -> dict[str, tuple[int, ...]]:
    rows = 2 * 64 + 2 * 16 + 4 + (4 * LEVELS if log_linear else 0)
    shapes: dict[str, tuple[int, ...]] = {"backbone.embeddings.weight": (40, 32)}
    for i in range(2):
        layer = f"backbone.layers.{i}."
        norms = ("mixer_norm", "mlp_norm") if log_linear else ("norm",)
        shapes |= {f"{layer}{norm}.weight": (32,) for norm in norms}
        shapes |= {
            f"{layer}mixer.in_proj.weight": (rows, 32),
            f"{layer}mixer.conv1d.weight": (96, 1, 4),
            f"{layer}mixer.conv1d.bias": (96,),
            f"{layer}mixer.A_log": (4,),
            f"{layer}mixer.D": (4,),
            f"{layer}mixer.dt_bias": (4,),
            f"{layer}mixer.norm.weight": (64,),
            f"{layer}mixer.out_proj.weight": (32, 64),
        }
        if log_linear:
            shapes |= {f"{layer}mixer.L": (4, LEVELS), f"{layer}mlp.down_proj.weight": (32, 48)}
            shapes |= {f"{layer}mlp.{part}_proj.weight": (48, 32) for part in ("gate", "up")}
    return {**shapes, "backbone.norm_f.weight": (32,), "lm_head.weight": (40, 32)}


def gated_deltanet_shapes(log_linear: bool) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"model.embeddings.weight": (40, 32)}
    for i in range(2):
        layer = f"model.layers.{i}."
        for x, rows in (("q", 32), ("k", 32), ("v", 64)):
            shapes[f"{layer}attn.{x}_proj.weight"] = (rows, 32)
            shapes[f"{layer}attn.{x}_conv1d.weight"] = (rows, 1, 4)
        shapes |= {
            f"{layer}attn_norm.weight": (32,),
            f"{layer}mlp_norm.weight": (32,),
            f"{layer}attn.a_proj.weight": (2, 32),
            f"{layer}attn.b_proj.weight": (2, 32),
            f"{layer}attn.g_proj.weight": (64, 32),
            f"{layer}attn.o_proj.weight": (32, 64),
            f"{layer}attn.o_norm.weight": (32,),
            f"{layer}attn.A_log": (2,),
            f"{layer}attn.dt_bias": (2,),
            f"{layer}mlp.gate_proj.weight": (48, 32),
            f"{layer}mlp.up_proj.weight": (48, 32),
            f"{layer}mlp.down_proj.weight": (32, 48),
        }
        if log_linear:
            shapes |= {
                f"{layer}attn.l_proj.weight": (2 * LEVELS, 32),
                f"{layer}attn.L": (2, LEVELS),
            }
    return {**shapes, "model.norm.weight": (32,), "lm_head.weight": (40, 32)}


# source, config.json, shapes, mixer
FOREIGN: dict[str, tuple[str, dict[str, Any], dict[str, tuple[int, ...]], str]] = {
    "fla-mamba2": (
        "fla",
        {"model_type": "mamba2", **MAMBA2, "dt_limit": [0.0, {"__float__": "Infinity"}]},
        mamba2_shapes(False),
        "mamba2",
    ),
    "fla-log-linear-mamba2": (
        "fla",
        {"model_type": "log_linear_mamba2", **MAMBA2, "dt_limit": [0.0, float("inf")]},
        mamba2_shapes(True),
        "log_linear_mamba2",
    ),
    "hattention": (
        "hattention",
        {"model_type": "hattention", **MAMBA2, "num_heads": 4, "layer_norm_epsilon": 1e-5},
        mamba2_shapes(True),
        "log_linear_mamba2",
    ),
    "fla-gated-deltanet": (
        "fla",
        {"model_type": "gated_deltanet", **GATED_DELTANET, "expand_v": 2.0, "attn": None},
        gated_deltanet_shapes(False),
        "gated_deltanet",
    ),
    "h-gated-deltanet": (
        "hattention",
        {"model_type": "h_gated_deltanet", **GATED_DELTANET},
        gated_deltanet_shapes(True),
        "log_linear_gated_deltanet",
    ),
}


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    """Writes a foreign folder; `change` may edit its settings and tensors first."""

    def write(
        name: str, change: Callable[[dict[str, Any], dict[str, Tensor]], None] | None = None
    ) -> Path:
        _, settings, shapes, _ = FOREIGN[name]
        settings, tensors = {"vocab_size": 40, **settings}, random_tensors(shapes)
        if change is not None:
            change(settings, tensors)
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "config.json").write_text(json.dumps(settings))
        save_file(tensors, tmp_path / name / "model.safetensors")
        return tmp_path / name

    return write


def imported(source: Path, name: str) -> LanguageModel:
    output = source.with_name(f"ours-{source.name}")
    import_model(source, output, FOREIGN[name][0])  # type: ignore[arg-type]
    return load_model(output)


@pytest.mark.parametrize("name", FOREIGN)
def test_every_tensor_has_a_place(name: str, folder: Callable[..., Path]) -> None:
    model = imported(folder(name), name)
    shapes = FOREIGN[name][2]
    assert model.config.mixer == FOREIGN[name][3]
    assert sum(p.numel() for p in model.parameters()) == sum(
        torch.Size(shape).numel() for shape in shapes.values()
    )
    if "log" in name or name.startswith("h"):
        assert model.config.max_seq_len == 2 ** (LEVELS - 1)
    assert torch.isfinite(model(torch.arange(16)[None])).all()


@torch.no_grad()
def test_lambda_of_mamba2_is_softplus_of_L_times_the_last_rows_of_in_proj(
    folder: Callable[..., Path],
) -> None:
    source = folder("hattention")
    mixer = imported(source, "hattention").blocks[1].mixer
    theirs = random_tensors(FOREIGN["hattention"][2])
    u = torch.randn(3, 7, 32)
    dl = (u @ theirs["backbone.layers.1.mixer.in_proj.weight"].T)[..., -4 * LEVELS :]
    wanted = F.softplus(theirs["backbone.layers.1.mixer.L"] * dl.unflatten(-1, (4, LEVELS)))
    found = mixer.level_weights(mixer.level_proj(u), (3, 7))
    torch.testing.assert_close(found, wanted)


@torch.no_grad()
def test_authors_gated_deltanet_equals_its_formula(folder: Callable[..., Path]) -> None:
    """One mixer against the dense form written out in their terms: q / sqrt(K), lambda sqrt(K)."""
    mixer = imported(folder("h-gated-deltanet"), "h-gated-deltanet").blocks[0].mixer
    tensors = random_tensors(FOREIGN["h-gated-deltanet"][2])
    p = {
        name.removeprefix("model.layers.0.attn."): tensor
        for name, tensor in tensors.items()
        if name.startswith("model.layers.0.attn.")
    }
    T, H, K = 11, 2, 16
    u = torch.randn(1, T, 32)
    q, k, v = (
        F.silu(
            F.conv1d(
                F.pad((u @ p[f"{x}_proj.weight"].T).transpose(1, 2), (3, 0)),
                p[f"{x}_conv1d.weight"],
                groups=p[f"{x}_conv1d.weight"].shape[0],
            )
        )[0]
        .T.unflatten(-1, (H, -1))
        .transpose(0, 1)
        for x in "qkv"
    )  # [H, T, K or V]
    q = q * (q.square().sum(-1, keepdim=True) + 1e-6).rsqrt() * K**-0.5
    k = k * (k.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
    beta = (u @ p["b_proj.weight"].T).sigmoid()[0].T  # [H, T]
    g = (-p["A_log"].exp() * F.softplus(u @ p["a_proj.weight"].T + p["dt_bias"]))[0].T
    dl = (u @ p["l_proj.weight"].T)[0].unflatten(-1, (H, LEVELS)).transpose(0, 1)
    weights = F.softplus(p["L"][:, None] * dl) * K**0.5  # [H, T, L]
    o = torch.zeros(H, T, 32)
    for h in range(H):
        for t in range(T):
            for s in range(t + 1):
                x = k[h, s]
                for j in range(s + 1, t + 1):
                    x = g[h, j].exp() * (x - beta[h, j] * k[h, j] * (k[h, j] @ x))
                weight = weights[h, t, level_matrix(T)[t, s]]
                o[h, t] += weight * (q[h, t] @ x) * beta[h, s] * v[h, s]
    o = o.transpose(0, 1)[None]
    o = o * (o.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * p["o_norm.weight"]
    o = o * F.silu((u @ p["g_proj.weight"].T).unflatten(-1, (H, -1)))
    wanted = o.flatten(-2) @ p["o_proj.weight"].T
    torch.testing.assert_close(mixer(u, None, T), wanted, rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("mlp", [0, 48])
def test_mamba_ssm_is_fla_under_other_names(
    mlp: int, folder: Callable[..., Path], tmp_path: Path
) -> None:
    fla = imported(folder("fla-mamba2"), "fla-mamba2")
    theirs = random_tensors(FOREIGN["fla-mamba2"][2])
    theirs["backbone.embedding.weight"] = theirs.pop("backbone.embeddings.weight")
    settings = {
        "d_model": 32,
        "n_layer": 2,
        "vocab_size": 37,
        "ssm_cfg": {"layer": "Mamba2", "headdim": 16, "d_state": 16},
        "pad_vocab_size_multiple": 8,
        "tie_embeddings": False,
        "attn_layer_idx": [],
        "attn_cfg": {},
        "d_intermediate": mlp,
    }
    if mlp:
        for i in range(2):
            theirs[f"backbone.layers.{i}.norm2.weight"] = torch.ones(32)
            theirs[f"backbone.layers.{i}.mlp.fc1.weight"] = torch.randn(2 * mlp, 32)
            theirs[f"backbone.layers.{i}.mlp.fc2.weight"] = torch.randn(32, mlp)
    source = tmp_path / "mamba"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(settings))
    torch.save(theirs, source / "pytorch_model.bin")
    import_model(source, tmp_path / "ours", "mamba_ssm", max_seq_len=128)
    ours = load_model(tmp_path / "ours")
    assert (ours.config.vocab_size, ours.config.max_seq_len) == (40, 128)
    tokens = torch.arange(20)[None]
    if not mlp:
        assert torch.equal(ours(tokens), fla(tokens))
        return
    x = torch.randn(5, 32)
    y, gate = (x @ theirs["backbone.layers.1.mlp.fc1.weight"].T).chunk(2, -1)
    wanted = (y * F.silu(gate)) @ theirs["backbone.layers.1.mlp.fc2.weight"].T
    assert ours.blocks[1].mlp is not None
    torch.testing.assert_close(ours.blocks[1].mlp(x), wanted)


def test_tied_embeddings_need_no_output_projection(folder: Callable[..., Path]) -> None:
    def tie(settings: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        settings["tie_word_embeddings"] = True
        del tensors["lm_head.weight"]

    assert imported(folder("fla-mamba2", tie), "fla-mamba2").lm_head is None


@pytest.mark.parametrize(
    ("name", "setting", "value", "message"),
    [
        ("fla-mamba2", "n_groups", 2, "n_groups is 2, which ours cannot express; expected 1"),
        ("fla-mamba2", "use_conv_bias", False, "use_conv_bias is False"),
        ("fla-mamba2", "dt_limit", [0.0, 1.0], r"dt_limit is \[0.0, 1.0\]"),
        ("fla-mamba2", "new_idea", True, "settings that are not known here: new_idea"),
        ("fla-mamba2", "model_type", "rwkv7", "model_type 'rwkv7' is not a fla model"),
        ("fla-gated-deltanet", "allow_neg_eigval", True, "allow_neg_eigval is True"),
        ("fla-gated-deltanet", "attn", {"layers": [0]}, r"attn is \{'layers': \[0\]\}"),
        ("fla-gated-deltanet", "num_v_heads", 4, "num_v_heads is 4, which ours cannot express"),
        ("fla-gated-deltanet", "head_dim", 24, "key_size must be a multiple of 16 up to 256"),
        ("hattention", "hidden_act", "gelu", "hidden_act is 'gelu'"),
    ],
)
def test_settings_that_ours_cannot_express_are_refused_by_name(
    name: str, setting: str, value: Any, message: str, folder: Callable[..., Path]
) -> None:
    source = folder(name, lambda settings, _: settings.__setitem__(setting, value))
    with pytest.raises(ValueError, match=message):
        imported(source, name)


def test_missing_and_unknown_tensors_are_named(folder: Callable[..., Path]) -> None:
    def break_it(_: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors["backbone.layers.1.mixer.extra"] = tensors.pop("backbone.layers.1.mixer.D")

    with pytest.raises(ValueError, match=r"mixer.D is missing; .*mixer.extra is unknown"):
        imported(folder("fla-mamba2", break_it), "fla-mamba2")


def test_levels_fix_the_longest_document(folder: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_seq_len is fixed by the 5 levels of .*: got 64"):
        import_model(folder("hattention"), tmp_path / "o", "hattention", max_seq_len=64)


def test_files_that_would_run_code_are_refused(folder: Callable[..., Path]) -> None:
    source = folder("fla-mamba2")
    (source / "model.safetensors").unlink()
    torch.save({"x": print}, source / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model.bin is not a file of tensors"):
        imported(source, "fla-mamba2")


def test_command_line_names_the_mistake_in_one_line(
    folder: Callable[..., Path], tmp_path: Path
) -> None:
    source = folder("fla-mamba2")
    arguments = ["import", str(source), str(tmp_path / "out"), "--from", "fla"]
    first = CliRunner().invoke(app, arguments)
    assert first.exit_code == 0
    assert "every one equal to its source bit by bit" in first.output
    assert "is complete: nothing to do" in CliRunner().invoke(app, arguments).output
    done = subprocess.run(
        [sys.executable, "-m", "models", "import", str(source), str(tmp_path / "other")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "is no export of ours: got model_type 'mamba2'" in done.stderr


def compare_with_fla(device: str) -> None:
    if importlib.util.find_spec("fla") is None:
        pytest.skip("needs flash-linear-attention")
    script = Path(__file__).with_name("compare_with_fla.py")
    done = subprocess.run(
        [sys.executable, str(script), device], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert done.stdout.count("ok ") == 4


@pytest.mark.slow
def test_logits_equal_those_of_fla_on_a_cpu() -> None:
    compare_with_fla("cpu")


@pytest.mark.gpu
def test_logits_equal_those_of_fla_on_a_gpu() -> None:
    compare_with_fla("cuda")
