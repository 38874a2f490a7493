"""Fixtures that many tests share: the default pair, fetched and built once, then kept (git ignores it)."""

import functools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

ENGINES = Path(__file__).parent.parent / "engines"
RECIPE = ENGINES / "smollm2.toml"


def pytest_configure(config: pytest.Config) -> None:
    """Of several processes that share the tests, each keeps to cores of its own: the threads of engines spin while they
    wait, and would take the cores from each other."""
    worker = getattr(config, "workerinput", None)
    cores = sorted(os.sched_getaffinity(0))
    if worker is not None and worker["workercount"] <= len(cores):
        number = int(worker["workerid"].removeprefix("gw"))
        os.sched_setaffinity(0, cores[number :: worker["workercount"]])


@pytest.fixture(scope="session", autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where measured costs are kept: not among the user's, and in one place for commands in processes of their own."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct as a GGUF file."""
    from forerun_export.download import ensure
    from forerun_export.recipe import read_recipe

    target = read_recipe(RECIPE).target
    assert target.download is not None
    ensure(target.download, Path(target.source))
    return Path(target.source)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The engine directory that `make export` builds."""
    from forerun_export.build import export
    from forerun_export.recipe import read_recipe

    return export(read_recipe(RECIPE), ENGINES / "smollm2").path


@pytest.fixture(scope="session")
def sampling_graphs_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Exports copy the sampling graphs from the first one with as many tokens: making them is most of a tiny export."""
    from forerun_export import build
    from forerun_export.sampling import save_sampling_graphs

    @functools.cache
    def made(vocabulary_size: int) -> dict[str, Path]:
        return save_sampling_graphs(tmp_path_factory.mktemp("sampling"), vocabulary_size)

    def copied(folder: Path, vocabulary_size: int) -> dict[str, Path]:
        return {name: Path(shutil.copy(path, folder)) for name, path in made(vocabulary_size).items()}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "save_sampling_graphs", copied)
        yield
