"""`/library` in a chat without a screen."""

from chatterm.backends.backend import Backend
from chatterm.backends.documents import list_names
from chatterm.commands.library import Add, Open, Remove, library_lines, told
from chatterm.conversation.attachments import working_folder
from chatterm.conversation.document_source import keep_document
from chatterm.conversation.headless import Talk
from chatterm.markdown.lines import line_text
from chatterm.sessions.library import DocumentLibrary, size_text
from models.units import counted


def library_command(argument: str, backend: Backend, talk: Talk, width: int) -> list[str]:
    """Run the command and return the lines to show. Raises EngineError (one line), and then changes nothing."""
    library = DocumentLibrary(talk.store.path if talk.store is not None else None)
    match told(argument):
        case Add(source, name):
            entry, document, remark = keep_document(library, source, name, working_folder())
            tokens = backend.read(document)
            size = size_text(entry) if tokens is None else counted(tokens, "token")
            return list(filter(None, [f"{entry.name} is in the library: {size}.", remark]))
        case Open(names):
            talk.begin_on(library.find(names))
            return [f"A new conversation with {list_names(backend.options.documents)} begins."]
        case Remove(name):
            return [f"{library.remove(name).name} is removed; conversations that began with it keep it."]
    names_now = [document.name for document in backend.options.documents]
    model = backend.info.name if backend.info is not None else ""
    return [line_text(line).rstrip() for line in library_lines(library.entries(), names_now, model, width)]
