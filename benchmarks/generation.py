"""What a cache of keys and values gains in generation: tokens per second with it and without it, alternating.

    python -m benchmarks.generation [tokens=256] [override ...]

One process generates the same likeliest text from the same prompt both ways, three times each, and prints the median.
Written to benchmarks/results/generation.json. A longer text gains more: without a cache its cost grows with its square.
"""

import statistics
import sys
import time

from omegaconf import OmegaConf

from benchmarks.setting import keep, only_rank

TIMES = 3
PROMPT = list(b"def generate(self, prompt: str) -> str:\n    ")


def main(words: list[str]) -> None:
    """Run, print, write."""
    from parallel import compose, quiet

    tokens = next((int(word.partition("=")[2]) for word in words if word.startswith("tokens=")), 256)
    words = ["parallel=single", "data=mock", *(word for word in words if not word.startswith("tokens="))]
    cfg = OmegaConf.to_object(compose.check(compose.compose(words)[0]))
    only_rank()
    quiet.libraries()
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
        f"{found['with']:.0f} tokens/s with a cache, {found['without']:.0f} without"
    )
    groups.stop()
    if len(texts) > 1:
        sys.exit("The cache changes the text, so its speed says nothing; nothing was written.")
    every = {"with": speeds[True], "without": speeds[False]}
    keep("generation", tokens_per_s=found, all=every, tokens=tokens, words=words, device=peak.device_name())


if __name__ == "__main__":
    main(sys.argv[1:])
