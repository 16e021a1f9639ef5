"""Model: weights and metadata of one GGUF file."""

from __future__ import annotations

import ctypes
import functools
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cllm.bindings import _llama_h as h
from cllm.bindings._handle import NativeHandle
from cllm.bindings._library import forward_log, library
from cllm.bindings.devices import Placement
from cllm.bindings.vocabulary import Vocabulary, c_string
from cllm.checks import INT32_MAX, check_int
from cllm.errors import InvalidArgumentError, LlamaCallError, ModelLoadError

LOAD_MODES = {
    "auto": h.LoadMode.AUTO, "none": h.LoadMode.NONE, "mmap": h.LoadMode.MMAP, "mlock": h.LoadMode.MLOCK,
    "mmap+mlock": h.LoadMode.MMAP_MLOCK, "dio": h.LoadMode.DIRECT_IO,
}  # fmt: skip
ALL = Placement()
NO_GPU = Placement(devices=())


class Model(NativeHandle):
    """The weights of one GGUF file.

    Parameters
    ----------
    path : str or Path
        A regular file; split models are found from their first part.
    n_gpu_layers : int
        Number of layers to offload to a GPU; -1 offloads all of them.
    placement : Placement, optional
        Devices of the tensors.  None: all GPUs; none of them if `n_gpu_layers` is 0.
    use_mmap, use_mlock, check_tensors : bool
        Map the file, lock it in memory, look for NaN and infinities in the weights.
    load_mode : str, optional
        In place of `use_mmap` and `use_mlock`: none, mmap, mlock, mmap+mlock, dio (read past the page
        cache), or auto, which is mmap unless a device does not support it.
    use_extra_bufts : bool
        Let the CPU backend repack weights, which speeds up batches.  The logits of a row then
        depend on the number of rows in its batch.
    load_mtp : bool
        Load the layers for multi-token prediction too; see `MtpContext`.
    vocab_only : bool
        Load the vocabulary alone; such a model can have no context.
    no_alloc : bool
        Load the metadata alone: a context of such a model takes no memory and computes nothing.
    on_progress : callable, optional
        Called on the loading thread with the fraction that is loaded, 0.0 to 1.0.  Returning False
        cancels the load with `ModelLoadError`.  An exception also cancels it, and is raised again.

    Raises
    ------
    ModelLoadError
        The file is missing or is not a GGUF file, llama.cpp rejects it, or `on_progress` returned False.
    InvalidArgumentError
        `n_gpu_layers` is less than -1, or `placement` does not fit the devices of this machine.

    Notes
    -----
    See `llama_model_load_from_file` in llama.h.  A damaged file can abort the process: check files
    from unknown sources in a child process first.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        n_gpu_layers: int = -1,
        placement: Placement | None = None,
        use_mmap: bool = True,
        use_mlock: bool = False,
        load_mode: str | None = None,
        check_tensors: bool = False,
        use_extra_bufts: bool = True,
        load_mtp: bool = False,
        vocab_only: bool = False,
        no_alloc: bool = False,
        on_progress: Callable[[float], bool | None] | None = None,
    ) -> None:
        path = str(path)
        check_model_file(path)
        lib = library()
        progress = _Progress(on_progress)
        params = lib.llama_model_default_params()
        params.n_gpu_layers = check_int("n_gpu_layers", n_gpu_layers, -1, INT32_MAX)
        # With GPUs in the list, products of many rows would be computed there, even without layers.
        placed = placement or (ALL if n_gpu_layers else NO_GPU)
        kept = placed.apply(params)
        if load_mode is None:
            load_mode = (
                "+".join(("mmap",) * bool(use_mmap) + ("mlock",) * bool(use_mlock)) or "none"
            )
        if load_mode not in LOAD_MODES:
            raise InvalidArgumentError("load_mode", load_mode, f"one of {', '.join(LOAD_MODES)}")
        params.load_mode = LOAD_MODES[load_mode]
        params.check_tensors = bool(check_tensors)
        params.use_extra_bufts = bool(use_extra_bufts)
        params.load_mtp = bool(load_mtp)
        params.vocab_only = bool(vocab_only)
        params.no_alloc = bool(no_alloc)
        params.progress_callback = progress.callback
        forward_log()
        pointer = lib.llama_model_load_from_file(os.fsencode(path), params)
        del kept
        # Among them are all tensors of an MTP layer that is not wanted.
        reason = forward_log(no_warning="model has unused tensor")
        if not pointer:
            progress.reraise()
            if "unknown model architecture" in reason:
                commit, version = lib.record.get("commit", "unknown"), lib.llama_version().decode()
                reason += (
                    f"; this llama.cpp is {commit} ({version}), and a newer one may know it: "
                    "./build_llama.sh --source DIR, or a newer cllm"
                )
            raise ModelLoadError(path, reason or "llama.cpp gives no reason")
        super().__init__(pointer, lib.llama_model_free)
        self.path = path
        self.vocab_only: bool = bool(vocab_only)
        self.has_mtp: bool = bool(load_mtp)
        with self._closed_on_error():
            self.vocab: Vocabulary = Vocabulary(self, path)
            self._describe()
            # True if a GPU computes: it does for many rows of a batch at once what a CPU does for each.
            self.is_on_gpu: bool = params.n_gpu_layers != 0 and placed.uses_gpu
            # True if contexts of this model may compute on a GPU, even without layers there.
            self.has_gpu: bool = placed.uses_gpu

    def _describe(self) -> None:
        """Ask llama.cpp for the shape of the model."""
        lib, pointer = library(), self._pointer
        self.n_ctx_train: int = int(lib.llama_model_n_ctx_train(pointer))
        self.n_embd: int = int(lib.llama_model_n_embd(pointer))
        self.n_embd_inp: int = int(lib.llama_model_n_embd_inp(pointer))
        # Positions in four parts, which may jump forward.
        self.has_mrope: bool = lib.llama_model_rope_type(pointer) in tuple(h.RopeType)
        self.n_embd_out: int = int(lib.llama_model_n_embd_out(pointer))
        self.n_cls_out: int = int(lib.llama_model_n_cls_out(pointer))
        self.n_layer: int = int(lib.llama_model_n_layer(pointer))
        # Layers that predict further tokens; `n_layer` is without them.
        self.n_layer_nextn: int = int(lib.llama_model_n_layer_nextn(pointer))
        # `vocab_only` loads no shape of the layers: `llama_model_n_head` would abort.
        self.n_head: int = 0 if self.vocab_only else int(lib.llama_model_n_head(pointer))
        self.n_head_kv: int = 0 if self.vocab_only else int(lib.llama_model_n_head_kv(pointer))
        self.n_swa: int = int(lib.llama_model_n_swa(pointer))
        self.n_params: int = int(lib.llama_model_n_params(pointer))
        self.size_bytes: int = int(lib.llama_model_size(pointer))
        self.has_encoder: bool = bool(lib.llama_model_has_encoder(pointer))
        self.has_decoder: bool = bool(lib.llama_model_has_decoder(pointer))
        self.is_recurrent: bool = bool(lib.llama_model_is_recurrent(pointer))
        self.is_hybrid: bool = bool(lib.llama_model_is_hybrid(pointer))
        # True if layers keep a state for each sequence, instead of or besides a cell for each position.
        self.has_state: bool = self.is_recurrent or self.is_hybrid
        self.is_diffusion: bool = bool(lib.llama_model_is_diffusion(pointer))

    @property
    def description(self) -> str:
        """Architecture, size and quantization in a few words."""
        lib = library()
        call = functools.partial(lib.llama_model_desc, self._pointer)
        return _call_for_string(call)

    @property
    def metadata(self) -> dict[str, str]:
        """The scalar metadata of the GGUF file, every value as text."""
        lib = library()
        model = self._pointer
        pairs = {}
        for i in range(lib.llama_model_meta_count(model)):
            key = _call_for_string(functools.partial(lib.llama_model_meta_key_by_index, model, i))
            call = functools.partial(lib.llama_model_meta_val_str_by_index, model, i)
            pairs[key] = _call_for_string(call)
        return pairs

    def metadata_value(self, key: str) -> str | None:
        """Return one metadata value as text; None if the file has no scalar value with this key."""
        lib = library()
        call = functools.partial(lib.llama_model_meta_val_str, self._pointer, c_string("key", key))
        try:
            return _call_for_string(call)
        except LlamaCallError:
            return None

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels of the classifier's scores; empty if the file has none."""
        lib, pointer = library(), self._pointer
        texts = [lib.llama_model_cls_label(pointer, i) for i in range(self.n_cls_out)]
        return tuple(text.decode("utf-8", "replace") for text in texts if text is not None)

    def chat_template(self, name: str | None = None) -> str | None:
        """Return the Jinja source of the chat template `name`, by default the main one; None if missing."""
        encoded = None if name is None else c_string("name", name)
        text = library().llama_model_chat_template(self._pointer, encoded)
        return None if text is None else text.decode("utf-8", "replace")

    def __repr__(self) -> str:
        return f"<Model {self.path!r}{' closed' if self.closed else ''}>"


class _Progress:
    """Progress callback that keeps the exception of `on_progress`: exceptions must not cross C frames."""

    def __init__(self, on_progress: Callable[[float], bool | None] | None) -> None:
        self._on_progress = on_progress
        self._error: BaseException | None = None
        self.callback = h.DECLARATIONS.callbacks["llama_progress_callback"](self._call)

    def _call(self, progress: float, _user_data: Any) -> bool:
        if self._on_progress is None:
            return True
        try:
            return self._on_progress(progress) is not False
        except BaseException as error:
            self._error = error
            return False

    def reraise(self) -> None:
        if self._error is not None:
            raise self._error


def check_model_file(path: str) -> None:
    """Raise `ModelLoadError` if this is no readable, regular GGUF file: others hang or abort the loader."""
    if "\0" in path:
        raise ModelLoadError(path, "the path contains a NUL character")
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        raise ModelLoadError(path, "the path has no encoding in this file system") from None
    try:
        mode = Path(path).stat().st_mode
    except OSError as error:
        raise ModelLoadError(path, error.strerror or str(error)) from None
    if not stat.S_ISREG(mode):
        raise ModelLoadError(path, "not a regular file")
    try:
        with Path(path).open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise ModelLoadError(path, error.strerror or str(error)) from None
    if magic != b"GGUF":
        raise ModelLoadError(path, f"not a GGUF file (it begins with {magic!r})")


def _call_for_string(call: Callable[[Any, int], int]) -> str:
    """Return the text of a getter that fills a buffer; raise `LlamaCallError` for a negative length."""
    size = 256
    while True:
        buffer = ctypes.create_string_buffer(size)
        n_bytes = call(buffer, size)
        if n_bytes < 0:
            name = getattr(getattr(call, "func", call), "__name__", "getter")
            raise LlamaCallError(name, n_bytes, "no such entry")
        if n_bytes < size:
            return buffer.raw[:n_bytes].decode("utf-8", "replace")
        size = n_bytes + 1
