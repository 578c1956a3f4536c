"""Text to token files, once, with all cores: what data=megatron and Megatron-LM read memory-mapped.

    python -m data.prepare input=PATH tokenizer=bytes|bpe|PATH output=PREFIX [option=value ...]

input      a file, a folder or a quoted pattern with stars; plain text (a file is a document) or JSONL (a line is one),
           as it is or compressed (.gz, .zst)
tokenizer  bytes, a Hugging Face tokenizer.json, a SentencePiece .model, a folder with one of them, or bpe to learn
           one from this text
output     PREFIX.bin and PREFIX.idx appear when they are complete, with PREFIX.json, which says what they are, and the
           tokenizer

vocab=8192          tokens that bpe learns
key=text            where a line of JSONL has its text
format=auto         text or jsonl, where a file's name does not say it
eod=auto            the token that ends a document: the tokenizer's own, none, or the name of one
empty=error         skip leaves out documents without text
workers=N           processes that tokenize; the cores there are
overwrite=false     true replaces what is there
"""

import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from difflib import get_close_matches
from importlib.metadata import version
from pathlib import Path

import numpy as np

from data import bpe, texts
from data.corpus import BadData
from data.encode import Encoded, Settings, Workers
from data.pair import Pair
from data.progress import Progress
from data.tokenizer import digest, dtype_of, file_of, open_tokenizer

CHOICES = {"format": ("auto", "text", "jsonl"), "empty": ("error", "skip"), "overwrite": ("true", "false")}


@dataclass
class Options:
    """The words of the command line."""

    input: str = ""
    tokenizer: str = ""
    output: str = ""
    vocab: int = 8192
    key: str = "text"
    format: str = "auto"
    eod: str = "auto"
    empty: str = "error"
    workers: int = 0
    overwrite: str = "false"


def options(words: list[str]) -> Options:
    """The command line as Options; raises BadData for a word that means nothing."""
    known, found = {field.name: field for field in fields(Options)}, Options()
    for word in words:
        name, equals, value = word.partition("=")
        if name not in known or not equals:
            near = get_close_matches(name, known, n=1)
            raise BadData(f"{word} is no option{f', did you mean {near[0]}=?' if near else ''}: see --help.")
        if known[name].type is int:
            if not value.isdecimal() or not int(value):
                raise BadData(f"{word}: {name} is a whole number above 0.")
            value = int(value)
        if name in CHOICES and value not in CHOICES[name]:
            raise BadData(f"{word}: {name} is {', '.join(CHOICES[name][:-1])} or {CHOICES[name][-1]}.")
        setattr(found, name, value)
    if missing := [name for name in ("input", "tokenizer", "output") if not getattr(found, name)]:
        raise BadData(f"{'= and '.join(missing)}= is missing: python -m data.prepare --help shows the options.")
    found.workers = found.workers or len(os.sched_getaffinity(0))
    return found


def prepare(o: Options) -> dict:
    """Writes the files; what was recorded of them, and the seconds it took besides starting. Raises BadData."""
    files = texts.find(o.input)
    with Pair(o.output, o.overwrite == "true") as pair:
        name = o.tokenizer
        if name == "bpe":
            name = str(pair.path(".tokenizer.json"))
            with Progress("learning a tokenizer", files) as progress:
                bpe.train(_strings(files, o, progress), o.vocab, Path(name))
        tokenizer = open_tokenizer(name)
        eod = {"auto": tokenizer.eod, "none": None}.get(o.eod, tokenizer.id_of(o.eod))
        if eod is None and o.eod not in ("auto", "none"):
            raise BadData(f"eod={o.eod} is not a token of this tokenizer: take auto, none or the name of one.")
        with Workers(o.workers, Settings(name, eod, o.key, o.empty == "skip")) as workers:
            builder = _builder(pair, np.dtype(dtype_of(tokenizer.vocab_size)))
            workers.wait()
            began = time.perf_counter()
            with Progress("tokenizing", files) as progress:
                counts = _write(builder, workers.encoded(_parts(files, o)), progress)
        if not counts["documents"]:
            raise BadData(f"input={o.input} has no text.")
        builder.finalize(str(pair.path(".idx")))
        record = {
            "tokenizer": _keep(pair, name, Path(o.output).name),
            "tokenizer_sha256": digest(name),
            "vocab_size": tokenizer.vocab_size,
            "eod": eod,
            **counts,
            "input": o.input,
            "files": len(files),
            "versions": {name: version(name) for name in ("tokenizers", "sentencepiece", "megatron-core", "numpy")},
        }
        pair.publish(record)
        return record | {"seconds": time.perf_counter() - began}


def _builder(pair: Pair, dtype: np.dtype):
    from parallel import quiet

    quiet.libraries()
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    return IndexedDatasetBuilder(str(pair.path(".bin")), dtype=dtype.type)


def _write(builder, batches: Iterable[Encoded], progress: Progress) -> dict[str, int]:
    """Writes tokens with Megatron-core's own builder; what was written."""
    tokens = text_bytes = 0
    for batch in batches:
        # What builder.add_document does, for many documents at once and for one that comes in parts.
        builder.data_file.write(batch.tokens.astype(builder.dtype, copy=False).tobytes())
        before = len(builder.sequence_lengths)
        builder.sequence_lengths.extend(batch.lengths.tolist())
        builder.document_indices.extend((before + 1 + np.flatnonzero(batch.ends)).tolist())
        tokens, text_bytes = tokens + len(batch.tokens), text_bytes + batch.text_bytes
        for file, to in batch.parts:
            progress.read(file, to)
    return {"documents": len(builder.document_indices) - 1, "tokens": tokens, "text_bytes": text_bytes}


def _parts(files: list[Path], o: Options) -> Iterator[texts.Part]:
    for file in files:
        yield from texts.parts(file, texts.is_jsonl(file, o.format))


def _strings(files: list[Path], o: Options, progress: Progress) -> Iterator[list[str]]:
    for part in _parts(files, o):
        progress.read(part.file, part.read)
        yield [text.decode() for text, _ in texts.documents(part, o.key, o.empty == "skip", utf8=True)]


def _keep(pair: Pair, name: str, prefix: str) -> str:
    """Leaves the tokenizer beside the tokens; what the record calls it."""
    file = file_of(name)
    if file is None:
        return name
    end = f".tokenizer{file.suffix}"
    if file != pair.path(end):
        shutil.copyfile(file, pair.path(end))
    return f"{prefix}{end}"


def main(words: list[str]) -> int:
    """The command line; its exit code."""
    if not words or "--help" in words:
        print(__doc__)
        return 0 if words else 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        o = options(words)
        found = prepare(o)
    except BadData as problem:
        print(f"Nothing was written: {problem}", file=sys.stderr)
        return 2
    except OSError as error:  # of reading text there is none left
        print(f"Nothing was written: output={o.output} cannot be written: {error.strerror}.", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("Stopped; nothing was written.", file=sys.stderr)
        return 128 + signal.SIGINT
    size, seconds, vocab = found["text_bytes"] / 1e6, found["seconds"], found["vocab_size"]
    print(
        f"{o.output}: {found['documents']:,} documents, {found['tokens']:,} tokens of a vocabulary of {vocab:,}\n"
        f"{size:,.1f} MB of text in {seconds:.1f} s: {size / seconds:.1f} MB/s on {o.workers} cores"
    )
    larger = f" model.vocab={vocab}" if vocab != 256 else ""
    print(f"Train on it:\n  python train.py data=megatron data.path={shlex.quote(o.output)}{larger}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
