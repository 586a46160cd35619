"""`chatterm run`: a chat in the terminal, or answers without one."""

import gc
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chatterm.cli import options
from chatterm.cli.library import LibraryOption, find_documents
from chatterm.cli.prompts import checked_prompts, checked_texts
from chatterm.cli.usage import WrongUsage, check_alone, check_output, check_theme

if TYPE_CHECKING:
    from chatterm.backends.backend import Backend, ChatOptions
    from chatterm.settings.settings import Settings


@dataclass(frozen=True, slots=True)
class RunRequest:
    """What a command line of `chatterm run` asks for, besides how the model is loaded and sampled."""

    model: options.AskedModel = None
    question: Annotated[
        list[str] | None,
        typer.Argument(metavar="TEXT", help="Answer this prompt and exit, as with -p.", show_default=False),
    ] = None
    prompt: Annotated[
        list[str] | None,
        typer.Option(
            "-p",
            "--prompt",
            metavar="TEXT",
            help="Answer this prompt and exit; repeat for more turns.",
            show_default=False,
        ),
    ] = None
    continue_last: Annotated[bool, typer.Option("-c", "--continue", help="Continue the latest session.")] = (
        False
    )
    session: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Continue this session, given by id, title or part of the title."),
    ] = None
    save: Annotated[
        bool, typer.Option("--save", help="Save a -p conversation as a session to continue later.")
    ] = False
    parallel: Annotated[
        bool,
        typer.Option("--parallel", help="Answer each -p on its own, all at once, instead of turn by turn."),
    ] = False
    answers: Annotated[
        int,
        typer.Option("-n", "--answers", metavar="N", min=1, max=1000, help="Print N answers to each prompt."),
    ] = 1
    inline: Annotated[
        bool, typer.Option("--inline", help="Chat in plain text, line by line, for pipes and screen readers.")
    ] = False
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print a JSON object per turn: text, reasoning, finish_reason, stats."),
    ] = False
    stats: Annotated[
        bool, typer.Option("--stats", help="Print statistics of each turn on standard error.")
    ] = False
    tools: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="With -p: let the model use these tools in this folder without asking: read, search, fetch; "
            "write, run and MCP servers only with --allow-changes.",
            show_default=False,
        ),
    ] = None
    allow_changes: Annotated[
        bool,
        typer.Option(
            "--allow-changes",
            help="Let tools named by --tools write files, run commands and ask MCP servers.",
        ),
    ] = False
    library: LibraryOption = None
    preset: options.Preset = None
    system: options.System = None
    theme: Annotated[str | None, typer.Option(metavar="NAME", help="The colour theme.")] = None

    @property
    def texts(self) -> list[str]:
        """The prompts of the command line."""
        asked = [" ".join(self.question)] if self.question else []
        return asked + (self.prompt or [])

    @property
    def is_many(self) -> bool:
        """Whether prompts are answered at the same time, or several times."""
        return self.parallel or self.answers > 1

    def check(self) -> None:
        """Raise WrongUsage for options that cannot be combined, and for a theme or a model that there cannot be."""
        check_output()
        check_theme(self.theme)
        options.check_model(self.model)
        has_tools = self.tools is not None or self.allow_changes
        if has_tools and (self.inline or self.is_many or not self.texts):
            raise WrongUsage(
                "--tools is for one conversation with -p; in the chat, /tools switches tools on."
            )
        if self.inline and self.as_json:
            raise WrongUsage("--inline writes plain text; leave out --json.")
        if self.is_many:
            flags = {"--inline": self.inline, "--save": self.save, "--continue": self.continue_last}
            check_alone(self.answers, **flags)
            if self.session is not None:
                raise WrongUsage("--session continues one conversation; leave out --parallel and -n.")
            if not self.parallel and len(self.texts) > 1:
                raise WrongUsage(
                    "-n answers one prompt, or each with --parallel; add --parallel, or use one -p."
                )
        if self.continue_last and self.session is not None:
            raise WrongUsage("--continue and --session cannot be combined; use one of them.")
        if self.library is not None and (self.continue_last or self.session is not None):
            raise WrongUsage("A session keeps the documents that it began with; leave out --library.")

    def prompts(self) -> list[str]:
        """Return the turns to send, piped text included; [] for a chat. Raises WrongUsage."""
        if self.inline:
            return checked_texts(self.texts)
        prompts = checked_prompts(self.texts, each=self.parallel)
        if not prompts:
            if self.is_many:
                raise WrongUsage("--parallel and -n need a prompt; add -p TEXT, or pipe text in.")
            if self.as_json or self.stats:
                raise WrongUsage("--json and --stats need a prompt; add -p TEXT, or pipe text in.")
            if not sys.stdout.isatty():
                raise WrongUsage(
                    "The chat screen needs a terminal; add -p TEXT or pipe text in to get an answer here."
                )
        return prompts

    def answer(
        self,
        backend: "Backend",
        prompts: list[str],
        chosen: "ChatOptions",
        sampling: dict[str, Any],
        settings: "Settings",
    ) -> int:
        """Chat, or answer the prompts; return the exit code. `sampling` is what the command line and the session chose,
        `chosen` has the settings, too. `session` is an id by now."""
        tools, as_json, stats = self.tools, self.as_json, self.stats
        if self.inline:
            from chatterm.cli.inline.chat import run_inline

            first = [f"/tools {tools}", *prompts] if tools is not None else prompts
            return run_inline(
                backend, first=first, stats=stats, sampling=sampling, settings=settings, session=self.session
            )
        if not prompts:
            gc.disable()  # the first frame is drawn sooner; run_app enables it again
            from chatterm.app import run_app
            from chatterm.settings.settings import SessionSettings

            check_theme(settings.screen.theme)
            if self.save:
                settings = replace(settings, sessions=SessionSettings(save=True))
            return run_app(
                backend,
                theme=self.theme,
                settings=settings,
                session=self.session,
                sampling=sampling,
                tools=tools or "",
            )
        if self.is_many:
            from chatterm.cli.parallel import answer_all

            seed = chosen.sampling.get("seed")
            if seed is not None:
                options.checked_sampling({"seed": seed + self.answers - 1})
            names = self.texts if self.parallel else None  # without the piped text
            return answer_all(
                backend, prompts, self.answers, names=names, seed=seed, as_json=as_json, stats=stats
            )
        from chatterm.cli.oneshot import answer

        sampling = dict(chosen.sampling)
        unasked = None
        if tools is not None:
            from chatterm.cli.headless_tools import HeadlessTools

            unasked = HeadlessTools(tools, self.allow_changes, Path.cwd())
        return answer(
            backend,
            prompts,
            session=self.session,
            save=self.save,
            sampling=sampling,
            tools=unasked,
            as_json=as_json,
            stats=stats,
        )


@options.takes(
    options.of_fields(RunRequest), options.SAMPLING, options.FORMAT, options.THINKING, options.MACHINE
)
def run(invocation: typer.Context, **given: Any) -> None:
    """Chat with MODEL; with TEXT, -p or text on standard input, answer and exit.

    Piped text goes before the first -p (with --parallel, before each), separated by a blank line; with --inline, each
    line of it is a message.

    The answer goes to standard output, everything else to standard error.
    """
    request = RunRequest(**{part.name: given[part.name] for part in fields(RunRequest)})
    chosen, decided = options.chat_options(invocation), options.decided(invocation)
    request.check()
    if request.preset is not None:
        chosen, stated, of_preset = options.with_preset(chosen, request.preset, invocation)
        tools = request.tools or ",".join(stated.tools or ()) or None
        request = replace(request, model=request.model or stated.model, tools=tools)
        decided |= of_preset
    if request.allow_changes and request.tools is None:
        raise WrongUsage("--allow-changes applies to --tools; add --tools NAMES.")
    prompts = request.prompts()
    asked_format = given["schema"], given["json_object"], given["regex"]
    if asked_format != (None, False, None):
        from chatterm.cli import constraints

        chosen = replace(chosen, constraint=constraints.parse_constraint(*asked_format))
    if request.library is not None:
        chosen = replace(chosen, documents=find_documents(request.library))
    if request.continue_last or request.session is not None:
        from chatterm.sessions.resume import find_session, resumed

        earlier = find_session(request.session)
        chosen = resumed(chosen, earlier, think="think" in decided, think_cache="think_cache" in decided)
        request = replace(request, model=request.model or earlier.model or None, session=earlier.id)
        decided |= {"system", "think", "think_cache"}
    from chatterm.settings.settings import with_settings
    from models.hub.default import DEFAULT_MODEL

    settings = options.preferences()
    stays = options.parse_keep_alive(given["keep_alive"], settings, given["no_server"])
    sampling = dict(chosen.sampling)
    chosen = with_settings(chosen, settings, decided)
    if request.is_many:
        chosen = replace(chosen, streams=min(len(prompts) * request.answers, options.MOST_STREAMS))
    model = request.model or settings.model.name
    if model is None and not prompts and request.session is None and _is_terminal():
        from chatterm.cli.first_run import first_model

        model = first_model(chosen.device, chosen.dtype)
    name = DEFAULT_MODEL if model is None else model
    with options.answering(name, chosen, given["no_server"], stays, settings.remotes) as backend:
        raise typer.Exit(request.answer(backend, prompts, chosen, sampling, settings))


def _is_terminal() -> bool:
    """Return whether the standard streams are a terminal, so that a person can be asked."""
    return all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr))
