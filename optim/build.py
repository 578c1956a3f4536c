"""Megatron-core's optimizer and learning-rate schedule, from the configuration."""

from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from conf.schema import Config, Format, OptimizerName, ScheduleName
from models.gpt import DTYPES

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
    adam = o.name in (OptimizerName.adam, OptimizerName.adamw)
    scale = p.loss_scale if isinstance(p.loss_scale, (int, float)) else None
    config = OptimizerConfig(
        optimizer="adam" if adam else "sgd",
        decoupled_weight_decay=o.name is OptimizerName.adamw,
        lr=o.lr,
        min_lr=o.lr * cfg.schedule.final_share,
        weight_decay=o.weight_decay,
        adam_beta1=o.beta1,
        adam_beta2=o.beta2,
        adam_eps=o.eps,
        sgd_momentum=o.momentum if o.name is OptimizerName.momentum else 0.0,
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
    return get_megatron_optimizer(config, chunks, use_gloo_process_groups=False)


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
