"""The names of all metrics, and the arithmetic from what a step measured to what is logged.

Console, metrics.jsonl and W&B carry the same names. A name ending in `_avg` is the average from the second step of
this process to now; the first step (allocation, compilation, warm caches) is in no average. The name without `_avg` is
the last step alone. A metric that a run cannot know is absent, never 0.
"""

import math
import time
from collections.abc import Callable

METRICS = {
    "tokens": "Tokens trained on so far; the x-axis of every chart.",
    "train/loss": "Mean loss per token over the global batch, before the update, in nats.",
    "val/loss": "The same on held-out data: the mean over all tokens of the sequences that train.eval_sequences says.",
    "val/perplexity": "exp(val/loss): among how many equally likely tokens the model is undecided.",
    "train/lr": "Learning rate of the step.",
    "grad/norm": "Global L2 norm of the gradient before clipping, every parameter counted once.",
    "grad/clip_coef": "Norm after clipping over grad/norm; 1 when the gradient was short enough.",
    "grad/clip_threshold": "Bound on the norm in this step; absent where there is none (none, per_layer, by_value).",
    "grad/clipped": "1 when the step was clipped, else 0.",
    "grad/clip_fraction": "Share of the updates so far that were clipped; skipped steps do not count.",
    "grad/skipped_spikes": "Steps so far left out because the norm jumped (clip.skip_above); absent when that is off.",
    "amp/loss_scale": "What the loss was multiplied with before the backward pass.",
    "amp/skipped_steps": "Steps so far whose update was skipped because the gradient overflowed.",
    "train/left_out": "Steps so far that train.on_nan left out, loss or gradient not being finite; they have no loss.",
    "train/rollbacks": "Times that train.on_nan=rollback went back to a checkpoint.",
    "perf/step_s": "Seconds for the step, waiting for data included, evaluation not.",
    "perf/tokens_per_s": "Tokens per second over all devices.",
    "perf/tokens_per_s_per_device": "Tokens per second and device.",
    "perf/tflops_per_device": "Model TFLOP/s per device by train.flop_rule; recomputation does not count.",
    "perf/mfu": "perf/tflops_per_device as a share of the device's dense peak; absent where that is unknown.",
    "perf/data_wait_share": "Share of the step spent waiting for data.",
    "mem/peak_gib": "Most memory the logging rank had so far, in GiB: allocated on its GPU, or on a CPU resident.",
    "time/eta_s": "Seconds until the last step at the pace so far, evaluations included.",
}
AVERAGED = [name for name in METRICS if name.startswith("perf/")]
METRICS |= {f"{name}_avg": f"{name}, averaged from the second step to now." for name in AVERAGED}
# Of the steps that probe.every measures, over all layers and the output; probe/<what>/<layer> has each by itself, and
# probe/grad_norm/<layer>. The embedding is left out of shares: rows of tokens that a batch lacks have no gradient.
PROBED = {
    "amp/underflow_fraction": "Share of the gradient, times the loss scale, that is 0 in probe.format; exact zeros "
    "too, for that is what a backward pass in FP16 leaves of what it lost.",
    "amp/overflow_fraction": "Share of the gradient, times the loss scale, that is not finite in probe.format.",
    "amp/lost_updates": "Share of the weights, as the optimizer keeps them, that the update left exactly as they were.",
    "amp/largest_activation": "Largest absolute value that came out of a layer or of one of its linear layers.",
    "amp/activation": "Root mean square of what comes out of the last layer; probe/activation/<layer> has all.",
    "amp/relative_error": "Error of the worst layer's output, against FP32 from the same inputs, over its size.",
    "probe/cost_s": "Seconds that the measurement took, on the logging rank.",
}


class Meter:
    """Turns the raw facts of each step into the metrics above.

    `flops_per_token` counts forward and backward pass; `peak_tflops` is the dense peak of one device or None.
    """

    def __init__(
        self,
        cfg,
        world_size: int,
        flops_per_token: float,
        peak_tflops: float | None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.tokens_per_step = cfg.train.global_batch * cfg.train.seq_len
        self.steps, self.world_size, self.clock = cfg.train.steps, world_size, clock
        self.flops_per_token, self.peak_tflops = flops_per_token, peak_tflops
        self.updates = self.clipped = self.skipped = self.spikes = 0
        self.timed_steps, self.timed_s, self.timed_wait_s = 0, 0.0, 0.0
        self.first_at: float | None = None

    def step(self, raw: dict) -> dict[str, float]:
        """Metrics of one step from its raw facts.

        `raw` has step (from 1), tokens (so far), loss, lr, grad_norm, clip_coef, clipped, loss_scale, skipped,
        step_s, data_wait_s, and peak_gib (None where the device does not count); it may have clip_threshold and spike
        (both None where they mean nothing), left_out (the steps that are) and rollbacks.
        """
        self.skipped += raw["skipped"]
        spike, left_out = raw.get("spike"), raw.get("left_out", ())
        self.spikes += bool(spike)
        if not (raw["skipped"] or spike or raw["step"] in left_out):
            self.updates += 1
            self.clipped += raw["clipped"]
        metrics = {
            "tokens": raw["tokens"],
            "train/loss": raw["loss"],
            "train/lr": raw["lr"],
            "grad/norm": raw["grad_norm"],
            "grad/clip_coef": raw["clip_coef"],
            "grad/clipped": int(raw["clipped"]),
            "grad/clip_fraction": self.clipped / max(self.updates, 1),
            "amp/loss_scale": raw["loss_scale"],
            "amp/skipped_steps": self.skipped,
            "train/left_out": len(left_out),
            "train/rollbacks": raw.get("rollbacks", 0),
            **self._speed(1, raw["step_s"], raw["data_wait_s"]),
        }
        if raw.get("clip_threshold") is not None:
            metrics["grad/clip_threshold"] = raw["clip_threshold"]
        if spike is not None:
            metrics["grad/skipped_spikes"] = self.spikes
        if raw["step"] in left_out:
            for name in ("train/loss", "grad/norm", "grad/clip_coef", "grad/clipped"):
                del metrics[name]
        if raw["peak_gib"] is not None:
            metrics["mem/peak_gib"] = raw["peak_gib"]
        now = self.clock()
        if self.first_at is None:
            self.first_at = now
            return metrics
        self.timed_steps += 1
        self.timed_s += raw["step_s"]
        self.timed_wait_s += raw["data_wait_s"]
        averages = self._speed(self.timed_steps, self.timed_s, self.timed_wait_s)
        metrics |= {f"{name}_avg": value for name, value in averages.items()}
        metrics["time/eta_s"] = (now - self.first_at) / self.timed_steps * (self.steps - raw["step"])
        return metrics

    def _speed(self, steps: int, seconds: float, wait_s: float) -> dict[str, float]:
        tokens_per_s = steps * self.tokens_per_step / seconds
        per_device = tokens_per_s / self.world_size
        tflops = per_device * self.flops_per_token / 1e12
        speed = {
            "perf/step_s": seconds / steps,
            "perf/tokens_per_s": tokens_per_s,
            "perf/tokens_per_s_per_device": per_device,
            "perf/tflops_per_device": tflops,
            "perf/data_wait_share": wait_s / seconds,
        }
        return speed if self.peak_tflops is None else speed | {"perf/mfu": tflops / self.peak_tflops}


def validation(loss: float) -> dict[str, float]:
    """Metrics of an evaluation from its loss in nats per token."""
    return {"val/loss": loss, "val/perplexity": perplexity(loss)}


def perplexity(loss: float) -> float:
    """exp(loss); infinite where a float does not hold it."""
    return math.inf if loss > 700 else math.exp(loss)


def finite(value: float | None) -> bool:
    """Whether a metric is there and neither NaN nor infinite."""
    return value is not None and math.isfinite(value)
