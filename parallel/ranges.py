"""The range of every numeric key, as data: what a value must be on its own, whatever the other keys are."""

import math

ABOVE_ZERO = "above 0"
FROM_ZERO = "0 or more"
BELOW_ZERO = "below 0"
FROM_ONE = "1 or more"
FROM_TWO = "2 or more"
SHARE = "from 0 up to, not including, 1"
INSIDE = "between 0 and 1, both excluded"
UP_TO_ONE = "from 0 to 1"
PART = "above 0 and at most 1"

TESTS = {
    ABOVE_ZERO: lambda x: 0 < x < math.inf,
    FROM_ZERO: lambda x: 0 <= x < math.inf,
    BELOW_ZERO: lambda x: -math.inf < x < 0,
    FROM_ONE: lambda x: 1 <= x < math.inf,
    FROM_TWO: lambda x: 2 <= x < math.inf,
    SHARE: lambda x: 0 <= x < 1,
    INSIDE: lambda x: 0 < x < 1,
    UP_TO_ONE: lambda x: 0 <= x <= 1,
    PART: lambda x: 0 < x <= 1,
}

RANGES = {
    "train.steps": FROM_ONE,
    "train.tokens": FROM_ONE,
    "train.global_batch": FROM_ONE,
    "train.micro_batch": FROM_ONE,
    "train.seq_len": FROM_ONE,
    "train.seed": FROM_ZERO,
    "train.log_every": FROM_ONE,
    "train.eval_every": FROM_ONE,
    "train.timeout_s": ABOVE_ZERO,
    "train.nan_limit": FROM_ONE,
    "train.sample_length": FROM_ZERO,
    "model.layers": FROM_ONE,
    "model.hidden": FROM_ONE,
    "model.ffn_hidden": FROM_ONE,
    "model.heads": FROM_ONE,
    "model.kv_heads": FROM_ONE,
    "model.vocab": FROM_ONE,
    "model.vocab_multiple": FROM_ONE,
    "model.norm_eps": ABOVE_ZERO,
    "model.rope_base": ABOVE_ZERO,
    "model.rope_factor": FROM_ONE,
    "model.max_positions": FROM_ONE,
    "model.dropout": SHARE,
    "model.init_std": ABOVE_ZERO,
    "model.mup_base_hidden": FROM_ONE,
    "parallel.tp": FROM_ONE,
    "parallel.pp": FROM_ONE,
    "parallel.vpp": FROM_ONE,
    "parallel.cp": FROM_ONE,
    "parallel.dp_on_cpu": FROM_ONE,
    "parallel.bucket_mb": ABOVE_ZERO,
    "precision.initial_loss_scale": FROM_ONE,
    "precision.min_loss_scale": ABOVE_ZERO,
    "precision.loss_scale_window": FROM_ONE,
    "precision.hysteresis": FROM_ONE,
    "precision.bf16_first_layers": FROM_ZERO,
    "precision.bf16_last_layers": FROM_ZERO,
    "probe.every": FROM_ONE,
    "optimizer.lr": ABOVE_ZERO,
    "optimizer.weight_decay": FROM_ZERO,
    "optimizer.beta1": SHARE,
    "optimizer.beta2": SHARE,
    "optimizer.eps": ABOVE_ZERO,
    "optimizer.momentum": SHARE,
    "optimizer.beta2_decay": BELOW_ZERO,
    "optimizer.update_clip": ABOVE_ZERO,
    "optimizer.scale_floor": FROM_ZERO,
    "optimizer.newton_schulz_steps": FROM_ONE,
    "schedule.warmup_steps": FROM_ZERO,
    "schedule.warmup_tokens": FROM_ZERO,
    "schedule.final_share": UP_TO_ONE,
    "schedule.decay_share": PART,
    "clip.max_norm": ABOVE_ZERO,
    "clip.max_value": ABOVE_ZERO,
    "clip.quantile": UP_TO_ONE,
    "clip.window": FROM_ONE,
    "clip.skip_above": ABOVE_ZERO,
    "clip.skip_window": FROM_TWO,
    "clip.report_every": FROM_ONE,
    "data.val_share": INSIDE,
    "checkpoint.every": FROM_ONE,
    "checkpoint.keep": FROM_ONE,
    "cluster.memory_gb": ABOVE_ZERO,
    "cluster.memory_tb_s": ABOVE_ZERO,
    "cluster.nvlink_gb_s": ABOVE_ZERO,
    "cluster.network_gb_s": ABOVE_ZERO,
    "cluster.devices_per_node": FROM_ONE,
    "cluster.nodes": FROM_ONE,
    "launch.collective_timeout_s": ABOVE_ZERO,
    "launch.parallel_points": FROM_ONE,
}


def problems(cfg) -> list[str]:
    """One sentence for each number outside its range; null, where the schema allows it, is inside."""
    found = []
    for key, allowed in RANGES.items():
        group, name = key.split(".")
        value = getattr(getattr(cfg, group), name)
        if value is not None and not TESTS[allowed](value):
            found.append(f"{key}={value} is out of range: it must be {allowed}.")
    return found
