"""What forbids reading the data that a configuration asks for, told in sentences before any process starts."""

import os
from pathlib import Path

from data.corpus import BadData
from data.sources import record, recorded_tokenizer, sources, tokenizer_name
from data.tokenizer import Ids, digest, vocab_size


def problems(cfg) -> list[str]:
    """One sentence for each thing that is wrong with `cfg.data`; nothing here imports torch or NumPy."""
    d = cfg.data
    try:
        found = _path(d) if d.kind != "megatron" else _files(d)
        return found or _tokenizer(cfg)
    except BadData as problem:
        return [str(problem)]


def _path(d) -> list[str]:
    if d.kind != "text":
        if d.path is not None:
            return [f"data.path={d.path} is not read with data.kind={d.kind}: take data=text, or data=megatron."]
    elif d.path is None:
        return ["data=text needs a file or folder: add data.path=PATH."]
    elif not isinstance(d.path, str):
        return [f"data.path={d.path} is not one path: take a file or folder, or data=megatron to mix several."]
    elif not Path(d.path).exists():
        return [f"data.path={d.path} does not exist{_nearest(Path(d.path))}."]
    elif not os.access(d.path, os.R_OK):
        return [f"data.path={d.path} may not be read: change its permissions or take another."]
    return []


def _files(d) -> list[str]:
    if d.path is None:
        return ["data=megatron needs token files: add data.path=PREFIX, or data.path=[0.3,PREFIX,0.7,PREFIX]."]
    found, made = [], {}
    for source in sources(d.path):
        for file in (Path(f"{source.prefix}.idx"), Path(f"{source.prefix}.bin")):
            if not file.is_file():
                text = "; python -m data.prepare makes it of your text" if file.suffix == ".idx" else ""
                found.append(f"{file} of data.path does not exist{_nearest(file)}{text}.")
            elif not os.access(file, os.R_OK):
                found.append(f"{file} may not be read: change its permissions.")
        if record(source.prefix):
            made.setdefault(digest(recorded_tokenizer(source.prefix)), source.prefix)
    if len(made) > 1:
        found.append(f"data.path mixes files of different tokenizers: {' and '.join(made.values())}.")
    elif made and d.tokenizer is not None and digest(d.tokenizer) not in made:
        (prefix,) = made.values()
        found.append(
            f"data.tokenizer={d.tokenizer} is not the tokenizer that made {prefix}: leave it out, as "
            f"{recorded_tokenizer(prefix)} is recorded beside the files."
        )
    return found


def _tokenizer(cfg) -> list[str]:
    d = cfg.data
    name, _ = tokenizer_name(d)
    if name is None and d.kind != "megatron":
        return [f"data.tokenizer=null is for data=megatron: data={d.kind} needs bytes or a path."]
    if name is None:
        if cfg.train.sample_length and d.sample_prompt:
            Ids(cfg.model.vocab).encode(d.sample_prompt)
        return []
    size = vocab_size(name)
    if d.kind == "mock" or cfg.model.vocab >= size:
        return []
    return [
        f"model.vocab={cfg.model.vocab} is smaller than the {size} ids of data.tokenizer={name}: "
        f"take model.vocab={size}."
    ]


def _nearest(path: Path) -> str:
    """Where the path stops existing, which is where the typing mistake is."""
    parent = next(folder for folder in path.absolute().parents if folder.exists())
    return f" (there is no {path.absolute().relative_to(parent).parts[0]} in {parent})"
