"""Constraints as token masks, computed by llguidance (an Earley parser over a lexer of derivatives).

User input is never trusted: the size of a grammar, the work to compile it, the work of a mask and the states of its
lexer are bounded, and nothing is downloaded.
"""

import json
import re
from collections import OrderedDict
from concurrent.futures import Future
from decimal import Decimal, InvalidOperation
from math import lcm
from threading import Lock
from typing import Any

import llguidance

from engine.errors import ConstraintError, EngineError
from engine.params import NAMES, Constraint
from engine.sampling.expressible import without_annotations
from engine.sampling.expression import check_end
from engine.sampling.impossible import without_impossible
from engine.sampling.json_form import json_form
from engine.sampling.sampler import Words
from models.text.pieces import PromptPiece
from models.text.tokenizer import Tokenizer

KEPT = 32
"""How many compiled constraints are kept for later requests."""
LIMITS = llguidance.LLParserLimits(
    max_grammar_size=200_000,  # symbols
    initial_lexer_fuel=1_000_000,  # 20 ms
    step_lexer_fuel=200_000,  # 15 ms of a mask
    step_max_items=50_000,  # 3 ms of a mask
    max_lexer_states=50_000,  # 100 MB
    verbose_errors=False,
)
MOST_REMAINDERS = 100_000
"""The largest `multipleOf`, and the largest sum and common multiple of all in a schema: a lexer needs a state for every
remainder, which the limits above do not count. This many take 0.2 s and 25 MB."""
_MULTIPLE = re.compile(r'"multipleOf"\s*:\s*([-+.\deE]+)')
_ESCAPED = re.compile(r"\\u00([0-7][0-9a-fA-F])")


class Matcher:
    """The place of an answer in its grammar. For one thread at a time."""

    __slots__ = ("_matcher", "_name")

    def __init__(self, matcher: llguidance.LLMatcher, name: str) -> None:
        self._matcher = matcher
        self._name = name

    def copy(self) -> "Matcher":
        """Return a copy that can move on independently."""
        return Matcher(self._matcher.deep_copy(), self._name)

    @property
    def accepts(self) -> bool:
        """Whether the answer may end here."""
        return self._matcher.is_accepting()

    def allows(self, token_id: int) -> bool:
        """Return whether this token may follow."""
        return self._matcher.validate_tokens([token_id]) == 1

    def push(self, token_id: int) -> None:
        """Move past this token. Raises ConstraintError if it may not follow, or the grammar is too complex for that."""
        if not self._matcher.consume_token(token_id):
            self._fail()

    def fill(self, words: Words) -> None:
        """Write which tokens may follow; end-of-turn tokens may where the answer may end. Raises ConstraintError."""
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._matcher.is_error():
            self._fail()

    def forced(self) -> list[int]:
        """Return the tokens that must follow, in order, as the tokenizer splits their text."""
        return list(self._matcher.compute_ff_tokens())

    def _fail(self) -> None:
        raise ConstraintError(
            f"The answer cannot follow the {self._name} any further ({reason(self._matcher.get_error())}); "
            "simplify it, or ask again."
        )


class Grammars:
    """Compiles constraints for one tokenizer, in the caller's thread. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """`vocab_size` is the model's: it may have rows for more or fewer tokens than the tokenizer."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._lock = Lock()
        self._vocabulary: llguidance.LLTokenizer | None = None
        self._known: OrderedDict[Constraint, Future[Matcher]] = OrderedDict()

    def matcher(self, constraint: Constraint) -> Matcher:
        """Return a matcher at the beginning of an answer. The first takes about a second for a large vocabulary.

        Raises EngineError that describes an error in the constraint.
        """
        with self._lock:
            self._vocabulary = self._vocabulary or self._read_vocabulary()
            known = self._known.pop(constraint, None)
            is_new = known is None
            known = self._known[constraint] = known or Future()
            if len(self._known) > KEPT:
                self._known.popitem(last=False)
        if is_new:  # only requests for the same constraint wait for it
            try:
                known.set_result(compiled(constraint, self._vocabulary))
            except BaseException as error:
                known.set_exception(error)
                with self._lock:
                    if self._known.get(constraint) is known:
                        del self._known[constraint]
                raise
        known.exception()  # waits for the thread that compiles it
        with self._lock:
            return known.result().copy()

    def _read_vocabulary(self) -> llguidance.LLTokenizer:
        stops = sorted(id for id in self._tokenizer.stop_ids if id < self._vocab_size)
        if not stops:
            raise EngineError(
                "Answers of this model cannot be constrained: no token of it ends one. Choose another model."
            )
        vocabulary = _Vocabulary(self._tokenizer, self._vocab_size, stops[0])
        wrapper = llguidance.TokenizerWrapper(vocabulary)
        return llguidance.LLTokenizer(wrapper, n_vocab=self._vocab_size, eos_token=stops)


class _Vocabulary:
    """A tokenizer as llguidance sees it. Tokens that control a model have no text there, so no grammar allows them."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos: int) -> None:
        self.eos_token_id = eos
        self.bos_token_id: int | None = None
        ids = range(vocab_size)
        self.tokens = [tokenizer.token_bytes(id) if tokenizer.is_text(id) else b"" for id in ids]
        self.special_token_ids = [id for id in ids if not self.tokens[id]]
        for id in self.special_token_ids:
            self.tokens[id] = b"<[%d]>" % id  # names must differ to be told apart
        self._tokenizer = tokenizer
        # SentencePiece puts a space before the first word of a text, but not before a continuation.
        self._after = next((id for id in ids if self.tokens[id] == b"{"), None)

    def __call__(self, text: str) -> list[int]:
        """Return the ids of a text that continues the answer."""
        return self._tokenizer.encode_pieces([PromptPiece(text, typed=True)], self._after)


def check(constraint: Constraint) -> None:
    """Raise EngineError for errors in a constraint that can be found without a model."""
    grammar, name = _grammar(constraint), NAMES[constraint.kind]
    failed, said = llguidance.LLMatcher.validate_grammar_with_warnings(grammar, None, limits=LIMITS)
    if failed:
        raise _refused(name, reason(said[0]))
    _check_possible(constraint)


def compiled(constraint: Constraint, vocabulary: llguidance.LLTokenizer) -> Matcher:
    """Return a matcher at the beginning of an answer. Raises EngineError that describes an error in the constraint."""
    grammar, name = _grammar(constraint), NAMES[constraint.kind]
    matcher = llguidance.LLMatcher(vocabulary, grammar, log_level=0, limits=LIMITS)
    if matcher.is_error():
        raise _refused(name, reason(matcher.get_error()))
    _try(matcher.deep_copy(), name)
    _check_possible(constraint)
    return Matcher(matcher, name)


def _try(matcher: llguidance.LLMatcher, name: str) -> None:
    """Begin an answer with its forced tokens and one more, because some errors show only then. Raises EngineError."""
    _allowed(matcher, name)
    matcher.consume_tokens(matcher.compute_ff_tokens())
    if matcher.is_stopped() and not matcher.is_error():
        return  # that is all there is to say
    allowed = _allowed(matcher, name)
    for token in ((allowed & -allowed).bit_length() - 1, allowed.bit_length() - 1):
        way = matcher.deep_copy()
        way.consume_token(token)
        if not way.is_error():
            return
    raise _refused(name, reason(way.get_error()))


def _allowed(matcher: llguidance.LLMatcher, name: str) -> int:
    """Return the mask of the next token as a number. Raises EngineError if no token may follow."""
    allowed = int.from_bytes(matcher.compute_bitmask(), "little")
    if matcher.is_error():
        raise _refused(name, reason(matcher.get_error()))
    if not allowed:
        raise _refused(name, "nothing matches it")
    return allowed


def _refused(name: str, why: str) -> EngineError:
    return EngineError(f"The {name} cannot be used: {why}.")


def _grammar(constraint: Constraint) -> str:
    """Return a constraint in the library's format. Raises EngineError."""
    _check_multiples(constraint)
    if constraint.kind == "regex":
        check_end(constraint.text)
        return llguidance.LLMatcher.grammar_from_regex(_unanchored(constraint.text))
    if constraint.kind == "lark":
        return llguidance.LLMatcher.grammar_from_lark(constraint.text)
    schema = '{"type": "object"}' if constraint.kind == "json_object" else constraint.text
    try:
        if not isinstance(read := json.loads(schema), dict):
            raise ValueError("it is no JSON object")
        if (possible := without_impossible(without_annotations(read))) not in (False, read):
            schema = json.dumps(possible)
        overrides: Any = {**json_form(schema), "lenient": False, "coerce_one_of": False}
        return llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=overrides)
    except (ValueError, RecursionError) as error:
        why = "recursion limit" if isinstance(error, RecursionError) else str(error)
        raise _refused(NAMES[constraint.kind], reason(why)) from None


def _check_possible(constraint: Constraint) -> None:
    """Raise EngineError if nothing matches a valid schema: otherwise that would show late in an answer."""
    if constraint.kind == "json_schema" and (
        without_impossible(without_annotations(json.loads(constraint.text))) is False
    ):
        raise _refused(NAMES[constraint.kind], "nothing matches it")


def _check_multiples(constraint: Constraint) -> None:
    """Raise EngineError if a schema, or one in a grammar, has numbers whose multiples take too long to recognise.

    Some may have to be multiples of several: these count by their common multiple. The digits of a fraction count.
    """
    if constraint.kind == "regex":
        return  # it contains no schema
    common, total = 1, 0
    for written in _MULTIPLE.findall(_ESCAPED.sub(lambda escape: chr(int(escape[1], 16)), constraint.text)):
        try:
            _, digits, exponent = abs(Decimal(written)).normalize().as_tuple()
        except InvalidOperation:
            continue  # the library says what is wrong with it
        number = MOST_REMAINDERS + 1
        if isinstance(exponent, int) and len(digits) + max(exponent, 0) <= 12:
            number = int("".join(map(str, digits))) * 10 ** max(exponent, 0)
        common, total = lcm(common, number or 1), total + number
        if max(common, total) > MOST_REMAINDERS:
            raise _refused(
                NAMES[constraint.kind],
                f"its multipleOf is too large; {MOST_REMAINDERS:,} is the most, for all in it together",
            )


def _unanchored(expression: str) -> str:
    """Return the expression without anchors around all of it; the whole answer is matched anyway."""
    ends = re.search(r"(\\*)\$$", expression)
    if ends is not None and len(ends[1]) % 2 == 0:
        expression = expression[:-1]
    return expression.removeprefix("^")


def reason(text: str) -> str:
    """Return the library's description of an error as one short line."""
    if "NoExtension" in text:
        return "nothing matches it"
    if "recursion limit" in text:
        return "it is nested too deeply"
    if "ff_tokens" in text:
        return "whatever matches it is too long"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    said = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), None)
    line = said or (lines[0] if lines else "it is not valid")
    return re.sub(r"^\d+\(\d+\): ", "", line).rstrip(".")[:200]
