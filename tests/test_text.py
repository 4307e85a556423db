"""Ids to text as they come, and prompts to ids."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from e2sci.engines.base import ModelInfo
from e2sci.engines.synthetic import EOS, TEMPLATE, Synthetic, SyntheticTokenizer
from e2sci.runtime.text import TextStream, prompt_ids, render


class Pieces:
    """A tokenizer whose tokens are the given bytes, by index."""

    def __init__(self, *pieces: bytes) -> None:
        self.pieces = pieces

    def piece(self, token):
        return self.pieces[token]


def stream(*pieces, stop=()):
    """(text of each push, text of finish, the stream) up to a stop string."""
    text = TextStream(Pieces(*pieces), stop)
    out = []
    for token in range(len(pieces)):
        out.append(text.push(token))
        if text.stopped:
            break
    return out, text.finish(), text


def split(data, sizes):
    """`data` in pieces of these sizes, the rest as one."""
    pieces = []
    for size in sizes:
        pieces.append(data[:size])
        data = data[size:]
    return [*pieces, data]


# ---- UTF-8 ------------------------------------------------------------------------------------


def test_a_character_comes_out_whole():
    out, rest, _ = stream(*(bytes([b]) for b in "a€🙂é".encode()))
    assert out == ["a", "", "", "€", "", "", "", "🙂", "", "é"]
    assert rest == ""


def test_invalid_bytes_are_replaced_and_hold_nothing_up():
    out, rest, _ = stream(b"a", b"\xff", b"\xe2\x82", b"b", b"\xf0\x9f")
    assert out == ["a", "\ufffd", "", "\ufffdb", ""]
    assert rest == "\ufffd"


def test_tokens_without_bytes_say_nothing():
    out, rest, _ = stream(b"", b"a", b"")
    assert (out, rest) == (["", "a", ""], "")


@given(st.binary(max_size=40), st.lists(st.integers(0, 5), max_size=20))
def test_any_bytes_in_any_pieces_give_the_same_text(data, sizes):
    out, rest, _ = stream(*split(data, sizes))
    assert "".join(out) + rest == data.decode("utf-8", errors="replace")


# ---- stop strings -----------------------------------------------------------------------------


@pytest.mark.parametrize("at", range(1, 6))
def test_a_stop_string_is_found_at_every_split(at):
    stop = "</end>"
    out, rest, text = stream(
        b"say ", stop[:at].encode(), stop[at:].encode() + b" more", stop=[stop]
    )
    assert text.stopped
    assert "".join(out) + rest == "say "


def test_what_may_become_a_stop_string_is_held_back_until_it_does_not():
    out, rest, text = stream(b"a", b"END", b"?", b" EN", stop=["END!"])
    assert out == ["a", "", "END?", " "]
    assert rest == "EN"
    assert not text.stopped


def test_no_more_is_held_back_than_must_be():
    out, _, _ = stream(b"aaab", b"aaa", b"c", stop=["aab!", "ac"])
    assert out == ["a", "aaba", "a"]


def test_candidates_that_overlap_themselves():
    out, rest, text = stream(*(bytes([c]) for c in b"xababac"), stop=["abac"])
    assert text.stopped
    assert "".join(out) + rest == "xab"


def test_the_earliest_of_several_counts():
    """Even if a later one is completed by the same token, or listed first."""
    out, rest, text = stream(b"one t", b"wo three", stop=["three", "two"])
    assert text.stopped
    assert "".join(out) + rest == "one "


def test_of_two_that_begin_alike_the_one_that_comes_stops():
    for stop in (["ab", "abc"], ["abc", "ab"]):
        out, rest, text = stream(b"x", b"ab", b"c", stop=stop)
        assert text.stopped
        assert "".join(out) + rest == "x"


def test_a_stop_string_may_hold_split_characters():
    out, rest, text = stream(*(bytes([b]) for b in "né🙂…".encode()), stop=["é🙂"])
    assert text.stopped
    assert "".join(out) + rest == "n"


def test_a_stop_string_that_the_last_bytes_complete():
    _, rest, text = stream(b"a", b"\xe2\x82", stop=["\ufffd"])
    assert text.stopped
    assert rest == ""


def test_nothing_comes_after_a_stop():
    _, rest, text = stream(b"a!b", stop=["!"])
    assert (text.stopped, rest) == (True, "")
    assert text.finish() == ""


def test_an_empty_stop_string_stops_nothing():
    out, rest, text = stream(b"a", b"b", stop=[""])
    assert ("".join(out) + rest, text.stopped) == ("ab", False)


letters = st.text("abé", max_size=12)


@given(letters, st.lists(st.text("abé", min_size=1, max_size=4), max_size=3),
       st.lists(st.integers(0, 4), max_size=12))  # fmt: skip
def test_the_cut_does_not_depend_on_the_pieces(text, stop, sizes):
    out, rest, state = stream(*split(text.encode(), sizes), stop=stop)
    found = [i for i in map(text.find, stop) if i >= 0]
    assert state.stopped == bool(found)
    first_end = min((text.find(s) + len(s) for s in stop if s in text), default=len(text))
    cut = "".join(out) + rest
    if not found:
        assert cut == text
    else:  # up to a stop string that the shortest sufficient text has
        assert cut in {text[:i] for i in found if i <= first_end}


@given(letters, st.lists(st.text("abé", min_size=1, max_size=4), min_size=1, max_size=3))
def test_byte_by_byte_or_whole_no_stop_string_remains(text, stop):
    for pieces in ([bytes([b]) for b in text.encode()], [text.encode()]):
        out, rest, _ = stream(*pieces, stop=stop)
        assert not any(s in "".join(out) + rest for s in stop)


# ---- prompts ----------------------------------------------------------------------------------


def engine(**info):
    made = Synthetic()
    made.info = replace(made.info, **info)
    return made


def ids(prompt, made=None, *, system=None, raw=False):
    return prompt_ids(made or engine(), prompt, system=system, raw=raw)


def test_a_text_is_one_user_message():
    assert bytes(ids("hi")) == b"user: hi\nassistant: "
    assert ids("hi", system="be brief") == ids(
        [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    )


def test_a_chat_keeps_its_order():
    chat = [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "3"},
    ]
    assert bytes(ids(chat)) == b"user: 1\nassistant: 2\nuser: 3\nassistant: "


def test_raw_is_the_text_alone():
    assert bytes(ids("hi", raw=True)) == b"hi"
    assert bytes(ids("hi", engine(template=None))) == b"hi"
    assert ids("hi", engine(bos="<|end|>"), raw=True) == [EOS, *b"hi"]
    assert ids("<|end|>", raw=True) == list(b"<|end|>")  # a special token's name, not the token


def test_special_tokens_in_a_raw_text_if_asked_for():
    found = prompt_ids(engine(), "a<|end|>b", system=None, raw=True, special=True)
    assert found == [ord("a"), EOS, ord("b")]


def test_ids_are_taken_as_they_are():
    assert ids([104, 105, EOS]) == [104, 105, EOS]
    for wrong in (-1, EOS + 1):
        with pytest.raises(ValueError, match=f"token id {wrong} is out of range"):
            ids([104, wrong])


@pytest.mark.parametrize("prompt", ["", " ", "\n\t", []])
def test_an_empty_prompt(prompt):
    with pytest.raises(ValueError, match="the prompt is empty"):
        ids(prompt)


def test_what_does_not_go_together():
    with pytest.raises(ValueError, match="drop --raw or --system"):
        ids("hi", raw=True, system="be brief")
    with pytest.raises(ValueError, match="no chat template"):
        ids([{"role": "user", "content": "hi"}], engine(template=None))


def template(source):
    return ModelInfo("m", 1, 1, 1, frozenset(), template=source, bos="<s>", eos="</s>")


CHAT = [{"role": "user", "content": "hi"}]


def test_a_template_has_what_it_expects():
    source = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}{{ add_generation_prompt }}"
    assert render(template(source), CHAT) == "<s>hi</s>True"
    assert render(template(TEMPLATE), CHAT) == "user: hi\nassistant: "


def test_blocks_leave_no_blank_lines():
    source = "  {% for m in messages %}\n{{ m.role }}\n  {% endfor %}\nend"
    assert render(template(source), CHAT) == "user\nend"


@pytest.mark.parametrize("chat", [{"role": "user", "content": "{{ 7 * 7 }}"}])
def test_a_message_is_text_not_a_template(chat):
    assert render(template(TEMPLATE), [chat]) == "user: {{ 7 * 7 }}\nassistant: "


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ ''['__class__'].mro() }}",
        "{{ (messages|attr('__class__')).mro() }}",
        "{{ raise_exception.__globals__['__builtins__'] }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ '{0.__class__.__mro__}'.format(1) }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'content': 'x'}) }}",
        "{{ range(10000000) | list }}",
        "{% include '/etc/hostname' %}",
        "{% for",
        "{{ messages[0].nothing.more }}",
        "{{ 1 + 'a' }}",
        "{{ 1 / 0 }}",
    ],
)
def test_a_template_can_do_no_harm(source):
    """Whatever it tries ends in one line that says whose template it was."""
    chat = [{"role": "user", "content": "hi"}]
    with pytest.raises(ValueError, match=r"^the chat template of m refuses this: .+$"):
        render(template(source), chat)
    assert chat == CHAT


def test_a_template_sees_no_classes():
    assert render(template("{{ ''.__class__ }}{{ messages[0].__init__ }}"), CHAT) == ""


def test_a_template_that_writes_nothing():
    with pytest.raises(ValueError, match="makes nothing of this prompt"):
        ids("hi", engine(template="{# nothing #}"))


def test_a_templates_own_complaint_is_shown():
    source = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ValueError, match="template of m refuses this: roles must alternate"):
        render(template(source), CHAT)


def test_the_synthetic_tokenizer_round_trips():
    tokenizer = SyntheticTokenizer()
    for text in ("return the end", "<|end|>", "né🙂", "\n\n    12"):
        ids = tokenizer.encode(text, special=False)
        assert b"".join(map(tokenizer.piece, ids)).decode() == text
    assert tokenizer.encode("a<|end|>b", special=True) == [ord("a"), EOS, ord("b")]
