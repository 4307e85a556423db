"""Keys: what the file keeps, who is found by it, and that it is never half written."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import re
import stat

import pytest
from click.testing import CliRunner

from e2sci.cli import main
from e2sci.runtime.admission import Client
from e2sci.server import keys as store
from e2sci.server.keys import Keys

LIMITS = {"sessions": 2, "tokens_per_minute": 600, "context": 99}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "keys.json"


def e2sci(path, *args):
    return CliRunner().invoke(main, ["keys", *args, "--file", str(path)])


def refused(result, *words):
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    for word in words:
        assert word in result.stderr


# ---- the file ---------------------------------------------------------------------------------


def test_a_key_is_found_by_its_text_alone(path):
    key, text = store.add(path, "alice", **LIMITS)
    other, _ = store.add(path, "alice")
    keys = Keys.load(path)
    assert re.fullmatch(r"e2sci_[0-9a-f]{8}_[0-9a-f]{64}", text)
    assert keys.find(text) == Client(f"alice/{key.id}", **LIMITS)
    for wrong in (
        "",
        "e2sci_",
        text[:-1],
        text + "0",
        text + "\n",
        text.upper(),
        text[:-1] + ("1" if text[-1] == "0" else "0"),
        text.replace(key.id, other.id),
        text.replace(key.id, "00000000"),
        text.removeprefix("e2sci_"),
        "é" * 79,
    ):
        assert keys.find(wrong) is None, wrong


def test_the_file_does_not_hold_the_secret(path):
    _, text = store.add(path, "alice")
    secret = text.rpartition("_")[2]
    assert secret not in path.read_text()
    assert {p.name for p in path.parent.iterdir()} == {"keys.json", "keys.json.lock"}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_an_unknown_id_is_hashed_and_compared_as_a_known_one_is(path, monkeypatch):
    _, text = store.add(path, "alice")
    keys = Keys.load(path)
    compared = []
    real = store.hmac.compare_digest
    monkeypatch.setattr(
        store.hmac, "compare_digest", lambda a, b: compared.append((len(a), len(b))) or real(a, b)
    )
    unknown = text.replace(text[6:14], "f" * 8)
    assert [keys.find(text) is None, keys.find(unknown) is None] == [False, True]
    assert compared == [(64, 64)] * 2


def test_a_running_cloud_sees_every_change(path):
    key, text = store.add(path, "alice")
    keys = Keys.load(path)
    client = keys.find(text)
    assert keys.holds(client)
    _, second = store.add(path, "bob", sessions=1)
    assert keys.find(second).sessions == 1
    store.revoke(path, key.id)
    assert keys.find(text) is None
    assert not keys.holds(client)
    assert keys.find(second)


def test_an_edited_limit_is_a_change_of_the_client(path):
    _, text = store.add(path, "alice", sessions=1)
    keys = Keys.load(path)
    client = keys.find(text)
    path.write_text(path.read_text().replace('"sessions": 1', '"sessions": 5'))
    assert not keys.holds(client)
    assert keys.find(text).sessions == 5


DAMAGED = {
    "nothing": "",
    "no JSON": "{",
    "no UTF-8": "\udcff",
    "another shape": "[]",
    "another version": '{"version": 2, "keys": []}',
    "a name of several lines": ("alice", "al\\nice"),
    "a limit of none": ('"sessions": 2', '"sessions": 0'),
    "a limit in words": ('"sessions": 2', '"sessions": "two"'),
    "a hash that is none": ('"hash": "', '"hash": "é'),
    "an id that is none": ('"id": "', '"id": "x'),
}


def damage(path, how):
    text = path.read_text()
    said = how if isinstance(how, str) else text.replace(*how)
    assert said != text
    path.write_bytes(said.encode("utf-8", "surrogateescape"))


@pytest.mark.parametrize("how", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_changes_nothing_and_is_told_of_once(path, caplog, how):
    _, text = store.add(path, "alice", sessions=2)
    keys = Keys.load(path)
    damage(path, how)
    with pytest.raises(ValueError, match="key file"):
        Keys.load(path)
    for _ in range(3):
        assert keys.find(text)
    [record] = caplog.records
    assert record.levelno == logging.ERROR
    assert "the keys read before stay in force" in record.getMessage()


def test_a_file_that_has_gone_changes_nothing(path, caplog):
    _, text = store.add(path, "alice")
    keys = Keys.load(path)
    path.rename(path.with_name("away"))
    assert keys.find(text)
    assert keys.find(text)
    assert len(caplog.records) == 1
    store.add(path, "bob")
    assert keys.find(text) is None


def test_an_id_that_comes_twice(path):
    store.add(path, "alice")
    file = json.loads(path.read_text())
    path.write_text(json.dumps({**file, "keys": file["keys"] * 2}))
    with pytest.raises(ValueError, match="twice"):
        Keys.load(path)


def test_a_file_at_and_above_its_size(path):
    store.add(path, "alice")
    text = path.read_text()
    path.write_text(text + " " * (store.MAX_BYTES - len(text)))
    assert len(store.read(path)) == 1
    path.write_text(path.read_text() + " ")
    with pytest.raises(ValueError, match="over"):
        store.read(path)


@pytest.mark.skipif(os.name != "posix", reason="file modes")
@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_a_file_that_others_may_write_is_not_trusted(path, mode):
    store.add(path, "alice")
    path.chmod(0o644)
    Keys.load(path)
    path.chmod(mode)
    with pytest.raises(ValueError, match="chmod 600"):
        Keys.load(path)


def _adds(path, n):
    for _ in range(n):
        store.add(path, "alice")


def test_writers_wait_for_each_other_and_readers_see_whole_files(path):
    store.add(path, "alice")
    keys = Keys.load(path)
    fork = multiprocessing.get_context("fork")
    writers = [fork.Process(target=_adds, args=(path, 10)) for _ in range(4)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert store.read(path)
    for writer in writers:
        writer.join(30)
    assert len({key.id for key in store.read(path)}) == 41
    keys._refresh()
    assert len(keys._clients) == 41


def test_a_writer_that_died_is_in_nobodys_way(path):
    part = path.with_name(".keys.json.part")
    part.write_text("half")
    store.add(path, "alice")
    assert len(store.read(path)) == 1
    assert not part.exists()


def test_a_lock_that_is_held(path, monkeypatch):
    monkeypatch.setattr(store, "LOCK_SECONDS", 0.1)
    with store._locked(path), pytest.raises(ValueError, match="someone else"):
        store.add(path, "alice")
    assert not path.exists()


@pytest.mark.parametrize("name", ["a", "x" * 64, "A.b_c@d-9"])
def test_names(path, name):
    key, text = store.add(path, name)
    assert Keys.load(path).find(text).name == f"{name}/{key.id}"


@pytest.mark.parametrize("name", ["", "x" * 65, "a b", "a/b", "é", "a\n"])
def test_no_names(path, name):
    with pytest.raises(ValueError, match="no name for a key"):
        store.add(path, name)
    assert not path.exists()


# ---- e2sci keys -------------------------------------------------------------------------------


def test_the_commands(path):
    made = e2sci(path, "add", "alice", "--sessions", "2", "--context", "99")
    text = made.stdout.strip()
    assert made.exit_code == 0
    assert "shown this once" in made.stderr
    client = Keys.load(path).find(text)
    assert (client.sessions, client.tokens_per_minute, client.context) == (2, None, 99)
    said = json.loads(e2sci(path, "add", "bob", "--json").stdout)
    assert Keys.load(path).find(said["key"]).name == f"bob/{said['id']}"

    rows = json.loads(e2sci(path, "list", "--json").stdout)
    assert [set(row) for row in rows] == [
        {"id", "name", "created", "revoked", "sessions", "tokens_per_minute", "context"}
    ] * 2
    assert e2sci(path, "revoke", said["id"]).exit_code == 0
    assert e2sci(path, "revoke", said["id"]).exit_code == 0
    table = e2sci(path, "list").stdout
    for word in ("alice", "bob", "in force", "revoked 20", " 2 ", " 99 "):
        assert word in table
    for row in json.loads(path.read_text())["keys"]:
        assert row["hash"] not in table
    assert Keys.load(path).find(said["key"]) is None


def test_mistakes_at_the_command_line(path):
    refused(e2sci(path, "list"), str(path), "e2sci keys add NAME")
    refused(e2sci(path, "revoke", "00000000"), "e2sci keys add NAME")
    refused(e2sci(path, "add", "a b"), "no name for a key")
    refused(e2sci(path, "add", "a", "--sessions", "0"), "--sessions")
    assert not path.exists()
    e2sci(path, "add", "alice")
    refused(e2sci(path, "revoke", "00000000"), "no key '00000000'")
    path.write_text("{")
    before = path.read_bytes()
    refused(e2sci(path, "add", "bob"), "damaged")
    assert path.read_bytes() == before


def test_a_folder_that_can_not_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    refused(e2sci(tmp_path / "file" / "keys.json", "add", "alice"), "can't write")
