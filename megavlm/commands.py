"""Commands of typer: options that are fields of a dataclass, and --version."""

import inspect
from collections.abc import Callable
from dataclasses import is_dataclass
from typing import Annotated, Any

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


def command(
    app: typer.Typer, name: str, *, epilog: str | None = None
) -> Callable[[Callable[..., None]], None]:
    """Register a function as a command of `app`. A parameter whose type is a dataclass becomes one
    option per field.
    """

    def register(function: Callable[..., None]) -> None:
        given = inspect.signature(function).parameters
        groups: dict[str, Any] = {
            name: one.annotation for name, one in given.items() if is_dataclass(one.annotation)
        }
        fields = {name: inspect.signature(group).parameters for name, group in groups.items()}

        def run(**values: Any) -> None:
            for name, group in groups.items():
                values[name] = group(**{field: values.pop(field) for field in fields[name]})
            function(**values)

        flat = [one for name in given for one in fields.get(name, {name: given[name]}).values()]
        run.__doc__ = function.__doc__
        run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in flat]
        )
        app.command(name, epilog=epilog)(run)

    return register
