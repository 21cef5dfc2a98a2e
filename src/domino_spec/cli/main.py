"""The `domino` command: its subcommands and its entry point."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from domino_spec import __version__
from domino_spec.cli.adapt import adapt
from domino_spec.cli.audit import audit
from domino_spec.cli.bench import bench_app, report
from domino_spec.cli.chat import chat
from domino_spec.cli.data import data_app
from domino_spec.cli.demo import demo
from domino_spec.cli.doctor import doctor
from domino_spec.cli.eval import evaluate
from domino_spec.cli.export import export
from domino_spec.cli.generate import generate
from domino_spec.cli.info import info
from domino_spec.cli.serve import serve
from domino_spec.cli.train import train

# Torch and Transformers are imported inside the commands, so that help comes at once.
app = typer.Typer(
    name="domino",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"domino-spec {__version__}")
        raise typer.Exit


@app.callback()
def domino(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Lossless speculative decoding with Domino drafters."""


for _command in (generate, chat, serve, info, doctor, audit, export, report, demo, train, adapt):
    app.command()(_command)
app.command("eval")(evaluate)
app.add_typer(data_app, name="data")
app.add_typer(bench_app, name="bench")


def main() -> None:
    """Run the command line."""
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a character gets a question mark, not a crash.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    app()
