"""A checkpoint becomes a Hugging Face Llama: safetensors of the same names, one file in memory at a time."""

import json
import os
import shutil
from collections.abc import Callable
from itertools import batched
from pathlib import Path
from types import SimpleNamespace

import torch

from models import hf_config, hf_files, hf_names
from models.hf_files import FOLDER, BadWeights
from parallel import checkpoint_files as files
from parallel import checkpoint_io as io
from parallel import frozen
from parallel.checkpoint_io import MASTER, Piece, Pieces

FORMATS = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
SHARD_BYTES = 5 * 10**9  # of a file, as Transformers splits by default
_AT_ONCE = 16  # tensors read in one go


def give(checkpoint: Path, to: Path, dtype: str | None, step: Callable[[int, int], None]) -> list[str]:
    """Write a checkpoint's weights as the model folder `to`, which must not exist; returns sentences about it.

    `dtype` is fp32, bf16 or fp16; None keeps the format in which the checkpoint has each tensor. `step(done, all)` is
    called with bytes. Raises BadCheckpoint, BadWeights or Unsupported, and writes nothing.
    """
    if to.exists():
        raise BadWeights(f"{to} exists already: name another, or remove it.")
    about = files.read_about(checkpoint)
    shape = SimpleNamespace(**about["model"])
    config, beside, source = hf_config.from_model(about["model"]), [], None
    origin = _origin(checkpoint)
    if origin is not None:
        config = json.loads((origin / FOLDER / hf_files.CONFIG).read_bytes())
        beside = [path for path in (origin / FOLDER).iterdir() if path.name != hf_files.CONFIG]
        source = files.read_about(origin)["source"]
    for number in range(len(about["files"])):
        if wrong := files.damage(checkpoint, about, number, len(about["files"])):
            raise files.BadCheckpoint(wrong)
    index = io.read_index(checkpoint)
    formats = {key: FORMATS[dtype] if dtype else index[f"{MASTER}/{key}"]["dtype"] for key in hf_names.shapes(shape)}
    plan = source["files"] if source else _plan(shape, formats)
    unfinished = to.with_name(f"{files.UNFINISHED}{to.name}")
    if unfinished.exists():  # a kill left it
        shutil.rmtree(unfinished)
    unfinished.mkdir(parents=True)
    try:
        size = _write(checkpoint, shape, formats, plan, unfinished, source, step)
        if list(plan) != [hf_files.SINGLE]:
            listed = {name: file for file, names in plan.items() for name in names}
            _json(unfinished / hf_files.INDEX, {"metadata": size, "weight_map": listed})
        name = formats[hf_names.EMBEDDING]
        key = "torch_dtype" if "dtype" not in config else "dtype"
        changed = config.get(key) != name
        if changed or origin is None:
            _json(unfinished / hf_files.CONFIG, config | {key: name})
        else:
            shutil.copyfile(origin / FOLDER / hf_files.CONFIG, unfinished / hf_files.CONFIG)
        for path in beside:
            shutil.copyfile(path, unfinished / path.name)
        files.publish(unfinished, to)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    if origin is None:
        return ["config.json was made from the model's keys; ids of special tokens and tokenizer files are not in it."]
    return [f"config.json and tokenizer files are those that {origin} was imported with."]


def _origin(checkpoint: Path) -> Path | None:
    """The imported checkpoint that this one is, or that its run began with, if it is still there."""
    if (checkpoint / FOLDER / hf_files.CONFIG).exists():
        return checkpoint
    run = frozen.as_written(checkpoint)
    weights = run and run.model.get("weights")
    if weights is None or not Path(weights).exists():
        return None
    return _origin(files.at(weights, "model.weights"))


def _plan(shape, formats: dict[str, str]) -> dict[str, list[str]]:
    """Tensors by file, in the order of the network."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, tensor in hf_names.tensors(shape).items():
        size += _bytes(tensor, formats)
        if shards[-1] and size > SHARD_BYTES:
            shards.append([])
            size = _bytes(tensor, formats)
        shards[-1].append(name)
    if len(shards) == 1:
        return {hf_files.SINGLE: shards[0]}
    return {f"model-{n:05}-of-{len(shards):05}.safetensors": names for n, names in enumerate(shards, 1)}


def _write(checkpoint: Path, shape, formats, plan, into: Path, source: dict | None, step) -> dict[str, int]:
    """Write the safetensors files; their size in all, as Transformers says it in an index."""
    from safetensors.torch import save_file

    tensors, shapes = hf_names.tensors(shape), hf_names.shapes(shape)
    tensors.setdefault(hf_names.LM_HEAD, tensors["model.embed_tokens.weight"])
    wanted = [tensors[name] for names in plan.values() for name in names]
    everything = sum(_bytes(tensor, formats) for tensor in wanted)
    done = 0
    for file, names in plan.items():
        held = {}
        # By itself, as it may be the embedding once more.
        output = [name for name in names if name == hf_names.LM_HEAD]
        for some in filter(None, [output, *batched([name for name in names if name not in output], _AT_ONCE)]):
            reads: dict[str, Pieces] = {}
            for name in some:
                dtype = getattr(torch, formats[tensors[name].rows[0].key])
                held[name] = torch.empty(tensors[name].shape, dtype=dtype)
                for rows, offset, size in tensors[name].boxes():
                    entry = reads.setdefault(f"{MASTER}/{rows.key}", Pieces(shapes[rows.key], []))
                    entry.pieces.append(Piece(offset, held[name][rows.start : rows.end].view(size), False))
                done += held[name].nbytes
            io.load(checkpoint, reads, alone=True)
            step(done, everything)
        save_file(held, into / file, metadata=source["texts"][file] if source else {"format": "pt"})
        with (into / file).open("rb") as written:
            os.fsync(written.fileno())
    return {"total_parameters": sum(torch.Size(tensor.shape).numel() for tensor in wanted), "total_size": everything}


def _bytes(tensor: hf_names.Tensor, formats: dict[str, str]) -> int:
    return torch.Size(tensor.shape).numel() * getattr(torch, formats[tensor.rows[0].key]).itemsize


def _json(path: Path, content: dict) -> None:
    files.write_synced(path, (json.dumps(content, indent=2, sort_keys=True) + "\n").encode())
