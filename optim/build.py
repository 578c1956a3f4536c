"""Megatron-core's optimizer and learning-rate schedule, from the configuration."""

from megatron.core.optimizer import (
    OptimizerConfig,
    get_megatron_optimizer,
    get_mup_config_overrides,
    get_standard_config_overrides,
)
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from conf.schema import Config, Format, OptimizerName, ScheduleName
from models.gpt import DTYPES
from optim import rules
from precision import no_masters

_STYLES = {
    ScheduleName.constant: "constant",
    ScheduleName.linear: "linear",
    ScheduleName.cosine: "cosine",
    ScheduleName.wsd: "WSD",
    ScheduleName.inverse_sqrt: "inverse-square-root",
}


def optimizer(cfg: Config, chunks):
    """Megatron's optimizer over the wrapped chunks: master weights, loss scale and ZeRO as the configuration says.

    Weight decay goes to matrices only. Clipping is left to optim/clip.py, so that the norm is known in every case.
    """
    o, p = cfg.optimizer, cfg.precision
    scale = p.loss_scale if isinstance(p.loss_scale, (int, float)) else None
    # Megatron wraps Adam; another rule takes its place afterwards, with Adam's constants where it has them.
    constants = {"adam_beta1": o.beta1, "adam_beta2": o.beta2, "adam_eps": o.eps}
    config = OptimizerConfig(
        optimizer="adam",
        decoupled_weight_decay=o.name is OptimizerName.adamw,
        lr=o.lr,
        min_lr=o.lr * cfg.schedule.final_share,
        weight_decay=o.weight_decay,
        **{name: value for name, value in constants.items() if value is not None},
        fp16=p.params is Format.fp16,
        bf16=p.params is Format.bf16,
        params_dtype=DTYPES[p.params],
        loss_scale=scale,
        initial_loss_scale=p.initial_loss_scale,
        min_loss_scale=p.min_loss_scale,
        loss_scale_window=p.loss_scale_window,
        hysteresis=p.hysteresis,
        use_distributed_optimizer=cfg.parallel.zero >= 1,
        overlap_param_gather=cfg.parallel.overlap and cfg.parallel.zero >= 1,
        clip_grad=0.0,
    )
    if no_masters.chosen(cfg):
        no_masters.allow(config)
    wrapped = get_megatron_optimizer(config, chunks, _by_parameter(cfg, config), use_gloo_process_groups=False)
    if no_masters.chosen(cfg):
        no_masters.hand_over_gradients(wrapped)
    rules.install(wrapped, chunks, cfg)
    return wrapped


def _by_parameter(cfg: Config, config: OptimizerConfig) -> dict:
    """What differs between parameters: no weight decay on norms and biases; with mup the learning rate, by width."""
    rates = {}
    if cfg.model.mup:
        plain = cfg.optimizer.name in (OptimizerName.sgd, OptimizerName.momentum)
        kind = "sgd" if plain else config.optimizer
        rates = get_mup_config_overrides(config, cfg.model.hidden / cfg.model.mup_base_hidden, kind)
    return get_standard_config_overrides(config) | rates


def schedule(cfg: Config, optimizer) -> OptimizerParamScheduler:
    """Megatron's schedule, counted in steps; call `.step(1)` before each optimizer step.

    Warm-up is linear and reaches the peak in step `warmup_steps`; the last step has `final_share` of the peak, except
    for `constant`, and for `inverse_sqrt`, which has it as its floor.
    """
    s, steps = cfg.schedule, cfg.train.steps
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=cfg.optimizer.lr,
        min_lr=cfg.optimizer.lr * s.final_share,
        lr_warmup_steps=s.warmup_steps,
        # A run may end inside its warm-up.
        lr_decay_steps=max(steps, s.warmup_steps + 1),
        lr_decay_style=_STYLES[s.name],
        wsd_decay_steps=max(1, round(steps * s.decay_share)),
        lr_wsd_decay_style="linear",
        start_wd=cfg.optimizer.weight_decay,
        end_wd=cfg.optimizer.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
