"""Commands for preferences: system prompt, thinking, sampling, presets, theme, the settings file."""

from functools import partial
from typing import TYPE_CHECKING

from chatterm.backends.backend import Backend, EngineError
from chatterm.commands.reports import no_thinking, thinking_text
from chatterm.commands.sampling import value_text
from chatterm.conversation.entries import AnswerEntry
from chatterm.markdown.lines import Line, wrap
from chatterm.screens.chat.command_part import LOADING, CommandPart
from chatterm.screens.chat.tool_runner import ToolRunner
from chatterm.screens.themed_app import ThemedApp
from chatterm.settings.reading import load_settings
from chatterm.settings.settings import Settings
from chatterm.terminal.sanitize import cleaned, one_line

if TYPE_CHECKING:
    from chatterm.settings.presets import SavedPreset


class Preferences(CommandPart):
    tooling: ToolRunner

    # --- this conversation ---

    def system(self, text: str) -> None:
        screen = self.screen
        if text:
            system = None if text == "none" else text
            screen.submit(Backend.configure, {"system": system})
            screen.keeper.update(system=system)
            said = "The new system prompt applies" if system else "No system prompt is used"
            screen.say(f"{said} from the next message on.")
        elif now := screen.backend.options.system:
            self.report("system", "System prompt", partial(_text_lines, now))
        else:
            screen.say("There is no system prompt; /system TEXT sets one.")

    def think(self, mode: str) -> None:
        screen = self.screen
        match mode:
            case "on" if why := no_thinking(screen.info):
                raise EngineError(why)
            case "on" | "off" | "auto":
                screen.submit(Backend.configure, {"think": mode})
                screen.keeper.update(think=mode)
                screen.say(thinking_text(mode, screen.info))
            case "show" | "hide":
                self.show_thinking(mode == "show")
                screen.say(
                    "Thinking is always expanded." if mode == "show" else "Thinking is always collapsed."
                )
            case _:
                screen.say(thinking_text(screen.backend.options.think, screen.info))

    def show_thinking(self, opened: bool | None) -> None:
        """Expand or collapse the thinking of every answer; None expands it only while it runs."""
        self.conversation.show_thinking = opened
        for entry in self.transcript.entries:
            if isinstance(entry, AnswerEntry):
                entry.show_thinking(opened)
        self.transcript.update()

    def set_sampling(self, text: str) -> None:
        from chatterm.commands.sampling import answer_to, in_force

        chosen, settings = self.conversation.sampling, self.screen.settings.sampling
        changed, lines = answer_to(text, chosen, settings, self.screen.info)
        if not text:
            from chatterm.commands.reports import sampling_lines

            found = in_force(chosen, settings, self.screen.info).values()
            self.report("set", "Sampling", partial(sampling_lines, found))
            return
        if changed is not None:
            self.use_sampling(changed)
            self.screen.keeper.update(sampling=changed)
        self.screen.say(lines[0])

    def preset(self, text: str) -> None:
        from chatterm.settings.presets import WORDS, load_preset, preset_names, save_preset

        word, _, name = text.partition(" ")
        if not text:
            self.report("preset", "Presets", partial(_preset_lines, preset_names()))
        elif word in WORDS:
            if not name.strip():
                raise EngineError(f"/preset {word} needs a name.")
            save = partial(save_preset, name.strip(), self._present(), replace=word == "replace")
            self.screen.in_thread(save, lambda path: self.screen.say(f"Saved to {path}."))
        else:
            self.screen.in_thread(partial(load_preset, text), partial(self._use_preset, text))

    def _present(self) -> "SavedPreset":
        from chatterm.settings.presets import SavedPreset

        backend = self.screen.backend
        sampling = dict(self.conversation.sampling)
        return SavedPreset(
            backend.model, backend.options.system, backend.options.think, self.tooling.said, sampling
        )

    def _use_preset(self, name: str, preset: "SavedPreset") -> None:
        """Apply a preset to this conversation from the next message on."""
        screen = self.screen
        other_model = preset.model is not None and preset.model != screen.backend.model
        if other_model and screen.is_loading:
            raise EngineError(LOADING)
        if preset.system is not None:
            screen.submit(Backend.configure, {"system": preset.system})
            screen.keeper.update(system=preset.system)
        if preset.think is not None:
            screen.submit(Backend.configure, {"think": preset.think})
            screen.keeper.update(think=preset.think)
        if preset.sampling:
            self.use_sampling(dict(preset.sampling))
            screen.keeper.update(sampling=dict(preset.sampling))
        if other_model:
            screen.switch_model(preset.model or "")
        screen.say(f"The preset {name} applies from the next message on.")
        if preset.tools is not None:
            wanted = " ".join(preset.tools) or "off"
            if screen.is_loading:
                self.tooling.wanted = wanted
            else:
                self._run("tools", wanted)

    # --- all chats ---

    def theme(self, name: str) -> None:
        app = self.screen.app
        assert isinstance(app, ThemedApp)
        if name:
            self._keep_theme(name, app.use_theme(name))
            return
        from chatterm.screens.theme import ThemePicker

        app.push_screen(ThemePicker(app.chosen_theme), lambda taken: self._keep_theme(taken, ""))

    def _keep_theme(self, name: str | None, note: str) -> None:
        """Save the theme as the default of new chats; None saves nothing."""
        if name is None:
            return
        from chatterm.settings.file import store
        from chatterm.settings.paths import config_path

        path = config_path()
        said = f"The theme is {name}, also for new chats (saved in {path}). {note}"
        self.screen.in_thread(
            partial(store, path, "screen", "theme", name), lambda _: self.screen.say(said.strip())
        )

    def settings(self) -> None:
        from chatterm.screens.settings import SettingsScreen
        from chatterm.settings.paths import config_path

        path = config_path()

        def show(settings: Settings) -> None:
            self.screen.app.push_screen(SettingsScreen(settings, path, self.apply))

        self.screen.in_thread(partial(load_settings, path), show)

    def apply(self, settings: Settings, table: str, name: str) -> None:
        """Apply a changed setting if it can take effect at once. Raise SettingsError if it is invalid."""
        screen = self.screen
        screen.settings = settings
        match table, name:
            case "screen", "theme":
                assert isinstance(screen.app, ThemedApp)
                screen.app.use_theme(settings.screen.theme)
            case "screen", "panel":
                screen.show_panel(settings.screen.panel_wanted)
            case "screen", "thinking":
                self.show_thinking(settings.screen.thinking_open)
            case "screen", "tint":
                screen.set_class(settings.screen.tint, "-tinted")
            case "sampling", _:
                self.use_sampling(self.conversation.sampling)


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


def _text_lines(text: str, width: int) -> list[Line]:
    return [line for row in cleaned(text).split("\n") for line in wrap([(row, "")], width)]
