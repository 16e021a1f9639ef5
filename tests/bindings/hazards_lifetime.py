"""Cases of hazard table 1.9: adapters, and handles that are closed, in use, forked, or in another thread."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cllm.bindings import Context, LoraAdapter, Model, SamplerChain
from cllm.errors import (
    ClosedError,
    InUseError,
    ModelLoadError,
    WrongProcessError,
    WrongThreadError,
)
from tests.bindings.hazard_case import (
    INF,
    NAN,
    SMALL,
    TIME_LIMIT_S,
    Scene,
    Topic,
    candidates,
)
from tools import make_model

TOPIC = Topic()
refuse = TOPIC.refuse
# Loop variable of this file; some of its values have a wrong type.
scale: Any


# --- LoRA ------------------------------------------------------------------------------------
def load_lora(scene: Scene, path: Path | str) -> None:
    scene.context  # noqa: B018
    LoraAdapter(scene.model, path)


def apply_lora(scene: Scene, scale: Any) -> None:
    scene.context.set_loras([(LoraAdapter(scene.model, scene.lora()), scale)])


def close_applied_lora(scene: Scene) -> None:
    adapter = LoraAdapter(scene.model, scene.lora())
    scene.context.set_loras([(adapter, 1.0)])
    adapter.close()
    scene.decode()


def apply_foreign_lora(scene: Scene) -> None:
    """Apply an adapter to another model, whose matrices have the same names and other shapes."""
    adapter = LoraAdapter(scene.model, scene.lora())
    with Context(Model(make_model.ensure("tiny-hybrid", "F16")), **SMALL) as context:
        context.set_loras([(adapter, 1.0)])
        scene.decode(context=context)


def apply_closed_lora(scene: Scene) -> None:
    adapter = LoraAdapter(scene.model, scene.lora())
    adapter.close()
    scene.context.set_loras([(adapter, 1.0)])


refuse("a missing LoRA", load_lora, "/none.gguf", error=ModelLoadError, path="/tmp/none.gguf")
refuse(
    "a LoRA file of garbage", lambda s: load_lora(s, s.file("l.gguf", b"GGUF" + b"\7" * 999)),
    "/l.gguf", error=ModelLoadError,
)  # fmt: skip
refuse("a model file as LoRA", lambda s: load_lora(s, s.path), "tiny-llama", error=ModelLoadError)
for scale in (NAN, INF, 1e39, "1"):
    refuse(f"a LoRA scale of {scale!r}", apply_lora, f"scale is {scale!r}, must be", scale=scale)
refuse("closing a LoRA that is applied", close_applied_lora, "LoraAdapter", error=InUseError)
refuse("a LoRA of another model", apply_foreign_lora, "adapter")
refuse("a LoRA that is closed", apply_closed_lora, "LoraAdapter is closed", error=ClosedError)


# --- Lifetime --------------------------------------------------------------------------------
def in_thread(action: Callable[[], object]) -> None:
    """Run `action` on another thread and raise here what it raises there."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            action()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def in_fork(action: Callable[[], object]) -> None:
    """Run `action` in a forked child; raise `WrongProcessError` with the text of the child's error."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(TIME_LIMIT_S)
        try:
            action()
            answer = ""
        except WrongProcessError as error:
            answer = str(error)
        except BaseException as error:
            answer = repr(error)
        os.write(writer, answer.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        answer = stream.read()
    status = os.waitpid(pid, 0)[1]
    assert status == 0, f"the forked child ended with status {status}"
    assert answer, "nothing was raised"
    raise WrongProcessError(answer)


CONTEXT_CALLS: dict[str, Callable[[Scene, Context], object]] = {
    "decode": lambda s, c: c.decode(s.batch),
    "seq_rm": lambda _, c: c.seq_rm(0),
    "seq_cp": lambda _, c: c.seq_cp(0, 1),
    "seq_add": lambda _, c: c.seq_add(0, 0, None, 1),
    "seq_pos_min": lambda _, c: c.seq_pos_min(0),
    "seq_pos_max": lambda _, c: c.seq_pos_max(0),
    "can_shift": lambda _, c: c.can_shift,
    "memory_clear": lambda _, c: c.memory_clear(),
    "state_seq_get_data": lambda _, c: c.state_seq_get_data(0),
    "state_seq_set_data": lambda _, c: c.state_seq_set_data(b"x", 1, n_positions=1),
    "set_loras": lambda _, c: c.set_loras([]),
    "sample": lambda s, c: s.chain.sample(c, 3),
    "logits": lambda s, _: s.__dict__["logits"].rows,
}


def call_context(
    scene: Scene, call: str, run: Callable[[Callable[[], object]], None], close: bool = False
) -> None:
    context = scene.context
    scene.chain.add_greedy()
    scene.__dict__["logits"] = scene.decode()
    if close:
        context.close()
        context.close()  # twice is allowed
    run(lambda: CONTEXT_CALLS[call](scene, context))


def here(action: Callable[[], object]) -> None:
    action()


for call in CONTEXT_CALLS:
    refuse(
        f"{call} of a closed context", call_context, "Context is closed", error=ClosedError,
        call=call, run=here, close=True,
    )  # fmt: skip
    refuse(
        f"{call} from another thread", call_context, "belongs to thread", "may not be called",
        error=WrongThreadError, call=call, run=in_thread,
    )  # fmt: skip
    refuse(
        f"{call} in a forked child", call_context, "before a fork", error=WrongProcessError,
        call=call, run=in_fork,
    )  # fmt: skip


def closed_model(scene: Scene) -> Model:
    scene.model.close()
    scene.model.close()  # twice is allowed
    return scene.model


MODEL_CALLS: dict[str, Callable[[Scene], object]] = {
    "a context": lambda s: s.new_context(),
    "a chain": lambda s: SamplerChain(s.model.vocab),
    "a LoRA": lambda s: LoraAdapter(s.model, s.path),
    "the description": lambda s: s.model.description,
    "the metadata": lambda s: s.model.metadata,
    "a metadata value": lambda s: s.model.metadata_value("general.name"),
    "the chat template": lambda s: s.model.chat_template(),
    "tokenize": lambda s: s.model.vocab.tokenize("a"),
    "detokenize": lambda s: s.model.vocab.detokenize([5]),
    "token_to_piece": lambda s: s.model.vocab.token_to_piece(5),
    "is_eog": lambda s: s.model.vocab.is_eog(5),
    "all ends": lambda s: s.model.vocab.ends,
    "all pieces": lambda s: s.model.vocab.pieces(),
    "the names of control tokens": lambda s: s.model.vocab.control_names(),
    "the text of a token": lambda s: s.model.vocab.text(5),
    "the score of a token": lambda s: s.model.vocab.score(5),
    "the attributes of a token": lambda s: s.model.vocab.attributes(5),
}


def call_model(
    scene: Scene, call: str, run: Callable[[Callable[[], object]], None], close: bool = False
) -> None:
    if close:
        closed_model(scene)
    else:
        scene.model  # noqa: B018
    run(lambda: MODEL_CALLS[call](scene))


for call in MODEL_CALLS:
    refuse(
        f"{call} of a closed model", call_model, "Model is closed", error=ClosedError, call=call,
        run=here, close=True,
    )  # fmt: skip
    refuse(
        f"{call} of a model in a forked child", call_model, "before a fork",
        error=WrongProcessError, call=call, run=in_fork,
    )  # fmt: skip
for call in ("a context", "the description", "the metadata", "the chat template"):
    refuse(
        f"{call} of a model from another thread", call_model, "belongs to thread",
        error=WrongThreadError, call=call, run=in_thread,
    )  # fmt: skip

CHAIN_CALLS: dict[str, Callable[[Scene], object]] = {
    "add_greedy": lambda s: SamplerChain.add_greedy(s.chain),
    "add_dry": lambda s: s.chain.add_dry(0.8, 1.75, 2, 64),
    "apply": lambda s: s.chain.apply(candidates(1.0, 2.0)),
    "accept": lambda s: s.chain.accept(5),
    "sample": lambda s: s.chain.sample(s.context, 3),
    "reset": lambda s: s.chain.reset(),
    "names": lambda s: s.chain.names,
}


def call_chain(
    scene: Scene, call: str, run: Callable[[Callable[[], object]], None], close: bool = False
) -> None:
    if call not in ("add_greedy", "add_dry"):
        scene.chain.add_greedy()
    scene.decode()
    scene.chain.names  # noqa: B018
    if close:
        scene.chain.close()
        scene.chain.close()
    run(lambda: CHAIN_CALLS[call](scene))


for call in CHAIN_CALLS:
    refuse(
        f"{call} of a closed chain", call_chain, "SamplerChain is closed", error=ClosedError,
        call=call, run=here, close=True,
    )  # fmt: skip
    refuse(
        f"{call} of a chain from another thread", call_chain, "belongs to thread",
        error=WrongThreadError, call=call, run=in_thread,
    )  # fmt: skip


def close_in_use(scene: Scene, child: Callable[[Scene], object]) -> None:
    kept = child(scene)
    try:
        scene.model.close()
    finally:
        assert kept is not None
        assert not scene.model.closed


for name, child in (
    ("context", lambda s: s.context),
    ("chain", lambda s: s.chain),
    ("LoRA", lambda s: LoraAdapter(s.model, s.lora())),
):
    refuse(
        f"closing a model with an open {name}", close_in_use, "before 1 objects of it", error=InUseError,
        child=child,
    )  # fmt: skip
for name, child in (("context", lambda s: s.context), ("chain", lambda s: s.chain)):
    refuse(
        f"closing a {name} from another thread", lambda s, child: in_thread(child(s).close),
        "belongs to thread", error=WrongThreadError, child=child,
    )  # fmt: skip
    refuse(
        f"closing a {name} in a forked child", lambda s, child: in_fork(child(s).close),
        "before a fork", error=WrongProcessError, child=child,
    )  # fmt: skip

CASES = TOPIC.cases
