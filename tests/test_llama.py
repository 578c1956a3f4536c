"""Hugging Face Llamas come in and go out, and compute the same here as in Transformers, under every split."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from llama_rank import COUNT, PROMPT, outcome
from omegaconf import OmegaConf

from models import weights
from parallel import checkpoint_files, checkpoint_io, compose, launch

REPO = Path(__file__).resolve().parent.parent
SMALL = dict(
    vocab_size=300,
    hidden_size=64,
    intermediate_size=176,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=8,
    max_position_embeddings=512,
    initializer_range=0.3,
)
LLAMA3 = dict(low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
# Llama 2's way, and Llama 3.2's: shared keys, tied embeddings, scaled angles; and biases, which some of its kin have.
MODELS = {
    "llama2": dict(rms_norm_eps=1e-5),
    "llama3": dict(
        num_key_value_heads=2,
        tie_word_embeddings=True,
        rms_norm_eps=1e-2,
        rope_parameters=dict(rope_type="llama3", rope_theta=50.0, factor=32.0, **LLAMA3)
        | dict(original_max_position_embeddings=8192),
    ),
    "biased": dict(num_key_value_heads=4, attention_bias=True, mlp_bias=True),
}


def made(folder: Path, shard: str = "100KB", dtype=torch.float32, **shape):
    """A random Llama as Transformers writes it, and its model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**(SMALL | shape))).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # which begin as ones and zeros
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.to(dtype).save_pretrained(folder, max_shard_size=shard)
    return model


def run(*words, refused: str | None = None) -> str:
    """`models.weights` as typed; what it said, where it was to refuse."""
    done = subprocess.run(
        [sys.executable, "-m", "models.weights", *map(str, words)], cwd=REPO, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == (2 if refused else 0), done.stdout + done.stderr
    assert "Traceback" not in done.stderr and (refused or "") in done.stderr, done.stderr
    return done.stderr


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Each model of MODELS as Transformers' folder and as imported checkpoint, and what Transformers computes."""
    root, found = tmp_path_factory.mktemp("llamas"), {}
    for name, shape in MODELS.items():
        model = made(root / name, **shape)
        assert weights.main(["import", "--from", str(root / name), "--to", str(root / f"{name}_imported")]) == 0
        tokens = torch.tensor([PROMPT])
        with torch.no_grad():
            logits = model(tokens).logits[0]
        text = model.generate(tokens, max_new_tokens=COUNT, do_sample=False, eos_token_id=None, pad_token_id=0)
        found[name] = (root / name, root / f"{name}_imported", logits, text[0, len(PROMPT) :].tolist())
    return found


@pytest.fixture(scope="module")
def split(models, tmp_path_factory):
    """What two ranks compute, as tensor-parallel ranks and as pipeline stages: {layout: {model: outcome}}."""
    folder = tmp_path_factory.mktemp("split")
    composed, choices, words, _ = compose.compose(["launch.device=cpu", "parallel=tp2", "tracking.mode=disabled"])
    frozen = compose.freeze(compose.check(composed), folder, choices, words)
    os.environ["PYTHONPATH"] = str(REPO)
    try:
        paths = [str(imported) for _, imported, _, _ in models.values()]
        launch.run(folder, frozen, [sys.executable, "-u", str(REPO / "tests" / "llama_rank.py"), str(folder), *paths])
    finally:
        del os.environ["PYTHONPATH"]
    return {layout: torch.load(folder / f"{layout}.pt") for layout in ("tp2", "pp2")}


@pytest.fixture(scope="module")
def whole(models, single_rank):
    """What one process computes: {model: outcome}."""
    return {str(imported): outcome(imported, 512, "parallel=single") for _, imported, _, _ in models.values()}


@pytest.mark.parametrize("name", MODELS)
def test_llama_weights_from_hugging_face_convert_and_give_the_same_logits(name, models, whole, split):
    """Whole, under TP 2 and under PP 2; the vocabulary of 300 needs padding to be split."""
    _, imported, logits, _ = models[name]
    for layout, found in {"single": whole, **split}.items():
        assert found[str(imported)]["logits"].shape == logits.shape
        assert (found[str(imported)]["logits"] - logits).abs().max() < 1e-4, layout
    assert logits.std() > 1, "logits so small that everything is near"


@pytest.mark.parametrize("name", MODELS)
def test_the_likeliest_text_is_that_of_transformers_with_and_without_cache_under_every_split(name, models, whole, split):
    _, imported, _, text = models[name]
    assert len(set(text)) > 5, "a text that says little"
    for layout, found in {"single": whole, **split}.items():
        found = found[str(imported)]
        assert found["greedy"] == text, layout
        assert found["greedy without cache"] == text, layout
        assert found["short window"] == found["short window without cache"] != text, layout
        assert found["drawn"] == whole[str(imported)]["drawn"] != text, layout
