"""Model and Vocabulary: loading, metadata, text to tokens and back."""

from __future__ import annotations

import collections
import contextlib
import gc
import logging
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cllm.bindings import (
    Context,
    EmbeddingContext,
    LoraAdapter,
    Model,
    Vocabulary,
    _library,
    find_library,
    library,
    system_info,
)
from cllm.bindings._llama_h import TokenAttr, VocabType
from cllm.engine.config import EMBEDDED_MODEL
from cllm.errors import InvalidArgumentError, ModelLoadError
from tests.conftest import examples


def test_progress_rises_from_0_to_1(tiny_model_path: Path) -> None:
    seen: list[float] = []
    with Model(tiny_model_path, on_progress=seen.append):
        pass
    assert seen == sorted(seen)
    assert seen[0] == 0.0
    assert seen[-1] == 1.0


def test_an_exception_in_the_progress_callback_cancels_the_load_and_is_raised(
    tiny_model_path: Path,
) -> None:
    calls = []

    def stop(progress: float) -> None:
        calls.append(progress)
        raise KeyboardInterrupt("enough")

    with pytest.raises(KeyboardInterrupt, match="enough"):
        Model(tiny_model_path, on_progress=stop)
    assert len(calls) == 1


def test_false_from_the_progress_callback_cancels_the_load(tiny_model_path: Path) -> None:
    with pytest.raises(ModelLoadError) as caught:
        Model(tiny_model_path, on_progress=lambda progress: False)
    assert caught.value.path == str(tiny_model_path)


def test_the_progress_callback_is_not_needed_after_the_load(tiny_model_path: Path) -> None:
    with Model(tiny_model_path, on_progress=lambda progress: None) as model:
        gc.collect()
        with Context(model, n_ctx=256, n_threads=1, n_threads_batch=1):
            assert model.vocab.tokenize("a", add_special=False) == [ord("a")]


def test_model_tells_its_shape(model: Model) -> None:
    assert (model.n_ctx_train, model.n_embd, model.n_layer) == (2048, 64, 2)
    assert (model.n_head, model.n_head_kv, model.n_swa) == (2, 1, 0)
    assert model.has_decoder
    others = (model.has_encoder, model.is_recurrent, model.is_hybrid, model.is_diffusion)
    assert not any(others)
    assert model.size_bytes == pytest.approx(2 * model.n_params, rel=0.05)
    assert "llama" in model.description


def test_metadata_has_what_metadata_value_has(model: Model) -> None:
    assert model.metadata["general.architecture"] == "llama"
    assert model.metadata["llama.block_count"] == "2"
    for key, value in model.metadata.items():
        assert model.metadata_value(key) == value
    assert model.metadata_value("no.such.key") is None


@pytest.mark.parametrize("use_mmap", [True, False])
def test_model_loads_with_checked_tensors(tiny_model_path: Path, use_mmap: bool) -> None:
    with Model(tiny_model_path, use_mmap=use_mmap, check_tensors=True) as model:
        assert model.n_layer == 2


def test_a_model_without_weights_still_tokenizes(tiny_model_path: Path) -> None:
    with Model(tiny_model_path, vocab_only=True) as model:
        assert model.vocab.tokenize("ab", add_special=False) == [97, 98]


def test_a_path_may_have_characters_that_are_not_ascii(
    tiny_model_path: Path, tmp_path: Path
) -> None:
    path = tmp_path / "modèle 模型.gguf"
    shutil.copy(tiny_model_path, path)
    with Model(path) as model:
        assert str(path) in repr(model)


def test_the_error_for_a_file_has_path_and_reason(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF" + b"\3\0\0\0")
    with pytest.raises(ModelLoadError) as caught:
        Model(path)
    assert caught.value.path == str(path)
    assert caught.value.reason in str(caught.value)


def test_the_error_for_a_lora_has_path_and_reason(model: Model, tiny_model_path: Path) -> None:
    with pytest.raises(ModelLoadError) as caught:
        LoraAdapter(model, tiny_model_path)
    assert caught.value.path == str(tiny_model_path)
    assert caught.value.reason


# --- Vocabulary ------------------------------------------------------------------------------
def test_vocabulary_tells_its_special_tokens(vocab: Vocabulary) -> None:
    assert vocab.kind is VocabType.BPE
    assert (vocab.n_tokens, vocab.bos, vocab.eos) == (260, 256, 257)
    assert vocab.adds_bos
    assert not vocab.adds_eos
    assert vocab.is_eog(257)
    assert not vocab.is_eog(97)
    assert "<|im_start|>" in vocab.control_names()
    assert vocab.text(258) == "<|im_start|>"
    assert vocab.attributes(258) & TokenAttr.CONTROL
    assert isinstance(vocab.score(97), float)


def test_what_is_read_of_all_tokens_at_once_is_what_each_token_has(vocab: Vocabulary) -> None:
    tokens = range(vocab.n_tokens)
    for special in (True, False):
        one_by_one = [vocab.token_to_piece(token, special=special) for token in tokens]
        assert vocab.pieces(special=special) == one_by_one
    assert vocab.ends == tuple(filter(vocab.is_eog, tokens))
    named = TokenAttr.CONTROL | TokenAttr.UNKNOWN
    assert vocab.control_names() == [vocab.text(t) for t in tokens if vocab.attributes(t) & named]


def test_text_survives_tokens_and_pieces(vocab: Vocabulary) -> None:
    @given(text=st.text(max_size=200))
    @examples(200)
    def check(text: str) -> None:
        tokens = vocab.tokenize(text, add_special=False)
        assert vocab.join(tokens) == text.encode()
        assert b"".join(map(vocab.piece, tokens)) == text.encode()
        # llama.cpp takes away spaces, and nothing else.
        assert vocab.detokenize(tokens).replace(b" ", b"") == text.replace(" ", "").encode()

    check()


def test_llama_cpp_cleans_up_spaces_where_join_does_not(vocab: Vocabulary) -> None:
    tokens = vocab.tokenize("one . two", add_special=False)
    assert vocab.detokenize(tokens) == b"one. two"
    assert vocab.join(tokens) == b"one . two"


def test_special_text_is_text_unless_asked_for(vocab: Vocabulary) -> None:
    as_text = vocab.tokenize("<|im_end|>", add_special=False)
    assert vocab.detokenize(as_text) == b"<|im_end|>"
    assert max(as_text) < 256
    assert vocab.tokenize("<|im_end|>", add_special=False, parse_special=True) == [257]


def test_bos_is_added_when_asked_for(vocab: Vocabulary) -> None:
    assert vocab.tokenize("a") == [256, 97]
    assert vocab.tokenize("", add_special=False) == []
    assert vocab.detokenize([]) == b""


@pytest.mark.parametrize("ask", [Vocabulary.piece, Vocabulary.spelling, Vocabulary.is_eog])
def test_what_is_remembered_of_a_token_is_told_for_token_ids_alone(
    vocab: Vocabulary, ask: Callable[[Vocabulary, Any], object]
) -> None:
    """2.0 is 2 to a dictionary, and True is 1."""
    known = [ask(vocab, token) for token in range(3)]
    for bad in (2.0, True, "2", [2], None):
        with pytest.raises(InvalidArgumentError, match=r"^token is .* must be an integer"):
            ask(vocab, bad)
    assert [ask(vocab, token) for token in np.arange(3)] == known


def test_the_flags_of_tokenize_are_true_or_false(vocab: Vocabulary) -> None:
    for name in ("add_special", "parse_special"):
        flags: dict[str, Any] = {name: "no"}
        with pytest.raises(InvalidArgumentError, match=f"{name} is 'no', must be True or False"):
            vocab.tokenize("a", **flags)


def test_a_control_token_has_a_piece_only_on_request(vocab: Vocabulary) -> None:
    assert vocab.piece(257) == b""
    assert vocab.token_to_piece(257, special=True) == b"<|im_end|>"
    assert vocab.detokenize([97, 257], unparse_special=True) == b"a<|im_end|>"


def test_a_long_text_is_tokenized(vocab: Vocabulary) -> None:
    text = "word " * 2000
    assert vocab.detokenize(vocab.tokenize(text, add_special=False)) == text.encode()


# --- Chat template ---------------------------------------------------------------------------
def test_the_chat_template_is_that_of_the_file(model: Model) -> None:
    assert model.chat_template() == model.metadata["tokenizer.chat_template"]
    assert model.chat_template("no such") is None


# --- The library -----------------------------------------------------------------------------
def test_system_info_names_features() -> None:
    assert "=" in system_info()


def test_two_threads_that_need_the_library_first_load_it_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """llama.cpp initialised twice at once crashes: two engines may start together."""
    loading: list[_library.Library] = []
    second_has_come = threading.Event()

    class Lock:
        def __init__(self) -> None:
            self._lock = threading.Lock()

        def __enter__(self) -> None:
            if loading:
                second_has_come.set()
            self._lock.acquire()

        def __exit__(self, *exc_info: object) -> None:
            self._lock.release()

    class Slow(_library.Library):
        def start(self) -> None:
            loading.append(self)
            if len(loading) == 1:
                second.start()
                assert second_has_come.wait(10)
            else:
                second_has_come.set()

    second = threading.Thread(target=library)
    monkeypatch.setattr(_library, "_library", None)
    monkeypatch.setattr(_library, "_library_lock", Lock())
    monkeypatch.setattr(_library, "Library", Slow)
    loaded = library()
    second.join(10)
    assert loading == [loaded]
    assert library() is loaded


def test_a_line_of_the_log_that_another_thread_has_taken_is_no_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class TakenMeanwhile(collections.deque[tuple[int, str]]):
        def __len__(self) -> int:  # as it was when this thread looked
            return 1

    monkeypatch.setattr(_library, "_log_lines", TakenMeanwhile())
    assert _library.forward_log() == ""


def test_log_lines_reach_the_logger(
    tiny_model_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "cllm.llama")
    with Model(tiny_model_path):
        pass
    lines = [record for record in caplog.records if record.name == "cllm.llama"]
    assert any("general.architecture" in record.getMessage() for record in lines)


def test_errors_of_the_library_are_logged_as_errors(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF" + b"\3\0\0\0" + b"\xff" * 16)
    with pytest.raises(ModelLoadError):
        Model(path)
    assert any(r.name == "cllm.llama" and r.levelno == logging.ERROR for r in caplog.records)


def test_an_unknown_architecture_is_named_with_what_llama_cpp_this_is(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    with contextlib.closing(gguf.GGUFWriter(path, "qwen99next")) as writer:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    commit = find_library()[1]["commit"][:9]
    with pytest.raises(ModelLoadError, match=f"unknown model architecture: 'qwen99next'.*{commit}"):
        Model(path)


@pytest.mark.parametrize("n_gpu_layers", [0, -1])
def test_without_layers_on_a_gpu_no_product_goes_there(
    n_gpu_layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[bool] = []
    lib = library()
    make = lib.llama_init_from_model

    def noting(pointer: Any, params: Any) -> Any:
        given.append(bool(params.op_offload))
        return make(pointer, params)

    monkeypatch.setattr(lib, "llama_init_from_model", noting)
    monkeypatch.setattr(type(lib), "has_gpu", True)  # as a build with one says
    with Model(EMBEDDED_MODEL, n_gpu_layers=n_gpu_layers) as model:
        monkeypatch.undo()
        monkeypatch.setattr(lib, "llama_init_from_model", noting)
        Context(model, n_ctx=256).close()
        EmbeddingContext(model, pooling="mean").close()
    assert given == [n_gpu_layers != 0] * 2


@pytest.mark.parametrize("name", ["", "nothing.gguf"])
def test_an_adapter_that_is_no_file_is_refused_before_llama_cpp_reads_it(
    model: Model, tmp_path: Path, name: str
) -> None:
    with pytest.raises(ModelLoadError, match=r"not a regular file|No such file"):
        LoraAdapter(model, tmp_path / name)


@pytest.mark.parametrize(("name", "names"), [
    ("refact", ["<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<reponame>", None]),
    ("deepseek-coder", ["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", None, None]),
    ("llama-bpe", [None] * 5),
])  # fmt: skip
def test_a_vocabulary_has_the_tokens_with_which_its_model_fills_in_text(
    name: str, names: list[str | None], llama_cpp_source: Path
) -> None:
    path = llama_cpp_source / "models" / f"ggml-vocab-{name}.gguf"
    with Model(path, vocab_only=True) as model:
        vocab = model.vocab
        found = [vocab.fim_pre, vocab.fim_suf, vocab.fim_mid, vocab.fim_rep, vocab.fim_sep]
        assert [None if token is None else vocab.text(token) for token in found] == names
