"""What a cache of keys and values gains in generation: tokens per second with it and without it, alternating.

    python -m benchmarks.generation [tokens=256] [override ...]

One process generates the same likeliest text from the same prompt both ways, three times each, and prints the median.
Written to benchmarks/results/generation.json. A longer text gains more: without a cache its cost grows with its square.
"""

import json
import os
import platform
import socket
import statistics
import sys
import time
from pathlib import Path

from omegaconf import OmegaConf

RESULT = Path(__file__).resolve().parent / "results" / "generation.json"
TIMES = 3
PROMPT = list(b"def generate(self, prompt: str) -> str:\n    ")


def main(words: list[str]) -> None:
    """Run, print, write."""
    from parallel import compose, quiet

    tokens = next((int(word.partition("=")[2]) for word in words if word.startswith("tokens=")), 256)
    words = ["parallel=single", "data=mock", *(word for word in words if not word.startswith("tokens="))]
    cfg = OmegaConf.to_object(compose.check(compose.compose(words)[0]))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    quiet.libraries()
    import torch

    from models import attention, decode
    from models.sampling import Sampling
    from parallel import groups, wrap
    from precision import peak, setup

    groups.start(cfg)
    setup.apply(cfg)
    attention.install(cfg.model.attention, cfg.precision.compute)
    chunks = wrap.bare_chunks(cfg)
    window, speeds, texts = len(PROMPT) + tokens, {True: [], False: []}, set()
    for _ in range(TIMES):
        for cached in speeds:
            began = time.perf_counter()
            text = tuple(decode.continued(chunks, PROMPT, tokens, window, cfg.model.vocab, Sampling(), cached))
            speeds[cached].append(tokens / (time.perf_counter() - began))
            texts.add(text)
    found = {"with": statistics.median(speeds[True]), "without": statistics.median(speeds[False])}
    print(
        f"{cfg.model.name}, {cfg.precision.name}, {tokens} tokens after {len(PROMPT)} on {peak.device_name()}: "
        f"{found['with']:.0f} tokens/s with a cache, {found['without']:.0f} without; "
        f"{'the same text' if len(texts) == 1 else 'TEXTS DIFFER'}"
    )
    RESULT.write_text(
        json.dumps(
            {
                "tokens_per_s": found,
                "all": {"with": speeds[True], "without": speeds[False]},
                "tokens": tokens,
                "same_text": len(texts) == 1,
                "words": words,
                "device": peak.device_name(),
                "versions": {"python": platform.python_version(), "torch": torch.__version__},
            },
            indent=1,
        )
        + "\n"
    )
    groups.stop()


if __name__ == "__main__":
    main(sys.argv[1:])
