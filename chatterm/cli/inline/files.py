"""A person's own files, presets and prompts, in a chat without a screen."""

from chatterm.backends.backend import Backend
from chatterm.cli.inline.tools import InlineTools
from chatterm.commands.registry import server_prompt
from chatterm.conversation.attachments import attach, working_folder
from chatterm.conversation.headless import Talk
from chatterm.settings.presets import SavedPreset, load_preset
from chatterm.settings.prompts import filled_in, prompt_text, prompts_folder
from chatterm.settings.settings import SamplingSettings


def prompt_message(name: str, argument: str, tools: InlineTools) -> str:
    """Return the message of a prompt, a person's own or an MCP server's. Raises EngineError (one line)."""
    if (found := server_prompt(f"/{name} ")) is not None:
        return tools.session.prompt(found[0], name, argument)
    text = filled_in(name, prompt_text(prompts_folder() / f"{name}.md"), argument)
    attached = attach(text, working_folder())
    return "\n\n".join([attached.message, *attached.blocks])


def use_preset(name: str, backend: Backend, talk: Talk, settings: SamplingSettings) -> SavedPreset:
    """Apply a preset to the conversation, except for its model and tools, and return it.

    Raises SettingsError (one line).
    """
    preset = load_preset(name)
    if preset.system is not None:
        backend.configure({"system": preset.system})
        talk.update(system=preset.system)
    if preset.think is not None:
        backend.configure({"think": preset.think})
        talk.update(think=preset.think)
    if preset.sampling:
        talk.sampling = dict(preset.sampling)
        backend.configure({"sampling": {**settings.given(), **preset.sampling}})
        talk.update(sampling=talk.sampling)
    return preset
