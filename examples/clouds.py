"""Several clouds, and what happens when one goes away

    python examples/clouds.py [CLOUD,CLOUD,… DRAFT]

All serve one model. The nearest answers. If it is lost in mid-answer the next one goes on; with
none left, the draft writes alone until one is back. A notice says so whenever something happens.
"""

import asyncio
import sys

from e2sci import Edge, load_engine
from e2sci.runtime.connection import EdgeError

clouds, draft = sys.argv[1:] or ("ws://127.0.0.1:7071,ws://127.0.0.1:7072", "qwen2.5-coder")


async def main() -> None:
    async with Edge(clouds.split(","), load_engine(draft, "draft"), patience=5) as edge:
        for notice in await edge.connect():
            print(f"! {notice}", file=sys.stderr)
        print(f"{edge.cloud_model}, {1000 * await edge.ping():.1f} ms away", file=sys.stderr)
        async for piece in edge.stream("Tell me a story.", max_tokens=200, on_cloud_loss="draft"):
            if piece.notice:
                print(f"\n! {piece.notice}", file=sys.stderr)
            print(piece.text, end="", flush=True)
            if piece.result:
                print(f"\n{piece.result.stats.drafted_alone} tokens were not checked")


try:
    asyncio.run(main())
except EdgeError as error:
    sys.exit(f"{error}")
