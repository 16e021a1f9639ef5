"""Time limits of the processes that render templates and try constraints."""

from __future__ import annotations

from cllm.engine.chat import chat_template
from cllm.engine.constraints import trial


def raise_time_limits() -> None:
    """Allow 9 s, so that a busy machine refuses nothing; an alarm ends either process after 10 s.

    Call it in every process whose engines must refuse no template and no constraint.
    """
    chat_template.RENDER_S = trial.TRIAL_S = 9.0
