"""What the parity protocol compares: layouts, the cases that each is tried in, and the reference that each must match.

A case changes the model, and then the reference too, or only how it is computed, which must not change the result.
"""

import argparse
from collections.abc import Iterator
from dataclasses import astuple, dataclass, field
from pathlib import Path

from parallel import agreement, compose, environment, overrides
from parallel.assemble import Assembler, without_a_command_line
from parallel.frozen import Frozen
from parallel.refused import Refused

# Unless the user chooses another option of the group. Small, so that a point takes seconds; sizes that every layout of
# eight ranks can divide; a text that stays the same; a learning rate at which gradients are well-conditioned. At 3e-3
# one step had a position whose residual stream nearly vanished: rounding of 1e-7 moved its gradient norm by 1e-4.
SMALL = {
    "model": "model=tiny model.layers=4 model.hidden=64 model.ffn_hidden=176 model.heads=4 model.kv_heads=4".split(),
    "optimizer": ["optimizer=adamw", "optimizer.lr=1e-3"],
    "data": ["data=text", f"data.path={argparse.__file__}"],
}
TRAIN = "train.global_batch=8 train.micro_batch=2 train.seq_len=64 train.eval_sequences=all schedule.warmup_steps=2"
# Files in the protocol's folder: the points to run, and a line for each that has been.
PLAN, FOUND = "plan.json", "found.jsonl"
RUN = "train.sample_length=0 train.eval_every=1000000 checkpoint.every=1000000 checkpoint.keep=1 tracking.mode=disabled"


@dataclass(frozen=True)
class Case:
    """Settings in which layouts are compared."""

    # What it is, for the table.
    title: str
    # Overrides of the model, for the reference as well.
    model: str = ""
    # Overrides of the layouts alone: the reference stays as it is.
    computed: str = ""


CASES = {
    "base": Case("untied embeddings, a key and value head for each query head"),
    "tied": Case("input embedding and output layer share a matrix", "model.tie_embeddings=true"),
    "gqa": Case("two query heads share a key and value head", "model.kv_heads=2"),
    "vocab": Case("257 token ids, which TP does not divide, padded to 384", "model.vocab=257"),
    "gpt2": Case(
        "LayerNorm, GELU, biases, learned positions, tied embeddings",
        "model.norm=layernorm model.activation=gelu model.bias=true model.position=learned model.tie_embeddings=true",
    ),
    "micro_1": Case("micro-batches of 1 against 2", computed="train.micro_batch=1"),
    "micro_4": Case("micro-batches of 4 against 2", computed="train.micro_batch=4"),
    "selective": Case("attention computed again in the backward pass", computed="parallel.recompute=selective"),
    "full": Case("every layer computed again in the backward pass", computed="parallel.recompute=full"),
}
# Together they exercise every axis and what goes with it.
EVERY_AXIS = "tp2_sp pp2_vpp2 cp2 zero3 tp2_pp2 pp2_zero1".split()
Group = tuple[str, str, list[str]]  # format, case and layouts


@dataclass
class Point:
    """One run of the protocol."""

    case: str
    precision: str
    layout: str
    # Its folder, below that of the protocol, and its reference's; the reference's own is its own.
    folder: str
    reference: str
    world_size: int = 0
    # What its ranks must be started with.
    environment: dict[str, str | None] = field(default_factory=dict)
    # Why it is not run, one sentence each.
    problems: list[str] = field(default_factory=list)
    # Largest relative deviations of loss, gradient norm and final weights: what rounding explains, and what was found.
    allowed: list[float] = field(default_factory=list)
    found: list[float] = field(default_factory=list)
    # What is wrong with it, a few words each.
    failed: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def is_reference(self) -> bool:
        """Whether others are compared with it."""
        return self.folder == self.reference


def layouts() -> list[str]:
    """Every option of conf/parallel."""
    return overrides.options()["parallel"]


def wanted(chosen: list[str], cases: list[str], precisions: list[str]) -> list[Group]:
    """What to compare: what is named; and when nothing is, everything, so that it takes minutes.

    That is every layout in every format for the first case, and for the other cases, in the first format, layouts that
    exercise every axis.
    """
    if chosen or cases:
        groups = [(p, case, chosen or layouts()) for p in precisions for case in cases or list(CASES)[:1]]
    else:
        first, *others = CASES
        groups = [(precision, first, layouts()) for precision in precisions]
        groups[1:1] = [(precisions[0], case, [name for name in EVERY_AXIS if name in layouts()]) for case in others]
    return groups


def plan(root: Path, groups: list[Group], steps: int, words: list[str], reference: str) -> Iterator[Point]:
    """Compose, check and freeze every point below `root`, each reference before what is compared with it.

    `words` are overrides for every point, those of parallel.* for the layouts alone.
    """
    own = {word.partition("=")[0] for word in words}
    small = [word for group, defaults in SMALL.items() if group not in own for word in defaults]
    words = [*small, *TRAIN.split(), f"train.steps={steps}", *RUN.split(), *words]
    shared = [word for word in words if not word.startswith("parallel.")]
    assembler = without_a_command_line()
    made: dict[tuple[str, str], Point] = {}
    for precision, name, chosen in groups:
        case = CASES[name]
        model = [*case.model.split(), f"precision={precision}"]
        if (precision, case.model) not in made:
            title = f"{precision}_{name}_reference"
            base = _point(assembler, root, name, precision, reference, title, title, [*shared, *model])
            made[precision, case.model] = base
            yield base
        for layout in chosen:
            title, base = f"{precision}_{name}_{layout}", made[precision, case.model]
            ours = [*words, *model, *case.computed.split()]
            yield _point(assembler, root, name, precision, layout, title, base.folder, ours)


def _point(assembler: Assembler, root: Path, case, precision, layout, folder, reference, words: list[str]) -> Point:
    point, words = Point(case, precision, layout, folder, reference), [f"parallel={layout}", *words]
    try:
        cfg, choices = assembler(words)
        frozen = compose.freeze(compose.check(cfg), root / folder, choices, words)
        point.world_size, point.environment = frozen.world_size, _environment(frozen)
        point.allowed = list(astuple(agreement.allowed(frozen.cfg)))
        # Signs of life go where the process that started the ranks looks for them.
        (root / folder / "ranks").symlink_to(Path("..") / "ranks")
    except Refused as refusal:
        point.problems = refusal.sentences
    return point


def _environment(frozen: Frozen) -> dict[str, str | None]:
    cfg = frozen.cfg
    wanted = environment.rank_environment(cfg, frozen.world_size)
    # Of no meaning for the result, or on a CPU, and it would take other processes.
    free = ["OMP_NUM_THREADS", *["CUDA_DEVICE_MAX_CONNECTIONS"] * (cfg.launch.device == "cpu")]
    return {name: value for name, value in wanted.items() if name not in free} | dict(cfg.parallel.env)
