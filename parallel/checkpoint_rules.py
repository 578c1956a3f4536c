"""Whether a checkpoint fits a configuration, told in sentences, before any process starts where that is possible."""

from dataclasses import asdict, fields
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from conf.schema import Model
from parallel import checkpoint_files as files


def problems(cfg) -> list[str]:
    """What is wrong with the group `checkpoint`; of `resume=auto` only the ranks can say it, in their run's folder."""
    resume, asynchronous, said = cfg.checkpoint.resume, cfg.checkpoint.asynchronous, []
    if asynchronous not in (True, False, "auto"):
        said.append(f"checkpoint.asynchronous={asynchronous} is unknown: take auto, true or false.")
    if resume is None or resume == "auto":
        return said
    try:
        found = files.find(resume, Path())
        return said + unfit(found, files.read_about(found), cfg)
    except files.BadCheckpoint as problem:
        return [*said, str(problem)]


def unfit(checkpoint: Path, about: dict, cfg) -> list[str]:
    """Where a checkpoint and a configuration contradict each other. The layout and the precision may be any."""
    found = []
    here = {"model": plain(cfg.model)} | {"train": plain(cfg.train)} | {"optimizer": plain(cfg.optimizer)}
    if "optimizer" not in about:
        return [f"{checkpoint} holds weights alone, with which a run begins and cannot go on: take model.weights."]
    for group, names in (("model", about["model"]), ("train", about["batch"]), ("optimizer", about["optimizer"])):
        for name, value in names.items():
            if here[group].get(name, value) != value:
                found.append(
                    f"{checkpoint} was written with {group}.{name}={value} and cannot go on with "
                    f"{group}.{name}={here[group][name]}: take {group}.{name}={value}."
                )
    if cfg.train.steps is not None and about["step"] >= cfg.train.steps:
        found.append(
            f"{checkpoint} is after step {about['step']} and train.steps={cfg.train.steps} is reached: "
            f"take train.steps={about['step'] + 1} or more."
        )
    return found


def weights_problems(cfg) -> list[str]:
    """What keeps a run from beginning with the weights of `model.weights`: no checkpoint, or another shape."""
    if cfg.model.weights is None:
        return []
    try:
        written = shape_of(cfg.model.weights)
    except files.BadCheckpoint as problem:
        return [str(problem)]
    here = plain(cfg.model)
    differing = [f"model.{name}={value}" for name, value in written.items() if here.get(name, value) != value]
    if not differing:
        return []
    return [
        f"model.weights={cfg.model.weights} was written with {', '.join(differing)}, which this model is not: "
        "take model=from_checkpoint."
    ]


def shape_of(weights: str) -> dict:
    """The keys of the model group that a checkpoint, or the newest of a run, was written with; raises BadCheckpoint."""
    return files.read_about(files.at(weights, "model.weights"))["model"]


def take_shape(model) -> None:
    """Fill what `model=from_checkpoint` leaves open from the checkpoint that `model.weights` names.

    `model` is the group of a DictConfig. Raises BadCheckpoint.
    """
    if not any(OmegaConf.is_missing(model, name) for name in model):
        return
    if model.weights is None:
        raise files.BadCheckpoint("model=from_checkpoint takes the shape of a checkpoint: add model.weights=PATH.")
    defaults = {field.name: field.default for field in fields(Model)}
    for name, value in shape_of(model.weights).items():
        if name in defaults and (OmegaConf.is_missing(model, name) or model[name] == defaults[name]):
            model[name] = value


def plain(group) -> dict:
    """A group's values as JSON has them."""
    values = OmegaConf.to_container(group, enum_to_str=True) if isinstance(group, DictConfig) else asdict(group)
    return {name: str(value) if isinstance(value, str) else value for name, value in values.items()}


# What must be the same to go on: the shape of the model, what a step reads, and whose moments are kept. The rest of
# the model group (kernel, dropout, initial values) is the new run's own business.
FIXED = {
    "model": (
        "layers hidden ffn_hidden heads kv_heads vocab vocab_multiple norm norm_eps activation position rope_base "
        "rope_factor max_positions bias tie_embeddings mup mup_base_hidden"
    ).split(),
    "batch": ["global_batch", "seq_len", "seed"],
    "optimizer": ["name"],
}


def fixed(cfg) -> dict:
    """The part of a configuration that a checkpoint remembers and `unfit` compares."""
    groups = {"model": cfg.model, "batch": cfg.train, "optimizer": cfg.optimizer}
    return {name: {key: plain(group)[key] for key in FIXED[name]} for name, group in groups.items()}
