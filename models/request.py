"""What `models.generate` is asked for: its own words, and what the checkpoint says about its text.

Nothing here imports torch.
"""

import json
from dataclasses import dataclass, field, fields
from pathlib import Path

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from data.corpus import BadData
from data.sources import tokenizer_name
from data.tokenizer import open_tokenizer
from models.hf_files import CONFIG, FOLDER
from parallel import checkpoint_files as files
from parallel import compose, frozen
from parallel.compose import Refused


@dataclass
class Request:
    """What to generate; a rank reads it from its run folder."""

    checkpoint: str = ""
    prompt: str = ""
    max_tokens: int = 200
    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 1234
    stop: bool = True
    cache: bool = True
    tokenizer: str | None = None
    # Found out here: ids in front of the prompt, ids that end a text, tokens that the model looks back on.
    begin: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    window: int = 0


_FOUND_OUT = ("begin", "ends", "window")


def read(argv: list[str]) -> tuple[Request, list[str]]:
    """The request in a command line, and the words that are train.py's; raises Refused."""
    asked, words, wrong = OmegaConf.structured(Request), [], []
    own = {f.name for f in fields(Request)} - set(_FOUND_OUT)
    for word in argv:
        key, _, value = word.partition("=")
        if key not in own or "=" not in word:
            words.append(word)
            continue
        try:
            asked[key] = value
        except OmegaConfBaseException:
            wrong.append(f"{word} has the wrong type: without it {key}={getattr(Request, key)} is taken.")
    if not asked.checkpoint:
        wrong.append("checkpoint=PATH is missing: a checkpoint, or the folder of a run.")
    for key, legal, allowed in (
        ("max_tokens", asked.max_tokens >= 1, "1 or more"),
        ("temperature", asked.temperature >= 0, "0 or more"),
        ("top_k", asked.top_k >= 0, "0 or more"),
        ("top_p", 0 < asked.top_p <= 1, "above 0 and at most 1"),
    ):
        if not legal:
            wrong.append(f"{key}={asked[key]} is out of range: it must be {allowed}.")
    if wrong:
        raise Refused(wrong)
    return OmegaConf.to_object(asked), words


def configuration(request: Request, words: list[str]):
    """The checked configuration of the ranks, its choices and its words; completes `request`. Raises Refused."""
    try:
        found = files.at(request.checkpoint, "checkpoint")
        about = files.read_about(found)
        trained = frozen.as_written(found)
        _tokens(request, found, trained)
    except (files.BadCheckpoint, frozen.BadFrozen, BadData) as problem:
        raise Refused([str(problem)]) from None
    # Beyond the length it was trained with a model of rotary angles goes on, but badly.
    request.window = about["batch"]["seq_len"] if "batch" in about else about["model"]["max_positions"]
    own = [
        "model=from_checkpoint",
        "model.weights='{}'".format(str(found).replace("'", "\\'")),
        f"precision={about['precision']}",
        "parallel=single",
        "data=mock",
        "train.global_batch=1",
        "train.micro_batch=1",
        f"train.seq_len={request.window}",
        "train.sample_length=0",
    ]
    # These two gain something in training alone.
    without = ["parallel.vpp=1", "parallel.sequence_parallel=false"]
    cfg, choices, overrides, _ = compose.compose([*own, *words, *without])
    checked = compose.check(cfg, trains=False)
    p = checked.parallel
    if p.dp * p.cp > 1:
        raise Refused(
            [
                f"parallel.dp={p.dp} · parallel.cp={p.cp}: a text is computed token by token, which parallel.tp and "
                "parallel.pp alone share out: take parallel.dp=1 parallel.cp=1."
            ]
        )
    return checked, choices, overrides


def _tokens(request: Request, found: Path, trained) -> None:
    """Find the tokenizer, and which ids begin and end a text."""
    beside = found / FOLDER
    if request.tokenizer is None:
        request.tokenizer = tokenizer_name(trained.data)[0] if trained else str(beside)
        if request.tokenizer is None:
            raise BadData(f"{found} was trained on files without a record of their tokenizer: add tokenizer=PATH.")
        if not trained and not any((beside / name).exists() for name in ("tokenizer.json", "tokenizer.model")):
            raise BadData(f"{found} came without a tokenizer: add tokenizer=PATH (tokenizer.json, .model) or bytes.")
    tokenizer = open_tokenizer(request.tokenizer)
    request.ends = [] if tokenizer.eod is None else [tokenizer.eod]
    if request.tokenizer == str(beside):
        said = {}
        for name in (CONFIG, "generation_config.json"):
            if (beside / name).exists():
                said |= json.loads((beside / name).read_bytes())
        begin, end = said.get("bos_token_id"), said.get("eos_token_id")
        request.begin = [] if begin is None else [begin]
        request.ends = end if isinstance(end, list) else request.ends if end is None else [end]
    if not request.stop:
        request.ends = []
