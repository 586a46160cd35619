"""Constraints: what is wrong with one is said in a line, and none takes much time or memory."""

import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from random import Random
from threading import Event
from time import process_time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import ConstraintError, EngineError
from engine.params import MOST_CHARACTERS, Constraint, SamplingParams
from engine.sampling.grammar import Grammars, Matcher, compiled
from engine.sampling.impossible import without_impossible
from models.text.tokenizer import Tokenizer
from tests.counting import PATIENCE, until
from tests.engine.tiny import harmony_tokenizer, tiny_tokenizer
from tests.fresh import examples
from tests.models.tokenizer_data import tiny_tokenizer as small_vocabulary

VOCAB = 272
WORDS = -(-VOCAB // 32)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tiny_tokenizer()


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, VOCAB)


def schema(value: Any) -> Constraint:
    return Constraint("json_schema", json.dumps(value))


def allowed(matcher: Matcher) -> set[int]:
    words = np.zeros(WORDS, dtype=np.int32)
    matcher.fill(words)
    return {id for id in range(32 * WORDS) if words[id // 32] >> id % 32 & 1}


def accepts(matcher: Matcher, tokens: list[int]) -> bool:
    """Whether these may follow, one after the other, and nothing has to follow them."""
    for token in tokens:
        if token not in allowed(matcher):
            return False
        matcher.push(token)
    return matcher.accepts


ADDRESS = {
    "type": "object",
    "properties": {"zip": {"type": "string", "pattern": "^[0-9]{2}$"}, "kind": {"enum": ["a", "b", None]}},
    "required": ["zip", "kind"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("constraint", "right", "wrong"),
    [
        (
            schema(ADDRESS),
            ['{"zip": "12", "kind": null}'],
            ['{"zip": "1", "kind": "a"}', "{}", ' {"zip": "12"'],
        ),
        (schema({"type": "array", "items": ADDRESS}), ["[]", '[{"zip": "12", "kind": "b"}]'], ["[1]", "{}"]),
        (Constraint("json_object"), ["{}", '{"a": [1, {"b": "ü"}]}'], ["[]", "1", "{} "]),
        (
            schema({"type": "object", "properties": {"a": {"type": "integer"}}}),
            ['{"a": 1}', '{"\\"": "\\n"}'],
            [r'{"\u0061": "x"}', r'{"a": 1, "\u0061": "x"}'],
        ),
        (schema({"enum": ["\x1b", "\n"]}), [r'"\u001b"', r'"\n"'], []),
        (schema({"type": "string", "pattern": r"^\x01$"}), [r'"\u0001"'], []),
        (Constraint("regex", r"[ab]{2}|\$"), ["ab", "bb", "$"], ["abc", "a", ""]),
        (Constraint("regex", r"^cost: \d+\$$"), ["cost: 12$"], ["cost: 12", "^cost: 1$"]),
        (Constraint("regex", r"x\\$"), ["x\\"], ["x\\$"]),
        (Constraint("lark", 'start: "a" start "b" | "c"'), ["c", "aacbb"], ["acbb", "ab"]),
    ],
)
def test_what_matches_and_what_does_not(
    grammars: Grammars, tokenizer: Tokenizer, constraint: Constraint, right: list[str], wrong: list[str]
) -> None:
    for text in right:
        assert accepts(grammars.matcher(constraint), tokenizer.encode_plain(text)), text
    for text in wrong:
        assert not accepts(grammars.matcher(constraint), tokenizer.encode_plain(text)), text


def test_no_token_that_steers_a_model_is_ever_allowed() -> None:
    for tokenizer in (tiny_tokenizer(), harmony_tokenizer()):
        matcher = Grammars(tokenizer, VOCAB).matcher(Constraint("regex", r"(.|\n)*"))
        texts = {id for id in range(VOCAB) if tokenizer.is_text(id)}
        assert allowed(matcher) <= texts | tokenizer.stop_ids
        assert tokenizer.encode_plain("{")[0] in allowed(matcher)


def test_the_end_is_allowed_where_the_grammar_accepts_and_only_there(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    matcher = grammars.matcher(Constraint("regex", "ab?"))
    a, b = tokenizer.encode_plain("ab")
    assert allowed(matcher) == {a}
    matcher.push(a)
    assert allowed(matcher) == {b, *tokenizer.stop_ids}
    matcher.push(b)
    assert allowed(matcher) == set(tokenizer.stop_ids)


def test_forced_tokens_are_the_only_ones_allowed(grammars: Grammars, tokenizer: Tokenizer) -> None:
    matcher, said = grammars.matcher(schema(ADDRESS)), []
    while forced := matcher.forced():
        for token in forced:
            assert allowed(matcher) == {token}
            matcher.push(token)
            said.append(token)
    assert tokenizer.decode(said) == '{"zip": "'


LOOP = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}

ENDLESS = {"type": "object", "properties": {"k": {"$ref": "#"}}, "required": ["k"]}
RULES = "\n".join(["start: r0", *(f'r{i}: r{i + 1} | "x"' for i in range(1500)), 'r1500: "x"'])


@pytest.mark.parametrize(
    ("constraint", "said"),
    [
        (Constraint("json_schema", "{"), "JSON schema cannot be used: Expecting property name"),
        (Constraint("json_schema", "[]"), "JSON schema cannot be used: it is no JSON object"),
        (schema(True), "JSON schema cannot be used: it is no JSON object"),
        (schema({"type": "frob"}), "Invalid type: frob"),
        (schema({"not": {"type": "string"}}), 'Unimplemented keys: ["not"]'),
        (schema({"x-guidance": {"lenient": True}, "not": {"type": "null"}}), 'Unimplemented keys: ["not"]'),
        (schema({"type": "integer", "minimum": 5, "maximum": 3}), "minimum (5) is greater than maximum (3)"),
        (schema({"$ref": "https://example.com/x.json"}), "does not fetch"),
        (schema({"$ref": "file:///etc/passwd"}), "JSON schema cannot be used"),
        (schema(LOOP), "nothing matches it"),
        (schema(ENDLESS), "whatever matches it is too long"),
        (schema({"type": "object", "properties": {f"p{i}": {} for i in range(1000)}}), "max is 2000"),
        (Constraint("regex", "(a{1000}){1000}"), "too many expressions"),
        (Constraint("lark", RULES), "max is 2000"),
        (schema({"multipleOf": 2**31}), "multipleOf is too large; 100,000 is the most"),
        (schema({"multipleOf": 1e300}), "multipleOf is too large"),
        (schema({"items": {"multipleOf": 0.1234567}}), "multipleOf is too large"),
        (schema({"allOf": [{"multipleOf": 997}, {"multipleOf": 991}]}), "multipleOf is too large"),
        (Constraint("json_schema", '{"multiple\\u004ff": 99999999}'), "multipleOf is too large"),
        (Constraint("lark", 'start: %json {"multipleOf": 99999999}'), "multipleOf is too large"),
        (Constraint("regex", "(a"), "regular expression cannot be used: unclosed group"),
        (Constraint("regex", "ab\\"), "it ends in a backslash that escapes nothing"),
        (Constraint("regex", "(?=a)b"), "look-around"),
        (Constraint("regex", r"(a)\1"), "backreferences are not supported"),
        (Constraint("lark", "start: missing"), "grammar cannot be used"),
        (Constraint("lark", "start: " + "(" * 3000 + '"a"' + ")" * 3000), "too deeply nested"),
        (Constraint("json_schema", '{"items":' * 5000 + "{}" + "}" * 5000), "nested too deeply"),
        (Constraint("json_schema", '{"items":' * 200 + "{}" + "}" * 200), "nested too deeply"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(grammars: Grammars, constraint: Constraint, said: str) -> None:
    with pytest.raises(EngineError) as caught:
        grammars.matcher(constraint)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "required": ["next"]}
LISTS = {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/node"}}
IMPOSSIBLE = [
    {"enum": []},
    {"minimum": 5, "maximum": 3, "type": "number"},
    {"type": "string", "minLength": 5, "maxLength": 2},
    {"$ref": "#/$defs/node"},
    {"$ref": "#/$defs/none"},
    {"allOf": [{"$ref": "#/$defs/node"}, {}]},
    {"anyOf": [{"$ref": "#/$defs/node"}, {"enum": []}]},
    {"type": "array", "prefixItems": [{}, {"$ref": "#/$defs/node"}], "minItems": 2},
]


@pytest.mark.parametrize("node", [NODE, LISTS, {"$ref": "#/$defs/node"}, {"oneOf": [NODE, LISTS]}])
@pytest.mark.parametrize("impossible", IMPOSSIBLE)
def test_a_property_that_nothing_matches_is_never_begun(
    grammars: Grammars, tokenizer: Tokenizer, impossible: Any, node: Any
) -> None:
    """Or it would show only where the answer cannot go on. Where it is required, nothing is begun."""
    among = {"properties": {"a": impossible, "b": {"anyOf": [impossible, {"type": "null"}]}, "c": {}}}
    whole = {"type": "object", **among, "additionalProperties": False}
    whole["$defs"] = {"node": node, "none": {"enum": []}}
    matcher = grammars.matcher(schema(whole))
    for token in tokenizer.encode_plain('{"'):
        assert token in allowed(matcher)
        matcher.push(token)
    assert not allowed(matcher) & set(tokenizer.encode_plain("a"))
    for text in ("{}", '{"b": null, "c": 1}'):
        assert accepts(grammars.matcher(schema(whole)), tokenizer.encode_plain(text)), text
    assert not accepts(grammars.matcher(schema(whole)), tokenizer.encode_plain('{"b": {'))
    with pytest.raises(EngineError, match="The JSON schema cannot be used: "):
        grammars.matcher(schema({**whole, "required": ["a"]}))


def test_what_leads_back_to_itself_and_may_end_is_as_it_was() -> None:
    """Nor is anything else changed, whatever it says."""
    node = {
        "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
        "required": ["next"],
    }
    for unchanged in (
        {"$ref": "#/$defs/node", "$defs": {"node": {"type": "object", **node}}},
        {"$ref": "#/$defs/node", "$defs": {"node": {**NODE, "type": ["array", "object"]}}},
        {"items": {"$ref": "#"}, "type": "array"},
        {"properties": {"a": {"$ref": "#/properties/b"}, "b": {"$ref": "#/properties/a"}}},
        {"$defs": 3, "properties": [], "anyOf": {}, "allOf": [3], "type": 3, "required": 3, "minItems": "x"},
        {"const": {"$ref": "#"}, "enum": [{"enum": []}, False]},
        {"type": [["object"], {}], "properties": {"a": False}, "required": ["a"]},
        True,
        [{"enum": []}],
    ):
        assert without_impossible(unchanged) == unchanged
    deep: dict[str, Any] = {}
    for _ in range(5000):
        deep = {"items": deep}
    assert without_impossible(deep) is deep


@pytest.mark.parametrize(
    "arguments", [("frob", "a"), ("regex", ""), ("json_schema", "  "), ("lark", "a" * (MOST_CHARACTERS + 1))]
)
def test_a_constraint_that_is_none(arguments: tuple[Any, str]) -> None:
    with pytest.raises(EngineError):
        Constraint(*arguments)


HOSTILE = {
    "repetition": Constraint("regex", "((a{0,1000}){0,1000}){0,1000}"),
    "ambiguous": Constraint("regex", "(a|aa|aaa)*(a{1,500}){1,500}b"),
    "states": Constraint("regex", "(.*a.{18}|.*b.{17}c.*)+"),
    "long strings": schema({"type": "string", "minLength": 100_000, "maxLength": 1_000_000}),
    "many items": schema(
        {"type": "array", "minItems": 100_000, "items": {"type": "string", "maxLength": 999}}
    ),
    "product": schema(
        {
            "allOf": [
                {"anyOf": [{"properties": {f"p{i}_{j}": {"type": "string"}}} for j in range(12)]}
                for i in range(8)
            ]
        }
    ),
    "enum": schema({"enum": [f"value {i}" for i in range(10_000)]}),
    "tree": schema(
        {
            "$defs": {"n": {"type": "array", "items": {"anyOf": [{"$ref": "#/$defs/n"}] * 50}}},
            "$ref": "#/$defs/n",
        }
    ),
    "ambiguous rules": Constraint("lark", 'start: start start | start start start | "a"'),
    "endless": Constraint("lark", 'start: "abc" start'),
    "alternatives": Constraint("regex", "|".join(f"(a.*{i}b)" for i in range(5000))),
    "classes": Constraint("regex", r"(\w{1,300}\W{1,300}){1,300}"),
}


def test_one_that_turns_out_too_complex_is_to_blame_itself(grammars: Grammars) -> None:
    matcher = grammars.matcher(Constraint("lark", RULES.replace("start: ", 'start: "y" | ')))
    with pytest.raises(ConstraintError, match=r"max is 2000.*simplify it, or ask again"):
        matcher.push(min(allowed(matcher)))


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_one_is_refused_or_bounded(grammars: Grammars, name: str) -> None:
    """Whoever wrote it, compiling it and every step of it end soon, and it fails alone."""
    began = process_time()
    try:
        matcher = grammars.matcher(HOSTILE[name])
        for _ in range(40):
            may = allowed(matcher)
            forced = matcher.forced()
            assert len(forced) < 100_000
            matcher.push(forced[0] if forced else min(may))
    except EngineError:
        pass  # the other way to be bounded
    # Far more than it takes, and far less than any of these would without limits.
    assert process_time() - began < 20


@cache
def grammars_of(vocabulary: str) -> tuple[Tokenizer, Grammars]:
    known = small_vocabulary(vocabulary)
    return known, Grammars(known, known.vocab_size + 40)  # a model may have rows for more


WALKS: dict[Constraint, Callable[[str], object]] = {
    schema(ADDRESS): lambda text: len(json.loads(text)["zip"]) == 2,
    Constraint("regex", " {2}[ab ]{1,5}(ü|é|😀){2}"): lambda text: re.fullmatch(
        " {2}[ab ]{1,5}(ü|é|😀){2}", text
    ),
    Constraint("regex", r"\n?(the|cat|\W){1,9}!"): lambda text: re.fullmatch(r"\n?(the|cat|\W){1,9}!", text),
    schema(
        {"type": "object", "properties": {"a b": {"type": "string", "maxLength": 5}}, "required": ["a b"]}
    ): (lambda text: len(json.loads(text)["a b"]) <= 5),
}


@examples(40)
@given(
    vocabulary=st.sampled_from(("tiny_bpe", "tiny_spm")),
    constraint=st.sampled_from(list(WALKS)),
    random=st.randoms(use_true_random=False),
)
def test_whatever_is_drawn_is_a_text_that_matches(
    vocabulary: str, constraint: Constraint, random: Random
) -> None:
    """Byte-level and SentencePiece: the text is that of the tokens, to the first blank."""
    tokenizer, grammars = grammars_of(vocabulary)
    matcher, stream, text = grammars.matcher(constraint), tokenizer.stream(goes_on=True), ""
    words = np.zeros(-(-(tokenizer.vocab_size + 40) // 32), dtype=np.int32)
    for _ in range(400):
        matcher.fill(words)
        may = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        forced = matcher.forced()
        assert not forced or may.tolist() == forced[:1]
        stops = tokenizer.stop_ids & set(may.tolist())
        assert bool(stops) == matcher.accepts
        if stops and (len(stops) == len(may) or random.random() < 0.5):
            assert WALKS[constraint](text + stream.flush())
            return
        token = int(random.choice([id for id in may.tolist() if id not in stops]))
        matcher.push(token)
        text += stream.push(token)
    assert len(text) > 100  # an object may have more and more fields


def test_what_was_compiled_is_kept_for_the_next_request(grammars: Grammars, tokenizer: Tokenizer) -> None:
    one = grammars.matcher(Constraint("regex", "ab"))
    a, b = tokenizer.encode_plain("ab")
    one.push(a)
    assert allowed(grammars.matcher(Constraint("regex", "ab"))) == {a}
    assert allowed(one) == {b}


def test_one_that_takes_long_holds_up_only_who_asks_for_it(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammars, may_end, begun = Grammars(tokenizer, VOCAB), Event(), list[str]()

    def compiling(constraint: Constraint, vocabulary: Any) -> Matcher:
        begun.append(constraint.text)
        if constraint.text.startswith("slow"):
            assert may_end.wait(PATIENCE)
        return compiled(constraint, vocabulary)

    monkeypatch.setattr("engine.sampling.grammar.compiled", compiling)
    with ThreadPoolExecutor(4) as pool:
        slow = [pool.submit(grammars.matcher, Constraint("regex", "slow")) for _ in range(2)]
        wrong = pool.submit(grammars.matcher, Constraint("regex", "slow("))
        until(lambda: len(begun) == 2)
        quick = grammars.matcher(Constraint("regex", "quick"))
        assert not any(one.done() for one in (*slow, wrong))
        may_end.set()
        q, s = tokenizer.encode_plain("qs")
        assert allowed(quick) == {q}
        assert [allowed(each.result(PATIENCE)) for each in slow] == [{s}, {s}]
        with pytest.raises(EngineError):
            wrong.result(PATIENCE)
    assert sorted(begun) == ["quick", "slow", "slow("]
    with pytest.raises(EngineError):
        grammars.matcher(Constraint("regex", "slow("))


def test_multiples_that_are_soon_recognised(grammars: Grammars, tokenizer: Tokenizer) -> None:
    grammars.matcher(Constraint("regex", '"multipleOf": 99999999'))  # no schema, but a text
    for step, fits, other in ((0.01, "1.25", "1.255"), (86_400, "172800", "86401"), (1e-7, "0.0000001", "x")):
        multiple = schema({"type": "number", "multipleOf": step})
        assert accepts(grammars.matcher(multiple), tokenizer.encode_plain(fits))
        assert not accepts(grammars.matcher(multiple), tokenizer.encode_plain(other))


def test_settings_out_of_range() -> None:
    for values in (
        {"frequency_penalty": 2.5},
        {"logprobs": 21},
        {"logprobs": -1},
        {"logit_bias": {3: 101.0}},
        {"logit_bias": {-1: 1.0}},
        {"logit_bias": {"3": 1.0}},
        {"logit_bias": dict.fromkeys(range(1025), 1.0)},
        {"logit_bias": {3: float("nan")}},
        {"max_tokens": 0},
        {"max_tokens": 2**31},
        {"repetition_penalty": 1e-40},
        {"repetition_penalty": 1e40},
    ):
        with pytest.raises(EngineError):
            SamplingParams(**values)  # type: ignore[arg-type]
