"""Facts from a model's file: architecture, abilities of the chat template, memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from cllm.bindings import Model
from cllm.doctor.model_checks import check_vocabulary, shared_prefixes
from cllm.doctor.template_check import check_chat_template
from cllm.engine.config import EngineConfig
from cllm.engine.llama.gguf_header import model_parts, read_header, read_shapes
from cllm.engine.llama.memory import kv_bytes
from cllm.engine.llama.mtp_drafter import mtp_fault
from cllm.engine.llama.preflight import Preflight, model_files
from cllm.memory import available_bytes

N_CTX = (4096, 32768)  # cells of KV caches to report, if below the model's training length


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Properties of a model that are known before it runs.

    Attributes
    ----------
    n_bytes : int
        Size of its files.
    chat, vocabulary, prefixes : str
        Descriptions of the chat template, of the vocabulary, and of the prefixes that requests can share.
    has_mtp : bool
        True if it has a layer for multi-token prediction that `speculation="mtp"` can use.
    kv_bytes : mapping
        Bytes of an F16 KV cache for one sequence, by its number of cells.
    available_bytes : int or None
        Memory that is available on this machine now; None if unknown.
    """

    path: str
    name: str
    description: str
    architecture: str
    n_bytes: int
    n_params: int
    n_ctx_train: int
    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    vocabulary: str
    chat: str
    prefixes: str
    has_mtp: bool
    kv_bytes: Mapping[int, int]
    available_bytes: int | None

    def as_dict(self) -> dict[str, Any]:
        """Return the facts for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class FileFacts:
    """Properties of a GGUF file that llama.cpp does not load.

    Attributes
    ----------
    kind : str
        Value of `general.type`, such as "model", "adapter" or "mmproj" (projector).
    n_bytes, n_tensors, n_params : int
        Numbers of all parts that exist, if the model is split into several files.
    metadata : mapping
        Metadata by key, as far as the vocabulary.
    reason : str
        Reason that the file is not loaded.
    """

    path: str
    name: str
    kind: str
    architecture: str
    n_bytes: int
    n_tensors: int
    n_params: int
    metadata: Mapping[str, Any]
    reason: str

    def as_dict(self) -> dict[str, Any]:
        """Return the facts for JSON, which has no infinite numbers and no NaN: None stands for them."""
        metadata = {key: _finite(value) for key, value in self.metadata.items()}
        return asdict(replace(self, metadata=metadata))


def _finite(value: Any) -> Any:
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def file_facts(path: Path, reason: str) -> FileFacts | None:
    """Return the facts in the header of a GGUF file, without libllama; None if it names no architecture.

    Raises `OSError` if the file cannot be opened.

    Parameters
    ----------
    reason : str
        Reason that the file is not loaded.
    """
    metadata, shapes = read_header(path), read_shapes(path)
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str):
        return None
    kind = str(metadata.get("general.type", "model"))
    if architecture == "clip":
        kind, reason = "projector", "a projector: load it beside its text model, as --mmproj"
    return FileFacts(
        path=str(path),
        name=str(metadata.get("general.name", path.stem)),
        kind=kind,
        architecture=architecture,
        n_bytes=sum(part.stat().st_size for part in model_parts(path)),
        n_tensors=len(shapes),
        n_params=sum(map(math.prod, shapes.values())),
        metadata=metadata,
        reason=reason,
    )


def model_facts(path: Path, n_ctx: Iterable[int] = ()) -> ModelFacts:
    """Return the facts about a model.  It is loaded with its files mapped, without a context.

    Parameters
    ----------
    n_ctx : iterable of int
        More sizes of the KV cache to report, in cells.

    Raises
    ------
    ModelLoadError, LibraryError
        The model or the library cannot be used.  A new file is loaded in a child process first: a damaged
        file ends only that process.
    """
    config = EngineConfig(model=path, preflight="unseen")
    Preflight(config).run()
    with Model(path, n_gpu_layers=0, use_extra_bufts=False) as model:
        metadata = model.metadata
        sizes = sorted({model.n_ctx_train, *(n for n in N_CTX if n < model.n_ctx_train), *n_ctx})
        return ModelFacts(
            path=str(path),
            name=metadata.get("general.name", path.stem),
            description=model.description,
            architecture=metadata.get("general.architecture", ""),
            n_bytes=sum(file.stat().st_size for file in model_files(config)),
            n_params=model.n_params,
            n_ctx_train=model.n_ctx_train,
            n_layer=model.n_layer,
            n_embd=model.n_embd,
            n_head=model.n_head,
            n_head_kv=model.n_head_kv,
            vocabulary=check_vocabulary(model.vocab).text,
            chat=check_chat_template(model).text,
            prefixes=shared_prefixes(model),
            has_mtp=mtp_fault(path) is None,
            kv_bytes={n: kv_bytes(EngineConfig(model=path, n_ctx=n, n_seq_max=1)) for n in sizes},
            available_bytes=available_bytes(),
        )
