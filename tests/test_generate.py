"""models.generate as it is typed: text as it comes, the same under every split, and refusals in a sentence."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpointed import ENDLESS, environment, runner
from made_llama import made

from models import request, weights
from models.sampling import Sampling, kept, pick
from parallel.compose import Refused

REPO = Path(__file__).resolve().parent.parent


def generate(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "models.generate", *words, "launch.device=cpu"]
    return subprocess.run(command, cwd=REPO, env=environment(), capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def imported(tmp_path_factory) -> Path:
    """A Llama whose tokens are bytes, imported."""
    root = tmp_path_factory.mktemp("imported")
    made(root / "model", vocab_size=256, num_hidden_layers=4)
    assert weights.main(["import", "--from", str(root / "model"), "--to", str(root / "checkpoint")]) == 0
    return root / "checkpoint"


WORDS = ("prompt=it's [1, 2] = $x", "tokenizer=bytes", "max_tokens=12", "stop=false")


def test_text_of_an_imported_checkpoint_comes_on_stdout_and_its_speed_on_stderr(imported):
    done = generate(f"checkpoint={imported}", *WORDS, "seed=3")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("it's [1, 2] = $x") and len(done.stdout) > 20
    assert "tokens/s, with a cache" in done.stderr


@pytest.mark.slow
def test_the_text_is_the_same_under_every_split_and_without_a_cache(imported):
    texts = {
        words: generate(f"checkpoint={imported}", *WORDS, "temperature=0.7", "top_p=0.9", *words.split()).stdout
        for words in ("", "parallel=tp2_sp", "parallel=pp2_vpp2", "parallel=tp2_pp2", "cache=false")
    }
    assert len(texts[""]) > 20 and len(set(texts.values())) == 1, texts


@pytest.mark.slow
def test_a_run_begins_with_imported_weights_goes_out_again_and_writes_text(imported, tmp_path):
    """With a learning rate of almost nothing what comes out is what went in, through ZeRO-3 and its checkpoint."""
    train = runner(tmp_path)
    shape = "model.layers=4 model.hidden=64 model.ffn_hidden=176 model.heads=8 model.kv_heads=8".split()
    words = ["model=from_checkpoint", f"model.weights={imported}", *shape, "optimizer.lr=1e-12", "train.steps=2"]
    run = train("run", *ENDLESS, *words, "parallel=zero3", "checkpoint.every=2")
    assert weights.main(["export", "--from", str(run), "--to", str(tmp_path / "back")]) == 0
    from transformers import LlamaForCausalLM

    there, back = (LlamaForCausalLM.from_pretrained(path) for path in (imported.parent / "model", tmp_path / "back"))
    for (name, before), after in zip(there.state_dict().items(), back.state_dict().values(), strict=True):
        torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-6, msg=name)
    done = generate(f"checkpoint={run}", "prompt=def ", "max_tokens=5", "stop=false")
    assert done.returncode == 0 and done.stdout.startswith("def "), done.stderr


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("prompt=x", "checkpoint=PATH is missing"),
        ("checkpoint=/nowhere", "does not exist"),
        ("checkpoint={} max_tokens=many top_p=0", "(?s)max_tokens=many has the wrong type.*top_p=0.0 is out of range"),
        ("checkpoint={}", "came without a tokenizer"),
        ("checkpoint={} tokenizer=bytes parallel=dp2 train.global_batch=2", "token by token"),
        ("checkpoint={} tokenizer=bytes prompd=x", "prompd is neither"),
        ("checkpoint={} tokenizer=bytes parallel=tp2 parallel.tp=3", "not divisible by parallel.tp=3"),
    ],
)
def test_what_cannot_be_generated_is_refused_before_anything_starts(words, sentence, imported):
    with pytest.raises(Refused, match=sentence):
        request.configuration(*request.read(["launch.device=cpu", *words.format(imported).split()]))


def test_top_k_and_top_p_keep_what_transformers_keeps():
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = torch.randn(500, generator=torch.Generator().manual_seed(0)) * 3
    for temperature, k, p in (
        (1.0, 0, 1.0),
        (0.7, 10, 1.0),
        (1.3, 0, 0.8),
        (0.5, 40, 0.6),
        (1.0, 1, 1.0),
        (1.0, 0, 0.01),
    ):
        expected = TemperatureLogitsWarper(temperature)(None, logits[None])
        if k:
            expected = TopKLogitsWarper(k)(None, expected)
        if p < 1:
            expected = TopPLogitsWarper(p)(None, expected)
        torch.testing.assert_close(kept(logits, Sampling(temperature, k, p)), expected[0])


def test_tokens_are_drawn_as_often_as_they_are_likely_and_the_same_from_a_seed():
    logits, how = torch.tensor([0.0, 1.0, 2.0, -9.0]), Sampling(temperature=1.0, top_k=3)
    generator = how.generator()
    drawn = torch.tensor([pick(logits, how, generator) for _ in range(4000)])
    share = drawn.bincount(minlength=4) / len(drawn)
    expected = torch.softmax(logits[:3], 0)
    assert (share[:3] - expected).abs().max() < 0.03 and share[3] == 0
    again = how.generator()
    assert [pick(logits, how, again) for _ in range(50)] == drawn[:50].tolist()
    assert pick(logits, Sampling(), generator) == 2
