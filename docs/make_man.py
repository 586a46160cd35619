"""Generate the manual page from the command line's own help: `python docs/make_man.py > docs/chatterm.1`."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from chatterm.cli.main import app
from chatterm.cli.usage import command_line

ENVIRONMENT = {
    "CHATTERM_CONFIG": "The settings file, instead of the user's.",
    "CHATTERM_DATA": "The folder of the conversations, instead of the user's.",
    "CHATTERM_CACHE": "The folder of the models from the package index, instead of the user's.",
    "CHATTERM_RUNTIME": "The folder of the server's socket, instead of the login session's.",
    "CHATTERM_DEBUG": "If set to 1, a failure is followed by its traceback.",
    "HF_HOME, HF_TOKEN, HF_ENDPOINT": "The cache, the token and the address of the Hugging Face Hub.",
    "NO_COLOR": "If set to anything, nothing is coloured.",
}
STATUS = {
    "0": "All went well.",
    "1": "Something failed.",
    "2": "Wrong usage.",
    "3": "A tool was refused.",
    "130": "Stopped with Ctrl+C.",
}
EXAMPLES = {
    "chatterm": "Open the chat with the default model.",
    "chatterm run qwen3:0.6b -p 'Why is the sky blue?'": "Answer once and exit.",
    "chatterm run -p 'Name a river' -p 'Name a lake' --parallel": "Answer two prompts at once.",
    "chatterm batch qwen3:0.6b in.jsonl -o out.jsonl": "Answer a file of requests, or continue where that was stopped.",
    "chatterm serve qwen3:0.6b": "Keep a model loaded for chatterm run and for other programs.",
    "chatterm --install-completion": "Complete commands, options and models with Tab in this shell from now on.",
}


def roff(text: str) -> str:
    """Escape `text` for troff, so that it is printed as it is."""
    text = re.sub(r"\s+", " ", text).strip().replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{text}" if text[:1] in (".", "'") else text


def bold(text: str) -> str:
    return f"\\fB{roff(text)}\\fR"


def entry(term: str, text: str) -> Iterator[str]:
    """Yield the lines of a term with its description indented below it."""
    yield from (".TP", term, roff(text))


def usage(param: Any, context: Any) -> str:
    """Return how an option or an argument is written."""
    if param.param_type_name == "argument":
        name = f"\\fI{roff(param.metavar or param.name.upper())}\\fR"
        return name if param.required else f"[{name}]"
    names, value = re.fullmatch(r"(.*?)( (?![-/]).*)?", param.get_help_record(context)[0]).groups()
    written = ", ".join(bold(name) for name in re.split(r", | / ", names))
    return f"{written} \\fI{roff(value)}\\fR" if value and not param.is_flag else written


def command_lines(name: str, command: Any) -> Iterator[str]:
    """Yield the lines of a section for `command` and of those for its subcommands."""
    context = command.make_context(name, [], resilient_parsing=True)
    params = [param for param in command.get_params(context) if not getattr(param, "hidden", False)]
    arguments = " ".join(usage(param, context) for param in params if param.param_type_name == "argument")
    yield f".SS {bold(name)} {arguments}".rstrip()
    yield roff(command.help or "")
    for param in params:
        if getattr(param, "help", None):
            yield from entry(usage(param, context), param.help)
    for below in getattr(command, "commands", {}).values():
        yield from command_lines(f"{name} {below.name}", below)


def page() -> str:
    """Return the whole page in troff with the man macros."""
    command = command_line(app)
    lines = ['.TH CHATTERM 1 "" "chatterm" "User Commands"', ".SH NAME"]
    lines += [f"chatterm \\- {roff('chat with a language model in the terminal')}"]
    lines += [".SH SYNOPSIS", f"{bold('chatterm')} [\\fIOPTIONS\\fR] \\fICOMMAND\\fR [\\fIARGS\\fR]"]
    lines += [".SH DESCRIPTION", roff(command.help or "")]
    lines += [".SH COMMANDS AND OPTIONS", *command_lines("chatterm", command)]
    for title, entries in {
        "EXAMPLES": EXAMPLES,
        "ENVIRONMENT": ENVIRONMENT,
        "EXIT STATUS": STATUS,
    }.items():
        lines.append(f".SH {title}")
        for term, text in entries.items():
            lines += entry(bold(term), text)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
