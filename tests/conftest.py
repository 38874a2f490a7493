"""Fixtures that many tests share: the default pair, fetched and built once, then kept (git ignores it)."""

from pathlib import Path

import pytest

ENGINES = Path(__file__).parent.parent / "engines"
RECIPE = ENGINES / "smollm2.toml"


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
