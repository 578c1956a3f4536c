"""A Hugging Face Llama becomes a checkpoint: checked as a whole first, then streamed piece by piece."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch

from models import hf_config, hf_files, hf_names
from models.hf_files import FOLDER, BadWeights, some
from parallel import checkpoint_files as files
from parallel.checkpoint_io import MASTER, Stream

PRECISIONS = {"F32": "fp32", "BF16": "bf16", "F16": "fp16"}
_BLOCK = 1 << 22  # elements that are read at once
# What lies beside the weights and is kept, so that `models.generate` finds the tokenizer and an export is complete.
BESIDE = (
    "config.json generation_config.json tokenizer.json tokenizer.model tokenizer_config.json special_tokens_map.json "
    "added_tokens.json vocab.json merges.txt chat_template.jinja"
).split()


def take(source: Path, to: Path, step: Callable[[int, int], None]) -> tuple[dict, list[str]]:
    """Write the model in the folder `source` as the checkpoint `to`, which must not exist.

    Memory holds the pages of one file at most. `step(done, all)` is called with bytes as it goes on. Returns what
    `checkpoint.json` says and sentences about what was left out. Raises BadWeights or Unsupported, and writes nothing.
    """
    if to.exists():
        raise BadWeights(f"{to} exists already: name another, or remove it.")
    folder = hf_files.read_folder(source)
    model, unread = hf_config.to_model(folder.config)
    shape = SimpleNamespace(**model)
    names, said = _checked(folder, shape)
    if unread:
        said.append(f"config.json: {', '.join(unread)} says nothing that a Llama computes with and was not read.")
    unfinished = to.with_name(f"{files.UNFINISHED}{to.name}")
    if unfinished.exists():  # a kill left it
        shutil.rmtree(unfinished)
    (unfinished / FOLDER).mkdir(parents=True)
    try:
        _stream(folder, shape, names, unfinished, step)
        for name in BESIDE:
            if (source / name).exists():
                files.write_synced(unfinished / FOLDER / name, (source / name).read_bytes())
        files.sync(unfinished / FOLDER)
        about = {
            **dict(step=0, tokens=0, samples=0, updates=0, loss_scale=None, layout={}, world_size=1),
            "model": model,
            "precision": PRECISIONS[folder.tensors["model.embed_tokens.weight"].dtype],
            "source": {"files": names, "texts": {file: folder.texts[file] for file in names}},
            "torch": torch.__version__,
            "files": {
                str(path.relative_to(unfinished)): files.fingerprint(path)
                for path in sorted(unfinished.rglob("*"))
                if path.is_file()
            },
        }
        files.describe(unfinished, about)
        files.publish(unfinished, to)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return about, said


def _checked(folder: hf_files.Folder, shape) -> tuple[dict[str, list[str]], list[str]]:
    """The tensors to take over, by file, and what to say; raises BadWeights for any that is missing, extra or odd."""
    wanted, there, said = hf_names.tensors(shape), dict(folder.tensors), []
    derived = [name for name in there if hf_names.INVERSE_FREQUENCIES.fullmatch(name)]
    if derived:
        said.append(f"{len(derived)} tensors rotary_emb.inv_freq follow from rope_theta and were left out.")
        for name in derived:
            _check_frequencies(folder, name, shape)
            del there[name]
    if shape.tie_embeddings and hf_names.LM_HEAD in there:
        _check_tied(folder)
        wanted |= {hf_names.LM_HEAD: wanted["model.embed_tokens.weight"]}
    wrong = []
    if missing := sorted(wanted.keys() - there.keys(), key=_natural):
        wrong.append(f"{folder.path} lacks {some(missing)}.")
    if extra := sorted(there.keys() - wanted.keys(), key=_natural):
        wrong.append(f"{folder.path} holds {some(extra)}, which a Llama of this config.json has not.")
    dtypes: dict[str, tuple[str, str]] = {}
    for name in wanted.keys() & there.keys():
        stored, tensor = there[name], wanted[name]
        where = f"{folder.path / stored.file}: {name}"
        if stored.shape != tensor.shape:
            wrong.append(f"{where} has the shape {list(stored.shape)} where config.json means {list(tensor.shape)}.")
        if stored.dtype not in PRECISIONS:
            wrong.append(f"{where} is {stored.dtype}: weights in {', '.join(PRECISIONS)} are taken over.")
        other, dtype = dtypes.setdefault(tensor.rows[0].key, (name, stored.dtype))
        if dtype != stored.dtype:
            wrong.append(f"{where} is {stored.dtype} and {other} {dtype}: weights of one kind must be of one format.")
    if wrong:
        raise BadWeights(" ".join(wrong[:5]) + (f" And {len(wrong) - 5} more." if len(wrong) > 5 else ""))
    return {file: [n for n in held if n in there] for file, held in folder.names().items()}, said


def _natural(name: str) -> list:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _check_tied(folder: hf_files.Folder) -> None:
    """An output matrix that is written out although it is tied must be the embedding."""
    held = []
    for name in ("model.embed_tokens.weight", hf_names.LM_HEAD):
        if name in folder.tensors:
            with hf_files.opened(folder.path / folder.tensors[name].file) as file:
                held.append(file.get_tensor(name))
    if len(held) == 2 and not torch.equal(*held):
        raise BadWeights(
            f"{folder.path}: {hf_names.LM_HEAD} differs from model.embed_tokens.weight, "
            "although tie_word_embeddings in config.json says that they are one."
        )


def _check_frequencies(folder: hf_files.Folder, name: str, shape) -> None:
    path = folder.path / folder.tensors[name].file
    with hf_files.opened(path) as file:
        held = file.get_tensor(name)
    head = shape.hidden // shape.heads
    expected = shape.rope_base ** -(torch.arange(0, head, 2, dtype=torch.float64) / head)
    if held.shape != expected.shape or not torch.allclose(held.double(), expected, rtol=1e-2):
        raise BadWeights(f"{path}: {name} is not what rope_theta={shape.rope_base:g} in config.json gives.")


def _finite(data: torch.Tensor) -> bool:
    """Whether every value is a number; a sum tells it fast, unless it overflows by itself."""
    return bool(data.sum(dtype=torch.float32).isfinite() or data.isfinite().all())


def _stream(folder: hf_files.Folder, shape, names: dict[str, list[str]], into: Path, step) -> None:
    wanted = hf_names.tensors(shape)
    out = Stream(into, {f"{MASTER}/{key}": size for key, size in hf_names.shapes(shape).items()})
    everything = sum((folder.path / file).stat().st_size for file in names)
    done = 0
    for file, held in names.items():
        with hf_files.opened(folder.path / file) as shard, out.file():
            for name in held:
                if name not in wanted:  # an output matrix that is tied
                    continue
                rows_of = shard.get_slice(name)
                for rows, offset, size in wanted[name].boxes():
                    axis = 0 if rows.layer is None else 1  # that of the rows
                    at_once = max(1, _BLOCK // torch.Size(size[axis + 1 :]).numel())
                    for first in range(rows.start, rows.end, at_once):
                        data = rows_of[first : min(first + at_once, rows.end)]
                        if not _finite(data):
                            raise BadWeights(f"{folder.path / file}: {name} has values that are no finite numbers.")
                        at = (*offset[:axis], rows.at + first - rows.start, *offset[axis + 1 :])
                        out.write(f"{MASTER}/{rows.key}", at, data.view(*size[:axis], *data.shape))
                        done += data.nbytes
                        step(done, everything)
                key, vocab = wanted[name].rows[0].key, wanted[name].shape[0]
                if key in (hf_names.EMBEDDING, hf_names.OUTPUT) and hf_names.shapes(shape)[key][0] > vocab:
                    padding = torch.zeros(hf_names.shapes(shape)[key][0] - vocab, shape.hidden, dtype=data.dtype)
                    out.write(f"{MASTER}/{key}", (vocab, 0), padding)
    out.finish()
