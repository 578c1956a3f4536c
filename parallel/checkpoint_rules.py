"""Whether a checkpoint fits a configuration, told in sentences, before any process starts where that is possible."""

from dataclasses import asdict
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from parallel import checkpoint_files as files


def problems(cfg) -> list[str]:
    """What forbids going on from `checkpoint.resume`; of `auto` only the ranks can say it, in the run's own folder."""
    resume = cfg.checkpoint.resume
    if resume is None or resume == "auto":
        return []
    try:
        found = files.find(resume, Path())
        return unfit(found, files.read_about(found), cfg)
    except files.BadCheckpoint as problem:
        return [str(problem)]


def unfit(checkpoint: Path, about: dict, cfg) -> list[str]:
    """Where a checkpoint and a configuration contradict each other. The layout and the precision may be any."""
    found = []
    here = {"model": plain(cfg.model)} | {"train": plain(cfg.train)} | {"optimizer": plain(cfg.optimizer)}
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


def plain(group) -> dict:
    """A group's values as JSON has them."""
    values = OmegaConf.to_container(group, enum_to_str=True) if isinstance(group, DictConfig) else asdict(group)
    return {name: str(value) if isinstance(value, str) else value for name, value in values.items()}


# What must be the same to go on: the shape of the model, what a step reads, and whose moments are kept. The rest of
# the model group (kernel, dropout, initial values) is the new run's own business.
FIXED = {
    "model": (
        "layers hidden ffn_hidden heads kv_heads vocab vocab_multiple norm norm_eps activation position rope_base "
        "max_positions bias tie_embeddings"
    ).split(),
    "batch": ["global_batch", "seq_len", "seed"],
    "optimizer": ["name"],
}


def fixed(cfg) -> dict:
    """The part of a configuration that a checkpoint remembers and `unfit` compares."""
    groups = {"model": cfg.model, "batch": cfg.train, "optimizer": cfg.optimizer}
    return {name: {key: plain(group)[key] for key in FIXED[name]} for name, group in groups.items()}
