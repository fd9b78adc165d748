"""Every architecture against the transformers class of the same name: fp32 logits within 1e-4."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from nanofixtures.forward import DirectModel
from nanofixtures.tiny import ROPE_VARIANTS, make_tiny, tiny_reference
from transformers import DynamicCache

from nanoserve.attention.dense import DenseBackend
from nanoserve.attention.torch_paged import TorchPagedBackend

TOLERANCE = 1e-4
LENGTHS = (1, 2, 3, 4, 5, 15, 16, 17, 31, 33, 64, 100)


def _rope(kind: str, theta: float = 10000.0) -> dict[str, Any]:
    return {**ROPE_VARIANTS[kind], "rope_theta": theta}


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "llama-biases": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "llama-llama3": ("LlamaForCausalLM", {"rope_parameters": _rope("llama3")}),
    "llama-linear": ("LlamaForCausalLM", {"rope_parameters": _rope("linear")}),
    "llama-dynamic": (
        "LlamaForCausalLM",
        {"rope_parameters": _rope("dynamic"), "max_position_embeddings": 128},
    ),
    "llama-yarn": ("LlamaForCausalLM", {"rope_parameters": _rope("yarn")}),
    "llama-yarn-mscale": (
        "LlamaForCausalLM",
        {"rope_parameters": {**_rope("yarn"), "mscale": 0.7, "mscale_all_dim": 0.3}},
    ),
    "llama-odd-head-dim": (
        "LlamaForCausalLM",
        {"hidden_size": 60, "head_dim": 20, "num_attention_heads": 3, "num_key_value_heads": 1},
    ),
    "smollm": (
        "LlamaForCausalLM",
        {
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-5,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "hidden_size": 48,
        },
    ),
    "mistral": ("MistralForCausalLM", {}),
    "mistral-window": ("MistralForCausalLM", {"sliding_window": 10}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen2-window": (
        "Qwen2ForCausalLM",
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3ForCausalLM", {}),
    "qwen3-tied-bias": (
        "Qwen3ForCausalLM",
        {"attention_bias": True, "tie_word_embeddings": True, "head_dim": 24},
    ),
}


@pytest.fixture(scope="module", params=list(CASES))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(folder of the saved model, the transformers model itself)."""
    arch, overrides = CASES[request.param]
    folder = make_tiny(tmp_path_factory.mktemp(request.param), arch, seed=3, **overrides)
    return folder, tiny_reference(arch, seed=3, **overrides)


def _ids(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed * 1000 + length)
    return torch.randint(0, 512, (length,), generator=generator).tolist()


@torch.no_grad()
def _expected(reference: Any, ids: list[int]) -> torch.Tensor:
    return reference(torch.tensor([ids]), use_cache=False).logits[0]


def _assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    difference = (actual - expected).abs().max().item()
    assert difference < TOLERANCE, f"logits differ by {difference:.2e}"


def test_prompts_of_1_to_100_tokens_prefilled_whole(case: tuple[Path, Any]) -> None:
    folder, reference = case
    model = DirectModel(folder, TorchPagedBackend(), num_rows=len(LENGTHS))
    prompts = [_ids(length) for length in LENGTHS]
    actual = model.step(prompts).split([len(p) for p in prompts])
    for prompt, logits in zip(prompts, actual, strict=True):
        _assert_close(logits, _expected(reference, prompt))


def test_T_chunks_and_decodes_give_the_logits_of_the_whole(case: tuple[Path, Any]) -> None:
    folder, reference = case
    model = DirectModel(folder, TorchPagedBackend(), num_rows=3)
    prompts = [_ids(100, seed=1), _ids(37, seed=2), _ids(23, seed=3)]
    # Rows advance unevenly: chunks, single tokens, and steps that leave a row out, side by side.
    schedule = [
        (9, 0, 1), (1, 5, 1), (1, 1, 6), (30, 1, 1), (0, 8, 1), (1, 1, 0), (17, 4, 5), (1, 1, 1),
        (1, 0, 1), (3, 15, 6), (36, 1, 0),
    ]  # fmt: skip
    seen: list[list[torch.Tensor]] = [[], [], []]
    for sizes in schedule:
        new = [
            prompt[done : done + size]
            for prompt, done, size in zip(prompts, list(model.lengths), sizes, strict=True)
        ]
        for row, logits in enumerate(model.step(new).split(list(sizes))):
            seen[row].append(logits)
    assert model.lengths == [100, 37, 23]
    for prompt, parts in zip(prompts, seen, strict=True):
        _assert_close(torch.cat(parts), _expected(reference, prompt))


def test_dense_backend_gives_the_same_logits(case: tuple[Path, Any]) -> None:
    folder, reference = case
    model = DirectModel(folder, DenseBackend(), num_rows=2)
    prompts = [_ids(40, seed=4), _ids(25, seed=5)]
    first = model.step([prompts[0][:24], prompts[1][:1]]).split([24, 1])
    second = model.step([prompts[0][24:25], prompts[1][1:]]).split([1, 24])
    third = model.step([prompts[0][25:], []])
    _assert_close(torch.cat((first[0], second[0], third)), _expected(reference, prompts[0]))
    _assert_close(torch.cat((first[1], second[1])), _expected(reference, prompts[1]))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("backend", [DenseBackend, TorchPagedBackend])
def test_a_gpu_gives_the_same_logits(case: tuple[Path, Any], backend: Any) -> None:
    folder, reference = case
    model = DirectModel(folder, backend(), device="cuda", num_rows=2)
    prompts = [_ids(50, seed=6), _ids(3, seed=7)]
    first = model.step([prompts[0][:49], prompts[1]]).cpu()
    last = model.step([prompts[0][49:], []]).cpu()
    _assert_close(torch.cat((first[:49], last)), _expected(reference, prompts[0]))
    _assert_close(first[49:], _expected(reference, prompts[1]))


def test_dynamic_rope_beyond_the_original_length_depends_on_the_position_alone(
    tmp_path: Path,
) -> None:
    overrides = {"rope_parameters": _rope("dynamic"), "max_position_embeddings": 32}
    folder = make_tiny(tmp_path, seed=3, **overrides)
    ids = _ids(60)
    whole = DirectModel(folder, TorchPagedBackend()).step([ids])
    chunked = DirectModel(folder, TorchPagedBackend())
    parts = [chunked.step([ids[start : start + 7]]) for start in range(0, 60, 7)]
    _assert_close(torch.cat(parts), whole)
    # transformers, fed one token at a time, rescales at each new length: position by position.
    reference, expected = tiny_reference(seed=3, **overrides), []
    accepted = inspect.signature(reference.model.forward).parameters
    cache_argument = "cache" if "cache" in accepted else "past_key_values"
    cache = DynamicCache(config=reference.config)
    with torch.no_grad():
        for token in ids:
            out = reference(torch.tensor([[token]]), **{cache_argument: cache, "use_cache": True})
            expected.append(out.logits[0])
    _assert_close(whole, torch.cat(expected))
    plain = tiny_reference(seed=3, max_position_embeddings=32)
    assert (whole - _expected(plain, ids)).abs().max() > 1e-2, "scaling had no effect"
