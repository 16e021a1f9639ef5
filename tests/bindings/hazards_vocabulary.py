"""Cases of hazard table 1.7: token ids, texts, and names of templates and metadata."""

from __future__ import annotations

from typing import Any

from tests.bindings.hazard_case import N_VOCAB, Topic

TOPIC = Topic()
refuse = TOPIC.refuse
# Loop variable of this file; some of its values have a wrong type.
bad_token: Any


for bad_token in (-1, N_VOCAB, 10**9, 2**32, 1.0):
    for method in (
        "token_to_piece", "piece", "is_eog", "text", "score", "attributes",
        "check_token",
    ):  # fmt: skip
        refuse(
            f"{method} of token {bad_token!r}",
            lambda s, method, token: getattr(s.vocab, method)(token),
            f"token is {bad_token!r}, must be", method=method, token=bad_token,
        )  # fmt: skip
    refuse(
        f"detokenizing token {bad_token!r}", lambda s, token: s.vocab.detokenize([5, token]),
        f"token is {bad_token!r}, must be", token=bad_token,
    )  # fmt: skip
refuse(
    "a text of more than 1 MiB", lambda s: s.vocab.tokenize("a" * (2**20 + 1)),
    f"{2**20 + 1} bytes", f"at most {2**20} bytes",
)  # fmt: skip
refuse(
    "a text of more than 1 MiB in UTF-8 only", lambda s: s.vocab.tokenize("é" * (2**19 + 1)),
    f"{2**20 + 2} bytes", f"at most {2**20} bytes",
)  # fmt: skip
for bad_text_, message in (
    ("a\ud800b", "text is '\\ud800', must be"),
    (b"bytes", "text is b'bytes', must be a str"),
    (b"\xf4\x90\x80\x80", "text is b'\\xf4\\x90\\x80\\x80', must be a str"),
    (None, "text is None, must be a str"),
    (5, "text is 5, must be a str"),
):
    refuse(
        f"tokenizing {bad_text_!r}", lambda s, text: s.vocab.tokenize(text), message, text=bad_text_
    )


refuse("a template name with NUL", lambda s: s.model.chat_template("a\0"), "name is 'a\\x00', must")
refuse("a metadata key with NUL", lambda s: s.model.metadata_value("a\0"), "key is 'a\\x00', must")

CASES = TOPIC.cases
