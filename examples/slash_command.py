"""Your own slash command, in the chat and in `--inline`, in /help, the palette and the completion.

Run this file like chatterm: `python examples/slash_command.py run smollm2`, then type `/words`.
"""

from chatterm.backends.backend import EngineError
from chatterm.cli.main import main
from chatterm.commands.context import ChatContext
from chatterm.commands.registry import command
from models.units import counted


@command("/words [me|model]", "Count the words of this conversation", aliases=("wc",))
def words(chat: ChatContext, whose: str) -> None:
    """Tell how many words I wrote, the model, or both; `whose` is what is written behind /words."""
    if not chat.path:
        raise EngineError("There are no words to count yet.")
    mine = sum(len(exchange.user.split()) for exchange in chat.path)
    answers = sum(len(exchange.text.split()) for exchange in chat.path)
    count = {"me": mine, "model": answers}.get(whose, mine + answers)
    chat.say(f"{counted(count, 'word')} in {counted(len(chat.path), 'exchange')}.")


if __name__ == "__main__":
    main()
