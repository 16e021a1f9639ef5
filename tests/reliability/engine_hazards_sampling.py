"""Cases of hazard table 1.5 for the engine: numbers out of range, biases, stops, names of samplers."""

from __future__ import annotations

from typing import Any

from cllm import Completion, SamplingParams
from cllm.engine.sampling_params import (
    MAX_BIASES,
    MAX_STOP_BYTES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
)
from cllm.sampling_limits import FLOAT_RANGES, INTEGER_RANGES, MAX_BREAKERS
from cllm.settings import settings_of
from tests.reliability.engine_hazard_case import (
    INF,
    N_VOCAB,
    NAN,
    QUESTION,
    Scene,
    Topic,
    WrongAnswerError,
    short,
)

TOPIC = Topic()
# Loop variables of this file; some of their values have a wrong type.
number: Any
value: Any
wrong: Any
token: Any
# Rows of the hazard table for fields out of range; other fields have another row.
ROWS = {
    "repeat_last_n": "1.5 windows of INT_MAX tokens",
    "dry_penalty_last_n": "1.5 windows of INT_MAX tokens",
    "dry_allowed_length": "1.5 windows of INT_MAX tokens",
}
NOT_FINITE = "1.5 NaN or infinite parameters"


async def ask(scene: Scene, **sampling: Any) -> Completion:
    """Make a request with these parameters, a seed, and log probabilities."""
    return await scene.ask(**{"seed": 1, "logprobs": 3, **sampling})


async def make(_: Scene, **sampling: Any) -> SamplingParams:
    """Make only the parameters: they are checked when they are made."""
    return SamplingParams(**sampling)


# --- Numbers ---------------------------------------------------------------------------------
def refuse_number(
    field: str, value: Any, row: str, limit: str, *, in_full_only: bool = False
) -> None:
    """Add a case: a request with this value is refused with an error that names field and value."""
    TOPIC.refuse(
        f"{field} {short(value)}", ask, f"{field} is {value!r}, must be {limit}", row=row,
        in_full_only=in_full_only, **{field: value},
    )  # fmt: skip


for name, (low, high) in INTEGER_RANGES.items():
    row = ROWS.get(name, "1.5 integers out of range")
    for number in sorted({low - 1, -(2**31) - 1, high + 1, 2**63}):
        is_far = number not in (low - 1, high + 1)
        refuse_number(name, number, row, f"{low} to {high}", in_full_only=is_far)
    for wrong in (NAN, INF, "1", True, []):
        refuse_number(name, wrong, row, "an integer", in_full_only=wrong not in (NAN, "1"))
    if not settings_of(SamplingParams)[name].is_optional:
        refuse_number(name, None, row, "an integer", in_full_only=True)
for name, (lowest, highest) in FLOAT_RANGES.items():
    for value in (NAN, INF, -INF, 10**400):
        if value == 10**400:
            TOPIC.refuse(
                f"{name} 10**400", ask, f"{name} is 1000", "must be finite", row=NOT_FINITE,
                in_full_only=True, **{name: value},
            )  # fmt: skip
        else:
            refuse_number(name, value, NOT_FINITE, "finite", in_full_only=value == -INF)
    for value in (lowest - 1.0, 1e308):
        refuse_number(name, value, "1.5 numbers out of range", f"{lowest:g} to {highest:g}")
    for wrong in ("1", True, None, []):
        refuse_number(
            name, wrong, "1.5 numbers out of range", "a number", in_full_only=wrong != "1"
        )
for tiny in (1e-40, 5e-324, 0.0009):
    TOPIC.refuse(
        f"temperature {tiny}", ask, f"temperature is {tiny}, must be 0 or at least 0.001",
        row=NOT_FINITE, temperature=tiny,
    )  # fmt: skip
TOPIC.refuse(
    "repeat_penalty 0", ask, "repeat_penalty is 0, must be 0.001 to 1000", row=NOT_FINITE,
    repeat_penalty=0,
)  # fmt: skip
TOPIC.refuse(
    "SamplingParams made of NaN", make, "temperature is nan, must be finite", row=NOT_FINITE,
    temperature=NAN,
)  # fmt: skip
for wrong in ("yes", 1, None):
    TOPIC.refuse(
        f"ignore_eos {wrong!r}", ask, f"ignore_eos is {wrong!r}, must be True or False",
        row="1.5 integers out of range", ignore_eos=wrong,
    )  # fmt: skip

# --- Numbers that are legal ------------------------------------------------------------------
EXTREMES = "1.5 legal extremes are finite"
for name, (low, high) in INTEGER_RANGES.items():
    for number in (low, high):
        TOPIC.accept(
            f"{name} {number}", ask, row=ROWS.get(name, EXTREMES), in_full_only=number == low,
            **{"max_tokens": None if name == "min_tokens" else 4, name: number},
        )  # fmt: skip
# Other parameters that a parameter needs to have an effect.
TOGETHER: dict[str, dict[str, Any]] = {
    "xtc_threshold": {"xtc_probability": 1.0},
    "dynatemp_exponent": {"dynatemp_range": 0.5},
    "dry_base": {"dry_multiplier": 1.0},
    "dry_multiplier": {"dry_base": 100.0},
    "mirostat_tau": {"mirostat": 2},
    "mirostat_eta": {"mirostat": 1},
}
for name, (lowest, highest) in FLOAT_RANGES.items():
    for value in (lowest, highest):
        TOPIC.accept(
            f"{name} {value:g}", ask, row=EXTREMES, in_full_only=value == lowest,
            **{name: value, **TOGETHER.get(name, {})},
        )  # fmt: skip
TOPIC.accept("temperature 0.001", ask, row=EXTREMES, temperature=0.001)
TOPIC.accept("all penalties at once", ask, row=EXTREMES, repeat_penalty=1e3, repeat_last_n=-1,
             presence_penalty=100, frequency_penalty=100, dry_multiplier=100, dry_base=100)  # fmt: skip
TOPIC.accept("no samplers at all", ask, row="1.5 chain without a selecting sampler", samplers=())
TOPIC.accept(
    "samplers that leave one candidate", ask, row="1.5 apply on an empty array", top_k=1,
    top_p=0.0, min_p=1.0, typical_p=0.0, top_n_sigma=1e-30, xtc_probability=1.0, xtc_threshold=0.0,
)  # fmt: skip

# --- Biases ----------------------------------------------------------------------------------
BIAS = "1.5 logit_bias out of range"
for token in (N_VOCAB, 2**31 - 1):
    TOPIC.refuse(
        f"a bias for token {token}", ask, f"logit_bias is {token}, must be token ids 0 to 259",
        row=BIAS, logit_bias={token: 1.0},
    )  # fmt: skip
for token in (-1, 2**31, 2**63):
    TOPIC.refuse(
        f"a bias for token {token}", ask, f"logit_bias is {token}, must be 0 to {2**31 - 1}",
        row=BIAS, logit_bias={token: 1.0},
    )  # fmt: skip
for key in ("50", 50.0, True, None, (1,)):
    TOPIC.refuse(
        f"a bias for token {key!r}", ask, f"logit_bias is {key!r}, must be an integer", row=BIAS,
        logit_bias={key: 1.0},
    )  # fmt: skip
for bias, limit in (
    (NAN, "finite"), (INF, "finite"), (10**400, "finite"), (1e37, "-10000 to 10000"),
    (-10001, "-10000 to 10000"), ("1", "a number"), (True, "a number"), (None, "a number"),
):  # fmt: skip
    TOPIC.refuse(
        f"a bias of {short(bias)}", ask, "logit_bias is ", f"must be {limit}",
        row=NOT_FINITE if limit == "finite" else BIAS, logit_bias={50: bias},
    )  # fmt: skip
TOPIC.refuse(
    "too many biases", ask, f"logit_bias is {MAX_BIASES + 1}, must be at most {MAX_BIASES} tokens",
    row=BIAS, logit_bias=dict.fromkeys(range(MAX_BIASES + 1), 1.0),
)  # fmt: skip
for not_a_mapping in ([(50, 1.0)], "50", 50, None):
    TOPIC.refuse(
        f"biases that are {not_a_mapping!r}", ask, f"logit_bias is {not_a_mapping!r}, must be a map",
        row=BIAS, logit_bias=not_a_mapping,
    )  # fmt: skip


async def ban_all_but(scene: Scene, *allowed: int, **sampling: Any) -> Completion:
    """Make a request whose biases ban all tokens but these."""
    bans = {token: -INF for token in range(N_VOCAB) if token not in allowed}
    return await ask(scene, logit_bias=bans, max_tokens=3, **sampling)


async def ban_all_but_one(scene: Scene) -> Completion:
    completion = await ban_all_but(scene, 65)
    if completion.text != "AAA":
        raise WrongAnswerError(f"only A was left, and it wrote {completion.text!r}")
    return completion


TOPIC.accept("a ban of all tokens but one", ban_all_but_one, row="1.5 logits all NaN or -inf")
TOPIC.accept(
    "a ban of all tokens but one, drawn by mirostat", lambda s: ban_all_but(s, 65, mirostat=1),
    row="1.5 apply on an empty array",
)  # fmt: skip

# --- Stops -----------------------------------------------------------------------------------
STOPS = "1.5 stop lists"
TOPIC.row = STOPS
TOPIC.refuse("a stop string of nothing", ask, "stop is '', must be a string that", stop="")
TOPIC.refuse("a stop that is a number", ask, "stop is 5, must be a string or", stop=5)
TOPIC.refuse("a stop of bytes", ask, "stop is b'a', must be a string or", stop=b"a")
TOPIC.refuse("stops that are numbers", ask, "stop is 5, must be a string that", stop=["a", 5])
TOPIC.refuse(
    "too many stops", ask, f"stop is {MAX_STOP_STRINGS + 1}, must be at most {MAX_STOP_STRINGS}",
    stop=["a"] * (MAX_STOP_STRINGS + 1),
)  # fmt: skip
TOPIC.refuse(
    "a stop that is too long", ask, "stop is 'aaa", f"at most {MAX_STOP_BYTES} bytes",
    stop="a" * (MAX_STOP_BYTES + 1),
)  # fmt: skip
for token, limit in (
    (-1, f"0 to {2**31 - 1}"), (2**31, f"0 to {2**31 - 1}"), (N_VOCAB, "token ids 0 to 259"),
    (1.0, "an integer"), (True, "an integer"), ("5", "an integer"), (None, "an integer"),
):  # fmt: skip
    TOPIC.refuse(
        f"a stop token {token!r}", ask, f"stop_token_ids is {token!r}, must be {limit}",
        stop_token_ids=[token],
    )  # fmt: skip
for ids in (5, "5", b"5"):
    TOPIC.refuse(
        f"stop tokens that are {ids!r}", ask, f"stop_token_ids is {ids!r}, must be a sequence",
        stop_token_ids=ids,
    )  # fmt: skip
TOPIC.refuse(
    "too many stop tokens", ask, f"is {MAX_STOP_TOKENS + 1}, must be at most {MAX_STOP_TOKENS}",
    stop_token_ids=[5] * (MAX_STOP_TOKENS + 1),
)  # fmt: skip
TOPIC.refuse(
    "a stop that is a lone surrogate", ask, "must be text without lone surrogates", stop="\ud800"
)
TOPIC.accept("a stop with NUL", ask, stop="a\0b")
TOPIC.accept("all stops that there may be", ask, stop=["x" * MAX_STOP_BYTES] * MAX_STOP_STRINGS)
TOPIC.accept("every token a stop token", ask, stop_token_ids=range(N_VOCAB))

# --- Names -----------------------------------------------------------------------------------
TOPIC.row = "1.5 sequence breakers and names of samplers"
for breaker in ("", "a\0", b"a", 5, "a" * 41):
    TOPIC.refuse(
        f"a sequence breaker {short(breaker)}", ask,
        f"dry_sequence_breakers is {breaker!r}, must be 1 to 40 characters without NUL",
        dry_multiplier=1.0, dry_sequence_breakers=[breaker],
    )  # fmt: skip
TOPIC.refuse(
    "a sequence breaker of a lone surrogate", ask, "must be text without lone surrogates",
    dry_multiplier=1.0, dry_sequence_breakers=["\ud800"],
)  # fmt: skip
TOPIC.refuse(
    "too many sequence breakers", ask, f"is {MAX_BREAKERS + 1}, must be at most {MAX_BREAKERS}",
    dry_multiplier=1.0, dry_sequence_breakers=["a"] * (MAX_BREAKERS + 1),
)  # fmt: skip
TOPIC.refuse("an unknown sampler", ask, "samplers is 'greedy', must be one of", samplers=["greedy"])
TOPIC.refuse(
    "a sampler twice", ask, "must be each at most once", samplers=["top_k", "top_k"],
    row="1.5 the same sampler twice",
)  # fmt: skip
TOPIC.refuse("samplers that are a text", ask, "samplers is 'top_k', must be", samplers="top_k")
TOPIC.refuse(
    "an unknown field", ask, "tempreature is 1, must be called 'temperature'", tempreature=1
)
TOPIC.refuse(
    "parameters and fields at once",
    lambda s: s.engine.generate(QUESTION, SamplingParams(), top_k=1), "cannot be combined",
    error=TypeError,
)  # fmt: skip
TOPIC.refuse(
    "parameters that are none", lambda s: s.engine.generate(QUESTION, {"top_k": 1}),
    "params is {'top_k': 1}, must be a SamplingParams",
)  # fmt: skip

CASES = TOPIC.cases
