"""Cases of hazard table 1.5: samplers, and the candidates that they are applied to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cllm.bindings import Candidates, SamplerChain
from tests.bindings.hazard_case import INF, INT_MAX, N_VOCAB, NAN, Scene, Topic, candidates

TOPIC = Topic()
refuse = TOPIC.refuse
# Loop variable of this file; some of its values have a wrong type.
bad_token: Any


# --- Samplers --------------------------------------------------------------------------------
def add_sampler(scene: Scene, method: str, arguments: dict[str, Any]) -> None:
    scene.context  # noqa: B018
    getattr(scene.chain, method)(**arguments)


def sample_with(scene: Scene, build: Callable[[SamplerChain], object]) -> int:
    build(scene.chain)
    scene.decode()
    return scene.chain.sample(scene.context, 3)


def apply_to(scene: Scene, build: Callable[[SamplerChain], object], data: Candidates) -> int:
    build(scene.chain)
    return scene.chain.apply(data)


refuse("sampling with an empty chain", sample_with, "chain is ()", build=lambda c: c)
refuse("applying an empty chain", apply_to, "chain is ()", build=lambda c: c, data=candidates(1, 2))
for what, build in (
    ("sampling", sample_with),
    ("applying", lambda s, build: apply_to(s, build, candidates(1, 2))),
):
    refuse(
        f"{what} a chain that selects nothing", build, "chain is ('top-k',)",
        "ends with a selecting sampler", build=lambda c: c.add_top_k(3),
    )  # fmt: skip
refuse(
    "a sampler after the one that selects", lambda s: s.chain.add_greedy().add_top_k(3),
    "sampler is 'greedy', must be the last",
)  # fmt: skip
refuse(
    "a second sampler that selects", lambda s: s.chain.add_dist(1).add_greedy(),
    "sampler is 'dist', must be the last",
)  # fmt: skip
refuse("no candidates", lambda _: candidates(), "candidates is 0, must be at least one")
refuse(
    "candidates with fewer logits than ids", lambda _: candidates(1.0, ids=[1, 2]),
    "candidates is 2, must be",
)  # fmt: skip
for bad_logits in ((NAN, NAN), (-INF, -INF), (INF, 1.0), (1.0, NAN)):
    refuse(
        f"applying to the logits {bad_logits}", apply_to, "logits is ", "finite",
        build=lambda c: c.add_dist(1), data=candidates(*bad_logits),
    )  # fmt: skip
for bad_id in (-1, N_VOCAB, 10**9):
    refuse(
        f"applying greedy to candidate {bad_id}", apply_to, f"is {bad_id}, must be 0 to 259",
        build=lambda c: c.add_greedy(), data=candidates(1.0, 0.0, ids=[bad_id, 5]),
    )  # fmt: skip
refuse(
    "a bias that bans every token", apply_to, "chain is", "finite",
    build=lambda c: c.add_logit_bias({0: -INF, 1: -INF}).add_dist(1), data=candidates(1.0, 2.0),
)  # fmt: skip
for large_bias in (1e37, 3e38):
    refuse(
        f"a bias of {large_bias:g}, which a temperature can make infinite", add_sampler,
        f"logit_bias is {large_bias}, must be", method="add_logit_bias",
        arguments={"biases": {5: large_bias}},
    )  # fmt: skip

GOOD: dict[str, dict[str, Any]] = {
    "add_dist": {"seed": 1},
    "add_mirostat": {"seed": 1, "tau": 5.0, "eta": 0.1, "m": 100},
    "add_mirostat_v2": {"seed": 1, "tau": 5.0, "eta": 0.1},
    "add_adaptive_p": {"target": 0.5, "decay": 0.9, "seed": 1},
    "add_top_k": {"k": 40},
    "add_top_p": {"p": 0.9, "min_keep": 1},
    "add_min_p": {"p": 0.1, "min_keep": 1},
    "add_typical": {"p": 0.9, "min_keep": 1},
    "add_temp": {"temperature": 0.8},
    "add_temp_ext": {"temperature": 0.8, "delta": 0.3, "exponent": 1.0},
    "add_xtc": {"probability": 0.5, "threshold": 0.1, "min_keep": 1, "seed": 1},
    "add_top_n_sigma": {"n": 1.0},
    "add_penalties": {"last_n": 64, "repeat": 1.1, "frequency": 0.1, "presence": 0.1},
    "add_dry": {"multiplier": 0.8, "base": 1.75, "allowed_length": 2, "last_n": 64},
}
BAD_PER_TYPE: dict[type, tuple[Any, ...]] = {
    float: (NAN, INF, 1e39, "1"),
    int: (-2, 2**32, 1.5, "1"),
}
for method, good in GOOD.items():
    for parameter, good_value in good.items():
        for bad in BAD_PER_TYPE[type(good_value)]:
            refuse(
                f"{method}({parameter}={bad!r})", add_sampler, f" is {bad!r}, must be",
                method=method, arguments={**good, parameter: bad},
            )  # fmt: skip
for method, arguments, message in (
    ("add_dist", {"seed": 2**32 - 1}, f"seed is {2**32 - 1}, must be 0 to {2**32 - 2}"),
    ("add_temp", {"temperature": 1e-40}, "temperature is 1e-40, must be 0 or at least 0.001"),
    ("add_temp", {"temperature": -0.5}, "temperature is -0.5, must be 0 to"),
    ("add_top_p", {"p": 1.5}, "top_p is 1.5, must be 0 to 1"),
    ("add_min_p", {"p": -0.1}, "min_p is -0.1, must be 0 to 1"),
    ("add_top_p", {"p": 0.5, "min_keep": -1}, "min_keep is -1, must be 0 to 260"),
    ("add_top_p", {"p": 0.5, "min_keep": 261}, "min_keep is 261, must be 0 to 260"),
    ("add_mirostat", {**GOOD["add_mirostat"], "m": 0}, "mirostat_m is 0, must be 1 to 260"),
    ("add_mirostat", {**GOOD["add_mirostat"], "m": 261}, "mirostat_m is 261, must be 1 to 260"),
    ("add_adaptive_p", {**GOOD["add_adaptive_p"], "decay": 1.0}, "adaptive_decay is 1.0, must be"),
    ("add_penalties", {"last_n": INT_MAX}, f"repeat_last_n is {INT_MAX}, must be 0 to"),
    ("add_penalties", {"last_n": 5 * 10**8}, f"repeat_last_n is {5 * 10**8}, must be 0 to"),
    ("add_penalties", {"last_n": -1}, "repeat_last_n is -1, must be 0 to"),
    ("add_penalties", {"last_n": 64, "repeat": 0.0}, "repeat_penalty is 0.0, must be 0.001 to"),
    ("add_dry", {**GOOD["add_dry"], "last_n": INT_MAX}, f"dry_penalty_last_n is {INT_MAX}, must"),
    ("add_dry", {**GOOD["add_dry"], "sequence_breakers": ["a"] * 257},
     "dry_sequence_breakers is 257, must be 0 to 64"),
    ("add_dry", {**GOOD["add_dry"], "sequence_breakers": ["a\0"]}, "is 'a\\x00', must be"),
    ("add_dry", {**GOOD["add_dry"], "sequence_breakers": ["\ud800"]}, "is '\\ud800', must be"),
    ("add_dry", {**GOOD["add_dry"], "sequence_breakers": [b"a"]}, "is b'a', must be a str"),
    ("add_logit_bias", {"biases": {-1: 1.0}}, "token is -1, must be 0 to 259"),
    ("add_logit_bias", {"biases": {5: 1.0, N_VOCAB: 1.0}}, "token is 260, must be 0 to 259"),
    ("add_logit_bias", {"biases": {10**9: 1.0}}, f"token is {10**9}, must be 0 to 259"),
    ("add_logit_bias", {"biases": {"5": 1.0}}, "token is '5', must be an integer"),
    ("add_logit_bias", {"biases": {5: NAN}}, "logit_bias is nan, must be finite"),
    ("add_logit_bias", {"biases": {5: INF}}, "logit_bias is inf, must be finite"),
    ("add_logit_bias", {"biases": {5: "1"}}, "logit_bias is '1', must be a number"),
):  # fmt: skip
    refuse(
        f"{method}({str(arguments)[1:120]})", add_sampler, message, method=method,
        arguments=arguments,
    )  # fmt: skip
for bad_token in (-1, N_VOCAB, 10**9, 1.0):
    refuse(
        f"a chain's accept of token {bad_token!r}",
        lambda s, token: s.chain.add_penalties(64, 1.1).add_greedy().accept(token),
        f"token is {bad_token!r}, must be", token=bad_token,
    )  # fmt: skip


CASES = TOPIC.cases
