"""Names, types and meanings of every configuration key; the YAML groups beside this file hold the values.

Hydra merges the YAML values into these dataclasses, so a wrong type or an unknown key is refused at composition.
Rules that span several keys live in `parallel/rules.py`. This file declares; nothing here runs.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from omegaconf import MISSING


class Format(StrEnum):
    """A number format of stored or communicated tensors."""

    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


class Compute(StrEnum):
    """The format in which matrix products are computed."""

    fp32 = "fp32"
    tf32 = "tf32"
    bf16 = "bf16"
    fp16 = "fp16"
    fp8 = "fp8"


class Fp8(StrEnum):
    """What multiplies in FP8; `auto` is Transformer Engine on GPUs that have FP8 (Hopper and later), else emulation."""

    none = "none"
    auto = "auto"
    emulated = "emulated"
    transformer_engine = "transformer_engine"


class Fp8Recipe(StrEnum):
    """Where an FP8 scale comes from: the tensor's largest value now, or of earlier steps, or that of each block."""

    current = "current"
    delayed = "delayed"
    blockwise = "blockwise"


class Recompute(StrEnum):
    """Which activations are dropped in the forward pass and computed again in the backward pass."""

    none = "none"
    selective = "selective"
    full = "full"


class Norm(StrEnum):
    """Normalisation in front of attention, MLP and output layer."""

    layernorm = "layernorm"
    rmsnorm = "rmsnorm"


class Activation(StrEnum):
    """Non-linearity of the MLP."""

    gelu = "gelu"
    swiglu = "swiglu"


class Position(StrEnum):
    """How a token's position enters the model."""

    learned = "learned"
    rope = "rope"


class Attention(StrEnum):
    """Kernel of the core attention."""

    auto = "auto"
    sdpa = "sdpa"
    flash_attn = "flash_attn"
    math = "math"


class OptimizerName(StrEnum):
    """Rule that turns a gradient into an update."""

    sgd = "sgd"
    momentum = "momentum"
    rmsprop = "rmsprop"
    adagrad = "adagrad"
    adam = "adam"
    adamw = "adamw"
    lamb = "lamb"
    lion = "lion"
    adafactor = "adafactor"
    muon = "muon"


class Offload(StrEnum):
    """What is kept in host memory between two steps."""

    none = "none"
    optimizer = "optimizer"


class ScheduleName(StrEnum):
    """Shape of the learning rate over the run."""

    constant = "constant"
    linear = "linear"
    cosine = "cosine"
    wsd = "wsd"
    inverse_sqrt = "inverse_sqrt"


class ClipKind(StrEnum):
    """Rule that bounds the gradient before the update."""

    none = "none"
    fixed = "fixed"
    by_model_size = "by_model_size"
    adaptive = "adaptive"
    per_layer = "per_layer"
    by_value = "by_value"


class DataKind(StrEnum):
    """Where tokens come from."""

    stdlib = "stdlib"
    text = "text"
    megatron = "megatron"
    mock = "mock"


class TrackingMode(StrEnum):
    """How W&B is used; `auto` is online with a key and offline without."""

    auto = "auto"
    online = "online"
    offline = "offline"
    disabled = "disabled"


class Device(StrEnum):
    """What the ranks compute on; `auto` takes GPUs when there are any."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class OnNan(StrEnum):
    """What becomes of a run whose loss or gradient is not finite."""

    stop = "stop"
    skip = "skip"
    rollback = "rollback"


class LaunchKind(StrEnum):
    """What starts the ranks: this machine, or srun on the nodes of the SLURM allocation this is run in."""

    local = "local"
    srun = "srun"


class FlopRule(StrEnum):
    """Which floating-point operations a token is charged with.

    `full` counts the whole attention matrix (6N + 12·layers·hidden·seq), `causal` only its lower half
    (6N + 6·layers·hidden·seq). N leaves out the input embedding and counts the output layer.
    """

    full = "full"
    causal = "causal"


@dataclass
class Train:
    """Length, batch and rhythm of a run."""

    # Optimizer steps; null when `tokens` says how long to train.
    steps: int | None = None
    # Tokens to train on, rounded up to whole steps; null when `steps` says it.
    tokens: int | None = None
    # Sequences per optimizer step over all ranks.
    global_batch: int = MISSING
    # Sequences per forward pass of one rank; the rest of the global batch is accumulated.
    micro_batch: int = MISSING
    # Tokens per sequence.
    seq_len: int = MISSING
    # Seed of initial weights and sample order; neither depends on the layout.
    seed: int = MISSING
    # Steps between two lines on a console that is not a terminal; metrics.jsonl and W&B get every step.
    log_every: int = MISSING
    # Steps between two evaluations on held-out data; one is made before the first step and after the last.
    eval_every: int = MISSING
    # Held-out sequences per evaluation, always the same first ones, or `all`: every token of the held-out data.
    eval_sequences: int | str = MISSING
    # Seconds after which a run is stopped and recorded as `timeout`; null for never.
    timeout_s: float | None = None
    # When loss or gradient is not finite: `stop` ends the run as `nan`; `skip` leaves the step's update out; `rollback`
    # goes back to the last checkpoint and leaves the step's batch out. Each names the first bad tensor in doctor/.
    on_nan: OnNan = MISSING
    # Steps that on_nan may leave out in a run; at the next one the run ends as `nan`.
    nan_limit: int = MISSING
    # Tokens of sample text generated at the end; 0 for none.
    sample_length: int = MISSING
    # FLOP rule behind perf/tflops_per_device and perf/mfu.
    flop_rule: FlopRule = MISSING


@dataclass
class Model:
    """Shape of the GPT."""

    # Name shown in folders and dashboards.
    name: str = MISSING
    # Transformer layers.
    layers: int = MISSING
    # Width of the residual stream.
    hidden: int = MISSING
    # Inner width of the MLP (of each of its two halves with swiglu).
    ffn_hidden: int = MISSING
    # Query heads.
    heads: int = MISSING
    # Key and value heads; fewer than `heads` is grouped-query attention.
    kv_heads: int = MISSING
    # Token ids the model knows, before padding.
    vocab: int = MISSING
    # The vocabulary is padded to a multiple of this, the same under every layout.
    vocab_multiple: int = MISSING
    # Normalisation.
    norm: Norm = MISSING
    # Added to the variance inside the norm.
    norm_eps: float = MISSING
    # Non-linearity of the MLP.
    activation: Activation = MISSING
    # Position encoding.
    position: Position = MISSING
    # Base of the rotary angles; used with position=rope.
    rope_base: float = MISSING
    # Rotary angles of long wavelengths are divided by this, as in Llama 3.1 (by 8) and 3.2 (by 32); 1 for none.
    rope_factor: float = 1.0
    # Positions a learned encoding has; used with position=learned, at least train.seq_len.
    max_positions: int = MISSING
    # Biases in linear layers.
    bias: bool = MISSING
    # Input embedding and output layer share one matrix.
    tie_embeddings: bool = MISSING
    # Kernel of the core attention.
    attention: Attention = MISSING
    # Dropout after attention and MLP; 0 keeps layouts comparable.
    dropout: float = MISSING
    # Standard deviation of initial weights; layers that write to the residual stream get it divided by sqrt(2·layers).
    init_std: float = MISSING
    # Begin with the weights of a checkpoint instead of random ones: its path, or that of a run (its newest).
    weights: str | None = None
    # Maximal update parametrisation: initial weights, learning rates and logits scale with hidden / mup_base_hidden, so
    # that the best learning rate of the base width stays the best one at every width.
    mup: bool = False
    # Width at which mup changes nothing; the width of the small model whose learning rate is carried over.
    mup_base_hidden: int = 256


@dataclass
class Parallel:
    """How one training step is spread over ranks: world size = tp·pp·cp·dp."""

    # Name shown in folders and dashboards.
    name: str = MISSING
    # Tensor-parallel ranks: each layer's matrices are split.
    tp: int = MISSING
    # Pipeline-parallel ranks: the layers are split into stages.
    pp: int = MISSING
    # Virtual stages per pipeline rank (interleaved schedule); 1 for the plain one.
    vpp: int = MISSING
    # Context-parallel ranks: the sequence is split.
    cp: int = MISSING
    # Data-parallel ranks, or `auto`: the GPUs that are left, without GPUs `dp_on_cpu`.
    dp: int | str = MISSING
    # What dp=auto means on a machine without GPUs.
    dp_on_cpu: int = MISSING
    # Split norms and residuals along the sequence among the tensor-parallel ranks.
    sequence_parallel: bool = MISSING
    # ZeRO stage: what the data-parallel ranks share out: 0 nothing, 1 optimizer state, 2 and gradients, 3 and weights.
    zero: int = MISSING
    # Size of a gradient bucket in MiB of its reduction format; null for Megatron's own choice.
    bucket_mb: float | None = None
    # Overlap gradient reduction and parameter gathering with computation.
    overlap: bool = MISSING
    # Activation recomputation.
    recompute: Recompute = MISSING
    # Keep the optimizer's moments in host memory between steps; on a CPU they are there anyway.
    offload: Offload = Offload.none
    # Extra environment variables of the ranks; they win over what the layout sets.
    env: dict[str, str] = field(default_factory=dict)


@dataclass
class Precision:
    """Which number format each part of training is kept in."""

    # Name shown in folders and dashboards.
    name: str = MISSING
    # Weights used in the forward and backward pass.
    params: Format = MISSING
    # Matrix products.
    compute: Compute = MISSING
    # Activations, and their gradients, that pipeline stages send each other; always as the weights.
    activations: Format = MISSING
    # Sum of the gradients of a step's micro-batches; always as they are reduced.
    gradients: Format = MISSING
    # Reduction of gradients among data-parallel ranks.
    grad_reduce: Format = MISSING
    # Weights that the optimizer updates: master weights in fp32, or without any the bf16 weights themselves.
    main_params: Format = MISSING
    # Moments of the optimizer, where optimizer.moments does not say otherwise.
    moments: Format = MISSING
    # `none`, `dynamic`, or a fixed number by which the loss is multiplied.
    loss_scale: int | float | str = MISSING
    # First value of a dynamic loss scale.
    initial_loss_scale: float = MISSING
    # A dynamic loss scale is never lowered below this.
    min_loss_scale: float = MISSING
    # Steps without overflow after which a dynamic loss scale doubles.
    loss_scale_window: int = MISSING
    # Overflows tolerated before a dynamic loss scale halves.
    hysteresis: int = MISSING
    # What multiplies in FP8 with compute=fp8; none for every other format.
    fp8: Fp8 = Fp8.none
    # Where the scale of an FP8 tensor comes from; emulation knows `current` only.
    fp8_recipe: Fp8Recipe = Fp8Recipe.current
    # Layers at the start of the model whose products stay in BF16 with compute=fp8.
    bf16_first_layers: int = 0
    # Layers at the end of the model whose products stay in BF16 with compute=fp8.
    bf16_last_layers: int = 0


@dataclass
class Probe:
    """Measures what the number formats lose, layer by layer: gradients, updates, precision of the outputs."""

    # Steps between two measurements, each of which takes longer than a step otherwise does; null for none.
    every: int | None = None
    # Format that gradients are judged by; null for the one that the weights have.
    format: Format | None = None


@dataclass
class Optimizer:
    """Rule that turns a gradient into an update."""

    # Which rule.
    name: OptimizerName = MISSING
    # Peak learning rate.
    lr: float = MISSING
    # Weight decay on matrices; norms and biases get none. Added to the gradient by sgd, momentum, rmsprop, adagrad and
    # adam; by the others to the update.
    weight_decay: float = MISSING
    # Format in which moments are kept between steps: fp32 or bf16; null for precision.moments. Rules compute in FP32.
    moments: Format | None = None
    # Decay of the first moment (adam, adamw, lamb; lion's in the update; of muon's AdamW).
    beta1: float | None = None
    # Decay of the second moment (rmsprop, adam, adamw, lamb; of lion's only moment; of muon's AdamW).
    beta2: float | None = None
    # Added to the root of the second moment (rmsprop, adagrad, adam, adamw, lamb; of muon's AdamW).
    eps: float | None = None
    # Share of the past in the momentum (momentum, muon).
    momentum: float | None = None
    # In step t the second moment takes in t^beta2_decay of the new gradient (adafactor).
    beta2_decay: float | None = None
    # Largest root mean square of a tensor's update before the learning rate (adafactor).
    update_clip: float | None = None
    # Steps are relative to the root mean square of a tensor, and to this where that is smaller (adafactor).
    scale_floor: float | None = None
    # Newton-Schulz steps that make the momentum orthogonal (muon).
    newton_schulz_steps: int | None = None


@dataclass
class Schedule:
    """Learning rate over the run."""

    # Shape after warm-up.
    name: ScheduleName = MISSING
    # Steps of linear warm-up from zero.
    warmup_steps: int = MISSING
    # Tokens of linear warm-up, rounded up to whole steps; null to use warmup_steps.
    warmup_tokens: int | None = None
    # Learning rate at the end as a share of the peak.
    final_share: float = MISSING
    # Share of the run that wsd spends on its decay.
    decay_share: float = MISSING


@dataclass
class Clip:
    """Bound on the gradient; the norm is computed and logged whatever is chosen."""

    # Rule.
    kind: ClipKind = MISSING
    # Largest L2 norm: of the gradient (fixed; by_model_size computes it), or of each tensor's gradient (per_layer).
    max_norm: float | None = None
    # Largest absolute value of an element of the gradient (by_value).
    max_value: float | None = None
    # The threshold is this quantile of the norms of the last `window` steps (adaptive).
    quantile: float | None = None
    # Norms that the quantile is taken over, the step's own included (adaptive).
    window: int | None = None
    # Leave the weights alone in a step whose norm is more than this many standard deviations above the mean of the last
    # `skip_window` norms; null never skips.
    skip_above: float | None = None
    # Norms that a spike is judged by; nothing is skipped before half of them are there.
    skip_window: int = 128
    # Steps between two reports on the norms and on what each threshold would have clipped; one more comes at the end.
    report_every: int = 10_000


@dataclass
class Data:
    """Where tokens come from."""

    # Source.
    kind: DataKind = MISSING
    # File or folder (text); prefix of a pair .bin and .idx, a list of them, or [WEIGHT, PREFIX, ...] (megatron).
    path: Any = None
    # How text becomes tokens: bytes, or the path of a Hugging Face tokenizer.json or a SentencePiece .model file; null
    # for the one that is recorded beside the files (megatron).
    tokenizer: str | None = MISSING
    # Share of the documents (of the text, when it is one document) held out for validation.
    val_share: float = MISSING
    # What the sample text at the end of a run continues; null for the first words of the held-out text.
    sample_prompt: str | None = None


@dataclass
class Checkpoint:
    """What is kept of a run while it goes on, in the folder `checkpoints` of the run, and from where it goes on."""

    # Steps between two checkpoints; one more is written after the last step and when the run is stopped. Null for none.
    every: int | None = None
    # Newest checkpoints to keep.
    keep: int = MISSING
    # Write beside training, from a copy in host memory: true, false (training waits), or auto for true where the copy
    # takes at most half of the memory that is free.
    asynchronous: bool | str = MISSING
    # Go on from a checkpoint: its path or that of a run (its newest), written under any layout and precision; `auto`
    # for the newest in this run's own folder, from the beginning when there is none; null for a fresh start.
    resume: str | None = None


@dataclass
class Tracking:
    """Where metrics go besides the console and metrics.jsonl."""

    # W&B project.
    project: str = MISSING
    # How W&B is used.
    mode: TrackingMode = MISSING


@dataclass
class Cluster:
    """A device and what it can do at best; the denominator of MFU."""

    # Name shown.
    name: str = MISSING
    # The device's own name as its driver gives it, the whole of it: an H100 PCIe is slower than an H100 SXM.
    device: str | None = None
    # Dense peak in TFLOP/s by compute format; empty for whatever device is there.
    peak_tflops: dict[str, float] = field(default_factory=dict)
    # Device memory in GB (10^9 bytes).
    memory_gb: float | None = None
    # Memory bandwidth in TB/s.
    memory_tb_s: float | None = None
    # NVLink bandwidth of one device, one way, in GB/s.
    nvlink_gb_s: float | None = None
    # Network bandwidth of one device, one way, in GB/s.
    network_gb_s: float | None = None
    # Devices in a node.
    devices_per_node: int | None = None
    # Nodes.
    nodes: int = 1


@dataclass
class Launch:
    """How ranks come to life."""

    # What starts them.
    kind: LaunchKind = MISSING
    # What they compute on.
    device: Device = MISSING
    # Seconds that a rank waits for others in a collective before the run ends as `timeout` and names who is missing.
    collective_timeout_s: float = 1800.0
    # Points of a sweep that run at the same time, each on its own GPUs; says nothing about a point.
    parallel_points: int = 1


@dataclass
class Config:
    """One point: everything that decides what a run computes."""

    train: Train = field(default_factory=Train)
    model: Model = field(default_factory=Model)
    parallel: Parallel = field(default_factory=Parallel)
    precision: Precision = field(default_factory=Precision)
    probe: Probe = field(default_factory=Probe)
    optimizer: Optimizer = field(default_factory=Optimizer)
    schedule: Schedule = field(default_factory=Schedule)
    clip: Clip = field(default_factory=Clip)
    data: Data = field(default_factory=Data)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    tracking: Tracking = field(default_factory=Tracking)
    cluster: Cluster = field(default_factory=Cluster)
    launch: Launch = field(default_factory=Launch)


@dataclass
class Sweep:
    """What is done with the points of a sweep; no part of any point."""

    # Run the legal points when others are not, and list those with their reasons, instead of starting nothing.
    skip_illegal: bool = MISSING


@dataclass
class CommandLine(Config):
    """Everything that can be set: the values of a point, and what concerns a sweep as a whole."""

    sweep: Sweep = field(default_factory=Sweep)
    # Continue an earlier sweep: true for the newest of the same command, or the folder of one.
    resume: bool | str = MISSING
    # Statuses of the points that run again, such as oom,failed; null for every point that is not ok.
    retry: str | None = None
    # Metric or field of result.json that is the outcome of a point for Hydra's sweepers that search.
    optimized_metric: str | None = None
