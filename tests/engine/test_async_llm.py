"""`AsyncLLM`: streams over an engine process, its aborts, its death, and what it leaves behind."""

import asyncio
import os
import signal
import threading
import time

import pytest
from nanofixtures import script
from nanofixtures.script import write_script

from nanoserve import LLM, AsyncLLM, EngineArgs, SamplingParams
from nanoserve.errors import ConfigError, EngineDeadError, InvalidRequestError
from nanoserve.sampling_params import RequestOutputKind

DELTA = RequestOutputKind.DELTA


TEXTS = {f"<{i}>": f"the answer to {i} is {i * i}" for i in range(20)}
REPLIES = TEXTS | {"slow": "a" * 200, "fast": "b" * 50, "ok": "fine", "two": "second", "ping": "x"}


class Served:
    """One engine and the event loop it lives in, for all tests of this file."""

    def __init__(self, folder: str) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.engine = AsyncLLM.from_engine_args(EngineArgs(model=folder, max_model_len=512))
        self.run(self.engine.start())

    def run(self, coroutine):
        """The coroutine's result, computed in the engine's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(60)

    async def collect(self, prompt, params) -> tuple[str, list[int], int]:
        text, ids, pieces = "", [], 0
        async for output in self.engine.generate(prompt, params):
            text += output.outputs[0].text
            ids += output.outputs[0].token_ids
            pieces += 1
        return text, ids, pieces

    def close(self) -> None:
        self.engine.shutdown()
        self.loop.call_soon_threadsafe(self.loop.stop)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NANOSERVE_PLUGINS", script.PLUGIN)
        folder = tmp_path_factory.mktemp("script")
        served = Served(write_script(folder, REPLIES | {"long": "x" * 3}, endless=["long"]))
        yield served
        served.close()


def greedy(**kwargs) -> SamplingParams:
    defaults = {"temperature": 0.0, "max_tokens": 300, "output_kind": DELTA}
    return SamplingParams(**defaults | kwargs)


def test_EN6_A36_twenty_streams_each_have_exactly_their_text(served):
    async def main():
        return await asyncio.gather(*(served.collect(key, greedy()) for key in TEXTS))

    results = served.run(main())
    assert [text for text, _, _ in results] == list(TEXTS.values())
    assert all(pieces > 1 for _, _, pieces in results)


def test_EN6_async_and_offline_give_the_same_tokens(served, script_plugin):
    params = SamplingParams(temperature=2.0, seed=5, n=2, max_tokens=12, ignore_eos=True)
    prompts = ["ok", "fast", "<3>"]
    with LLM(served.engine.config.model.path, max_model_len=512) as llm:
        expected = [[c.token_ids for c in o.outputs] for o in llm.generate(prompts, params)]

    async def last(prompt):
        async for output in served.engine.generate(prompt, params):
            final = output
        return [c.token_ids for c in final.outputs]

    async def main():
        return await asyncio.gather(*(last(prompt) for prompt in prompts))

    assert served.run(main()) == expected


def test_A34_leaving_a_stream_frees_it(served):
    async def main():
        stream = served.engine.add_request("long", greedy(max_tokens=400, ignore_eos=True))
        seen = 0
        async for _ in stream:
            seen += 1
            if seen == 3:
                assert served.engine.stats.num_running_reqs == 1
                stream.abort()
                break
        rest = [output async for output in stream]
        assert [c.finish_reason for o in rest for c in o.outputs][-1] == "abort"
        deadline = time.monotonic() + 5
        while served.engine.stats.num_running_reqs or served.engine.stats.kv_cache_usage:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)

    served.run(main())


def test_EN2_a_slow_reader_gets_merged_deltas_and_delays_no_one(served):
    async def main():
        slow = served.engine.add_request("slow", greedy())
        text, _, _ = await served.collect("fast", greedy())
        assert text == "b" * 50
        await asyncio.sleep(1.0)
        return [output.outputs[0].text async for output in slow]

    pieces = served.run(main())
    assert "".join(pieces) == "a" * 200
    assert len(pieces) < 150


def test_A54_two_live_requests_with_one_id(served):
    async def main():
        streams = [
            served.engine.add_request(prompt, greedy(), request_id="same")
            for prompt in ("ok", "two")
        ]
        return ["".join([o.outputs[0].text async for o in stream]) for stream in streams]

    assert served.run(main()) == ["fine", "second"]


def test_a_bad_request_is_refused_and_reaches_no_one(served):
    async def main():
        for bad in ([512], "", [1] * 512, ["a"]):
            with pytest.raises(InvalidRequestError):
                served.engine.add_request(bad, greedy())
        with pytest.raises(InvalidRequestError, match="560 were asked for"):
            served.engine.add_request([1] * 260, greedy(), strict_length=True)
        with pytest.raises(UnicodeEncodeError):
            # It gets as far as the process border; nothing may be left waiting for it.
            served.engine.add_request("ok", greedy(), request_id="\ud800")
        assert served.engine._output_processor.num_unfinished == 0
        return await served.collect("ok", greedy())

    assert served.run(main())[0] == "fine"


@pytest.mark.parametrize(
    "how",
    [
        signal.SIGKILL,
        pytest.param(signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param("raise", marks=pytest.mark.slow),
    ],
)
def test_A86_engine_death_is_seen_by_everyone_waiting(tmp_path, script_plugin, how):
    folder = write_script(tmp_path, {"long": "x", "boom": "y"}, end=False, raises=["boom"])

    async def main() -> None:
        engine = AsyncLLM.from_engine_args(EngineArgs(model=folder, max_model_len=2048))
        await engine.start()
        params = greedy(max_tokens=1900, ignore_eos=True)
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
        engine.shutdown()

    asyncio.run(main())


@pytest.mark.slow
def test_the_engines_load_error_is_raised_by_start(tiny):
    async def main() -> None:
        args = EngineArgs(model=tiny, num_gpu_blocks_override=4, max_model_len=512)
        engine = AsyncLLM.from_engine_args(args)
        with pytest.raises(ConfigError, match="one request may have max_model_len"):
            await engine.start()
        engine.shutdown()

    asyncio.run(main())


@pytest.mark.slow
def test_EN5_shutdown_leaves_no_process_and_no_folder(tmp_path, script_plugin):
    folder = write_script(tmp_path, {"go": "x"})

    async def main() -> int:
        engine = AsyncLLM.from_engine_args(EngineArgs(model=folder, max_model_len=64))
        assert os.path.isdir(engine._client._folder)
        async with engine:
            # Gone as soon as both ends are connected, so that not even a kill leaves it behind.
            assert not os.path.exists(engine._client._folder)
            texts = [o.outputs[0].text async for o in engine.generate("go", greedy())]
            assert "".join(texts) == "x"
            return engine.engine_pid

    pid = asyncio.run(main())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_A85_shutdown_while_loading_returns_at_once(tiny):
    engine = AsyncLLM.from_engine_args(EngineArgs(model=tiny, max_model_len=64))
    pid = engine.engine_pid
    engine.shutdown()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
