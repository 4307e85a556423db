"""Flags over environment over file over defaults; what is wrong is told in one line; completion."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from e2sci.cli import COMMANDS, main, settings
from e2sci.cli.completion import SHELLS

DRAFT = "synthetic:seed=11"


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A configuration file, not there yet, that the environment names."""
    path = tmp_path / "of" / "mine.toml"
    monkeypatch.setenv("E2SCI_CONFIG", str(path))
    path.parent.mkdir()
    return path


def e2sci(*args, code=0, **options):
    result = CliRunner().invoke(main, list(args), **options)
    assert result.exit_code == code, result.output
    return result


def refused(result, *words):
    [line] = result.stderr.splitlines()
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Traceback" not in line
    for word in words:
        assert word in line
    return line


def said(*args, **options):
    """The tokens that the draft alone writes."""
    ask = ("run", "hello", "--draft", DRAFT, "--mode", "draft", "--json", *args)
    return len(json.loads(e2sci(*ask, **options).stdout)["token_ids"])


def shown(*args, **options):
    """{section: {option: rows}}"""
    told = json.loads(e2sci(*args, "config", "show", "--json", **options).stdout)
    return {
        section: {row["option"]: [r for r in told[section] if r["option"] == row["option"]]
                  for row in told[section]}
        for section in settings.SECTIONS
    }  # fmt: skip


# ---- strength ---------------------------------------------------------------------------------


def test_each_is_stronger_than_the_one_below(file):
    file.write_text("[edge]\nmax-tokens = 3\n")
    env = {"E2SCI_EDGE_MAX_TOKENS": "4"}
    assert said() == 3
    assert said(env=env) == 4
    assert said("--max-tokens", "5", env=env) == 5
    file.write_text("")
    assert said(env=env) == 4


def test_a_file_on_the_command_line_goes_before_the_environments(file, tmp_path):
    file.write_text("[edge]\nmax-tokens = 3\n")
    other = tmp_path / "other.toml"
    other.write_text("[edge]\nmax-tokens = 6\n")
    args = ["--config", str(other), "run", "hello", "--draft", DRAFT, "--mode", "draft", "--json"]
    assert len(json.loads(e2sci(*args).stdout)["token_ids"]) == 6


def test_the_default_place(tmp_path, monkeypatch):
    monkeypatch.delenv("E2SCI_CONFIG")
    monkeypatch.setattr(settings, "DEFAULT", tmp_path / "config.toml")
    assert said("--max-tokens", "2") == 2  # there need not be one
    assert e2sci("config", "path").stdout.strip() == str(tmp_path / "config.toml")
    (tmp_path / "config.toml").write_text("[edge]\nmax-tokens = 7\n")
    assert said() == 7


def test_what_a_section_is_for(file):
    """Each command takes what it has an option for; the others read no file at all."""
    file.write_text('[edge]\ndraft = "synthetic:seed=3"\nlisten = "127.0.0.1:1"\n')
    rows = shown()
    everyone = list(settings.SECTIONS["edge"])
    assert [row["commands"] for row in rows["edge"]["draft"]] == [everyone]
    [listen] = rows["edge"]["listen"]
    assert (listen["value"], listen["commands"]) == ("127.0.0.1:1", ["serve"])
    assert rows["cloud"]["listen"][0]["value"] == "127.0.0.1:7071"
    file.write_text("[no such thing\n")
    e2sci("models", "list")


def test_a_list_or_one_of_what_may_be_repeated(file):
    for written in ('"ws://127.0.0.1:1"', '["ws://127.0.0.1:1"]'):
        file.write_text(f"[edge]\ncloud = {written}\n")
        assert shown()["edge"]["cloud"][0]["value"] == ["ws://127.0.0.1:1"]
    env = {"E2SCI_EDGE_CLOUD": "ws://127.0.0.1:2 ws://127.0.0.1:3"}
    [row] = shown(env=env)["edge"]["cloud"]
    assert row["value"] == ["ws://127.0.0.1:2", "ws://127.0.0.1:3"]


def test_flags_that_say_yes_or_no(file):
    file.write_text("[edge]\nfill = false\nverbose = true\n[cloud]\notel = true\n")
    rows = shown()
    assert rows["edge"]["fill"][0]["value"] is False
    assert rows["edge"]["verbose"][0]["value"] is True
    assert rows["cloud"]["otel"][0]["value"] is True
    [row] = shown(env={"E2SCI_EDGE_FILL": "1"})["edge"]["fill"]
    assert (row["value"], row["where"]) == (True, "E2SCI_EDGE_FILL")


def test_what_is_of_one_call_only_is_not_configurable(file):
    for name in ("json", "trace", "config", "help"):
        file.write_text(f"[edge]\n{name} = true\n")
        refused(e2sci("config", "show", code=2), f"[edge] has no {name!r}")
    file.write_text("")
    assert said(env={"E2SCI_EDGE_JSON": "x", "E2SCI_EDGE_AS_JSON": "x"}) > 0


# ---- what is wrong ----------------------------------------------------------------------------

WRONG = {
    "[edg]": "did you mean 'edge'?",
    "[bench]": "it may be edge, cloud",
    "edge = 3": "write [edge] above",
    "[edge]\nmax_tokens = 3": ":2: [edge] has no 'max_tokens'; did you mean 'max-tokens'?",
    "[edge]\n\nmoed = 'sync'": ":3: [edge] has no 'moed'; did you mean 'mode'?",
    "[cloud]\nspeed = 'x'": "[cloud] has no 'speed'; `e2sci config show` has all",
    "[edge]\nmax-tokens = '3'": ':2: max-tokens is "3"; expected a whole number',
    "[edge]\nmax-tokens = 3.5": "expected a whole number",
    "[edge]\nmax-tokens = true": "expected a whole number",
    "[edge]\ntemperature = '.5'": "expected a number",
    "[edge]\nfill = 1": "expected true or false",
    "[edge]\ndraft = 7": "expected a text in quotes",
    "[edge]\ndraft = ['x']": "expected a text in quotes",
    "[edge]\nstop = [1]": "or a list of such",
    "[edge]\nsystem = 2026-01-01": "expected a text in quotes",
    "[edge]\nmode = 'fast'": "mode: 'fast' is not one of",
    "[edge]\nwait = -1.0": "wait: -1.0 is not in the range",
    "[cloud]\nlisten = 'here'": "expected HOST:PORT",
    "[cloud]\nslots = 0": "slots: 0 is not in the range",
    "[edge\n": "is no TOML",
    "[edge]\nmode = 'sync'\nmode = 'sync'": "is no TOML",
}


@pytest.mark.parametrize("text", WRONG)
def test_a_file_that_cannot_be_used(file, text):
    file.write_text(text)
    words = (str(file), WRONG[text])
    refused(e2sci("run", "hello", "--draft", DRAFT, "--mode", "draft", code=2), *words)
    refused(e2sci("config", "show", code=2), *words)


def test_a_file_that_is_none(file):
    refused(e2sci("run", "hello", code=2), str(file), "config init")
    file.write_bytes(b"\xff\xfe")
    refused(e2sci("run", "hello", code=2), "is no TOML")
    file.write_bytes(b"#" * (settings.MAX_BYTES + 1))
    refused(e2sci("run", "hello", code=2), "larger than 1 MiB")
    refused(e2sci("--config", str(file.parent), "run", "hello", code=2), "Is a directory")


SECRETS = (
    "api-key = 'x'", "api_key = 'x'", "key = 'x'", "password = 'x'", "hub-token = 'x'",
    "system = 'e2sci_0123abcd_0123456789abcdef0123456789abcdef'",
    "cloud = 'wss://me:secret@cloud.example'",
)  # fmt: skip


@pytest.mark.parametrize("written", SECRETS)
def test_secrets_are_sent_away(file, written):
    file.write_text(f"[edge]\n{written}\n")
    line = refused(e2sci("config", "show", code=2), "secret", "E2SCI_API_KEY", "key-file")
    assert "0123456789abcdef" not in line
    assert "me:secret" not in line


def test_names_of_files_with_secrets_are_welcome(file):
    file.write_text("[edge]\nkey-file = '/there'\n[cloud]\nengine-key-env = 'K'\n")
    rows = shown()
    assert rows["edge"]["key-file"][0]["value"] == "/there"
    assert rows["cloud"]["engine-key-env"][0]["value"] == "K"


def test_an_error_says_who_set_what_it_is_about(file):
    file.write_text("[edge]\nthreshold = 0.1\n")
    ask = ("run", "hello", "--draft", DRAFT)
    refused(e2sci(*ask, code=2), "has no threshold", f"threshold is set by {file}:2")
    env = {"E2SCI_EDGE_THRESHOLD": "0.2"}
    refused(e2sci(*ask, code=2, env=env), "set by E2SCI_EDGE_THRESHOLD")
    line = refused(e2sci(*ask, "--threshold", ".3", code=2), "has no threshold")
    assert "set by" not in line
    env = {"E2SCI_EDGE_MAX_TOKENS": "many"}
    refused(e2sci(*ask, code=2, env=env), "'many'", "set by E2SCI_EDGE_MAX_TOKENS")
    refused(e2sci("config", "show", code=2, env=env), "E2SCI_EDGE_MAX_TOKENS is 'many'")


# ---- e2sci config -----------------------------------------------------------------------------


def test_show_says_where_each_value_comes_from(file):
    file.write_text("# mine\n[edge]\n\n'max-tokens' = 3\n[cloud]\nslots = 2\n")
    rows = shown(env={"E2SCI_CLOUD_WAITING": "5", "E2SCI_EDGE_SEED": ""})
    assert rows["edge"]["max-tokens"][0]["where"] == f"{file}:4"
    assert rows["cloud"]["slots"][0]["where"] == f"{file}:6"
    waiting = rows["cloud"]["waiting"][0]
    assert (waiting["value"], waiting["where"]) == (5, "E2SCI_CLOUD_WAITING")
    assert rows["edge"]["seed"][0]["where"] is None
    defaults = {row["commands"][0]: row["value"] for row in rows["edge"]["temperature"]}
    assert defaults["serve"] != defaults["run"]


def test_show_for_people(file):
    file.write_text("[edge]\nmax-tokens = 3\n")
    result = e2sci("config", "show", env={"E2SCI_EDGE_SEDE": "1", "COLUMNS": "200"})
    assert result.stdout.startswith(str(file))
    [line] = [x for x in result.stdout.splitlines() if x.split()[:1] == ["max-tokens"]]
    assert line.split()[1:3] == ["3", f"{file}:2"]
    assert "E2SCI_EDGE_SEDE is no option's variable" in result.stderr


def test_a_first_file_changes_nothing_and_is_never_written_over_another(file):
    file.parent.rmdir()
    before = shown(env={"E2SCI_CONFIG": os.devnull})
    assert e2sci("config", "init").stdout.strip() == str(file)
    assert shown() == before
    written = file.read_text()
    refused(e2sci("config", "init", code=2), "there already")
    assert file.read_text() == written


def test_a_first_file_has_every_option_with_its_default(file):
    e2sci("config", "init")
    lines = file.read_text().splitlines()
    loose = [x[1:] if x[:1] == "#" and x[1:2] not in " " and "= (" not in x else x for x in lines]
    found = tomllib.loads("\n".join(loose))
    file.write_text("\n".join(loose))
    rows = shown()  # so each default is of a type and in a range that a file may hold
    for section, options in rows.items():
        for name, [row, *_] in options.items():
            assert any(x.startswith(f"#{name} = ") for x in lines), name
            if row["value"] not in (None, []):
                assert found[section][name] == row["value"]


def test_the_documents_example_is_one(file):
    page = Path(__file__).parent.parent / "docs/configuration.md"
    [example] = re.findall(r"^```toml\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    file.write_text(example)
    rows = shown()
    for section, values in tomllib.loads(example).items():
        for name, value in values.items():
            assert rows[section][name][0]["value"] == value


# ---- completion -------------------------------------------------------------------------------


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_asks_us_for_words(shell):
    script = e2sci("completion", shell).stdout
    assert f"_E2SCI_COMPLETE={shell}_complete" in script.replace('"', "")
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, check=True)


def completed(*words):
    """What zsh would be told."""
    env = {**os.environ, "_E2SCI_COMPLETE": "zsh_complete", "COMP_WORDS": " ".join(words[:-1])}
    env |= {"COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
    code = "from e2sci.cli import main; main(prog_name='e2sci')"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    return done.stdout.split("\n")[1::3]


def test_commands_options_and_choices_are_completed():
    assert set(completed("e2sci", "c")) == {c for c in COMMANDS if c.startswith("c")}
    assert completed("e2sci", "run", "--max") == ["--max-tokens"]
    assert completed("e2sci", "run", "--accept", "el") == ["elastic"]


def test_every_configurable_command_is_there():
    context = click.Context(main)
    for commands in settings.SECTIONS.values():
        for command in commands:
            assert settings.configurable_options(settings.command_of(context, command))
