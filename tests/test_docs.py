"""The documents say what the code does: messages, codes, defaults, examples and links."""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import io
import re
import types
import typing
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path

import msgspec
import numpy as np
import pytest

from e2sci.decoding.acceptance import Proposal, RuleParams
from e2sci.decoding.credit import CreditParams, CreditState
from e2sci.decoding.distribution import Dense, pack_ids
from e2sci.decoding.sampling import SamplingParams
from e2sci.session import messages
from e2sci.session.cloud import CloudSession, Pass
from e2sci.session.edge import EdgeSession
from e2sci.session.line import CloudModel
from e2sci.session.lookahead import Lookahead
from e2sci.session.messages import Message, Verdict, decode_message, encode_message

ROOT = Path(__file__).parent.parent
PROTOCOL, METHOD = ROOT / "docs/protocol.md", ROOT / "docs/method.md"
DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]
RECORDS = [SamplingParams, RuleParams, CreditParams, CreditState, messages.CreditView]
RECORDS += [messages.Judged]


# ---- reading Markdown ---------------------------------------------------------------------


def headings(text: str) -> list[str]:
    return re.findall(r"^#+ (.+)$", without_fences(text), re.MULTILINE)


def without_fences(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def section(path: Path, heading: str) -> str:
    """The text from a heading that begins so to the next one of any level."""
    found = re.search(
        rf"^#+ {re.escape(heading)}.*?$\n(.*?)(?=^#+ |\Z)",
        without_fences(path.read_text()),
        re.MULTILINE | re.DOTALL,
    )
    assert found, f"{path.name} has no section '{heading}'"
    return found[1]


def table(text: str) -> list[list[str]]:
    """The cells of a text's first table, its head left out."""
    found = re.search(r"^\|.*\n\|[-| ]+\|\n((?:\|.*\n)+)", text, re.MULTILINE)
    assert found, "no table"
    return [[c.strip() for c in row.strip("|").split("|")] for row in found[1].splitlines()]


def fences(path: Path, info: str) -> list[str]:
    return re.findall(rf"^```{info}\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL)


def bare(cell: str) -> str:
    return cell.strip("`")


# ---- the protocol -------------------------------------------------------------------------


def wire_type(annotation: object) -> str:
    """What the document calls the MessagePack type of an annotation."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(wire_type(a) for a in arguments)
    if origin is typing.Literal:
        return "str"
    if annotation is types.NoneType:
        return "nil"
    if origin is typing.Annotated:
        return wire_type(arguments[0])
    kind = origin or annotation
    assert isinstance(kind, type)
    if issubclass(kind, msgspec.Struct):
        return "array" if kind.__struct_config__.array_like else "map"
    return {tuple: "array", list: "array", dict: "map"}.get(kind, kind.__name__)


def default_of(field: msgspec.structs.FieldInfo) -> object:
    """A field's default as it would travel; MISSING if it has none."""
    if field.required:
        return MISSING
    made = field.default_factory
    value = field.default if made is msgspec.NODEFAULT else made()
    return msgspec.msgpack.decode(msgspec.msgpack.encode(value))


def written_default(cell: str) -> object:
    words = {"": MISSING, "empty": b"", "nil": None, "true": True, "false": False}
    if bare(cell) in words:
        return words[bare(cell)]
    try:
        return ast.literal_eval(bare(cell))
    except ValueError:
        return bare(cell)


def same_fields(record: type[msgspec.Struct], rows: list[list[str]]) -> None:
    known = msgspec.structs.fields(record)
    assert [bare(row[0]) for row in rows] == [f.name for f in known]
    for row, field in zip(rows, known, strict=True):
        where = f"{record.__name__}.{field.name}"
        assert row[1].replace("ids", "bytes") == wire_type(field.type), where
        assert written_default(row[2]) == default_of(field), where


def test_every_message_is_described_with_its_tag_and_fields_in_order():
    heads = [h for h in headings(PROTOCOL.read_text()) if " · tag " in h]
    classes = sorted(Message.__subclasses__(), key=lambda c: c.__struct_config__.tag)
    assert [h.split(" · ")[:2] for h in heads] == [
        [c.__name__, f"tag {c.__struct_config__.tag}"] for c in classes
    ]
    sent = {h.split(" · ")[0]: h.split(" · ")[2] for h in heads}
    up, down = "edge → cloud", "cloud → edge"
    assert {name for name, way in sent.items() if way == up} == {
        "Hello",
        "Open",
        "Window",
        "Cancel",
    }
    assert set(sent.values()) == {up, down}
    for record in classes:
        same_fields(record, table(section(PROTOCOL, f"{record.__name__} · tag")))


@pytest.mark.parametrize("record", RECORDS)
def test_every_nested_record_is_described_in_order(record):
    text = section(PROTOCOL, record.__name__)
    same_fields(record, table(text))
    assert text.strip().startswith("An array" if wire_type(record) == "array" else "A map")


def codes_in_source() -> dict[str, bool]:
    """Every error code of the package, and whether it is retryable."""
    codes: dict[str, bool] = {}
    for path in (ROOT / "src").rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.args):
                continue
            code = call.args[0]
            if call.func.id in ("ProtocolError", "Refused") and isinstance(code, ast.Constant):
                codes[code.value] = any(
                    k.arg == "retryable" and ast.literal_eval(k.value) for k in call.keywords
                )
    return codes


def test_the_codes_are_those_of_the_source():
    rows = table(section(PROTOCOL, "Errors"))
    assert {bare(r[0]): r[3] == "yes" for r in rows} == codes_in_source()
    assert {r[1] for r in rows} == {"connection", "request", "both"}
    assert {r[3] for r in rows} == {"yes", "no"}


# ---- the exchange -------------------------------------------------------------------------

PROMPT, TEXT, EOS, VOCAB = [5, 300, 7], [200, 201, 202, 210, 211, 212, 2], 2, 1000


class Exchange:
    """The two sessions, with models that know their texts by heart."""

    def __init__(self, opening: messages.Open) -> None:
        self.edge = EdgeSession(
            opening, window=2, eos=frozenset({EOS}), vocab=VOCAB, lookahead=Lookahead(2)
        )
        self.cloud = CloudSession(opening, CloudModel(VOCAB, 4096, frozenset({EOS})))
        self.log: list[tuple[str, Message]] = []

    def drafts(self, *tokens: int) -> list[messages.Window]:
        windows = []
        for token in tokens:
            windows += self.edge.drafted(Proposal(token), len(self.edge.line), self.edge.branch)
        self.log += [("edge", w) for w in windows]
        return windows

    def arrives(self, window: messages.Window) -> None:
        assert self.cloud.window(window) == []

    def plans(self, *, fill: bool = False) -> Pass:
        planned = self.cloud.plan(64, fill=fill)
        assert planned is not None
        return planned

    def passes(self, planned: Pass) -> list[Message]:
        first = planned.keep + len(planned.tokens) - planned.outputs + 1
        outputs = []
        for token in (PROMPT + TEXT)[first : first + planned.outputs]:
            logits = np.full(VOCAB, -20, dtype=np.float32)
            logits[token] = 20
            outputs.append(Dense(logits))
        return self.cloud.passed(planned, outputs)

    def hears(self, said: list[Message]) -> None:
        for message in said:
            self.log.append(("cloud", message))
            if isinstance(message, Verdict):
                self.edge.verdict(message)


def said_by_the_sessions(opening: messages.Open) -> list[tuple[str, Message]]:
    """The sequence diagram of the document, acted out."""
    e = Exchange(opening)
    prefill = e.plans()
    for window in e.drafts(200, 201, 202, 203, 204):
        e.arrives(window)
    prehit = e.passes(prefill)
    verified = e.plans()
    e.hears(prehit)
    [dead] = e.drafts(205, 206)
    rejected = e.passes(verified)
    e.arrives(dead)
    filling = e.plans(fill=True)
    e.hears(rejected)
    [crossing] = e.drafts(211)
    filled = e.passes(filling)
    e.arrives(crossing)
    e.hears(filled)
    [last] = e.drafts(212)
    e.arrives(last)
    e.hears(e.passes(e.plans()))
    assert e.edge.output == TEXT
    return e.log


def written_exchange() -> Iterator[tuple[str, Message, bytes]]:
    """(sender, message, frame) of the document's listing."""
    [listing] = fences(PROTOCOL, "text exchange")
    for sender, call, digits in re.findall(r"^(edge|cloud) +(.+)\n((?: .*\n)+)", listing, re.M):
        yield sender, eval(call, {**vars(messages), "pack_ids": pack_ids}), bytes.fromhex(digits)


def test_the_bytes_are_the_encoders():
    for _, message, frame in written_exchange():
        assert encode_message(message) == frame
        assert decode_message(frame) == message
    rejection = "".join(bare(r[0]) for r in table(section(PROTOCOL, "An exchange, byte for byte")))
    assert decode_message(bytes.fromhex(rejection)) in [m for _, m, _ in written_exchange()]


def test_the_exchange_is_what_the_sessions_say():
    whole = [(sender, message) for sender, message, _ in written_exchange()]
    handshake, (_, opening), (_, opened) = whole[:2], whole[2], whole[3]
    assert [type(m) for _, m in handshake] == [messages.Hello, messages.Welcome]
    assert opened == messages.Opened(request=1, limit=8)
    assert whole[4:] == said_by_the_sessions(opening)


# ---- constants ----------------------------------------------------------------------------


def in_code(path: str) -> object:
    """The value of a module's constant, or the default of a field or argument, by dotted path."""
    parts = path.split(".")
    module = importlib.import_module(".".join(["e2sci", *parts[:2]]))
    thing = getattr(module, parts[2])
    if len(parts) == 3:
        return thing
    if is_dataclass(thing):
        return {f.name: f.default for f in fields(thing)}[parts[3]]
    return inspect.signature(thing).parameters[parts[3]].default


def test_the_constants_are_the_codes():
    rows = table(section(METHOD, "Constants"))
    for row in rows:
        assert ast.literal_eval(bare(row[1])) == in_code(bare(row[2])), row
        assert row[3].startswith(("[P]", "[O]", "[F]")), row
    named = {bare(row[2]) for row in rows}
    for params in (CreditParams, RuleParams):
        for field in msgspec.structs.fields(params):
            assert (
                f"{params.__module__.removeprefix('e2sci.')}.{params.__name__}.{field.name}"
                in named
            )


def test_the_limits_are_the_codes():
    for row in table(section(PROTOCOL, "Limits")):
        assert ast.literal_eval(bare(row[1])) == in_code(bare(row[2])), row


# ---- everywhere ---------------------------------------------------------------------------


def examples() -> list[tuple[str, str, str]]:
    """(document, code, its output) of every fence marked `python run`."""
    pattern = r"^```python run\n(.*?)^```\n\n```text\n(.*?)^```$"
    found = []
    for path in DOCUMENTS:
        pairs = re.findall(pattern, path.read_text(), re.MULTILINE | re.DOTALL)
        assert len(pairs) == len(fences(path, "python run")), f"{path.name}: code without output"
        found += [(path.name, *pair) for pair in pairs]
    return found


@pytest.mark.parametrize(("name", "code", "output"), examples())
def test_examples_print_what_they_say(name, code, output):
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile(code, name, "exec"), {"__name__": "example"})
    assert said.getvalue() == output


def anchors(path: Path) -> set[str]:
    """The fragments that GitHub gives a document's headings."""
    plain = (re.sub(r"[`*]|\[([^]]*)\]\([^)]*\)", r"\1", h) for h in headings(path.read_text()))
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in plain}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: p.name)
def test_links_lead_somewhere(path):
    titled = r'\]\(([^)\s]+)(?: "[^"]*")?\)'
    for link in re.findall(titled, without_fences(path.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        target, _, anchor = link.partition("#")
        there = (path.parent / target).resolve() if target else path
        assert there.exists(), link
        assert ROOT in there.parents, link
        assert not anchor or anchor in anchors(there), link


def test_the_rooms_are_the_houses():
    rooms = {
        bare(row[1]).strip("/") for row in table(section(ROOT / "CONTRIBUTING.md", "The house"))
    }
    assert rooms == {p.parent.name for p in (ROOT / "src/e2sci").glob("*/__init__.py")}
