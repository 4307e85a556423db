"""An engine in front of an SGLang server, through its native /generate.

One prompt a sequence: with `logprob_start_len` = s the server answers for every position behind s,
and its radix cache serves everything before. So a pass computes no more than the tokens it feeds.

    input_top_logprobs    rows for positions s, s+1, …: what came before that position predicted.
                          The first is null, since position s-1 was not computed.
    output_top_logprobs   one row: what the last position predicts
    input_token_logprobs  the log-prob of the very token there, also where it isn't among the best

A row is a list of [log-prob, id, text or null]. The one token that a request must generate is
thrown away.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from e2sci.decoding.distribution import TopK
from e2sci.engines.base import EngineError, Step
from e2sci.engines.remote import Remote

_Token = tuple[float | None, int, str | None]


class _Meta(msgspec.Struct):
    output_top_logprobs: list[list[_Token]]
    input_token_logprobs: list[_Token]
    input_top_logprobs: list[list[_Token] | None]


class _Answer(msgspec.Struct):
    meta_info: _Meta


class SGLang(Remote):
    """A model on an SGLang server; see Remote."""

    def ask(self, work: Sequence[Step]) -> list[list[TopK]]:
        if not work:
            return []
        body = {
            "input_ids": [step.tokens for step in work],
            "sampling_params": {"temperature": 0, "max_new_tokens": 1},
            "return_logprob": True,
            "logprob_start_len": [len(step.tokens) - step.outputs for step in work],
            "top_logprobs_num": self.info.top,
        }
        answers = self._server.post("/generate", body, list[_Answer])
        if len(answers) != len(work):
            raise EngineError(
                f"{self._server.url} gave {len(answers)} answers to {len(work)} prompts"
            )
        return [
            self._rows(answer.meta_info, step.outputs)
            for answer, step in zip(answers, work, strict=True)
        ]

    def _rows(self, meta: _Meta, count: int) -> list[TopK]:
        """Distributions behind the last `count` positions."""
        tops, tokens, last = (
            meta.input_top_logprobs,
            meta.input_token_logprobs,
            meta.output_top_logprobs,
        )
        if len(tops) != count or len(tokens) != count or len(last) != 1 or None in tops[1:]:
            raise EngineError(
                f"{self._server.url} didn't give a row of log-probs for each of {count} positions"
            )
        rows = [[*(top or ()), token] for top, token in zip(tops[1:], tokens[1:], strict=True)]
        return [
            self._top((token, p) for p, token, _ in row if p is not None)
            for row in (*rows, last[0])
        ]
