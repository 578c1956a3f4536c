"""What a command line composes to: every option, automatic values, the frozen file that ranks read, run folders."""

import itertools
import subprocess
import sys

import pytest
import yaml
from omegaconf import OmegaConf

from conf.schema import Compute, Config
from parallel import compose, frozen, overrides, rules

# Sweeps are no options of a point: tests/test_sweep.py.
OPTIONS = [(group, option) for group, names in overrides.options().items() for option in names if group != "sweep"]
# Ranks of each layout on a machine without GPUs and on one with eight.
WORLD = {
    "cp2": (2, 8),
    "dp": (1, 8),
    "single": (1, 1),
    "dp2": (2, 2),
    "tp2": (2, 8),
    "tp2_sp": (2, 8),
    "pp2": (2, 8),
    "pp2_vpp2": (2, 8),
    "tp2_pp2": (4, 8),
    "tp2_dp2": (4, 4),
    "tp4_pp2": (8, 8),
    "zero1": (2, 8),
    "zero2": (2, 8),
    "zero3": (2, 8),
    "zero3_offload": (2, 8),
    "tp2_zero1": (4, 8),
    "tp2_zero3": (4, 8),
    "pp2_zero1": (4, 8),
    "pp2_zero3": (4, 8),
}
SHAPES = {  # layers, hidden, heads, key and value heads, inner MLP width, vocabulary
    "gpt_1b": (24, 2048, 16, 16, 8192, 50257),
    "gpt3_175b": (96, 12288, 96, 96, 49152, 50257),
    "llama2_7b": (32, 4096, 32, 32, 11008, 32000),
    "llama2_13b": (40, 5120, 40, 40, 13824, 32000),
    "llama2_70b": (80, 8192, 64, 8, 28672, 32000),
    "llama3_8b": (32, 4096, 32, 8, 14336, 128256),
}


def point(*words, gpus=0, world=None):
    """The resolved configuration of a command line, which has to be legal."""
    cfg = compose.compose(list(words))[0]
    assert rules.problems(cfg, gpus, world) == []
    return rules.resolve(cfg, gpus, world)


def freeze(folder, *words):
    cfg, choices, typed, _ = compose.compose(list(words))
    return frozen.freeze(rules.resolve(cfg, gpus=0), folder, choices, typed)


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_option_is_legal_and_says_when_to_pick_it(group, option, tmp_path):
    for end in ("idx", "bin"):
        (tmp_path / f"a.{end}").touch()
    megatron = [f"data.path={tmp_path / 'a'}", "train.sample_length=0"]
    if option == "from_checkpoint":
        pytest.skip("needs a checkpoint: test_weights.py")
    extra = {"text": [f"data.path={tmp_path}"], "megatron": megatron}.get(option, [])
    cfg = point(f"{group}={option}", *extra, gpus=8 if group in ("experiment", "parallel") else 0)
    assert not OmegaConf.missing_keys(cfg)
    lines = (overrides.CONF / group / f"{option}.yaml").read_text().splitlines()
    sentence = next(line for line in lines if line != "# @package _global_")
    assert sentence.startswith("# ") and sentence.endswith(".")
    name = OmegaConf.select(cfg, f"{group}.name")
    assert name is None or name.removesuffix(" (emulated)") == option


def test_every_layout_has_its_world_size():
    assert sorted(WORLD) == overrides.options()["parallel"]
    eight = ["train.micro_batch=1", "train.global_batch=64"]
    for layout, (without, with_eight) in WORLD.items():
        assert rules.world_size(point(f"parallel={layout}")) == without, layout
        assert rules.world_size(point(f"parallel={layout}", *eight, gpus=8)) == with_eight, layout


def test_the_default_model_trains_under_every_layout_and_precision():
    cfg = compose.compose([])[0]
    layouts = [compose.compose([f"parallel={layout}"])[0].parallel for layout in WORLD]
    precisions = [compose.compose([f"precision={name}"])[0].precision for name in overrides.options()["precision"]]
    assert len(precisions) == 8
    for cfg.parallel, cfg.precision in itertools.product(layouts, precisions):
        assert rules.problems(cfg, gpus=0) == [], (cfg.parallel.name, cfg.precision.name)


@pytest.mark.parametrize("model", SHAPES)
def test_named_model_has_its_published_shape(model):
    m = point(f"model={model}").model
    assert (m.layers, m.hidden, m.heads, m.kv_heads, m.ffn_hidden, m.vocab) == SHAPES[model]


def test_the_two_sides_of_the_benchmark_differ_in_the_layout_only():
    sides = [point(f"experiment=llama2_13b_{name}", gpus=8) for name in ("tp4_pp2", "zero3")]
    tensor_pipeline, sharded = [OmegaConf.to_container(side) for side in sides]
    assert (sides[0].parallel.tp, sides[0].parallel.pp, sides[1].parallel.zero) == (4, 2, 3)
    assert [rules.world_size(side) for side in sides] == [8, 8]
    assert tensor_pipeline.pop("parallel") != sharded.pop("parallel")
    assert tensor_pipeline == sharded
    train, optimizer = sides[0].train, sides[0].optimizer
    assert (train.global_batch, train.seq_len, optimizer.name, optimizer.lr) == (1024, 4096, "adamw", 5e-5)
    assert (sides[0].clip.max_norm, sides[0].precision.compute) == (0.1, Compute.bf16)


def test_an_override_wins_over_an_experiment():
    cfg = point("experiment=llama2_13b_zero3", "clip=1.0", "train.micro_batch=2", gpus=8)
    assert (cfg.clip.max_norm, cfg.train.micro_batch) == (1.0, 2)


@pytest.mark.parametrize(("typed", "norm"), [("clip=0.1", 0.1), ("clip=0.001", 0.001), ("clip='1.0'", 1.0)])
def test_clip_thresholds_are_chosen_by_number(typed, norm):
    cfg, choices, _, _ = compose.compose([typed])
    assert (cfg.clip.kind, cfg.clip.max_norm, choices["clip"]) == ("fixed", norm, str(norm))


def test_automatic_data_parallel_size_takes_what_the_batch_divides_into():
    four = ["train.global_batch=32", "train.micro_batch=8"]  # four micro-batches
    assert point(*four, gpus=4).parallel.dp == 4
    assert point(*four, gpus=6).parallel.dp == 4
    assert point(*four, gpus=8).parallel.dp == 4
    assert point(*four, "parallel=pp2_vpp2", gpus=8).parallel.dp == 2
    assert point("launch.device=cpu", *four, gpus=8).parallel.dp == 1
    assert any("4 of 6 GPUs" in note for note in rules.notes(point(*four, gpus=6), 6))


def test_length_in_tokens_becomes_whole_steps():
    cfg = point("train.global_batch=32", "train.steps=null", "train.tokens=100000", "schedule.warmup_tokens=10000")
    assert (cfg.train.steps, cfg.train.tokens) == (13, None)  # of 8,192 tokens
    assert (cfg.schedule.warmup_steps, cfg.schedule.warmup_tokens) == (2, None)


def test_what_is_legal_but_surprising_is_noted():
    def notes(*words):
        return " ".join(rules.notes(point(*words), gpus=0))

    assert "FP32" in notes("precision=tf32")
    assert "parallel.zero=1" in notes("parallel=zero1", "parallel.dp=1")
    assert "warm-up" in notes("train.steps=10")
    assert notes("parallel=single") == ""


def test_ranks_read_back_what_was_frozen(tmp_path):
    words = ["parallel=tp2_zero1", "precision=fp16", "precision.loss_scale=128", "clip=0.1", "+parallel.env.A=B"]
    point = freeze(tmp_path, *words)
    assert point == frozen.load(tmp_path)
    assert isinstance(point.cfg, Config) and point.cfg.precision.compute is Compute.fp16
    assert (point.world_size, point.cfg.parallel.dp, point.cfg.launch.device) == (4, 2, "cpu")
    assert point.cfg.parallel.env == {"A": "B"}
    assert (point.choices["parallel"], point.choices["clip"]) == ("tp2_zero1", "0.1")
    assert point.overrides == [*words[:3], "clip='0.1'", words[4]]
    content = yaml.safe_load((tmp_path / "resolved.yaml").read_text())
    assert content["precision"]["compute"] == "fp16" and "${" not in str(content) and "???" not in str(content)


def test_the_frozen_overrides_repeat_the_point(tmp_path):
    first = freeze(tmp_path / "a", "clip=0.01", "parallel=pp2", "data.sample_prompt='import os'")
    again = freeze(tmp_path / "b", *first.overrides)
    assert (first.cfg, first.config_hash) == (again.cfg, again.config_hash)


def test_the_hash_tells_what_is_computed_and_nothing_else(tmp_path):
    def hash_of(*words):
        return freeze(tmp_path, *words).config_hash

    same = [(), ("tracking.mode=offline",), ("cluster=h100_x8",), ("launch.device=cpu",), ("optimizer.lr=0.003",)]
    same += [("probe.every=5",)]
    other = [("optimizer.lr=0.001",), ("parallel=tp2",), ("train.seed=2",), ("clip=0.1",), ("model.init_std=0.01",)]
    assert len({hash_of(*words) for words in same}) == 1
    assert len({hash_of(*words) for words in same[:1] + other}) == 6


@pytest.mark.parametrize("damage", ["", "model: [", "model: {}", "- a", "train: {stepz: 3}", None])
def test_a_damaged_frozen_file_is_named(damage, tmp_path):
    freeze(tmp_path)
    path = tmp_path / "resolved.yaml"
    path.unlink() if damage is None else path.write_text(damage)
    with pytest.raises(frozen.BadFrozen, match="resolved.yaml"):
        frozen.load(tmp_path)


def test_two_runs_of_the_same_moment_get_two_folders():
    folders = {compose.compose(["parallel=tp2", "clip=0.1"])[3] for _ in range(5)}
    assert len(folders) == 5
    for folder in folders:
        assert folder.parts[0] == "runs" and folder.name.endswith("_tiny_tp2_fp32_adamw_clip-0.1")


def test_composition_imports_neither_torch_nor_megatron(plain_env, tmp_path):
    train = overrides.CONF.parent / "train.py"
    command = [sys.executable, "-X", "importtime", str(train), "--cfg", "job"]
    run = subprocess.run(command, cwd=tmp_path, env=plain_env, capture_output=True, text=True, check=True)
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in run.stderr.splitlines()}
    assert "hydra" in imported and not imported & {"torch", "megatron", "wandb", "numpy"}
    assert yaml.safe_load(run.stdout)["parallel"]["name"] == "dp"
