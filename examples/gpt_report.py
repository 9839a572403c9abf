"""What people see: progress while training, tables at the end and a picture. Only rank 0 uses it.

Knows numbers and names; no model, no process group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gpt_memory import CAPTION, Cost
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

MEGABYTE = 1e6
SMOOTHING_STEPS = 10
PLAIN = "torch-ddp"


@dataclass(frozen=True)
class Result:
    """One training run. Losses in nats per byte, means over the ranks; sent bytes per rank."""

    strategy: str
    transport: str
    ranks: int
    num_parameters: int
    losses: Sequence[float]
    validation_loss: float
    seconds: float
    tokens_per_second: float
    sent_bytes_per_step: int
    sample: bytes


class TrainingDisplay:
    """A progress bar on a terminal; elsewhere a line now and then."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console = console
        self._steps = steps
        self._every = max(1, steps // 10)
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TextColumn("{task.fields[speed]} tokens/s"),
            TextColumn("{task.fields[sent]} MB sent per rank"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("", total=steps, loss="-", speed="-", sent="-")

    @contextmanager
    def shown(self) -> Iterator[None]:
        """On the screen inside; taken down, with the cursor back, however it is left."""
        with self._progress:
            yield

    def update(self, step: int, loss: float, tokens_per_second: float, sent_bytes: int) -> None:
        """``step`` of the steps are done; ``loss`` and ``sent_bytes`` are this rank's."""
        loss_text, speed, sent = (
            f"{loss:.3f}",
            f"{tokens_per_second:,.0f}",
            f"{sent_bytes / MEGABYTE:,.0f}",
        )
        self._progress.update(self._task, completed=step, loss=loss_text, speed=speed, sent=sent)
        if not self._console.is_terminal and (step in (1, self._steps) or step % self._every == 0):
            self._console.print(
                f"step {step:>4}/{self._steps}  loss {loss_text}  "
                f"{speed} tokens/s  {sent} MB sent per rank",
                highlight=False,
                soft_wrap=True,
            )


def costs_table(costs: Sequence[Cost], strategy: str) -> Table:
    """Memory and traffic by strategy, with the change against plain DDP."""
    table = Table(title="Cost of a strategy, MB per rank", caption=CAPTION, caption_justify="left")
    table.add_column("strategy")
    for heading in ("memory between steps", "memory at peak", "sent per step"):
        table.add_column(heading, justify="right")
    plain = next(cost for cost in costs if cost.strategy == PLAIN)
    for cost in costs:
        table.add_row(
            label(cost.strategy),
            _against(plain.between_steps_bytes, cost.between_steps_bytes),
            _against(plain.peak_bytes, cost.peak_bytes),
            _against(plain.sent_bytes, cost.sent_bytes),
            style="bold" if cost.strategy == strategy else None,
        )
    return table


def label(strategy: str) -> str:
    """What people call it."""
    return "plain DDP" if strategy == PLAIN else strategy


def _against(plain: int, value: int) -> str:
    text = f"{value / MEGABYTE:.1f}"
    # One rank sends nothing: no change can be told from that.
    change = round(100 * (value / plain - 1)) if plain else 0
    return f"{text} ({change:+4} %)" if change else text


def result_table(result: Result) -> Table:
    """Loss, speed and traffic of the run."""
    table = Table(title=f"Training with {label(result.strategy)}", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    rows = {
        "parameters": f"{result.num_parameters / 1e6:.2f} million",
        "ranks": f"{result.ranks} over {result.transport}",
        "loss at the first step": f"{result.losses[0]:.3f} nats per byte",
        "loss at the last step": f"{result.losses[-1]:.3f} nats per byte",
        "loss on unseen files": f"{result.validation_loss:.3f} nats per byte",
        "speed": f"{result.tokens_per_second:,.0f} tokens/s",
        "time for all steps": f"{result.seconds:.1f} s",
        "sent per rank and step": f"{result.sent_bytes_per_step / MEGABYTE:.1f} MB",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def sample_panel(result: Result) -> Panel:
    """The generated code; whatever cannot be printed shows as a replacement character."""
    text = result.sample.decode("utf-8", errors="replace")
    printable = "".join(
        c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text
    )
    return Panel(Text(printable), title="Code it writes", title_align="left")


def save_picture(path: Path, result: Result, costs: Sequence[Cost]) -> None:
    """Draw the loss curve and, where they were measured, the costs; ``path`` ends in .png.

    Raises OSError if it cannot be written.
    """
    figure = Figure(figsize=(12 if costs else 7, 4.8), layout="constrained")
    columns = figure.subplots(1, 2 if costs else 1, squeeze=False)[0]
    figure.suptitle(
        f"GPT of {result.num_parameters / 1e6:.1f} million parameters, {result.ranks} ranks over "
        f"{result.transport}"
    )
    _draw_losses(columns[0], result)
    if costs:
        _draw_memory(columns[1], costs)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _draw_losses(axes: Axes, result: Result) -> None:
    steps = range(1, len(result.losses) + 1)
    axes.plot(steps, result.losses, color="tab:blue", alpha=0.3, linewidth=1, label="each step")
    axes.plot(
        steps,
        _smoothed(result.losses),
        color="tab:blue",
        linewidth=2,
        label=f"mean of the last {SMOOTHING_STEPS}",
    )
    axes.plot(
        [len(result.losses)],
        [result.validation_loss],
        "o",
        color="tab:red",
        label="unseen files, at the end",
        clip_on=False,
    )
    axes.set(
        title=f"Training with {label(result.strategy)}",
        xlabel="step",
        ylabel="loss (nats per byte)",
    )
    axes.set_xlim(left=1)
    axes.grid(alpha=0.3)
    axes.legend()


def _smoothed(losses: Sequence[float]) -> list[float]:
    windows = [losses[max(0, end - SMOOTHING_STEPS) : end] for end in range(1, len(losses) + 1)]
    return [sum(window) / len(window) for window in windows]


def _draw_memory(axes: Axes, costs: Sequence[Cost]) -> None:
    width = 0.4
    between = [cost.between_steps_bytes / MEGABYTE for cost in costs]
    peak = [cost.peak_bytes / MEGABYTE for cost in costs]
    places = range(len(costs))
    left = axes.bar(
        [place - width / 2 for place in places],
        between,
        width,
        color="tab:blue",
        label="between steps",
    )
    right = axes.bar(
        [place + width / 2 for place in places], peak, width, color="tab:orange", label="at peak"
    )
    for bars in (left, right):
        axes.bar_label(bars, fmt="%.0f", padding=2)
    axes.set_xticks(list(places), [label(cost.strategy) for cost in costs])
    axes.set(
        title="Memory per rank by strategy",
        ylabel="MB above the process without model",
    )
    # Room for the legend above the highest label.
    axes.set_ylim(0, 1.25 * max(*between, *peak))
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.legend(loc="upper right", ncols=2)
