"""The command line: `backhaul demo`, `backhaul show` and `backhaul schema`.

It parses, prints and sets the exit code; the work is done elsewhere.  Exit codes: 0 when all
went well, 1 when the demo found a fault, 2 when the command or a file in it was wrong.
"""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.text import Text

import backhaul
from backhaul.errors import BackhaulError, PlanError
from backhaul.records import Plan
from backhaul.report import print_report
from backhaul.serial import json_schema

__all__ = ["main"]

app = typer.Typer(
    name="backhaul",
    help="Train models that do not fit: plan, offload and compress saved activations, exactly.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Run the command line of this process."""
    app()


def _print_version(is_asked: bool) -> None:
    if is_asked:
        Console().print(Text(f"backhaul {backhaul.__version__}"))
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Train models that do not fit: plan, offload and compress saved activations, exactly."""


@app.command()
def demo(
    model: Annotated[
        list[str] | None,
        typer.Option(help="Classifier of torchvision, repeatable; by default resnet50, vgg19."),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Photographs in a step.")] = 8,
    steps: Annotated[int, typer.Option(min=5, help="Timed steps of each kind.")] = 5,
    budget: Annotated[
        float,
        typer.Option(min=0.01, max=1.0, help="Fraction of the saved activations that may stay."),
    ] = 0.5,
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="Where to train.")] = "cpu",
    json: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Write every figure to this file.")
    ] = None,
) -> None:
    """Train on real photographs, eager and with backhaul, side by side."""
    # Here, since it loads torch, which takes seconds that the other commands need not wait.
    from backhaul.demo import DemoError, Settings, run_demo

    settings = Settings(
        models=tuple(model or ("resnet50", "vgg19")),
        batch_size=batch,
        step_count=steps,
        budget_fraction=budget,
        device=device,
    )
    try:
        is_good = run_demo(settings, Console(), json)
    except (DemoError, BackhaulError, OSError) as error:
        raise _refusal(error) from error
    if not is_good:
        raise typer.Exit(1)


@app.command()
def show(
    plan: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="A saved plan.")],
) -> None:
    """Print what a saved plan does, and why."""
    try:
        loaded = Plan.load(plan)
    except (PlanError, OSError) as error:
        raise _refusal(error) from error
    print_report(loaded)


@app.command()
def schema() -> None:
    """Print the JSON Schema of plan files."""
    typer.echo(json_module.dumps(json_schema(Plan), indent=1))


def _refusal(error: Exception) -> typer.Exit:
    """Print an error, literally, and return the exit that follows."""
    Console(stderr=True).print(Text.assemble(("Error: ", "bold red"), str(error)))
    return typer.Exit(2)
