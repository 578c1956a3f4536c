"""Hugging Face weights in and out: every byte is kept, and what cannot be taken over is refused by its name."""

import json
import os
import pickle
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from made_llama import LLAMA3, SMALL, made
from safetensors.torch import load_file, save_file

from models import hf_config, weights
from models.hf_config import Unsupported
from parallel import checkpoint_files, checkpoint_io, compose

REPO = Path(__file__).resolve().parent.parent


def take(source: Path, to: Path) -> int:
    return weights.main(["import", "--from", str(source), "--to", str(to)])


def give(source: Path, to: Path, *words: str) -> int:
    return weights.main(["export", "--from", str(source), "--to", str(to), *words])


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    """A Llama in several files."""
    folder = tmp_path_factory.mktemp("llama") / "model"
    made(folder)
    return folder


@pytest.fixture
def copied(llama, tmp_path) -> Path:
    """A copy of it, to be spoiled."""
    folder = tmp_path / "model"
    folder.mkdir()
    for name, bytes_ in content(llama).items():
        (folder / name).write_bytes(bytes_)
    return folder


@pytest.mark.parametrize(
    "shape",
    [
        dict(num_key_value_heads=2, dtype=torch.bfloat16),
        dict(tie_word_embeddings=True, shard="5GB"),
        dict(attention_bias=True, mlp_bias=True, dtype=torch.float16),
    ],
    ids=["BF16 in several files", "tied, in one file", "FP16 with biases"],
)
def test_export_after_import_gives_the_same_files_byte_by_byte(shape, tmp_path):
    made(tmp_path / "model", **shape)
    (tmp_path / "model" / "tokenizer_config.json").write_text("{}")
    assert take(tmp_path / "model", tmp_path / "checkpoint") == 0
    assert give(tmp_path / "checkpoint", tmp_path / "back") == 0
    assert content(tmp_path / "back") == content(tmp_path / "model")


def test_export_in_another_format_rounds_and_says_so_in_config(llama, tmp_path):
    assert take(llama, tmp_path / "checkpoint") == 0
    assert give(tmp_path / "checkpoint", tmp_path / "back", "--dtype", "bf16") == 0
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == "bfloat16"
    for file in llama.glob("*.safetensors"):
        expected = {name: tensor.bfloat16() for name, tensor in load_file(file).items()}
        found = load_file(tmp_path / "back" / file.name)
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_what_is_exported_without_an_original_reads_as_the_same_shape(llama, tmp_path):
    """config.json of a model that was trained here."""
    model, _ = hf_config.to_model(json.loads((llama / "config.json").read_text()))
    for changes in ({}, {"rope_factor": 8.0, "tie_embeddings": True, "bias": True, "kv_heads": 2}):
        again, unread = hf_config.to_model(hf_config.from_model(model | changes))
        assert (again, unread) == (model | changes, [])
    with pytest.raises(Unsupported, match="model.norm=layernorm.*model.position=learned"):
        hf_config.from_model(model | {"norm": "layernorm", "position": "learned"})


REFUSED = {
    "model_type='mistral'": dict(model_type="mistral"),
    "type 'linear'": dict(rope_scaling=dict(type="linear", factor=2.0)),
    "type 'yarn'": dict(rope_parameters=dict(rope_type="yarn", rope_theta=1e4, factor=2.0)),
    "original_max_position_embeddings=4096": dict(
        rope_scaling=dict(rope_type="llama3", factor=8.0, **LLAMA3 | dict(original_max_position_embeddings=4096))
    ),
    "head_dim=16": dict(head_dim=16),
    "hidden_act='gelu'": dict(hidden_act="gelu"),
    "attention_bias=True and mlp_bias=False": dict(attention_bias=True),
    "quantization_config": dict(quantization_config=dict(quant_method="fp8")),
    "num_hidden_layers is missing": dict(num_hidden_layers=None),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_config_that_cannot_be_followed_is_refused_by_name(name):
    with pytest.raises(Unsupported, match=name):
        hf_config.to_model(dict(model_type="llama", **SMALL) | REFUSED[name])


def test_config_values_are_read_in_the_older_spelling_and_the_newer():
    old = dict(model_type="llama", **SMALL, rope_theta=5e5, rope_scaling=dict(rope_type="llama3", factor=8.0, **LLAMA3))
    new = dict(model_type="llama", **SMALL, rope_parameters=dict(old["rope_scaling"], rope_theta=5e5))
    for config in (old, new):
        model, _ = hf_config.to_model(config | {"rms_norm_eps": 1e-3, "a_new_key": 1})
        assert (model["rope_base"], model["rope_factor"], model["norm_eps"]) == (5e5, 8.0, 1e-3)
    assert hf_config.to_model(config | {"a_new_key": 1})[1] == ["a_new_key"]


def first(folder: Path) -> Path:
    return min(folder.glob("*.safetensors"))


def rewrite(folder: Path, change) -> None:
    """Change the tensors of the first file."""
    tensors = {name: tensor.clone() for name, tensor in load_file(first(folder)).items()}
    change(tensors)
    save_file(tensors, first(folder), {"format": "pt"})


def _index(folder: Path, change) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


QUERY = "model.layers.0.self_attn.q_proj.weight"


def _lose(folder):
    rewrite(folder, lambda tensors: tensors.pop(QUERY))
    _index(folder, lambda listed: listed.pop(QUERY))


def _add(folder):
    rewrite(folder, lambda tensors: tensors.update({"model.layers.7.x": torch.ones(1)}))
    _index(folder, lambda listed: listed.update({"model.layers.7.x": first(folder).name}))


def _twice(folder):
    length = struct.unpack("<Q", first(folder).read_bytes()[:8])[0]
    header = first(folder).read_bytes()[8 : 8 + length]
    header = b'{"' + QUERY.encode() + b'":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},' + header.strip()[1:]
    first(folder).write_bytes(struct.pack("<Q", len(header)) + header + first(folder).read_bytes()[8 + length :])


class Trap:
    """Unpickling it makes a folder."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


def _pickle(folder):
    for file in [*folder.glob("*.safetensors"), folder / "model.safetensors.index.json"]:
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Trap(folder.parent / "trap")))


SPOILED = {
    f"lacks {QUERY}": _lose,
    "holds model.layers.7.x": _add,
    "is damaged|cut off": lambda folder: first(folder).write_bytes(first(folder).read_bytes()[:-8]),
    "is not a safetensors file": lambda folder: first(folder).write_bytes(b"PK\3\4" + bytes(1000)),
    f"has '{QUERY}' twice": _twice,
    "values that are no finite numbers": lambda folder: rewrite(folder, lambda t: t[QUERY].fill_(float("nan"))),
    "has the shape": lambda folder: rewrite(folder, lambda t: t.update({QUERY: torch.ones(3)})),
    "is F64": lambda folder: rewrite(folder, lambda t: t.update({QUERY: t[QUERY].double()})),
    "weights of one kind": lambda folder: rewrite(folder, lambda t: t.update({QUERY: t[QUERY].half()})),
    "model-00001.*is missing": lambda folder: first(folder).unlink(),
    "is not a file of the folder": lambda folder: _index(folder, lambda listed: listed.update(x="../x.safetensors")),
    "config.json is missing": lambda folder: (folder / "config.json").unlink(),
    "a pickle, and no safetensors": _pickle,
}


@pytest.mark.parametrize("sentence", SPOILED)
def test_files_that_cannot_be_taken_over_are_named_and_leave_nothing(sentence, copied, tmp_path, capsys):
    SPOILED[sentence](copied)
    assert take(copied, tmp_path / "checkpoint") == 2
    said = capsys.readouterr().err
    assert re.search(sentence, said) and "Traceback" not in said, said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_frequencies_that_early_llama_2_files_carry_are_left_out_when_they_are_the_known_ones(copied, tmp_path, capsys):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    known = 10000.0 ** -(torch.arange(0, 8, 2) / 8)
    for frequencies, code in ((known, 0), (known * 2, 2)):
        rewrite(copied, lambda tensors, held=frequencies: tensors.update({name: held.half()}))
        _index(copied, lambda listed: listed.update({name: first(copied).name}))
        assert take(copied, tmp_path / f"checkpoint{code}") == code
        assert "rope_theta" in "".join(capsys.readouterr())


def test_an_output_matrix_that_is_written_out_although_tied_must_be_the_embedding(tmp_path, capsys):
    made(tmp_path / "model", shard="5GB", tie_word_embeddings=True)
    for factor, code in ((1, 0), (2, 2)):
        rewrite(
            tmp_path / "model",
            lambda tensors, by=factor: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"] * by}),
        )
        assert take(tmp_path / "model", tmp_path / f"checkpoint{code}") == code
    assert "tie_word_embeddings" in capsys.readouterr().err
    assert give(tmp_path / "checkpoint0", tmp_path / "back") == 0
    found = load_file(tmp_path / "back" / "model.safetensors")
    assert torch.equal(found["lm_head.weight"], found["model.embed_tokens.weight"])


def test_nothing_is_written_over(llama, tmp_path, capsys):
    assert take(llama, tmp_path) == 2
    assert "exists already" in capsys.readouterr().err


def test_an_imported_checkpoint_is_one_to_begin_with_and_not_to_go_on_from(llama, tmp_path):
    imported = tmp_path / "checkpoint"
    assert take(llama, imported) == 0
    assert checkpoint_io.read_index(imported)["weights/embedding.word_embeddings.weight"]["shape"] == [384, 64]
    cfg = compose.check(compose.compose(["model=from_checkpoint", f"model.weights={imported}", "data=mock"])[0])
    assert (cfg.model.layers, cfg.model.vocab, cfg.model.norm_eps) == (2, 300, 1e-6)
    for words, sentence in (
        (["model=from_checkpoint"], "add model.weights=PATH"),
        ([f"model.weights={imported}"], "take model=from_checkpoint"),
        (["model=from_checkpoint", f"model.weights={tmp_path}/none"], "none does not exist"),
        ([f"checkpoint.resume={imported}"], "take model.weights"),
    ):
        with pytest.raises(compose.Refused, match=sentence):
            compose.check(compose.compose(words)[0])


def test_a_damaged_checkpoint_is_not_exported(llama, tmp_path, capsys):
    imported = tmp_path / "checkpoint"
    assert take(llama, imported) == 0
    shard = imported / "__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    assert give(imported, tmp_path / "back") == 2
    assert f"{shard} is damaged" in capsys.readouterr().err and not (tmp_path / "back").exists()
    assert checkpoint_files.read_about(imported)["step"] == 0


PEAK = """
import resource, sys
from models import weights
assert weights.main(sys.argv[1:]) == 0
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""


@pytest.mark.slow
def test_memory_holds_one_file_at_most(llama, tmp_path):
    """Of a model of 8 files of up to 40 MB, against a model of next to nothing."""
    large = dict(hidden_size=512, intermediate_size=1408, num_hidden_layers=24, vocab_size=4096)
    made(tmp_path / "large", shard="40MB", **large)
    size = sum(file.stat().st_size for file in (tmp_path / "large").glob("*.safetensors"))
    assert size > 250e6

    def peak(*words) -> float:
        """In MiB."""
        command = [sys.executable, "-c", PEAK, *map(str, words)]
        done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True)
        return float(done.stdout.splitlines()[-1])

    taken = peak("import", "--from", tmp_path / "large", "--to", tmp_path / "a")
    given = peak("export", "--from", tmp_path / "a", "--to", tmp_path / "b")
    least = peak("import", "--from", llama, "--to", tmp_path / "c")
    least_given = peak("export", "--from", tmp_path / "c", "--to", tmp_path / "d")
    assert taken - least < 100 and given - least_given < 100, (taken, least, given, least_given)
