"""Handles: freed once, in the right order, and not forgotten in silence."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cllm.bindings import Batch, Context, Model, NativeHandle, SamplerChain, library
from cllm.errors import ClosedError, InUseError, LlamaCallError, WrongThreadError
from tests.bindings.conftest import error_in_another_thread

QUIET: dict[str, Any] = {"n_ctx": 256, "n_threads": 1, "n_threads_batch": 1}


def decode(context: Context) -> None:
    batch = Batch(4)
    batch.add(0, [97], 0, n_outputs=1)
    assert np.isfinite(context.decode(batch).rows).all()


def test_with_closes_in_the_right_order(tiny_model_path: Path) -> None:
    with Model(tiny_model_path) as model, Context(model, **QUIET) as context:
        decode(context)
        assert not context.closed
    assert context.closed
    assert model.closed
    assert repr(context) == "<Context closed>"


def test_closing_twice_frees_once() -> None:
    freed: list[object] = []
    handle = NativeHandle(object(), freed.append)
    handle.close()
    handle.close()
    assert len(freed) == 1


def test_a_parent_with_open_children_stays_open(tiny_model_path: Path) -> None:
    with Model(tiny_model_path) as model:
        with Context(model, **QUIET) as context, SamplerChain(model.vocab) as chain:
            with pytest.raises(InUseError, match="before 2 objects of it"):
                model.close()
            decode(context)
            chain.add_greedy()
        assert model.vocab.tokenize("a", add_special=False) == [97]
    with pytest.raises(ClosedError):
        model.vocab.tokenize("a")


@pytest.mark.parametrize("kind", [Model, Context, SamplerChain])
def test_an_unclosed_handle_warns_and_is_freed(
    tiny_model_path: Path, kind: type[NativeHandle]
) -> None:
    def make(model: Model) -> NativeHandle:
        if kind is Context:
            return Context(model, **QUIET)
        return SamplerChain(model.vocab).add_greedy()

    with Model(tiny_model_path) as parent:
        handle = Model(tiny_model_path) if kind is Model else make(parent)
        reference = weakref.ref(handle)
        with pytest.warns(ResourceWarning, match=f"unclosed {kind.__name__}"):  # noqa: PT031
            del handle
            gc.collect()
        assert reference() is None


@pytest.mark.parametrize(
    ("kind", "function"),
    [
        *((Model, name) for name in ("llama_model_get_vocab", "llama_model_n_embd")),
        *((Context, name) for name in ("llama_get_memory", "llama_n_ctx_seq", "llama_n_ubatch")),
    ],
)
def test_a_constructor_that_fails_leaves_no_open_handle(
    tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[NativeHandle], function: str
) -> None:
    """Such as by a KeyboardInterrupt: the parent closes, and nothing warns when it is collected."""

    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    with Model(tiny_model_path) as parent:
        freed = count_calls(monkeypatch, "llama_model_free" if kind is Model else "llama_free")
        monkeypatch.setattr(library(), function, interrupt)
        with pytest.raises(KeyboardInterrupt):
            Model(tiny_model_path) if kind is Model else Context(parent, **QUIET)
        monkeypatch.undo()
        assert freed == [1]
    gc.collect()


def count_calls(monkeypatch: pytest.MonkeyPatch, function: str) -> list[int]:
    """How often it has been called, in a list of one."""
    counter, call = [0], getattr(library(), function)

    def counted(*arguments: object) -> object:
        counter[0] += 1
        return call(*arguments)

    monkeypatch.setattr(library(), function, counted)
    return counter


def test_a_chain_that_llama_cpp_does_not_make_is_an_error(
    tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NULL would be used by the next call."""
    with Model(tiny_model_path) as model:
        monkeypatch.setattr(library(), "llama_sampler_chain_init", lambda *_: None)
        with pytest.raises(LlamaCallError, match="llama_sampler_chain_init returned 0"):
            SamplerChain(model.vocab)


def test_a_text_with_more_tokens_than_can_be_counted_is_an_error(
    tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Taken for a size, the answer would be 8 GiB."""
    with Model(tiny_model_path) as model:
        monkeypatch.setattr(library(), "llama_tokenize", lambda *_: -(2**31))
        with pytest.raises(LlamaCallError, match="more tokens than can be counted"):
            model.vocab.tokenize("a")


def test_a_child_keeps_its_parent(tiny_model_path: Path) -> None:
    model = Model(tiny_model_path)
    context = Context(model, **QUIET)
    reference = weakref.ref(model)
    del model
    gc.collect()
    decode(context)
    context.close()
    with pytest.warns(ResourceWarning, match="unclosed Model"):  # noqa: PT031
        del context
        gc.collect()
    assert reference() is None


def test_an_unclosed_family_is_freed_child_first() -> None:
    freed: list[str] = []
    parent = NativeHandle("parent", freed.append)
    child = NativeHandle("child", freed.append, parent)
    with pytest.warns(ResourceWarning, match="unclosed NativeHandle"):  # noqa: PT031
        del parent, child
        gc.collect()
    assert freed == ["child", "parent"]


def test_a_handle_belongs_to_the_thread_that_made_it() -> None:
    handle = NativeHandle("pointer", lambda pointer: None)
    assert isinstance(error_in_another_thread(handle.close), WrongThreadError)
    assert not handle.closed
    handle.close()


def test_contexts_of_one_model_work_one_after_another_on_their_own_threads(
    tiny_model_path: Path,
) -> None:
    """A model, its context and its chain may all live on a thread that is not the main one."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            with Model(tiny_model_path) as model, Context(model, **QUIET) as context:
                decode(context)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_any_thread_may_tokenize(tiny_model_path: Path) -> None:
    answers: list[list[int]] = []
    with Model(tiny_model_path) as model:
        thread = threading.Thread(
            target=lambda: answers.append(model.vocab.tokenize("ab", add_special=False))
        )
        thread.start()
        thread.join()
    assert answers == [[97, 98]]


EXIT_PROGRAM = """
import sys
from cllm.bindings import Batch, Context, Model, SamplerChain
model = Model(sys.argv[1])
context = Context(model, n_ctx=256, n_threads=1, n_threads_batch=1)
chain = SamplerChain(model.vocab).add_greedy()
batch = Batch(4)
batch.add(0, [97], 0, n_outputs=1)
context.decode(batch)
print(chain.sample(context, 0))
"""


def test_the_program_may_end_with_open_handles(tiny_model_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", EXIT_PROGRAM, tiny_model_path],
        capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip().isdigit()
