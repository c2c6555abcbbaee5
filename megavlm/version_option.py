"""The option --version of a command."""

from typing import Annotated

import typer

from megavlm import __version__


def add_version(app: typer.Typer, name: str) -> None:
    """Add --version to `app`, which prints the name of the command and the version of megavlm."""

    def show(is_asked: bool) -> None:
        if is_asked:
            typer.echo(f"{name} {__version__}")
            raise typer.Exit

    option = typer.Option(
        "--version", callback=show, is_eager=True, help="Print the version and exit."
    )

    @app.callback()
    def options(_: Annotated[bool, option] = False) -> None:
        """Declare the options of the command itself."""
