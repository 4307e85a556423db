"""The evaluation harness lm-eval, unchanged, by the task and the commands of docs/serving.md."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys

import pytest

pytest.importorskip("lm_eval", reason='needs pip install "e2sci[harness]"')

from e2sci.runtime.edge import BlockingEdge
from live import draft
from serving import NAME, LiveEdge
from test_docs import fences
from test_serve_docs import SERVING

pytestmark = pytest.mark.engines

ROWS = [{"question": f"What is {n} + 5?", "answer": str(n + 5)} for n in range(6)]
[TASK] = [text for text in fences(SERVING, "yaml") if "task: sums" in text]
COMMANDS = [
    line.replace("MODEL", NAME)
    for line in SERVING.read_text().replace("\\\n", "").splitlines()
    if line.startswith("lm_eval ")
]
assert len(COMMANDS) == 2


@pytest.mark.parametrize("command", COMMANDS)
def test_it_reads_what_the_target_says(one_cloud, tmp_path, command):
    (tmp_path / "sums.yaml").write_text(TASK)
    (tmp_path / "lines.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "OPENAI_API_KEY": "none"}
    with LiveEdge(one_cloud) as edge:
        words = shlex.split(command.replace("http://127.0.0.1:8080", f"http://{edge.at}"))[1:]
        subprocess.run(
            [sys.executable, "-m", "lm_eval", *words, "--output_path", "out", "--log_samples"],
            cwd=tmp_path,
            env={**os.environ, **offline},
            check=True,
            timeout=300,
        )
        edge.idle()
    [file] = (tmp_path / "out").rglob("samples_sums_*.jsonl")
    samples = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(samples) == len(ROWS)
    with BlockingEdge(one_cloud.url, draft()) as python:
        for sample in samples:
            prompt = sample["arguments"]["gen_args_0"]["arg_0"]
            chat = "chat" in command
            asked = json.loads(prompt[0]) if chat else prompt
            own = python.generate(asked, raw=not chat, max_tokens=16, stop=("\n",))
            assert sample["resps"] == [[own.text]]
