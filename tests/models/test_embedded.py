"""The embedded model's real weights: our logits against transformers', prefill and decode."""

import pytest
import torch
from nanofixtures.embedded import embedded_folder
from nanofixtures.forward import DirectModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from nanoserve.attention.torch_paged import TorchPagedBackend

TEXTS = (
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "Once upon a time there was a small engine that wanted to be fast. " * 12,
)


@pytest.mark.slow
def test_smollm2_logits_are_those_of_transformers() -> None:
    folder = embedded_folder()
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = [tokenizer.encode(text) for text in TEXTS]
    ours = DirectModel(folder, TorchPagedBackend(), block_size=16, max_len=256, num_rows=3)
    seen = [
        [part] for part in ours.step([p[:-2] for p in prompts]).split([len(p) - 2 for p in prompts])
    ]
    for i in (-2, -1):
        for parts, logits in zip(seen, ours.step([[p[i]] for p in prompts]), strict=True):
            parts.append(logits.unsqueeze(0))
    for prompt, parts in zip(prompts, seen, strict=True):
        with torch.no_grad():
            expected = reference(torch.tensor([prompt])).logits[0]
        actual = torch.cat(parts)
        assert (actual - expected).abs().max() < 1e-3  # logits of size 20, 30 layers of fp32
        assert torch.equal(actual.argmax(-1), expected.argmax(-1))
