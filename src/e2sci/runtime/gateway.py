"""A cloud without an engine: edges in front, vLLM servers with our proposer behind.

`examine` writes a short text at a server twice, the second time with itself as drafts: whether they
arrive and are accepted, and how long a step takes with and without, is then known and not believed.
"""

from __future__ import annotations

import asyncio
import logging
import random
import statistics
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import pairwise

from e2sci.decoding.sampling import SamplingParams
from e2sci.engines.base import EngineError, ModelInfo, Tokenizer, fingerprint
from e2sci.engines.hf_tokenizer import Description
from e2sci.engines.remote import Server, info_of
from e2sci.engines.vllm_stream import Streaming
from e2sci.runtime.admission import Limits
from e2sci.runtime.passes import PassTimes
from e2sci.runtime.relay import Relay
from e2sci.runtime.seat import Ended
from e2sci.runtime.service import Service
from e2sci.runtime.worker import now
from e2sci.session.line import CloudModel
from e2sci.session.messages import Open, ProtocolError
from e2sci.session.relayed import RelayedSession
from e2sci.vllm_plugin.proposer import TESTED
from e2sci.vllm_plugin.store import prefix_key
from e2sci.vllm_plugin.wire import Drafts, Sender

log = logging.getLogger("e2sci.cloud")

_PROBE = 32  # tokens
_ANY_VOCABULARY = 256  # ids that each has
_TRIES = 4
_ASK_SECONDS = 10.0
_COOL = 0.01  # the least temperature that vLLM doesn't round
_ARRIVAL_SECONDS = 0.25  # a draft needs some ms, and a socket that is new some more


@dataclass(frozen=True)
class Servers:
    """vLLM servers of one model, and the way to their proposers."""

    info: ModelInfo
    tokenizer: Tokenizer
    streams: Sequence[Streaming]
    sender: Sender


def reach(
    urls: Sequence[str],
    drafts: Sequence[str],
    about: Description,
    *,
    model: str | None = None,
    key: str | None = None,
    context: int | None = None,
) -> Servers:
    """The servers at `urls`, whose proposers take drafts at the addresses `drafts`.

    `about`: the model's tokenizer and sizes; `model`: its name there, None for the first served;
    `key`: sent as a bearer token; `context`: tokens of a text if less than the servers allow.
    Raises EngineError if one doesn't answer or serves another model, AddressError.
    """
    infos, streams = [], []
    for url in urls:
        server = Server(url, key, _ASK_SECONDS)
        try:
            served = server.served(model)
        finally:
            server.close()
        infos.append(info_of(about, served, context))
        streams.append(Streaming(url, served.id, key))
    if others := {info.name for info in infos} - {infos[0].name}:
        raise EngineError(
            f"{urls[0]} serves {infos[0].name}, another {others.pop()}; one gateway stands before "
            "servers of one model"
        )
    least = min(infos, key=lambda info: info.context)
    return Servers(least, about.tokenizer, streams, Sender(drafts))


@dataclass(frozen=True)
class Examined:
    """A server. `tried`: whether this release was tried with its version; `accepted`: of
    `drafted` right draft tokens, those that took no step of their own; `samples`: whether it draws
    what it should beside drafts; `times`: of a step."""

    url: str
    version: str
    tried: bool
    drafted: int
    accepted: int
    samples: bool
    times: PassTimes

    @property
    def trouble(self) -> str:
        """What the operator should know, empty if nothing."""
        if not self.accepted:
            return (
                f"{self.url} accepts no drafts, so edges get its plain stream; start vLLM with "
                "the --speculative-config of docs/vllm-native.md, and give --drafts the address "
                "that it says it takes them at"
            )
        if not self.samples:
            return (
                f"{self.url} draws wrong tokens beside drafts, as vLLM's CPU builds do "
                "(docs/vllm-native.md): requests with a temperature are refused"
            )
        known = " and ".join(TESTED)
        return "" if self.tried else f"{self.url} runs vLLM {self.version}; tried were {known}"


async def examine(server: Streaming, sender: Sender) -> Examined:
    """Find out how `server` does. Raises EngineError."""
    version = await server.version()
    prompt = [random.randrange(_ANY_VOCABULARY) for _ in range(16)]
    text, plain, plain_ms = await _probe(server, prompt)
    best, best_ms = plain, plain_ms
    for _ in range(_TRIES):
        sender.send(Drafts(prefix_key(prompt), len(prompt), text))
        await asyncio.sleep(_ARRIVAL_SECONDS)
        _, best, best_ms = await _probe(server, prompt)
        if best < plain:
            break
    points = [(1, plain_ms)]
    if best < plain:
        points.append((max(2, round(len(text) / best)), best_ms))
    samples = best == plain or await _samples(server, sender)
    return Examined(
        url=server.url,
        version=version,
        tried=version.startswith(tuple(f"{known}." for known in TESTED)),
        drafted=len(text),
        accepted=max(0, plain - best),
        samples=samples,
        times=PassTimes(tuple(points)),
    )


async def _samples(server: Streaming, sender: Sender) -> bool:
    """Whether what is drawn beside drafts, nearly without heat, is hardly less than the best."""
    for seed in range(_TRIES):
        prompt = [random.randrange(_ANY_VOCABULARY) for _ in range(16)]
        text, _, _ = await _probe(server, prompt)
        sender.send(Drafts(prefix_key(prompt), len(prompt), text))
        await asyncio.sleep(_ARRIVAL_SECONDS)
        cool = SamplingParams(temperature=_COOL, seed=seed)
        async with aclosing(server.stream(prompt, _PROBE, cool, top=1)) as stream:
            async for delivered in stream:
                if any(s.log_prob < s.best[0][1] - 50 * _COOL for s in delivered.scores):
                    return False
    return True


async def examined(url: str, drafts: Sequence[str], key: str | None = None) -> Examined:
    """The same of a server by its address; see `reach`. Raises EngineError, AddressError."""
    server = Server(url, key, _ASK_SECONDS)
    try:
        model = server.served(None).id
    finally:
        server.close()
    stream, sender = Streaming(url, model, key), Sender(drafts)
    try:
        return await examine(stream, sender)
    finally:
        await stream.close()
        sender.close()


async def _probe(server: Streaming, prompt: Sequence[int]) -> tuple[list[int], int, float]:
    """A greedy text behind `prompt`; its ids, its steps, and the ms of one."""
    text, at = list[int](), list[float]()
    async with aclosing(server.stream(prompt, _PROBE, SamplingParams())) as stream:
        async for delivered in stream:
            if delivered.ids:
                text += delivered.ids
                at.append(now())
    between = [1000 * (b - a) for a, b in pairwise(at)]
    return text, len(at), statistics.median(between) if between else 1.0


class Gateway(Service):
    """vLLM `servers` at the service of edges. Use as an async context manager, which examines them
    first unless `times` are given, and raises EngineError if one can't be used.

    `slots`: requests at once; `on_end` hears what became of each.
    """

    def __init__(
        self,
        servers: Servers,
        *,
        slots: int,
        times: PassTimes | None = None,
        limits: Limits | None = None,
        on_end: Callable[[Ended], None] | None = None,
    ) -> None:
        super().__init__(servers.info, fingerprint(servers), limits)
        self.times = times
        self.examined: list[Examined] = []
        self._servers = servers
        self._slots = slots
        self._on_end = on_end
        self._relay: Relay | None = None

    async def __aenter__(self) -> Gateway:
        if self.times is None:
            for stream in self._servers.streams:
                self.examined.append(await examine(stream, self._servers.sender))
            for trouble in filter(None, (about.trouble for about in self.examined)):
                log.warning("%s", trouble)
            self.times = max((about.times for about in self.examined), key=lambda t: t.ms(1))
        self._relay = Relay(
            self._servers.streams,
            self._servers.sender,
            eos=self.info.eos_ids,
            slots=self._slots,
            limits=self.limits,
            metrics=self.metrics,
            on_end=self._on_end,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._relay is not None
        await self._relay.close()
        self._servers.sender.close()

    @property
    def desk(self) -> Relay:
        assert self._relay is not None
        return self._relay

    @property
    def failing(self) -> bool:
        return all(server.failing for server in self.desk.servers)

    def _begin(self, opening: Open, model: CloudModel) -> RelayedSession:
        if not opening.sampling.greedy and not all(about.samples for about in self.examined):
            raise ProtocolError(
                "unsupported",
                "this build of vLLM draws wrong tokens beside drafts; set the temperature to 0",
            )
        return RelayedSession(opening, model)
