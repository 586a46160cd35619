"""/library: list, add and remove documents, begin a conversation with some, and read them ahead."""

from collections.abc import Sequence
from functools import cached_property, partial

from chatterm.backends.backend import Backend, CachedChunk, Document, EngineError, Figures
from chatterm.backends.documents import list_names
from chatterm.commands.library import Add, Open, Remove, told
from chatterm.conversation.attachments import working_folder
from chatterm.conversation.document_source import keep_document
from chatterm.screens.chat.base import ChatBase
from chatterm.screens.chat.parts import ScreenPart
from chatterm.screens.chat.sessions import Sessions
from chatterm.sessions.library import DocumentLibrary, LibraryEntry, size_text
from chatterm.sessions.records import SessionError
from models.units import counted


class Documents(ScreenPart):
    _opening: tuple[Document, ...] | None = None
    """The documents of a new conversation, which begins once the backend has them."""
    _wanted: tuple[Document, ...] = ()
    """Documents to be read, one after the other."""
    _asked = ""
    """The name of the document added last."""
    _reading: tuple[Document, int] | None = None
    """The document being read, and its tokens."""

    def __init__(self, screen: ChatBase, sessions: Sessions) -> None:
        super().__init__(screen)
        self._sessions = sessions

    @cached_property
    def _library(self) -> DocumentLibrary:
        store = self.conversation.saved.store
        return DocumentLibrary(store.path if store is not None else None)

    def library(self, text: str) -> None:
        library = self._library
        match told(text):
            case None:
                self._pick()
            case Add(source, name):
                self.screen.in_thread(
                    partial(keep_document, library, source, name, working_folder()),
                    self._document_added,
                    "The document is being fetched…",
                )
            case Open(names):
                if self.conversation.is_busy:
                    raise EngineError("An answer is running; Esc stops it.")
                self.screen.in_thread(partial(library.find, names), self._open_documents)
            case Remove(name):
                self.screen.in_thread(partial(library.remove, name), self._document_removed)

    def _pick(self) -> None:
        from chatterm.screens.library import LibraryPicker

        screen, opened = self.screen, [document.name for document in self.conversation.documents]
        screen.ask(
            LibraryPicker(
                self._library,
                opened,
                "" if self.conversation.is_remote else screen.model_name,
                self.chunks,
                self.read_unread,  # another process may have added some
                self._document_removed,
            ),
            lambda names: self.library(f"open {names}"),
        )

    def chunks(self) -> Sequence[CachedChunk]:
        """Return the documents in the engine's cache."""
        figures = self.screen.backend.figures()
        return figures.chunks if figures is not None else ()

    def _document_added(self, found: tuple[LibraryEntry, Document, str]) -> None:
        entry, document, remark = found
        left = f" {remark}" if remark else ""
        self.screen.say(
            f"{entry.name} is in the library: {size_text(entry)}.{left} /library open {entry.name} begins "
            "a conversation with it."
        )
        self._asked = entry.name
        self.read_ahead((document,))

    def _document_removed(self, entry: LibraryEntry) -> None:
        self._wanted = tuple(document for document in self._wanted if document.name != entry.name)
        self.screen.say(f"{entry.name} is removed; conversations that began with it keep it.")

    # --- reading ahead

    def read_unread(self) -> None:
        """Read ahead documents added without a model, such as in the shell."""
        if (info := self.screen.info) is not None and not info.is_remote:
            self.screen.in_thread(partial(_unread, self._library), self.read_ahead)

    def read_ahead(self, documents: Sequence[Document]) -> None:
        """Read these documents ahead in idle time, one after the other, if the model runs on this machine."""
        if (info := self.screen.info) is None or info.is_remote:
            return
        known = {document.name for document in self._wanted}
        is_reading = bool(self._wanted)
        self._wanted += tuple(document for document in documents if document.name not in known)
        if self._wanted and not is_reading:
            self.screen.submit(Backend.read, self._wanted[0])

    def reads(self, document: Document, tokens: int | None, problem: str = "") -> None:
        """Note that the engine has begun to read a document of `tokens` tokens, or cannot (None)."""
        if tokens is None:
            if problem and document.name == self._asked:
                self.screen.say(problem, "error")
            self._read_next(document)
        else:
            self._reading = document, tokens

    def watch_reading(self, figures: Figures | None) -> None:
        """Check whether the document being read is done, and begin the next one."""
        if self._reading is None or figures is None:
            return
        document, tokens = self._reading
        found = next((chunk for chunk in figures.chunks if document.name in chunk.name.split(", ")), None)
        if found is None or not found.is_read:
            return
        self._reading = None
        if found.present >= found.tokens:
            counted_now = partial(self._library.count, document, self.screen.model_name, tokens)
            self.screen.in_thread(counted_now, lambda _: None)
            if document.name == self._asked:
                self.screen.say(f"{document.name} was read: {counted(tokens, 'token')}.")
        self._read_next(document)

    def _read_next(self, before: Document) -> None:
        self._wanted = tuple(document for document in self._wanted if document != before)
        if self._wanted:
            self.screen.submit(Backend.read, self._wanted[0])

    def stop_reading(self) -> None:
        """Stop reading ahead, because another model is loaded."""
        self._wanted, self._reading = (), None

    # --- documents of the conversation

    def _open_documents(self, documents: tuple[Document, ...]) -> None:
        if self.conversation.is_busy:
            raise EngineError("An answer is running; Esc stops it, then open the documents.")
        self._opening, self.conversation.is_leaving = documents, True
        self.screen.submit(Backend.configure, {"documents": documents})

    def opened(self, documents: tuple[Document, ...], problem: str = "") -> None:
        """Begin the new conversation once the backend has its documents, or report `problem`."""
        is_new = documents == self._opening
        if is_new:
            self._opening, self.conversation.is_leaving = None, False
        if problem:
            self.screen.say(problem, "error")
            if not is_new:  # they belonged to another conversation
                self._sessions.begin_with(())
            return
        if not is_new:
            return
        talk, kept = self.conversation, ""
        if talk.saved.session is not None or len(talk.tree):
            self._sessions.begin_anew()
            kept = self._sessions.kept
        talk.documents = documents
        self.screen.tell(f"A new conversation with {list_names(documents)} begins.{kept}")


def _unread(library: DocumentLibrary) -> tuple[Document, ...]:
    """Return the unread documents; none if the disk fails, which is reported elsewhere."""
    try:
        return library.unread()
    except SessionError:
        return ()
