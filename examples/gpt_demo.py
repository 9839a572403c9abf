"""The demo's order of events on one rank: check, compare, train, report.

Knows nothing of the command line. All ranks do the same; only rank 0 shows anything.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch.distributed as dist
from gpt_data import load_corpus
from gpt_errors import UsageError
from gpt_memory import Cost, Measuring, can_measure
from gpt_model import generate
from gpt_report import (
    Result,
    TrainingDisplay,
    costs_table,
    result_table,
    sample_panel,
    save_picture,
)
from gpt_training import TWO_AXES, Recipe, Trainer, mean_over_ranks
from rich.console import Console

from polyshard import (
    BackendError,
    PlacementError,
    UnsupportedError,
    available_backends,
    unsharded,
)

COMPARED = ("torch-ddp", "ddp", "zero1", "zero2", "zero3")
PROMPT, SAMPLE_BYTES = b"def ", 240


def run(recipe: Recipe, *, picture: Path, with_comparison: bool) -> None:
    """The whole demo on this rank, under torchrun or, without it, in a world of one.

    Raises UsageError before a step is taken: unknown backend, strategy that is not offered here.
    """
    check_backend(recipe.backend)
    if "RANK" not in os.environ:
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        os.environ.update(address, RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    dist.init_process_group("gloo")
    console = Console(quiet=dist.get_rank() != 0)
    corpus = load_corpus()
    try:
        # Built before the comparison: what cannot be had is said before a minute is spent.
        trainer = Trainer(recipe, corpus)
    except (BackendError, PlacementError, UnsupportedError) as error:
        raise UsageError(str(error)) from error
    costs = compare(console, recipe) if with_comparison else []
    result = train(console, trainer)
    if dist.get_rank() == 0:
        save_picture(picture, result, costs)
        if costs:
            console.print(costs_table(costs, recipe.strategy))
        console.print(result_table(result))
        console.print(sample_panel(result))
        console.print(f"Picture: {picture}", highlight=False, soft_wrap=True)
    dist.destroy_process_group()


def check_backend(name: str | None) -> None:
    """Raises UsageError for a name that no installed backend has."""
    installed = [status.name for status in available_backends()]
    if name is not None and name not in installed:
        known = ", ".join(installed) or "none"
        raise UsageError(f"unknown backend {name!r}; the installed ones are {known}.")


def compare(console: Console, recipe: Recipe) -> list[Cost]:
    """The cost of every strategy that fits the mesh; empty where memory is not told."""
    if not can_measure():
        console.print("No comparison: this system does not tell a process its memory.")
        return []
    costs = []
    with Measuring(recipe) as measuring:
        for strategy in (*COMPARED, *(TWO_AXES if len(recipe.mesh) == 2 else ())):
            with console.status(f"measuring the cost of {strategy}"):
                costs.append(measuring.cost_of(strategy))
            if not console.is_terminal:
                console.print(f"measured the cost of {strategy}")
    return costs


def train(console: Console, trainer: Trainer) -> Result:
    """All steps, then the loss on unseen files and a sample."""
    recipe = trainer.recipe
    display = TrainingDisplay(console, recipe.steps)
    losses: list[float] = []
    start = time.perf_counter()
    with display.shown():
        for step in range(1, recipe.steps + 1):
            losses.append(trainer.step())
            seconds = time.perf_counter() - start
            speed = step * trainer.bytes_per_step / seconds
            display.update(step, losses[-1], speed, trainer.sent_bytes())
    sent_bytes = trainer.sent_bytes() // recipe.steps
    validation_loss = trainer.validate()
    with unsharded(trainer.model, writeback=False):  # whole once, not anew for every byte
        sample = generate(trainer.model, PROMPT, SAMPLE_BYTES, context=recipe.model.context)
    return Result(
        strategy=recipe.strategy,
        transport=trainer.transport,
        ranks=dist.get_world_size(),
        num_parameters=trainer.num_parameters,
        losses=mean_over_ranks(losses),
        validation_loss=validation_loss,
        seconds=seconds,
        tokens_per_second=speed,
        sent_bytes_per_step=sent_bytes,
        sample=sample,
    )
