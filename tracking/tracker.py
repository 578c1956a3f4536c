"""What the logging rank does with metrics: console, metrics.jsonl, W&B, and at the end result.json and the report page.

`facts` is what train.py knows before the first step:

    parameters   int
    device       "NVIDIA H100" or "CPU (...)"
    peak         {"tflops": x, "source": "dense BF16 peak of ...", "name": "dense BF16"} or None where it is unknown
    rank_map     which rank does what, one or more lines
    run_command  the command that repeats this run
    data         data.batches.Corpus.facts
    resumed      of a run that goes on: wandb_id, parent and checkpoint of parallel.checkpoint; may be left out
    notes        further rows of the block before the first step, {label: text}; may be left out
"""

import shutil
import sys
import time
from pathlib import Path

from parallel import rank_process
from parallel.explain import explain
from tracking import norms, report, result
from tracking.console import Console, duration, harmless, short
from tracking.history import History
from tracking.mode import TrackingError
from tracking.wandb_run import WandbRun, sweep_of

TRY_NEXT = (
    "python train.py parallel=tp2",
    "python train.py -m parallel=dp2,tp2 clip=0.1,1.0 train.steps=20",
    "python train.py data=text data.path=FOLDER_WITH_TEXT",
)


class Tracker:
    """Context manager around the training loop of the one rank that logs.

    Leaving it closes everything: as `ok`, or, when an exception leaves it, as what that exception means. The exception
    goes on. Raises TrackingError on entering when the folder or W&B cannot be used.
    """

    def __init__(self, frozen, run_dir: str | Path, facts: dict, done: int = 0):
        """`done` steps were done by an interrupted run; what this folder knows of them stays."""
        self.frozen, self.run_dir, self.given = frozen, Path(run_dir), facts
        self.done = done
        self.console = Console(frozen.cfg.train.steps, frozen.cfg.train.log_every, facts.get("peak"))
        self.summary = result.Summary()
        self.norms = norms.Norms(frozen.cfg.clip.report_every)
        self.extra: dict = {}
        self.finished = False
        self._said: set[str] = set()
        self._known = -1  # steps up to it are done once more after a rollback, and are recorded already

    def __enter__(self):
        self.began = time.monotonic()
        try:
            result.clear(self.run_dir, history=not self.done)
            self.history = History(self.run_dir, self.done)
            wandb_id, parent = self._comes_from()
            self.facts = result.facts(self.frozen, self.given | {"parent": parent})
            result.write(self.run_dir, result.FACTS_FILE, **self.facts)
        except OSError as error:
            raise TrackingError(
                f"The run's folder {self.run_dir} cannot be written to: {error.strerror}; "
                "choose another with hydra.run.dir=..."
            ) from error
        self.wandb = WandbRun(self.frozen, self.run_dir, self.facts, wandb_id)
        for line in self.history.kept:  # W&B's run is replaced by this one, which has the same id
            metrics = {name: value for name, value in line.items() if name != "step"}
            self.summary.add(line["step"], metrics)
            self.wandb.log(metrics)
            if "grad/norm" in metrics:
                self.norms.add(metrics["grad/norm"])
        self._show_start()
        return self

    def _comes_from(self) -> tuple[str | None, dict | None]:
        """The W&B run that goes on; or, where its metrics are not here, run and checkpoint that this one began from."""
        resumed, kept = self.given.get("resumed"), self.history.kept
        if not resumed:
            return None, None
        if kept and kept[-1]["step"] == self.done:
            return resumed["wandb_id"], resumed["parent"]
        return None, {"run": resumed["wandb_id"], "checkpoint": resumed["checkpoint"], "step": self.done}

    def log(self, step: int, metrics: dict[str, float], histograms: dict | None = None) -> None:
        """Records the metrics of a step (Meter.step) or evaluation (metrics.validation); step 0 is before the first.

        `histograms` maps a name to counts and edges, one more of these; W&B alone takes them.
        """
        if step <= self._known:
            return
        metrics = {"tokens": self.summary.last.get("tokens", 0)} | metrics
        self.history.add(step, metrics)
        self.summary.add(step, metrics)
        self.wandb.log(metrics, histograms)
        if "perf/step_s" in metrics and "train/loss" in metrics:
            self.console.step(step, metrics)
        if "grad/norm" in metrics and self.norms.add(metrics["grad/norm"]):
            self._show_norms(self.norms.report(self.norms.report_every))
        if "val/loss" in metrics:
            self.console.evaluation(step, metrics["val/loss"])
        self._say_once(self.history.problem, "training goes on, and the metrics are written when there is room again")
        self._say_once(self.wandb.problem, "training goes on, and metrics.jsonl has everything")

    def evaluating(self, done: int, total: int) -> None:
        """Shows how far an evaluation is, in batches."""
        self.console.evaluating(done, total)

    def not_finite(self, step: int, seen: str) -> None:
        """Says that a step's loss or gradient is not finite, and that the reason is looked for."""
        if self.summary.first_nonfinite_step is None:
            self.summary.first_nonfinite_step = step
        self.console.close()
        self.console.print(f"{seen} in step {step}; computing its batch once more to find the first bad tensor")

    def rolled_back(self, step: int) -> None:
        """Says that training goes on after `step`; the steps from there that are recorded stay as they are."""
        self._known = max(self._known, self.summary.last.get("step", 0))
        self.console.print(f"back at the checkpoint after step {step}; the bad batch will be left out")

    def warn(self, sentence: str) -> None:
        """Shows and keeps a warning."""
        self.extra.setdefault("warnings", []).append(sentence)
        self.console.close()
        self.console.print(sentence)

    def sample(self, prompt: str, text: str) -> None:
        """Shows and keeps text that the trained model wrote after `prompt`."""
        self.extra["sample"] = {"prompt": prompt, "text": text}
        self.console.close()
        self.console.block("The model writes:", [])
        self.console.print("\n".join("  | " + line for line in harmless(prompt + text).splitlines()))

    def verdict(self, sentence: str) -> None:
        """Shows and keeps what the expected loss says about this run."""
        self.extra["verdict"] = sentence
        self.console.close()
        self.console.print(f"\n{sentence}")

    def finish(self, status: str = "ok", cause: str | None = None, error: BaseException | None = None) -> None:
        """Closes everything and shows how the run ended; a second call does nothing. `error` is what ended it.

        `ok` becomes `nan` when the last loss is not finite.
        """
        if self.finished:
            return
        self.finished = True
        if status == "ok" and self.summary.diverged:
            status = "nan"
            cause = f"the loss is not finite since step {self.summary.first_nonfinite_step}"
        known = None if status == "ok" else explain(status, f"{cause}\n{error or ''}", self.frozen.cfg, self.run_dir)
        self.extra |= result.explained(known)
        self.console.close()
        self.history.close()
        summary = self.summary.fields()
        self.extra["grad_norms"] = self.norms.report()
        outcome = {"status": status, "cause": cause} | summary | self.facts | self.extra | {"ended": result.now()}
        page = None
        try:
            result.write(self.run_dir, **outcome)
            page = report.write(self.run_dir)
        except OSError as error:
            self._say_once(f"{self.run_dir} cannot be written to: {error.strerror}", "result.json or report is missing")
        self._say_once(self.history.problem, "the last steps are missing there")
        self.wandb.finish(status, {"status": status, "cause": cause} | summary)
        self._show_end(outcome, page)

    def last_words(self, signum: int) -> None:
        """Closes when the main thread cannot react to a signal (parallel.rank_process.last_words)."""
        self.finish(*outcome_of(rank_process.Stopped(signum)))

    def __exit__(self, kind, error, traceback) -> None:
        self.finish(*outcome_of(error), error)

    def _say_once(self, problem: str | None, consequence: str) -> None:
        if problem and problem not in self._said:
            self._said.add(problem)
            self.console.print(f"{problem}; {consequence}.")

    def _show_norms(self, report: dict | None) -> None:
        if report:
            lines = norms.in_words(report).replace("\n", "; ")
            self.console.print(f"gradient norm of the last {report['steps']:,} steps: {lines}")

    def _show_start(self) -> None:
        cfg, peak = self.frozen.cfg, self.given.get("peak")
        tokens = cfg.train.global_batch * cfg.train.seq_len
        rows = [
            ("parameters", f"{self.given['parameters']:,}"),
            ("ranks", self.given["rank_map"]),
            ("device", self.given["device"]),
            ("peak", f"{peak['tflops']:.3g} TFLOP/s ({peak['source']})" if peak else "unknown, so no MFU is given"),
            ("length", f"{cfg.train.steps:,} steps of {tokens:,} tokens"),
        ]
        if data := self.given.get("data"):
            rows.append(("data", result.data_in_words(data)))
        rows += self.given.get("notes", {}).items()
        rows += [
            ("W&B", f"{self.wandb.mode} ({self.wandb.reason})" + (f"\n{self.wandb.url}" if self.wandb.url else "")),
            ("folder", short(self.run_dir)),
            ("repeat with", self.given["run_command"]),
        ]
        self.console.block(" · ".join(result.named(self.frozen.choices)), rows)
        self.console.print("")

    def _show_end(self, outcome: dict, page: Path | None) -> None:
        took = f"{outcome['steps']:,} steps, {outcome['tokens']:,} tokens, {duration(time.monotonic() - self.began)}"
        rows = []
        if outcome["val_loss_start"] is not None:
            start, final, best = (outcome[f"val_loss_{which}"] for which in ("start", "final", "best"))
            at_best = "" if best is None else f", {best:.4f} at best"
            rows.append(("val loss", f"{start:.4f} at the start, {final:.4f} at the end{at_best}"))
        if outcome["tokens_per_s"] is not None:
            mfu = f", MFU {outcome['mfu']:.0%} of {self.console.peak}" if outcome["mfu"] is not None else ""
            rows.append(("speed", f"{outcome['tokens_per_s']:,.0f} tokens/s{mfu}"))
        if outcome["grad_norms"]:
            rows.append(("grad norm", norms.in_words(outcome["grad_norms"])))
        rows += [(title, outcome[name]) for title, name in (("why", "explanation"), ("try", "advice")) if outcome[name]]
        told = self.run_dir / result.DOCTOR / "report.md"
        if outcome["status"] == "nan" and told.exists():
            rows.append(("doctor", short(told)))
        rows.append(("result", short(self.run_dir / result.FILE)))
        if self.wandb.folder:
            folder = short(self.wandb.folder)
            rows.append(("W&B", f"wandb leet {folder}\n" + (self.wandb.url or f"wandb sync {folder}")))
        if outcome["status"] == "ok" and not sweep_of(self.run_dir):  # a sweep has a last word of its own
            rows.append(("try next", "\n".join(_activate() + TRY_NEXT)))
        cause = f": {outcome['cause']}" if outcome["cause"] else ""
        self.console.block(f"{outcome['status']} after {took}{cause}", rows)
        if page:
            self.console.print(f"\nReport page, to open in a browser:\n{short(page)}")


def _activate() -> tuple[str, ...]:
    """What has to be typed before `python` is the one that runs now."""
    own = Path(sys.prefix) / "bin" / "activate"
    at_hand = shutil.which("python")
    missing = own.exists() and not (at_hand and Path(at_hand).parent == own.parent)
    return (f". {short(own)}",) if missing else ()


def outcome_of(error: BaseException | None) -> tuple[str, str | None]:
    """Status and cause that an exception (or none) gives a run."""
    if error is None:
        return "ok", None
    if found := rank_process.elsewhere(error):
        return found
    words = str(error).strip().splitlines()
    cause = type(error).__name__ + (f": {words[0]}" if words else "")
    if not isinstance(error, Exception):
        return "interrupted", words[0] if words else cause
    if isinstance(error, FloatingPointError):
        return "nan", cause
    text = str(error).lower()
    # PyTorch's allocator on CPU raises a plain RuntimeError.
    out_of_memory = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    if out_of_memory or "out of memory" in text or "can't allocate memory" in text:
        return "oom", cause
    return "failed", cause
