"""Malformed command lines and illegal points: each is answered by sentences that name a way out, and starts nothing."""

from typing import get_args

import pytest

from parallel import compose, overrides, ranges, rules

# What is typed, and what the answer has to mention: the rule's numbers and the nearest legal choice.
REFUSED = {
    # words
    "group misspelt": ("paralel=tp2", "paralel", "did you mean parallel?"),
    "option misspelt": ("parallel=tp22", "tp22", "did you mean tp2"),
    "option unknown": ("clip=7", "clip=7", "0.001, 0.01, 0.1, 1.0, adaptive"),
    "key misspelt": ("parallel.tpp=2", "parallel.tpp", "did you mean parallel.tp?"),
    "key misspelt, added": ("+parallel.tpp=2", "parallel.tpp", "did you mean parallel.tp?"),
    "key misspelt, forced": ("++stepz=3", "stepz", "did you mean train.steps?"),
    "key added that exists": ("+train.steps=3", "train.steps", "without the plus"),
    "group added that exists": ("+experiment=llama2_13b_zero3", "experiment", "without the plus"),
    "environment without plus": ("parallel.env.A=1", "+parallel.env.A=1"),
    "group as list": ("parallel=[tp2,pp2]", "takes one option", "-m"),
    "group as mapping": ("parallel={tp:2}", "takes one option"),
    "group removed": ("~parallel", "needs"),
    "group null": ("model=null", "model=null", "tiny"),
    "sweep without -m": ("parallel=tp2,pp2", "add -m"),
    "no equals sign": ("tp2", "'tp2' cannot be read"),
    "bracket left open": ("parallel=[tp2", "cannot be read"),
    "flag unknown": ("--frobnicate", "--frobnicate"),
    "text for a number": ("parallel.tp=two", "parallel.tp=two", "whole number"),
    "fraction for a whole number": ("train.steps=1.5", "train.steps=1.5", "whole number or null"),
    "float for a whole number": ("train.steps=null train.tokens=1e6", "write 1000000"),
    "text for a switch": ("parallel.overlap=maybe", "true or false"),
    "format unknown": ("precision.params=fp8", "fp32, bf16 or fp16"),
    "null where a value is needed": ("parallel.tp=null", "parallel.tp=null", "whole number"),
    "launcher unknown": ("hydra/launcher=nope", "nope", "validated"),
    # layout
    "heads, kv heads and ffn against tp": ("parallel.tp=3", "heads=8", "kv_heads=4", "ffn_hidden=688", "tp=2", "tp=4"),
    "kv heads against tp": ("parallel.tp=8", "model.kv_heads=4", "take parallel.tp=4"),
    "layers against pp": ("parallel.pp=3", "model.layers=4", "parallel.pp=2 or parallel.pp=4", "model.layers=6"),
    "layers against pp and vpp": ("parallel=pp2_vpp2 model.layers=6", "layers=6", "parallel.vpp=2", "model.layers=8"),
    "vpp without pp": ("parallel.vpp=2", "parallel.vpp=1 or parallel.pp=2"),
    "micro-batches against pp with vpp": (
        "parallel=pp2_vpp2 train.global_batch=32 train.micro_batch=32",
        "(1)",
        "train.micro_batch=16",
    ),
    "sequence parallel without tp": ("parallel.sequence_parallel=true", "sequence_parallel=false or parallel.tp=2"),
    "sequence against tp": ("parallel=tp2_sp train.seq_len=255", "train.seq_len=254 or train.seq_len=256"),
    "sequence against cp": ("parallel.cp=2 train.seq_len=250", "train.seq_len=248 or train.seq_len=252"),
    "ZeRO stage": ("parallel.zero=4", "parallel.zero=4", "take parallel.zero=3"),
    "dp": ("parallel.dp=none", "parallel.dp=none", "parallel.dp=auto"),
    "tied embeddings against stages": ("parallel=pp2_zero3 model.tie_embeddings=true", "parallel.zero=1"),
    "bucket without overlap": ("parallel.bucket_mb=25", "parallel.bucket_mb=25", "take parallel.overlap=true"),
    "variable of the launcher": ("+parallel.env.RANK=1", "RANK", "leave it out"),
    "variable that stops FSDP": ("parallel=zero3 +parallel.env.CUDA_DEVICE_MAX_CONNECTIONS=1", "ZeRO-3"),
    "GPU asked for, none there": ("launch.device=cuda", "none is visible", "launch.device=cpu"),
    # batch and length
    "batch against micro-batch": (
        "train.global_batch=30 train.micro_batch=8",
        "global_batch=24 or train.global_batch=32",
        "micro_batch=6",
    ),
    "batch against dp": (
        "parallel=dp2 train.global_batch=8 train.micro_batch=8",
        "micro_batch=8 · parallel.dp=2",
        "train.micro_batch=4",
    ),
    "steps and tokens": ("train.tokens=1000", "train.steps=null", "train.tokens=null"),
    "neither steps nor tokens": ("train.steps=null", "set one"),
    "held-out sequences": ("train.eval_sequences=some", "neither all nor 1 or more", "take all"),
    "no held-out sequences": ("train.eval_sequences=0", "neither all nor 1 or more"),
    "no steps": ("train.steps=0", "train.steps=0", "1 or more"),
    "learned positions": ("model.position=learned train.seq_len=4096", "seq_len=2048", "max_positions=4096"),
    # model, numbers, data
    "hidden against heads": ("model.hidden=100", "model.heads=5 or model.heads=10"),
    "heads against kv heads": ("model.kv_heads=3", "model.kv_heads=2 or model.kv_heads=4"),
    "dropout": ("model.dropout=1", "model.dropout=1"),
    "learning rate": ("optimizer.lr=-1", "optimizer.lr=-1", "above 0"),
    "learning rate not a number": ("optimizer.lr=nan", "optimizer.lr=nan"),
    "weights against compute": ("precision.params=bf16", "precision.compute=fp32", "take precision.params=fp32"),
    "fp16 without scale": ("precision=fp16 precision.loss_scale=none", "loss_scale=dynamic", "loss_scale=1"),
    "scale without fp16": ("precision.loss_scale=dynamic", "for fp16", "loss_scale=none"),
    "loss scale": ("precision=fp16 precision.loss_scale=fast", "none, dynamic or a number"),
    "flash-attention on a CPU": ("model.attention=flash_attn", "a GPU", "take model.attention=sdpa"),
    "text without path": ("data=text", "data.path=PATH"),
    "path that is not there": ("data=text data.path=/nowhere/at/all", "there is no nowhere in /"),
    "path that nobody reads": ("data.path=/", "data.kind=stdlib", "take data=text"),
    "token files without path": ("data=megatron", "data.path=PREFIX"),
    "token files that are not there": ("data=megatron data.path=[1,no/a,2,no/b]", "no/b.idx", "python -m data.prepare"),
    "held-out share": ("data.val_share=0", "data.val_share=0", "between 0 and 1"),
    "tokenizer": ("data.tokenizer=gpt2", "data.tokenizer=gpt2", "bytes"),
    "vocabulary too small": ("model.vocab=100", "model.vocab=100", "take model.vocab=256"),
    "W&B project": ("tracking.project=a/b", "a/b"),
}


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_a_sentence_and_nothing_left_behind(case, train, tmp_path):
    words, *mentioned = REFUSED[case]
    run = train(*words.split())
    assert run.returncode == 2
    assert run.stdout == ""
    first, *sentences = run.stderr.splitlines()
    assert first == "Nothing was started:"
    assert sentences and all(line.startswith("  - ") for line in sentences)
    assert "Traceback" not in run.stderr and "HYDRA_FULL_ERROR" not in run.stderr
    for text in mentioned:
        assert text in run.stderr
    assert list(tmp_path.iterdir()) == []


def test_every_number_has_a_range_and_is_held_to_it():
    rules_of_their_own = {"parallel.zero", "parallel.dp", "precision.loss_scale", "train.eval_sequences"}
    hints = {key: overrides.key_type(key) for key in overrides.keys()}
    numbers = {key for key, hint in hints.items() if {int, float} & {hint, *get_args(hint)}}
    assert numbers - {"cluster.peak_tflops"} == ranges.RANGES.keys() | rules_of_their_own
    for key in ranges.RANGES:
        cfg = compose.compose([f"{key}=-1"])[0]
        assert any(sentence.startswith(f"{key}=-1") for sentence in rules.problems(cfg, gpus=0)), key


def test_all_problems_are_listed_at_once(train):
    run = train("parallel.tp=3", "train.global_batch=31", "optimizer.lr=0", "data=text", "parallel.vpp=2")
    for key in ("model.heads", "train.global_batch", "optimizer.lr", "data.path", "parallel.vpp=1 or"):
        assert key in run.stderr


def test_all_mistyped_words_are_listed_at_once(train):
    run = train("paralel=tp2", "train.stepz=3", "clip=7", "optimizer.lr=fast")
    assert all(word in run.stderr for word in ("paralel", "train.stepz", "clip=7", "optimizer.lr=fast"))


def test_sweep_with_one_illegal_point_starts_no_point_and_names_it(train, tmp_path):
    run = train("-m", "parallel=single,tp2", "model.heads=8,9", "model.hidden=288")
    assert run.returncode == 2
    assert "#3 parallel=tp2 model.heads=9 model.hidden=288: model.heads=9 is not divisible by" in run.stderr
    assert "#0" not in run.stderr
    assert list(tmp_path.iterdir()) == []


OWN = {  # a file of the user's own, and what is said about it
    "mistyped key": ("tp: 2\ntpp: 2\n", "tpp"),
    "wrong type": ("tp: two\n", "two"),
    "keys missing": ("name: mine\ntp: 2\n", "parallel.pp has no value"),
    "broken YAML": ("tp: [2\n", "mine.yaml"),
    "not a mapping": ("- tp\n", "mine"),
}


@pytest.mark.parametrize("case", OWN)
def test_a_bad_file_of_ones_own_is_answered_by_a_sentence(case, train, tmp_path):
    content, mentioned = OWN[case]
    file = tmp_path / "conf" / "parallel" / "mine.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(content)
    run = train("--config-dir", "conf", "parallel=mine")
    assert run.returncode == 2
    assert mentioned in run.stderr and "Traceback" not in run.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["conf"]


def test_a_folder_that_holds_a_run_is_not_overwritten(train, tmp_path):
    folder = tmp_path / "old"
    folder.mkdir()
    (folder / "resolved.yaml").write_text("of an earlier run")
    run = train(f"hydra.run.dir={folder}")
    assert run.returncode == 2 and "holds a run already" in run.stderr
    assert (folder / "resolved.yaml").read_text() == "of an earlier run"


def test_more_ranks_than_gpus_are_refused_with_a_layout_that_fits(train, eight_gpus):
    run = train("parallel=tp4_pp2", "parallel.dp=2", env=eight_gpus)
    assert run.returncode == 2
    assert "16 ranks (tp 4 · pp 2 · cp 1 · dp 2) and 8 GPUs are visible" in run.stderr
    assert "take parallel.dp=1, or launch.device=cpu" in run.stderr
    run = train("parallel.dp=8", env=eight_gpus | {"CUDA_VISIBLE_DEVICES": "0,1,2"})
    assert "one" not in run.stderr and "3 GPUs are visible: take parallel.dp=2" in run.stderr
    run = train("parallel=tp4_pp2", env=eight_gpus | {"CUDA_VISIBLE_DEVICES": "0,1"})
    assert "8 ranks" in run.stderr and "take parallel.tp=1 parallel.pp=2 parallel.dp=1" in run.stderr


@pytest.mark.parametrize("words", [case[0] for case in REFUSED.values() if "take parallel." in " ".join(case)])
def test_the_layout_that_is_suggested_is_legal(words):
    argv = words.split()
    with pytest.raises(compose.Refused) as refusal:
        compose.check(compose.compose(argv)[0])
    advice = [sentence.rpartition("take ")[2].rstrip(".") for sentence in refusal.value.sentences]
    choice = advice[0].split(", ")[0].split(" or ")[0]
    replaced = [word for word in argv if word.partition("=")[0] != choice.partition("=")[0]]
    compose.check(compose.compose([*replaced, choice])[0])


@pytest.mark.parametrize(("world", "dp"), [(2, 2), (3, 3), (8, 8)])
def test_ranks_that_exist_already_decide_the_data_parallel_size(world, dp):
    cfg = compose.compose(["train.global_batch=48", "train.micro_batch=2"])[0]
    assert rules.problems(cfg, gpus=0, world=world) == []
    assert rules.resolve(cfg, gpus=0, world=world).parallel.dp == dp


def test_ranks_that_exist_already_and_do_not_fit_are_refused():
    cfg = compose.compose(["parallel=tp2"])[0]
    (sentence,) = rules.problems(cfg, gpus=0, world=3)
    assert "needs 2 ranks" in sentence and "3 were started" in sentence
