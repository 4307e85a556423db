"""What the benchmarks share: prompts, a real pair of processes, medians.

Prompts are written for these benchmarks, or read from a local file of a public set (JSONL with
`prompt`, `question` or `turns`), which then stays outside this repository.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path

CLOUD = ("-m", "e2sci", "cloud", "--listen", "127.0.0.1:0", "--threads", "1", "--slots", "1")

CODE = (
    "Write a Python function that checks whether a number is prime. Only the code.",
    "Write a Python function that merges two sorted lists. Only the code.",
    "Write a Python function that counts the vowels in a string. Only the code.",
    "Write a Python class for a stack with push, pop and peek. Only the code.",
    "Write a Python function that returns the n-th Fibonacci number. Only the code.",
    "Write a Python function that reverses the words of a sentence. Only the code.",
    "Write a Python function that flattens a nested list. Only the code.",
    "Write a Python function that finds the longest common prefix of strings. Only the code.",
)
PROSE = (
    "A train travels 60 km in 45 minutes. How far does it go in 2 hours? Think step by step.",
    "Anna has 12 apples, gives a third to Ben and eats two. How many are left? Step by step.",
    "Explain in three sentences why the sky is blue.",
    "List five things to check before a long bicycle tour.",
    "What is the difference between a virus and a bacterium? Answer briefly.",
    "Write a short letter that cancels a newspaper subscription.",
    "A shirt costs 40 euros after a 20 % discount. What did it cost before? Step by step.",
    "Summarise the plot of Romeo and Juliet in four sentences.",
    "Name three causes of inflation and explain each in one sentence.",
    "Translate to French: The library is closed on Mondays.",
    "Give a recipe for pancakes for two people.",
    "How does a refrigerator work? Two short paragraphs.",
)


def prompts_from(path: Path, rows: slice) -> list[str]:
    """Prompts of a JSONL file. Raises ValueError on a row without a known field."""
    texts = []
    for line in path.read_text(encoding="utf-8").splitlines()[rows]:
        row = json.loads(line)
        text = row.get("prompt") or row.get("question") or (row.get("turns") or [None])[0]
        if not text:
            raise ValueError(f"{path}: a row without prompt, question or turns")
        texts.append(text)
    return texts


def median(values: Sequence[float]) -> str:
    """Median with the whole range."""
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"
