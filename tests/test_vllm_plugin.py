"""What vLLM loads: the store of drafts, the socket they come on, and the class that is asked."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest

from e2sci.vllm_plugin import proposer as module
from e2sci.vllm_plugin.proposer import Proposer, numbered
from e2sci.vllm_plugin.store import Store, next_key, prefix_key
from e2sci.vllm_plugin.wire import AddressError, Drafts, Receiver, Sender, default_address
from live import free_port

VOCAB = 1000
PREFIX = [5, 0, 7, 999, 7]


def ids(tokens) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


def put(store: Store, prefix, drafts) -> None:
    store.put(prefix_key(prefix), len(prefix), drafts)


@pytest.fixture
def store():
    return Store(VOCAB)


# ---- keys and the store -------------------------------------------------------------------


def test_a_key_grows_token_by_token():
    rng = np.random.default_rng(3)
    tokens = rng.integers(0, 151_936, 3000).tolist()
    key = prefix_key([])
    for i, token in enumerate(tokens):
        if i % 500 == 0:
            assert key == prefix_key(tokens[:i]) == prefix_key(ids(tokens[:i]))
        key = next_key(key, token)


def test_keys_tell_prefixes_apart():
    prefixes = [[], [0], [0, 0], [1], [1, 0], [0, 1], [2**31 - 1], PREFIX, PREFIX[::-1]]
    assert len({prefix_key(p) for p in prefixes}) == len(prefixes)


def test_a_draft_is_found_wherever_the_server_has_got_to(store):
    put(store, PREFIX, [1, 2, 3])
    put(store, [*PREFIX, 1, 2, 3], [4, 5])
    assert store.behind(ids(PREFIX), 10) == [1, 2, 3, 4, 5]
    assert store.behind(ids([*PREFIX, 1, 2]), 2) == [3, 4]
    assert store.behind(ids([*PREFIX, 1, 2, 3, 4, 5]), 10) == []
    assert store.behind(ids([*PREFIX, 2]), 10) == []
    assert store.behind(ids([6, *PREFIX[1:]]), 10) == []


def test_the_newest_branch_wins(store):
    put(store, PREFIX, [1, 2, 3])
    put(store, PREFIX, [1, 9])
    assert store.behind(ids(PREFIX), 10) == [1, 9]


def test_ids_that_are_no_tokens_end_a_window(store):
    put(store, PREFIX, [1, VOCAB, 2])
    put(store, [3], [-1, 4])
    assert store.behind(ids(PREFIX), 10) == [1]
    assert store.behind(ids([3]), 10) == []
    assert len(store) == 1


def test_memory_is_bounded_and_the_oldest_go_first():
    store = Store(VOCAB, most=10)
    for start in range(100):
        put(store, [start], [1, 2, 3, 4])
        assert len(store) <= 10
    assert store.behind(ids([99]), 10) == [1, 2, 3, 4]
    assert store.behind(ids([90]), 10) == []
    assert sum(store._at.values()) == len(store)


def test_stale_drafts_expire_and_repeated_ones_live_on():
    clock = [0.0]
    store = Store(VOCAB, seconds=5, clock=lambda: clock[0])
    put(store, PREFIX, [1, 2])
    put(store, [3], [4])
    clock[0] = 4
    put(store, PREFIX, [1, 2])
    clock[0] = 6
    store.expire()
    assert store.behind(ids([3]), 10) == []
    assert store.behind(ids(PREFIX), 10) == [1, 2]
    clock[0] = 10
    store.expire()
    assert len(store) == 0
    assert not store._at


# ---- the socket ---------------------------------------------------------------------------


def exchange(receiver: Receiver, sender: Sender, message: Drafts) -> Drafts:
    """Send until it arrives: a subscriber joins when it likes."""
    for _ in range(500):
        sender.send(message)
        time.sleep(0.01)
        if got := list(receiver.drain()):
            return got[0]
    raise AssertionError("it did not arrive in time")


@pytest.mark.parametrize("kind", ["ipc", "tcp"])
def test_drafts_travel_from_any_sender_and_to_any_receiver(drafts_at, kind):
    here = drafts_at if kind == "ipc" else f"tcp://127.0.0.1:{free_port()}"
    there = f"{here}-2" if kind == "ipc" else f"tcp://127.0.0.1:{free_port()}"
    message = Drafts(2**64 - 1, 5, [1, 151_935])
    receivers = [Receiver(here), Receiver(there)]
    senders = [Sender([here, there]), Sender([here])]
    try:
        assert exchange(receivers[0], senders[0], message) == message
        assert exchange(receivers[1], senders[0], message) == message
        assert exchange(receivers[0], senders[1], message) == message
    finally:
        for end in receivers + senders:
            end.close()


def test_a_receiver_that_comes_back_is_found_again(drafts_at):
    sender = Sender([drafts_at])
    for key in (1, 2):
        receiver = Receiver(drafts_at)
        try:
            assert exchange(receiver, sender, Drafts(key, 1, [1])).key == key
        finally:
            receiver.close()
    sender.send(Drafts(3, 1, [1]))  # nobody is there, and it does not wait
    sender.close()


def test_what_is_no_draft_is_passed_over(drafts_at):
    receiver, sender = Receiver(drafts_at), Sender([drafts_at])
    try:
        exchange(receiver, sender, Drafts(1, 1, [1]))
        for junk in (b"", b"\xc1", b"\x93\x01\x02", b"x" * 5000):
            sender._socket.send(b"e2sci-drafts-1:" + junk)
        sender._socket.send(b"something else")
        list(receiver.drain())
        assert exchange(receiver, sender, Drafts(2, 1, [1])).key == 2
    finally:
        receiver.close()
        sender.close()


def test_two_engines_dont_share_an_address(drafts_at):
    receiver = Receiver(drafts_at)
    other = (
        "import sys; from e2sci.vllm_plugin.wire import Receiver, AddressError\n"
        "try: Receiver(sys.argv[1])\nexcept AddressError as error: print(error)"
    )
    said = subprocess.run([sys.executable, "-c", other, drafts_at], capture_output=True, text=True)
    assert "another engine listens" in said.stdout
    assert "E2SCI_DRAFTS" in said.stdout
    receiver.close()


@pytest.mark.parametrize(
    "bad",
    [
        "tcp://10.0.0.1:5000",
        "tcp://0.0.0.0:5000",
        "tcp://localhost:5000",
        "tcp://127.0.0.1:0",
        "tcp://127.0.0.1:70000",
        "ipc://relative",
        "udp://127.0.0.1:1",
        "",
    ],
)
def test_drafts_stay_on_this_machine(bad):
    for end in (Receiver, lambda address: Sender([address])):
        with pytest.raises(AddressError, match="they stay on this machine"):
            end(bad)


def test_a_folder_of_others_is_refused(tmp_path):
    tmp_path.chmod(0o777)
    with pytest.raises(AddressError, match="written to by others"):
        Receiver(f"ipc://{tmp_path}/drafts")
    with pytest.raises(AddressError, match="longer than"):
        Sender([f"ipc://{tmp_path}/{'x' * 100}/drafts"])


def test_the_default_address(monkeypatch):
    monkeypatch.delenv("E2SCI_DRAFTS", raising=False)
    assert default_address().endswith(f"/e2sci-{os.getuid()}/drafts")
    monkeypatch.setenv("E2SCI_DRAFTS", "tcp://127.0.0.1:5000")
    assert default_address() == "tcp://127.0.0.1:5000"
    assert numbered(default_address(), 2) == "tcp://127.0.0.1:5002"
    assert numbered("ipc:///run/e2sci/drafts", 0) == "ipc:///run/e2sci/drafts"
    assert numbered("ipc:///run/e2sci/drafts", 1) == "ipc:///run/e2sci/drafts-1"


# ---- the class ----------------------------------------------------------------------------


def config(**parallel) -> SimpleNamespace:
    """As much of a VllmConfig as is looked at."""
    return SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=3),
        model_config=SimpleNamespace(max_model_len=12, get_vocab_size=lambda: VOCAB),
        parallel_config=SimpleNamespace(
            **{"tensor_parallel_size": 1, "data_parallel_index": 0, **parallel}
        ),
    )


@pytest.fixture
def vllm(monkeypatch):
    """A vLLM to import; its tensor-parallel rank is `rank`."""
    fake = SimpleNamespace(__version__="0.32.0", rank=0)
    distributed = SimpleNamespace(get_tensor_model_parallel_rank=lambda: fake.rank)
    monkeypatch.setitem(sys.modules, "vllm", fake)
    monkeypatch.setitem(sys.modules, "vllm.distributed", distributed)
    return fake


@pytest.fixture
def proposer(vllm, drafts_at):
    made = Proposer(config(), drafts_at)
    yield made
    made.close()


def ask(proposer: Proposer, *rows: list[int], reading=()) -> list[list[int]]:
    """What it proposes behind `rows`; those numbered in `reading` are still being read."""
    table = np.zeros((len(rows) + 2, 12), dtype=np.int32)
    for i, row in enumerate(rows):
        table[i, : len(row)] = row
    sampled = [[] if i in reading else [row[-1]] for i, row in enumerate(rows)]
    lengths = np.array([len(row) for row in rows] + [0, 0], dtype=np.int32)
    return proposer.propose(sampled, lengths, table, slot_mappings=None)


def test_each_request_gets_its_own_drafts(proposer):
    put(proposer._store, PREFIX, [1, 2, 3, 4])
    put(proposer._store, [8, 9], [6])
    assert proposer.load_model(object()) is None
    assert ask(proposer, PREFIX, [8, 9], [3], [8, 9], reading=[3]) == [[1, 2, 3], [6], [], []]


def test_nothing_is_proposed_beyond_the_context(proposer):
    for length in (9, 10, 11, 12):
        put(proposer._store, [4] * length, [1, 2, 3])
    assert ask(proposer, [4] * 9, [4] * 10, [4] * 11, [4] * 12) == [[1, 2], [1], [], []]


def test_drafts_come_over_the_socket(proposer, drafts_at):
    sender = Sender([drafts_at])
    for _ in range(500):
        sender.send(Drafts(prefix_key(PREFIX), len(PREFIX), [7, 8]))
        time.sleep(0.01)
        if ask(proposer, PREFIX) == [[7, 8]]:
            break
    else:
        raise AssertionError("they did not arrive in time")
    sender.close()


def test_an_error_costs_the_drafts_and_is_said_once(proposer, monkeypatch, caplog):
    put(proposer._store, PREFIX, [1])
    monkeypatch.setattr(proposer._store, "behind", lambda *_: 1 / 0)
    for _ in range(3):
        assert ask(proposer, PREFIX, PREFIX) == [[], []]
    assert [r.message for r in caplog.records if r.levelno == logging.ERROR] == [
        "E²-SCI: requests go on without drafts: division by zero"
    ]


def test_an_address_that_cant_be_had_costs_the_drafts(vllm, caplog):
    made = Proposer(config(), "tcp://10.0.0.1:5000")
    assert ask(made, PREFIX) == [[]]
    assert "requests go on without drafts" in caplog.text


def test_only_the_rank_that_counts_listens(vllm, drafts_at):
    vllm.rank = 1
    made = Proposer(config(tensor_parallel_size=2), drafts_at)
    assert made._receiver is None
    assert ask(made, PREFIX) == [[]]
    vllm.rank = 0
    made = Proposer(config(tensor_parallel_size=2), drafts_at)
    assert made._receiver is not None
    made.close()


def test_replicas_listen_beside_each_other(vllm, drafts_at, monkeypatch):
    monkeypatch.setenv("E2SCI_DRAFTS", drafts_at)
    listens = []
    monkeypatch.setattr(module, "Receiver", listens.append)
    Proposer(config())
    Proposer(config(data_parallel_index=1))
    assert listens == [drafts_at, f"{drafts_at}-1"]


def test_an_untried_version_is_told_of(vllm, drafts_at, caplog):
    for version, warned in (("0.31.4", False), ("0.33.0", True)):
        vllm.__version__, caplog.handler.records = version, []
        made = Proposer(config(), drafts_at)
        assert ("e2sci doctor" in caplog.text) is warned
        made.close()
        caplog.clear()


def test_it_imports_nothing_that_vllm_has_not():
    """No other room, and no dependency beyond vLLM's own."""

    def loaded(what: str) -> set[str]:
        code = f"import sys, {what}; print(*sys.modules)"
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        return set(run.stdout.split())

    more = loaded("e2sci.vllm_plugin") - loaded("logging, numpy.typing, msgspec, zmq")
    foreign = {m for m in more if m.split(".")[0] not in sys.stdlib_module_names}
    assert foreign == {
        "e2sci",
        "e2sci.vllm_plugin",
        *(f"e2sci.vllm_plugin.{part}" for part in ("proposer", "store", "wire")),
    }
