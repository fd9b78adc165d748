"""The check of chapter 00's code: the learner's requests, folders, tokenizer and platforms.

Each part is held against something plainer: the values that must be refused, the file's own
tokenizer, the text as a whole. A message names the module and what is wrong with it.
"""

import math
import os
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from nanobook.grading import Wrong

from nanoserve import envs
from nanoserve.config.args import EngineArgs
from nanoserve.errors import ConfigError, InvalidRequestError, ModelLoadError
from nanoserve.hub.convert import unpermute_rope
from nanoserve.hub.resolve import resolve_model
from nanoserve.outputs import CompletionOutput, RequestMetrics, RequestOutput
from nanoserve.platforms import cpu, cuda
from nanoserve.platforms.platform import resolve_platform
from nanoserve.registry import Registry
from nanoserve.sampling_params import SamplingParams
from nanoserve.tokenizer.detokenizer import IncrementalDetokenizer
from nanoserve.tokenizer.tokenizer import Tokenizer
from nanoserve.version import source_hash, source_path

CutText = Callable[[str, list[str], bool], tuple[str, str | None]]


def check(cut_text: CutText) -> None:
    """Raises Wrong if later chapters should not stand on this code.

    Args:
        cut_text: (text, stop strings, include) -> what a user sees of it, and what stopped it.
    """
    _check_params()
    _check_small_parts()
    tokenizer = _check_tokenizer(_check_hub())
    _check_detokenizer(tokenizer, cut_text)
    _check_platforms()


def _check_params() -> None:
    where = "sampling_params.py"
    bad: dict[str, list[Any]] = {
        "n": [0, 129, True],
        "temperature": [-0.1, math.nan, math.inf, "1"],
        "top_p": [0, 1.01, math.nan],
        "top_k": [-2, 1.5],
        "max_tokens": [0, True],
        "min_tokens": [-1, 17],
        "stop": [[""], 3, ["a"] * 17, ["\ud83d"]],
        "stop_token_ids": [[-1], ["a"]],
        "logprobs": [21, 1.0],
    }
    for name, values in bad.items():
        for value in values:
            try:
                SamplingParams(**{name: value})
            except InvalidRequestError as error:
                if error.param != name:
                    raise Wrong(f"{where}: {name}={value!r} is blamed on {error.param!r}") from None
            else:
                raise Wrong(f"{where}: {name}={value!r} is let in")
    try:
        borders: dict[str, Any] = {"temperature": 0, "top_p": 1, "top_k": -1, "stop": "x"}
        params = SamplingParams(n=2, max_tokens=5, min_tokens=5, **borders)
    except InvalidRequestError as error:
        raise Wrong(f"{where}: good values are refused: {error}") from None
    if params.stop != ["x"] or not params.greedy:
        raise Wrong(f"{where}: one stop string is not made a list, or temperature 0 is not greedy")
    seeds = [SamplingParams(n=2, seed=7).child(index).seed for index in range(2)]
    if seeds != [7, 8]:
        raise Wrong(f"{where}: the children of seed 7 have the seeds {seeds}, not 7 and 8")


def _check_small_parts() -> None:
    os.environ["NANOSERVE_CPU_THREADS"], os.environ["NANOSERVE_OOPS"] = "3", "1"
    if envs.get("NANOSERVE_CPU_THREADS") != 3 or envs.unknown() != ["NANOSERVE_OOPS"]:
        raise Wrong("envs.py: values are not read when asked for, or misspelt names not listed")
    del os.environ["NANOSERVE_CPU_THREADS"], os.environ["NANOSERVE_OOPS"]
    parts = Registry("part", {"late": "no_such_module:x", "colour": "colorsys:rgb_to_hsv"})
    sys.modules.pop("colorsys", None)
    if "late" not in parts or "colorsys" in sys.modules or not callable(parts.load("colour")):
        raise Wrong("registry.py: an entry is imported before it is asked for, or not when it is")
    done = CompletionOutput(0, "hi", [1], finish_reason="stop")
    output = RequestOutput("id", None, [1], [done], True)
    if not done.finished() or output.metrics is RequestOutput("id", None, [], [], True).metrics:
        raise Wrong("outputs.py: a finished completion is not, or two outputs share one metrics")
    if RequestMetrics().first_token_time is not None:
        raise Wrong("outputs.py: a request has a first token before it has one")
    if len(source_hash()) != 12 or not source_path().endswith("nanoserve"):
        raise Wrong("version.py: it cannot tell which source runs")


def _check_hub() -> str:
    rows = np.arange(16.0).reshape(16, 1)  # two heads of eight, stored as (0, 4, 1, 5, ...)
    stored = rows.reshape(2, 2, 4, 1).swapaxes(1, 2).reshape(16, 1)
    if not np.array_equal(unpermute_rope(stored, 2), rows):
        raise Wrong("hub/convert.py: the rows of a head are not put back in order 0, 1, 2, ...")
    with tempfile.TemporaryDirectory() as empty:
        for path in (empty, str(Path(empty) / "absent")):
            try:
                resolve_model(path)
            except ModelLoadError:
                continue
            raise Wrong(f"hub/resolve.py: {path} is taken for a model")
    return resolve_model(None).path


def _check_tokenizer(folder: str) -> Tokenizer:
    tokenizer = Tokenizer.from_folder(folder)
    oracle = tokenizers.Tokenizer.from_file(f"{folder}/tokenizer.json")
    rng = random.Random(4)
    for _ in range(100):
        text = "".join(rng.choice("ab é☃👩\n 1") for _ in range(30))
        ids = oracle.encode(text).ids
        if tokenizer.encode(text) != ids or tokenizer.decode(ids) != text:
            raise Wrong(f"tokenizer/tokenizer.py: {text!r} has other ids than the file gives it")
        if b"".join(map(tokenizer.token_bytes, ids)) != text.encode():
            raise Wrong(f"tokenizer/tokenizer.py: the bytes of {text!r}'s tokens are not its bytes")
    turn = [{"role": "user", "content": "Hi"}]
    if not tokenizer.render_chat(turn).endswith(
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    ):
        raise Wrong("tokenizer/tokenizer.py: a chat is not rendered as its template says")
    return tokenizer


def _check_detokenizer(tokenizer: Tokenizer, cut_text: CutText) -> None:
    rng = random.Random(5)
    for _ in range(200):
        broken = rng.random() < 0.5
        ids = (
            [rng.randrange(tokenizer.size) for _ in range(20)]
            if broken
            else tokenizer.encode("".join(rng.choice("aab\n☃") for _ in range(20)))
        )
        stop = [] if broken else ["".join(rng.choice("ab\n☃") for _ in range(3)), "b\n"]
        include = rng.random() < 0.5
        params = SamplingParams(stop=stop, include_stop_str_in_output=include)
        detokenizer = IncrementalDetokenizer(tokenizer, params, [])
        pieces = []
        for token in ids:
            stopped = detokenizer.update([token])
            pieces.append(detokenizer.next_delta())
            if stopped is not None:
                break
        detokenizer.finish()
        pieces.append(detokenizer.next_delta())
        wanted, reason = cut_text(tokenizer.decode(ids), stop, include)
        if "".join(pieces) != wanted or stopped != reason:
            raise Wrong(
                f"tokenizer/detokenizer.py: streamed {''.join(pieces)!r}, stopped by {stopped!r}; "
                f"the whole is {wanted!r}, stopped by {reason!r} (stop={stop!r})"
            )


def _check_platforms() -> None:
    gib = 2**30
    if [cpu.cores_within_quota(8, [q]) for q in ("200000 100000", "max 100000")] != [2, 8]:
        raise Wrong(
            "platforms/cpu.py: a quota of 200 ms in each 100 ms is two cores, `max` is none"
        )
    meminfo = "MemAvailable: 8388608 kB\n"
    group = (str(4 * gib), str(3 * gib), f"inactive_file {gib}\n")
    if cpu.memory_within_limits(meminfo, [group]) != 2 * gib:
        raise Wrong(
            "platforms/cpu.py: 4 GiB allowed, 3 used, 1 of them dropped on need: 2 are left"
        )
    wrong_type = cpu.choose_dtype("bfloat16", False) != "float32"
    if wrong_type or cpu.choose_dtype("bfloat16", True) != "bfloat16":
        raise Wrong("platforms/cpu.py: bfloat16 is for CPUs that multiply it natively")
    budget = cuda.kv_budget(cuda.DeviceMemory(80 * gib, 50 * gib, 20 * gib), 0.9)
    if abs(budget - 22 * gib) > 1024:
        raise Wrong("platforms/cuda.py: 0.9 of 80 GiB, others hold 30, we use 20: 22 are left")
    try:
        resolve_platform("abacus")
    except ConfigError:
        pass
    else:
        raise Wrong("platforms/platform.py: a device that does not exist is accepted")
    cache = cpu.CpuPlatform().allocate_cache([2, 3], torch.bfloat16)
    if cache.shape != (2, 3) or cache.dtype != torch.bfloat16 or cache.any():
        raise Wrong("platforms/cpu.py: the cache is not zeroed, or has another shape or type")
    EngineArgs(max_num_seqs=2).create_engine_config()
