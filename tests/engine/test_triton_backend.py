"""The engine on the Triton kernels, against transformers: interpreted, or compiled on a GPU."""

import pytest
import torch
from nanofixtures.smallpool import ROOMY, SMALLPOOL, assert_all_free
from nanofixtures.tiny import make_tiny
from nanokernels.runtime import INTERPRET, KernelUnavailableError, require_triton
from transformers import AutoModelForCausalLM

from nanoserve import LLM, SamplingParams

try:
    require_triton()
except KernelUnavailableError as reason:
    pytest.skip(f"no kernels here: {reason}", allow_module_level=True)

PROMPTS = [[7, 3, 11, 2, 5, 9, 1, 4, 8, 13, 6], [42], [5, 5, 17, 30, 2], list(range(10, 27))]
TOKENS = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("triton"))


@pytest.fixture(scope="module")
def expected(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    answers = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=TOKENS,
                min_new_tokens=TOKENS,
                do_sample=False,
                pad_token_id=0,
            )
        answers.append(out[0, len(prompt) :].tolist())
    return answers


@pytest.mark.slow
@pytest.mark.parametrize("settings", [ROOMY, SMALLPOOL], ids=["roomy", "squeezed"])
def test_tokens_are_those_of_transformers(folder, expected, settings):
    device = "cpu" if INTERPRET else "cuda"
    options = {**settings, "device": device, "dtype": "float32"}
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    with LLM(str(folder), attention_backend="triton_paged", **options) as llm:
        outputs = llm.generate([list(prompt) for prompt in PROMPTS], params)
        assert [output.outputs[0].token_ids for output in outputs] == expected
        assert_all_free(llm)
