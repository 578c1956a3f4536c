"""Hugging Face Llamas come in and go out, and compute the same here as in Transformers, under every split."""

import os
import sys
from pathlib import Path

import pytest
import torch
from llama_rank import COUNT, PROMPT, outcome
from made_llama import MODELS, made

from models import weights
from parallel import compose, launch

REPO = Path(__file__).resolve().parent.parent


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
        likeliest = dict(max_new_tokens=COUNT, do_sample=False, eos_token_id=None)
        text = model.generate(tokens, attention_mask=torch.ones_like(tokens), **likeliest)
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


def test_scaled_rotary_angles_make_a_difference_here(models):
    """Or the comparison of logits would not see that they were ignored."""
    from transformers import LlamaForCausalLM

    folder, _, logits, _ = models["llama3"]
    unscaled = {"rope_type": "default", "rope_theta": 10000.0}
    with torch.no_grad():
        other = LlamaForCausalLM.from_pretrained(folder, rope_parameters=unscaled)(torch.tensor([PROMPT])).logits[0]
    assert (other - logits).abs().max() > 0.1


@pytest.mark.parametrize("name", MODELS)
def test_the_likeliest_text_is_that_of_transformers_with_and_without_cache(name, models, whole, split):
    _, imported, _, text = models[name]
    assert len(set(text)) > 5, "a text that says little"
    for layout, found in {"single": whole, **split}.items():
        found = found[str(imported)]
        assert found["greedy"] == text, layout
        assert found["greedy without cache"] == text, layout
        assert found["short window"] == found["short window without cache"] != text, layout
        assert found["drawn"] == whole[str(imported)]["drawn"] != text, layout
