"""Stand-ins for vLLM, SGLang and llama.cpp servers: the shapes of their APIs, the numbers of the
synthetic model or of another engine.

with VllmServer() as server: … server.url …   They are strict: a request in any other shape than
the real servers take is answered with 400. `fail` is a status, or bytes, to answer instead.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np

from e2sci.engines.base import Engine, Step
from e2sci.engines.hf_tokenizer import Description
from e2sci.engines.synthetic import (
    EOS,
    REAL_VOCAB,
    TEMPLATE,
    Synthetic,
    SyntheticConfig,
    SyntheticTokenizer,
)

MODEL, MAX_LOGPROBS = "big", 20

DESCRIPTION = Description(
    name="synthetic",
    tokenizer=SyntheticTokenizer(),
    real_vocab=REAL_VOCAB,
    eos_ids=frozenset({EOS}),
    template=TEMPLATE,
)


class BadRequest(Exception):
    """What a real server would answer with 400."""


class StandIn:
    """An HTTP server in a thread. `requests`: bodies of the passes asked for; `left`: streams whose
    reader went away."""

    path = ""

    def __init__(
        self,
        *,
        key: str | None = None,
        max_len: int = 4097,
        engine: Engine | None = None,
        **config: float,
    ) -> None:
        self.key, self.max_len = key, max_len
        self.requests: list[dict] = []
        self.fail: list[int | bytes] = []
        self.left = 0
        self.port = 0
        self._engine = engine or Synthetic(
            SyntheticConfig(**{"seed": 11, "context": 1 << 16, **config})
        )
        self._lock = threading.Lock()

    def __enter__(self):
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.reply(*stand_in.get(self.path, self.headers))

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                self.reply(*stand_in.post(self.path, self.headers, body))

            def reply(self, status: int, answer: object) -> None:
                if isinstance(answer, Iterator):
                    self.stream(answer)
                    return
                data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def stream(self, events: Iterator[bytes]) -> None:
                self.send_response(200)
                self.end_headers()
                try:
                    for event in events:
                        self.wfile.write(event)
                except OSError:  # the reader is gone
                    stand_in.left += 1

            def log_message(self, *_: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self.port = self._http.server_port
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join(10)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def get(self, path, headers) -> tuple[int, object]:
        if refused := self._refused(headers):
            return refused
        if path != "/v1/models":
            return 404, {"detail": "Not Found"}
        return 200, {"object": "list", "data": [{"id": MODEL, "max_model_len": self.max_len}]}

    def post(self, path, headers, body) -> tuple[int, object]:
        if refused := self._refused(headers):
            return refused
        if path != self.path or headers["Content-Type"] != "application/json":
            return 404, {"detail": "Not Found"}
        request = json.loads(body)
        self.requests.append(request)
        if self.fail:
            answer = self.fail.pop(0)
            if isinstance(answer, bytes):
                return 200, answer
            return answer, self.error(f"it is broken ({answer})")
        try:
            return 200, self.answer(request)
        except BadRequest as error:
            return 400, self.error(str(error))

    def answer(self, request: dict) -> object:
        raise NotImplementedError

    def error(self, message: str) -> object:
        raise NotImplementedError

    def _refused(self, headers):
        if self.key and headers["Authorization"] != f"Bearer {self.key}":
            return 401, {"error": "Unauthorized"}
        return None

    def rows(self, ids: list[int], count: int) -> list[np.ndarray]:
        """Log-probabilities behind each of the last `count` ids."""
        demand(isinstance(ids, list) and ids, "a prompt is a list of ids, not empty")
        size = self._engine.info.real_vocab
        demand(all(type(t) is int and 0 <= t < size for t in ids), "ids out of vocabulary")
        demand(len(ids) < self.max_len, f"this model's maximum context length is {self.max_len}")
        with self._lock:
            self._engine.truncate(0, 0)
            return [d.all_log_probs() for d in self._engine.forward([Step(0, ids, count)])[0]]


class VllmServer(StandIn):
    """/v1/completions as of vLLM 0.32."""

    path = "/v1/completions"

    def answer(self, request):
        shape = {
            "model": str,
            "prompt": list,
            "max_tokens": int,
            "temperature": int,
            "repetition_penalty": float,
            "logprobs": int,
            "return_tokens_as_token_ids": bool,
        }
        demand({k: type(v) for k, v in request.items()} == shape, f"unknown fields: {request}")
        demand(request["model"] == MODEL, f"The model `{request['model']}` does not exist.")
        demand(request["max_tokens"] == 1 and request["temperature"] == 0, "greedy, one token")
        demand(request["repetition_penalty"] == 1 and request["return_tokens_as_token_ids"], "")
        k = request["logprobs"]
        demand(0 < k <= MAX_LOGPROBS, f"Requested sample logprobs of {k}, greater than max allowed")
        choices = [
            self._choice(i, self.rows(ids, 1)[0], k) for i, ids in enumerate(request["prompt"])
        ]
        return {"object": "text_completion", "model": MODEL, "choices": choices[::-1]}

    def _choice(self, index, row, k):
        best = np.argsort(-row, kind="stable")[:k]
        top = {f"token_id:{t}": float(row[t]) for t in best}
        return {
            "index": index,
            "text": "?",
            "finish_reason": "length",
            "logprobs": {
                "text_offset": [0],
                "tokens": [f"token_id:{best[0]}"],
                "token_logprobs": [float(row[best[0]])],
                "top_logprobs": [top],
            },
        }

    def error(self, message):
        return {"error": {"message": message, "type": "BadRequestError", "code": 400}}


class SGLangServer(StandIn):
    """/generate as of SGLang 0.5."""

    path = "/generate"

    def answer(self, request):
        shape = {
            "input_ids": list,
            "sampling_params": dict,
            "return_logprob": bool,
            "logprob_start_len": list,
            "top_logprobs_num": int,
        }
        demand({k: type(v) for k, v in request.items()} == shape, f"unknown fields: {request}")
        demand(request["sampling_params"] == {"temperature": 0, "max_new_tokens": 1}, "greedy")
        demand(request["return_logprob"] and request["input_ids"], "nothing is asked for")
        starts, k = request["logprob_start_len"], request["top_logprobs_num"]
        return [
            self._item(ids, start, k)
            for ids, start in zip(request["input_ids"], starts, strict=True)
        ]

    def _item(self, ids, start, k):
        demand(0 <= start < len(ids), "logprob_start_len is higher than the number of tokens")
        rows = self.rows(ids, len(ids) - start)
        meta = {
            "input_token_logprobs": [[None, ids[start], None]]
            + [[float(row[t]), t, None] for row, t in zip(rows, ids[start + 1 :], strict=False)],
            "input_top_logprobs": [None, *(self._top(row, k) for row in rows[:-1])],
            "output_token_logprobs": [self._top(rows[-1], 1)[0]],
            "output_top_logprobs": [self._top(rows[-1], k)],
            "prompt_tokens": len(ids),
            "cached_tokens": start,
        }
        return {"text": "?", "output_ids": [self._top(rows[-1], 1)[0][1]], "meta_info": meta}

    def _top(self, row, k):
        best = np.argsort(-row, kind="stable")[:k]
        return [[float(row[t]), int(t), None] for t in best]

    def error(self, message):
        return {"error": {"message": message}}


class LlamaServer(StandIn):
    """/completion as of llama.cpp's server in llama-cpp-python 0.3.36. `file`: what it runs."""

    path = "/completion"
    file = f"models/{MODEL}.gguf"

    def get(self, path, headers):
        if path != "/props":
            return 404, self.error("File Not Found")
        if refused := self._refused(headers):
            return refused
        settings = {"params": {"n_predict": -1}, "n_ctx": self.max_len}
        return 200, {
            "default_generation_settings": settings,
            "total_slots": 4,
            "model_path": str(self.file),
            "chat_template": "",
        }

    def answer(self, request):
        shape = {
            "prompt": list,
            "n_predict": int,
            "n_probs": int,
            "post_sampling_probs": bool,
            "cache_prompt": bool,
            "id_slot": int,
            "samplers": list,
            "top_k": int,
            "logit_bias": list,
            "response_fields": list,
        }
        demand({k: type(v) for k, v in request.items()} == shape, f"unknown fields: {request}")
        demand(request["n_predict"] == 1 and not request["post_sampling_probs"], "one, raw")
        demand(request["response_fields"] == ["completion_probabilities"], "")
        row = self.rows(request["prompt"], 1)[0]
        biased = row.copy()
        for token, bias in request["logit_bias"]:
            biased[token] += bias
        made = self._engine.tokenizer.piece(int(biased.argmax()))
        try:
            made.decode()
        except UnicodeDecodeError:  # it waits for the rest of a character
            return {}
        best = np.argsort(-row, kind="stable")[: request["n_probs"]]
        top = [
            {"id": int(t), "token": "?", "bytes": [63], "logprob": max(float(row[t]), -3.4e38)}
            for t in best
        ]
        return {"completion_probabilities": [{**top[0], "top_logprobs": top}]}

    def error(self, message):
        return {"error": {"code": 400, "message": message, "type": "invalid_request_error"}}


def demand(met: object, otherwise: str) -> None:
    if not met:
        raise BadRequest(otherwise)
