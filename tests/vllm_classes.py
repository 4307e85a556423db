"""Proposers for a real vLLM that aren't ours, or are ours with a fault."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

from e2sci.vllm_plugin import Proposer
from e2sci.vllm_plugin.wire import VARIABLE, Receiver


class Idle:
    """Does nothing: what a bench compares the real one with."""

    def __init__(self, *_: object) -> None:
        pass

    def load_model(self, *_: object, **__: object) -> None:
        pass

    def propose(self, sampled_token_ids: list[list[int]], *_: object, **__: object) -> list[Any]:
        return [[] for _ in sampled_token_ids]


class Dying(Proposer):
    """Its socket dies under it at random steps, and comes back at others. The file of the socket
    with .deaths behind it has a line for each."""

    def propose(self, *step: Any, **more: Any) -> list[list[int]]:
        address = os.environ[VARIABLE]
        if self._receiver is None:
            if random.random() < 0.1:
                self._receiver = Receiver(address)
        elif random.random() < 0.05:
            self._receiver.close()
            with Path(f"{address.removeprefix('ipc://')}.deaths").open("a") as deaths:
                deaths.write("dead\n")
            proposed = super().propose(*step, **more)
            self._receiver = None
            return proposed
        return super().propose(*step, **more)
