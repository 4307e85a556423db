"""Hugging Face `generate` with elastic acceptance

    python examples/huggingface_generate.py [TARGET DRAFT]

Two transformers models in one process, folders or names on the hub; no cloud. `generate` does what
it always does, and leaves the decoding loop to `Speculative`. Needs `e2sci[transformers]`.
"""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

from e2sci.integrations.huggingface import Speculative

family = "Qwen/Qwen2.5-Coder"
target, draft = sys.argv[1:] or (f"{family}-1.5B-Instruct", f"{family}-0.5B-Instruct")

tokenizer = AutoTokenizer.from_pretrained(target)
model = AutoModelForCausalLM.from_pretrained(target)
small = AutoModelForCausalLM.from_pretrained(draft)

chat = [{"role": "user", "content": "Write a function that tells whether a number is prime."}]
inputs = tokenizer.apply_chat_template(
    chat, add_generation_prompt=True, return_dict=True, return_tensors="pt"
)
for rule in (
    Speculative(small),
    Speculative(small, accept="elastic", measure="regret", threshold=0.5),
):
    streamer = TextStreamer(tokenizer, skip_prompt=True)
    model.generate(
        **inputs, custom_generate=rule, stream_to=streamer, do_sample=False, max_new_tokens=100
    )
    was = rule.figures
    print(
        f"{rule.options.accept}: {was.tokens} tokens in {was.passes} passes of the target, ", end=""
    )
    print(f"{was.acceptance_rate:.0%} accepted, {was.tolerated} not the target's own\n")
