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
        parameters: list[inspect.Parameter] = []
        groups: dict[str, tuple[Any, list[str]]] = {}
        for parameter in inspect.signature(function).parameters.values():
            kind: Any = parameter.annotation
            if is_dataclass(parameter.annotation):
                own = inspect.signature(kind).parameters
                groups[parameter.name] = kind, list(own)
                parameters += own.values()
            else:
                parameters.append(parameter)

        def run(**values: Any) -> None:
            for group, (kind, names) in groups.items():
                values[group] = kind(**{name: values.pop(name) for name in names})
            function(**values)

        expanded: Any = run
        expanded.__doc__ = function.__doc__
        expanded.__signature__ = inspect.Signature(
            [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in parameters]
        )
        app.command(name, epilog=epilog)(expanded)

    return register
