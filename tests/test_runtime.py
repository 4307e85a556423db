"""Edge and cloud for real on an event loop, over queues and over WebSockets, synthetic models."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest

from e2sci.engines.synthetic import Synthetic, SyntheticConfig
from e2sci.runtime.cloud import Cloud
from e2sci.runtime.edge import Edge
from e2sci.runtime.passes import PassTimes
from e2sci.runtime.transport import memory_pair

TIMES = PassTimes(((1, 1.0), (32, 1.0)))


@asynccontextmanager
async def pair(draft=None, target=None, **edge_options):
    """A cloud and an edge joined in memory."""
    target = target or Synthetic(SyntheticConfig(seed=11))
    draft = draft or Synthetic(SyntheticConfig(seed=11, divergence=1.0))
    tasks = set()
    async with Cloud(target, times=TIMES) as cloud:

        async def dial():
            here, there = memory_pair()
            tasks.add(asyncio.create_task(cloud.serve(there)))
            return here

        async with Edge(dial, draft, **edge_options) as edge:
            edge.cloud = cloud
            yield edge
        await asyncio.gather(*tasks)
    assert cloud.scheduler.busy == 0


async def test_strict_text_is_the_clouds():
    async with pair() as edge:
        alone = await edge.generate("hello", mode="cloud", max_tokens=60)
        for mode in ("sync", "pipelined"):
            both = await edge.generate("hello", mode=mode, fill=False, max_tokens=60)
            assert both.token_ids == alone.token_ids
            assert both.stats.accepted > 0
        drafted = await edge.generate("hello", mode="draft", max_tokens=60)
        assert drafted.token_ids != alone.token_ids


@pytest.mark.parametrize("accept", ["rejection", "fuzzy", "elastic", "typical"])
async def test_every_rule_runs(accept):
    async with pair() as edge:
        result = await edge.generate("hello", accept=accept, temperature=0.8, seed=4, max_tokens=40)
        assert result.finish_reason in ("stop", "length")
        assert len(result.token_ids) == len(result.commits) <= 40


async def test_sixteen_at_once_get_what_they_get_alone():
    async with pair() as edge:
        prompts = [f"question {i}" for i in range(16)]
        options = [dict(temperature=0.9 * (i % 2), seed=i, max_tokens=30 + i) for i in range(16)]
        alone = [
            (await edge.generate(p, **o)).token_ids
            for p, o in zip(prompts, options, strict=True)
        ]
        together = await asyncio.gather(
            *(edge.generate(p, **o) for p, o in zip(prompts, options, strict=True))
        )
        assert [r.token_ids for r in together] == alone
