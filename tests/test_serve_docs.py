"""docs/serving.md says what the server does: fields, refusals, errors, limits, examples."""

from __future__ import annotations

import ast
import json
import re

import click
import msgspec

from e2sci.cli import main
from e2sci.server import openai_errors
from e2sci.server.openai_requests import (
    HARMLESS,
    ChatRequest,
    E2sci,
    TextRequest,
)
from test_docs import ROOT, bare, fences, in_code, section, table

SERVING = ROOT / "docs/serving.md"
SOURCES = (ROOT / "src/e2sci/server").glob("*.py")


def names(cell):
    return re.findall(r"`([^`]+)`", cell)


def fields(kind):
    return {field.name for field in msgspec.structs.fields(kind)}


def test_every_field_of_a_request_is_told():
    chat, text = fields(ChatRequest) - HARMLESS.keys(), fields(TextRequest) - HARMLESS.keys()
    rows = table(section(SERVING, "What a request may say"))
    told = {bare(row[0]): row[1] for row in rows}
    assert len(told) == len(rows)
    assert told.keys() == chat | text
    for name, where in told.items():
        assert {"both": (True, True), "chat": (True, False), "completions": (False, True)}[
            where
        ] == (name in chat, name in text), name


def test_our_own_fields_are_told():
    rows = table(section(SERVING, "Our own options"))
    assert [bare(row[0]) for row in rows] == [f.encode_name for f in msgspec.structs.fields(E2sci)]
    for row, field in zip(rows, msgspec.structs.fields(E2sci), strict=True):
        known = re.findall(r"'(\w+)'", str(field.type))
        if known:
            assert [n for n in names(row[1]) if n in known] == known, field.name


def test_every_refusal_is_told():
    told = {}
    for cell, values, _ in table(section(SERVING, "What is refused")):
        for name in names(cell):
            told[name] = [json.loads(value) for value in names(values)]
    assert told == {name: list(values) for name, (values, _) in HARMLESS.items()}


def test_every_status_and_code_is_told():
    told = {}
    for statuses, codes, _ in table(section(SERVING, "Errors")):
        for code in names(codes):
            told.setdefault(code, set()).update(map(int, statuses.split(", ")))
    known = {code: {status} for code, status in openai_errors._BY_CODE.items()}
    for path in SOURCES:
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "Failure":
                given = {k.arg: k.value for k in call.keywords}
                code, status = given.get("code"), call.args[0]
                if isinstance(code, ast.Constant) and isinstance(status, ast.Constant):
                    known.setdefault(code.value, set()).add(status.value)
    assert told == known


def test_the_limits_are_the_codes():
    for row in table(section(SERVING, "Limits")):
        assert ast.literal_eval(bare(row[1])) == in_code(bare(row[3])), row


def test_the_options_that_are_named_exist():
    with click.Context(main) as ctx:
        commands = {
            name: {opt for p in main.get_command(ctx, name).params for opt in p.opts}
            for name in ("serve", "run", "keys")
        }
        keys = main.get_command(ctx, "keys").commands["add"]
    known = set.union(*commands.values()) | {opt for p in keys.params for opt in p.opts}
    text = SERVING.read_text()
    assert set(re.findall(r"`(--[a-z-]+)", text)) <= known
    for line in re.findall(r"e2sci serve ([^`\n]+)", text):
        assert set(re.findall(r"--[a-z-]+", line)) <= commands["serve"], line


def test_the_python_is_python():
    assert len(fences(SERVING, "python")) == 2
    for code in fences(SERVING, "python"):
        compile(code, "serving.md", "exec")
