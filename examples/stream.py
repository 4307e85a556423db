"""A text as it is written

    python examples/stream.py [CLOUD DRAFT]

Each piece holds text that can no longer change. The last one carries the result with its figures.
To try it without models: `e2sci cloud --model synthetic`, and `synthetic:divergence=0.5` as DRAFT.
"""

import sys

from e2sci import BlockingEdge, load_engine

cloud, draft = sys.argv[1:] or ("ws://127.0.0.1:7071", "qwen2.5-coder")

with BlockingEdge(cloud, load_engine(draft, "draft")) as edge:
    for piece in edge.stream("Why is the sky blue?", max_tokens=100):
        print(piece.text, end="", flush=True)
        if piece.result:
            stats = piece.result.stats
            print(f"\n\n{stats.tokens_per_s:.1f} tokens/s, {stats.cloud_passes} passes")
