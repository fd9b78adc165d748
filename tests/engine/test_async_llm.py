"""`AsyncLLM`: streams over an engine process, its aborts, its death, and what it leaves behind."""

import asyncio
import glob
import os
import signal
import tempfile
import time

import pytest
from nanofixtures.script import write_script
from nanofixtures.smallpool import ROOMY

from nanoserve import LLM, AsyncLLM, EngineArgs, SamplingParams
from nanoserve.errors import ConfigError, EngineDeadError, InvalidRequestError
from nanoserve.sampling_params import RequestOutputKind

DELTA = RequestOutputKind.DELTA


@pytest.fixture
def start(script_plugin):
    """Start engines by their arguments; shut down at the end."""
    engines = []

    async def start(model: str, **args) -> AsyncLLM:
        engine = AsyncLLM.from_engine_args(EngineArgs(model=model, **args))
        engines.append(engine)
        await engine.start()
        return engine

    yield start
    for engine in engines:
        engine.shutdown()


async def collect(engine: AsyncLLM, prompt, params) -> tuple[str, list[int], int]:
    text, ids, pieces = "", [], 0
    async for output in engine.generate(prompt, params):
        text += output.outputs[0].text
        ids += output.outputs[0].token_ids
        pieces += 1
    return text, ids, pieces


async def until_idle(engine: AsyncLLM, seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        # Another small request makes the engine report its state.
        await collect(engine, "ping", SamplingParams(max_tokens=1, output_kind=DELTA))
        if engine.stats.num_running_reqs == 0 and engine.stats.kv_cache_usage == 0.0:
            return
    raise AssertionError(engine.stats)


def test_EN6_A36_twenty_streams_each_have_exactly_their_text(tmp_path, start):
    texts = {f"<{i}>": f"the answer to {i} is {i * i}" for i in range(20)}
    folder = write_script(tmp_path, texts)

    async def main() -> None:
        engine = await start(folder, max_model_len=256)
        params = SamplingParams(temperature=0.0, max_tokens=64, output_kind=DELTA)
        results = await asyncio.gather(*(collect(engine, key, params) for key in texts))
        assert [text for text, _, _ in results] == list(texts.values())
        assert all(pieces > 1 for _, _, pieces in results)

    asyncio.run(main())


def test_EN6_async_and_offline_give_the_same_tokens(tiny, start):
    params = SamplingParams(temperature=0.9, seed=5, max_tokens=12, ignore_eos=True)
    prompts = [[1, 2, 3], [9] * 7, [4]]
    with LLM(tiny, **ROOMY) as llm:
        expected = [o.outputs[0].token_ids for o in llm.generate(prompts, params)]

    async def main() -> list[list[int]]:
        engine = await start(tiny, **ROOMY)
        params.output_kind = DELTA
        return [
            ids
            for _, ids, _ in await asyncio.gather(*(collect(engine, p, params) for p in prompts))
        ]

    assert asyncio.run(main()) == expected


def test_A34_leaving_a_stream_frees_it(tmp_path, start):
    folder = write_script(tmp_path, {"long": "x"}, end=False)

    async def main() -> None:
        engine = await start(folder, max_model_len=2048)
        params = SamplingParams(max_tokens=2000, ignore_eos=True, output_kind=DELTA)
        seen = 0
        stream = engine.add_request("long", params)
        async for _ in stream:
            seen += 1
            if seen == 3:
                stream.abort()
                break
        await until_idle(engine)
        assert engine.stats.num_waiting_reqs == 0

    asyncio.run(main())


def test_EN2_a_slow_reader_gets_merged_deltas_and_delays_no_one(tmp_path, start):
    folder = write_script(tmp_path, {"slow": "a" * 200, "fast": "b" * 50})

    async def main() -> None:
        engine = await start(folder, max_model_len=512)
        params = SamplingParams(temperature=0.0, max_tokens=300, output_kind=DELTA)
        slow = engine.add_request("slow", params)
        text, _, _ = await collect(engine, "fast", params)
        assert text == "b" * 50
        await asyncio.sleep(1.0)
        pieces = [output.outputs[0].text async for output in slow]
        assert "".join(pieces) == "a" * 200
        assert len(pieces) < 100

    asyncio.run(main())


def test_A54_two_live_requests_with_one_id(tmp_path, start):
    folder = write_script(tmp_path, {"one": "first", "two": "second"})

    async def main() -> None:
        engine = await start(folder, max_model_len=128)
        params = SamplingParams(temperature=0.0, max_tokens=20, output_kind=DELTA)
        streams = [engine.add_request(p, params, request_id="same") for p in ("one", "two")]
        texts = []
        for stream in streams:
            texts.append("".join([o.outputs[0].text async for o in stream]))
        assert texts == ["first", "second"]

    asyncio.run(main())


def test_a_bad_request_is_refused_and_reaches_no_one(tmp_path, start):
    folder = write_script(tmp_path, {"ok": "fine"})

    async def main() -> None:
        engine = await start(folder, max_model_len=64)
        params = SamplingParams(temperature=0.0, max_tokens=16, output_kind=DELTA)
        for bad in ([512], "", [1] * 64, ["a"]):
            with pytest.raises(InvalidRequestError):
                engine.add_request(bad, params)
        with pytest.raises(InvalidRequestError, match="70 were asked for"):
            engine.add_request([1] * 54, params, strict_length=True)
        assert (await collect(engine, "ok", params))[0] == "fine"

    asyncio.run(main())


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, "raise"])
def test_A86_engine_death_is_seen_by_everyone_waiting(tmp_path, start, how):
    folder = write_script(tmp_path, {"long": "x", "boom": "y"}, end=False, raises=["boom"])

    async def main() -> None:
        engine = await start(folder, max_model_len=2048)
        params = SamplingParams(max_tokens=1900, ignore_eos=True, output_kind=DELTA)
        streams = [engine.add_request("long", params) for _ in range(3)]
        await anext(streams[0])
        if how == "raise":
            engine.add_request("boom", params)
        else:
            os.kill(engine.engine_pid, how)

        async def drain(stream) -> None:
            async for _ in stream:
                pass

        results = await asyncio.wait_for(
            asyncio.gather(*(drain(s) for s in streams), return_exceptions=True), 5
        )
        assert all(isinstance(r, EngineDeadError) for r in results)
        assert engine.is_dead
        with pytest.raises(EngineDeadError):
            await engine.check_health()
        with pytest.raises(EngineDeadError):
            engine.add_request("long", params)

    asyncio.run(main())


def test_the_engines_load_error_is_raised_by_start(tiny, start):
    async def main() -> None:
        with pytest.raises(ConfigError, match="one request may have max_model_len"):
            await start(tiny, num_gpu_blocks_override=4, max_model_len=512)

    asyncio.run(main())


def test_EN5_shutdown_leaves_no_process_and_no_folder(tmp_path, script_plugin):
    folder = write_script(tmp_path, {"go": "x"})
    before = set(glob.glob(f"{tempfile.gettempdir()}/nanoserve-*"))

    async def main() -> int:
        async with AsyncLLM.from_engine_args(EngineArgs(model=folder, max_model_len=64)) as engine:
            return engine.engine_pid

    pid = asyncio.run(main())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert set(glob.glob(f"{tempfile.gettempdir()}/nanoserve-*")) <= before


def test_A85_shutdown_while_loading_returns_at_once(tiny):
    engine = AsyncLLM.from_engine_args(EngineArgs(model=tiny, max_model_len=64))
    pid = engine.engine_pid
    engine.shutdown()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
