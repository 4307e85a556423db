"""`e2sci chat`: turns build on each other, commands change them, only the user ends it."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from e2sci.cli import main
from e2sci.cli.conversation import COMMANDS, Conversation
from e2sci.cli.printer import LEGEND
from e2sci.engines.synthetic import EOS, SyntheticConfig
from e2sci.runtime.edge import BlockingEdge
from e2sci.runtime.options import Options
from e2sci.session.edge import Origin
from live import LiveCloud, Watched, draft, free_port

DRAFT = "synthetic:seed=11,divergence=0.5"
ENDLESS = ("--logit-bias", f"{EOS}=-100")


def chat(*lines, cloud=None, code=0, args=("--max-tokens", "20"), model=DRAFT):
    where = ["--cloud", cloud.url] if cloud else ["--mode", "draft"]
    said = "".join(f"{line}\n" for line in lines)
    result = CliRunner().invoke(main, ["chat", "--draft", model, *where, *args], input=said)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result


def saved(path):
    return json.loads(path.read_text())["messages"]


def errors(result):
    return [line for line in result.stderr.splitlines() if line.startswith("Error: ")]


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


# ---- turns ------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["cloud", "draft", "sync", "pipelined"])
def test_an_answer_builds_on_what_was_said(cloud, tmp_path, mode):
    file = tmp_path / "chat.json"
    args = ("--max-tokens", "20", "--mode", mode, "--system", "Be brief.")
    result = chat("hello", "", "and then?", f"/save {file}", cloud=cloud, args=args)
    with BlockingEdge(cloud.url, draft()) as edge:
        same = {"mode": mode, "max_tokens": 20, "system": "Be brief."}
        first = edge.generate([user("hello")], **same).text
        talk = [user("hello"), assistant(first), user("and then?")]
        second = edge.generate(talk, **same).text
    assert result.stdout == f"{first}\n{second}\n"
    assert saved(file) == [{"role": "system", "content": "Be brief."}, *talk, assistant(second)]


def test_both_ends_keep_what_they_have_read():
    """The second turn feeds less than its prompt has, and the text is what it would be."""
    far = Watched(slots=1)
    first, args = "x" * 300, ("--max-tokens", "20", "--mode", "cloud")
    with LiveCloud(far, keep_caches=True) as cloud:
        result = chat(first, "more", "/stats", cloud=cloud, args=args)
        behind = int(re.search(r"behind a prompt of (\d+)", result.stderr)[1])
        reads = [max(p.values()) for p in far.passes if max(p.values()) > 1]
        assert 300 < reads[0] <= behind
        assert sum(reads[1:]) < 100
    with LiveCloud() as cloud:
        assert chat(first, "more", cloud=cloud, args=args).stdout == result.stdout


def test_the_draft_keeps_what_it_has_read(monkeypatch):
    near = Watched(SyntheticConfig(seed=11, divergence=0.5), slots=1)
    monkeypatch.setattr("e2sci.cli.draft.load", lambda *_, **__: near)
    result = chat("x" * 300, "more")
    reads = [max(p.values()) for p in near.passes if max(p.values()) > 1]
    assert reads[0] > 300
    assert sum(reads[1:]) < 100
    assert len(result.stdout) > 60
    assert near.length(0) == 0


def test_origins_are_coloured_as_in_run(cloud):
    args = ("--max-tokens", "40", "--no-fill")
    plain = chat("hello", cloud=cloud, args=args)
    shown = chat("/origin on", "hello", "/origin off", "again", cloud=cloud, args=args)
    assert shown.stdout.startswith(plain.stdout)
    assert shown.stderr.count(LEGEND[Origin.AGREED]) == 1
    assert LEGEND[Origin.CORRECTED] in shown.stderr
    flagged = chat("hello", cloud=cloud, args=(*args, "--show-origin"))
    assert LEGEND[Origin.AGREED] in flagged.stderr


def test_an_answer_that_is_cut_says_so(cloud):
    assert "note: cut at 20 tokens" in chat("hello", cloud=cloud).stderr


def test_quit_ends_it_and_so_does_the_end_of_lines(cloud):
    assert chat("/quit", "hello", cloud=cloud).stdout == ""
    assert chat(cloud=cloud).stdout == ""


# ---- commands ---------------------------------------------------------------------------------


def talking(**given):
    talk = Conversation(Options(**given))
    for question, answer in (("one", "1"), ("two", "2")):
        talk.take(question)
        assert talk.due
        talk.answered(answer)
    assert not talk.due
    return talk


def test_undo_takes_a_question_and_its_answer_back():
    talk = talking()
    assert talk.take("/undo") == "taken back; 1 question left"
    assert talk.messages == [user("one"), assistant("1")]
    talk.take("/undo")
    with pytest.raises(ValueError, match="nothing to take back"):
        talk.take("/undo")


def test_retry_asks_again_with_another_seed():
    talk = talking()
    assert "greedy" in talk.take("/retry")
    assert talk.due
    assert talk.messages == [user("one"), assistant("1"), user("two")]
    assert talk.options.sampling.seed == 1
    talk.answered("II")
    assert talk.messages[-1] == assistant("II")


def test_a_retry_without_an_answer_leaves_the_old_one():
    talk = talking()
    talk.take("/retry")
    talk.answered("")
    assert talk.messages[-1] == assistant("2")
    assert not talk.due


def test_a_question_without_an_answer_is_taken_back():
    talk = talking()
    talk.take("three")
    talk.answered("")
    assert talk.messages[-1] == assistant("2")


def test_a_retry_is_another_answer(cloud, tmp_path):
    file = tmp_path / "chat.json"
    args = ("--max-tokens", "20", "--temperature", "1")
    result = chat("hello", "/retry", f"/save {file}", cloud=cloud, args=args)
    first, second = result.stdout[:-1].split(saved(file)[1]["content"])
    assert first.strip()
    assert second == ""
    assert len(saved(file)) == 2


def test_choices_bring_their_details_along():
    given = {"mode": "pipelined", "accept": "elastic", "threshold": 0.1, "measure": "regret"}
    talk = talking(**given, window=3)
    assert talk.take("/accept") == "accept elastic"
    assert talk.take("/accept strict") == "accept strict"
    assert (talk.options.threshold, talk.options.measure) == (None, "js")
    assert talk.take("/mode sync") == "mode sync"
    assert talk.options.window is None
    talk.take("/accept elastic")
    talk.take("/mode pipelined")
    assert talk.options == talking(**given, window=3).options


def test_a_system_message_comes_and_goes():
    talk = talking()
    assert talk.take("/system  Be brief. ") == "system message set"
    assert talk.options.system == "Be brief."
    assert talk.take("/system") == "no system message"
    assert talk.options.system is None


MISTAKES = {
    "/sav x": "no command /sav; did you mean save?",
    "/": "no command /",
    "/quit now": "/quit takes nothing",
    "/save": "/save needs FILE",
    "/origin": "/origin needs on|off",
    "/origin maybe": "on or off",
    "/mode fast": "no mode 'fast'; there is cloud",
    "/mode pipeline": "did you mean pipelined?",
    "/accept elastc": "did you mean elastic?",
    "/save /there/is/no/such/folder": "can't write",
    "/stats": "no answer to tell of",
    "/retry": "no question",
    "/undo": "nothing to take back",
}


def test_a_command_that_cannot_be_done_is_one_line_and_changes_nothing():
    result = chat(*MISTAKES)
    lines = errors(result)
    assert len(lines) == len(MISTAKES) == len(result.stderr.splitlines())
    for line, words in zip(lines, MISTAKES.values(), strict=True):
        assert words in line
    talk = talking()
    before = (talk.options, list(talk.messages))
    for line in [*list(MISTAKES)[:-3], "/accept elastic extra"]:
        with pytest.raises(ValueError, match=r"."):
            talk.take(line)
    assert (talk.options, talk.messages) == before


def test_contradictions_are_told():
    talk = talking(accept="elastic")
    with pytest.raises(ValueError, match="mode cloud is the target alone"):
        talk.take("/mode cloud")
    assert talk.options.mode == Options.mode


def test_a_file_that_is_there_is_left_alone(tmp_path):
    file = tmp_path / "chat.json"
    file.write_text("mine")
    assert "there already" in chat("hello", f"/save {file}").stderr
    assert file.read_text() == "mine"


def test_help_has_every_command():
    said = chat("/help").stderr.splitlines()
    assert [line.split()[0] for line in said] == [f"/{name}" for name in COMMANDS]


def test_the_document_has_every_command():
    page = (Path(__file__).parent.parent / "docs/chat.md").read_text()
    assert set(re.findall(r"`/(\w+)", page)) == set(COMMANDS)


def test_stats(cloud):
    said = chat("hello", "and?", "/stats", cloud=cloud, args=("--max-tokens", "9", "--no-fill"))
    assert "last: 9 tokens in" in said.stderr
    assert "all: 2 answers, 18 tokens" in said.stderr
    assert "of drafts accepted" in said.stderr
    tolerant = ("--max-tokens", "20", "--accept", "elastic", "--no-fill")
    assert "threshold 0." in chat("hello", "/stats", cloud=cloud, args=tolerant).stderr


# ---- what goes wrong --------------------------------------------------------------------------


def test_a_mode_that_wants_a_cloud_finds_it(cloud):
    args = ("--mode", "draft", "--max-tokens", "20")
    result = chat("/mode pipelined", "hello", cloud=cloud, args=args)
    assert result.stdout == chat("hello", cloud=cloud).stdout


def test_no_cloud_at_the_beginning():
    nowhere = ("--cloud", f"ws://127.0.0.1:{free_port()}")
    result = CliRunner().invoke(main, ["chat", "--draft", DRAFT, *nowhere], input="hello\n")
    assert (result.exit_code, result.stdout) == (2, "")
    [line] = errors(result)
    assert "nothing listens there" in line


def test_a_prompt_beyond_the_context_takes_nothing_along(cloud, tmp_path):
    file = tmp_path / "chat.json"
    lines = ("hello", "x" * 5000, f"/save {file}", "and?")
    result = chat(*lines, cloud=cloud)
    [line] = errors(result)
    assert "the context holds 4096" in line
    assert [m["content"] for m in saved(file)][::2] == ["hello"]
    assert result.stdout.count("\n") >= 2


def test_a_cloud_that_is_lost_costs_an_answer_and_not_the_chat(tmp_path):
    file = tmp_path / "chat.json"
    far = Watched(seconds=0.002)
    with LiveCloud(far) as cloud:
        far.hook = lambda n: n == 12 and cloud.kill()
        args = ("--max-tokens", "400", "--wait", "0", *ENDLESS)
        lines = ("hello", "/stats", f"/save {file}", "and?", "/mode draft", "still there?")
        result = chat(*lines, cloud=cloud, args=args)
    lost, gone = errors(result)
    assert "the cloud is gone" in lost
    assert "nothing listens there" in gone
    assert saved(file)[1]["content"]
    assert saved(file)[1]["content"] in result.stdout


def test_a_cloud_that_comes_back_is_told_of():
    far = Watched(seconds=0.002)
    with LiveCloud(far) as cloud:
        whole = chat("hello", cloud=cloud, args=("--max-tokens", "60", *ENDLESS))
        far.passes.clear()

        def restart(n):
            if n == 8:
                far.hook = None
                cloud.kill()
                threading.Thread(target=again).start()

        def again():
            cloud._thread.join(10)
            cloud.start()

        far.hook = restart
        result = chat("hello", cloud=cloud, args=("--max-tokens", "60", *ENDLESS))
    assert result.stdout == whole.stdout
    assert "note: " in result.stderr
    assert errors(result) == []


def test_a_model_without_a_template(monkeypatch):
    monkeypatch.setattr("e2sci.engines.synthetic.TEMPLATE", None)
    [line] = errors(chat("hello", code=2))
    assert "no chat template" in line


def test_ctrl_c_stops_the_answer_and_not_the_chat(tmp_path):
    file = tmp_path / "chat.json"
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    me, far = threading.main_thread(), Watched(seconds=0.005)
    far.hook = lambda n: n == 15 and signal.pthread_kill(me.ident, signal.SIGINT)
    try:
        with LiveCloud(far) as cloud:
            lines = ("hello", f"/save {file}", "/mode draft", "and?")
            result = chat(*lines, cloud=cloud, args=("--max-tokens", "100", *ENDLESS))
            cloud.check()
    finally:
        signal.signal(signal.SIGINT, handler)
    assert "note: stopped" in result.stderr
    stopped = saved(file)[1]["content"]
    assert 0 < len(stopped) < 100
    assert result.stdout.startswith(stopped + "\n")
    assert len(result.stdout) > len(stopped) + 50


# ---- a terminal -------------------------------------------------------------------------------


class Terminal:
    """`e2sci chat` at a terminal of its own."""

    def __init__(self, *args):
        self.here, there = pty.openpty()
        self.child = subprocess.Popen(
            [sys.executable, "-m", "e2sci", "chat", *args],
            stdin=there, stdout=there, stderr=there, close_fds=True,
            env={**os.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"},
            preexec_fn=lambda: (os.setsid(), fcntl.ioctl(0, termios.TIOCSCTTY, 0),
                                signal.signal(signal.SIGINT, signal.default_int_handler)),
        )  # fmt: skip
        os.close(there)
        self.seen = ""

    def types(self, text):
        os.write(self.here, text.encode())

    def shows(self, text, seconds=30):
        """Wait until `text` has come; then forget what stands before it."""
        self._until(lambda: text in self.seen, seconds)
        self.seen = self.seen.partition(text)[2]

    def shows_something(self, seconds=30):
        """Wait for 40 characters, whatever they are."""
        self._until(lambda: len(self.seen) > 40, seconds)

    def _until(self, condition, seconds):
        end = time.monotonic() + seconds
        while not condition():
            ready, _, _ = select.select([self.here], [], [], max(0, end - time.monotonic()))
            assert ready, self.seen
            self.seen += os.read(self.here, 4096).decode(errors="replace")

    def close(self):
        self.child.kill()
        self.child.wait()
        os.close(self.here)


@pytest.fixture
def terminal():
    opened = []

    def start(*args):
        opened.append(Terminal(*args))
        return opened[-1]

    yield start
    for each in opened:
        each.close()


def test_at_a_terminal(terminal):
    pytest.importorskip("prompt_toolkit")
    with LiveCloud(Watched(SyntheticConfig(seed=11), seconds=0.02)) as cloud:
        at = terminal("--draft", DRAFT, "--cloud", cloud.url, "--max-tokens", "4000", *ENDLESS)
        at.shows("›")
        at.types("half a line\x03")  # is dropped
        at.types("/sta")
        at.shows("/sta")
        at.types("\t")  # is completed
        at.shows("ts")
        at.types("\r")
        at.shows("Error: there is no answer")
        at.shows("›")
        at.types("hello\r")
        at.shows("\x1b[?2004l")  # the prompt has let go of the terminal
        at.shows_something()  # it would write for minutes
        at.types("\x03")
        at.shows("note: stopped")
        at.shows("›")
        at.types("\x1b[A\x1b[A\r")  # the line before the last: /stats
        at.shows("Error: there is no answer")
        at.shows("›")
        at.types("/undo\r")
        at.shows("taken back; 0 questions left")
        at.shows("›")
        at.types("\x04")
        assert at.child.wait(60) == 0
        cloud.check()


def test_without_the_extra_a_terminal_is_told(terminal, tmp_path):
    (tmp_path / "prompt_toolkit.py").write_text("raise ModuleNotFoundError(name='prompt_toolkit')")
    os.environ["PYTHONPATH"] = str(tmp_path)
    try:
        at = terminal("--draft", DRAFT, "--mode", "draft")
    finally:
        del os.environ["PYTHONPATH"]
    at.shows('prompt_toolkit is missing; run: pip install "e2sci[chat]"')
    assert at.child.wait(60) == 2
