"""What a person sees: a block before the first step, a bar or plain lines while the run goes on, a block at the end."""

import os
import sys
import time
from pathlib import Path

from tracking.metrics import perplexity

REFRESH_S = 0.5  # drawing the bar takes about half a millisecond


def harmless(text: str) -> str:
    """Text that a terminal shows and does not obey: a model of bytes may write control characters."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


class Console:
    """On a terminal a progress bar, elsewhere one plain line every `log_every` steps.

    `peak` is {"tflops", "source"} or None; its optional "name" is a shorter source ("dense BF16").
    """

    def __init__(self, steps: int, log_every: int, peak: dict | None):
        self.steps, self.log_every = steps, log_every
        self.peak = f"{peak['tflops']:.3g} TFLOP/s {peak.get('name', peak['source'])}" if peak else ""
        self.terminal = sys.stdout.isatty()
        self.val_loss: float | None = None
        self._live, self._drawn, self._refreshed = None, [], 0.0

    def block(self, title: str, rows: list[tuple[str, str]]) -> None:
        """A title and rows of label and text; further lines of a text stand below its first."""
        self.print(f"\n{title}")
        for label, text in rows:
            first, *more = text.splitlines() or [""]
            self.print(f"  {label:<11} {first}")
            for line in more:
                self.print(f"  {'':<11} {line}")

    def print(self, text: str) -> None:
        """Prints lines, above the bar when there is one."""
        print(text, flush=True)

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """Shows a step, when it is time to."""
        if self.terminal:
            last = step == self.steps
            if last or time.monotonic() - self._refreshed >= REFRESH_S:
                self._draw(step, metrics)
        elif step == 1 or step % self.log_every == 0 or step == self.steps:
            self.print(self._line(step, metrics))

    def evaluating(self, done: int, total: int) -> None:
        """Shows on a terminal how far an evaluation is, when it takes long enough to wonder."""
        if self.terminal and time.monotonic() - self._refreshed >= REFRESH_S:
            from rich.text import Text

            self._show([*self._drawn, Text(f"     evaluating {done / total:4.0%}", style="dim")])

    def evaluation(self, step: int, loss: float) -> None:
        """Shows the result of an evaluation."""
        self.val_loss = loss
        if self._live is not None:
            self._show(self._drawn)
        self.print(f"step {step}/{self.steps}  val loss {loss:.4f}  perplexity {perplexity(loss):.4g}")

    def close(self) -> None:
        """Takes the bar off, leaving its last state."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _line(self, step: int, metrics: dict[str, float]) -> str:
        """A step in one plain line."""
        loss, *others = self._parts(metrics)
        parts = [loss, f"lr {metrics['train/lr']:.2e}", f"grad norm {metrics['grad/norm']:.3g}", *others]
        if "time/eta_s" in metrics:
            parts.append(f"{duration(metrics['time/eta_s'])} left")
        return f"step {step}/{self.steps}  {step / self.steps:4.0%}  " + "  ".join(parts)

    def _parts(self, metrics: dict[str, float]) -> list[str]:
        """Loss, speed and clipping; speeds are averages as soon as there are any."""

        def speed(name: str) -> float | None:
            return metrics.get(f"{name}_avg", metrics.get(name))

        parts = [f"loss {metrics['train/loss']:.4f}", f"{speed('perf/tokens_per_s'):,.0f} tokens/s"]
        if (mfu := speed("perf/mfu")) is not None:
            parts.append(f"MFU {mfu:.0%} of {self.peak}")
        parts.append(f"clipped {metrics['grad/clip_fraction']:.0%}")
        if metrics.get("train/left_out"):
            parts.append(f"left out {metrics['train/left_out']}")
        if metrics["amp/skipped_steps"]:
            parts.append(f"skipped {metrics['amp/skipped_steps']}")
        if metrics.get("grad/skipped_spikes"):
            parts.append(f"spikes skipped {metrics['grad/skipped_spikes']}")
        return parts

    def _draw(self, step: int, metrics: dict[str, float]) -> None:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        parts = self._parts(metrics)
        left = f"{duration(metrics['time/eta_s'])} left" if "time/eta_s" in metrics else ""
        bar = Table.grid(padding=(0, 1), expand=True)
        bar.add_column(no_wrap=True)
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True)
        bar.add_row(
            Text(f"{step / self.steps:4.0%}", style="bold"),
            ProgressBar(total=self.steps, completed=step),
            Text(f"{step}/{self.steps}  {left}", style="cyan"),
        )
        if self.val_loss is not None:
            parts.insert(1, f"val {self.val_loss:.4f}")
        self._drawn = [bar, Text("     " + " · ".join(parts), style="dim")]
        self._show(self._drawn)

    def _show(self, lines: list) -> None:
        from rich.console import Group
        from rich.live import Live

        if self._live is None:
            # No refreshing thread: it would compete with the training loop for the interpreter.
            self._live = Live(auto_refresh=False)
            self._live.start()
        self._live.update(Group(*lines), refresh=True)
        self._refreshed = time.monotonic()


def duration(seconds: float) -> str:
    """Seconds as 0:42, 3:07, 2:15:00 or 4 d 03:00."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours:02}:{minutes:02}"
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def short(path: Path) -> str:
    """A path as a person would type it here: relative when it lies below the current folder."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative
