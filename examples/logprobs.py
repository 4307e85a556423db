"""How sure the target was

    python examples/logprobs.py [CLOUD DRAFT]

With `logprobs=k` every committed token carries the target's log-probability of it, and those of the
k best tokens at that place: at temperature 1, whatever the sampling is.
"""

import math
import sys

from e2sci import BlockingEdge, load_engine
from e2sci.decoding.distribution import unpack_ids

cloud, draft = sys.argv[1:] or ("ws://127.0.0.1:7071", "qwen2.5-coder")
engine = load_engine(draft, "draft")
show = engine.tokenizer.piece

with BlockingEdge(cloud, engine) as edge:
    result = edge.generate("Name a colour.", max_tokens=20, temperature=0.7, seed=1, logprobs=3)
    for commit in result.commits:
        assert commit.score is not None
        best = zip(unpack_ids(commit.score.ids, 20), commit.score.log_probs, strict=True)
        others = "  ".join(f"{show(token)!r} {math.exp(p):.2f}" for token, p in best)
        print(f"{show(commit.token)!r:12} {math.exp(commit.score.log_prob):.2f}   of  {others}")
