"""Translate fields of other servers' clients to cllm's.  Pure.

Values of other servers that mean "no limit" or "none", such as `max_tokens: -1`, are translated too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cllm.server.bodies.fields import NO_LIMIT

MIN_TEMPERATURE = 1e-3  # a smaller one means 0: clients send it in place of 0
LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict")
SWITCHES = ("think", "enable_thinking")


def translated(data: Mapping[str, Any], known: Mapping[str, object]) -> dict[str, Any]:
    """Return a copy of a body, with the names and neutral values of other servers translated.

    Parameters
    ----------
    data : mapping
        Body of a request.
    known : mapping
        Fields of the route's body.  Its own `reasoning` and `thinking` are not translated.
    """
    said = dict(data)
    for name in LENGTHS:
        if _is_number(said.get(name)) and said[name] == -1:
            said[name] = NO_LIMIT
    stop = said.get("stop")
    if isinstance(stop, str) and not stop:
        del said["stop"]
    elif isinstance(stop, list):
        said["stop"] = [text for text in stop if text not in ("", None)]
    if _is_number(said.get("temperature")) and 0 < said["temperature"] < MIN_TEMPERATURE:
        said["temperature"] = 0
    if said.get("best_of") == (said.get("n") or 1):
        said.pop("best_of", None)
    if said.get("grammar") == "":
        del said["grammar"]
    if said.get("top_logprobs") == 0 and not said.get("logprobs"):
        del said["top_logprobs"]
    bias = said.get("logit_bias")
    if isinstance(bias, list) and all(isinstance(b, list) and len(b) == 2 for b in bias):
        said["logit_bias"] = {str(token): value for token, value in bias}
    if said.get("reasoning_effort") in ("", "default"):
        del said["reasoning_effort"]
    if "truncate" in known and isinstance(said.get("truncation"), bool):  # Jina's name
        said.setdefault("truncate", said.pop("truncation"))
    if "reasoning_effort" in known:
        _thinking(said, known)
    return said


def _thinking(said: dict[str, Any], known: Mapping[str, object]) -> None:
    """Translate OpenRouter's `reasoning`, z.ai's `thinking`, and the fields of `SWITCHES`."""
    reasoning = None if "reasoning" in known else said.get("reasoning")
    if isinstance(reasoning, Mapping) and reasoning.keys() <= {"effort", "enabled", "exclude"}:
        del said["reasoning"]
        effort = "none" if reasoning.get("enabled") is False else reasoning.get("effort")
        if effort is not None:
            said.setdefault("reasoning_effort", effort)
    switch: object = None
    thinking = None if "thinking" in known else said.get("thinking")
    if isinstance(thinking, Mapping) and thinking.get("type") in ("enabled", "disabled"):
        del said["thinking"]
        switch = thinking["type"] == "enabled"
    for name in SWITCHES:
        if isinstance(said.get(name), bool):
            switch = said.pop(name)
    if switch is not None:
        kwargs = said.get("chat_template_kwargs") or {}
        if isinstance(kwargs, Mapping):
            said["chat_template_kwargs"] = {"enable_thinking": switch, **kwargs}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
