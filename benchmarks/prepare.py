"""Speed of data.prepare against that of the Hugging Face tokenizer library alone, on the same text and cores.

    python -m benchmarks.prepare [mb=64] [rounds=5]

The text is Python source that lies on this machine, a file a document, as JSONL; the tokenizer is a byte-level BPE of
8,192 tokens learned on a part of it. The library alone is `encode_batch_fast` on lists of texts that are in memory
already, on all cores with its own threads, its result thrown away. data.prepare reads and parses the file, tokenizes,
adds ends of documents, writes both files and syncs them to the disk; what it does before (imports, starting its
workers) is shown apart. The two alternate, each in a process of its own; medians go to benchmarks/results/prepare.json.

Besides the speed there is the ratio of processor time for the same text, that of starting the workers included: it says
what the speed would be on a quiet machine when this one is not.
"""

import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

from benchmarks.setting import ROOT, keep

BATCH = 2**23  # bytes of text that the library is given at a time
ALONE = """
import json, sys, time
from tokenizers import Tokenizer
library = Tokenizer.from_file(sys.argv[1])
batches, size, total = [[]], 0, 0
for line in open(sys.argv[2]):
    text = json.loads(line)["text"]
    size, total = size + len(text), total + len(text.encode())
    batches[-1].append(text)
    if size > int(sys.argv[3]):
        batches, size = [*batches, []], 0
began, used = time.perf_counter(), time.process_time()
tokens = sum(len(found) for batch in batches
             for found in library.encode_batch_fast(batch, add_special_tokens=False))
seconds, used = time.perf_counter() - began, time.process_time() - used
print(json.dumps({"seconds": seconds, "cpu_s": used, "tokens": tokens, "text_bytes": total}))
"""
OURS = """
import json, os, sys
from data.prepare import options, prepare
if __name__ == "__main__":
    import megatron.core.datasets.indexed_dataset
    before = sum(os.times()[:4])
    found = prepare(options(sys.argv[1:]))
    print(json.dumps(found | {"cpu_s": sum(os.times()[:4]) - before}))
"""


def main(words: list[str]) -> None:
    """Run, print, write."""
    asked = {"mb": 64, "rounds": 5} | {name: int(value) for name, _, value in (w.partition("=") for w in words)}
    from data import bpe

    with tempfile.TemporaryDirectory() as folder:
        corpus, tokenizer = Path(folder, "corpus.jsonl"), Path(folder, "tokenizer.json")
        texts = list(_texts(asked["mb"] * 10**6))
        corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        bpe.train([texts[: len(texts) // 8]], 8192, tokenizer)
        alone, ours, starts, cpu = [], [], [], []
        for number in range(asked["rounds"]):
            library = _run(ALONE, tokenizer, corpus, BATCH)
            words = [f"input={corpus}", f"tokenizer={tokenizer}", f"output={folder}/out", "overwrite=true"]
            began = time.perf_counter()
            prepared = _run(OURS, *words)
            starts.append(time.perf_counter() - began - prepared["seconds"])
            assert prepared["tokens"] == library["tokens"] + prepared["documents"], "not the same tokens"
            alone.append(library["text_bytes"] / library["seconds"] / 1e6)
            ours.append(prepared["text_bytes"] / prepared["seconds"] / 1e6)
            cpu.append(library["cpu_s"] / prepared["cpu_s"])
            print(f"round {number + 1}: alone {alone[-1]:.2f} MB/s, data.prepare {ours[-1]:.2f} MB/s", flush=True)
    ratios = [a / b for a, b in zip(ours, alone, strict=True)]
    found = {
        "mb": prepared["text_bytes"] / 1e6,
        "documents": prepared["documents"],
        "tokens": prepared["tokens"],
        "cores": len(os.sched_getaffinity(0)),
        "alone_mb_s": statistics.median(alone),
        "prepare_mb_s": statistics.median(ours),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "cpu_ratio": statistics.median(cpu),
        "load": os.getloadavg()[0],
        "start_s": statistics.median(starts),
    }
    print(f"library alone  {found['alone_mb_s']:6.2f} MB/s (median of {len(alone)}, {found['cores']} cores)")
    print(f"data.prepare   {found['prepare_mb_s']:6.2f} MB/s, after {found['start_s']:.1f} s of starting")
    print(f"ratio          {found['ratio']:6.2f} (median; {min(ratios):.2f} to {max(ratios):.2f})")
    print(f"by CPU time    {found['cpu_ratio']:6.2f} (median; {min(cpu):.2f} to {max(cpu):.2f})")
    keep("prepare", prepared["versions"], **found)


def _texts(size: int):
    """Python files of this interpreter and its packages, the library's first, until they have `size` bytes."""
    for root in (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")):
        for file in sorted(Path(root).rglob("*.py")):
            text = file.read_text(errors="replace")
            if text:
                yield text
                size -= len(text.encode())
            if size <= 0:
                return


def _run(code: str, *words) -> dict:
    with tempfile.NamedTemporaryFile("w", suffix=".py") as program:
        program.write(code)
        program.flush()
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        command = [sys.executable, program.name, *map(str, words)]
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout)


if __name__ == "__main__":
    main(sys.argv[1:])
