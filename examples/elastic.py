"""Tolerance, and what came of it

    python examples/elastic.py [CLOUD DRAFT]

The same prompt under `strict` and under `elastic`. Elastic lets draft tokens stand that the target
would not have picked; `commits` says which, and `trace` how probable it held them. Without fill,
so that the texts depend on the models alone: when a fill comes is a matter of time.
"""

import sys
from collections import Counter

from e2sci import BlockingEdge, load_engine

cloud, draft = sys.argv[1:] or ("ws://127.0.0.1:7071", "qwen2.5-coder")
ways = {
    "strict": {},
    "elastic": {"accept": "elastic", "measure": "regret", "threshold": 0.5, "trace": True},
}

common = {"mode": "pipelined", "fill": False, "max_tokens": 150}
with BlockingEdge(cloud, load_engine(draft, "draft")) as edge:
    for name, options in ways.items():
        result = edge.generate("Is 97 prime?", **common, **options)
        stats = result.stats
        origins = Counter(commit.origin.value for commit in result.commits)
        print(f"{name}: {len(result.token_ids)} tokens, {stats.cloud_passes} passes, {origins}")
        if stats.credit is not None:
            print(f"  credit {stats.credit:.2f}, threshold {stats.threshold:.2f} nats")
        for judged in result.trace:
            if judged.accepted and not judged.agreed:
                print(f"  position {judged.position}: tolerated, p = {judged.p:.2f}")
