"""What a name means, and which files of a repository that is."""

from __future__ import annotations

import pytest

from cllm.errors import InvalidArgumentError
from cllm.hub.names import (
    ModelName,
    choose_files,
    choose_projector,
    is_name,
    models_of,
    name_of,
    one_projector,
    parse_name,
)

FILES = (
    "README.md", "m-Q4_K_M.gguf", "m-Q4_K_S.gguf", "m-UD-Q4_K_M.gguf", "m-IQ4_XS.gguf",
    "mmproj-F16.gguf", "imatrix.gguf", "BF16/m-BF16-00002-of-00002.gguf",
    "BF16/m-BF16-00001-of-00002.gguf", "Q8_0/m-Q8_0-00001-of-00003.gguf",
)  # fmt: skip


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("hf:a/b", ModelName("a/b")),
        ("a/b", ModelName("a/b")),
        ("hf:user/Model-1.5B-GGUF:q4_k_m", ModelName("user/Model-1.5B-GGUF", "q4_k_m")),
        ("hf:a/b/c-Q8_0.gguf", ModelName("a/b", file="c-Q8_0.gguf")),
        ("hf:a/b/dir/c.gguf", ModelName("a/b", file="dir/c.gguf")),
        ("hf:a/b/c+d (1), é.gguf", ModelName("a/b", file="c+d (1), é.gguf")),
        ("hf:a/b/v1..2/c:d.gguf", ModelName("a/b", file="v1..2/c:d.gguf")),
    ],
)
def test_a_name_has_a_repository_and_perhaps_a_quantization_or_a_file(
    text: str, name: ModelName
) -> None:
    assert parse_name(text) == name
    assert parse_name(str(name)) == name


@pytest.mark.parametrize(
    "text",
    [
        "hf:",
        "hf:a",
        "hf:a/b/c",
        "hf:../b",
        "hf:a/../c.gguf",
        "hf:a/b:",
        "a b/c",
        "/a/b",
        "hf:a/b/c\n.gguf",
    ],
)
def test_what_is_no_name_is_refused_with_what_one_looks_like(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"model is .*hf:USER/REPO:QUANT"):
        parse_name(text)


def test_only_what_says_so_is_a_name() -> None:
    assert is_name("hf:a/b")
    assert not any(map(is_name, ["a/b", "model.gguf", None]))


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("hf:a/b", ["m-Q4_K_M.gguf"]),
        ("hf:a/b:q4_k_m", ["m-Q4_K_M.gguf"]),
        ("hf:a/b:UD-Q4_K_M", ["m-UD-Q4_K_M.gguf"]),
        ("hf:a/b:IQ4_XS", ["m-IQ4_XS.gguf"]),
        (
            "hf:a/b:bf16",
            ["BF16/m-BF16-00001-of-00002.gguf", "BF16/m-BF16-00002-of-00002.gguf"],
        ),
        (
            "hf:a/b/BF16/m-BF16-00002-of-00002.gguf",
            ["BF16/m-BF16-00001-of-00002.gguf", "BF16/m-BF16-00002-of-00002.gguf"],
        ),
    ],
)
def test_a_name_means_one_model_with_all_its_parts(name: str, files: list[str]) -> None:
    assert choose_files(parse_name(name), FILES) == files


def test_without_a_quantization_and_the_default_one_the_first_model_is_meant() -> None:
    assert choose_files(ModelName("a/b"), ["z-Q8_0.gguf", "y-Q5_0.gguf"]) == ["y-Q5_0.gguf"]


@pytest.mark.parametrize("quant", ["Q4_K", "Q8_0", "4_XS", "F16"])
def test_what_there_is_is_said_where_the_quantization_is_not_there_or_not_whole(
    quant: str,
) -> None:
    with pytest.raises(FileNotFoundError) as error:
        choose_files(ModelName("a/b", quant), FILES)
    there = "BF16, IQ4_XS, Q4_K_M, Q4_K_S, UD-Q4_K_M"
    assert str(error.value) == f"a/b has no {quant}, but {there}"


def test_a_repository_without_a_model_is_said_to_have_none() -> None:
    with pytest.raises(FileNotFoundError, match="a/b has no model, and no other GGUF model"):
        choose_files(ModelName("a/b"), ["model.safetensors", "mmproj-F16.gguf"])


@pytest.mark.parametrize(
    ("projectors", "chosen"),
    [
        ([], []),
        (["mmproj-F16.gguf"], ["mmproj-F16.gguf"]),
        (["mmproj-BF16.gguf", "mmproj-F32.gguf", "mmproj-F16.gguf"], ["mmproj-F16.gguf"]),
        (["mmproj-m-f32.gguf", "mmproj-m-bf16.gguf"], ["mmproj-m-bf16.gguf"]),
        (["mmproj-model.gguf", "mmproj.gguf"], ["mmproj.gguf"]),
        (["Q8_0/mmproj-F16.gguf", "mmproj-F32.gguf"], ["mmproj-F32.gguf"]),
        (["mmproj-F16.safetensors"], []),
        (["m-mmproj-f16.gguf", "m-mmproj-f32.gguf"], ["m-mmproj-f16.gguf"]),
    ],
)
def test_a_projector_is_chosen_by_its_type_in_the_folders_of_the_model(
    projectors: list[str], chosen: list[str]
) -> None:
    files = ["m-Q4_K_M.gguf", "Q8_0/m-Q8_0.gguf", *projectors]
    assert choose_projector(parse_name("hf:a/b"), files) == chosen


def test_a_model_in_a_folder_has_the_projector_there_or_above() -> None:
    files = ["Q8_0/m-Q8_0.gguf", "Q8_0/mmproj-F16.gguf", "F16/mmproj-F16.gguf", "mmproj-F32.gguf"]
    name = parse_name("hf:a/b:Q8_0")
    assert choose_projector(name, files) == ["Q8_0/mmproj-F16.gguf"]
    assert choose_projector(name, [files[0], *files[2:]]) == ["mmproj-F32.gguf"]


@pytest.mark.parametrize("quant", ["", ":F16"])
@pytest.mark.parametrize(
    "other",
    [
        "a-mmproj-f16.gguf", "MMPROJ-F16.gguf", "a-imatrix-f16.gguf", "mtp-m-F16.gguf",
        "a-eagle3-F16.gguf", "dflash-F16.gguf", "dspark-F16.gguf",
    ],
)  # fmt: skip
def test_projectors_and_drafters_are_not_taken_for_the_model(quant: str, other: str) -> None:
    files = [other, "model-with-a-long-name-f16.gguf"]
    assert choose_files(parse_name(f"hf:a/b{quant}"), files) == files[1:]


def test_a_model_with_a_head_for_drafts_is_a_model() -> None:
    assert choose_files(parse_name("hf:a/b"), ["m-MTP-Q4_K_M.gguf"]) == ["m-MTP-Q4_K_M.gguf"]


def test_a_projector_can_be_named_by_its_file() -> None:
    name = parse_name("hf:a/b/mmproj-F16.gguf")
    assert choose_files(name, FILES) == ["mmproj-F16.gguf"]


@pytest.mark.parametrize(
    ("files", "one"),
    [
        (["mmproj-F16.gguf", "mmproj-BF16.gguf"], "mmproj-F16.gguf"),
        (["mmproj-a-F16.gguf", "mmproj-b-F16.gguf"], None),
        (["m-Q4_K_M.gguf"], None),
    ],
)
def test_files_that_differ_in_their_type_are_one_projector(
    files: list[str], one: str | None
) -> None:
    assert one_projector(files) == one


def test_each_model_has_a_name_that_means_its_files() -> None:
    files = [*FILES, "n-Q4_K_M.gguf"]
    for model in models_of(files).values():
        assert choose_files(name_of("a/b", model, files), files) == model


def test_an_underscore_may_be_before_a_quantization() -> None:
    files = ["model_Q4_K_M.gguf", "model_Q8_0.gguf"]
    for quant, file in (("Q8_0", files[1]), ("q4_k_m", files[0]), (None, files[0])):
        assert choose_files(ModelName("a/b", quant), files) == [file]
    assert name_of("a/b", [files[1]], files) == ModelName("a/b", "Q8_0")
    with pytest.raises(FileNotFoundError):
        choose_files(ModelName("a/b", "K_M"), files)


def test_a_split_model_may_be_beside_a_whole_one_and_beside_others() -> None:
    parts = {n: [f"m-Q4_K_M-{i:05}-of-{n:05}.gguf" for i in range(1, n + 1)] for n in (2, 3)}
    files = ["m-Q4_K_M.gguf", *parts[2], *parts[3]]
    assert choose_files(ModelName("a/b"), files) == files[:1]
    for n in (2, 3):
        assert choose_files(ModelName("a/b", file=parts[n][-1]), files) == parts[n]
        assert choose_files(ModelName("a/b", "Q4_K_M"), parts[n]) == parts[n]
    assert len(models_of(files)) == 3
    for wrong in ([parts[3][0], parts[2][1]], [parts[2][0], parts[3][2]], parts[3][:2]):
        assert models_of(wrong) == {}


def test_the_names_of_a_message_are_printable_and_few() -> None:
    files = [f"evil\x1b]0;pwned\x07{i}.gguf" for i in range(500)]
    with pytest.raises(FileNotFoundError) as error:
        choose_files(ModelName("a/b", "Q8_0"), files)
    assert str(error.value).isprintable()
    assert str(error.value).endswith(" and 480 others")
    assert len(str(error.value)) < 1500
