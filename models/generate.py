"""Text from a checkpoint, as it comes.

    python -m models.generate checkpoint=PATH prompt='Once upon a time' [key=value ...]

    checkpoint   a checkpoint, an imported one too, or a run (its newest)
    prompt       what the text continues
    max_tokens=200  temperature=0.8 (0: the likeliest token each time)  top_k=0 (all)  top_p=1.0  seed=1234
    stop=true    end at the token that ends a document
    cache=true   keep keys and values of the tokens so far; without, everything is computed anew for each token
    tokenizer    bytes, a tokenizer.json or a SentencePiece model, if it is not the one that the checkpoint came with

Any other word is one of train.py's: parallel=tp2, precision=bf16, launch.device=cpu, model.attention=math.
"""

import json
import os
import shutil
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
REQUEST = "request.json"


def main(argv: list[str]) -> int:
    """Check, start the ranks, wait for them; the exit code."""
    # A command like train.py, and as such it may start ranks, which nothing else in this folder does.
    from models import request
    from parallel import compose, launch

    if not argv or "--help" in argv or "-h" in argv:
        print(__doc__.strip())
        return 0
    try:
        asked, words = request.read(argv)
        cfg, choices, overrides = request.configuration(asked, words)
    except compose.Refused as refusal:
        return compose.tell(refusal.sentences)
    folder = Path(tempfile.mkdtemp(prefix="tripod_generate_"))
    frozen = compose.freeze(cfg, folder, choices, overrides)
    (folder / REQUEST).write_text(json.dumps(asdict(asked)))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(REPO), os.environ.get("PYTHONPATH"))))
    try:
        launch.run(folder, frozen, [sys.executable, "-u", "-m", "models.generate", "--rank", str(folder)])
    except launch.JobFailed as failure:
        print(f"\n{failure.status}: {failure}; the ranks' logs are in {folder / 'ranks'}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        shutil.rmtree(folder)
        return 130
    shutil.rmtree(folder)
    return 0


def rank(folder: Path) -> None:
    """Generate as one rank; rank 0 prints."""
    from models.request import Request
    from parallel.frozen import load
    from parallel.heartbeat import Heartbeat

    cfg, number = load(folder).cfg, int(os.environ["RANK"])
    asked = Request(**json.loads((folder / REQUEST).read_text()))
    heartbeat = Heartbeat(folder, number)
    heartbeat.beat("import")
    from parallel import quiet

    quiet.libraries()
    from data.tokenizer import open_tokenizer
    from models import attention, decode
    from models.sampling import Sampling
    from parallel import groups, wrap
    from precision import setup

    heartbeat.beat("process groups")
    groups.start(cfg)
    setup.apply(cfg)
    attention.install(cfg.model.attention, cfg.precision.compute)
    heartbeat.beat("weights")
    chunks = wrap.bare_chunks(cfg)
    tokenizer = open_tokenizer(asked.tokenizer)
    prompt = [*asked.begin, *tokenizer.encode(asked.prompt)] or asked.ends[:1] or [0]
    how = Sampling(asked.temperature, asked.top_k, asked.top_p, asked.seed)
    vocab = min(tokenizer.vocab_size, cfg.model.vocab)
    screen = Screen(tokenizer, prompt, asked.prompt) if number == 0 else None
    began, times = time.perf_counter(), []
    for token in decode.continued(chunks, prompt, asked.max_tokens, asked.window, vocab, how, asked.cache):
        times.append(time.perf_counter() - began)
        heartbeat.beat(f"token {len(times)}")
        if token in asked.ends:
            break
        if screen:
            screen.add(token)
    if screen:
        screen.end()
        print(f"[{told(len(prompt), times)}, {'with' if asked.cache else 'without'} a cache]", file=sys.stderr)
    groups.stop()


def told(prompt: int, times: list[float]) -> str:
    """Speed in words; `times` are seconds from the beginning to each token."""
    text = f"{prompt} tokens read and the first written in {times[0]:.2f} s"
    if len(times) > 1:
        text += f", then {(len(times) - 1) / (times[-1] - times[0]):.1f} tokens/s"
    return text


class Screen:
    """Prints the text as its tokens come; a character is printed when all of its bytes are there."""

    def __init__(self, tokenizer, prompt: list[int], text: str):
        self.tokenizer, self.ids = tokenizer, list(prompt)
        self._shown = len(tokenizer.decode(self.ids))
        self._print(text)

    def add(self, token: int) -> None:
        """One more token."""
        self.ids.append(token)
        text = self.tokenizer.decode(self.ids)
        if not text.endswith("\ufffd"):
            self._print(text[self._shown :])
            self._shown = len(text)

    def end(self) -> None:
        """Prints what is left, half a character too."""
        self._print(self.tokenizer.decode(self.ids)[self._shown :] + "\n")

    def _print(self, text: str) -> None:
        from tracking.console import harmless

        print(harmless(text), end="", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        from parallel import rank_process

        rank_process.run(rank, Path(sys.argv[2]))
    else:
        sys.exit(main(sys.argv[1:]))
