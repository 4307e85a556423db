"""The class that vLLM builds and asks in every step: `--speculative-config`'s `model`.

Which process asks: every rank of the last pipeline stage makes a proposer and calls it, but the
scheduler takes the drafts of one, tensor-parallel rank 0. Only that one listens; the others propose
nothing. With data parallelism each engine has one that counts, number r > 0 listening at the
address with -r behind it (of TCP: r ports further).

Nothing that goes wrong here may touch a request: on any error nothing is proposed, and it is said
once.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from e2sci.vllm_plugin.store import Store
from e2sci.vllm_plugin.wire import Drafts, Receiver, default_address

log = logging.getLogger("vllm.e2sci")  # below vLLM's own, which is set up to be seen

TESTED = ("0.31", "0.32")
"""Versions of vLLM that it was tried with."""


class Proposer:
    """`vllm_config`: vLLM's VllmConfig. `address`: where to listen, for tests."""

    def __init__(self, vllm_config: Any, address: str | None = None) -> None:
        self._most = int(vllm_config.speculative_config.num_speculative_tokens)
        self._context = int(vllm_config.model_config.max_model_len)
        self._store = Store(int(vllm_config.model_config.get_vocab_size()))
        self._receiver: Receiver | None = None
        self._said = False
        try:
            if _counts(vllm_config):
                where = address or numbered(default_address(), _replica(vllm_config))
                self._receiver = Receiver(where)
                log.info("E²-SCI: drafts are taken at %s", where)
                _warn_of_version()
        except Exception as error:
            self._say(error)

    def load_model(self, *_: Any, **__: Any) -> None:
        """Nothing to load: the draft model is at the edge."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: NDArray[np.integer],
        token_ids_cpu: NDArray[np.integer],
        *_: Any,
        **__: Any,
    ) -> list[list[int]]:
        """Draft ids for each request of the batch, none where there are none.

        `sampled_token_ids`: of this step, by request; empty while its prompt is read.
        `num_tokens_no_spec` (requests,), `token_ids_cpu` (requests, max_model_len): prompt and
        output, those of this step included.
        """
        try:
            for drafts in self._receiver.drain() if self._receiver else ():
                self.put(drafts)
            self._store.expire()
            if not self._store:
                return [[] for _ in sampled_token_ids]
            return [
                self._behind(token_ids_cpu[row], int(num_tokens_no_spec[row])) if sampled else []
                for row, sampled in enumerate(sampled_token_ids)
            ]
        except Exception as error:
            self._say(error)
            return [[] for _ in sampled_token_ids]

    def put(self, drafts: Drafts) -> None:
        """Drafts have come."""
        self._store.put(drafts.key, drafts.start, drafts.ids)

    def close(self) -> None:
        """Take no more drafts."""
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None

    def _behind(self, row: NDArray[np.integer], length: int) -> list[int]:
        return self._store.behind(row[:length], min(self._most, self._context - length - 1))

    def _say(self, error: Exception) -> None:
        if not self._said:
            self._said = True
            log.error("E²-SCI: requests go on without drafts: %s", error)


def numbered(address: str, replica: int) -> str:
    """The address of data-parallel engine `replica`, from 0, beside the first one's `address`."""
    if not replica:
        return address
    port = re.fullmatch(r"(tcp://.*:)(\d+)", address)
    return f"{port[1]}{int(port[2]) + replica}" if port else f"{address}-{replica}"


def _counts(vllm_config: Any) -> bool:
    """Whether vLLM takes this rank's drafts: those of tensor-parallel rank 0."""
    if vllm_config.parallel_config.tensor_parallel_size == 1:
        return True
    from vllm.distributed import get_tensor_model_parallel_rank

    return bool(get_tensor_model_parallel_rank() == 0)


def _replica(vllm_config: Any) -> int:
    return int(getattr(vllm_config.parallel_config, "data_parallel_index", 0))


def _warn_of_version() -> None:
    version = getattr(sys.modules.get("vllm"), "__version__", "")  # who asks is loaded
    if version and not version.startswith(tuple(f"{known}." for known in TESTED)):
        log.warning(
            "E²-SCI was tried with vLLM %s, this is %s: check with `e2sci doctor` that drafts are "
            "accepted",
            " and ".join(TESTED),
            version,
        )
