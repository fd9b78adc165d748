"""One engine of TINY and one of SCRIPT, each behind a real server, for all tests of this folder."""

import pytest
from nanofixtures import script
from nanofixtures.serving import REPLIES, Serving, Site
from nanofixtures.tiny import make_tiny


@pytest.fixture(scope="session")
def tiny_serving(tmp_path_factory):
    folder = make_tiny(tmp_path_factory.mktemp("tiny"))
    serving = Serving(
        model=str(folder),
        served_model_name=["tiny", "org/tiny-alias"],
        max_model_len=256,
        num_gpu_blocks_override=400,
    )
    yield serving
    serving.close()


@pytest.fixture(scope="session")
def tiny(tiny_serving) -> Site:
    return tiny_serving.site()


@pytest.fixture(scope="session")
def script_serving(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NANOSERVE_PLUGINS", script.PLUGIN)
        folder = script.write_script(
            tmp_path_factory.mktemp("script"), REPLIES, delay={"slow": 0.02}
        )
        serving = Serving(model=folder, served_model_name=["script"])
    yield serving
    serving.close()


@pytest.fixture(scope="session")
def scripted(script_serving) -> Site:
    return script_serving.site()
