"""Commands for the model and the settings of a conversation: presets, system prompt, sampling."""

from functools import partial
from typing import TYPE_CHECKING

from chatterm.backends.backend import ConversationSettings, EngineError
from chatterm.commands.context import ChatContext
from chatterm.commands.registry import command, screen_command
from chatterm.commands.reports import LOADING, sampling_lines
from chatterm.commands.sampling import answer_to, in_force, is_choice, suggested, value_text
from chatterm.markdown.lines import Line, wrap
from chatterm.terminal.sanitize import cleaned, one_line

if TYPE_CHECKING:
    from chatterm.screens.chat.chat import Chat
    from chatterm.settings.presets import SavedPreset


@screen_command("/model [NAME]", "Choose a model, or switch to NAME", {"f5": ""}, ("models",))
def model(chat: "Chat", name: str) -> None:
    chat.models.use(name)


def _preset_words() -> list[str]:
    from chatterm.settings.presets import WORDS, preset_names

    return [*preset_names(), *(f"{word} " for word in WORDS)]


@screen_command(
    "/preset [NAME|save NAME]",
    "List presets, use one, or save these settings as one",
    {"alt+d": ""},
    suggest=_preset_words,
)
def preset(chat: "Chat", text: str) -> None:
    from chatterm.settings.presets import WORDS, SavedPreset, load_preset, preset_names, save_preset

    word, _, name = text.partition(" ")
    if not text:
        chat.report("preset", "Presets", partial(_preset_lines, preset_names()))
    elif word in WORDS:
        if not name.strip():
            raise EngineError(f"/preset {word} needs a name.")
        backend = chat.backend
        present = SavedPreset(
            backend.model,
            backend.options.system,
            backend.options.think,
            chat.tooling.said,
            dict(chat.sampling),
        )
        save = partial(save_preset, name.strip(), present, replace=word == "replace")
        chat.in_thread(save, lambda path: chat.say(f"Saved to {path}."))
    else:
        chat.in_thread(partial(load_preset, text), partial(_ask_to_use, chat, text))


def _ask_to_use(chat: "Chat", name: str, preset: "SavedPreset") -> None:
    """Apply a preset; ask first if its model would end a running answer."""
    use = partial(use_preset, chat, name, preset)
    if preset.model is not None and preset.model != chat.backend.model:
        chat.sessions.ask_to_stop(use, f"switch to {one_line(preset.model, 60)}")
    else:
        use()


def use_preset(chat: ChatContext, name: str, preset: "SavedPreset") -> None:
    """Apply a preset to this conversation from the next message on."""
    other_model = preset.model is not None and preset.model != chat.backend.model
    if other_model and chat.is_loading:
        raise EngineError(LOADING)
    chosen = ConversationSettings()
    if preset.system is not None:
        chosen["system"] = preset.system
    if preset.think is not None:
        chosen["think"] = preset.think
    if preset.sampling:
        chosen["sampling"] = dict(preset.sampling)
    if chosen:
        chat.configure(**chosen)
    if other_model:
        chat.switch_model(preset.model or "")
    chat.say(f"The preset {name} applies from the next message on.")
    if preset.tools is not None:
        chat.use_tools(" ".join(preset.tools) or "off")


def _preset_lines(names: list[str], width: int) -> list[Line]:
    from chatterm.settings.presets import load_preset, presets_folder

    ways = (
        f"/preset NAME uses one, /preset save NAME saves this conversation's settings in {presets_folder()}."
    )
    lines = [*wrap([(ways, "muted")], width), []]
    for name in names:
        try:
            found = load_preset(name)
        except EngineError as error:
            lines += wrap([(f"{name}  ", "accent"), (str(error), "error")], width)
            continue
        parts = [part for part in (found.model, f"thinking {found.think}" if found.think else "") if part]
        parts += [f"tools {', '.join(found.tools) or 'off'}"] if found.tools is not None else []
        parts += [f"{key} {value_text(value)}" for key, value in found.sampling.items()]
        parts += [one_line(found.system, 80)] if found.system else []
        lines += wrap([(f"{name}  ", "accent"), (" · ".join(parts), "")], width)
    return lines if names else [*lines, [("There are none yet.", "")]]


@command("/system [TEXT|none]", "Show or set the system prompt", {"alt+s": None})
def system(chat: ChatContext, text: str) -> None:
    if text:
        system = None if text == "none" else text
        chat.configure(system=system)
        said = "The new system prompt applies" if system else "No system prompt is used"
        chat.say(f"{said} from the next message on.")
    elif now := chat.backend.options.system:
        chat.report("system", "System prompt", partial(_text_lines, now))
    else:
        chat.say("There is no system prompt; /system TEXT sets one.")


def _text_lines(text: str, width: int) -> list[Line]:
    return [line for row in cleaned(text).split("\n") for line in wrap([(row, "")], width)]


@command(
    "/set [NAME [VALUE]]",
    "Show or change this conversation's sampling settings",
    {"f9": ""},
    suggest=suggested,
    accepts=is_choice,
)
def set_sampling(chat: ChatContext, text: str) -> None:
    settings = chat.settings.sampling
    changed, lines = answer_to(text, chat.sampling, settings, chat.info)
    if not text:
        found = in_force(chat.sampling, settings, chat.info).values()
        chat.report("set", "Sampling", partial(sampling_lines, found), plain=lines)
        return
    if changed is not None:
        chat.configure(sampling=changed)
    chat.say(lines[0])
