"""llama.cpp as a `Backend`: opens the model and its context, and frees them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from cllm.bindings import Context, EmbeddingContext, Model, MtpContext, Vocabulary
from cllm.bindings.model import check_model_file
from cllm.engine.chat.rank_prompt import QWEN3_TEMPLATE, RANK_TEMPLATE
from cllm.engine.config import AUTO, NGRAM, EngineConfig
from cllm.engine.constraint import CompiledConstraint, NamedConstraint
from cllm.engine.constraints.compiler import ConstraintCompiler
from cllm.engine.constraints.llguidance import Guidance
from cllm.engine.core.kv_cache import KVCache
from cllm.engine.core.ngram_drafter import NgramDrafter
from cllm.engine.core.row_cost import RowCost
from cllm.engine.core.speculation import N_DRAFT_ROWS, Drafter
from cllm.engine.core.tick_shares import TickShares
from cllm.engine.embedding import EmbeddingInfo
from cllm.engine.file_content import (
    FileContent,
    MappedFiles,
    check_content,
    content_of,
    loading,
)
from cllm.engine.llama import rpc
from cllm.engine.llama.architecture_faults import can_copy, check_architecture
from cllm.engine.llama.decoder import LlamaDecoder, make_context, measure_states
from cllm.engine.llama.determinism import deterministic_decoder, without_tiles
from cllm.engine.llama.devices import gpus_of, placement_of, use_processors
from cllm.engine.llama.draft_model import DraftModel, make_draft_context
from cllm.engine.llama.encoder import (
    LlamaTextEncoder,
    NoDecoder,
    embedding_info,
    make_embedding_context,
)
from cllm.engine.llama.fingerprint import fingerprint, state_key
from cllm.engine.llama.fit import check_placement, fitted
from cllm.engine.llama.gguf_header import has_plain_matrix, has_tiled_matrix
from cllm.engine.llama.lora_file import check_lora_file
from cllm.engine.llama.loras import LlamaLoras
from cllm.engine.llama.media_encoder import LlamaMediaEncoder
from cllm.engine.llama.memory import PlannedContext, check_fits, check_room
from cllm.engine.llama.mtp_drafter import MtpDrafter, check_mtp_file, make_mtp_context
from cllm.engine.llama.preflight import Preflight, model_files, other_files
from cllm.engine.llama.row_cost_cache import load_table, save_table, table_key
from cllm.engine.llama.sampler import SamplerFactory
from cllm.engine.llama.step_drafter import StepDrafter
from cllm.engine.llama.tuner import Tuner
from cllm.engine.llama.tuning import Settings
from cllm.engine.llama.tuning_cache import save_shares
from cllm.engine.request import FimTokens, ModelInfo
from cllm.engine.sampling.logprobs import LogprobReader
from cllm.engine.sampling_params import SamplingOptions, SamplingParams
from cllm.engine.thread.backend import CheckServing, Loaded
from cllm.engine.thread.worker_thread import WorkerThreads
from cllm.engine.vocabulary import EngineVocabulary
from cllm.errors import InvalidArgumentError, ModelLoadError, NotGenerativeError

logger: logging.Logger = logging.getLogger("cllm.engine")

# Rows of a prompt in one tick on a CPU.  A prompt of 2,000 tokens beside 4 streams took 13.2, 11.9, 11.7 and
# 11.2 s in batches of 128, 192, 256 and 512.  The streams stood still for 1.0, 1.4, 1.9 and 3.3 s
# (qwen3-0.6b, 2 cores).
N_PREFILL_CHUNK = 128
N_TILED_ROWS = 16  # of a batch for which llama.cpp looks if tiles are on


class LlamaBackend:
    """The model that a configuration names.

    Parameters
    ----------
    files : sequence of FileContent
        Files that an earlier process of the engine has loaded.  `load` fails if one of them has changed.

    Attributes
    ----------
    preflight : Preflight
        Tries the model in another process first, if the configuration says so.
    """

    _generates = True

    def __init__(self, config: EngineConfig, files: Sequence[FileContent] = ()) -> None:
        self._config = config
        self._expected = self._files = tuple(files)
        self._mapped = MappedFiles()
        self._is_stopping = False
        self._computing: list[LlamaDecoder | NoDecoder | LlamaTextEncoder] = []
        self._guidance: Guidance | None = None
        self._tuner: Tuner | None = None
        self._tuned_settings: Settings = {}
        self.preflight: Preflight = Preflight(config)
        self._lora_preflight = self.preflight

    def load(self, owned: ExitStack) -> Loaded:
        """See `Backend`; freed in reverse order: context, adapters, model."""
        for expected in self._expected:
            check_content(expected)
        config = self._config
        template = config.read_chat_template()  # before a file is loaded for minutes
        if self._generates and config.uses_mtp:
            check_mtp_file(config.model_path)
        endpoints = rpc.find_servers(config.rpc, lambda: self._is_stopping)
        self.preflight.run()
        if self._generates:
            check_room(config, planned_contexts(config))
            config = self._config = self._tuned(fitted(config, planned_contexts(config)))
        rpc.use_servers(config.rpc, endpoints)
        use_processors(config)
        path = config.model_path
        if config.model is None and not path.is_file():
            raise ModelLoadError(str(path), "the embedded model is not installed")
        self._files = self._expected or _contents(config)
        with loading(self._files):
            return self._load(path, template, owned)

    def _tuned(self, config: EngineConfig) -> EngineConfig:
        """Return the settings with those that were measured to be faster; see `EngineConfig.tune`."""
        self._tuner = Tuner(config)
        if self._is_stopping:  # checked last: `stop` may have been called meanwhile
            self._tuner.stop()
        changes = self._tuned_settings = self._tuner.settings()
        if changes:
            logger.info(
                "tuned: %s", ", ".join(f"{name}={value}" for name, value in changes.items())
            )
        return config.tuned(changes)

    def _load(self, path: Path, template: str | None, owned: ExitStack) -> Loaded:
        config = self._config
        if config.is_mapped:
            owned.callback(self._mapped.close)
            for content in self._files:
                if content.path not in _adapters(config):  # adapters are copied, not mapped
                    self._mapped.hold(content)
        model = self._open_model(path, owned)
        texts = self._open_texts_model(model, owned)
        info = embedding_info(texts, config)
        if info is None and texts is not model:
            limit = "mean, cls or last: the file of embedding_model names none"
            raise InvalidArgumentError("pooling", config.pooling, limit)
        loras = LlamaLoras(model)
        owned.callback(loras.close)
        for lora in config.loras:
            loras.load(lora.name, lora.path, lora.scale)
        media = self._open_media(model, owned)
        decoder, kv_cache = self._open_decoder(model, info, loras, media, owned)
        if media is not None:
            media.n_rows_max = kv_cache.n_ctx_seq
        own = loras if texts is model else LlamaLoras(texts)
        encoder = None if info is None else LlamaTextEncoder(texts, config, info, own)
        if encoder is not None:
            encoder.files = self._mapped
            owned.callback(encoder.close)
            loras.users.append(encoder.close)
        loras.users.append(lambda: decoder.set_loras(()))
        self._computing = [c for c in (decoder, encoder) if c is not None]
        if self._is_stopping:  # checked last: `stop` may have been called meanwhile
            self._stop_computing()
        owned.callback(self._computing.clear)
        generates = not isinstance(decoder, NoDecoder)
        n_prefill_chunk = config.n_batch if model.is_on_gpu else N_PREFILL_CHUNK
        if isinstance(decoder, LlamaDecoder) and model.is_on_gpu:
            decoder.warm_up((n_prefill_chunk, 1))
        if encoder is not None and not generates:
            encoder.open()  # this engine computes texts only
        make_sampler = SamplerFactory(model, kv_cache.n_ctx_seq)
        owned.callback(make_sampler.close)
        model_info = replace(
            _model_info(model, kv_cache, config, template, self._files),
            generates=generates,
            embedding=info,
            rank_template=_rank_template(texts if info and info.is_classifier else model),
            loras=loras.infos,
            modalities=("text",) if media is None else ("text", *media.modalities),
            audio_sample_rate=0 if media is None else media.audio_sample_rate,
            devices=tuple(f"{gpu.name}: {gpu.description}" for gpu in gpus_of(config)),
            tuned=self._tuned_settings,
        )
        drafter = None
        if isinstance(decoder, LlamaDecoder):
            drafter = self._drafter(model, decoder, kv_cache, owned)
        contexts = [
            each
            for each in (decoder, encoder, drafter)
            if isinstance(each, LlamaDecoder | LlamaTextEncoder | StepDrafter)
        ]
        loaded = Loaded(
            model=model_info,
            vocabulary=model.vocab,
            text_vocabulary=texts.vocab,
            decoder=decoder,
            kv_cache=kv_cache,
            make_sampler=make_sampler,
            read_logprob=LogprobReader(model.vocab, decoder.n_vocab).read,
            n_prefill_chunk=n_prefill_chunk,
            drafter=drafter,
            encoder=encoder,
            media=media,
            loras=loras,
            row_cost=self._row_cost(model_info, owned),
            tick_shares=self._tick_shares(owned),
            n_threads_max=max(config.compute_threads),
            # Another number of threads would add up sums in another order.
            set_n_threads=None if config.deterministic else partial(self._set_n_threads, contexts),
        )
        self.preflight.passed()
        return loaded

    def _set_n_threads(
        self, contexts: Sequence[LlamaDecoder | LlamaTextEncoder | StepDrafter], n_threads: int
    ) -> None:
        """Set the largest number of compute threads."""
        n_single, n_batch = (min(n_threads, n) for n in self._config.compute_threads)
        for context in contexts:
            context.set_n_threads(n_single, n_batch)

    def _open_media(self, model: Model, owned: ExitStack) -> LlamaMediaEncoder | None:
        """Return the encoder of images and audio, if the configuration names one."""
        path = self._config.mmproj
        if path is None or not self._generates:
            return None
        media = LlamaMediaEncoder(model, str(path), self._config)
        owned.callback(media.close)
        return media

    def _open_decoder(
        self,
        model: Model,
        info: EmbeddingInfo | None,
        loras: LlamaLoras,
        media: LlamaMediaEncoder | None,
        owned: ExitStack,
    ) -> tuple[LlamaDecoder | NoDecoder, KVCache]:
        """Return the decoder and its empty cache; stand-ins for both if only embeddings are wanted."""
        config = self._config
        if self._generates:
            check_architecture(model)
            try:
                decoder = self._make_decoder(
                    model, loras, 0 if media is None else media.n_whole_max
                )
            except NotGenerativeError as error:
                if info is None:
                    hint = "with a pooling (mean, cls or last) it may compute embeddings"
                    raise NotGenerativeError(f"{error}; {hint}") from None
            else:
                decoder.files = self._mapped
                owned.callback(decoder.close)
                return decoder, _empty_cache(decoder, model)
        elif info is None:
            limit = "mean, cls or last: the model's file names none"
            raise InvalidArgumentError("pooling", config.pooling, limit)
        return NoDecoder(model.vocab.n_tokens), KVCache(
            n_cells=1, n_seq_ids=1, n_ctx_seq=info.n_tokens_max, kv_unified=True
        )

    def _make_decoder(self, model: Model, loras: LlamaLoras, n_whole_max: int) -> LlamaDecoder:
        """Return the decoder that the configuration asks for.

        Parameters
        ----------
        n_whole_max : int
            Rows of a media chunk that are decoded at once: llama.cpp aborts if they are more than `n_ubatch`.
        """
        config, files = self._config, model_files(self._config)
        config = replace(
            config,
            n_ubatch=max(config.n_ubatch, n_whole_max),
            n_batch=max(config.n_batch, n_whole_max),
        )
        if not config.deterministic:
            is_off = not config.tiled_matmul and any(map(has_tiled_matrix, files))
            off = without_tiles(True, ("tiled_matmul", False)) if is_off else nullcontext()
            with off, ExitStack() as stack:
                make = partial(make_context, model, config, measure_states(model, config))
                decoder = LlamaDecoder(make, config.n_batch, loras)
                stack.callback(decoder.close)
                if is_off:  # llama.cpp reads the variable in the first decode
                    decoder.warm_up((N_TILED_ROWS,))
                stack.pop_all()
                return decoder
        has_tiled = any(map(has_tiled_matrix, files))
        with without_tiles(has_tiled, ("deterministic", True)):
            make = partial(make_context, model, config, measure_states(model, config))
            needs_padding = any(map(has_plain_matrix, files))
            return deterministic_decoder(
                model, make, config.n_batch, loras, needs_padding=needs_padding
            )

    def check_memory(self, loaded: EngineConfig | None) -> None:
        """See `Backend`."""
        check_model_file(str(self._config.model_path))
        check_fits(self._config, loaded)
        check_placement(self._config)

    def check_lora(self, path: Path) -> None:
        """See `Backend`."""
        config = self._config
        check_lora_file(path, config.model_path)
        if config.rpc:  # a server has one client, this engine: no other process can try the file
            return
        # Without GPUs: their memory is taken by this engine.
        on_cpu = replace(config, n_gpu_layers=0, devices=(), tensor_split=(), override_tensor=())
        self._lora_preflight = Preflight(replace(on_cpu, lora=((str(path), 1.0),)))
        if self._is_stopping:  # checked last: `stop` may have been called meanwhile
            self._lora_preflight.stop()
        self._lora_preflight.run()
        self._lora_preflight.passed()

    def open_vocabularies(
        self, files: Sequence[FileContent], owned: ExitStack
    ) -> tuple[EngineVocabulary, EngineVocabulary]:
        """Load the vocabularies of the model and of the embedding model, without their weights.

        Parameters
        ----------
        files : sequence of FileContent
            Files that the engine's process has loaded.
        """
        config, self._files = self._config, tuple(files)
        with loading(self._files):
            own = owned.enter_context(Model(config.model_path, vocab_only=True)).vocab
            if config.embedding_model is None:
                return own, own
            texts = owned.enter_context(Model(config.embedding_model, vocab_only=True))
            return own, texts.vocab

    def _open_texts_model(self, model: Model, owned: ExitStack) -> Model:
        """Return the model that computes texts: the model itself, or the embedding model."""
        path = self._config.embedding_model
        return model if path is None else self._open_model(Path(path), owned, is_main=False)

    def _open_model(self, path: Path, owned: ExitStack, *, is_main: bool = True) -> Model:
        """Open a model file with the settings of the configuration."""
        config = self._config
        return owned.enter_context(
            Model(
                path,
                n_gpu_layers=config.n_gpu_layers,
                placement=placement_of(config, is_main=is_main),
                load_mode=config.used_load_mode,
                check_tensors=config.check_tensors,
                use_extra_bufts=config.repack and not (is_main and config.deterministic),
                load_mtp=is_main and config.uses_mtp,
                on_progress=lambda _: not self._is_stopping,
            )
        )

    def _drafter(
        self, model: Model, decoder: LlamaDecoder, kv_cache: KVCache, owned: ExitStack
    ) -> Drafter | None:
        """Return the source of drafts, if any; no model drafts if memory cannot remove wrong drafts."""
        config, path = self._config, self._config.draft_model
        if config.speculation in (AUTO, NGRAM):
            return NgramDrafter()
        if config.speculation is None:
            return None
        if not (kv_cache.has_pos_min or kv_cache.n_rollback):
            logger.warning("there are no drafts: the model's memory cannot remove wrong ones")
            return None
        if path is None:
            context = make_mtp_context(model, config, kv_cache.n_cells, kv_cache.n_seq_ids)
            decoder.follower = follower = MtpDrafter(context)
            owned.callback(follower.close)
            follower.warm_up()
            return follower
        drafts = self._open_model(
            path, owned, is_main=False
        )  # no answer depends on its last digits
        n_cells, n_seq_ids = kv_cache.n_cells, kv_cache.n_seq_ids
        make = partial(make_draft_context, drafts, config, n_cells, n_seq_ids)
        drafter = DraftModel(drafts, model.vocab, make)
        owned.callback(drafter.close)
        return drafter

    def _row_cost(self, model: ModelInfo, owned: ExitStack) -> RowCost:
        """Return the costs that earlier engines measured here, to be saved again at the end; empty without speculation."""
        if self._config.speculation is None:
            return RowCost()
        key = table_key(model.fingerprint, self._config)
        row_cost = RowCost(load_table(key))
        owned.callback(lambda: save_table(key, row_cost.table))
        return row_cost

    def _tick_shares(self, owned: ExitStack) -> TickShares:
        """Return a new count of the shapes of ticks, which is saved at the end."""
        shares, config = TickShares(), self._config
        owned.callback(lambda: save_shares(config, shares.seconds))
        return shares

    def stop(self) -> None:
        """See `Backend`."""
        self._is_stopping = True
        self.preflight.stop()
        self._lora_preflight.stop()
        if self._tuner is not None:
            self._tuner.stop()
        self._stop_computing()

    def _stop_computing(self) -> None:
        for computing in list(self._computing):
            computing.stop()

    def constraints(
        self, check_serving: CheckServing, workers: WorkerThreads
    ) -> ConstraintCompiler:
        """See `Backend`."""
        return ConstraintCompiler(
            check_serving,
            workers,
            n_threads=self._config.compute_threads[1],
            names_only=self._config.process,
            files=lambda: self._files,
        )

    def compile(self, vocabulary: EngineVocabulary, named: NamedConstraint) -> CompiledConstraint:
        """Compile a constraint that the process which serves requests has tried before.  One thread only."""
        if self._guidance is None:
            self._guidance = Guidance(vocabulary, self._config.compute_threads[1])
        return self._guidance.compile(*named)


class LlamaEmbedderBackend(LlamaBackend):
    """Loads a model for embeddings alone, without a context that generates."""

    _generates = False


def _empty_cache(decoder: LlamaDecoder, model: Model) -> KVCache:
    context = decoder.context
    is_windowed = bool(model.n_swa) and not model.has_state
    return KVCache(
        n_cells=context.n_ctx,
        n_seq_ids=context.n_seq_max,
        n_ctx_seq=decoder.n_ctx_seq,
        kv_unified=context.kv_unified,
        has_pos_min=not (model.has_state or model.n_swa),
        is_windowed=is_windowed,
        n_rollback=N_DRAFT_ROWS if is_windowed else context.n_rollback,
        can_copy=can_copy(model),
    )


# Keys of `general.sampling.*` in a model's file: the field of `SamplingParams` and its type.
SAMPLING_KEYS: dict[str, tuple[str, type[int] | type[float]]] = {
    "top_k": ("top_k", int),
    "top_p": ("top_p", float),
    "min_p": ("min_p", float),
    "xtc_probability": ("xtc_probability", float),
    "xtc_threshold": ("xtc_threshold", float),
    "temp": ("temperature", float),
    "penalty_last_n": ("repeat_last_n", int),
    "penalty_repeat": ("repeat_penalty", float),
    "mirostat": ("mirostat", int),
    "mirostat_tau": ("mirostat_tau", float),
    "mirostat_eta": ("mirostat_eta", float),
}


def sampling_of(metadata_value: Callable[[str], str | None]) -> SamplingOptions:
    """Return the sampling fields that a model's file sets; an unusable value is logged and left out."""
    found: dict[str, Any] = {}
    for key, (field, kind) in SAMPLING_KEYS.items():
        text = metadata_value(f"general.sampling.{key}")
        if text is None:
            continue
        try:
            value = kind(float(text))
            SamplingParams(**{field: value})  # type: ignore[arg-type]
        except (ValueError, OverflowError):  # an InvalidRequestError is one
            logger.warning("the model's file says general.sampling.%s = %.40s: left out", key, text)
            continue
        found[field] = value
    return cast(SamplingOptions, found)


def _rank_template(model: Model) -> str | None:
    """Return the prompt template of a reranker: the file's own, or a built-in one for Qwen3; otherwise None."""
    if (template := model.chat_template(RANK_TEMPLATE)) is not None:
        return template
    is_qwen3 = model.metadata_value("general.architecture") == "qwen3"
    is_reranker = "rerank" in (model.metadata_value("general.name") or "").lower()
    return QWEN3_TEMPLATE if is_qwen3 and is_reranker else None


def _contents(config: EngineConfig) -> tuple[FileContent, ...]:
    """Return the contents of all files that an engine loads when it starts, those of `model_files` first."""
    files = [*model_files(config), *other_files(config)]
    for file in files:
        check_model_file(str(file))
    return tuple(map(content_of, dict.fromkeys(files)))


def planned_contexts(config: EngineConfig) -> list[PlannedContext]:
    """Return the contexts that count for an estimate of memory, each with its file.

    A draft model always counts.  It is not used if the model's memory cannot remove wrong drafts.
    """

    def n_seq_ids(model: Model, config: EngineConfig) -> int:
        return config.kv_layout(model.n_ctx_train, state_bytes=0, is_windowed=False).n_seq_ids

    def draft(model: Model, config: EngineConfig) -> Context:
        return make_draft_context(model, config, config.n_cells, n_seq_ids(model, config))

    def mtp(model: Model, config: EngineConfig) -> MtpContext:
        return make_mtp_context(model, config, config.n_cells, n_seq_ids(model, config))

    def texts(model: Model, config: EngineConfig) -> EmbeddingContext:
        # All poolings take the same memory; "rank" needs a classifier that many files lack.
        return make_embedding_context(model, config, "mean", 1)

    planned = [PlannedContext(config.model_path, make_context, generates=True)]
    if config.draft_model is not None:
        planned.append(PlannedContext(Path(config.draft_model), draft))
    if config.uses_mtp:
        planned.append(PlannedContext(config.model_path, mtp))
    if config.embedding_model is not None or config.pooling is not None:
        path = Path(config.embedding_model or config.model_path)
        planned.append(PlannedContext(path, texts))
    return planned


def _adapters(config: EngineConfig) -> set[str]:
    return {str(Path(lora.path).absolute()) for lora in config.loras}


def _model_info(
    model: Model,
    kv_cache: KVCache,
    config: EngineConfig,
    template: str | None,
    files: tuple[FileContent, ...],
) -> ModelInfo:
    contents = {file.path: file for file in files}
    own = [contents[str(Path(file).absolute())] for file in dict.fromkeys(model_files(config))]
    adapters = _adapters(config)
    mmproj = config.mmproj
    projector = [] if mmproj is None else [contents[str(Path(mmproj).absolute())]]
    return ModelInfo(
        path=model.path,
        name=model.metadata_value("general.name") or "",
        description=model.description,
        architecture=model.metadata_value("general.architecture") or "",
        n_params=model.n_params,
        size_bytes=model.size_bytes,
        n_vocab=model.vocab.n_tokens,
        n_ctx_train=model.n_ctx_train,
        n_embd=model.n_embd,
        n_layer=model.n_layer,
        chat_template=model.chat_template() if template is None else template,
        tool_chat_template=model.chat_template("tool_use") if template is None else None,
        n_ctx=kv_cache.n_ctx_seq,
        sampling=sampling_of(model.metadata_value) if config.model_sampling else {},
        fingerprint=fingerprint([*own, *projector], config, kv_cache),
        state_key=state_key(
            [file for file in [*own, *projector] if file.path not in adapters], config, kv_cache
        ),
        fim=_fim_tokens(model.vocab),
        bos_token=None if model.vocab.bos is None else model.vocab.text(model.vocab.bos),
        eos_token=None if model.vocab.eos is None else model.vocab.text(model.vocab.eos),
        files=files,
    )


def _fim_tokens(vocab: Vocabulary) -> FimTokens | None:
    prefix, suffix, middle = vocab.fim_pre, vocab.fim_suf, vocab.fim_mid
    if prefix is None or suffix is None or middle is None:
        return None
    begin = vocab.bos if vocab.adds_bos else None
    return FimTokens(prefix, suffix, middle, begin, vocab.fim_rep, vocab.fim_sep)
