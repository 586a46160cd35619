"""`chatterm config`: show, edit and set the settings."""

import sys
from typing import Annotated

import typer

config_app = typer.Typer(
    help="Show or change the settings, which are kept in one TOML file.",
    invoke_without_command=True,
    no_args_is_help=False,
)

_KEY = "A setting, as TABLE.NAME: screen.theme, sampling.temperature, ..."
KeyArgument = Annotated[str, typer.Argument(metavar="KEY", help=_KEY, show_default=False)]


@config_app.callback()
def show(context: typer.Context) -> None:
    """Print all settings and what they mean. The output is itself a settings file."""
    if context.invoked_subcommand is None:
        from chatterm.settings.paths import config_path
        from chatterm.settings.reading import parse_settings
        from chatterm.settings.text import described
        from chatterm.settings.toml import read_source

        path = config_path()
        source = read_source(path)
        print(described(parse_settings(source, path), path, exists=bool(source)), end="")


@config_app.command()
def path() -> None:
    """Print the path of the settings file."""
    from chatterm.settings.paths import config_path

    print(config_path())


@config_app.command()
def edit() -> None:
    """Open the settings file in $VISUAL or $EDITOR; it is checked afterwards."""
    from chatterm.settings.file import write
    from chatterm.settings.paths import config_path
    from chatterm.settings.reading import load_settings
    from chatterm.settings.settings import Settings
    from chatterm.settings.text import described
    from chatterm.terminal.editor import edit_file

    place = config_path()
    if not place.exists():
        write(place, described(Settings(), place, exists=False))
    edit_file(place)
    load_settings(place)
    print(f"{place} is valid.", file=sys.stderr)


@config_app.command("set", context_settings={"ignore_unknown_options": True})  # -1 is a value
def set_value(
    key: KeyArgument,
    value: Annotated[list[str], typer.Argument(metavar="VALUE", help="The new value.", show_default=False)],
) -> None:
    """Set KEY to VALUE in the file; everything else in it is left unchanged."""
    from chatterm.cli.options import check_utf8
    from chatterm.settings.file import store
    from chatterm.settings.paths import config_path
    from chatterm.settings.reading import check
    from chatterm.settings.text import find, parsed

    check_utf8(" ".join(value))
    table, name = find(key)
    chosen = parsed(table, name, value)
    check(table, name, chosen)
    store(config_path(), table, name, chosen)


@config_app.command()
def unset(key: KeyArgument) -> None:
    """Remove KEY from the file, so that its default applies again."""
    from chatterm.settings.file import store
    from chatterm.settings.paths import config_path
    from chatterm.settings.text import find

    store(config_path(), *find(key), None)
