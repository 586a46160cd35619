"""`chatterm mcp`: the MCP servers that a chat may use."""

from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from chatterm.cli.usage import WrongUsage
from chatterm.terminal.sanitize import one_line

mcp_app = typer.Typer(
    help="Add, import, list, test and remove MCP servers, whose tools a chat may use.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Name = Annotated[
    str, typer.Argument(metavar="NAME", help="What the server is called here.", show_default=False)
]


@mcp_app.command("add")
def add(
    name: Name,
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="COMMAND", help="The program and its arguments, after --.", show_default=False
        ),
    ] = None,
    url: Annotated[
        str, typer.Option(metavar="URL", help="The address of a server over HTTP.", show_default=False)
    ] = "",
    env: Annotated[
        list[str] | None,
        typer.Option("--env", metavar="NAME=VALUE", help="A variable for the program; repeat for more."),
    ] = None,
    header: Annotated[
        list[str] | None,
        typer.Option("--header", metavar="NAME=VALUE", help="A header for the address; repeat for more."),
    ] = None,
) -> None:
    """Add a server: chatterm mcp add files -- npx some-server /folder, or with --url."""
    from chatterm.tools.mcp.config import parse_server, read_servers, servers_path, write_servers

    if bool(command) == bool(url):
        raise WrongUsage(
            "A server is either a program, given after --, or an address; give one, or --url URL."
        )
    if (env and url) or (header and command):
        raise WrongUsage("--env goes with a program and --header with --url; leave out the other.")
    path = servers_path()
    known = read_servers(path)
    if any(server.name == name for server in known):
        raise WrongUsage(
            f"There is already a server {one_line(name, 40)}; remove it first, or use another name."
        )
    given = {"command": command[0], "args": command[1:], "env": _pairs(env)} if command else {}
    if url:
        given |= {"url": url, "headers": _pairs(header)}
    made = parse_server(name, given, "chatterm mcp add")
    write_servers(path, [*known, made])
    typer.echo(f"Added {name}; chatterm mcp test {name} tries it, /tools in a chat switches it on.")


@mcp_app.command("import")
def import_servers(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help='A JSON file with "mcpServers".', show_default=False)
    ],
) -> None:
    """Add the servers of another program's file."""
    from chatterm.tools.mcp.config import read_servers, servers_path, write_servers

    if not file.exists():
        raise WrongUsage(f"There is no file {one_line(str(file), 200)}.")
    path = servers_path()
    known = read_servers(path)
    names = {server.name for server in known}
    found = [server for server in read_servers(file) if server.name not in names]
    write_servers(path, [*known, *found])
    typer.echo(f"Added: {', '.join(server.name for server in found) or 'nothing new'}.")


@mcp_app.command("list")
def list_servers() -> None:
    """List the servers."""
    from chatterm.tools.mcp.config import read_servers, servers_path

    servers = read_servers(servers_path())
    if not servers:
        typer.echo("There are no MCP servers yet; chatterm mcp add adds one.")
    width = max((len(server.name) for server in servers), default=0)
    for server in servers:
        typer.echo(f"{server.name:<{width}}  {one_line(server.where, 200)}")


@mcp_app.command("test")
def test(name: Name) -> None:
    """Start a server and list its tools, prompts and resources."""
    from chatterm.settings.settings import SettingsError
    from chatterm.tools.mcp.catalog import keep
    from chatterm.tools.mcp.client import Servers, needed
    from chatterm.tools.mcp.config import read_servers, servers_path
    from models.units import counted

    needed()
    servers = Servers(read_servers(servers_path()))
    try:
        tools = servers.tools(name)
        offers = servers.offers(name)
    finally:
        servers.close()
    with suppress(SettingsError):  # a chat would ask the server again
        keep(name, offers)
    for tool in tools:
        _row("tool", tool.name, tool.description)
    for command, prompt in offers.commands(name).items():
        _row("prompt", f"/{command} {prompt.usage}".rstrip(), prompt.about)
    for resource in offers.resources:
        what = "template" if resource.is_template else "resource"
        _row(what, f"@{name}:{resource.uri}", resource.about or resource.name)
    told = [counted(len(tools), "tool"), counted(len(offers.prompts), "prompt")]
    typer.echo(f"{name} works: {', '.join(told)}, {counted(len(offers.resources), 'resource')}.")


@mcp_app.command("remove")
def remove(name: Name) -> None:
    """Remove a server."""
    from chatterm.tools.mcp.catalog import forget
    from chatterm.tools.mcp.config import read_servers, servers_path, write_servers

    path = servers_path()
    known = read_servers(path)
    left = [server for server in known if server.name != name]
    if len(left) == len(known):
        raise WrongUsage(f"There is no server {one_line(name, 40)}; chatterm mcp list shows all.")
    write_servers(path, left)
    forget(name)
    typer.echo(f"Removed {name}.")


def _row(what: str, name: str, about: str) -> None:
    typer.echo(f"{what:<8}  {one_line(name, 200)}  {one_line(about, 120)}".rstrip())


def _pairs(given: list[str] | None) -> dict[str, str]:
    """Parse NAME=VALUE options into a dictionary. Raises WrongUsage."""
    made = {}
    for text in given or []:
        name, found, value = text.partition("=")
        if not name or not found:
            raise WrongUsage(f"{one_line(text, 40)!r} must be written NAME=VALUE.")
        made[name] = value
    return made
