"""Take over the weights of a Hugging Face Llama as a checkpoint, and give a checkpoint's weights back.

    python -m models.weights import --from DIR --to CHECKPOINT
    python -m models.weights export --from CHECKPOINT_OR_RUN --to DIR [--dtype bf16]

Both stream: memory holds one safetensors file at most. What is written appears when it is complete, or not at all.
"""

import argparse
import sys
import time
from pathlib import Path

REFUSED = 2


def main(argv: list[str]) -> int:
    """Run the command; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m models.weights", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    taking = commands.add_parser("import", help="a folder with config.json and safetensors becomes a checkpoint")
    giving = commands.add_parser("export", help="a checkpoint becomes such a folder")
    sides = (taking, "model folder", "new checkpoint"), (giving, "checkpoint, or run", "new model folder")
    for command, source, to in sides:
        command.add_argument("--from", dest="source", type=Path, required=True, metavar="PATH", help=source)
        command.add_argument("--to", type=Path, required=True, metavar="PATH", help=to)
    giving.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), help="number format (default: the checkpoint's)")
    words = parser.parse_args(argv)

    from parallel import quiet

    quiet.libraries()
    from models.hf_config import Unsupported
    from models.hf_files import BadWeights
    from parallel.checkpoint_files import BadCheckpoint
    from parallel.frozen import BadFrozen

    try:
        return (_import if words.command == "import" else _export)(words)
    except KeyboardInterrupt:
        return 130
    except (Unsupported, BadWeights, BadCheckpoint, BadFrozen) as problem:
        sentences = getattr(problem, "sentences", [str(problem)])
    except OSError as error:
        sentences = [f"{error.filename or words.to} cannot be written: {error.strerror or error}."]
    print("Nothing was written:", *(f"  - {sentence}" for sentence in sentences), sep="\n", file=sys.stderr)
    return REFUSED


def _import(words) -> int:
    from models import hf_import

    with Bar("importing") as bar:
        about, said = hf_import.take(words.source, words.to, bar)
    m = about["model"]
    print(f"{words.to}: {m['layers']} layers, hidden {m['hidden']}, {bar.told()}, kept in {about['precision']}.")
    print(*(f"note: {sentence}" for sentence in said), sep="\n", end="\n" if said else "")
    print(
        "\nNext:",
        f"  python -m models.generate checkpoint={words.to} prompt='Once upon a time'",
        f"  python train.py model=from_checkpoint model.weights={words.to} precision={about['precision']} "
        "data=text data.path=PATH",
        sep="\n",
    )
    return 0


def _export(words) -> int:
    from models import hf_export
    from parallel import checkpoint_files

    with Bar("exporting") as bar:
        found = checkpoint_files.at(words.source, "--from")
        said = hf_export.give(found, words.to, words.dtype, bar)
    print(f"{words.to}: weights of {found}, {bar.told()}.", *(f"note: {sentence}" for sentence in said), sep="\n")
    print("\nNext:", f"  transformers.AutoModelForCausalLM.from_pretrained({str(words.to)!r})", sep="\n")
    return 0


class Bar:
    """A progress bar on a terminal; calling it with bytes done and all of them moves it."""

    def __init__(self, what: str):
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

        columns = ("{task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty())
        self._task = self._progress.add_task(what, total=None)
        self._began, self._bytes = time.monotonic(), 0

    def __enter__(self):
        self._progress.start()
        return self

    def __call__(self, done: int, everything: int) -> None:
        self._bytes = done
        self._progress.update(self._task, completed=done, total=everything)

    def told(self) -> str:
        """Bytes and seconds in words."""
        return f"{self._bytes / 1e9:.2f} GB in {time.monotonic() - self._began:.1f} s"

    def __exit__(self, *error) -> None:
        self._progress.stop()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
