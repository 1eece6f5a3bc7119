"""What a run will be, said before it starts: sizes, data, dtypes, parameter groups."""

import torch

from models.accounting import parameter_count
from models.language_model import LanguageModel
from models.parameter_groups import is_fp32
from pretrain.batch_plan import BatchPlan
from pretrain.config import RunConfig
from pretrain.optimizer import parameter_table


def plan_lines(config: RunConfig, num_rows: int, world_size: int, device: str) -> list[str]:
    """The lines of a start, for `num_rows` training rows of data.seq_len tokens.

    Args:
        device: cpu or cuda; auto where it is not known yet.

    Raises:
        ValueError: a parameter of the model has no class.
    """
    mixer = (
        config.model.mixer if isinstance(config.model.mixer, str) else "+".join(config.model.mixer)
    )
    plan = BatchPlan(config)
    total_tokens = plan.tokens_until(config.training.total_steps)
    epochs = total_tokens / (num_rows * config.data.seq_len)
    micro_batches = config.batch_rows // (config.batch.micro_batch_rows * world_size)
    lines = [
        f"{config.run_dir}: {mixer}, {parameter_count(config.model):,} parameters, "
        f"{config.model.num_layers} layers, {config.model.num_levels} levels",
        f"data {config.data.dataset}: {num_rows:,} rows of {config.data.seq_len} tokens; "
        f"run of {total_tokens:,} tokens = {epochs:.2f} epochs",
        f"{world_size} x {device}, ZeRO-{config.parallel.zero_stage}; "
        f"{micro_batches} x {config.batch.micro_batch_rows} rows an update and rank",
    ]
    lines += [
        f"up to update {stage.last}: {stage.rows * config.data.seq_len} tokens an update, rows of "
        f"{stage.seq_len}"
        for stage in plan.stages[:-1]
    ]
    return [*lines, *dtype_lines(config)]


def dtype_lines(config: RunConfig) -> list[str]:
    """Every parameter group with its dtypes.

    Raises:
        ValueError: a parameter of the model has no class.
    """
    with torch.device("meta"):
        model = LanguageModel(config.model)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    compute = config.parallel.precision
    lines = ["group                    tensors     parameters  compute"]
    for (muon, decay), names in parameter_table(model, config.optimizer).items():
        rule = "Muon" if muon else "AdamW"
        kept = [name for name in names if is_fp32(name)]
        for what, part, dtype in (
            (f"{rule}, decay {decay:g}", [n for n in names if n not in kept], compute),
            (f"{rule}, decay {decay:g}, recurrence", kept, "fp32"),
        ):
            if part:
                numel = sum(sizes[name] for name in part)
                lines.append(f"{what:<25}{len(part):>7}{numel:>15,}  {dtype}")
    lines.append("parameters, gradients, their accumulation and reduction, optimizer, saved: fp32")
    return lines
